"""What the node shows: devices and pods as the kubelet sees them, the changes, the checkpoint.

It outlives a kubelet's restart, as the node object and the checkpoint file do. Everything here is
synchronous, so what a reader sees is whole.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from agent.simulation.kubelet.checkpoint import read_registered, write_checkpoint
from agent.simulation.kubelet.devices import GONE, Device, DeviceTable, Summary
from agent.simulation.kubelet.pods import Pod, PodTable
from agent.simulation.kubelet.records import MAX_CHANGES, AllocatableChange, DeviceView
from agent.simulation.kubelet.watch import ChangeStream, Watchers


class Node:
    """The kubelet's view, with the timers that end a resource (facts: kubelet item 3)."""

    def __init__(
        self, directory: Path, *, grace_s: float, checkpoint: bool, pod_logs: Path | None = None
    ) -> None:
        self.devices = DeviceTable()
        self.pods = PodTable()
        self.watchers = Watchers()
        self.changes: deque[AllocatableChange] = deque(maxlen=MAX_CHANGES)
        self.shown: dict[str, Summary] = {}
        self.on_expired: Callable[[str], None] = lambda _resource: None
        self._directory = directory
        self._grace_s = grace_s
        self._checkpoint = checkpoint
        self._pod_logs = pod_logs
        self._grace_timers: dict[str, asyncio.TimerHandle] = {}

    def summary(self, resource: str) -> Summary:
        """Return what the node shows of a resource; nothing of an unknown one."""
        return self.shown.get(resource, GONE)

    def view(self, resource: str) -> dict[str, DeviceView]:
        """Return every device of a resource with its health, NUMA nodes and active pod."""
        holders = self.pods.holders(resource)
        return {
            id_: DeviceView(device.healthy, device.numa_nodes, holders.get(id_))
            for id_, device in self.devices.devices(resource).items()
        }

    def follow(self, *, current: bool) -> ChangeStream:
        """Open a stream of changes; with ``current`` each resource's present state comes first."""
        backlog = [_change(resource, shown) for resource, shown in self.shown.items()] if current else []
        return self.watchers.open(backlog)

    def replace(self, resource: str, devices: Mapping[str, Device]) -> None:
        """Take a plugin's list."""
        if self.devices.replace(resource, devices):
            self._show(resource)
            self.save()
        self.watchers.evaluate()

    def connected(self, resource: str) -> None:
        """Record that a plugin serves a resource, and cancel its expiry."""
        timer = self._grace_timers.pop(resource, None)
        if timer is not None:
            timer.cancel()

    def disconnected(self, resource: str) -> None:
        """Note that a resource's plugin is gone: every device unhealthy, and capacity 0 after the grace."""
        self.devices.mark_unhealthy(resource)
        self._start_grace(resource)
        self._show(resource)
        self.watchers.evaluate()

    def kubelet_started(self, *, first: bool) -> None:
        """Forget the devices, not the resources: those come from the checkpoint."""
        self.devices.forget_devices(read_registered(self._directory) if first else ())
        for resource in self.devices.resources:
            self._start_grace(resource)
            self._show(resource)
        self.watchers.evaluate()

    def kubelet_stopped(self) -> None:
        """Cancel every expiry while no kubelet is there; what the node shows stays."""
        for resource in tuple(self._grace_timers):
            self.connected(resource)
        self.watchers.evaluate()

    def save(self) -> None:
        """Write the checkpoint."""
        if self._checkpoint:
            registered = {resource: self.devices.healthy(resource) for resource in self.devices.resources}
            # A folder that is gone is a fault under test; a real kubelet logs it and goes on.
            with contextlib.suppress(OSError):
                write_checkpoint(self._directory, self.pods.all(), registered)

    def pods_changed(self) -> None:
        """Note that a pod came, ended or went."""
        self.save()
        if self._pod_logs is not None:
            _show_pod_logs(self._pod_logs, self.pods.all())
        self.watchers.evaluate()

    def _start_grace(self, resource: str) -> None:
        self.connected(resource)
        loop = asyncio.get_running_loop()
        self._grace_timers[resource] = loop.call_later(self._grace_s, self._expire, resource)

    def _expire(self, resource: str) -> None:
        self._grace_timers.pop(resource, None)
        self.on_expired(resource)
        self.devices.forget(resource)
        self._show(resource)
        self.save()
        self.watchers.evaluate()

    def _show(self, resource: str) -> None:
        summary = self.devices.summary(resource)
        if self.shown.get(resource) == summary:
            return
        self.shown[resource] = summary
        change = _change(resource, summary)
        self.changes.append(change)
        self.watchers.changed(change)


def _change(resource: str, shown: Summary) -> AllocatableChange:
    return AllocatableChange(
        time.monotonic_ns(), resource, shown.capacity, shown.allocatable, shown.unhealthy
    )


def _show_pod_logs(directory: Path, pods: Iterable[Pod]) -> None:
    """Let the directory hold one of each pod, by whose name others learn its UID, and none of any other.

    Source: kubernetes pkg/kubelet/kuberuntime/helpers.go (BuildPodLogsDirectory).
    """
    wanted = {f"{pod.namespace}_{pod.name}_{pod.uid}" for pod in pods}
    # A folder that is gone is a fault under test; a real kubelet logs it and goes on.
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        there = {path.name for path in directory.iterdir()}
        for name in there - wanted:
            (directory / name).rmdir()
        for name in wanted - there:
            (directory / name).mkdir()
