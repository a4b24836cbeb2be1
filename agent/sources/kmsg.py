"""Reads the kernel log: XIDs that NVML may not report, and the driver's last lines before a fault.

Guarantees:

1. Every record is read once. Records from before the agent started to read are backlog, decided by
   the order of the records where the kernel keeps the log (its clock for the log is no other clock), by
   their time where something else does. A source that is restarted continues where it stopped.
   Where an earlier agent of this boot read up to some record, what it emitted is not emitted again, and later
   records are no backlog, but not live either: no agent listened to NVML in between. The facts of both state
   whether a later record shows that the GPU was initialised again.
2. The gap in the sequence numbers counts the records that the kernel dropped before they were read; the loss
   is emitted.
3. The loop never stalls: reads do not block, a turn handles MAX_RECORDS_PER_TURN records, and a thread of
   its own reads the backlog.
4. Memory is bounded: RECENT_LINES lines, MAX_RECORD_BYTES of an incomplete record.

*Cost:* nothing while the log is quiet. A record takes about 10 microseconds, at the start once also for
each record of the log (some ten thousand). There is no period; a line is emitted within a turn of the loop.
Reading needs CAP_SYSLOG where the kernel restricts dmesg, and /dev/kmsg in the agent's mount namespace.

``path`` is the kernel's device, or a pipe or unix stream socket with the same records.
Source: kernel Documentation/ABI/testing/dev-kmsg.
"""

import asyncio
import logging
import os
import re
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from agent import guard
from agent.bus import Inbox
from agent.core.shares import Shares
from agent.counts import Count
from agent.errors import SourceError
from agent.log import about
from agent.model.facts import (
    KERNEL_LOG,
    Fact,
    FactsLost,
    KernelLogRead,
    KernelXidSeen,
    SwitchErrorSeen,
    UvmErrorSeen,
)
from agent.model.policy import SECOND_NS
from agent.sources.kmsg_records import (
    MAX_ADDRESSES,
    Line,
    LogReader,
    Record,
    RepairLine,
    SwitchLine,
    UvmLine,
    XidLine,
    parse_record,
    split_lines,
)
from agent.threads import in_daemon_thread

KERNEL_LOG_PATH: Final = Path("/dev/kmsg")

PERIOD_NS: Final = 10 * SECOND_NS
"""Between two reads without an event."""
MAX_RECORDS_PER_TURN: Final = 64
"""Records after which the source yields to the loop."""
MAX_RECORD_BYTES: Final = 16_384
"""Above what the kernel returns at once (8,192), so that no read fails because the buffer is too small."""
MAX_BACKLOG_RECORDS: Final = 1_000_000
MAX_BACKLOG_XIDS: Final = 4_096
"""The newest ones of the backlog that are counted."""

_DEVICE: Final = os.makedev(1, 11)
"""Source: kernel Documentation/admin-guide/devices.txt."""

_log = logging.getLogger(__name__)


class EarlierLines:
    """Events from records written before the agent read the log, and later repairs, within bounds."""

    def __init__(self, *, max_lines: int = MAX_BACKLOG_XIDS, max_addresses: int = MAX_ADDRESSES) -> None:
        """Keep the ``max_lines`` newest events, and the latest repair of ``max_addresses`` GPUs."""
        self._found: deque[tuple[int, Line]] = deque(maxlen=max_lines)
        self._max_addresses = max_addresses
        self._repaired: dict[str, int] = {}
        self._all_repaired = -1

    @property
    def is_empty(self) -> bool:
        """Whether there is no event that would be a fact."""
        return not self._found

    def add(self, sequence: int, line: Line) -> None:
        """Note the event in the record of a sequence number."""
        if isinstance(line, RepairLine):
            self._note_repair(line.pci, sequence)
            return
        if isinstance(line, XidLine) and line.words.action == 0:
            self._note_repair(line.pci, sequence)
        self._found.append((sequence, line))

    def _note_repair(self, pci: str | None, sequence: int) -> None:
        if pci is None:
            self._all_repaired = sequence
            return
        self._repaired.pop(pci, None)
        self._repaired[pci] = sequence
        if len(self._repaired) > self._max_addresses:
            del self._repaired[next(iter(self._repaired))]

    def facts(self, *, after: int | None, before: int | None, backlog: bool) -> Iterator[Fact]:
        """Yield a fact for each event between two sequence numbers; facts of one key are merged."""
        merged: dict[object, KernelXidSeen] = {}
        for sequence, line in self._found:
            if (after is not None and sequence <= after) or (before is not None and sequence >= before):
                continue
            fact = _fact(line, backlog=backlog, live=False, repaired=self._is_repaired(sequence, line))
            if isinstance(fact, KernelXidSeen):
                known = merged.pop(fact.key, None)
                merged[fact.key] = fact if known is None else known.merged_with(fact)
            elif fact is not None and sequence > self._all_repaired:
                yield fact
        yield from merged.values()

    def _is_repaired(self, sequence: int, line: Line) -> bool:
        of_gpu = self._repaired.get(line.pci, -1) if isinstance(line, XidLine) else -1
        return sequence < max(of_gpu, self._all_repaired)


class _Backlog(msgspec.Struct, frozen=True):
    earlier: EarlierLines
    lines: tuple[str, ...]
    newest: int | None
    """Sequence number of the last record."""


class KernelLogSource:
    """Emits the XIDs in the kernel log and keeps the driver's newest lines."""

    records = Count("kernel_log_records_total", "records", "Records read from the kernel log.")
    of_processes = Count(
        "kernel_log_process_records_total", "records", "Records in the kernel log that processes wrote."
    )
    malformed = Count("kernel_log_malformed_total", "lines", "Lines of the kernel log that are no records.")
    lost = Count("kernel_log_lost_total", "records", "Records that the kernel dropped before they were read.")

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        path: Path = KERNEL_LOG_PATH,
        clock: Callable[[], int],
        read_until: int | None = None,
        period_ns: int = PERIOD_NS,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """``clock`` is the monotonic one; it is compared with the times of a log that is no device.

        ``prove`` is called after each completed read, at least once in ``period_ns``.
        ``read_until`` is the record up to which an earlier agent of this boot read; None: there was none.
        """
        self._inbox = inbox
        self._path = path
        self._clock = clock
        self._recent = RecentLines()
        self._reader = LogReader()
        self._earlier = EarlierLines()
        self._has_backlog = False
        self._backlog_read = False
        self._next_sequence: int | None = None
        self._first_sequence: int | None = None
        self._backlog_until_us = -1
        self._partial = b""
        self._read_until = read_until
        self._period_ns = period_ns
        self._prove = prove
        self._lines: deque[bytes] = deque()
        """Lines that were read and not handled yet."""
        self._failed_line: bytes | None = None
        self._position_due = True
        """Whether the read position is to be emitted: at the start, and with each XID."""

    def recent(self) -> tuple[str, ...]:
        """Return the driver's newest lines, the oldest first, each with its seconds since the boot."""
        return self._recent.all()

    async def run(self) -> None:
        """Read until cancelled; raises SourceError when the log cannot be read. No two at once."""
        descriptor, is_device = _open(self._path)
        loop = asyncio.get_running_loop()
        failure: asyncio.Future[SourceError] = loop.create_future()
        try:
            self._has_backlog = is_device
            self._begin(descriptor, is_device=is_device)
            self._watch(descriptor, failure)
            if is_device and not self._backlog_read:
                backlog = await in_daemon_thread("kernel-log-backlog", lambda: _read_backlog(self._path))
                # Records that the other reader read last may still wait here, and are no backlog.
                self._read(descriptor, failure)
                self._handle_backlog(backlog)
            while not failure.done():
                # A quiet log is indistinguishable from a lost wake-up: read anyway.
                self._read(descriptor, failure)
                self._prove()
                await asyncio.wait((failure,), timeout=self._period_ns / 1e9)
            raise failure.result()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def _watch(self, descriptor: int, failure: "asyncio.Future[SourceError]") -> None:
        try:
            guard.add_reader("kernel-log", descriptor, self._read, descriptor, failure)
        except PermissionError:
            raise SourceError(
                f"The kernel log {self._path} cannot be polled; "
                "mount the node's /dev/kmsg, or name another one with --kernel-log"
            ) from None

    def _begin(self, descriptor: int, *, is_device: bool) -> None:
        self._partial = b""
        if is_device:
            # The device returns them again.
            self._lines.clear()
        if not is_device:
            self._next_sequence = None
            self._backlog_until_us = self._clock() // 1_000
        elif self._next_sequence is None:
            os.lseek(descriptor, 0, os.SEEK_END)

    # Reading

    def _read(self, descriptor: int, failure: "asyncio.Future[SourceError]") -> None:
        """Read the log for one turn of the loop, and emit the read position if that is due."""
        self._read_turn(descriptor, failure)
        self._emit_stream_backlog()
        self._emit_read_position()

    def _read_turn(self, descriptor: int, failure: "asyncio.Future[SourceError]") -> None:
        self._handle_lines()
        turn_ends_at = self.records + MAX_RECORDS_PER_TURN
        for _ in range(MAX_RECORDS_PER_TURN):
            if failure.done() or self.records >= turn_ends_at:
                return
            try:
                chunk = os.read(descriptor, MAX_RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                # The kernel overwrote the next records; the next one's sequence number shows how many.
                self._overrun()
                continue
            except OSError as error:
                self._stop(descriptor, failure, f"could not be read: {error.strerror}")
                return
            if not chunk:
                self._stop(descriptor, failure, "has ended")
                return
            self._handle_chunk(chunk)

    def _stop(self, descriptor: int, failure: "asyncio.Future[SourceError]", why: str) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        failure.set_result(SourceError(f"The kernel log {self._path} {why}; it is opened again"))

    def _overrun(self) -> None:
        if self._next_sequence is None:
            # Nothing was read yet, so the number is unknown.
            self._emit_lost(1)

    def _handle_chunk(self, chunk: bytes) -> None:
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > MAX_RECORD_BYTES:
            # The rest of it is no record either.
            self._partial = b""
            self.malformed += 1
        self._lines.extend(lines)
        self._handle_lines()

    def _handle_lines(self) -> None:
        """Handle the lines that were read; the next run retries a line on which that failed."""
        while self._lines:
            line, sequence = self._lines[0], self._next_sequence
            try:
                self._handle_line(line)
            except Exception:
                self._next_sequence = sequence
                if line != self._failed_line:
                    self._failed_line = line
                    raise
                _log.exception("Handling a line of the kernel log failed twice; skipping it: %r", line[:500])
                self.malformed += 1
            self._lines.popleft()

    def _handle_line(self, line: bytes) -> None:
        record = parse_record(line)
        if record is not None:
            self._handle_record(record)
        elif not line.startswith(b" "):
            self.malformed += 1

    def _handle_record(self, record: Record) -> None:
        self.records += 1
        self.of_processes += not record.is_kernel
        if not self._is_next(record.sequence) or not record.may_matter:
            return
        lines = split_lines(record)
        if record.is_of_driver:
            self._recent.add(_shown(lines, record))
        found = self._reader.read(lines, record.time_us)
        if record.time_us <= self._backlog_until_us:
            if found is not None:
                self._earlier.add(record.sequence, found)
            return
        self._emit_stream_backlog()
        fact = None if found is None else _fact(found, backlog=False, live=True)
        if fact is not None and not self._was_emitted(record.sequence):
            self._inbox.put(fact)
            self._position_due = True

    def _emit_stream_backlog(self) -> None:
        """Emit the backlog of a log that is no device; its later lines may have reported a repair."""
        if not self._earlier.is_empty:
            earlier, self._earlier = self._earlier, EarlierLines()
            self._emit_earlier(earlier, before=None)

    def _was_emitted(self, sequence: int) -> bool:
        return self._read_until is not None and sequence <= self._read_until

    def _is_next(self, sequence: int) -> bool:
        """Return whether a record was not read before; emit the loss of those missing before it."""
        expected = self._next_sequence
        if expected is not None and sequence < expected:
            return False
        if expected is not None and sequence > expected:
            self._emit_lost(sequence - expected)
        self._next_sequence = sequence + 1
        if self._first_sequence is None:
            self._first_sequence = sequence
        return True

    def _handle_backlog(self, backlog: _Backlog) -> None:
        first = self._first_sequence
        if backlog.newest is not None and self._was_emitted(backlog.newest + 1):
            # The position is from another log: this one is shorter.
            self._read_until = None
        self._emit_earlier(backlog.earlier, before=first)
        self._recent.add_before(backlog.lines)
        if self._next_sequence is None and backlog.newest is not None:
            self._next_sequence = backlog.newest + 1
        self._backlog_read = True
        self._emit_read_position()

    # Facts

    def _emit_read_position(self) -> None:
        is_whole = self._backlog_read or not self._has_backlog
        if self._position_due and is_whole and self._next_sequence is not None:
            self._position_due = False
            self._inbox.put(KernelLogRead(until=self._next_sequence - 1))

    def _emit_earlier(self, earlier: EarlierLines, *, before: int | None) -> None:
        is_backlog = self._read_until is None
        for fact in earlier.facts(after=self._read_until, before=before, backlog=is_backlog):
            self._inbox.put(fact)
            self._position_due = True

    def _emit_lost(self, count: int) -> None:
        self.lost += count
        _log.warning(
            "%(count)s records of the kernel log were lost before they could be read", about(count=count)
        )
        self._inbox.put(FactsLost(lost_from=KERNEL_LOG, count=count, source=KERNEL_LOG))


def _fact(found: Line, *, backlog: bool, live: bool, repaired: bool = False) -> Fact | None:
    match found:
        case XidLine():
            return KernelXidSeen(
                pci=found.pci,
                xid=found.xid,
                detail=found.detail,
                words=found.words,
                in_words=found.in_words,
                backlog=backlog,
                live=live,
                repaired=repaired,
                gi=found.gi,
                ci=found.ci,
            )
        case SwitchLine():
            # The links and the fabric show earlier switch errors by now.
            return SwitchErrorSeen(found.pci, found.sxid, found.fatal, found.detail) if live else None
        case UvmLine():
            return UvmErrorSeen(found.status)
        case RepairLine():
            # While an agent runs, sysfs and uevents report it directly.
            return None


def _shown(lines: Iterable[str], record: Record) -> Iterable[str]:
    seconds, rest_us = divmod(record.time_us, 1_000_000)
    return (f"[{seconds:5}.{rest_us:06}] {line}" for line in lines)


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor that does not block, and whether it is the kernel's own device."""
    try:
        kind = path.stat()
        if stat.S_ISSOCK(kind.st_mode) or stat.S_ISFIFO(kind.st_mode):
            _check_writers(path, kind)
        if stat.S_ISSOCK(kind.st_mode):
            return _connected(path), False
        if not (stat.S_ISCHR(kind.st_mode) or stat.S_ISFIFO(kind.st_mode)):
            raise SourceError(
                f"The kernel log {path} is no device, pipe or socket; name another one with --kernel-log"
            )
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise SourceError(
            f"The kernel log {path} does not exist; mount it, or name another one with --kernel-log"
        ) from None
    except PermissionError as error:
        raise SourceError(
            f"The kernel log {path} may not be read ({error.strerror}); give the agent CAP_SYSLOG"
        ) from None
    except OSError as error:
        raise SourceError(
            f"The kernel log {path} could not be opened: {error.strerror}; name another one with --kernel-log"
        ) from None
    return descriptor, stat.S_ISCHR(kind.st_mode) and kind.st_rdev == _DEVICE


def _check_writers(path: Path, kind: os.stat_result) -> None:
    """Raise SourceError if other users may write to what counts as the kernel's log."""
    is_open_to_others = stat.S_ISFIFO(kind.st_mode) and kind.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if kind.st_uid not in {0, os.geteuid()} or is_open_to_others:
        raise SourceError(
            f"Other users may write to the kernel log {path} (mode {stat.filemode(kind.st_mode)}, user"
            f" {kind.st_uid}); allow only root to write it, or name another one with --kernel-log"
        )


def _connected(path: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        client.connect(os.fspath(path))
        return client.detach()


def _read_backlog(path: Path) -> _Backlog:
    """Read the present records of the kernel's device; blocks for milliseconds, never for more records."""
    reader = LogReader()
    earlier = EarlierLines()
    kept = RecentLines()
    newest: int | None = None
    descriptor, _ = _open(path)
    try:
        for _ in range(MAX_BACKLOG_RECORDS):
            try:
                chunk = os.read(descriptor, MAX_RECORD_BYTES)
            except BrokenPipeError:
                continue
            except OSError:
                # No more for now; any other error recurs in the reader on the loop.
                break
            record = parse_record(chunk.partition(b"\n")[0])
            if record is None:
                continue
            newest = record.sequence
            if not record.may_matter:
                continue
            lines = split_lines(record)
            if record.is_of_driver:
                kept.add(_shown(lines, record))
            found = reader.read(lines, record.time_us)
            if found is not None:
                earlier.add(record.sequence, found)
    finally:
        os.close(descriptor)
    return _Backlog(earlier, kept.all(), newest)


RECENT_LINES: Final = 200

_XID: Final = re.compile(r"Xid \(PCI:([^)]{1,32})\): ([0-9]{1,10})")


class RecentLines:
    """Lines in the order of the log, with a share for each device and XID."""

    def __init__(self, capacity: int = RECENT_LINES) -> None:
        self._lines: Shares[tuple[str, ...], int, str] = Shares(capacity)
        self._count = 0

    def add(self, lines: Iterable[str]) -> None:
        """Append lines; at capacity, evict the oldest line of the largest share."""
        for line in lines:
            found = _XID.search(line)
            self._count += 1
            self._lines.put(() if found is None else found.groups(), self._count, line)

    def add_before(self, lines: Iterable[str]) -> None:
        """Insert lines of an earlier time before the present ones."""
        later = self.all()
        self._lines = Shares(self._lines.total)
        self.add(lines)
        self.add(later)

    def all(self) -> tuple[str, ...]:
        """Return the lines, the oldest first."""
        return tuple(entry.value for entry in self._lines)
