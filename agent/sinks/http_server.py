"""A bounded HTTP server on aiohttp's low-level one.

Guarantees: at most MAX_CONNECTIONS connections on one listener: when there are more, the one that
has been idle longest is closed, so idle clients cannot keep a health probe out. A connection that
does nothing is closed after IDLE_S, a request that takes over BUSY_S too (its reader has stopped).
Bodies are read only by who asks for one, with ``body_of``, and up to MAX_BODY_BYTES. A port in use is
told once and tried again every RETRY_S.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from agent.config.values import Address
from agent.errors import AgentError, SourceError
from agent.log import fields

MAX_CONNECTIONS: Final = 64
MAX_LINE_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 4096
MAX_HEADERS: Final = 64
READ_BUFFER_BYTES: Final = 16 * 1024
IDLE_S: Final = 15.0
BUSY_S: Final = 60.0
SWEEP_S: Final = 5.0
RETRY_S: Final = 5.0
BACKLOG: Final = 64
MAX_BODY_BYTES: Final = 8 * 1024
BODY_S: Final = 5.0

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]

_log = logging.getLogger(__name__)
_library_log = logging.getLogger("aiohttp.server")


@dataclass(slots=True)
class _Connection:
    transport: asyncio.Transport
    since_s: float
    is_busy: bool = False


class BoundedServer(web.Server):
    """aiohttp's server with a bound on connections and on their idleness."""

    def __init__(self, handler: Handler) -> None:
        super().__init__(
            self._answer,
            access_log=None,
            logger=_library_log,
            keepalive_timeout=IDLE_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            read_bufsize=READ_BUFFER_BYTES,
            lingering_time=0.0,
        )
        self._handler = handler
        self._clock = asyncio.get_running_loop().time
        self._live: dict[object, _Connection] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Account for a connection; the longest idle one makes room."""
        super().connection_made(handler, transport)
        self._live[handler] = _Connection(transport, self._clock())
        if len(self._live) > MAX_CONNECTIONS:
            idle = min(self._live.values(), key=lambda live: (live.is_busy, live.since_s))
            idle.transport.abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        self._live.pop(handler, None)
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        live = self._live.get(request.protocol)
        if live is not None:
            live.is_busy, live.since_s = True, self._clock()
        try:
            return await self._handler(request)
        finally:
            if live is not None:
                live.is_busy, live.since_s = False, self._clock()

    async def sweep(self) -> None:
        """Close what has been idle or busy for too long, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._clock()
            for live in list(self._live.values()):
                if now_s - live.since_s > (BUSY_S if live.is_busy else IDLE_S):
                    live.transport.abort()


Opener = Callable[[], socket.socket]


async def listen_forever(
    name: str,
    opener: Opener,
    handler: Handler,
    bound: Callable[[str], None] | None = None,
    tried: Callable[[], None] = lambda: None,
) -> None:
    """Serve on a socket until cancelled; while it cannot be opened, try again.

    ``bound`` is told the address, which the kernel chose if the port was 0. ``tried`` is called when the
    socket answers, and each time it could not be opened.
    """
    is_told = False
    while True:
        try:
            listening = opener()
        except OSError as error:
            if not is_told:
                _log.warning(
                    "Could not listen; the port or socket is tried again every few seconds",
                    extra=fields(listener=name, detail=error.strerror or str(error)),
                )
                is_told = True
            tried()
            await asyncio.sleep(RETRY_S)
            continue
        async with _serving(listening, handler):
            address = _name_of(listening)
            _log.info("Listening", extra=fields(listener=name, address=address))
            if bound is not None:
                bound(address)
            tried()
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _serving(listening: socket.socket, handler: Handler) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    bounded = BoundedServer(handler)
    if listening.family == socket.AF_UNIX:
        server: asyncio.Server = await loop.create_unix_server(bounded, sock=listening, backlog=BACKLOG)
    else:
        server = await loop.create_server(bounded, sock=listening, backlog=BACKLOG)
    try:
        async with asyncio.TaskGroup() as group:
            sweeper = group.create_task(bounded.sweep(), name="http-sweeper")
            try:
                yield
            finally:
                sweeper.cancel()
    finally:
        server.close()
        # Not server.wait_closed(): from Python 3.12 on it waits for the clients.
        await bounded.shutdown(timeout=0.5)


def tcp_socket(address: Address) -> socket.socket:
    """Return a socket bound to an address, or raise OSError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address.host, address.port))
    except OSError:
        bound.close()
        raise
    return bound


class ControlSocket:
    """The unix socket of this machine's commands: its file is made, checked and removed here."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._identity: tuple[int, int] | None = None

    def open(self) -> socket.socket:
        """Return the bound socket, or raise OSError; what is not a dead socket is left alone."""
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if _is_dead_socket(self._path):
            self._path.unlink()
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            bound.bind(str(self._path))
            self._path.chmod(0o600)
            status = self._path.lstat()
        except OSError:
            bound.close()
            raise
        self._identity = (status.st_dev, status.st_ino)
        return bound

    def remove(self) -> None:
        """Remove the file if it is still the one we made."""
        with contextlib.suppress(OSError):
            status = self._path.lstat()
            if (status.st_dev, status.st_ino) == self._identity:
                self._path.unlink()
        self._identity = None


def _is_dead_socket(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


class BodyError(AgentError):
    """A request's body is not one that is read."""


async def body_of(request: web.BaseRequest) -> bytes:
    """Return a request's body, or raise BodyError if it is too long, of unknown length or late."""
    length = request.content_length
    if length is None or length > MAX_BODY_BYTES:
        raise BodyError(f"A body needs a Content-Length of at most {MAX_BODY_BYTES}")
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise BodyError(f"The body did not come within {BODY_S:g} s") from None


def peer_of(request: web.BaseRequest) -> tuple[int, int]:
    """Return process and user at the other end of a unix socket, or raise SourceError."""
    transport = request.transport
    connection = transport.get_extra_info("socket") if transport is not None else None
    if connection is None:
        raise SourceError("The client is gone")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return int(pid), int(uid)


def may_control(request: web.BaseRequest) -> bool:
    """Tell whether the peer is root or runs as we do."""
    try:
        return peer_of(request)[1] in (0, os.geteuid())
    except (SourceError, OSError):
        return False


def _name_of(listening: socket.socket) -> str:
    name = listening.getsockname()
    return str(name) if isinstance(name, str) else str(Address(name[0], name[1]))
