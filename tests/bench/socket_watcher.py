"""A second watcher of ListAndWatch that reports when a message was on the socket, as near as a reader can be.

A process of its own with a blocking read: what a gRPC client adds until its program holds the message is not
in the time. The kubelet's stream is older, so it is served first, and writing its message is in the time.
Run as a program, ``python -m tests.bench.socket_watcher SOCKET``, it prints the moment (CLOCK_MONOTONIC
nanoseconds) of each message that has an unhealthy device.
"""

import asyncio
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived

from tests.bench.figures import MeasurementError
from tests.bench.node import PATIENCE_S, ROOT

_STREAM: Final = 1
_REQUEST: Final = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/v1beta1.DevicePlugin/ListAndWatch"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)
_EMPTY_MESSAGE: Final = b"\0\0\0\0\0"
_UNHEALTHY: Final = b"Unhealthy"
_WATCHING: Final = "watching"


def main() -> None:
    """Watch until the stream ends."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(sys.argv[1])
    connection = H2Connection(H2Configuration(client_side=True))
    connection.initiate_connection()
    connection.send_headers(_STREAM, _REQUEST)
    connection.send_data(_STREAM, _EMPTY_MESSAGE, end_stream=True)
    client.sendall(connection.data_to_send())
    is_first = True
    while data := client.recv(65_536):
        at_ns = time.monotonic_ns()
        for event in connection.receive_data(data):
            if not isinstance(event, DataReceived):
                continue
            connection.acknowledge_received_data(event.flow_controlled_length, _STREAM)
            if is_first:
                sys.stdout.write(f"{_WATCHING}\n")
                is_first = False
            elif _UNHEALTHY in event.data:
                sys.stdout.write(f"{at_ns}\n")
            sys.stdout.flush()
        client.sendall(connection.data_to_send())


class SocketWatcher:
    """The program above beside a measurement, from its first message on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.socket_watcher", str(self._path)),
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,
        )
        if await self._line() != _WATCHING:
            raise MeasurementError(f"{self._path} was watched, and nothing came")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def message_after(self, moment_ns: int) -> int:
        """Return when the first message with an unhealthy device came after a moment."""
        while (at_ns := int(await self._line())) < moment_ns:
            pass
        return at_ns

    async def _line(self) -> str:
        if self._process is None or self._process.stdout is None:
            raise MeasurementError("no watcher runs")
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise MeasurementError(f"no message came through {self._path}") from None
        if not line:
            raise MeasurementError(f"the stream through {self._path} ended")
        return line.decode().strip()


if __name__ == "__main__":
    main()
