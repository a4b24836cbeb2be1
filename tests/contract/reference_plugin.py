"""A small, correct device plugin on grpcio: what the contract suite shows a kubelet.

It does what the suite asks for and nothing more: no registering by itself, no recovery.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import grpc
import grpc.aio

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb

MAX_CALLS: Final = 1_024
REGISTER_TIMEOUT_S: Final = 15.0
"""Longer than the kubelet's ten seconds for its dial."""
SERVICE: Final = "v1beta1.DevicePlugin"


def device(id_: str, *, healthy: bool = True, numa: int | None = None) -> pb.Device:
    """Return one device of a list."""
    topology = None if numa is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=numa)])
    return pb.Device(ID=id_, health="Healthy" if healthy else "Unhealthy", topology=topology)


class ReferencePlugin:
    """Serves one resource on one socket; an asynchronous context manager."""

    def __init__(
        self,
        directory: Path,
        resource: str,
        devices: Iterable[pb.Device],
        *,
        endpoint: str = "reference.sock",
        preferred: bool = False,
        pre_start: bool = False,
    ) -> None:
        self.resource = resource
        self.path = directory / endpoint
        self.options = pb.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=preferred
        )
        self.allocate_error: tuple[grpc.StatusCode, str] | None = None
        self.preferred_error: tuple[grpc.StatusCode, str] | None = None
        self.pre_start_error: tuple[grpc.StatusCode, str] | None = None
        self.allocate_gate = asyncio.Event()
        self.allocate_gate.set()
        self.options_gate = asyncio.Event()
        self.options_gate.set()
        self.calls: deque[tuple[str, Any]] = deque(maxlen=MAX_CALLS)
        self.watchers = 0
        self.watched = 0
        self.sent = 0
        self.ended: deque[str] = deque(maxlen=MAX_CALLS)
        self._devices = list(devices)
        self._version = 0
        self._changed = asyncio.Condition()
        self._stopping = False
        self._server: Any = None

    async def __aenter__(self) -> Self:
        await self.serve()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def serve(self) -> None:
        """Serve on the socket; a kubelet that restarts deletes it, so this may be done again."""
        self._stopping = False
        self._server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._methods()),)
        )
        self._server.add_insecure_port(f"unix:{quote(str(self.path))}")
        await self._server.start()

    async def stop(self) -> None:
        """End the streams, then the server, which takes its socket file along."""
        if self._server is None:
            return
        await self._change(stopping=True)
        server, self._server = self._server, None
        await server.stop(0.2)

    async def send(self, devices: Iterable[pb.Device]) -> None:
        """Replace the list; every watcher gets it."""
        self._devices = list(devices)
        await self._change(stopping=False)

    async def end_streams(self) -> None:
        """End every open ListAndWatch stream with OK, and serve on."""
        await self._change(stopping=True)
        await self.wait_for(lambda: self.watchers == 0)
        self._stopping = False

    async def wait_for(self, predicate: Any, timeout_s: float = 10.0) -> None:
        """Wait until something that calls or streams change holds."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(predicate)

    def count(self, method: str) -> int:
        """Return how many calls of a method are remembered."""
        return sum(name == method for name, _ in self.calls)

    async def register(
        self,
        *,
        version: str = "v1beta1",
        endpoint: str | None = None,
        resource: str | None = None,
        timeout_s: float = REGISTER_TIMEOUT_S,
    ) -> None:
        """Register with the kubelet of this folder; raises grpc.aio.AioRpcError where it is rejected."""
        request = pb.RegisterRequest(
            version=version,
            endpoint=self.path.name if endpoint is None else endpoint,
            resource_name=self.resource if resource is None else resource,
            options=self.options,
        )
        await register(self.path.parent, request, timeout_s)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _change(self, *, stopping: bool) -> None:
        async with self._changed:
            self._version += 1
            self._stopping = stopping
            self._changed.notify_all()

    async def _note(self, method: str, request: Any) -> None:
        async with self._changed:
            self.calls.append((method, request))
            self._changed.notify_all()

    async def _get_options(self, request: Any, context: Any) -> pb.DevicePluginOptions:
        await self._note("GetDevicePluginOptions", request)
        await self.options_gate.wait()
        return self.options

    async def _list_and_watch(self, request: Any, context: Any) -> AsyncIterator[pb.ListAndWatchResponse]:
        await self._note("ListAndWatch", request)
        self.watchers += 1
        self.watched += 1
        end = "cancelled"
        try:
            seen = -1
            while await self._newer_than(seen):
                seen = self._version
                yield pb.ListAndWatchResponse(devices=self._devices)
                self.sent += 1
                await self._wake()
            end = "ended"
        finally:
            self.watchers -= 1
            self.ended.append(end)
            with contextlib.suppress(asyncio.CancelledError):
                await self._wake()

    async def _newer_than(self, seen: int) -> bool:
        """Wait for a list that was not sent yet; False when the stream is to end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._stopping or self._version != seen)
            return not self._stopping

    async def _allocate(self, request: Any, context: Any) -> pb.AllocateResponse:
        await self._note("Allocate", request)
        await self.allocate_gate.wait()
        if self.allocate_error is not None:
            await context.abort(*self.allocate_error)
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(
                    envs={"REFERENCE_DEVICES": ",".join(sorted(each.devices_ids))},
                    devices=[
                        pb.DeviceSpec(container_path="/dev/null", host_path="/dev/null", permissions="rw")
                    ],
                )
                for each in request.container_requests
            ]
        )

    async def _get_preferred(self, request: Any, context: Any) -> pb.PreferredAllocationResponse:
        await self._note("GetPreferredAllocation", request)
        if self.preferred_error is not None:
            await context.abort(*self.preferred_error)
        return pb.PreferredAllocationResponse(
            container_responses=[
                pb.ContainerPreferredAllocationResponse(
                    deviceIDs=sorted(each.available_deviceIDs)[-each.allocation_size :]
                )
                for each in request.container_requests
            ]
        )

    async def _pre_start(self, request: Any, context: Any) -> pb.PreStartContainerResponse:
        await self._note("PreStartContainer", request)
        if self.pre_start_error is not None:
            await context.abort(*self.pre_start_error)
        return pb.PreStartContainerResponse()

    def _methods(self) -> dict[str, Any]:
        def unary(function: Any, request: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                function,
                request_deserializer=request.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )

        return {
            "GetDevicePluginOptions": unary(self._get_options, pb.Empty),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                request_deserializer=pb.Empty.FromString,
                response_serializer=pb.ListAndWatchResponse.SerializeToString,
            ),
            "Allocate": unary(self._allocate, pb.AllocateRequest),
            "GetPreferredAllocation": unary(self._get_preferred, pb.PreferredAllocationRequest),
            "PreStartContainer": unary(self._pre_start, pb.PreStartContainerRequest),
        }


async def register(
    directory: Path, request: pb.RegisterRequest, timeout_s: float = REGISTER_TIMEOUT_S
) -> None:
    """Call Register on the kubelet's socket in ``directory``."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost")]
    path = quote(str(directory / "kubelet.sock"))
    async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
        call = channel.unary_unary(
            "/v1beta1.Registration/Register",
            request_serializer=pb.RegisterRequest.SerializeToString,
            response_deserializer=pb.Empty.FromString,
        )
        await call(request, timeout=timeout_s)
