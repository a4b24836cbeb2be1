"""The smallest kubelet: takes registrations on kubelet.sock and dials back, over grpcio."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2_grpc as rpc


class Registrar(rpc.RegistrationServicer):
    """Records registrations; ``answer`` decides each one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requests: list[Any] = []
        self.options: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.authorities: list[str] = []
        self.arrived = asyncio.Event()
        self.answer: Callable[[Any], str | None] = lambda _request: None
        """Returns the text of an error, or None to accept."""
        self.status = grpc.StatusCode.UNKNOWN
        """The status of an error; the kubelet's own errors have no other."""
        self.release: asyncio.Event | None = None
        """If set, Register is not answered before this event."""
        self.abandoned = asyncio.Event()
        """Set once a caller went away before it was answered."""
        self._server: Any = None

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name in the protocol
        self.requests.append(request)
        self.arrived.set()
        if self.release is not None:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.abandoned.set()
                raise
        error = self.answer(request)
        if error is not None:
            await context.abort(self.status, error)
        # As the kubelet: the endpoint has to answer inside Register.
        async with plugin(self.directory / request.endpoint) as stub:
            self.options.append(await stub.GetDevicePluginOptions(pb.Empty(), timeout=10))
        return pb.Empty()

    async def start(self) -> None:
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self.directory / 'kubelet.sock'}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)


@asynccontextmanager
async def registrar(directory: Path) -> AsyncIterator[Registrar]:
    kubelet = Registrar(directory)
    await kubelet.start()
    try:
        yield kubelet
    finally:
        await kubelet.stop()


@asynccontextmanager
async def plugin(path: Path) -> AsyncIterator[Any]:
    """A client of a plugin socket, as the kubelet is one."""
    async with grpc.aio.insecure_channel(
        f"unix:{path}", options=[("grpc.default_authority", "localhost")]
    ) as channel:
        yield rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
