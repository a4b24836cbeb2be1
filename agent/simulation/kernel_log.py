"""The kernel log of a simulated node: records as /dev/kmsg gives them, over a unix stream socket.

Guarantees, as with the kernel's own device: every reader gets what is remembered and then what follows,
each at its own pace; one that lags more than MAX_RECORDS behind misses the oldest ones, and detects it by
the gap in the sequence numbers. Writing never waits for a reader.

Source: kernel Documentation/ABI/testing/dev-kmsg.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Final, Self

from agent.errors import UsageError
from agent.simulation.stop_signals import first_of

MAX_RECORDS: Final = 1_024
"""Records remembered, and records a reader may lag behind."""
MAX_READERS: Final = 16
MAX_TEXT: Final = 4_000
"""Characters of a record's text."""

_LEVEL: Final = 3
"""Error; the facility is the kernel's, 0."""


class KernelLog:
    """Serves the log at a path while the context lasts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: deque[bytes] = deque(maxlen=MAX_RECORDS)
        self._count = 0
        self._server: asyncio.Server | None = None
        self._waiting: dict[asyncio.Task[None], asyncio.Event] = {}

    async def __aenter__(self) -> Self:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)  # noqa: FBT003 - positional only
            sock.bind(os.fspath(self._path))
            self._path.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._serve, sock=sock)
        except BaseException:
            sock.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            # What was accepted just now becomes a connection first: asyncio would leave it open, unheard.
            await asyncio.sleep(0)
            server.close()
        sessions = tuple(self._waiting)
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def write(self, text: str) -> None:
        """Add a record of the kernel; lines within the text are one record. Raises UsageError."""
        if not text.strip() or len(text) > MAX_TEXT:
            raise UsageError(f"A record of the kernel log has 1 to {MAX_TEXT} characters")
        head = f"{_LEVEL},{self._count},{time.monotonic_ns() // 1_000},-;"
        self._records.append(head.encode() + _escaped(text) + b"\n")
        self._count += 1
        for event in self._waiting.values():
            event.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = asyncio.current_task()
        if session is None or self._server is None or len(self._waiting) >= MAX_READERS:
            writer.close()
            return
        self._waiting[session] = asyncio.Event()
        try:
            # A reader sends nothing: its end of file closes it.
            await first_of(gone=reader.read(1), sending=self._send(writer, self._waiting[session]))
        except (OSError, asyncio.CancelledError):
            pass  # the reader went away, or the node stops
        finally:
            del self._waiting[session]
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, more: asyncio.Event) -> None:
        position = 0
        while True:
            position = max(position, self._count - len(self._records))
            more.clear()
            if position < self._count:
                writer.write(self._records[position - self._count])
                position += 1
                await writer.drain()
            else:
                await more.wait()


def _escaped(text: str) -> bytes:
    """Return text as the kernel gives it: backslashes and what is not printable ASCII in hexadecimal."""
    return b"".join(
        bytes((byte,)) if 32 <= byte < 127 and byte != ord("\\") else b"\\x%02x" % byte
        for byte in text.encode()
    )
