"""Fault 26: each part of the agent that can end, raise or hang does so, and then a GPU breaks."""

import asyncio
import contextlib
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.core.freshness import VOUCHERS
from agent.simulation.node import SimulatedNode
from tests.faults.injected import CASES, Row, rows, table
from tests.harness import (
    GPU,
    AgentProcess,
    agent_process,
    simulated_node,
    uuids,
    wait_allocatable,
)

SICK = 1
ROW_S = 180.0
"""Longer than any step of a row takes on a loaded machine: a source is loaded anew after a minute."""
SIDE_BY_SIDE = 2
"""Workers of the tests that play rows: each plays four agents at once."""

FLAGS = {"call-deadline": "1s", "probe-tier": "procfs", "pods-poll": "200ms", "kubelet-count-poll": "1s"}


@contextlib.asynccontextmanager
async def broken_agent(node: SimulatedNode, row: Row) -> AsyncIterator[tuple[AgentProcess, Path]]:
    """Run the agent with its seam; yields the directory of the injection too."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        config = Path(name, "config.yaml")
        config.write_text("version: v1\n")
        launcher = (sys.executable, "-m", "tests.faults.injected_agent", name)
        flags = {"config-file": str(config), **FLAGS}
        if row.part.startswith("start"):
            Path(name, "fault").write_text(f"{key_of(row.part)}|{row.how}")
        async with agent_process(node, launcher=launcher, **flags) as agent:
            yield agent, Path(name)


def is_out(node: SimulatedNode) -> bool:
    """Whether the kubelet gives the sick GPU to no pod."""
    healthy = node.kubelet.devices(GPU).keys() - set(node.kubelet.unhealthy(GPU))
    return uuids(node)[SICK] not in healthy


async def break_gpu(node: SimulatedNode, row: Row) -> None:
    match row.case.fault:
        case "gpu lost":
            node.nvml.set_return(None, 15, gpu=SICK)
        case "xid":
            # As the driver does, which reports each XID twice; NVML answers all the same.
            node.nvml.push_xid(SICK, 95)
            await node.do("kernel-xid", {"xid": "95", "gpu": str(SICK)})
        case "kernel xid":
            await node.do("kernel-xid", {"xid": "79", "gpu": str(SICK)})
            node.nvml.set_return(None, 15, gpu=SICK)


def key_of(part: str) -> str:
    """Return the part as the seam names it."""
    return part.replace("start|", "thread|")


async def play(row: Row) -> None:
    """Break a part of the agent and then a GPU, and look at what is said of it."""
    try:
        await _play(row)
    except BaseException as error:
        error.add_note(f"row: {row}")
        raise


async def _play(row: Row) -> None:
    async with simulated_node("4x-t4") as node, broken_agent(node, row) as (agent, injection):
        fault = injection / "fault"
        await wait_allocatable(node.kubelet, 4)
        if not row.part.startswith("start"):
            await agent.wait_answer("/readyz", lambda status, _: status == 200)
            fault.write_text(f"{key_of(row.part)}|{row.how}")
        if row.part == "thread|nvml-events":
            # It does one job for as long as all is well. NVML keeps no XID while nobody asks for any.
            asked = node.nvml.calls("nvmlDeviceRegisterEvents") + (4 if row.how != "raises always" else 0)
            node.nvml.set_return("nvmlEventSetWait_v2", 999)
            await injected(injection)
            node.nvml.clear_return("nvmlEventSetWait_v2")
            async with asyncio.timeout(ROW_S):
                while node.nvml.calls("nvmlDeviceRegisterEvents") < asked:
                    await asyncio.sleep(0.02)
        if row.case.kubelet_restarts:
            await node.kubelet.restart()
        if row.part.startswith("task"):
            await injected(injection)
        await break_gpu(node, row)
        await node.kubelet.wait_for(lambda _: is_out(node), ROW_S)
        if row.outcome == "process ends":
            assert await agent.ended() != 0
            return
        await wait_allocatable(node.kubelet, 3 if row.outcome == "sick one out" else 0)
        xids = itertools.cycle((43, 13, 31, 45))
        async with asyncio.timeout(ROW_S):
            while not is_named(agent, row):
                # Something to hear, to write and to read, for what only has to do then. An XID that repeats
                # is an event once a minute, and what programs cause has a writer of its own.
                node.nvml.push_xid(0, next(xids))
                if row.part.endswith("eventlog-writer"):
                    await node.kubelet.restart()
                with contextlib.suppress(OSError):
                    await ask_slowly(node)
                await asyncio.sleep(0.1)


async def ask_slowly(node: SimulatedNode) -> None:
    """Connect to the control socket, and send the request when the connection was accepted."""
    _, writer = await asyncio.open_unix_connection(node.directory.agent_flags()["control-socket"])
    await asyncio.sleep(0.1)
    writer.write(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
    writer.close()


async def injected(injection: Path) -> None:
    """Return once the part broke."""
    async with asyncio.timeout(ROW_S):
        while not (injection / "injected").exists():
            await asyncio.sleep(0.02)


def is_named(agent: AgentProcess, row: Row) -> bool:
    """Whether the agent says which part is broken."""
    return row.how in row.case.unnamed or any(
        row.owner in str(line) and line["level"] in {"warning", "error"} for line in agent.log
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.xdist_group(f"injected-{number % SIDE_BY_SIDE}"))
        for number, part in enumerate(CASES)
    ],
)
async def test_a_broken_part_hides_no_sick_gpu_and_is_named(part: str) -> None:
    async with asyncio.TaskGroup() as group:
        for row in rows(part):
            group.create_task(play(row), name=str(row))


def test_the_table_in_the_documentation_is_that_of_the_suite() -> None:
    assert (Path(__file__).parent / "INJECTED.md").read_text() == table()


@pytest.mark.slow
async def test_each_part_that_the_agent_has_is_in_the_table() -> None:
    """A new task, thread, callback or write without a case fails here; the names are the agent's own."""
    row = next(rows("task|nvml"))._replace(part="none")
    async with simulated_node("4x-t4") as node, broken_agent(node, row) as (agent, injection):
        await wait_allocatable(node.kubelet, 4)
        await agent.wait_answer("/readyz", lambda status, _: status == 200)
        node.nvml.push_xid(SICK, 79)
        await wait_allocatable(node.kubelet, 3)
        await agent.wait_answer("/preflight", lambda status, _: status == 503)
        known = {key_of(part) for part in CASES}
        assert set((injection / "parts").read_text().split("\n")) - known == {""}
    tasks = {part.partition("|")[2] for part in known if part.startswith("task")}
    # The loop's own measurement ends the process when it fails; MPS is there with its sharing alone.
    assert {str(each.task) for each in VOUCHERS.values()} - tasks == {"loop", "mps"}
