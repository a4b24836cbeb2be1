"""Fault 5: every GPU answers the same UUID, an empty one, or one that does not end: no GPU is identified."""

from collections.abc import Callable

import pytest

from agent.simulation.nvml.state import NvmlState
from tests.harness import agent_process, codes, simulated_node, uuids, wait_allocatable


def same(nvml: NvmlState) -> None:
    for gpu in range(nvml.gpus):
        nvml.set_uuid(gpu, nvml.uuid(0))


def empty(nvml: NvmlState) -> None:
    for gpu in range(nvml.gpus):
        nvml.damage_uuid(gpu, "empty")


def unterminated(nvml: NvmlState) -> None:
    for gpu in range(nvml.gpus):
        nvml.damage_uuid(gpu, "unterminated")


@pytest.mark.slow
@pytest.mark.parametrize(("break_uuids", "left"), [(same, 1), (empty, 0), (unterminated, 0)])
async def test_a_gpu_that_cannot_be_identified_is_not_advertised(
    break_uuids: Callable[[NvmlState], None], left: int
) -> None:
    """The one GPU whose UUID all of them answer is still the one at its address."""
    async with simulated_node("4x-t4") as node, agent_process(node) as agent:
        known = uuids(node)
        await wait_allocatable(node.kubelet, 4)
        await agent.wait_answer("/preflight", lambda status, _: status == 200)
        break_uuids(node.nvml)
        await wait_allocatable(node.kubelet, left, capacity=4)
        await agent.wait_answer("/preflight", lambda status, body: status == 503 and bool(codes(body)))
        await agent.wait_answer("/livez", lambda status, _: status == 200)

        for gpu, uuid in enumerate(known):
            node.nvml.damage_uuid(gpu, None)
            node.nvml.set_uuid(gpu, uuid)
        await wait_allocatable(node.kubelet, 4)
        await agent.wait_answer("/preflight", lambda status, _: status == 200)


@pytest.mark.slow
@pytest.mark.parametrize("break_uuids", [same, empty, unterminated])
async def test_an_agent_that_can_identify_no_gpu_from_the_start_advertises_none(
    break_uuids: Callable[[NvmlState], None],
) -> None:
    async with simulated_node("4x-t4") as node:
        known = uuids(node)
        break_uuids(node.nvml)
        async with agent_process(node) as agent:
            await agent.wait_answer("/preflight", lambda status, body: status == 503 and bool(codes(body)))
            assert (await agent.get("/livez"))[0] == 200
            assert not node.kubelet.registrations
            for gpu, uuid in enumerate(known):
                node.nvml.damage_uuid(gpu, None)
                node.nvml.set_uuid(gpu, uuid)
            await wait_allocatable(node.kubelet, 4)
            await agent.wait_answer("/preflight", lambda status, _: status == 200)
