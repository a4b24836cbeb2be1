"""What is told to people and kept for them: recent events, the journal, the event log, evidence.

Invariants: telling never blocks, and comes after the kubelet's message. The event log and evidence are
imported after the registration; what happens before waits for them, bounded by MAX_EARLY.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from agent import guard, log
from agent.bus import Latest
from agent.config.settings import Settings
from agent.model.effects import KeepEvidence, RecordEvent
from agent.model.ids import GpuUuid, Part
from agent.model.parts import EVENT_LOG, EVIDENCE
from agent.model.snapshot import Snapshot
from agent.proofs import Proofs
from agent.runtime.imports import import_event_log, import_evidence
from agent.sinks.journal import JournalSink
from agent.threads import in_daemon_thread
from agent.views.events import Entry, EventRing

if TYPE_CHECKING:
    from agent.sinks.eventlog import EventLog
    from agent.sinks.evidence import Bundle, EvidenceSink

MAX_EARLY: Final = 1024
"""Events, and faults, that wait for a sink that is not imported yet; the oldest go when there are more."""


class Records:
    """Who owns the effects RecordEvent and KeepEvidence."""

    def __init__(
        self,
        settings: Settings,
        *,
        latest: Latest[Snapshot],
        kernel_log: Callable[[], Iterable[str]],
        boot_id: str,
        clock: Callable[[], int],
        after_registration: Callable[[], Awaitable[None]],
        proofs: Proofs,
    ) -> None:
        """``after_registration`` returns when what the kubelet does not wait for may be imported."""
        self._settings = settings
        self._latest = latest
        self._kernel_log = kernel_log
        self._boot_id = boot_id
        self._clock = clock
        self._after_registration = after_registration
        self._proofs = proofs
        self._journal = JournalSink()
        self._early_events: deque[Entry] = deque(maxlen=MAX_EARLY)
        self._early_faults: deque[KeepEvidence] = deque(maxlen=MAX_EARLY)
        self.recent: Final = EventRing()
        self.event_log: EventLog | None = None
        self.evidence: EvidenceSink | None = None

    def record(self, effect: RecordEvent) -> None:
        """Tell an event, and have it written when the kubelet's message is on its way.

        A turn of the loop is for the message, and one to send it.
        """
        entry = self.recent.record(effect)
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, guard.guarded("journal", self._write), effect, entry)

    def _write(self, effect: RecordEvent, entry: Entry) -> None:
        self._journal.record(effect)
        if self.event_log is not None:
            self.event_log.record(entry)
        elif self._settings.event_log_bytes:
            self._early_events.append(entry)

    def keep(self, effect: KeepEvidence) -> None:
        """Have evidence of a fault kept."""
        if self.evidence is not None:
            self.evidence.keep(effect)
        else:
            self._early_faults.append(effect)

    async def run_event_log(self) -> None:
        """Keep events on disk for ever; to be run only where the settings ask for it."""
        if self.event_log is None:
            await self._after_registration()
            event_log = await in_daemon_thread("eventlog-import", import_event_log)
            self.event_log = event_log(
                self._settings.event_log_path,
                boot_id=self._boot_id,
                max_bytes=self._settings.event_log_bytes,
                clock=self._clock,
                period_ns=self._settings.poll_ns,
                prove=partial(self._proofs.prove, Part(EVENT_LOG)),
            )
            while self._early_events:
                self.event_log.record(self._early_events.popleft())
        await self.event_log.run()

    async def run_evidence(self) -> None:
        """Keep evidence for ever."""
        if self.evidence is None:
            await self._after_registration()
        sink = await self._evidence_sink()
        await sink.run()

    async def make_bundle(self, gpu: GpuUuid) -> "Bundle | None":
        """Make a bundle of evidence now; None if there is no such GPU."""
        sink = await self._evidence_sink()
        return await sink.make(gpu)

    async def _evidence_sink(self) -> "EvidenceSink":
        evidence_sink = await in_daemon_thread("evidence-import", import_evidence)
        if self.evidence is None:
            self.evidence = evidence_sink(
                self._settings.evidence_dir,
                latest=self._latest,
                events=self.recent,
                kernel_log=self._kernel_log,
                boot_id=self._boot_id,
                time_of=self.time_of,
                period_ns=self._settings.poll_ns,
                prove=partial(self._proofs.prove, Part(EVIDENCE)),
            )
            while self._early_faults:
                self.evidence.keep(self._early_faults.popleft())
        return self.evidence

    def time_of(self, at_ns: int) -> str:
        """Return the time of day of a monotonic moment, for people."""
        return log.rfc3339(log.wall_time_of(at_ns, now_ns=self._clock()))

    async def flush(self, timeout_s: float) -> None:
        """Write what waits, but wait no longer than the timeout."""
        sinks = (self.event_log, self.evidence)
        await asyncio.gather(*(sink.flush(timeout_s) for sink in sinks if sink is not None))
