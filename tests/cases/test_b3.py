"""B3, vmagamedov/grpclib#107: closing a server that has been used never ends."""

import asyncio
import contextlib
import time

import grpc

from tests.harness import accepted, agent_process, simulated_node, wait_allocatable


async def keep_asking(path: str, asked: asyncio.Event) -> None:
    """Start a new unary call every 50 ms on one connection, whatever becomes of them."""
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_unary("/v1beta1.DevicePlugin/GetDevicePluginOptions")  # bytes: an empty message
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call(b"", timeout=1)
                asked.set()
            await asyncio.sleep(0.05)


async def test_one_sigterm_ends_an_agent_whose_clients_go_on_asking() -> None:
    async with simulated_node("4x-t4") as node:
        own = node.directory.device_plugins / "nvidia-gpu.sock"
        async with agent_process(node) as agent:
            await wait_allocatable(node.kubelet, 4)
            asked = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(keep_asking(str(own), asked))
                await asyncio.wait_for(asked.wait(), 10)

                began_s = time.monotonic()
                status = await agent.stop()
                took_s = time.monotonic() - began_s
                asking.cancel()

            assert status == 0
            assert took_s < 3
            assert not own.exists()
            assert not [line for line in agent.log if line["level"] in ("error", "warning")], agent.text
            assert "Traceback" not in agent.text

        await asyncio.sleep(0.1)
        async with agent_process(node):
            await node.kubelet.wait_for(lambda kubelet: accepted(kubelet) == 2, 30)
            await wait_allocatable(node.kubelet, 4)
