"""What a simulated GPU node consists of, as one reads it from a preset or a scenario.

*Invariants*
- A GPU keeps its position in `NodeSpec.gpus` for as long as the node lives; NVML's index may differ once GPUs
  are removed.
- `None` means the hardware does not have it, and NVML answers NOT_SUPPORTED.
- Records are closed: a misspelt key is an error, never a default.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_GPUS = 32
MAX_NVLINKS = 36
MAX_MIG_PROFILES = 16
MAX_MIG_DEVICES = 64

Number = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=79)]
PciBusId = Annotated[str, Meta(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.0$")]
Brand = Literal["tesla", "nvidia"]
Architecture = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell"]
AddressingMode = Literal["none", "hmm", "ats"]


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One record of a preset."""


class PcieSpec(Spec, frozen=True, kw_only=True):
    """The PCIe link, and what stands between two GPUs: equal numbers mean a shared part."""

    generation: Number
    width: Number = 16
    switch: Number | None = None
    host_bridge: Number | None = None


class ThermalSpec(Spec, frozen=True, kw_only=True):
    """Degrees Celsius: the reading when idle, and NVML's four thresholds."""

    idle: Number
    shutdown: Number
    slowdown: Number
    memory_max: Number | None = None
    gpu_max: Number


class ClockSpec(Spec, frozen=True, kw_only=True):
    """MHz of the four NVML domains."""

    graphics: Number
    sm: Number
    memory: Number
    video: Number


class InforomSpec(Spec, frozen=True, kw_only=True):
    """The version of the infoROM."""

    image: str | None = None


class NvLinkSpec(Spec, frozen=True, kw_only=True):
    """NVLinks in link order, by the PCI bus id of what is at the other end and how many lead there."""

    peers: dict[PciBusId, Annotated[int, Meta(ge=1, le=MAX_NVLINKS)]]
    switch_device_id: Number = 0

    def ends(self) -> tuple[str, ...]:
        """Name the peer of each link: its bus id, in link order."""
        return tuple(bus_id for bus_id, links in self.peers.items() for _ in range(links))


class FabricSpec(Spec, frozen=True, kw_only=True):
    """A GPU that registers with the fabric manager; the cluster is a UUID."""

    cluster: Annotated[str, Meta(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")] = (
        "00000000-0000-0000-0000-000000000000"
    )
    clique: Number = 0


class MigProfileSpec(Spec, frozen=True, kw_only=True):
    """One GPU instance profile: `key` is NVML_GPU_INSTANCE_PROFILE_*, `id` what nvidia-smi mig -lgip shows.

    `starts` and `size` are memory slices; `first_gi` is where the driver starts to number such instances.
    """

    name: Annotated[str, Meta(min_length=1, max_length=31)]
    key: Number
    id: Number
    slices: Annotated[int, Meta(ge=1, le=8)]
    instances: Annotated[int, Meta(ge=1, le=8)]
    memory_mib: Number
    multiprocessors: Number
    copy_engines: Number
    decoders: Number = 0
    encoders: Number = 0
    jpegs: Number = 0
    ofas: Number = 0
    starts: tuple[Annotated[int, Meta(ge=0, le=63)], ...]
    size: Annotated[int, Meta(ge=1, le=8)]
    first_gi: Number


class MigDeviceSpec(Spec, frozen=True, kw_only=True):
    """A MIG device to be: instance ids, placement and UUID follow from the profile where they are absent.

    `slices` below the profile's makes a compute instance smaller than its GPU instance.
    """

    profile: str
    gi: Annotated[int, Meta(ge=0, le=254)] | None = None
    ci: Annotated[int, Meta(ge=0, le=254)] = 0
    slices: Annotated[int, Meta(ge=1, le=8)] | None = None
    uuid: str | None = None


class MigSpec(Spec, frozen=True, kw_only=True):
    """A GPU that can do MIG: its profiles, whether MIG is on, and its devices."""

    profiles: Annotated[tuple[MigProfileSpec, ...], Meta(max_length=MAX_MIG_PROFILES)]
    enabled: bool = False
    devices: Annotated[tuple[MigDeviceSpec, ...], Meta(max_length=MAX_MIG_DEVICES)] = ()


class GpuSpec(Spec, frozen=True, kw_only=True):
    """One GPU. `uuid`, `serial` and `minor` follow from its position where a preset leaves them out."""

    uuid: Name
    serial: Annotated[str, Meta(max_length=29)] | None
    minor: Number
    name: Annotated[str, Meta(min_length=1, max_length=95)]
    brand: Brand
    architecture: Architecture
    compute_capability: tuple[Number, Number]
    memory_mib: Number
    memory_reserved_mib: Number
    pci_bus_id: PciBusId
    pci_device_id: Number
    pci_subsystem_id: Number
    numa_node: Number | None = None
    cpu_affinity: Annotated[str, Meta(max_length=95, pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")] | None = None
    addressing_mode: AddressingMode | None = None
    pcie: PcieSpec
    board_part_number: Name | None = None
    vbios_version: Annotated[str, Meta(max_length=31)] | None = None
    inforom: InforomSpec = InforomSpec()
    thermal: ThermalSpec
    power_idle_mw: Number
    power_limit_mw: Number
    clocks_idle: ClockSpec
    clocks_max: ClockSpec
    event_types: Number
    ecc: bool = True
    row_remapping: bool
    page_retirement: bool
    recovery_action: bool
    nvlink: NvLinkSpec | None = None
    fabric: FabricSpec | None = None
    mig: MigSpec | None = None


class NodeSpec(Spec, frozen=True, kw_only=True):
    """A node: what its driver reports, and its GPUs by position. `cuda_version` is 1000 major + 10 minor."""

    driver_version: Name
    nvml_version: Name
    cuda_version: Number
    gpus: Annotated[tuple[GpuSpec, ...], Meta(max_length=MAX_GPUS)]
