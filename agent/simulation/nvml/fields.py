"""From a GPU's specification to the fields of node.h, by name."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from agent.simulation.presets import ClockSpec, GpuSpec, MigProfileSpec, PlacedMigDevice, place_mig_devices

Number = int | None
Numbers = Mapping[str, Number | Sequence[Number]]
Texts = Mapping[str, str | Sequence[str] | None]

GPU_IS_LOST = 15
FABRIC_COMPLETED = 3
FABRIC_HEALTHY = 1
# Bandwidth, routes and access recovery are "false" (2), the configuration is correct (1).
FABRIC_HEALTHY_MASK = 0b01_10_10_10_10

_MIB = 1 << 20
_BRANDS = {"tesla": 2, "nvidia": 14}
_ARCHITECTURES = {"volta": 5, "turing": 6, "ampere": 7, "ada": 8, "hopper": 9, "blackwell": 10}
_ADDRESSING_MODES = {"none": 0, "hmm": 1, "ats": 2}
_CLOCK_REASON_IDLE = 1
_PERFORMANCE_P0 = 0


def pci_address(bus_id: str) -> tuple[int, int, int]:
    """Split domain:bus:device.function into domain, bus and device."""
    domain, bus, rest = bus_id.split(":")
    return int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)


def gpu_texts(gpu: GpuSpec) -> Texts:
    """Give the text fields of a GPU."""
    return {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "serial": gpu.serial,
        "board_part_number": gpu.board_part_number,
        "vbios_version": gpu.vbios_version,
        "inforom_image": gpu.inforom.image,
        "cpu_affinity": gpu.cpu_affinity,
        "profile_name": [] if gpu.mig is None else [profile.name for profile in gpu.mig.profiles],
    }


def gpu_numbers(gpu: GpuSpec) -> Numbers:
    """Give the number fields of a healthy, idle GPU, without those of MIG devices."""
    return {**_identity(gpu), **_readings(gpu), **_features(gpu), **_links(gpu), **_profiles(gpu)}


def _identity(gpu: GpuSpec) -> Numbers:
    domain, bus, device = pci_address(gpu.pci_bus_id)
    return {
        "visible": 1,
        "gone_code": GPU_IS_LOST,
        "brand": _BRANDS[gpu.brand],
        "architecture": _ARCHITECTURES[gpu.architecture],
        "compute_capability": gpu.compute_capability,
        "minor": gpu.minor,
        "pci_domain": domain,
        "pci_bus": bus,
        "pci_device": device,
        "pci_device_id": gpu.pci_device_id,
        "pci_subsystem_id": gpu.pci_subsystem_id,
        "pcie_switch": gpu.pcie.switch,
        "host_bridge": gpu.pcie.host_bridge,
        "numa_node": gpu.numa_node,
        "addressing_mode": None if gpu.addressing_mode is None else _ADDRESSING_MODES[gpu.addressing_mode],
    }


def _readings(gpu: GpuSpec) -> Numbers:
    thermal = gpu.thermal
    return {
        "memory_total": gpu.memory_mib * _MIB,
        "memory_reserved": gpu.memory_reserved_mib * _MIB,
        "pcie_generation": gpu.pcie.generation,
        "pcie_width": gpu.pcie.width,
        "pcie_max_generation": gpu.pcie.generation,
        "pcie_max_width": gpu.pcie.width,
        "temperature": thermal.idle,
        "thresholds": [thermal.shutdown, thermal.slowdown, thermal.memory_max, thermal.gpu_max],
        "power_mw": gpu.power_idle_mw,
        "power_limit_mw": gpu.power_limit_mw,
        "performance_state": _PERFORMANCE_P0,
        "clocks": _clocks(gpu.clocks_idle),
        "max_clocks": _clocks(gpu.clocks_max),
        "clock_reasons": _CLOCK_REASON_IDLE,
    }


def _clocks(clocks: ClockSpec) -> list[int]:
    return [clocks.graphics, clocks.sm, clocks.memory, clocks.video]


def _features(gpu: GpuSpec) -> Numbers:
    fabric = gpu.fabric
    cluster = 0 if fabric is None else UUID(fabric.cluster).int
    return {
        "ecc_mode": 1 if gpu.ecc else None,
        "remapped_rows": [0 if gpu.row_remapping else None] * 4,
        "pages_pending": 0 if gpu.page_retirement else None,
        "event_types": gpu.event_types,
        "recovery_action": 0 if gpu.recovery_action else None,
        "fabric_state": None if fabric is None else FABRIC_COMPLETED,
        "fabric_clique": 0 if fabric is None else fabric.clique,
        "fabric_health_mask": FABRIC_HEALTHY_MASK,
        "fabric_health_summary": FABRIC_HEALTHY,
        "fabric_cluster": [cluster >> 64, cluster & (1 << 64) - 1],
    }


def _links(gpu: GpuSpec) -> Numbers:
    if gpu.nvlink is None:
        return {"links": 0}
    peers = [pci_address(bus_id) for bus_id in gpu.nvlink.ends()]
    return {
        "links": len(peers),
        "switch_device_id": gpu.nvlink.switch_device_id,
        "link_state": [1] * len(peers),
        "link_peer": [domain << 32 | bus << 16 | device for domain, bus, device in peers],
    }


def _profiles(gpu: GpuSpec) -> Numbers:
    if gpu.mig is None:
        return {"mig_mode": None, "mig_pending": None}
    profiles = gpu.mig.profiles
    return {
        "profiles": len(profiles),
        "profile_key": [profile.key for profile in profiles],
        "profile_id": [profile.id for profile in profiles],
        "profile_slices": [profile.slices for profile in profiles],
        "profile_instances": [profile.instances for profile in profiles],
        "profile_memory_mib": [profile.memory_mib for profile in profiles],
        "profile_sms": [profile.multiprocessors for profile in profiles],
        "profile_copy_engines": [profile.copy_engines for profile in profiles],
        "profile_decoders": [profile.decoders for profile in profiles],
        "profile_encoders": [profile.encoders for profile in profiles],
        "profile_jpegs": [profile.jpegs for profile in profiles],
        "profile_ofas": [profile.ofas for profile in profiles],
        "profile_starts": [sum(1 << start for start in profile.starts) for profile in profiles],
        "profile_size": [profile.size for profile in profiles],
        "profile_first_gi": [profile.first_gi for profile in profiles],
        "mig_maximum": max((profile.instances for profile in profiles), default=0),
    }


def mig_numbers(placed: Sequence[PlacedMigDevice], *, enabled: bool, generation: int) -> Numbers:
    """Give the number fields of a MIG configuration. A new generation makes the old handles invalid."""
    return {
        "mig_mode": int(enabled),
        "mig_pending": int(enabled),
        "mig_generation": generation,
        "mig_count": len(placed),
        "mig_profile": [device.profile for device in placed],
        "mig_gi": [device.gi for device in placed],
        "mig_ci": [device.ci for device in placed],
        "mig_slices": [device.slices for device in placed],
        "mig_start": [device.start for device in placed],
        "mig_memory_used": [0] * len(placed),
    }


def initial_mig(position: int, gpu: GpuSpec) -> tuple[PlacedMigDevice, ...]:
    """Place the MIG devices a GPU starts with."""
    return () if gpu.mig is None else place_mig_devices(position, gpu.mig.profiles, gpu.mig.devices)


def profile_from_fields(name: str, numbers: Mapping[str, int]) -> MigProfileSpec:
    """Rebuild a profile from its fields (see _profiles), for a state that outlived its specification."""
    starts = numbers["profile_starts"]
    return MigProfileSpec(
        name=name,
        key=numbers["profile_key"],
        id=numbers["profile_id"],
        slices=numbers["profile_slices"],
        instances=numbers["profile_instances"],
        memory_mib=numbers["profile_memory_mib"],
        multiprocessors=numbers["profile_sms"],
        copy_engines=numbers["profile_copy_engines"],
        starts=tuple(start for start in range(64) if starts >> start & 1),
        size=numbers["profile_size"],
        first_gi=numbers["profile_first_gi"],
    )


PLACEMENT_FIELDS = (
    "profile_starts",
    "profile_key",
    "profile_id",
    "profile_slices",
    "profile_instances",
    "profile_memory_mib",
    "profile_sms",
    "profile_copy_engines",
    "profile_size",
    "profile_first_gi",
)
