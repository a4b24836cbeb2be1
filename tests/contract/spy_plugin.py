"""A device plugin below gRPC: plain HTTP/2, so that a test sees each header and flag of the kubelet."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, Final, Self

import h2.config
import h2.connection
import h2.events

MAX_EVENTS: Final = 1_024
OPTIONS: Final = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
LIST_AND_WATCH: Final = "/v1beta1.DevicePlugin/ListAndWatch"


def framed(message: bytes) -> bytes:
    """Return a message with gRPC's length prefix. Source: grpc PROTOCOL-HTTP2.md."""
    return b"\0" + len(message).to_bytes(4) + message


class SpyPlugin:
    """Answers the two calls of a registration, and remembers what the kubelet sent.

    ``answers`` is path to message bytes; a path that is missing gets a trailers-only error.
    """

    def __init__(self, path: Path, answers: dict[str, bytes]) -> None:
        self.path = path
        self.answers = answers
        self.headers: dict[str, dict[str, str]] = {}
        self.half_closed: set[str] = set()
        self.resets: deque[str] = deque(maxlen=MAX_EVENTS)
        self.connections = 0
        self._changed = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, path=str(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await self.wait_for(lambda: not self._writers)
        self.path.unlink(missing_ok=True)

    async def wait_for(self, predicate: Any, timeout_s: float = 10.0) -> None:
        """Wait until something the kubelet does makes the predicate hold."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(predicate)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        )
        paths: dict[int, str] = {}
        self._writers.add(writer)
        self.connections += 1
        try:
            connection.initiate_connection()
            writer.write(connection.data_to_send())
            while data := await reader.read(65_536):
                for event in connection.receive_data(data):
                    self._handle_event(connection, paths, event)
                writer.write(connection.data_to_send())
                await self._notify()
        except ConnectionError:
            pass
        finally:
            writer.close()
            self._writers.discard(writer)
            await self._notify()

    def _handle_event(
        self, connection: h2.connection.H2Connection, paths: dict[int, str], event: Any
    ) -> None:
        match event:
            case h2.events.RequestReceived():
                headers = {str(name): str(value) for name, value in event.headers}
                paths[event.stream_id] = headers[":path"]
                self.headers[headers[":path"]] = headers
            case h2.events.StreamEnded():
                path = paths[event.stream_id]
                self.half_closed.add(path)
                self._answer(connection, event.stream_id, path)
            case h2.events.StreamReset():
                self.resets.append(paths[event.stream_id])
            case _:
                pass

    def _answer(self, connection: h2.connection.H2Connection, stream: int, path: str) -> None:
        head = [(":status", "200"), ("content-type", "application/grpc")]
        if path not in self.answers:
            trailers = [*head, ("grpc-status", "12"), ("grpc-message", "not here")]
            connection.send_headers(stream, trailers, end_stream=True)
            return
        connection.send_headers(stream, head)
        connection.send_data(stream, framed(self.answers[path]))
        if path != LIST_AND_WATCH:
            connection.send_headers(stream, [("grpc-status", "0")], end_stream=True)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
