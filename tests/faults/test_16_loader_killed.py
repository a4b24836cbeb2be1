"""Fault 16, the loader: the kernel ends the process that loads the probe because memory ran out.

Right: the probe is off, with the reason; the agent and its registration are as they were. The next agent
loads it, and a loader never outlives its agent.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import (
    GPU,
    PATIENCE_S,
    AgentProcess,
    accepted,
    agent_process,
    processes_with,
    simulated_node,
    wait_allocatable,
)
from tests.other_machine import HANGS, OtherMachine, why_no_other_machine
from tests.probe.conftest import why_no_bcc, why_no_probe
from tests.sources.recorder import until

pytestmark = pytest.mark.slow

FLAGS = {"probe_tier": "syscalls", "probe_loader": "bcc", "poll": "200ms"}


@pytest.fixture(autouse=True)
def _possible() -> None:
    if why := why_no_other_machine() or why_no_probe():
        pytest.skip(why)


@pytest.fixture
def machine(tmp_path: Path) -> OtherMachine:
    """A machine on which compiling does not end."""
    made = OtherMachine(tmp_path / "machine")
    made.has_bcc(HANGS)
    made.has_release("6.1.0-50-amd64")
    made.has_headers("6.1.0-50-amd64")
    return made


@pytest.fixture
def _bcc(tmp_path_factory: pytest.TempPathFactory) -> None:
    if why := why_no_bcc(tmp_path_factory.mktemp("headers")):
        pytest.skip(why)


def loaders(parent: int) -> list[int]:
    """The loader processes of an agent."""
    return [pid for pid in processes_with("agent.probe.loader") if parent_of(pid) == parent]


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


async def loader_that_compiles(machine: OtherMachine, agent: AgentProcess) -> int:
    await until(lambda: machine.compilations == 1)
    (pid,) = loaders(agent.process.pid)
    return pid


def has_probe(body: Any, state: str) -> bool:
    return bool(body["probe"]) and body["probe"]["state"] == state


async def test_a_loader_that_is_killed_costs_the_probe_and_nothing_else(machine: OtherMachine) -> None:
    async with (
        simulated_node() as node,
        agent_process(node, launcher=machine.launcher(), **FLAGS) as agent,
    ):
        await wait_allocatable(node.kubelet, 4, capacity=4)
        os.kill(await loader_that_compiles(machine, agent), signal.SIGKILL)

        state = await agent.wait_answer("/debug/state", lambda _, body: has_probe(body, "disabled"))

        assert state["probe"]["code"] == "loader_killed"
        assert "SIGKILL" in state["probe"]["message"]
        assert machine.compilations == 1
        assert accepted(node.kubelet) == len(node.kubelet.registrations) == 1
        assert not node.kubelet.stream_ends
        assert node.kubelet.allocatable(GPU) == 4
        assert (await agent.get("/livez"))[0] == 200
        await agent.wait_answer("/readyz", lambda status, _: status == 200)
        assert loaders(agent.process.pid) == []
        assert await agent.stop() == 0


@pytest.mark.usefixtures("_bcc")
async def test_the_next_agent_loads_the_probe(machine: OtherMachine) -> None:
    async with simulated_node() as node:
        async with agent_process(node, launcher=machine.launcher(), **FLAGS) as agent:
            os.kill(await loader_that_compiles(machine, agent), signal.SIGKILL)
            await agent.wait_answer("/debug/state", lambda _, body: has_probe(body, "disabled"))
            assert await agent.stop() == 0

        async with agent_process(node, **FLAGS) as agent:
            state = await agent.wait_answer("/debug/state", lambda _, body: has_probe(body, "running"))
            assert (state["probe"]["loader"], state["probe"]["code"]) == ("bcc", "")


async def test_an_agent_that_is_killed_takes_its_loader_with_it(machine: OtherMachine) -> None:
    async with (
        simulated_node() as node,
        agent_process(node, launcher=machine.launcher(), **FLAGS) as agent,
    ):
        pid = await loader_that_compiles(machine, agent)
        assert await agent.stop(signal.SIGKILL) == -signal.SIGKILL

        async with asyncio.timeout(PATIENCE_S):
            while pid in processes_with("agent.probe.loader"):
                await asyncio.sleep(0.02)


async def test_an_agent_that_is_to_stop_does_not_wait_for_its_loader(machine: OtherMachine) -> None:
    async with (
        simulated_node() as node,
        agent_process(node, launcher=machine.launcher(), **FLAGS) as agent,
    ):
        await wait_allocatable(node.kubelet, 4, capacity=4)
        pid = await loader_that_compiles(machine, agent)
        assert await agent.stop() == 0

        async with asyncio.timeout(PATIENCE_S):
            while pid in processes_with("agent.probe.loader"):
                await asyncio.sleep(0.02)
