"""J4, gpuopenanalytics/pynvml#50: the process list shows memory sizes as pids and pids as sizes."""

from collections.abc import Callable
from typing import Any

import pytest

from agent.simulation.node import SimulatedNode
from agent.simulation.nvml import GpuProcess
from tests.cases.simulated_proc import BY_PROC, SimulatedProcesses
from tests.harness import AgentProcess, agent_process, simulated_node, wait_allocatable, wait_polls

SIXTEEN_GIB = {"preset": "4x-t4", "gpus": 1, "gpu": {"memory_mib": 16384}}
PID = 31794
NOT_AVAILABLE = 2**64 - 1
FUNCTION_NOT_FOUND = 13
LISTS = tuple(
    f"nvmlDeviceGet{kind}RunningProcesses{version}"
    for kind in ("Compute", "Graphics", "MPSCompute")
    for version in ("", "_v2", "_v3")
)


def a_shifted_list(node: SimulatedNode) -> None:
    node.nvml.set_processes(0, [GpuProcess(4211081216, PID), GpuProcess(0, 5368709120)])


def b_no_such_call(node: SimulatedNode) -> None:
    for name in LISTS:
        node.nvml.set_return(name, FUNCTION_NOT_FOUND)


def c_no_figure(node: SimulatedNode) -> None:
    node.nvml.set_processes(0, [GpuProcess(PID, NOT_AVAILABLE)])


def d_more_than_there_is(node: SimulatedNode) -> None:
    node.nvml.set_processes(0, [GpuProcess(PID, 16 * 2**30 + 1)])


async def owner(agent: AgentProcess, info: str) -> Any:
    def is_reported(_: int, body: Any) -> bool:
        (one,) = body["owners"]
        return one["nvml_process_info"] == info and bool(one["holders"])

    return (await agent.wait_answer("/v1/owners", is_reported))["owners"][0]


@pytest.mark.parametrize(
    ("lists", "info", "warnings"),
    [
        (a_shifted_list, "unreliable", 1),
        (b_no_such_call, "unsupported", 1),
        (c_no_figure, "ok", 0),
        (d_more_than_there_is, "unreliable", 1),
    ],
)
async def test_only_what_can_be_is_claimed_and_the_holder_of_the_gpu_is_known_all_the_same(
    lists: Callable[[SimulatedNode], None], info: str, warnings: int
) -> None:
    async with simulated_node(SIXTEEN_GIB) as node:
        lists(node)
        SimulatedProcesses(node).add(PID, 0)
        async with agent_process(node, **BY_PROC | {"poll": "200ms"}) as agent:
            await wait_allocatable(node.kubelet, 1, capacity=1)

            owned = await owner(agent, info)
            await wait_polls(node, 5)
            owned = await owner(agent, info)

            assert [(each["pid"], each["memory_bytes"]) for each in owned["holders"]] == [(PID, None)]
            assert owned["memory_unclaimed_bytes"] is None
            warned = [
                line for line in agent.log if line["level"] == "warning" and "process" in line["message"]
            ]
            assert len(warned) == warnings, agent.text
            assert "Traceback" not in agent.text
