"""Keeps what must outlive the process in a file: an unhealthy device stays unhealthy over a restart.

Guarantees:

1. The file is always an old or a new state, never a mix: it is written beside its place, synced and
   renamed, and the directory is synced. A checksum over the exact bytes finds what the disk did.
2. Everything is written and synced by one thread, which is not the loop's; a slow disk delays only
   newer states of the file, of which the newest wins.
3. Times are of CLOCK_MONOTONIC and so belong to one boot, whose id is in the file. Under another
   boot id every ``since`` is zero, what a reboot cures is gone, and so are the GPUs, because hardware
   may have been changed; holds and what only a person clears are kept and wait for their GPU.
4. There is a copy, written after the file. Where the file is damaged, missing or cannot be read, the copy
   counts. Where both are damaged, or of another version, they are renamed and the state records that it is
   lost until an operator acknowledges it.
5. What could not be read is neither moved nor written over.
6. No more is written than is read.
"""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from agent.bus import Latest
from agent.counts import Count
from agent.files import write
from agent.log import about
from agent.model.snapshot import Durable, Snapshot
from agent.model.structs import replace
from agent.sinks.statefile_format import UnusableError, decoded, encoded
from agent.threads import DaemonThread
from agent.waiting import PERIOD_NS, sleep_proving

COPY: Final = ".copy"
"""What the name of the copy has more than that of the file."""

MAX_BYTES: Final = 4 * 1024 * 1024
"""A state of 16 GPUs with 7 MIG devices each and every condition there is has some 200 KiB."""

MIN_INTERVAL_S: Final = 0.5
"""Between two writes; the first change is written at once, and so is a condition that is not in the file:
a process that dies with the device it watches must not forget it."""

COUNTS_INTERVAL_S: Final = 10.0
"""Between two writes where nothing but counts changed: a program can change those at will."""

RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 60.0

_log = logging.getLogger(__name__)


class UnreadError(Exception):
    """There is a state file, and the system cannot read it now; the message is the reason."""


def load(path: str, *, boot_id: str) -> Durable | None:
    """Return what was kept in the file or its copy; None: nothing was.

    If both are damaged the result records that the state is lost. Raises UnreadError where one cannot be read
    now and may hold what the other does not.
    """
    damaged: dict[str, str] = {}
    unread: list[str] = []
    found: Durable | None = None
    for each in (path, f"{path}{COPY}"):
        try:
            raw = _read(each)
            found = None if raw is None else decoded(raw, boot_id=boot_id)
        except UnusableError as error:
            damaged[each] = str(error)
        except OSError as error:
            unread.append(f"{each}: {error.strerror or error}")
        if found is not None:
            break
    if found is None and unread:
        raise UnreadError("; ".join(unread))
    for each, why in damaged.items():
        _log.error("Renamed the unusable state file %(path)s: it %(detail)s", about(path=each, detail=why))
        _rename_unusable(each)
    if found is None and damaged:
        return Durable(lost="; ".join(f"{each} {why}" for each, why in damaged.items()))
    if unread:
        _log.warning(
            "Read the copy of the state file %(path)s: %(detail)s", about(path=path, detail=unread[0])
        )
    return found


def _read(path: str) -> bytes | None:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(raw) > MAX_BYTES:
        raise UnusableError(f"is over {MAX_BYTES} bytes")
    return raw


def _rename_unusable(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).replace(f"{path}.unusable")


def save(path: str, raw: bytes) -> None:
    """Write the file and then its copy; OSError if either could not be, or is too long to be read again."""
    if len(raw) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"The state takes {len(raw)} bytes, over the {MAX_BYTES} that are read")
    write(path, raw)
    write(f"{path}{COPY}", raw)


class _Writing(NamedTuple):
    """The write that is under way; there is one at a time, however long the disk takes."""

    done: "asyncio.Future[None]"
    durable: Durable


class StateFile:
    """Writes the durable part of the newest snapshot whenever it changed."""

    failures = Count("state_file_failures_total", "writes", "Writes of the state file that failed.")

    def __init__(
        self,
        path: str,
        latest: Latest[Snapshot],
        *,
        boot_id: str,
        period_ns: int = PERIOD_NS,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """``prove`` is called every ``period_ns`` while the state is in the file or the disk answers."""
        self._path = path
        self._latest = latest
        self._boot_id = boot_id
        self._period_ns = period_ns
        self._prove = prove
        self._written: Durable | None = None
        self._thread = DaemonThread("statefile-writer")
        self._writing: _Writing | None = None
        self.trouble: str | None = None
        """Why the newest state is not in the file; None while it is."""

    async def run(self) -> None:
        """Write each change until cancelled; when the disk rejects a write, retry with growing pauses."""
        pause_s = RETRY_FIRST_S
        version = self._latest.version
        while True:
            self._prove()
            if self._latest.value.durable == self._written:
                version = await self._newer(version)
                continue
            if await self._write_newest():
                pause_s = RETRY_FIRST_S
                await self._rest(MIN_INTERVAL_S, self._knows_more_than_the_file)
                await self._rest_of_counts()
            else:
                await sleep_proving(pause_s, self._period_ns, self._prove)
                pause_s = min(2 * pause_s, RETRY_CAP_S)

    async def _newer(self, version: int) -> int:
        """Wait for a newer state, at most a period; returns the version that was seen last."""
        try:
            async with asyncio.timeout(self._period_ns / 1e9):
                return await self._latest.wait_newer(version)
        except TimeoutError:
            return version

    async def _rest_of_counts(self) -> None:
        """Wait until more than counts is to be written, at most for the pause that counts have."""
        left_s = COUNTS_INTERVAL_S - MIN_INTERVAL_S
        while left_s > 0 and not self._knows_more_than_counts():
            self._prove()
            await self._rest(min(left_s, self._period_ns / 1e9), self._knows_more_than_counts)
            left_s -= self._period_ns / 1e9

    async def _rest(self, seconds: float, is_due: Callable[[], bool]) -> None:
        """Wait until a write is due, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while not is_due():
                    await self._latest.wait_newer(self._latest.version)
        except TimeoutError:
            return

    def _knows_more_than_counts(self) -> bool:
        newest = self._latest.value.durable
        return self._written is None or newest != replace(
            self._written, xids=newest.xids, kernel_log_read=newest.kernel_log_read
        )

    def _knows_more_than_the_file(self) -> bool:
        written = self._written.conditions if self._written is not None else ()
        newest = self._latest.value.durable.conditions
        return newest != written and not {each.key for each in newest} <= {each.key for each in written}

    async def flush(self, timeout_s: float) -> bool:
        """Write the newest state if it is not in the file, but wait no longer than the timeout.

        Returns whether nothing is being written any more.
        """
        if self._latest.value.durable == self._written:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._write_newest()
        except TimeoutError:
            _log.warning("Stopped without the newest state in %(path)s", about(path=self._path))
            return False
        return True

    async def _write_newest(self) -> bool:
        """Write the newest state, after an older one that is being written; return whether it is written."""
        if self._writing is not None:
            await self._outcome_of(self._writing)
            if self._latest.value.durable == self._written:
                return True
        try:
            writing = self._writing or self._begin()
        except RuntimeError as error:
            self._note_failure(error)
            return False
        return await self._outcome_of(writing)

    def _begin(self) -> _Writing:
        durable = self._latest.value.durable
        done = self._thread.begin(lambda: save(self._path, encoded(durable, boot_id=self._boot_id)))
        self._writing = _Writing(done, durable)
        return self._writing

    async def _outcome_of(self, writing: _Writing) -> bool:
        # Not cancelled with the task that waits here: the next one gets the outcome.
        await asyncio.wait({writing.done})
        is_first = self._writing is writing
        if is_first:
            self._writing = None
        try:
            writing.done.result()
        except (OSError, RuntimeError) as error:
            if is_first:
                self._note_failure(error)
            return False
        if is_first:
            self._note_success(writing.durable)
        return True

    def _note_success(self, durable: Durable) -> None:
        if self.trouble is not None:
            _log.info("Wrote the state file again: %(path)s", about(path=self._path))
        self._written, self.trouble = durable, None

    def _note_failure(self, error: OSError | RuntimeError) -> None:
        detail = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self.failures += 1
        if self.trouble != detail:
            _log.error(
                "Could not write the state file %(path)s: %(detail)s", about(path=self._path, detail=detail)
            )
        self.trouble = detail
