"""Fault 6: the driver is reloaded, is unloaded at the start, or changes its version.

Right: the GPUs are gone and return with the same ids, without a restart of the agent, unless NVML reports
that the library in use is not the driver's and another one lies on the disk.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import pytest

from agent.simulation.node import SimulatedNode
from agent.simulation.nvml import install_library
from tests.harness import (
    PATIENCE_S,
    AgentProcess,
    accepted,
    agent_process,
    codes,
    gpu_agent,
    simulated_node,
    uuids,
    wait_allocatable,
)
from tests.sources.recorder import until

pytestmark = pytest.mark.slow

INIT = "nvmlInitWithFlags"


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node("4x-t4") as made:
        yield made


def quick_agent(node: SimulatedNode) -> AbstractAsyncContextManager[AgentProcess]:
    return agent_process(node, poll="100ms", init_retry="100ms", fail_on_init_error="false")


def open_devices(agent: AgentProcess, node: SimulatedNode) -> set[str]:
    """The device doubles that any thread of the agent has open."""
    found = set()
    for link in Path(f"/proc/{agent.process.pid}/task").glob("*/fd/*"):
        with suppress(OSError):
            found.add(str(link.readlink()))
    prefix = f"{node.directory.path}/dev/"
    return {path.removeprefix(prefix) for path in found if path.startswith(prefix)}


async def wait_inits(node: SimulatedNode, count: int) -> None:
    calls = node.nvml.calls(INIT) + count
    await until(lambda: node.nvml.calls(INIT) >= calls)


async def order(agent: AgentProcess, name: str, *arguments: str) -> None:
    answer = await gpu_agent(name, *arguments, "--control-socket", str(agent.flags["control-socket"]))
    assert answer.status == os.EX_OK, answer.err


async def test_a_driver_that_is_reloaded_gives_the_same_devices_back_without_a_restart(
    node: SimulatedNode,
) -> None:
    async with quick_agent(node) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        for _ in range(3):
            await node.do("driver", {"state": "unloaded"})
            await wait_allocatable(node.kubelet, 0, capacity=4)
            await until(lambda: open_devices(agent, node) == set())
            await wait_inits(node, 2)
            await node.do("driver", {"state": "loaded"})
            await wait_allocatable(node.kubelet, 4, capacity=4)
        assert all(sorted((*each.healthy, *each.unhealthy)) == uuids(node) for each in node.kubelet.lists)
        assert agent.process.returncode is None
        assert accepted(node.kubelet) == len(node.kubelet.registrations) == 1


async def test_a_reload_cures_what_a_reset_cures(node: SimulatedNode) -> None:
    async with quick_agent(node):
        await wait_allocatable(node.kubelet, 4, capacity=4)
        node.nvml.push_xid(1, 79)
        await wait_allocatable(node.kubelet, 3, capacity=4)
        await node.do("driver", {"state": "unloaded"})
        await wait_allocatable(node.kubelet, 0, capacity=4)
        await wait_inits(node, 2)
        await node.do("driver", {"state": "loaded"})
        await wait_allocatable(node.kubelet, 4, capacity=4)


async def test_a_driver_that_is_not_there_at_the_start_is_waited_for_with_the_devices_of_before(
    node: SimulatedNode,
) -> None:
    async with quick_agent(node) as before:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        state = node.directory.agent / "state.json"
        await until(lambda: state.exists() and all(uuid in state.read_text() for uuid in uuids(node)))
        assert await before.stop() == 0
    await node.do("driver", {"state": "unloaded"})
    lists = len(node.kubelet.lists)
    async with quick_agent(node) as agent:
        await node.kubelet.wait_for(lambda seen: len(seen.lists) > lists, PATIENCE_S)
        await agent.wait_answer(
            "/preflight", lambda status, body: status == 503 and "driver_not_loaded" in codes(body)
        )
        for each in node.kubelet.lists[lists:]:
            assert (each.healthy, sorted(each.unhealthy)) == ((), uuids(node))
        await node.do("driver", {"state": "loaded"})
        await wait_allocatable(node.kubelet, 4, capacity=4)


async def test_another_version_of_the_library_on_the_disk_ends_the_process_and_the_next_one_serves(
    node: SimulatedNode,
) -> None:
    async with quick_agent(node) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        install_library(node.directory.path)
        node.nvml.unload_driver(code=18)
        await wait_allocatable(node.kubelet, 0, capacity=4)
        assert await agent.ended() == 1
        assert "library was replaced" in agent.text
    node.nvml.load_driver()
    async with quick_agent(node):
        await wait_allocatable(node.kubelet, 4, capacity=4)


async def test_another_version_of_the_driver_alone_is_waited_for_in_the_same_process(
    node: SimulatedNode,
) -> None:
    async with quick_agent(node) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        node.nvml.unload_driver(code=18)
        await wait_allocatable(node.kubelet, 0, capacity=4)
        # Longer than the agent takes to end where a new process could help.
        await wait_inits(node, 30)
        assert agent.process.returncode is None
        node.nvml.load_driver()
        await wait_allocatable(node.kubelet, 4, capacity=4)


async def test_a_driver_that_is_released_can_be_reloaded_and_only_maintenance_is_reported(
    node: SimulatedNode,
) -> None:
    async with quick_agent(node) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        await agent.wait_answer("/livez", lambda status, _body: status == 200)

        await order(agent, "release", "--all", "--for", "10m")
        assert open_devices(agent, node) == set()
        await wait_allocatable(node.kubelet, 0, capacity=4)
        await node.do("driver", {"state": "unloaded"})
        await node.do("driver", {"state": "loaded"})
        await order(agent, "resume")

        await wait_allocatable(node.kubelet, 4, capacity=4)
        raised = {line["reason"] for line in agent.log if line.get("event") == "A condition was raised"}
        assert raised == {"maintenance"}
        assert node.nvml.inits == 2
        assert accepted(node.kubelet) == 1


async def test_an_agent_that_is_started_during_a_release_leaves_the_driver_alone(
    node: SimulatedNode,
) -> None:
    async with quick_agent(node) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        await agent.wait_answer("/livez", lambda status, _body: status == 200)
        await order(agent, "release", "--all", "--for", "10m")
        assert await agent.stop() == 0
    inits, lists = node.nvml.calls(INIT), len(node.kubelet.lists)
    async with quick_agent(node) as agent:
        await node.kubelet.wait_for(lambda seen: len(seen.lists) > lists, PATIENCE_S)
        await agent.wait_answer("/livez", lambda status, _body: status == 200)
        assert node.kubelet.allocatable("nvidia.com/gpu") == 0
        assert node.nvml.calls(INIT) == inits
        assert open_devices(agent, node) == set()
        await order(agent, "resume")
        await wait_allocatable(node.kubelet, 4, capacity=4)
