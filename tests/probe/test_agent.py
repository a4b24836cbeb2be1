"""The agent on a simulated node whose driver answers calls: what its probe shows, as an operator sees it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import (
    GPU,
    ROOT,
    AgentProcess,
    agent_process,
    gpu_agent,
    simulated_node,
    why_no_driver_double,
)
from tests.probe.conftest import why_no_probe

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _possible() -> None:
    if why := why_no_probe() or why_no_driver_double():
        pytest.skip(why)


PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def watched(**flags: str) -> AsyncIterator[tuple[SimulatedNode, AgentProcess]]:
    """A node with the driver double, and the agent on it with its probe in the kernel."""
    async with simulated_node("4x-t4", driver="required") as node, agent_process(node, **flags) as agent:
        state = await agent.wait_answer(
            "/debug/state", lambda _, body: (body.get("probe") or {}).get("state") in {"running", "disabled"}
        )
        if state["probe"]["code"] in {"kernel_headers_missing", "object_missing", "bcc_missing"}:
            pytest.skip(state["probe"]["message"])
        assert state["probe"]["state"] == "running", state["probe"]["message"]
        yield node, agent


async def do(node: SimulatedNode, order: str, name: str, **given: str) -> int:
    """Give an order to a process; returns its pid."""
    await node.do("process", {"command": order, "name": name, **given})
    return node.processes.get(name).process.pid


def command(node: SimulatedNode, *words: str) -> tuple[str, ...]:
    return (*words, "--control-socket", str(node.directory.agent / "control.sock"))


def contexts_of(body: Any, pid: int) -> list[int]:
    return [hold["contexts"] for each in body["processes"] if each["pid"] == pid for hold in each["gpus"]]


async def test_processes_of_a_gpu_are_shown_with_pod_and_contexts() -> None:
    async with watched() as (node, agent):
        outcome = await node.kubelet.run_pod("job-a", "ns1", {"main": {GPU: 1}})
        assert outcome.running
        pid = await do(node, "start", "train", gpu="0", contexts="2", pod="ns1/job-a")
        await agent.wait_answer("/v1/contexts", lambda _, body: contexts_of(body, pid) == [2])
        await agent.wait_answer(
            "/v1/owners",
            lambda _, body: any(
                holder["pid"] == pid and holder["pod"] == "ns1/job-a"
                for owned in body["owners"]
                for holder in owned["holders"] or ()
            ),
        )
        table = await gpu_agent(*command(node, "contexts"))
        owners = await gpu_agent(*command(node, "owners"))
        status = await gpu_agent(*command(node, "status"))

    (row,) = [line.split() for line in table.out.splitlines()[1:]]
    assert row[:4] == [str(pid), "train", "0", "2"]
    assert row[-1] in {"ns1/job-a", "<none>"}
    assert "not verified with CUDA" in table.err
    assert [line.split()[:2] for line in owners.out.splitlines()[1:]][1:] == [
        [str(gpu), "<none>"] for gpu in (1, 2, 3)
    ]
    assert f" {pid} " in owners.out
    assert str(agent.process.pid) not in owners.out + table.out
    assert "Probe    tier syscalls, loader " in status.out


async def test_a_device_whose_driver_does_not_answer_is_overdue_and_not_ready() -> None:
    async with watched(poll="1s", call_deadline="1s") as (node, agent):

        def is_ready(wanted: bool) -> Any:
            return lambda _, body: (
                [(each["device_call"] or {}).get("ready") for each in body["gpus"]][:2] == [True, wanted]
            )

        await agent.wait_answer("/debug/state", is_ready(True))
        await node.do("hold-node", {"name": "nvidia1"})
        try:
            await agent.wait_answer("/debug/state", is_ready(False))
            held = await agent.wait_answer("/v1/conditions", lambda _, body: bool(body["conditions"]))
        finally:
            # A thread that is held keeps its process from exiting.
            await node.do("release-node", {"name": "nvidia1"})
        await agent.wait_answer("/debug/state", is_ready(True))
        uuid = node.nvml.uuid(1)

    (condition,) = held["conditions"]
    assert (condition["code"], condition["gpu_uuid"]) == ("nvml_timeout", uuid)


def contexts_made(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in lines if each.get("about") == "FERMI_CONTEXT_SHARE_A"]


async def test_the_calls_of_a_process_are_traced_until_it_exits() -> None:
    async with watched() as (node, _agent):
        pid = await do(node, "start", "train", gpu="0", contexts="0")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent", *command(node, "trace", str(pid), "--json")),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            limit=1 << 22,
        )
        assert process.stdout is not None
        lines: list[dict[str, Any]] = []
        async with asyncio.timeout(PATIENCE_S):
            # Calls are traced from the moment at which the probe is in the kernel, which sends no event.
            while not contexts_made(lines):
                await do(node, "create", "train", contexts="1")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        while not contexts_made(lines):
                            lines.append(json.loads(await process.stdout.readline()))
            await do(node, "create", "train", contexts="1")  # all of its calls are traced
            await node.do("process", {"command": "kill", "name": "train"})
            lines += [json.loads(line) async for line in process.stdout]
            assert await process.wait() == 0

    calls = [line for line in lines if line["kind"] == "call"]
    assert {each["pid"] for each in calls} == {pid}
    made = contexts_made(lines)
    assert {(each["call"], each["device"], each["answer"]) for each in made} == {
        ("RM_ALLOC", "nvidiactl", "OK")
    }
    assert {each["device"] for each in calls} >= {"nvidiactl", "nvidia0", "nvidia-uvm"}
    (summary,) = [line for line in lines if line["kind"] == "summary"]
    assert summary["ended"] == "the process exited"
    assert sum(row["calls"] for row in summary["calls"]) == len(calls) + summary["not_shown"]
    counted = {row["call"]: row["calls"] for row in summary["calls"]}
    assert counted["RM_ALLOC FERMI_CONTEXT_SHARE_A"] >= len(made)


async def test_an_interrupt_stops_a_trace_with_the_table() -> None:
    async with watched() as (node, _agent):
        pid = await do(node, "start", "train", gpu="0", contexts="0")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent", *command(node, "trace", str(pid))),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            assert b"Tracing train" in await process.stderr.readline()
            await do(node, "create", "train", contexts="1")
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()

    assert process.returncode == 0
    assert b"not returned, 0 lost: interrupted" in err
    assert b"CALLS  FAILED  TOTAL" in out
    assert b"Traceback" not in err
