"""Publishes the facts of one NVML session in their order, and its warnings, each once.

Invariants: DriverReady and GpusEnumerated come first, and a fact about a GPU after the GpusEnumerated that
names it. A list is emitted when it differs from the last one. The readings of a poll come before its
outcome. Once the driver is gone nothing more is emitted.
"""

import logging
from collections.abc import Iterable
from typing import Final

from agent.bus import Inbox
from agent.errors import NvmlError
from agent.log import about
from agent.model import facts
from agent.model.gpu import Gpu
from agent.model.ids import GpuUuid
from agent.model.topology import TopologySample
from agent.sources.nvml.gpu_watcher import GpuWatcher
from agent.sources.nvml.library import Versions
from agent.sources.nvml.probing import Verdict
from agent.sources.nvml.settings import NvmlSettings
from agent.sources.nvml.threads import Call

_log = logging.getLogger(__name__)


class EventPublisher:
    """Emits the facts and logs the warnings of one session."""

    def __init__(self, inbox: Inbox[facts.Fact], settings: NvmlSettings, versions: Versions) -> None:
        self._inbox: Final = inbox
        self._settings: Final = settings
        self._versions: Final = versions
        self._emitted: facts.GpusEnumerated | None = None
        self._warned: set[str] = set()
        self.is_over = False
        """Whether the driver is gone; tasks that are still running emit nothing more."""

    @property
    def ready_emitted(self) -> bool:
        """Whether DriverReady was emitted."""
        return self._emitted is not None

    def is_listed(self, uuid: GpuUuid) -> bool:
        """Whether a GPU was named in the newest list."""
        return self._emitted is not None and any(gpu.uuid == uuid for gpu in self._emitted.gpus)

    def emit_gpus(self, watchers: Iterable[GpuWatcher], control_nodes: tuple[str, ...]) -> bool:
        """Emit the list of GPUs if it changed; returns whether it did."""
        listed = _list_of(watchers, control_nodes)
        if self.is_over or listed == self._emitted:
            return False
        is_first, self._emitted = self._emitted is None, listed
        if is_first:
            self.emit(
                facts.DriverReady(
                    driver_version=self._versions.driver,
                    nvml_version=self._versions.nvml,
                    cuda_version=self._versions.cuda,
                )
            )
        self.emit(listed)
        if is_first:
            for watcher in watchers:
                call = watcher.worker.log.awaited
                if call is not None and watcher.uuid is not None:
                    self.emit_overdue(watcher.uuid, call)
        return True

    def emit_outcome(self, watcher: GpuWatcher) -> None:
        """Emit the outcome of the newest probe of a GPU, if that is still to be done."""
        uuid = watcher.uuid
        if uuid is None or self.is_over or watcher.gone or not self.is_listed(uuid):
            return
        watcher.probing, verdict = watcher.probing.reported()
        if verdict is not Verdict.REPORT:
            return
        probing = watcher.probing
        if probing.sample is not None:
            self.emit(facts.GpuSampled(gpu=uuid, sample=probing.sample))
        if probing.memory is not None:
            self.emit(facts.GpuMemorySeen(gpu=uuid, memory=probing.memory))
        if probing.failure is not None:
            self.emit(_failed(uuid, probing.failure))
        else:
            self.emit(facts.GpuProbePassed(gpu=uuid))

    def emit_topology(self, watcher: GpuWatcher, sample: TopologySample) -> None:
        """Emit the topology sample of a GPU."""
        uuid = watcher.uuid
        if uuid is not None and not self.is_over and not watcher.gone and self.is_listed(uuid):
            self.emit(facts.TopologySeen(gpu=uuid, sample=sample))

    def emit_overdue(self, uuid: GpuUuid, call: Call) -> None:
        """Emit that a call on a GPU is overdue."""
        deadline_ns = self._settings.deadline_ns(call.name)
        self.emit(facts.GpuCallOverdue(gpu=uuid, call=call.name, deadline_ns=deadline_ns))

    def emit_events_unsupported(self, uuid: GpuUuid, why: str) -> None:
        """Emit, once for each GPU, that it sends no XIDs."""
        if self._is_new(f"events {uuid}"):
            self.emit(facts.HealthEventsUnsupported(gpu=uuid, message=why))

    def emit(self, fact: facts.Fact) -> None:
        """Emit a fact."""
        self._inbox.put(fact)

    def warn_once(self, key: str, message: str, **fields: object) -> None:
        """Log a warning once; keys are few, and those of a GPU are dropped with it."""
        if self._is_new(key):
            _log.warning(message, about(**fields))

    def warn_numa_node(self, gpu: Gpu, found: str) -> None:
        """Log, once for each GPU, that its NUMA node in sysfs is not a number."""
        self.warn_once(
            f"numa {gpu.pci}",
            "The NUMA node of the GPU at %(pci)s is not a number: %(found)s",
            pci=gpu.pci,
            found=found,
        )

    def forget(self, gpu: Gpu) -> None:
        """Forget the warnings about a GPU that is gone."""
        self._warned -= {f"events {gpu.uuid}", f"numa {gpu.pci}"}

    def _is_new(self, key: str) -> bool:
        is_new = key not in self._warned
        self._warned.add(key)
        return is_new


def _list_of(watchers: Iterable[GpuWatcher], control_nodes: tuple[str, ...]) -> facts.GpusEnumerated:
    gpus = [
        watcher.discovered.gpu for watcher in watchers if watcher.discovered is not None and not watcher.gone
    ]
    return facts.GpusEnumerated(
        gpus=tuple(sorted(gpus, key=lambda gpu: (gpu.index, gpu.pci))), control_nodes=control_nodes
    )


def _failed(uuid: GpuUuid, error: NvmlError) -> facts.GpuCallFailed:
    return facts.GpuCallFailed(gpu=uuid, code=error.code, call=error.call, message=str(error))
