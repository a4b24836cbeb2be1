"""A gRPC server for one unix socket whose only expected client is the kubelet.

grpclib's own Server cannot be drained: closing it leaves connections open and, from Python 3.12 on,
waiting for it never ends while a client stays connected; its accept loop has no bound and no pause
when file descriptors run out. So only grpclib's protocol and call handling are used, below a short
accept loop of our own, and the connections belong to this server.

Guarantees:

1. Peers are root or the agent's own user (SO_PEERCRED), and at most Bounds.connections of them.
2. Running out of file descriptors ends no open connection; accepting continues when there are some.
3. ``drain`` ends within its grace plus 2 x Bounds.linger_s, whatever the peers do: calls that are running
   are answered, then every connection gets GOAWAY and is closed.

Sources: grpclib#21, grpclib#107, cpython#104344.
"""

import asyncio
import errno
import logging
import os
import socket
import struct
from collections.abc import Mapping
from typing import Final

from grpclib.const import Handler as Method
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.events import _DispatchServerEvents
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from agent import guard
from agent.log import about
from agent.sinks.plugin.grpc_bounds import PEER_LINES, REQUEST_S, Bounds, Load, limit_peer_lines
from agent.sinks.plugin.grpc_connection import BoundedConnection, Calls

SETTLE_TURNS: Final = 3
"""Turns of the loop after which a request that had arrived when draining began is a running call."""

NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
UCRED: Final = struct.Struct("3i")
"""pid, uid, gid. Source: unix(7), struct ucred."""

log = logging.getLogger(__name__)
peer_log = logging.getLogger(f"{__name__}.peers")


class PassThroughCodec(CodecBase):
    """Messages are bytes: the service encodes once and sends the same bytes to every watcher."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: object) -> bytes:  # noqa: ARG002 - grpclib's signature
        """Return the message."""
        return message

    def decode(self, data: bytes, message_type: object) -> bytes:  # noqa: ARG002 - grpclib's signature
        """Return the message."""
        return data


async def receive_request(stream: Stream[bytes, bytes], *, within_s: float = REQUEST_S) -> bytes:
    """Return the one message of a request; GRPCError if there is none, or not in time."""
    try:
        async with asyncio.timeout(within_s):
            request = await stream.recv_message()
    except TimeoutError:
        raise GRPCError(
            Status.DEADLINE_EXCEEDED, f"The request did not arrive within {within_s:g} s"
        ) from None
    except (AssertionError, NotImplementedError):
        # grpclib raises these when the stream ended early, or the message is compressed.
        raise GRPCError(Status.INVALID_ARGUMENT, "The request is cut short or compressed") from None
    if request is None:
        raise GRPCError(Status.INVALID_ARGUMENT, "The request holds no message")
    return request


class BoundedServer:
    """Serves gRPC methods on a listening socket, which it owns from now on."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        listener: socket.socket,
        *,
        bounds: Bounds | None = None,
        uids: frozenset[int] | None = None,
    ) -> None:
        """Take over a bound, listening socket. ``uids``: users that may connect; None: root and ours."""
        listener.setblocking(False)  # noqa: FBT003 - positional only
        self._methods = dict(methods)
        self._listener = listener
        self._bounds = bounds or Bounds()
        self._uids = frozenset({0, os.geteuid()}) if uids is None else uids
        self.load: Final = Load()
        self.live: dict[BoundedConnection, None] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._acceptable = asyncio.Event()
        self._drained = asyncio.Event()
        self._is_closing = False
        self._is_resting = False
        self._codec = PassThroughCodec()
        self._dispatch = _DispatchServerEvents()
        limit_peer_lines()
        peer_log.addFilter(PEER_LINES)

    async def run(self) -> None:
        """Accept connections; return once drained."""
        loop = asyncio.get_running_loop()
        try:
            while not self._is_closing:
                self._acceptable.clear()
                guard.add_reader("grpc-accept", self._listener, self._acceptable.set)
                await self._acceptable.wait()
                if not self._is_closing:
                    loop.remove_reader(self._listener)
                    await self._accept_waiting()
            await self._drained.wait()
        finally:
            self.close_now()

    async def _accept_waiting(self) -> None:
        while not self._is_closing:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                # Without descriptors it would have failed even though no peer waits.
                self._recovered()
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:
                    await self._rest(error)
                    continue
                if error.errno in {errno.ECONNABORTED, errno.EINTR, errno.EPROTO}:
                    continue
                raise
            self._recovered()
            await self._admit(peer)

    def _recovered(self) -> None:
        if self._is_resting:
            self._is_resting = False
            log.info("Accepted connections again")

    async def _rest(self, error: OSError) -> None:
        self.load.accept_failures += 1
        if not self._is_resting:
            self._is_resting = True
            log.warning("Could not accept a connection of the kubelet: %(error)s", about(error=str(error)))
        await asyncio.sleep(self._bounds.accept_retry_s)

    async def _admit(self, peer: socket.socket) -> None:
        if not self._may_enter(peer):
            peer.close()
            # A peer that connects in a loop must not keep the agent's loop here.
            await asyncio.sleep(0)
            return
        self.load.accepted += 1
        peer.setblocking(False)  # noqa: FBT003 - positional only
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._new_connection, peer)
        except OSError as error:
            peer.close()
            await self._rest(error)

    def _may_enter(self, peer: socket.socket) -> bool:
        _, uid, _ = UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        if uid not in self._uids:
            self.load.rejected["peer"] += 1
            peer_log.warning(
                "Rejected a connection of user %(uid)s, which is neither root nor the agent's own user",
                about(uid=uid),
            )
            return False
        if len(self.live) >= self._bounds.connections:
            self.load.rejected["full"] += 1
            peer_log.warning(
                "Rejected a connection to the plugin's socket: %(connections)s are open",
                about(connections=len(self.live)),
            )
            return False
        return True

    def _new_connection(self) -> BoundedConnection:
        return BoundedConnection(
            Calls(self._methods, self._codec, self._dispatch, bounds=self._bounds, load=self.load),
            bounds=self._bounds,
            load=self.load,
            on_made=self._remember,
            on_lost=self._forget,
        )

    def _remember(self, connection: BoundedConnection) -> None:
        self.live[connection] = None
        self._empty.clear()
        if self._is_closing:
            connection.close()
            connection.abort()

    def _forget(self, connection: BoundedConnection) -> None:
        self.live.pop(connection, None)
        if not self.live:
            self._empty.set()

    async def drain(self, grace_s: float) -> None:
        """Stop accepting, let running calls end within ``grace_s``, then close every connection.

        Streams without an end are to be ended by their service before this is called. If it
        is cancelled, everything is closed at once.
        """
        self._stop_accepting()
        calls = self._running()
        try:
            await self._wait_calls(grace_s)
            calls |= self._running()
            self._end_connections()
            async with asyncio.timeout(self._bounds.linger_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        finally:
            self.close_now()
            self._drained.set()
        if calls:
            await asyncio.wait(calls, timeout=self._bounds.linger_s)

    async def _wait_calls(self, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + grace_s
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)
        while (calls := self._running()) and (left_s := end_s - loop.time()) > 0:
            await asyncio.wait(calls, timeout=left_s)

    def _running(self) -> set[asyncio.Task[None]]:
        return {task for connection in self.live for task in connection.handler.running()}

    def _stop_accepting(self) -> None:
        self._is_closing = True
        self._acceptable.set()
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    def close_now(self) -> None:
        """Close everything at once."""
        self._stop_accepting()
        self._end_connections()
        self._abort_connections()

    def _end_connections(self) -> None:
        for connection in list(self.live):
            connection.close()

    def _abort_connections(self) -> None:
        for connection in list(self.live):
            connection.abort()

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self.live)
