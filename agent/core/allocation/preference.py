"""Chooses the preferred devices for a container, of those that are free for the kubelet.

Whole GPUs are chosen by their connections; while those are unknown, by their NUMA nodes. Shares and MIG
devices are chosen by how much of their GPUs is in use, by the operator's policy.
Invariants: answers come from the request and the snapshot alone, no driver call is made. The values
do not depend on the order of the request, which the kubelet shuffles. An unhealthy device is preferred
only where it has to be, since Allocate would reject it; one that is no longer known does not block the
others.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Final

from agent.core.allocation.grouping import best_group
from agent.core.allocation.requests import Rejection, container_order, shown
from agent.model.health import Health
from agent.model.ids import ALL
from agent.model.policy import Policy, SharedAllocationPolicy
from agent.model.snapshot import Device, Resource, Snapshot
from agent.model.topology import UNKNOWN_LINK, Topology


def prefer(
    snapshot: Snapshot, resource: Resource, available: Sequence[str], must_include: Sequence[str], size: int
) -> tuple[str, ...] | Rejection:
    """Return ``size`` of the ``available`` ids: all of ``must_include``, then what goes best with them."""
    wanted = frozenset(available)
    free = sorted((device for device in resource.devices if device.id in wanted), key=container_order)
    required = _required(resource, free, must_include, size)
    if isinstance(required, Rejection):
        return required
    held = frozenset(must_include)
    others = [device for device in free if device.id not in held]
    choice = [device for device in others if device.health is Health.HEALTHY]
    forced = required
    if len(required) + len(choice) < size:
        forced = required + choice
        choice = [device for device in others if device.health is not Health.HEALTHY]
    if all(device.replica is None and device.placement.gi == ALL for device in free):
        picked = _whole_gpus(snapshot.topology, forced, choice, size)
    else:
        picked = _shares(snapshot.policy, resource, free, forced, choice, size)
    rest = sorted((*forced[len(required) :], *picked), key=container_order)
    return tuple(device.id for device in (*required, *rest))


def _required(
    resource: Resource, free: Sequence[Device], must_include: Sequence[str], size: int
) -> list[Device] | Rejection:
    """Return the devices that must be included, or why ``size`` cannot be reached with them."""
    by_id: dict[str, Device] = {device.id: device for device in free}
    wanted = dict.fromkeys(must_include)
    missing = [one for one in wanted if one not in by_id]
    if missing:
        return Rejection(
            "unknown", f"{shown(missing[0])} must be included but is not among the available devices"
        )
    if not len(wanted) <= size <= len(free):
        return Rejection(
            "unsatisfiable",
            f"not enough available devices to satisfy allocation: {size} of {resource.name} were asked"
            f" for, {len(free)} are available and {len(wanted)} must be included",
        )
    return [by_id[one] for one in wanted]


# Whole GPUs


def _whole_gpus(
    topology: Topology, required: Sequence[Device], others: Sequence[Device], size: int
) -> list[Device]:
    gpus = [*required, *others]
    pairs = ((one.placement.gpu, other.placement.gpu) for one, other in combinations(gpus, 2))
    if all(topology.between(*pair) == UNKNOWN_LINK for pair in pairs):
        return _near_by_numa(required, others, size)
    gpus.sort(key=container_order)
    chosen = {gpu.id for gpu in required}
    places = [place for place, gpu in enumerate(gpus) if gpu.id in chosen]
    uuids = [gpu.placement.gpu for gpu in gpus]
    scores = [[row[uuid] for uuid in uuids] for row in map(topology.scores.__getitem__, uuids)]
    group = best_group(scores, size, places)
    return [gpus[place] for place in group if place not in places]


def _near_by_numa(required: Sequence[Device], others: Sequence[Device], size: int) -> list[Device]:
    """Pick from the NUMA node that most of the choice is on, then from the one with most GPUs left."""
    left = list(others)
    chosen_on = Counter(device.numa_node for device in required)
    left_on = Counter(device.numa_node for device in left)
    picked: list[Device] = []
    while len(required) + len(picked) < size:
        best = min(left, key=lambda gpu: (-chosen_on[gpu.numa_node], -left_on[gpu.numa_node]))
        left.remove(best)
        picked.append(best)
        chosen_on[best.numa_node] += 1
        left_on[best.numa_node] -= 1
    return picked


# Shares and MIG devices


class _InUse:
    """How much is in use, and how much of that is of this request, by GPU or by MIG device."""

    def __init__(self, key: Callable[[Device], str], resource: Resource, free: Sequence[Device]) -> None:
        self._key = key
        self._used = Counter(key(device) for device in resource.devices)
        self._used.subtract(key(device) for device in free)
        self._picked: Counter[str] = Counter()

    def pick(self, device: Device) -> None:
        """Count a device that was picked."""
        self._used[self._key(device)] += 1
        self._picked[self._key(device)] += 1

    def of(self, device: Device) -> tuple[int, int]:
        """Return how many are in use where the device is, and how many of these were picked."""
        return self._used[self._key(device)], self._picked[self._key(device)]


_Rank = tuple[int, int]

_RANKS: Final[Mapping[SharedAllocationPolicy, Callable[[int, int], _Rank]]] = {
    "distributed": lambda used, picked: (used, picked),
    "packed": lambda used, picked: (-used, picked),
    "spread": lambda used, picked: (picked, used),
}
"""Which GPU is next. Source: NVIDIA/k8s-device-plugin:internal/rm/allocate.go."""


def _shares(
    policy: Policy,
    resource: Resource,
    free: Sequence[Device],
    required: Sequence[Device],
    others: Sequence[Device],
    size: int,
) -> list[Device]:
    # Where a container gets each card once, only other cards fit.
    rank = _RANKS["spread" if policy.sharing.distinct_cards else policy.shared_allocation]
    on_gpu = _InUse(lambda device: device.placement.gpu, resource, free)
    on_device = _InUse(lambda device: device.uuid, resource, free)
    chosen_on: Counter[int | None] = Counter()
    queues: dict[str, list[Device]] = {}
    for device in reversed(others):
        queues.setdefault(device.uuid, []).append(device)

    def pick(device: Device) -> None:
        on_gpu.pick(device)
        on_device.pick(device)
        chosen_on[device.numa_node] += 1

    def rank_of(uuid: str) -> tuple[_Rank, _Rank, int, tuple[int, ...]]:
        first = queues[uuid][-1]
        ranks = rank(*on_gpu.of(first)), rank(*on_device.of(first))
        return *ranks, -chosen_on[first.numa_node], container_order(first)

    for device in required:
        pick(device)
    picked: list[Device] = []
    while len(required) + len(picked) < size:
        best = min(queues, key=rank_of)
        picked.append(queues[best].pop())
        pick(picked[-1])
        if not queues[best]:
            del queues[best]
    return picked
