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
    uuid: str


def gpu_uuid(position: int) -> str:
    """Name the GPU of a position: the same node always has the same UUIDs."""
    return f"GPU-00000000-0000-4000-8000-{position:012x}"


def mig_uuid(position: int, gi: int, ci: int) -> str:
    """Name the MIG device at a place: a device that moves is another device."""
    return f"MIG-00000000-0000-5000-8000-{position:04x}{gi:04x}{ci:04x}"


def place_mig_devices(
    position: int, profiles: Sequence[MigProfileSpec], devices: Sequence[MigDeviceSpec]
) -> tuple[PlacedMigDevice, ...]:
    """Place the devices. Raises PresetError for an unknown profile or when they do not fit on one GPU."""
    instances: dict[int, int] = {}
    chosen = [_instance(number, profiles, device, instances) for number, device in enumerate(devices)]
    starts = _starts([profiles[row] for row in instances.values()])
    if starts is None:
        wanted = ", ".join(profiles[row].name for row in instances.values())
        raise PresetError(f"mig.devices: no room on one GPU for {wanted}")
    places = dict(zip(instances, starts, strict=True))
    used = dict.fromkeys(instances, 0)
    placed: list[PlacedMigDevice] = []
    for number, (device, gi) in enumerate(zip(devices, chosen, strict=True)):
        profile = profiles[instances[gi]]
        slices = profile.slices if device.slices is None else device.slices
        if used[gi] + slices > profile.slices:
            raise PresetError(f"mig.devices[{number}]: GPU instance {gi} has {profile.slices} compute slices")
        placed.append(
            PlacedMigDevice(
                profile=instances[gi],
                gi=gi,
                ci=device.ci,
                slices=slices,
                start=places[gi],
                uuid=device.uuid or mig_uuid(position, gi, device.ci),
            )
        )
        used[gi] += slices
    _reject_duplicates(placed)
    return tuple(placed)


def _instance(
    number: int, profiles: Sequence[MigProfileSpec], device: MigDeviceSpec, instances: dict[int, int]
) -> int:
    """Choose the GPU instance of a device, and note its profile's row if it is a new one."""
    rows = {profile.name: row for row, profile in enumerate(profiles)}
    row = rows.get(device.profile)
    if row is None:
        supported = ", ".join(rows) or "none"
        raise PresetError(
            f"mig.devices[{number}].profile: {device.profile!r} is not supported, choose from {supported}"
        )
    gi = device.gi
    if gi is None:
        gi = profiles[row].first_gi
        while gi in instances:
            gi += 1
    if instances.setdefault(gi, row) != row:
        raise PresetError(f"mig.devices[{number}].gi: {gi} is a {profiles[instances[gi]].name} already")
    return gi


def _starts(wanted: Sequence[MigProfileSpec]) -> list[int] | None:
    """Find memory slices for all of them, in the order of the profiles' own preference."""
    if any(wanted.count(profile) > profile.instances for profile in wanted):
        return None
    return _fit(wanted, frozenset())


def _fit(wanted: Sequence[MigProfileSpec], occupied: frozenset[int]) -> list[int] | None:
    if not wanted:
        return []
    first = wanted[0]
    for start in first.starts:
        slices = frozenset(range(start, start + first.size))
        if occupied.isdisjoint(slices) and (rest := _fit(wanted[1:], occupied | slices)) is not None:
            return [start, *rest]
    return None


def _reject_duplicates(placed: Sequence[PlacedMigDevice]) -> None:
    for number, device in enumerate(placed):
        for earlier in placed[:number]:
            if (earlier.gi, earlier.ci) == (device.gi, device.ci):
                raise PresetError(f"mig.devices[{number}]: gi {device.gi} ci {device.ci} is there twice")
            if earlier.uuid == device.uuid:
                raise PresetError(f"mig.devices[{number}].uuid: {device.uuid} is there twice")
