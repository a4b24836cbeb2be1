"""Keeps the event log on disk, for operators that ask what happened before the agent was started.

Guarantees:

1. Recording an event never blocks: it is queued and written by a thread of the log's own. When the disk
   does not keep up, or rejects a write, events wait; those for which there is no room are dropped, counted,
   and reported by an event of their own once there is room again.
2. The room on disk is bounded, see agent.views.event_files.
3. What was recorded is on the disk soon: it is synced with each write, of which there is one in
   MIN_INTERVAL_S at most.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from agent.counts import Count
from agent.log import about, rfc3339, wall_time_of
from agent.model.effects import EventKind
from agent.threads import DaemonThread
from agent.views import event_files
from agent.views.events import Entry
from agent.waiting import PERIOD_NS, sleep_proving, wait_set

MAX_QUEUED: Final = 4096
"""Events that wait for the disk; some 300 bytes each."""

MIN_INTERVAL_S: Final = 0.2
RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 60.0

_log = logging.getLogger(__name__)


class _Queued(NamedTuple):
    entry: Entry
    time: str
    """The time of day, as the clock showed it when the event was recorded."""


class _Writing(NamedTuple):
    """The write that is under way."""

    done: "asyncio.Future[int]"
    """How many lines were written."""
    lost: int
    """Lost events that its first line reports; 0: there is no such line."""


class EventLog:
    """Writes each event once, in order."""

    written = Count("event_log_written_total", "events", "Events that are in the event log.")
    lost = Count("event_log_lost_total", "events", "Events dropped because too many waited to be written.")
    failures = Count("event_log_failures_total", "writes", "Writes of the event log that failed.")

    def __init__(
        self,
        path: str,
        *,
        boot_id: str,
        max_bytes: int,
        clock: Callable[[], int],
        period_ns: int = PERIOD_NS,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """``max_bytes`` is the room of all files together.

        ``prove`` is called while everything is written or the disk answers, every ``period_ns``.
        """
        self.path = path
        self._boot_id = boot_id
        self._max_file_bytes = max_bytes // event_files.FILES
        self._clock = clock
        self._period_ns = period_ns
        self._prove = prove
        self._queue: deque[_Queued] = deque()
        self._has_work = asyncio.Event()
        self._thread = DaemonThread("eventlog-writer")
        self._writing: _Writing | None = None
        self._unreported = 0
        self.trouble: str | None = None
        """Why the newest events are not on the disk; None while they are."""

    def record(self, entry: Entry) -> None:
        """Have an event written; never blocks."""
        if len(self._queue) >= MAX_QUEUED:
            self.lost += 1
            self._unreported += 1
            return
        moment = wall_time_of(entry.at_ns, now_ns=self._clock())
        self._queue.append(_Queued(entry, rfc3339(moment)))
        self._has_work.set()

    async def run(self) -> None:
        """Write until cancelled; when the disk rejects a write, retry with growing pauses."""
        pause_s = RETRY_FIRST_S
        while True:
            await wait_set(self._has_work, self._period_ns)
            self._prove()
            if not self._has_work.is_set():
                continue
            if await self._write_waiting():
                pause_s = RETRY_FIRST_S
                await asyncio.sleep(MIN_INTERVAL_S)
            else:
                await sleep_proving(pause_s, self._period_ns, self._prove)
                pause_s = min(2 * pause_s, RETRY_CAP_S)

    async def flush(self, timeout_s: float) -> None:
        """Write what waits, but wait no longer than the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._has_work.is_set() and await self._write_waiting():
                    pass
        except TimeoutError:
            _log.warning("Stopped without the newest events in %(path)s", about(path=self.path))

    async def _write_waiting(self) -> bool:
        try:
            if self._writing is None:
                self._writing = self._begin()
            writing = self._writing
            # Not cancelled with the task that waits here: the next one gets the outcome.
            await asyncio.wait({writing.done})
            self._writing = None
            lines = writing.done.result()
        except (OSError, RuntimeError) as error:
            self._note_failure(error)
            return False
        self._unreported -= writing.lost
        count = lines - bool(writing.lost)
        for _ in range(count):
            self._queue.popleft()
        self.written += count
        if not self._queue:
            self._has_work.clear()
        if self.trouble is not None:
            _log.info("Wrote the event log again: %(path)s", about(path=self.path))
            self.trouble = None
        return True

    def _begin(self) -> _Writing:
        batch, lost = tuple(self._queue), self._unreported
        path, max_bytes, boot_id = self.path, self._max_file_bytes, self._boot_id
        loss = [_line_of_loss(lost, batch[0], boot_id)] if lost else []

        def write() -> int:
            lines = [_line(queued, boot_id) for queued in batch]
            return event_files.append(path, loss + lines, max_bytes=max_bytes)

        return _Writing(self._thread.begin(write), lost)

    def _note_failure(self, error: OSError | RuntimeError) -> None:
        detail = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self.failures += 1
        if self.trouble != detail:
            _log.error(
                "Could not write the event log %(path)s: %(detail)s", about(path=self.path, detail=detail)
            )
        self.trouble = detail


def _line(queued: _Queued, boot_id: str) -> bytes:
    entry = queued.entry
    line = _encoded(queued, boot_id, entry.event.kind, entry.event.message, dict(entry.event.fields or {}))
    if len(line) <= event_files.MAX_LINE_BYTES:
        return line
    return _encoded(queued, boot_id, entry.event.kind, entry.event.message, {"cut_bytes": len(line)})


def _line_of_loss(count: int, newest: _Queued, boot_id: str) -> bytes:
    message = "Events were lost because the disk did not keep up"
    return _encoded(newest, boot_id, EventKind.LOSS, message, {"count": count}, warning=True)


def _encoded(
    queued: _Queued,
    boot_id: str,
    kind: EventKind,
    message: str,
    event_fields: dict[str, object],
    *,
    warning: bool | None = None,
) -> bytes:
    document = {
        "number": queued.entry.number,
        "time": queued.time,
        "time_monotonic_ns": queued.entry.at_ns,
        "boot": boot_id,
        "kind": kind.value,
        "message": message,
        "warning": queued.entry.event.warning if warning is None else warning,
        "fields": event_fields,
    }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "backslashreplace") + b"\n"
