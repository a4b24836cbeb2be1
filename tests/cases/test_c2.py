"""C2, Project-HAMi/HAMi#2200: an Unhealthy GPU stays so for days, or is forgotten at a restart."""

import asyncio
import json
import signal
import time
from typing import Any

import pytest

from agent.errors import NvmlCode
from agent.simulation.node import SimulatedNode
from agent.simulation.roots import write_boot_id
from tests.harness import (
    GPU,
    AgentProcess,
    agent_process,
    simulated_node,
    uuids,
    wait_allocatable,
    wait_polls,
)

ONE_GPU = {"preset": "dgx-h100", "gpus": 1}
THREE = "3"
"""Clean probes in a row that bring a GPU back."""
RESET, NONE = 1, 0
POLL = "nvmlDeviceGetFieldValues"
"""A call that each health poll of a GPU makes once."""

pytestmark = pytest.mark.slow


def polls(node: SimulatedNode) -> int:
    return node.nvml.calls(POLL, gpu=0)


async def wait_probed(node: SimulatedNode, count: int, call: str = POLL) -> None:
    """Wait until the GPU was polled so many times more; the simulated NVML only counts calls."""
    until = node.nvml.calls(call, gpu=0) + count
    async with asyncio.timeout(30 + 2 * count):
        while node.nvml.calls(call, gpu=0) < until:
            await asyncio.sleep(0.01)


async def reasons(agent: AgentProcess) -> set[str]:
    _, document = await agent.get("/v1/devices")
    (device,) = document["devices"]
    return {reason["code"] for reason in device["reasons"]}


def allocatable_since(node: SimulatedNode, at_ns: int) -> set[int]:
    """Return what the kubelet showed since then, what it shows now included."""
    shown = {each.allocatable for each in node.kubelet.change_history if each.at_ns >= at_ns}
    return shown | {node.kubelet.allocatable(GPU)}


async def test_a_gpu_comes_back_three_clean_probes_after_the_driver_wants_no_recovery_any_more() -> None:
    async with simulated_node(ONE_GPU) as node, agent_process(node, recovery_clean_probes=THREE):
        await wait_allocatable(node.kubelet, 1, capacity=1)

        node.nvml.push_xid(0, 119)
        node.nvml.set_recovery_action(0, RESET)
        await wait_allocatable(node.kubelet, 0)
        broken_ns = time.monotonic_ns()
        await wait_probed(node, 20)
        assert allocatable_since(node, broken_ns) == {0}

        before = polls(node)
        node.nvml.set_recovery_action(0, NONE)
        await wait_allocatable(node.kubelet, 1)

        assert polls(node) - before == 3


async def bind_anew(node: SimulatedNode, agent: AgentProcess) -> None:
    await node.do("unbind", {"gpu": "0"})
    await agent.wait_answer("/v1/devices", lambda _, document: "gpu_lost" in json.dumps(document))
    await node.do("bind", {"gpu": "0"})


async def declare_healthy(node: SimulatedNode, _agent: AgentProcess) -> None:
    await node.do("agent", {"command": "recover", "gpu": "0"})


async def reset_gpu(node: SimulatedNode, _agent: AgentProcess) -> None:
    await node.do("reload-module", {})


@pytest.mark.parametrize("cure", [bind_anew, declare_healthy, reset_gpu])
async def test_without_that_reading_only_a_new_binding_or_a_person_brings_it_back(cure: Any) -> None:
    async with simulated_node(ONE_GPU) as node:
        node.nvml.set_recovery_action(0, None)
        async with agent_process(node, recovery_clean_probes=THREE) as agent:
            await unhealthy_and_staying_so(node, 119)

            await cure(node, agent)
            await wait_allocatable(node.kubelet, 1)


async def test_without_that_reading_a_reboot_brings_it_back() -> None:
    async with simulated_node(ONE_GPU) as node:
        node.nvml.set_recovery_action(0, None)
        async with agent_process(node, recovery_clean_probes=THREE) as agent:
            await unhealthy_and_staying_so(node, 119)
            await agent.stop()

        write_boot_id(node.directory.proc, boots=2)
        async with agent_process(node, recovery_clean_probes=THREE):
            await wait_allocatable(node.kubelet, 1)


async def unhealthy_and_staying_so(node: SimulatedNode, xid: int) -> None:
    """Report an XID, and see that clean probes do not cure it."""
    await wait_allocatable(node.kubelet, 1, capacity=1)
    node.nvml.push_xid(0, xid)
    await wait_allocatable(node.kubelet, 0)
    broken_ns = time.monotonic_ns()
    await wait_probed(node, 6, "nvmlDeviceGetMemoryInfo")
    assert allocatable_since(node, broken_ns) == {0}


async def test_a_gpu_that_fell_off_the_bus_stays_unhealthy_also_in_the_first_list_after_a_restart() -> None:
    async with simulated_node(ONE_GPU) as node:
        async with agent_process(node, recovery_clean_probes=THREE) as agent:
            await wait_allocatable(node.kubelet, 1, capacity=1)
            node.nvml.push_xid(0, 79)
            node.nvml.set_return(None, NvmlCode.GPU_IS_LOST, gpu=0)
            await wait_allocatable(node.kubelet, 0)

            broken_ns = time.monotonic_ns()
            await wait_polls(node, 60)
            assert allocatable_since(node, broken_ns) == {0}
            assert {"xid", "gpu_lost"} <= await reasons(agent)
            await agent.stop(signal.SIGKILL)

        before = len(node.kubelet.lists)
        async with agent_process(node, recovery_clean_probes=THREE) as agent:
            await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > before, 30)

            assert node.kubelet.lists[before].unhealthy == (uuids(node)[0],)
            await wait_polls(node, 3)
            assert all(not each.healthy for each in node.kubelet.lists[before:])


async def test_three_faults_that_went_away_keep_a_gpu_unhealthy() -> None:
    async with simulated_node(ONE_GPU) as node, agent_process(node, recovery_clean_probes=THREE) as agent:
        await wait_allocatable(node.kubelet, 1, capacity=1)
        began_ns = time.monotonic_ns()
        for fault in range(3):
            node.nvml.set_return(None, NvmlCode.TIMEOUT, gpu=0)
            await wait_allocatable(node.kubelet, 0)
            node.nvml.clear_return(None, gpu=0)
            if fault < 2:
                await wait_allocatable(node.kubelet, 1)
        assert time.monotonic_ns() - began_ns < 60e9

        broken_ns = time.monotonic_ns()
        await wait_probed(node, 6)
        await agent.wait_answer("/v1/devices", lambda _, document: is_flapping(document))
        assert allocatable_since(node, broken_ns) == {0}


def is_flapping(document: dict[str, Any]) -> bool:
    (device,) = document["devices"]
    return [reason["code"] for reason in device["reasons"]] == ["flapping"]


async def test_a_driver_without_events_is_healthy_with_one_warning_and_is_probed_all_the_same() -> None:
    async with simulated_node(ONE_GPU) as node:
        node.nvml.set_return("nvmlDeviceRegisterEvents", NvmlCode.NOT_SUPPORTED)
        async with agent_process(node, recovery_clean_probes=THREE) as agent:
            await wait_allocatable(node.kubelet, 1, capacity=1)
            await wait_probed(node, 3)

            assert node.kubelet.allocatable(GPU) == 1
            warnings = [line for line in agent.log if line["level"] == "warning"]
            assert len(warnings) == 1, agent.text
            assert "no XID events" in warnings[0]["message"]

            node.nvml.set_return(None, NvmlCode.TIMEOUT, gpu=0)
            await wait_allocatable(node.kubelet, 0)
