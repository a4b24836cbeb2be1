"""An HTTP server on aiohttp's low-level one, behind places for connections.

Guarantees: each connection carries one request and takes one of the places of http_places. A request is
answered only if aiohttp reads the same kind of it as that for which it got its place. Bodies are read only
by a handler that asks for one, with ``body_of``, up to MAX_BODY_BYTES. A port in use is logged once and tried
again every RETRY_S.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from agent.config.values import Address
from agent.errors import AgentError, SourceError
from agent.log import about
from agent.sinks.http.places import UCRED, Bounds, Kind, Places, kind_of

MAX_LINE_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 4096
MAX_HEADERS: Final = 64
READ_BUFFER_BYTES: Final = 16 * 1024
RETRY_S: Final = 5.0
MAX_BODY_BYTES: Final = 8 * 1024
BODY_S: Final = 5.0

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]

_log = logging.getLogger(__name__)
_library_log = logging.getLogger("aiohttp.server")


class _Session(msgspec.Struct):
    """One request: what was read of it before aiohttp had the connection, and for what it has its place."""

    read: bytes
    kind: Kind
    closed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class OneRequestServer(web.Server):
    """aiohttp's server, with one request on each connection."""

    def __init__(self, handler: Handler) -> None:
        super().__init__(
            self._answer,
            access_log=None,
            logger=_library_log,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            read_bufsize=READ_BUFFER_BYTES,
            lingering_time=0.0,
        )
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[object, _Session] = {}

    async def serve(self, connection: socket.socket, read: bytes, kind: Kind) -> None:
        """Answer the request on a connection, and return once that is closed; see http_places.Serve."""
        session = _Session(read, kind)

        def protocol() -> asyncio.Protocol:
            made = self()
            self._sessions[made] = session
            return made

        transport, _ = await self._loop.connect_accepted_socket(protocol, connection)
        try:
            await session.closed.wait()
        finally:
            transport.abort()

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Hand aiohttp what was read before, ahead of everything that is read from now on."""
        super().connection_made(handler, transport)
        self._loop.call_soon(handler.data_received, self._sessions[handler].read)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Let the session end."""
        super().connection_lost(handler, exc)
        self._sessions.pop(handler).closed.set()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        session = self._sessions.get(request.protocol)
        if session is None or kind_of(request.path) is not session.kind:
            response = web.Response(status=400, text="The path of a request must be written plainly\n")
        else:
            response = await self._handler(request)
        response.force_close()
        return response


Opener = Callable[[], socket.socket]


async def listen_forever(
    name: str,
    opener: Opener,
    handler: Handler,
    bound: Callable[[str], None] | None = None,
    tried: Callable[[], None] = lambda: None,
    bounds: Bounds | None = None,
) -> None:
    """Serve on a socket until cancelled; while it cannot be opened, try again.

    ``bound`` is called with the address, which the kernel chose if the port was 0. ``tried`` is called when
    the socket answers, and each time it could not be opened.
    """
    is_logged = False
    while True:
        try:
            listening = opener()
        except OSError as error:
            if not is_logged:
                _log.warning(
                    "Could not listen on %(address)s: %(detail)s; trying again every %(every_s)s s",
                    about(
                        listener=name,
                        address=error.filename or name,
                        detail=error.strerror or str(error),
                        every_s=RETRY_S,
                    ),
                )
                is_logged = True
            tried()
            await asyncio.sleep(RETRY_S)
            continue
        with listening:
            server = OneRequestServer(handler)
            places = Places(name, listening, server.serve, bounds or Bounds())
            address = _name_of(listening)
            _log.info("Listening on %(address)s", about(listener=name, address=address))
            if bound is not None:
                bound(address)
            tried()
            await places.run()


def tcp_socket(address: Address) -> socket.socket:
    """Return a socket bound to an address, or raise OSError with it."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address.host, address.port))
    except OSError as error:
        bound.close()
        error.filename = str(address)
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
        except OSError as error:
            bound.close()
            error.filename = str(self._path)
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
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    pid, uid, _ = UCRED.unpack(raw)
    return int(pid), int(uid)


def may_control(request: web.BaseRequest) -> bool:
    """Return whether the peer is root or runs as we do."""
    try:
        return peer_of(request)[1] in (0, os.geteuid())
    except (SourceError, OSError):
        return False


def _name_of(listening: socket.socket) -> str:
    name = listening.getsockname()
    return str(name) if isinstance(name, str) else str(Address(name[0], name[1]))
