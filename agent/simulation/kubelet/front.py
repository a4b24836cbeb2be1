"""The kubelet's socket files: a listening socket of our own, in front of a gRPC server without a file.

gRPC's core removes its socket file when a server stops, and listens the moment it binds. A kubelet that is
killed leaves the file, and one that starts slowly refuses connections for a while. So bytes are carried,
unread, to a server in the abstract namespace.

Guarantees:

1. A connection carries every byte in both directions, with back-pressure, and at most MAX_CONNECTIONS
   are open; a further one is closed at once.
2. ``abort`` drops every connection without a goodbye, as the kernel does for a killed process.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from typing_extensions import override

from agent.errors import UsageError

MAX_CONNECTIONS: Final = 64
"""Connections to one socket file; a node has a handful of plugins."""
MAX_PATH_BYTES: Final = 107
"""A unix socket's path, less its final zero byte. Source: unix(7)."""


class _Leg(asyncio.Protocol):
    """One of the two sockets of a carried connection; before it is joined it reads once at most.

    It pauses at the first bytes and not in ``connection_made``: up to Python 3.11.2 asyncio starts to
    read after that call, paused or not.
    """

    def __init__(self, made: Callable[["_Leg"], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.lost = asyncio.get_running_loop().create_future()
        self._made = made
        self._other: asyncio.Transport | None = None
        self._early = b""

    def join(self, other: "_Leg") -> None:
        """Name the leg to which ``flow`` will carry."""
        self._other = other.transport

    def flow(self) -> None:
        """Carry to the other leg what arrived here and what will; both are joined by now."""
        if self.transport is not None and self._other is not None:
            self.transport.resume_reading()
            # Last, because it may pause the reading.
            self._other.write(self._early)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._made(self)

    @override
    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)
        elif self.transport is not None:
            self._early += data
            self.transport.pause_reading()

    @override
    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.pause_reading()

    @override
    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.resume_reading()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None:
            self._other.close()
        if not self.lost.done():
            self.lost.set_result(None)

    def peer_pid(self) -> int | None:
        """Return the process at the other end. Source: unix(7), SO_PEERCRED."""
        if self.transport is None:
            return None
        sock: socket.socket = self.transport.get_extra_info("socket")
        pid, _uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    def abort(self) -> None:
        """Drop the socket without a goodbye."""
        if self.transport is not None:
            self.transport.abort()


class SocketFront:
    """A socket file and the connections through it; see the guarantees above."""

    def __init__(self, path: Path, server_name: str) -> None:
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise UsageError(
                f"The socket path {path} is longer than {MAX_PATH_BYTES} bytes; choose a shorter directory"
            )
        self._path = path
        self._server_name = server_name
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._file: tuple[int, int] | None = None
        self._carriers: dict[asyncio.Task[None], _Leg] = {}
        self._peers: dict[str, int | None] = {}
        self._count = 0

    def bind(self) -> None:
        """Create the file; until ``listen`` it refuses connections."""
        self._socket = _unix_socket()
        self._socket.bind(os.fspath(self._path))
        status = self._path.stat()
        self._file = (status.st_dev, status.st_ino)

    async def listen(self) -> None:
        """Accept connections from now on."""
        if self._socket is None:
            return
        # create_server and not create_unix_server: from Python 3.13 on the latter removes the file.
        self._server = await asyncio.get_running_loop().create_server(self._accept, sock=self._socket)

    def peer_pid(self, name: str) -> int | None:
        """Return the process at the other end, by gRPC's name of the connection."""
        return self._peers.get(name.removeprefix("unix-abstract:"))

    def close(self) -> None:
        """Stop accepting; the file stays and refuses connections, what is open goes on."""
        if self._server is not None:
            loop = asyncio.get_running_loop()
            for listener in self._server.sockets:
                loop.remove_reader(listener.fileno())
            # What was accepted just now becomes a connection first: asyncio would leave it open, unheard.
            loop.call_soon(self._server.close)
            self._server = None
        elif self._socket is not None:
            self._socket.close()
        self._socket = None

    def abort(self) -> None:
        """Drop every connection at once."""
        for leg in self._carriers.values():
            leg.abort()

    async def drained(self) -> None:
        """Wait until no connection is left."""
        if self._carriers:
            await asyncio.wait(self._carriers)

    def unlink(self) -> None:
        """Remove the file, unless it is not the one that was bound."""
        with contextlib.suppress(FileNotFoundError):
            status = self._path.stat()
            if (status.st_dev, status.st_ino) == self._file:
                self._path.unlink()

    def _accept(self) -> _Leg:
        self._count += 1
        name = f"{self._server_name}-{self._count}"
        return _Leg(lambda leg: self._accepted(leg, name))

    def _accepted(self, leg: _Leg, name: str) -> None:
        if len(self._carriers) >= MAX_CONNECTIONS:
            leg.abort()
            return
        carry = self._carry(leg, name)
        task = asyncio.get_running_loop().create_task(carry, name=f"kubelet-connection-{name}")
        self._carriers[task] = leg
        task.add_done_callback(lambda done: self._carriers.pop(done, None))

    async def _carry(self, near: _Leg, name: str) -> None:
        far = _Leg(lambda _leg: None)
        self._peers[name] = near.peer_pid()
        try:
            await self._connect(far, name)
            near.join(far)
            far.join(near)
            near.flow()
            far.flow()
            await asyncio.wait((near.lost, far.lost))
        except OSError:
            pass  # the server behind is gone, so the connection ends as it would with the kubelet's process
        finally:
            near.abort()
            far.abort()
            self._peers.pop(name, None)

    async def _connect(self, far: _Leg, name: str) -> None:
        sock = _unix_socket()
        try:
            sock.bind(f"\0{name}")
            sock.connect(f"\0{self._server_name}")
            await asyncio.get_running_loop().create_connection(lambda: far, sock=sock)
        except BaseException:
            sock.close()
            raise


def _unix_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)  # noqa: FBT003 (socket's signature)
    return sock
