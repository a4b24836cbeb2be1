"""Fault 16: the kernel ends the agent because memory ran out, which is a SIGKILL.

Right: its successor registers, with what was known, while the killed one's sockets are still there.
"""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import flags_of, running, simulated_node, wait_allocatable
from tests.sources.recorder import until

pytestmark = pytest.mark.slow

EATS_MEMORY = """
import os, resource, signal, threading
def eat():
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 64 * 1024
    eaten = []
    while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < limit:
        eaten.append(bytearray(2 ** 20))
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=eat, daemon=True).start())
"""
"""Grows by 64 MiB on request, then ends as the kernel would end it."""


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


async def test_the_successor_of_an_agent_that_ran_out_of_memory_serves(node: SimulatedNode) -> None:
    async with running(flags_of(node), prelude=EATS_MEMORY) as agent:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(3, 79)
        await wait_allocatable(node.kubelet, 3)
        state = Path(agent.flags["state-dir"], "state.json")
        await until(lambda: state.exists() and b'"code":79' in state.read_bytes())
        agent.signal(signal.SIGUSR1)
        assert await agent.ended() == -signal.SIGKILL
    assert (node.directory.device_plugins / "nvidia-gpu.sock").exists()
    lists = len(node.kubelet.lists)
    async with running(flags_of(node)) as successor:
        await successor.wait_registered()
        await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > lists, timeout_s=60)
        assert node.nvml.uuid(3) in node.kubelet.lists[lists].unhealthy
        await wait_allocatable(node.kubelet, 3)
        assert await successor.stop() == 0
