"""Where MIG devices go on a GPU: instance ids, memory slices and UUIDs, as the driver would choose them."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.simulation.presets.spec import MigDeviceSpec, MigProfileSpec


class PresetError(ValueError):
    """A preset or an inline node that cannot be built; the message names the key."""


@dataclass(frozen=True, slots=True)
class PlacedMigDevice:
    """A MIG device with everything decided. `profile` is the row among the GPU's profiles."""

    profile: int
    gi: int
    ci: int
    slices: int
    start: int
    compute_start: int
    uuid: str


@dataclass(slots=True)
class _GpuInstance:
    profile: int
    start: int
    compute_slices: int = 0


def gpu_uuid(slot: int) -> str:
    """Name the GPU of a slot: the same node always has the same UUIDs."""
    return f"GPU-00000000-0000-4000-8000-{slot:012x}"


def mig_uuid(slot: int, gi: int, ci: int) -> str:
    """Name the MIG device at a place: a device that moves is another device."""
    return f"MIG-00000000-0000-5000-8000-{slot:04x}{gi:04x}{ci:04x}"


def place_mig_devices(
    slot: int, profiles: Sequence[MigProfileSpec], devices: Sequence[MigDeviceSpec]
) -> tuple[PlacedMigDevice, ...]:
    """Place the devices in order. Raises PresetError for an unknown profile or when there is no room left."""
    names = {profile.name: row for row, profile in enumerate(profiles)}
    instances: dict[int, _GpuInstance] = {}
    placed: list[PlacedMigDevice] = []
    for number, device in enumerate(devices):
        where = f"mig.devices[{number}]"
        row = names.get(device.profile)
        if row is None:
            raise PresetError(
                f"{where}.profile: {device.profile!r} is not offered, choose from {sorted(names)}"
            )
        gi = _free_gi(profiles[row], instances) if device.gi is None else device.gi
        if gi not in instances:
            instances[gi] = _GpuInstance(row, _free_start(where, profiles, row, instances))
        placed.append(_place(where, slot, profiles, row, gi, device, instances[gi]))
    _refuse_twins(placed)
    return tuple(placed)


def _place(
    where: str,
    slot: int,
    profiles: Sequence[MigProfileSpec],
    row: int,
    gi: int,
    device: MigDeviceSpec,
    instance: _GpuInstance,
) -> PlacedMigDevice:
    whole = profiles[row].slices
    slices = whole if device.slices is None else device.slices
    if instance.profile != row:
        raise PresetError(f"{where}.gi: {gi} is a {profiles[instance.profile].name} already")
    if instance.compute_slices + slices > whole:
        raise PresetError(f"{where}.slices: GPU instance {gi} has {whole} compute slices in all")
    start = instance.compute_slices
    instance.compute_slices += slices
    return PlacedMigDevice(
        profile=row,
        gi=gi,
        ci=device.ci,
        slices=slices,
        start=instance.start,
        compute_start=start,
        uuid=device.uuid or mig_uuid(slot, gi, device.ci),
    )


def _free_gi(profile: MigProfileSpec, instances: dict[int, _GpuInstance]) -> int:
    gi = profile.first_gi
    while gi in instances:
        gi += 1
    return gi


def _free_start(
    where: str, profiles: Sequence[MigProfileSpec], row: int, instances: dict[int, _GpuInstance]
) -> int:
    taken = {
        at + offset
        for at, size in ((other.start, profiles[other.profile].size) for other in instances.values())
        for offset in range(size)
    }
    alike = sum(other.profile == row for other in instances.values())
    profile = profiles[row]
    for start in profile.starts:
        if alike < profile.instances and taken.isdisjoint(range(start, start + profile.size)):
            return start
    raise PresetError(f"{where}.profile: no room left on the GPU for another {profile.name}")


def _refuse_twins(placed: Sequence[PlacedMigDevice]) -> None:
    for number, device in enumerate(placed):
        for earlier in placed[:number]:
            if (earlier.gi, earlier.ci) == (device.gi, device.ci):
                raise PresetError(f"mig.devices[{number}]: gi {device.gi} ci {device.ci} is there twice")
            if earlier.uuid == device.uuid:
                raise PresetError(f"mig.devices[{number}].uuid: {device.uuid} is there twice")
