"""The smallest honest device plugin on the agent's libraries: what Python can do on this machine, now.

It registers, serves ListAndWatch and Allocate with grpclib and betterproto2, and waits for XIDs with pynvml
in one thread. A GPU with an XID is listed as unhealthy, and RECOVERED_S later as healthy again. It has no
core, no state file, no second source and no bounds. Latency, start and CPU of the agent are given as ratios
to it, measured in turn in one run. It takes the agent's options and uses two of them.
"""

import argparse
import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import pynvml
from grpclib.client import Channel
from grpclib.server import Server

from agent.api.deviceplugin.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    Device,
    DevicePluginBase,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    RegisterRequest,
    RegistrationStub,
)

PROGRAM: Final = "tests.bench.yardstick"
ENDPOINT: Final = "nvidia-gpu.sock"
RECOVERED_S: Final = 0.02
_WAIT_MS: Final = 5000


class Plugin(DevicePluginBase):
    """One list of devices, and the streams that it is sent on."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._devices = {uuid: Device(id=uuid, health="Healthy") for uuid in uuids}
        self._changed = asyncio.Event()

    def put(self, uuid: str, health: str) -> None:
        self._devices[uuid].health = health
        self._changed.set()
        self._changed = asyncio.Event()

    async def get_device_plugin_options(self, _: Empty) -> DevicePluginOptions:
        return DevicePluginOptions()

    async def list_and_watch(self, _: Empty) -> AsyncIterator[ListAndWatchResponse]:
        while True:
            changed = self._changed
            yield ListAndWatchResponse(devices=list(self._devices.values()))
            await changed.wait()

    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        return AllocateResponse(
            container_responses=[
                ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ",".join(each.devices_ids)})
                for each in message.container_requests
            ]
        )


async def run(kubelet: Path, library: str) -> NoReturn:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    plugin = Plugin([pynvml.nvmlDeviceGetUUID(handle) for handle in handles])

    def flip(uuid: str) -> None:
        plugin.put(uuid, "Unhealthy")
        loop.call_later(RECOVERED_S, plugin.put, uuid, "Healthy")

    def watch() -> None:
        events = pynvml.nvmlEventSetCreate()
        for handle in handles:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(events, _WAIT_MS)
            except pynvml.NVMLError_Timeout:
                continue
            loop.call_soon_threadsafe(flip, pynvml.nvmlDeviceGetUUID(event.device))

    (kubelet.parent / ENDPOINT).unlink(missing_ok=True)
    server = Server([plugin])
    await server.start(path=str(kubelet.parent / ENDPOINT))
    threading.Thread(target=watch, daemon=True).start()
    async with Channel(path=str(kubelet)) as channel:
        request = RegisterRequest(version="v1beta1", endpoint=ENDPOINT, resource_name="nvidia.com/gpu")
        await RegistrationStub(channel).register(request)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    (kubelet.parent / ENDPOINT).unlink(missing_ok=True)
    # Its thread waits in NVML.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False)
    parser.add_argument("--kubelet-socket", type=Path, required=True)
    parser.add_argument("--nvml-library", required=True)
    given, _ = parser.parse_known_args()
    asyncio.run(run(given.kubelet_socket, given.nvml_library))


if __name__ == "__main__":
    main()
