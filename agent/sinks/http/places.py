"""Which connections an HTTP listener serves: places by kind of request, a share of them for each client.

Guarantees, whatever the clients do:

1. A connection without a complete request head takes one of ``Bounds.heads`` places for at most
   ``head_s``. Where they are all taken, the client with most of them loses its oldest.
2. A complete request takes a place of its own kind, so that readers of events or slow readers of a document
   never keep a health probe out. Where those are all taken, the request is rejected with 503, unless another
   client has more of them: that one loses its newest.
3. A place ends with the answer, and after the time of its kind. So the descriptors of a listener are bounded.
4. Running out of descriptors costs connections without a request first, and ends no accepting.
"""

import asyncio
import errno
import logging
import re
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

import msgspec

from agent import guard
from agent.core.shares import Entry, Shares
from agent.log import about, fields

MAX_HEAD_BYTES: Final = 8 * 1024
ACCEPTS_PER_TURN: Final = 64
"""Connections accepted, at the most, before the loop goes on to other work."""
READS_PER_TURN: Final = 64
AGAIN_S: Final = 0.1
"""Between two reads of a request that is cut up, so that one byte after the other costs little."""
BACKLOG: Final = 4_096
"""Connections that may wait to be accepted; the kernel allows net.core.somaxconn of them."""
UCRED: Final = struct.Struct("3i")
"""pid, uid, gid. Source: unix(7), struct ucred."""

_NOT_PLAIN: Final = re.compile(r"%|//|/\.")
"""In a path that has another form too, for which it would get a place of another kind."""
_HEAD_END: Final = b"\r\n\r\n"
_READABLE_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT
_GONE: Final = frozenset({errno.ECONNABORTED, errno.EINTR, errno.EPROTO})

_log = logging.getLogger(__name__)


class Kind(StrEnum):
    """The kinds of request that have places of their own."""

    PROBE = "probe"
    PREFLIGHT = "preflight"
    METRICS = "metrics"
    EVENTS = "events"
    COMMAND = "command"
    DOCUMENT = "document"


_KINDS: Final = {
    "livez": Kind.PROBE,
    "readyz": Kind.PROBE,
    "healthz": Kind.PROBE,
    "preflight": Kind.PREFLIGHT,
    "metrics": Kind.METRICS,
    "v1/events": Kind.EVENTS,
    "v1/stream": Kind.EVENTS,
    "control": Kind.COMMAND,
}


def kind_of(path: str) -> Kind:
    """Return the kind of a request by its path, without the query."""
    whole = path.strip("/")
    return _KINDS.get(whole) or _KINDS.get(whole.partition("/")[0], Kind.DOCUMENT)


class Room(msgspec.Struct, frozen=True):
    """Places of one kind, and for how long a request may take one."""

    places: int
    within_s: float


class Bounds(msgspec.Struct, frozen=True):
    """Limits of one listener; the defaults are the product's, tests set smaller ones."""

    heads: int = 512
    head_s: float = 5.0
    rooms: Mapping[Kind, Room] = msgspec.field(
        default_factory=lambda: {
            Kind.PROBE: Room(32, 10.0),
            Kind.PREFLIGHT: Room(16, 10.0),
            Kind.METRICS: Room(8, 15.0),
            Kind.EVENTS: Room(32, 45.0),
            Kind.COMMAND: Room(16, 60.0),
            Kind.DOCUMENT: Room(16, 15.0),
        }
    )
    sweep_s: float = 1.0
    rest_s: float = 0.05
    """How long accepting rests when there are no descriptors."""
    report_s: float = 60.0
    """Between two log lines about clients that exceed their places."""


Serve = Callable[[socket.socket, bytes, Kind], Coroutine[Any, Any, None]]
"""Answers one request on a connection that it owns from now on, of which the given bytes were read.

It returns once the connection is closed; if cancelled, it closes that at once.
"""


class _Connection(msgspec.Struct, eq=False):
    """An open connection and its client."""

    socket: socket.socket
    client: str
    until_s: float
    """When the head of its request is overdue."""
    read: bytearray = msgspec.field(default_factory=bytearray)
    session: asyncio.Task[None] | None = None


class Places:
    """Accepts the connections of a listening socket and gives each request its place."""

    def __init__(self, name: str, listening: socket.socket, serve: Serve, bounds: Bounds) -> None:
        """Listen on a bound socket, which stays the caller's."""
        listening.listen(BACKLOG)
        listening.setblocking(False)  # noqa: FBT003 - positional only
        self._name = name
        self._listening = listening
        self._serve = serve
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._heads: Shares[str, _Connection, None] = Shares(bounds.heads)
        self._places: dict[Kind, Shares[str, _Connection, None]] = {
            kind: Shares(room.places, rejects=True) for kind, room in bounds.rooms.items()
        }
        self._poll = select.epoll()
        self._by_number: dict[int, _Connection] = {}
        self._partial: list[_Connection] = []
        self._acceptable = asyncio.Event()
        self._reported = 0

    async def run(self) -> None:
        """Accept until cancelled, then close everything."""
        try:
            async with asyncio.TaskGroup() as self._group:
                guard.add_reader(f"http-read-{self._name}", self._poll, self._read_some)
                self._group.create_task(self._read_again(), name=f"http-read-{self._name}")
                self._group.create_task(self._sweep(), name=f"http-sweep-{self._name}")
                self._group.create_task(self._report(), name=f"http-report-{self._name}")
                await self._accept()
        finally:
            self._loop.remove_reader(self._poll)
            for head in tuple(self._heads):
                self._close(head.key)
            self._poll.close()

    # Accepting

    async def _accept(self) -> None:
        while True:
            self._acceptable.clear()
            guard.add_reader(f"http-accept-{self._name}", self._listening, self._acceptable.set)
            try:
                await self._acceptable.wait()
            finally:
                self._loop.remove_reader(self._listening)
            if not self._accept_some():
                await asyncio.sleep(self._bounds.rest_s)

    def _accept_some(self) -> bool:
        """Accept what waits, up to a bound; return False where there is no descriptor for it."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = self._listening.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in _GONE:
                    continue
                self._close_lost(self._heads.evict())
                return False
            self._admit(accepted, address)
        return True

    def _admit(self, accepted: socket.socket, address: object) -> None:
        """Read what arrived with a connection, mostly the whole request, or wait for the rest."""
        accepted.setblocking(False)  # noqa: FBT003 - positional only
        try:
            client = _client_of(accepted, address)
        except OSError:
            accepted.close()
            return
        connection = _Connection(accepted, client, self._loop.time() + self._bounds.head_s)
        if self._read(connection):
            return
        self._by_number[accepted.fileno()] = connection
        self._poll.register(accepted, _READABLE_ONCE)
        if connection.read:
            self._partial.append(connection)
        for lost in self._heads.put(client, connection, None):
            self._close_lost(lost)

    def _close_lost(self, lost: Entry[str, _Connection, None] | None) -> None:
        if lost is not None:
            self._close(lost.key)

    def _close(self, connection: _Connection) -> None:
        self._unwait(connection)
        connection.socket.close()

    def _unwait(self, connection: _Connection) -> None:
        self._heads.pop(connection)
        if self._by_number.pop(connection.socket.fileno(), None) is not None:
            self._poll.unregister(connection.socket)

    # A request

    def _read_some(self) -> None:
        for number, _ in self._poll.poll(0, READS_PER_TURN):
            connection = self._by_number[number]
            if not self._read(connection):
                self._partial.append(connection)

    async def _read_again(self) -> None:
        """Read more of requests that arrived in part, until cancelled."""
        while True:
            await asyncio.sleep(AGAIN_S)
            partial, self._partial = self._partial, []
            for connection in partial:
                if connection in self._heads:
                    self._poll.modify(connection.socket, _READABLE_ONCE)

    def _read(self, connection: _Connection) -> bool:
        """Read more of a request; return whether its head, or the connection, has ended."""
        try:
            data = connection.socket.recv(MAX_HEAD_BYTES - len(connection.read))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        connection.read += data
        if not data:
            self._close(connection)
        elif _HEAD_END in connection.read:
            self._begin(connection)
        elif len(connection.read) >= MAX_HEAD_BYTES:
            self._reject(connection, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            return False
        return True

    def _begin(self, connection: _Connection) -> None:
        path = _path_of(connection.read)
        if _NOT_PLAIN.search(path):
            self._reject(connection, HTTPStatus.BAD_REQUEST)
            return
        kind = kind_of(path)
        for lost in self._places[kind].put(connection.client, connection, None):
            if lost.key is connection:
                self._reject(connection, HTTPStatus.SERVICE_UNAVAILABLE)
                return
            if lost.key.session is not None:
                lost.key.session.cancel()
        self._unwait(connection)
        connection.session = self._group.create_task(self._serve_timed(connection, kind), name=f"http-{kind}")
        # Not a part of the task, which may be cancelled before it begins.
        connection.session.add_done_callback(lambda _: self._release_place(connection, kind))

    async def _serve_timed(self, connection: _Connection, kind: Kind) -> None:
        try:
            async with asyncio.timeout(self._bounds.rooms[kind].within_s):
                await self._serve(connection.socket, bytes(connection.read), kind)
        except (TimeoutError, OSError) as error:
            _log.debug(
                "A connection of %(client)s to %(listener)s was closed before it read its answer: %(detail)s",
                about(listener=self._name, client=connection.client, detail=str(error) or "timeout"),
            )

    def _release_place(self, connection: _Connection, kind: Kind) -> None:
        connection.socket.close()
        self._places[kind].pop(connection)

    def _reject(self, connection: _Connection, status: HTTPStatus) -> None:
        try:
            connection.socket.send(_rejection(status))
            # The kernel would discard the answer if anything were left unread.
            connection.socket.recv(64 * 1024)
        except OSError:
            pass
        self._close(connection)

    # Over time

    async def _sweep(self) -> None:
        """Close connections whose request does not arrive, until cancelled."""
        while True:
            await asyncio.sleep(self._bounds.sweep_s)
            now_s = self._loop.time()
            for head in tuple(self._heads):
                if head.key.until_s > now_s:
                    break
                self._close(head.key)

    async def _report(self) -> None:
        """Log which clients exceeded their places, until cancelled."""
        while True:
            await asyncio.sleep(self._bounds.report_s)
            losses: Counter[str] = Counter()
            lost = 0
            for places in (self._heads, *self._places.values()):
                losses.update(places.losses)
                lost += places.statistics().lost
            if lost > self._reported:
                named = ", ".join(f"{client} ({count})" for client, count in losses.most_common(4))
                _log.warning(
                    f"Listener {self._name} closed or rejected {lost - self._reported} connections that"
                    f" exceed their clients' places; since the start most were of {named}",
                    extra=fields(listener=self._name, lost=lost - self._reported),
                )
                self._reported = lost


def _path_of(head: bytearray) -> str:
    line, _, _ = head.partition(b"\r\n")
    _, _, target = line.decode("latin-1").partition(" ")
    return target.partition(" ")[0].partition("?")[0]


def _rejection(status: HTTPStatus) -> bytes:
    body = f"{status.phrase}; {_NEXT[status]}\n"
    return (
        f"HTTP/1.1 {status} {status.phrase}\r\nServer: gpu-agent\r\nConnection: close\r\nRetry-After: 1\r\n"
        f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


_NEXT: Final = {
    HTTPStatus.BAD_REQUEST: "write the path plainly, without percent signs, empty parts and dots",
    HTTPStatus.SERVICE_UNAVAILABLE: "too many requests of this kind are open, close some or retry",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"a request's head may take {MAX_HEAD_BYTES} bytes",
}


def _client_of(accepted: socket.socket, address: object) -> str:
    """Return the client whose share a connection counts for: an address, or a process of this machine."""
    if accepted.family == socket.AF_UNIX:
        raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
        return f"process {UCRED.unpack(raw)[0]}"
    host = str(address[0]) if isinstance(address, tuple) else ""
    if ":" not in host or host.startswith("::ffff:"):
        return host
    # One machine has all addresses of its network.
    network = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
    return f"{socket.inet_ntop(socket.AF_INET6, network + bytes(8))}/64"
