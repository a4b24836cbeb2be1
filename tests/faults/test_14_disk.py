"""Fault 14: the disk of the state file is full, read-only or slow.

Right: serving goes on, the failure is counted and shown, no write is made in the loop's thread.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.commands.client import AgentClient
from agent.simulation.node import SimulatedNode
from agent.threads import in_daemon_thread
from tests.harness import AgentProcess, flags_of, running, simulated_node, wait_allocatable

pytestmark = pytest.mark.slow


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


def beside(node: SimulatedNode) -> Path:
    """Where the new state is written before it takes the old one's place."""
    return Path(node.directory.agent_flags()["state-dir"], "state.json.new")


async def failures(agent: AgentProcess) -> object:
    await agent.wait_line("Listening", listener="control")
    client = AgentClient(agent.flags["control-socket"])
    document = await in_daemon_thread("client", lambda: client.get("/debug/state"))
    return document["agent"]["state_file_failures"]  # type: ignore[index]


async def hold(agent: AgentProcess, gpu: str) -> str:
    client = AgentClient(agent.flags["control-socket"])
    order = {"selector": gpu, "why": "noisy"}
    answer = await in_daemon_thread("client", lambda: client.send_command("hold", order))
    return str(answer["message"])


async def test_serving_goes_on_when_the_state_cannot_be_written(node: SimulatedNode) -> None:
    beside(node).mkdir(parents=True)
    async with running(flags_of(node)) as agent:
        line = await agent.wait_line("Could not write the state file")
        assert line["detail"] == "Is a directory"
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(1, 79)
        await wait_allocatable(node.kubelet, 3)
        assert await failures(agent)
        assert "this ends with the agent" in await hold(agent, "2")
        assert sum(line.startswith("Could not write the state file") for line in agent.events) == 1
        beside(node).rmdir()
        await agent.wait_line("Wrote the state file again")
        assert (await hold(agent, "2")).endswith("is held: noisy")
        assert b'"code":79' in beside(node).with_name("state.json").read_bytes()
        assert await agent.stop() == 0


async def test_a_disk_that_hangs_holds_up_neither_serving_nor_the_end(node: SimulatedNode) -> None:
    beside(node).parent.mkdir(exist_ok=True)
    os.mkfifo(beside(node))  # opening it for writing waits for a reader that never comes
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(1, 79)
        await wait_allocatable(node.kubelet, 3)
        began_s = time.monotonic()
        assert await agent.stop() == 0
        assert time.monotonic() - began_s < 30
        async with asyncio.timeout(30):
            await agent.wait_line("Stopped without the newest state in ")
