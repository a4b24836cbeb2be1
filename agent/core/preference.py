"""Which devices to prefer for a container, of those the kubelet says are free.

Invariants: answers come from the request and the snapshot alone, no driver call is made. The values
do not depend on the order of the request, which the kubelet shuffles.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from agent.core.allocation import Refusal, container_order, find_devices
from agent.model.ids import GpuUuid
from agent.model.snapshot import Device, Resource


def prefer(
    resource: Resource, available: Sequence[str], must_include: Sequence[str], size: int
) -> tuple[str, ...] | Refusal:
    """Return ``size`` of the ``available`` ids: all of ``must_include``, then the best neighbours.

    Fewest shares of one card first, then the NUMA node most of the choice is on, then as many
    neighbours as possible left on the node it takes from, then the stable order.
    """
    devices = find_devices(resource, available)
    if isinstance(devices, Refusal):
        return devices
    by_id: dict[str, Device] = {device.id: device for device in sorted(devices, key=container_order)}
    missing = [wanted for wanted in must_include if wanted not in by_id]
    if missing:
        return Refusal("unknown", f"{missing[0]} must be included but is not among the available devices")
    chosen = [by_id.pop(wanted) for wanted in dict.fromkeys(must_include)]
    if len(chosen) > size or len(chosen) + len(by_id) < size:
        return Refusal(
            "unsatisfiable",
            f"not enough available devices to satisfy allocation: {size} of {resource.name} were asked"
            f" for, {len(chosen) + len(by_id)} are available and {len(chosen)} must be included",
        )
    neighbours = _Neighbours(chosen, by_id.values())
    chosen += [neighbours.take() for _ in range(size - len(chosen))]
    return tuple(device.id for device in chosen)


class _Neighbours:
    """Free devices by card, ranked by what was chosen so far and what is still free.

    The devices of one card are alike, so a choice looks at each card once, however many shares it has.
    """

    def __init__(self, chosen: Iterable[Device], free: Iterable[Device]) -> None:
        """``free`` is in the stable order."""
        self._chosen_of_card = Counter(device.placement.gpu for device in chosen)
        self._chosen_on_node = Counter(device.numa_node for device in chosen)
        self._free_on_node: Counter[int | None] = Counter()
        self._cards: dict[GpuUuid, deque[Device]] = {}
        for device in free:
            self._free_on_node[device.numa_node] += 1
            self._cards.setdefault(device.placement.gpu, deque()).append(device)

    def take(self) -> Device:
        """Remove and return the best device."""
        card = min(self._cards, key=self._rank)
        device = self._cards[card].popleft()
        if not self._cards[card]:
            del self._cards[card]
        self._chosen_of_card[card] += 1
        self._chosen_on_node[device.numa_node] += 1
        self._free_on_node[device.numa_node] -= 1
        return device

    def _rank(self, card: GpuUuid) -> tuple[int, int, int, tuple[int, int, int, int]]:
        first = self._cards[card][0]
        return (
            self._chosen_of_card[card],
            -self._chosen_on_node[first.numa_node],
            -self._free_on_node[first.numa_node],
            container_order(first),
        )
