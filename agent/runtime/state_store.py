"""The state that outlives an agent: read before it serves, written while it does."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.bus import Latest
from agent.log import about
from agent.model.facts import Fact, StateRestored, StateUnread
from agent.model.ids import ALL, Placement
from agent.model.snapshot import Durable, Snapshot
from agent.runtime.imports import import_state_file
from agent.threads import in_daemon_thread
from agent.waiting import sleep_proving

if TYPE_CHECKING:
    from agent.sinks.statefile import StateFile

_log = logging.getLogger(__name__)

MAX_NAMED: Final = 8
"""Conditions that are named in the log."""

KEPT_WITHIN_S: Final = 2.0
"""The longest that a caller waits to learn whether the state is in the file."""

READ_WITHIN_S: Final = 2.0
"""For so long what cannot be read is retried before the agent serves without it."""
RETRY_FIRST_S: Final = 0.1
RETRY_CAP_S: Final = 60.0


class StateStore:
    """What the agent before us left, and the sink that keeps ours; imported where it is needed."""

    def __init__(
        self,
        path: str,
        latest: Latest[Snapshot],
        *,
        boot_id: str,
        period_ns: int,
        prove: Callable[[], object],
        emit: Callable[[Fact], None],
        read_within_s: float = READ_WITHIN_S,
    ) -> None:
        self._path = path
        self._emit = emit
        self._read_within_s = read_within_s
        self._unread = ""
        """Why the file cannot be read; while it cannot, nothing is written."""
        self._latest = latest
        self._boot_id = boot_id
        self._period_ns = period_ns
        self._prove = prove
        self._sink: StateFile | None = None
        self.restored: Durable | None = None
        """None: nothing was left, or nothing that can be used."""

    def read(self) -> None:
        """Read what the agent before us left; blocks, for the longer where it cannot be read."""
        until_s = time.monotonic() + self._read_within_s
        while not self._try_to_read() and time.monotonic() < until_s:
            time.sleep(RETRY_FIRST_S)

    def _try_to_read(self) -> bool:
        if not self._unread and _is_missing(self._path) and _is_missing(f"{self._path}.copy"):
            return True
        from agent.sinks.statefile import UnreadError, load  # noqa: PLC0415 - only where there is a file

        try:
            self.restored = load(self._path, boot_id=self._boot_id)
        except UnreadError as error:
            if not self._unread:
                _log.error(f"The state file cannot be read and is retried: {error}")
            self._unread = str(error)
            return False
        self._unread = ""
        self._log_unhealthy()
        return True

    def _log_unhealthy(self) -> None:
        """Log why devices are unhealthy from the first moment on: no event would report it."""
        kept = self.restored.conditions if self.restored is not None else ()
        lines = [f"{_place(each.placement)}: {each.reason}: {each.message}" for each in kept if each.flips]
        if lines:
            more = len(lines) - MAX_NAMED
            _log.warning(
                "Devices are Unhealthy as the agent before knew them: %(conditions)s",
                about(conditions=[*lines[:MAX_NAMED], *([f"{more} more"] if more > 0 else [])]),
            )

    @property
    def was_released(self) -> bool:
        """Whether an operator had the driver released, for longer than the agent before us lived."""
        return self.restored is not None and self.restored.released_until_ns is not None

    @property
    def trouble(self) -> str | None:
        """Why what is known now, or was before the start, is not in the file; None: it is."""
        lost = self._latest.value.durable.lost
        return self._write_trouble or (f"lost until gpu-agent recover --state: {lost}" if lost else None)

    @property
    def _write_trouble(self) -> str | None:
        if self._unread:
            return f"it cannot be read, so nothing is written over it: {self._unread}"
        return None if self._sink is None else self._sink.trouble

    @property
    def failures(self) -> int:
        """Writes that failed since the start."""
        return 0 if self._sink is None else self._sink.failures

    async def run(self) -> None:
        """Keep the state until cancelled; what could not be read at the start is read first."""
        if self._unread:
            await self._read_late()
        if self._sink is None:
            state_file = await in_daemon_thread("statefile-import", import_state_file)
            self._sink = state_file(
                self._path, self._latest, boot_id=self._boot_id, period_ns=self._period_ns, prove=self._prove
            )
        await self._sink.run()

    async def _read_late(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            self._emit(StateUnread(self._unread))
            await self._until(lambda now: bool(now.unread))
            if await in_daemon_thread("state-reader", self._try_to_read):
                break
            await sleep_proving(pause_s, self._period_ns, self._prove)
            pause_s = min(2 * pause_s, RETRY_CAP_S)
        _log.info(f"Read the state file {self._path}")
        self._emit(StateRestored(self.restored))
        # What was kept has to be in the state that is written over it.
        await self._until(lambda now: not now.unread)

    async def _until(self, is_so: Callable[[Snapshot], bool]) -> None:
        while not is_so(self._latest.value):
            await self._latest.wait_newer(self._latest.version)

    async def why_not_kept(self) -> str | None:
        """Write the newest state now, and return why it is not in the file; None: it is."""
        if not await self.flush(KEPT_WITHIN_S):
            return f"the disk did not write it within {KEPT_WITHIN_S:g} s"
        return self._write_trouble

    async def flush(self, timeout_s: float) -> bool:
        """Write the newest state, but wait no longer than the timeout; returns whether it is written."""
        return self._sink is None or await self._sink.flush(timeout_s)


def _is_missing(path: str) -> bool:
    try:
        Path(path).lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _place(placement: Placement) -> str:
    instances = (("GI", placement.gi), ("CI", placement.ci))
    return " ".join((placement.gpu, *(f"{name} {number}" for name, number in instances if number != ALL)))
