"""Fault 23: two agents on one node; an agent killed while a thread hangs in the driver.

Right: the second waits or exits with a clear error and never steals the socket; the successor of
a killed one registers, with what that one knew.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import AgentProcess, flags_of, running, simulated_node, wait_allocatable
from tests.sources.recorder import until

pytestmark = pytest.mark.slow


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


def own_socket(node: SimulatedNode) -> tuple[int, int]:
    status = (node.directory.device_plugins / "nvidia-gpu.sock").lstat()
    return status.st_ino, status.st_mtime_ns


async def http(agent: AgentProcess, target: str) -> str:
    line = await agent.wait_line("Listening", listener="http")
    host, _, port = line["address"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {target} HTTP/1.0\r\n\r\n".encode())
    raw = await reader.read()
    writer.close()
    return raw.decode()


async def test_a_second_agent_exits_and_names_the_first(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as first:
        await first.wait_registered()
        before = own_socket(node)
        async with running(flags_of(node, if_running="fail")) as second:
            assert await second.ended() == 1
            (sentence,) = second.sentences
            assert f"Another agent (process {first.pid}) runs on this node" in sentence
            assert "--if-running=standby" in sentence
        assert own_socket(node) == before


async def test_a_second_agent_stands_by_ready_and_touches_no_socket(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as first:
        await wait_allocatable(node.kubelet, 4)
        before = own_socket(node)
        registrations = len(node.kubelet.registrations)
        control = Path(first.flags["control-socket"])
        await first.wait_line("Listening", listener="control")
        inode = control.lstat().st_ino
        async with running(flags_of(node)) as second:
            await second.wait_line("Standing by while another agent serves this node")
            answer = await http(second, "/readyz?verbose")
            assert " 200 " in answer
            assert "[+]standby ok" in answer
            assert '"standby"' in await http(second, "/preflight")
            assert await second.stop() == 0
        assert own_socket(node) == before
        assert len(node.kubelet.registrations) == registrations
        assert control.lstat().st_ino == inode


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_the_standby_takes_over_with_what_the_first_agent_knew(
    node: SimulatedNode, end: signal.Signals
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(flags_of(node)))
        await wait_allocatable(node.kubelet, 4)
        second = await stack.enter_async_context(running(flags_of(node)))
        await second.wait_line("Standing by while another agent serves this node")
        node.nvml.push_xid(1, 79)
        await wait_allocatable(node.kubelet, 3)
        state = Path(first.flags["state-dir"], "state.json")
        await until(lambda: state.exists() and b'"code":79' in state.read_bytes())
        lists = len(node.kubelet.lists)
        first.signal(end)
        await second.wait_registered()
        await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > lists, timeout_s=60)
        assert node.kubelet.lists[lists].unhealthy == (node.nvml.uuid(1),)
        assert "[+]standby" not in await http(second, "/readyz?verbose")
        await second.wait_line("Listening", listener="control")
        assert await second.stop() == 0


async def test_the_standby_learns_that_the_driver_is_missing(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as first:
        await first.wait_registered()
        async with running(flags_of(node, nvml_library="/nonexistent.so")) as second:
            assert await second.ended() == 1


async def test_the_successor_of_an_agent_killed_in_the_driver_registers(node: SimulatedNode) -> None:
    async with running(flags_of(node, poll="50ms", call_deadline="1s")) as first:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.hang(gpu=1)
        await wait_allocatable(node.kubelet, 3)
        first.signal(signal.SIGKILL)
        await first.ended()
        node.nvml.clear_faults()
        async with running(flags_of(node, if_running="fail")) as second:
            await second.wait_registered()
            assert await second.stop() == 0
