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
from agent.model.topology import Survey
from agent.sources.nvml.events import DRIVER_CODES
from agent.sources.nvml.gpu_watcher import Slot
from agent.sources.nvml.library import Versions
from agent.sources.nvml.settings import NvmlSettings
from agent.sources.nvml.threads import Call

_log = logging.getLogger(__name__)


class Telling:
    """Emits the facts and logs the warnings of one session."""

    def __init__(self, inbox: Inbox[facts.Fact], settings: NvmlSettings, versions: Versions) -> None:
        self._inbox: Final = inbox
        self._settings: Final = settings
        self._versions: Final = versions
        self._told: facts.GpusEnumerated | None = None
        self._warned: set[str] = set()
        self.is_over = False
        """Whether the driver is gone; tasks that are still running emit nothing more."""

    @property
    def announced(self) -> bool:
        """Whether DriverReady was emitted."""
        return self._told is not None

    def is_listed(self, uuid: GpuUuid) -> bool:
        """Whether a GPU was named in the newest list."""
        return self._told is not None and any(gpu.uuid == uuid for gpu in self._told.gpus)

    def announce(self, slots: Iterable[Slot], control_nodes: tuple[str, ...]) -> bool:
        """Emit the list of GPUs if it changed; returns whether it did."""
        listed = _list_of(slots, control_nodes)
        if self.is_over or listed == self._told:
            return False
        is_first, self._told = self._told is None, listed
        if is_first:
            self.put(
                facts.DriverReady(
                    driver_version=self._versions.driver,
                    nvml_version=self._versions.nvml,
                    cuda_version=self._versions.cuda,
                )
            )
        self.put(listed)
        if is_first:
            for slot in slots:
                call = slot.lane.log.awaited
                if call is not None and slot.uuid is not None:
                    self.overdue(slot.uuid, call)
        return True

    def outcome(self, slot: Slot) -> None:
        """Emit the outcome of the newest probe of a GPU, if that is still to be done."""
        uuid = slot.uuid
        if uuid is None or self.is_over or slot.gone or not slot.untold or not self.is_listed(uuid):
            return
        slot.untold = False
        if slot.late and slot.failure is None:
            # It answered after all, but too late to count; probe again at once.
            slot.request()
            return
        slot.blamed = slot.failure is not None and slot.failure.code in DRIVER_CODES
        if slot.sample is not None:
            self.put(facts.GpuSampled(gpu=uuid, sample=slot.sample))
        if slot.memory is not None:
            self.put(facts.GpuMemorySeen(gpu=uuid, memory=slot.memory))
        if slot.failure is not None:
            self.put(_failed(uuid, slot.failure))
        else:
            self.put(facts.GpuProbePassed(gpu=uuid))

    def surveyed(self, slot: Slot, survey: Survey) -> None:
        """Emit the topology sample of a GPU."""
        uuid = slot.uuid
        if uuid is not None and not self.is_over and not slot.gone and self.is_listed(uuid):
            self.put(facts.TopologySeen(gpu=uuid, survey=survey))

    def overdue(self, uuid: GpuUuid, call: Call) -> None:
        """Emit that a call on a GPU is overdue."""
        deadline_ns = self._settings.deadline_ns(call.name)
        self.put(facts.GpuCallOverdue(gpu=uuid, call=call.name, deadline_ns=deadline_ns))

    def no_events(self, uuid: GpuUuid, why: str) -> None:
        """Emit, once for each GPU, that it sends no XIDs."""
        if self._is_new(f"events {uuid}"):
            self.put(facts.HealthEventsUnsupported(gpu=uuid, message=why))

    def put(self, fact: facts.Fact) -> None:
        """Emit a fact."""
        self._inbox.put(fact)

    def warn(self, key: str, message: str, **told: object) -> None:
        """Log a warning once; keys are few, and those of a GPU are dropped with it."""
        if self._is_new(key):
            _log.warning(message, about(**told))

    def bad_numa_node(self, gpu: Gpu, found: str) -> None:
        """Log, once for each GPU, that its NUMA node in sysfs is not a number."""
        self.warn(
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


def _list_of(slots: Iterable[Slot], control_nodes: tuple[str, ...]) -> facts.GpusEnumerated:
    gpus = [slot.sighting.gpu for slot in slots if slot.sighting is not None and not slot.gone]
    return facts.GpusEnumerated(
        gpus=tuple(sorted(gpus, key=lambda gpu: (gpu.index, gpu.pci))), control_nodes=control_nodes
    )


def _failed(uuid: GpuUuid, error: NvmlError) -> facts.GpuCallFailed:
    return facts.GpuCallFailed(gpu=uuid, code=error.code, call=error.call, message=str(error))
