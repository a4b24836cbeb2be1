"""The verdict on each advertised device, from the conditions that touch it.

Invariants: a device is Healthy iff its GPU was probed and no condition that flips touches it. What nothing
changed for is the same object as before, so that one GPU's fault costs nothing for the shares of the others.
"""

from collections.abc import Iterable, Mapping

from agent.core.health.conditions import Conditions
from agent.core.health.inventory import AdvertisedDevice, AdvertisedDevices
from agent.model.health import Condition, Health
from agent.model.ids import GpuUuid, Placement, ResourceName
from agent.model.snapshot import Device

Devices = Mapping[ResourceName, tuple[Device, ...]]


def verdicts(
    advertised: AdvertisedDevices,
    conditions: Conditions,
    probed: frozenset[GpuUuid],
    *,
    known: Devices | None = None,
    stale: frozenset[GpuUuid] = frozenset(),
) -> Devices:
    """Return every advertised device with its health and the conditions that touch it.

    ``known`` are the devices of resources whose advertised devices did not change; of them only those
    on the ``stale`` GPUs are evaluated again.
    """
    evaluator = _Evaluator(conditions, probed)
    before = known or {}
    return {
        name: _evaluated(evaluator, listed, before.get(name), stale) for name, listed in advertised.items()
    }


def _evaluated(
    evaluator: "_Evaluator",
    listed: tuple[AdvertisedDevice, ...],
    known: tuple[Device, ...] | None,
    stale: frozenset[GpuUuid],
) -> tuple[Device, ...]:
    if known is None:
        return tuple(evaluator.device(each) for each in listed)
    if not any(each.placement.gpu in stale for each in listed):
        return known
    return tuple(
        [
            evaluator.device(each) if each.placement.gpu in stale else device
            for each, device in zip(listed, known, strict=True)
        ]
    )


def differing(
    old: Conditions, new: Conditions, probed_before: frozenset[GpuUuid], probed: frozenset[GpuUuid]
) -> frozenset[GpuUuid]:
    """Return the GPUs to evaluate again."""
    changed = probed ^ probed_before
    if old is new:
        return changed
    return changed.union(key.placement.gpu for key in {**old, **new} if old.get(key) is not new.get(key))


class _Evaluator:
    """Evaluates devices; the replicas of one device once."""

    def __init__(self, conditions: Conditions, probed: frozenset[GpuUuid]) -> None:
        self._probed = probed
        self._by_gpu: dict[GpuUuid, list[Condition]] = {}
        for condition in conditions.values():
            self._by_gpu.setdefault(condition.placement.gpu, []).append(condition)
        for active in self._by_gpu.values():
            active.sort(key=lambda condition: (not condition.flips, condition.since_ns))
        self._newest: tuple[Placement, Health, tuple[Condition, ...]] | None = None

    def device(self, device: AdvertisedDevice) -> Device:
        """Return an advertised device with its verdict."""
        if self._newest is None or self._newest[0] is not device.placement:
            self._newest = self._verdict_on(device.placement)
        _, health, reasons = self._newest
        return Device(
            id=device.id,
            uuid=device.uuid,
            placement=device.placement,
            index=device.index,
            replica=device.replica,
            numa_node=device.numa_node,
            health=health,
            reasons=reasons,
            mig_index=device.mig_index,
        )

    def _verdict_on(self, place: Placement) -> tuple[Placement, Health, tuple[Condition, ...]]:
        active = self._by_gpu.get(place.gpu, ())
        reasons = tuple(condition for condition in active if condition.placement.overlaps(place))
        return place, health_of(reasons, probed=place.gpu in self._probed), reasons


def health_of(reasons: Iterable[Condition], *, probed: bool) -> Health:
    """Return the verdict: unhealthy if any condition flips, unknown if never probed."""
    if any(condition.flips for condition in reasons):
        return Health.UNHEALTHY
    return Health.HEALTHY if probed else Health.UNKNOWN
