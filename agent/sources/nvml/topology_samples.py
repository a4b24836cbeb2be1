"""When the topology of a session's GPUs is sampled: after they were listed, and when it may have changed.

Invariants: one topology sample of a GPU at a time, by its own task and thread. While a GPU fails it is not
sampled; one that is lost has no known links.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from agent.model.policy import SECOND_NS
from agent.model.topology import TopologySample
from agent.sources.nvml.gpu_watcher import GpuWatcher
from agent.sources.nvml.inventory import DiscoveredGpu
from agent.sources.nvml.library import FINDINGS, Handle
from agent.sources.nvml.publisher import EventPublisher
from agent.sources.nvml.readings import Readings
from agent.sources.nvml.settings import NvmlSettings
from agent.sources.nvml.topology import sample_topology, sample_topology_without_driver

DELAY_NS: Final = SECOND_NS
"""From the first outcome of a GPU to its topology sample: a registration is more urgent than that."""

_LOST: Final = "lost"


class TopologySampler:
    """The topology samples of one session."""

    def __init__(
        self,
        watchers: Sequence[GpuWatcher],
        publisher: EventPublisher,
        settings: NvmlSettings,
        sys_root: Path,
        clock: Callable[[], int],
    ) -> None:
        """``watchers`` is the session's own list, which changes."""
        self._watchers = watchers
        self._publisher = publisher
        self._settings = settings
        self._sys_root = sys_root
        self._clock = clock

    def next_ns(self, watcher: GpuWatcher) -> int:
        """Return when a watcher has something to do next: a probe, or before that a topology sample."""
        if watcher.topology_due_ns is None or watcher.topology_key == self._dependencies(watcher):
            return watcher.probing.due_ns
        return min(watcher.probing.due_ns, watcher.topology_due_ns)

    async def sample_if_due(self, watcher: GpuWatcher) -> None:
        """Sample the topology of a GPU and emit it, if that is due."""
        seen = watcher.discovered
        if seen is None or not self._publisher.is_listed(seen.gpu.uuid):
            return
        now_ns = self._clock()
        if watcher.topology_due_ns is None:
            watcher.topology_due_ns = now_ns + min(DELAY_NS, self._settings.poll_ns)
        dependencies = self._dependencies(watcher)
        if now_ns < watcher.topology_due_ns or watcher.topology_key == dependencies:
            return
        if dependencies == _LOST:
            work = partial(self._without_driver, seen)
        else:
            work = partial(
                sample_topology, Readings(watcher.nvml), seen, self._others(watcher), self._sys_root
            )
        found, is_complete = await watcher.worker.call(work)
        if watcher.worker.late:
            # It was reported overdue, and only a probe can show that it is healthy again.
            watcher.request()
        if is_complete:
            watcher.topology_key = dependencies
        else:
            watcher.topology_due_ns = now_ns + self._settings.slow_polls * self._settings.poll_ns
        self._publisher.emit_topology(watcher, found)

    def _dependencies(self, watcher: GpuWatcher) -> Hashable:
        """Return what a sample depends on: which GPUs there are, and which links of this one are down."""
        if watcher.probing.failure is not None:
            return _LOST if watcher.probing.failure.code in FINDINGS else watcher.topology_key
        listed = frozenset(
            other.discovered.gpu.pci for other in self._watchers if other.discovered is not None
        )
        return listed, watcher.probing.sample.links_down if watcher.probing.sample is not None else ()

    def _others(self, watcher: GpuWatcher) -> Mapping[str, Handle]:
        return {
            other.discovered.gpu.pci: other.discovered.handle
            for other in self._watchers
            if other is not watcher and other.discovered is not None and other.answers
        }

    def _without_driver(self, seen: DiscoveredGpu) -> tuple[TopologySample, bool]:
        return sample_topology_without_driver(seen, self._sys_root), True
