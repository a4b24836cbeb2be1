"""What is reported to people and kept for them: recent events, the journal, the event log, evidence.

Invariants: recording never blocks, and comes after the kubelet's message. The event log and evidence are
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
from agent.model.components import EVENT_LOG, EVIDENCE
from agent.model.effects import KeepEvidence, RecordEvent
from agent.model.ids import ComponentId, GpuUuid
from agent.model.snapshot import Snapshot
from agent.proofs import Proofs
from agent.runtime.imports import import_event_log, import_evidence
from agent.sinks.journal import JournalSink
from agent.threads import in_daemon_thread
from agent.views.event_files import path_of_others
from agent.views.events import Entry, EventRing, is_of_node
from agent.views.repeats import Repeats

if TYPE_CHECKING:
    from agent.sinks.eventlog import EventLog
    from agent.sinks.evidence import Bundle, EvidenceSink

MAX_EARLY: Final = 1024
"""Events, and faults, that wait for a sink that is not imported yet; the oldest go when there are more."""


class _JointProof:
    """One proof for several logs that give one: each has to give its own."""

    def __init__(self, count: int, prove: Callable[[], object]) -> None:
        self._count = count
        self._prove = prove
        self._proven: set[str] = set()

    def prove(self, name: str) -> None:
        """Take the proof of one of them."""
        self._proven.add(name)
        if len(self._proven) == self._count:
            self._proven.clear()
            self._prove()


class EventRecorder:
    """Owns the effects RecordEvent and KeepEvidence."""

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
        self._repeats: Final = Repeats()
        self._repeats_due: asyncio.TimerHandle | None = None
        self.event_log: EventLog | None = None
        """Of faults, commands and the node."""
        self.other_events: EventLog | None = None
        """Events that programs can cause at will, so that they use no room and no time of the others."""
        self.evidence: EvidenceSink | None = None

    def record(self, effect: RecordEvent) -> None:
        """Record an event, and have it written when the kubelet's message is on its way.

        A turn of the loop is for the message, and one to send it. What repeats is recorded once a minute.
        """
        for each in self._repeats.admitted(effect):
            self._record(each)
        self._wait_for_repeats()

    def _wait_for_repeats(self) -> None:
        if self._repeats_due is None and (due_ns := self._repeats.due_ns) is not None:
            delay_s = max(0, due_ns - self._clock()) / 1e9
            self._repeats_due = asyncio.get_running_loop().call_later(delay_s, self._record_repeats)

    def _record_repeats(self) -> None:
        self._repeats_due = None
        for each in self._repeats.due(self._clock()):
            self._record(each)
        self._wait_for_repeats()

    def _record(self, effect: RecordEvent) -> None:
        entry = self.recent.record(effect)
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, guard.guarded("journal", self._write), effect, entry)

    def _write(self, effect: RecordEvent, entry: Entry) -> None:
        self._journal.record(effect)
        if self.event_log is not None and self.other_events is not None:
            (self.event_log if is_of_node(entry.event) else self.other_events).record(entry)
        elif self._settings.event_log_bytes:
            self._early_events.append(entry)

    def keep(self, effect: KeepEvidence) -> None:
        """Have evidence of a fault kept."""
        if self.evidence is not None:
            self.evidence.keep(effect)
        else:
            self._early_faults.append(effect)

    async def run_event_log(self) -> None:
        """Keep events on disk until cancelled; to be run only where the settings ask for it."""
        if self.event_log is None:
            await self._after_registration()
            event_log = await in_daemon_thread("eventlog-import", import_event_log)
            path = self._settings.event_log_path
            joint = _JointProof(2, partial(self._proofs.prove, ComponentId(EVENT_LOG)))
            self.event_log, self.other_events = (
                event_log(
                    each,
                    boot_id=self._boot_id,
                    max_bytes=self._settings.event_log_bytes // 2,
                    clock=self._clock,
                    period_ns=self._settings.poll_ns,
                    prove=partial(joint.prove, each),
                )
                for each in (path, path_of_others(path))
            )
            while self._early_events:
                entry = self._early_events.popleft()
                (self.event_log if is_of_node(entry.event) else self.other_events).record(entry)
        async with asyncio.TaskGroup() as group:
            for each in (self.event_log, self.other_events):
                if each is not None:
                    group.create_task(each.run(), name=f"event log {each.path}")

    async def run_evidence(self) -> None:
        """Keep evidence until cancelled."""
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
                prove=partial(self._proofs.prove, ComponentId(EVIDENCE)),
            )
            while self._early_faults:
                self.evidence.keep(self._early_faults.popleft())
        return self.evidence

    def event_log_trouble(self) -> str | None:
        """Return why the newest events are not on disk; None while they are."""
        logs = (self.event_log, self.other_events)
        return next((each.trouble for each in logs if each is not None and each.trouble is not None), None)

    def time_of(self, at_ns: int) -> str:
        """Return the time of day of a monotonic moment, for people."""
        return log.rfc3339(log.wall_time_of(at_ns, now_ns=self._clock()))

    async def flush(self, timeout_s: float) -> None:
        """Write what waits, but wait no longer than the timeout."""
        for each in self._repeats.rest(self._clock()):
            self._write(each, self.recent.record(each))
        sinks = (self.event_log, self.other_events, self.evidence)
        await asyncio.gather(*(sink.flush(timeout_s) for sink in sinks if sink is not None))
