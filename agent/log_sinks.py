"""Sinks of log lines: a descriptor, written by a thread, or journald, by datagrams.

Guarantees: writing never blocks the caller; lines beyond the bounds are dropped and counted.
"""

import array
import errno
import os
import socket
import threading
import time
from collections import deque
from typing import Final, NamedTuple

from agent.counts import Count

MAX_QUEUED_LINES: Final = 2048
"""Lines that may wait for a slow reader of standard error."""
MAX_LINE_BYTES: Final = 16 * 1024
"""A longer line is cut; the journal has its own limits."""
JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"


class LogStatistics(NamedTuple):
    """Counts since the start, and how long the sink has been blocked."""

    written: int
    dropped: int
    blocked_s: float


WRITTEN: Final = Count("log_lines_written_total", "lines", "Lines of the agent's log that were written.")
DROPPED: Final = Count(
    "log_lines_dropped_total",
    "lines",
    "Lines of the agent's log that were dropped: its sink was blocked or gone.",
)


class LineWriter:
    """Writes lines to a descriptor from a thread of its own, the only one that may block.

    The descriptor stays blocking: other processes often share it, and O_NONBLOCK would break their writes.
    """

    written, dropped = WRITTEN, DROPPED

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._busy_since_s: float | None = None
        self._is_running = False

    def write(self, line: bytes) -> None:
        """Queue a line, or drop it if the queue is full."""
        with self._changed:
            if len(self._lines) >= MAX_QUEUED_LINES:
                self.dropped += 1
                return
            self._lines.append(line)
            self._changed.notify_all()
            must_start, self._is_running = not self._is_running, True
        if must_start:
            self._start()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="log-writer", daemon=True).start()
        except RuntimeError:
            # The thread could not start; the next line retries.
            with self._changed:
                self._is_running = False

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy_since_s = None
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                batch = self._pop_batch()
                self._busy_since_s = time.monotonic()
            is_written = self._write_all(b"".join(batch))
            with self._changed:
                if is_written:
                    self.written += len(batch)
                else:
                    self.dropped += len(batch)

    def _pop_batch(self) -> list[bytes]:
        batch = [self._lines.popleft()]
        room = MAX_LINE_BYTES - len(batch[0])
        while self._lines and len(self._lines[0]) <= room:
            room -= len(self._lines[0])
            batch.append(self._lines.popleft())
        return batch

    def _write_all(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                # Another process set O_NONBLOCK on the shared descriptor.
                time.sleep(0.05)
            except OSError:
                return False
        return True

    def statistics(self) -> LogStatistics:
        """Return the counts at this moment."""
        with self._changed:
            since_s = self._busy_since_s
            blocked_s = 0.0 if since_s is None else time.monotonic() - since_s
            return LogStatistics(self.written, self.dropped, blocked_s)

    def flush(self, timeout_s: float) -> None:
        """Wait until nothing is queued, but no longer than the timeout."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_running or (not self._lines and self._busy_since_s is None), timeout_s
            )

    def close(self) -> None:
        """Do nothing: the descriptor is not the agent's, and the thread only waits for lines."""


class Journal:
    """Sends entries to journald, each a non-blocking datagram."""

    written, dropped = WRITTEN, DROPPED

    def __init__(self, path: str = JOURNAL_SOCKET) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._failing_since_s: float | None = None

    def write(self, entry: bytes) -> None:
        """Send an entry, or count it as dropped."""
        try:
            self._send(entry)
        except OSError:
            self.dropped += 1
            if self._failing_since_s is None:
                self._failing_since_s = time.monotonic()
            return
        self._failing_since_s = None
        self.written += 1

    def _send(self, entry: bytes) -> None:
        try:
            self._socket.sendto(entry, self._path)
        except OSError as error:
            if error.errno not in {errno.EMSGSIZE, errno.ENOBUFS}:
                raise
            self._send_in_memory_file(entry)

    def _send_in_memory_file(self, entry: bytes) -> None:
        descriptor = os.memfd_create("journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(descriptor, entry)
            _seal(descriptor)
            rights = array.array("i", [descriptor]).tobytes()
            self._socket.sendmsg([], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], 0, self._path)
        finally:
            os.close(descriptor)

    def statistics(self) -> LogStatistics:
        """Return the counts at this moment."""
        since_s = self._failing_since_s
        blocked_s = 0.0 if since_s is None else time.monotonic() - since_s
        return LogStatistics(self.written, self.dropped, blocked_s)

    def flush(self, timeout_s: float) -> None:
        """Return at once: a datagram is sent or dropped when it is written."""

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _seal(descriptor: int) -> None:
    import fcntl  # noqa: PLC0415 - only for an entry too large for a datagram

    fcntl.fcntl(
        descriptor,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
    )
