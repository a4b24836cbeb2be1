"""J1, NVIDIA/k8s-device-plugin#12: a pod gets a GPU that is not really free.

The leftover process is read off /proc here, so that it has the case's pid. What the core makes of it at which
moment, and the same by contexts, is in tests/core.
"""

from collections.abc import Mapping
from typing import Any

from agent.simulation.node import SimulatedNode
from agent.simulation.nvml import GpuProcess
from tests.cases.simulated_proc import BY_PROC, SimulatedProcesses
from tests.harness import (
    GPU,
    AgentProcess,
    agent_process,
    nothing_more,
    simulated_node,
    uuids,
    wait_allocatable,
    wait_polls,
)

MIB = 2**20
FOUR = {"preset": "4x-t4", "gpu": {"memory_mib": 12181}}
AT_ONCE = {**BY_PROC, "leak_memory_size": "100MiB", "leak_memory_held": "0s", "leak_foreign_process": "0s"}
SHARED = """\
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
"""
BLOCKING = {"memory_held_no_process", "foreign_process"}


async def run_pod(node: SimulatedNode, name: str) -> int:
    """Run a pod that gets one device; returns the slot of its GPU."""
    outcome = await node.kubelet.run_pod(name, "ns1", {"main": {GPU: 1}})
    (device,) = outcome.containers["main"].devices[GPU]
    return uuids(node).index(device.partition("::")[0])


def findings(body: Mapping[str, Any]) -> list[tuple[str, list[str], int | None]]:
    return [
        (each["code"], each["gpus"], each.get("bytes"))
        for each in body["reasons"]
        if each["code"] in BLOCKING
    ]


def holders(body: Mapping[str, Any], gpu: int) -> list[tuple[int, str | None]]:
    """Return the holders of a GPU: each process and its pod, which is known a moment later."""
    return [(each["pid"], each["pod"]) for each in body["owners"][gpu]["holders"] or ()]


async def preflight(agent: AgentProcess, *wanted: tuple[str, list[str], int]) -> Any:
    """Wait until preflight has exactly these findings; sources do not report all at the same moment."""
    return await agent.wait_answer("/preflight", lambda _, body: sorted(findings(body)) == list(wanted))


async def test_memory_without_an_owner_and_a_leftover_process_are_exactly_two_findings() -> None:
    async with simulated_node(FOUR) as node, agent_process(node, **AT_ONCE) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        processes = SimulatedProcesses(node)
        u3 = await run_pod(node, "job-b")
        u0, u1, u2 = (number for number in range(4) if number != u3)
        processes.add(4242, u1)
        processes.add(4300, u3, pod="ns1/job-b")
        node.nvml.set_memory_used(u0, 352 * MIB)
        node.nvml.set_processes(u1, [GpuProcess(4242, 900 * MIB)])
        node.nvml.set_memory_used(u2, 3 * MIB)
        node.nvml.set_processes(u3, [GpuProcess(4300, 5000 * MIB)])

        names = uuids(node)
        wanted = [
            ("foreign_process", [names[u1]], 943718400),
            ("memory_held_no_process", [names[u0]], 369098752),
        ]

        body = await preflight(agent, *wanted)

        assert not body["ready"]
        assert "4242" not in str(body)
        reported = await agent.wait_answer("/v1/conditions", lambda _, body: len(of_use(body)) == 2)
        assert [each["pid"] for each in of_use(reported)["foreign_process"]["details"]["culprits"]] == [4242]
        owners = await agent.wait_answer("/v1/owners", lambda status, _: status == 200)
        assert [holder["pid"] for holder in owners["owners"][u1]["holders"]] == [4242]

        await wait_polls(node, 3)
        assert sorted(findings((await agent.get("/preflight"))[1])) == wanted
        await nothing_more(node.kubelet, lambda kubelet: kubelet.allocatable(GPU) < 4, 0.5)


def of_use(body: Mapping[str, Any]) -> dict[str, Any]:
    return {each["code"]: each for each in body["conditions"] if each["details"] is not None}


async def test_with_time_slicing_a_process_whose_pod_has_a_share_is_where_it_belongs() -> None:
    async with simulated_node(FOUR) as node:
        config = node.directory.path / "config.yaml"
        config.write_text(SHARED)
        async with agent_process(node, config_file=str(config), **AT_ONCE) as agent:
            await wait_allocatable(node.kubelet, 8, capacity=8)
            processes = SimulatedProcesses(node)
            u1 = await run_pod(node, "job-a")
            u0 = next(number for number in range(4) if number != u1)
            processes.add(4242, u1, pod="ns1/job-a")
            node.nvml.set_processes(u1, [GpuProcess(4242, 900 * MIB)])
            node.nvml.set_memory_used(u0, 352 * MIB)

            await agent.wait_answer(
                "/v1/owners",
                lambda _, body: holders(body, u1) == [(4242, "ns1/job-a")],
            )
            only = ("memory_held_no_process", [uuids(node)[u0]], 369098752)
            await preflight(agent, only)
            await wait_polls(node, 3)

            assert findings((await agent.get("/preflight"))[1]) == [only]
