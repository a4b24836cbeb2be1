"""A client that speaks HTTP/2 frame by frame, and so can break every rule."""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events

PATIENCE_S = 60.0
"""Longer than anything takes on a loaded machine; no test waits for it to pass."""

Header = tuple[str, str]

SERVICE = "/v1beta1.DevicePlugin"


def headers(method: str, *, authority: str | None = "localhost") -> list[Header]:
    """The headers of a gRPC request as grpc-go sends them."""
    host = [] if authority is None else [(":authority", authority)]
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"{SERVICE}/{method}"),
        *host,
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]


def framed(message: bytes) -> bytes:
    """A gRPC message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def _whole_message(body: bytearray) -> bytes | None:
    """Take one message from the front of a stream's data, if it is all there."""
    end = 5 + int.from_bytes(body[1:5], "big")
    if len(body) < 5 or len(body) < end:
        return None
    message = bytes(body[5:end])
    del body[:end]
    return message


async def _connect(connection: socket.socket, path: Path) -> None:
    # asyncio takes a full backlog for a connection that is under way.
    while True:
        try:
            return connection.connect(str(path))
        except BlockingIOError:
            await asyncio.sleep(0.001)


class RawClient:
    """One connection; nothing is validated on the way out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.seen: list[h2.events.Event] = []
        self._waiting: deque[h2.events.Event] = deque()
        self._bodies: dict[int, bytearray] = {}

    @classmethod
    async def connect(cls, path: Path) -> Self:
        with ExitStack() as on_failure:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            on_failure.callback(connection.close)
            await _connect(connection, path)
            client = cls(*await asyncio.open_unix_connection(sock=connection))
            on_failure.pop_all()
        return client

    async def __aenter__(self) -> Self:
        self.h2.initiate_connection()
        await self.flush()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    async def flush(self) -> None:
        await self.send(self.h2.data_to_send())

    async def send(self, data: bytes) -> None:
        """Write; a server that has had enough is noticed by reading."""
        self.writer.write(data)
        with suppress(ConnectionError):
            await self.writer.drain()

    async def request(self, method: str, message: bytes = b"", *, authority: str | None = "localhost") -> int:
        """Send a whole unary request and return its stream id."""
        return await self.request_with(headers(method, authority=authority), framed(message))

    async def request_with(self, lines: Sequence[Header], body: bytes) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, lines)
        self.h2.send_data(stream_id, body, end_stream=True)
        await self.flush()
        return stream_id

    async def events(self) -> AsyncIterator[h2.events.Event]:
        """Yield events until the server ends the connection."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            data = await self.read()
            if not data:
                return
            for event in self.h2.receive_data(data):
                self.seen.append(event)
                self._waiting.append(event)
                if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            await self.flush()

    async def read(self) -> bytes:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.reader.read(65536)
        except ConnectionError:
            return b""

    async def wait_message(self, stream_id: int) -> bytes:
        """Return the next message of a stream."""
        body = self._bodies.setdefault(stream_id, bytearray())
        if (message := _whole_message(body)) is not None:
            return message
        async for event in self.events():
            if isinstance(event, h2.events.DataReceived) and event.stream_id == stream_id:
                body += event.data
                if (message := _whole_message(body)) is not None:
                    return message
            elif (
                isinstance(event, h2.events.StreamEnded | h2.events.StreamReset)
                and event.stream_id == stream_id
            ):
                break
        raise AssertionError(f"no message on stream {stream_id}: {self.seen}")

    async def wait_status(self, stream_id: int) -> str:
        """Return the gRPC status of a call."""
        async for event in self.events():
            if (
                isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived)
                and event.stream_id == stream_id
            ):
                status = dict(event.headers).get(b"grpc-status")
                if status is not None:
                    return status.decode()
        raise AssertionError(f"no status on stream {stream_id}: {self.seen}")

    async def wait_closed(self) -> None:
        """Return when the server has closed the connection, whatever it sends."""
        while await self.read():
            pass

    async def wait_end(self) -> None:
        """Return when the server has ended the connection."""
        async for _ in self.events():
            pass


@asynccontextmanager
async def raw_client(path: Path) -> AsyncIterator[RawClient]:
    """A connected client that has sent its preface."""
    async with await RawClient.connect(path) as client:
        yield client


class ServerSide:
    """A server that answers one connection frame by frame."""

    def __init__(self) -> None:
        self._connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue(1)
        self._writer: asyncio.StreamWriter | None = None
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding=None, validate_inbound_headers=False)
        )

    @classmethod
    @asynccontextmanager
    async def listening(cls, path: Path) -> AsyncIterator[Self]:
        side = cls()
        server = await asyncio.start_unix_server(side._connect, str(path))
        try:
            yield side
        finally:
            if side._writer is not None:
                side._writer.close()
            server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._connected.put((reader, writer))

    async def wait_request(self) -> tuple[int, dict[bytes, bytes]]:
        """Return the stream and headers of the first request, once it has been sent whole."""
        reader, self._writer = await self._connected.get()
        self._h2.initiate_connection()
        found: dict[int, dict[bytes, bytes]] = {}
        while True:
            self._writer.write(self._h2.data_to_send())
            for event in self._h2.receive_data(await reader.read(65536)):
                if isinstance(event, h2.events.RequestReceived):
                    found[event.stream_id] = dict(event.headers)
                elif isinstance(event, h2.events.StreamEnded):
                    return event.stream_id, found[event.stream_id]

    async def answer(self, stream_id: int, body: bytes) -> None:
        """Answer with one message and status OK."""
        assert self._writer is not None
        self._h2.send_headers(stream_id, [(":status", "200"), ("content-type", "application/grpc")])
        self._h2.send_data(stream_id, body)
        self._h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()
