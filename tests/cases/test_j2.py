"""J2, NVIDIA/gpu-operator#2880: workloads are gone, their processes keep GPU memory.

The case's 30 s are three here, and the processes are read off /proc, so that they have the case's pids. That
nothing is reported a second before the time, on a clock of the test's own, is in tests/core.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.simulation.node import SimulatedNode
from agent.simulation.nvml import GpuProcess
from tests.cases.simulated_proc import BY_PROC, SimulatedProcesses
from tests.harness import (
    GPU,
    SLACK_NS,
    AgentProcess,
    agent_process,
    simulated_node,
    wait_allocatable,
    why_no_driver_double,
)

pytestmark = pytest.mark.slow

MIB = 2**20
ONE_GPU = {"preset": "4x-t4", "gpus": 1}
GRACE_NS = 3_000_000_000
GRACE = {"leak_pod_gone": "3s", "leak_foreign_process": "3s", "poll": "200ms", **BY_PROC}
USERS = {501: 4000, 502: 3000, 503: 2500, 504: 2000, 505: 100}
"""What NVML lists, in MiB."""


def list_users(node: SimulatedNode, *pids: int) -> None:
    node.nvml.set_processes(0, [GpuProcess(pid, USERS[pid] * MIB) for pid in pids])


def details(body: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    found = (each["details"] for each in body["conditions"] if each["details"] is not None and each["lasts"])
    return next((each for each in found if each["kind"] == kind), None)


def pids(body: Mapping[str, Any], kind: str) -> list[int]:
    found = details(body, kind)
    return [] if found is None else [each["pid"] for each in found["culprits"]]


async def wait_pids(agent: AgentProcess, kind: str, *wanted: int) -> Any:
    return await agent.wait_answer("/v1/conditions", lambda _, body: pids(body, kind) == list(wanted))


async def run_pod(node: SimulatedNode, name: str) -> None:
    assert (await node.kubelet.run_pod(name, "ns1", {"main": {GPU: 1}})).running


async def wait_holders(agent: AgentProcess, *wanted: int) -> None:
    def holds(_: int, body: Any) -> bool:
        return {each["pid"] for each in body["owners"][0]["holders"] or ()} == set(wanted)

    await agent.wait_answer("/v1/owners", holds)


def pods(body: Any) -> set[str | None]:
    return {each["pod"] for each in body["owners"][0]["holders"] or ()}


async def test_a_process_that_outlives_its_pod_is_reported_after_the_grace_and_until_it_ends() -> None:
    async with simulated_node(ONE_GPU) as node, agent_process(node, **GRACE) as agent:
        await wait_allocatable(node.kubelet, 1, capacity=1)
        processes = SimulatedProcesses(node)
        await run_pod(node, "job-a")
        processes.add(501, 0, pod="ns1/job-a")
        processes.add(502, 0, pod="ns1/job-a", state="D")
        list_users(node, *USERS)
        await wait_holders(agent, 501, 502, 503, 504, 505)
        # The name of a pod is known to an agent that listed it while it was there.
        await agent.wait_answer("/v1/owners", lambda _, body: pods(body) >= {"ns1/job-a"})

        deleted_ns = time.monotonic_ns()
        node.kubelet.delete_pod("job-a", "ns1")
        await run_pod(node, "job-b")
        processes.add(503, 0, pod="ns1/job-b")
        processes.add(504, 0)
        body = await wait_pids(agent, "pod_gone", 501, 502)

        (reported,) = [each for each in body["conditions"] if each["details"]["kind"] == "pod_gone"]
        assert GRACE_NS <= reported["since_monotonic_ns"] - deleted_ns <= GRACE_NS + SLACK_NS
        found = reported["details"]
        assert found["used_bytes"] == 7340032000
        assert [(each["pod"], each["state"], each["killable"]) for each in found["culprits"]] == [
            ("ns1/job-a", "S", True),
            ("ns1/job-a", "D", False),
        ]
        body = await wait_pids(agent, "foreign_process", 504)
        (stranger,) = (details(body, "foreign_process") or {})["culprits"]
        assert (stranger["owner"], stranger["pod"]) == ("host", None)
        assert {pid for each in body["conditions"] for pid in pids(body, each["details"]["kind"])} == {
            501,
            502,
            504,
        }

        processes.end(501)
        processes.add(501, 0, pod="ns1/job-b", start=90_000)
        await wait_pids(agent, "pod_gone", 502)
        await wait_holders(agent, 501, 502, 503, 504, 505)

        processes.end(502)
        list_users(node, 501, 503, 504, 505)
        await wait_pids(agent, "pod_gone")
        await wait_pids(agent, "foreign_process", 504)
        assert node.kubelet.unhealthy(GPU) == ()
        assert not [line for line in agent.log if line["level"] == "error"], agent.text
        assert "505" not in str([line for line in agent.log if line["level"] == "warning"])


async def test_the_agent_ends_no_process() -> None:
    """Whatever it finds: a real process whose pod is gone lives on."""
    if why := why_no_driver_double():
        pytest.skip(why)
    async with simulated_node(ONE_GPU, driver="required") as node:
        flags = {**GRACE, "leak_pod_gone": "100ms", "leak_policy": "unhealthy-when-free"}
        async with agent_process(node, **flags) as agent:
            await wait_allocatable(node.kubelet, 1, capacity=1)
            await run_pod(node, "job-a")
            started = await node.processes.start("train", [0], pod="ns1/job-a")
            node.kubelet.delete_pod("job-a", "ns1")

            await wait_pids(agent, "pod_gone", started.process.pid)
            await wait_allocatable(node.kubelet, 0)

            os.kill(started.process.pid, 0)
            assert Path(f"/proc/{started.process.pid}/comm").read_text() == "train\n"
