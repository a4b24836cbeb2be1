"""Devices that are served and not registered: ``--kubelet-socket=``."""

import asyncio
import tempfile
import time
from pathlib import Path

from agent.bus import Inbox, Latest
from agent.model.effects import RegisterResource
from agent.model.facts import Fact, Registered
from agent.model.ids import NO_KUBELET
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.sinks.plugin.sink import DevicePlugin
from tests.sinks.registrar import plugin, registrar
from tests.sinks.snapshots import GPU, node


async def test_what_is_only_served_answers_and_leaves_the_kubelet_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="gpu-agent-") as place:
        directory = Path(place)
        inbox: Inbox[Fact] = Inbox(clock=time.monotonic_ns)
        served = DevicePlugin(
            inbox=inbox,
            latest=Latest(node()),
            kubelet_socket=directory / "kubelet.sock",
            clock=time.monotonic_ns,
            registers=False,
        )
        async with registrar(directory) as kubelet, asyncio.TaskGroup() as group:
            task = group.create_task(served.run(), name="device-plugin")
            served.register(RegisterResource(GPU, 1, None))
            while not (facts := [item.fact for item in inbox.pop_all()[0]]):
                await inbox.wait_nonempty(time.monotonic_ns() + 10**9)
            (fact,) = facts
            assert isinstance(fact, Registered)
            assert (fact.generation, fact.kubelet) == (1, NO_KUBELET)
            async with plugin(directory / "nvidia-gpu.sock") as stub:
                options = await stub.GetDevicePluginOptions(pb.Empty(), timeout=30)
                assert options.get_preferred_allocation_available
            assert kubelet.requests == []
            await served.drain(1)
            await task
        inbox.close()
