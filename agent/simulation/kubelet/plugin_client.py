"""The kubelet's client of one registered plugin: dial, options, ListAndWatch, Allocate.

Guarantees (facts: kubelet items 1, 6 to 9):

1. The dial blocks until the plugin's HTTP/2 settings arrived, or its time is over. Dial and options end at
   the deadline of the Register call, where it has one (facts: kubelet item 18).
2. ListAndWatch is one call that is never retried; each message replaces the list.
3. Allocate and GetPreferredAllocation have no deadline, PreStartContainer has 30 s.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from agent.simulation.kubelet.wire import PluginStub, go_code, go_error, open_channel
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb

PRE_START_TIMEOUT_S: Final = 30.0
"""Source: kubelet/pkg/apis/deviceplugin/v1beta1/constants.go, KubeletPreStartContainerRPCTimeoutInSecs."""


_CLOSING: Final = "rpc error: code = Canceled desc = grpc: the client connection is closing"


class PluginCallError(Exception):
    """A call to the plugin failed; the text is what the kubelet would pass on."""


class PluginClient:
    """One connection to one plugin; ``generation`` numbers the kubelet's accepted registrations."""

    def __init__(self, resource: str, path: Path, generation: int) -> None:
        self.resource = resource
        self.path = path
        self.generation = generation
        self.options = plugin_pb.DevicePluginOptions()
        self.stopped = False
        self.dialled = False
        """It has a connection that can be closed; the kubelet closes none while it dials."""
        self.forgotten = False
        """Its stream is open, and the kubelet no longer reads it."""
        self._channel = open_channel(path)
        self.stub = PluginStub(self._channel)
        self._stream: Any = None
        self._reading = asyncio.Event()
        self._reading.set()
        self._end_cause: str | None = None

    @property
    def endpoint(self) -> str:
        """The socket's base name, as it was registered."""
        return self.path.name

    async def connect(self, timeout_s: float, *, within_s: float | None = None) -> None:
        """Dial for ``timeout_s``, then ask for the options, both ``within_s``.

        Raises PluginCallError with the kubelet's text.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s if within_s is None else min(timeout_s, within_s)):
                await self._channel.channel_ready()
        except TimeoutError:
            raise PluginCallError("failed to dial device plugin: context deadline exceeded") from None
        self.dialled = True
        left_s = None if within_s is None else max(0.0, within_s - (time.monotonic() - began))
        try:
            self.options = await self.stub.GetDevicePluginOptions(plugin_pb.Empty(), timeout=left_s)
        except grpc.aio.AioRpcError as error:
            raise PluginCallError(f"failed to get device plugin options: {go_error(error)}") from None
        except grpc.aio.UsageError:
            raise PluginCallError(f"failed to get device plugin options: {_CLOSING}") from None

    async def run(self, handle_message: Callable[["PluginClient", bytes, int], str | None]) -> str:
        """Read ListAndWatch until it ends and return why; ``handle_message`` may reject one with a text."""
        self._stream = self.stub.ListAndWatch(plugin_pb.Empty())
        try:
            while True:
                await self._reading.wait()
                data = await self._stream.read()
                if data is grpc.aio.EOF:
                    return self._end_cause or await _status(self._stream)
                await self._reading.wait()
                rejection = handle_message(self, data, time.monotonic_ns())
                if rejection is not None:
                    return rejection
        except grpc.aio.AioRpcError as error:
            return self._end_cause or go_error(error)
        except asyncio.CancelledError:
            # A call that was cancelled from this side ends its reader the same way as a cancelled task.
            if self._end_cause is None:
                raise
            return self._end_cause
        finally:
            self._stream.cancel()

    def cancel_stream(self, cause: str) -> None:
        """End ListAndWatch from this side, which the plugin sees as RST_STREAM."""
        self._end_cause = cause
        self._reading.set()
        if self._stream is not None:
            self._stream.cancel()

    def set_reading(self, *, reading: bool) -> None:
        """Stop or go on reading ListAndWatch; flow control then holds the plugin back."""
        if reading:
            self._reading.set()
        else:
            self._reading.clear()

    async def allocate(self, ids: Sequence[str]) -> plugin_pb.ContainerAllocateResponse:
        """Call Allocate for one container, without a deadline; raises PluginCallError."""
        if self.stopped:
            raise PluginCallError(f"endpoint {self.resource} has been stopped")
        request = plugin_pb.AllocateRequest(
            container_requests=[plugin_pb.ContainerAllocateRequest(devices_ids=ids)]
        )
        answer: plugin_pb.AllocateResponse = await self._call(self.stub.Allocate(request))
        if not answer.container_responses:
            raise PluginCallError(f"no containers return in allocation response {answer}")
        response: plugin_pb.ContainerAllocateResponse = answer.container_responses[0]
        return response

    async def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str]:
        """Call GetPreferredAllocation for one container, without a deadline; raises PluginCallError."""
        request = plugin_pb.PreferredAllocationRequest(
            container_requests=[
                plugin_pb.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available,
                    must_include_deviceIDs=must_include,
                    allocation_size=size,
                )
            ]
        )
        try:
            answer = await self._call(self.stub.GetPreferredAllocation(request))
        except PluginCallError as error:
            raise PluginCallError(
                f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            ) from None
        return list(answer.container_responses[0].deviceIDs) if answer.container_responses else []

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Call PreStartContainer with the kubelet's 30 s; raises PluginCallError."""
        request = plugin_pb.PreStartContainerRequest(devices_ids=ids)
        try:
            await self._call(self.stub.PreStartContainer(request, timeout=PRE_START_TIMEOUT_S))
        except PluginCallError as error:
            raise PluginCallError(f"device plugin PreStartContainer rpc failed with err: {error}") from None

    async def close(self) -> None:
        """Close the connection; its calls end as cancelled."""
        self.stopped = True
        self._end_cause = self._end_cause or "the kubelet closed the connection"
        self._reading.set()
        await self._channel.close()

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise PluginCallError(go_error(error)) from None
        except asyncio.CancelledError:
            if not self.stopped:
                raise
            raise PluginCallError(
                "rpc error: code = Canceled desc = grpc: the client connection is closing"
            ) from None


async def _status(stream: Any) -> str:
    """Return the status of a stream that ended without an error; Go's client reports it as EOF."""
    code = await stream.code()
    return "EOF" if code is grpc.StatusCode.OK else f"rpc error: code = {go_code(code)}"
