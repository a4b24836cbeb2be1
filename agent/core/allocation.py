"""What a container is given for the devices it was allocated, and which devices to prefer.

Invariants: answers come from the snapshot alone, no driver call and no file is touched. The values
do not depend on the order of the request, which the kubelet shuffles. A refusal is read by the
pod's owner, so it names the device and the next step.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agent.core.reasons import advice_of
from agent.model.health import Health
from agent.model.ids import GpuUuid
from agent.model.snapshot import Device, Resource, Snapshot

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node to be put into the container."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class ContainerAnswer:
    """What one container gets."""

    envs: Mapping[str, str]
    device_nodes: tuple[DeviceNode, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request cannot be met."""

    kind: Literal["unknown", "unhealthy", "unsatisfiable"]
    message: str


def allocate(snapshot: Snapshot, resource: Resource, ids: Sequence[str]) -> ContainerAnswer | Refusal:
    """Return what a container gets for the devices ``ids`` (duplicates are one)."""
    devices = _find(resource, ids)
    if isinstance(devices, Refusal):
        return devices
    for device in devices:
        if device.health is not Health.HEALTHY:
            return Refusal("unhealthy", _unhealthy_message(device))
    devices.sort(key=_container_order)
    uuids = dict.fromkeys(device.uuid for device in devices)
    return ContainerAnswer(
        envs={VISIBLE_DEVICES: ",".join(uuids)},
        device_nodes=_device_nodes(snapshot, devices) if snapshot.policy.injection.pass_device_specs else (),
    )


def prefer(
    resource: Resource, available: Sequence[str], must_include: Sequence[str], size: int
) -> tuple[str, ...] | Refusal:
    """Return ``size`` of the ``available`` ids: all of ``must_include``, then the best neighbours.

    Fewest shares of one card first, then the NUMA node most of the choice is on, then as many
    neighbours as possible left on the node it takes from, then the stable order.
    """
    devices = _find(resource, available)
    if isinstance(devices, Refusal):
        return devices
    by_id: dict[str, Device] = {device.id: device for device in sorted(devices, key=_container_order)}
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
            _container_order(first),
        )


def _find(resource: Resource, ids: Sequence[str]) -> list[Device] | Refusal:
    known: dict[str, Device] = {device.id: device for device in resource.devices}
    unknown = [wanted for wanted in dict.fromkeys(ids) if wanted not in known]
    if unknown:
        return Refusal(
            "unknown",
            f"invalid request: unknown device: {', '.join(_shown(name) for name in unknown[:4])} is not a"
            f" device of {resource.name} on this node; delete the pod so that it is allocated anew",
        )
    return [known[wanted] for wanted in dict.fromkeys(ids)]


def _shown(name: str) -> str:
    """Return an id from outside so that it can stand in a message: short, and printable."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= 64 else text[:61] + "..."


def _unhealthy_message(device: Device) -> str:
    if not device.reasons:
        return f"{device.id} has not been probed yet, so it is not known to work; try again in a moment"
    condition = device.reasons[0]
    return (
        f"{device.id} (GPU {device.index}) is unhealthy: {condition.reason}: {condition.message};"
        f" {advice_of(condition)}, or delete the pod so that it is allocated anew"
    )


def _container_order(device: Device) -> tuple[int, int, int, int]:
    placement = device.placement
    return (device.index, placement.gi, placement.ci, device.replica or 0)


def _device_nodes(snapshot: Snapshot, devices: Sequence[Device]) -> tuple[DeviceNode, ...]:
    minors = {view.gpu.uuid: view.gpu.minor for view in snapshot.gpus}
    own = (minors.get(device.placement.gpu) for device in devices)
    paths = (*snapshot.control_nodes, *(f"/dev/nvidia{minor}" for minor in own if minor is not None))
    root = snapshot.policy.injection.device_root.rstrip("/")
    return tuple(DeviceNode(container_path=path, host_path=root + path) for path in dict.fromkeys(paths))
