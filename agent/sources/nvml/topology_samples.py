"""When the topology of a session's GPUs is sampled: after they were listed, and when it may have changed.

Invariants: one topology sample of a GPU at a time, by its own task and thread. While a GPU fails it is not
sampled; one that is lost has no known links.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from agent.model.policy import SECOND_NS
from agent.model.topology import Survey
from agent.sources.nvml.gpu_watcher import Slot
from agent.sources.nvml.inventory import Sighting
from agent.sources.nvml.library import FINDINGS, Handle
from agent.sources.nvml.publisher import Telling
from agent.sources.nvml.readings import Readings
from agent.sources.nvml.settings import NvmlSettings
from agent.sources.nvml.topology import survey, survey_without_driver

DELAY_NS: Final = SECOND_NS
"""From the first outcome of a GPU to its topology sample: a registration is more urgent than that."""

_LOST: Final = "lost"


class Surveys:
    """The topology samples of one session."""

    def __init__(
        self,
        slots: Sequence[Slot],
        telling: Telling,
        settings: NvmlSettings,
        sys_root: Path,
        clock: Callable[[], int],
    ) -> None:
        """``slots`` is the session's own list, which changes."""
        self._slots = slots
        self._telling = telling
        self._settings = settings
        self._sys_root = sys_root
        self._clock = clock

    def next_ns(self, slot: Slot) -> int:
        """Return when a watcher has something to do next: a probe, or before that a topology sample."""
        if slot.survey_due_ns is None or slot.surveyed == self._made_of(slot):
            return slot.due_ns
        return min(slot.due_ns, slot.survey_due_ns)

    async def make(self, slot: Slot) -> None:
        """Sample the topology of a GPU and emit it, if that is due."""
        seen = slot.sighting
        if seen is None or not self._telling.is_listed(seen.gpu.uuid):
            return
        now_ns = self._clock()
        if slot.survey_due_ns is None:
            slot.survey_due_ns = now_ns + min(DELAY_NS, self._settings.poll_ns)
        made_of = self._made_of(slot)
        if now_ns < slot.survey_due_ns or slot.surveyed == made_of:
            return
        if made_of == _LOST:
            work = partial(self._without_driver, seen)
        else:
            work = partial(survey, Readings(slot.nvml), seen, self._others(slot), self._sys_root)
        found, is_complete = await slot.lane.call(work)
        if slot.lane.late:
            # It was reported overdue, and only a probe can show that it is healthy again.
            slot.request()
        if is_complete:
            slot.surveyed = made_of
        else:
            slot.survey_due_ns = now_ns + self._settings.slow_polls * self._settings.poll_ns
        self._telling.surveyed(slot, found)

    def _made_of(self, slot: Slot) -> Hashable:
        """Return what a sample depends on: which GPUs there are, and which links of this one are down."""
        if slot.failure is not None:
            return _LOST if slot.failure.code in FINDINGS else slot.surveyed
        listed = frozenset(other.sighting.gpu.pci for other in self._slots if other.sighting is not None)
        return listed, slot.sample.links_down if slot.sample is not None else ()

    def _others(self, slot: Slot) -> Mapping[str, Handle]:
        return {
            other.sighting.gpu.pci: other.sighting.handle
            for other in self._slots
            if other is not slot and other.sighting is not None and other.answers
        }

    def _without_driver(self, seen: Sighting) -> tuple[Survey, bool]:
        return survey_without_driver(seen, self._sys_root), True
