"""The kubelet's table of devices: pure, without clock or I/O.

Invariants (facts: kubelet items 3, 6, 14):

1. Capacity counts every device of the last list, allocatable the healthy ones.
2. A list replaces the one before it; a device that is not in it is gone.
3. A stream that ended makes every device unhealthy at once, and removes none.
4. After a kubelet restart a resource stays known, with no device, until its plugin registers again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.simulation.kubelet.records import MAX_RESOURCES


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a list."""

    healthy: bool
    numa_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What the node shows of a resource."""

    capacity: int
    allocatable: int
    unhealthy: tuple[str, ...]


GONE = Summary(0, 0, ())


class DeviceTable:
    """Devices by resource; see the invariants above."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[str, Device]] = {}

    @property
    def resources(self) -> tuple[str, ...]:
        """Resources the kubelet has heard of and not yet forgotten, sorted."""
        return tuple(sorted(self._devices))

    def knows(self, resource: str) -> bool:
        """Return whether a pod that asks for it is checked at all (facts: kubelet item 15)."""
        return resource in self._devices

    def replace(self, resource: str, devices: Mapping[str, Device]) -> bool:
        """Take a whole list; return False where MAX_RESOURCES are known already."""
        if resource not in self._devices and len(self._devices) >= MAX_RESOURCES:
            return False
        self._devices[resource] = dict(devices)
        return True

    def mark_unhealthy(self, resource: str) -> None:
        """Make every device of a resource unhealthy; nothing happens to an unknown resource."""
        devices = self._devices.get(resource)
        if devices is not None:
            self._devices[resource] = {
                id_: Device(healthy=False, numa_nodes=device.numa_nodes) for id_, device in devices.items()
            }

    def forget_devices(self, resources: Iterable[str] = ()) -> None:
        """Start over as after a kubelet restart: every known resource, and these, without a device."""
        for resource in (*self._devices, *resources):
            self.replace(resource, {})

    def forget(self, resource: str) -> None:
        """Drop a resource whose plugin stayed away longer than the grace period."""
        self._devices.pop(resource, None)

    def devices(self, resource: str) -> Mapping[str, Device]:
        """Return the devices of a resource by id; none for an unknown one."""
        return self._devices.get(resource, {})

    def health(self, resource: str, id_: str) -> str:
        """Return a device's health as a pod's allocatedResourcesStatus names it (facts: kubelet item 22)."""
        device = self.devices(resource).get(id_)
        if device is None:
            return "Unknown"
        return "Healthy" if device.healthy else "Unhealthy"

    def healthy(self, resource: str) -> list[str]:
        """Return the ids a pod could be given, sorted so that a seed alone decides the order."""
        return sorted(id_ for id_, device in self.devices(resource).items() if device.healthy)

    def summary(self, resource: str) -> Summary:
        """Return capacity, allocatable and the unhealthy ids."""
        devices = self.devices(resource)
        unhealthy = tuple(sorted(id_ for id_, device in devices.items() if not device.healthy))
        return Summary(len(devices), len(devices) - len(unhealthy), unhealthy)
