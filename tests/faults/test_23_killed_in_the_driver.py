"""Fault 23, second half: an agent is killed while a thread of it is held in the kernel by the driver.

Right: what it served on is free at once, although the process cannot end; its successor registers without
waiting for the driver, and advertises nothing that the one before knew to be unhealthy. The hang is a real
one: a call on a device that never returns and that no signal ends.
"""

import asyncio
import fcntl
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agent.errors import SourceError
from agent.simulation.node import SimulatedNode
from tests.hanging_nodes import HangingNodes
from tests.harness import PATIENCE_S, AgentProcess, flags_of, running, simulated_node, wait_allocatable
from tests.sources.recorder import until

pytestmark = pytest.mark.slow

UNWAITED_S = 20.0
"""The driver would be waited for three times as long; a busy machine takes a part of this."""
DRIVER_DEADLINES = {"init_deadline": "60s", "first_handle_deadline": "60s", "fail_on_init_error": "false"}


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


@pytest.fixture
def devices(node: SimulatedNode) -> Iterator[HangingNodes]:
    """Device doubles of the driver and of one GPU that can hang."""
    names = ("nvidiactl", "nvidia2")
    try:
        made = HangingNodes(names)
    except SourceError as error:
        pytest.skip(f"No call can be held in the kernel here: {error}")
    with made:
        for name in names:
            made.replace(node.directory.path / "dev" / name)
        yield made


@contextmanager
def released_at_the_end(devices: HangingNodes) -> Iterator[None]:
    """A process that is held cannot be waited for."""
    try:
        yield
    finally:
        devices.release_all()


async def hang(devices: HangingNodes, name: str) -> None:
    devices.hang(name)
    async with asyncio.timeout(PATIENCE_S):
        while not devices.wait_held(1, 0):
            await asyncio.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


def can_lock(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def rejects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        return False


def states_of_threads(pid: int) -> set[str]:
    """The kernel's letters for what the threads of a process do."""
    found = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            found.add(stat.read_text(encoding="ascii").rpartition(")")[2].split()[0])
    return found


async def killed(agent: AgentProcess) -> None:
    """Kill an agent and see that the kernel cannot end it."""
    agent.signal(signal.SIGKILL)
    await until(lambda: states_of_threads(agent.pid) >= {"Z", "D"})


SCOPES = [pytest.param("nvidia2", 3, id="one GPU hangs"), pytest.param("nvidiactl", 0, id="the driver hangs")]


@pytest.mark.parametrize(("name", "left"), SCOPES)
async def test_what_a_killed_agent_served_on_is_free_although_it_is_held_in_the_driver(
    node: SimulatedNode, devices: HangingNodes, name: str, left: int
) -> None:
    port = free_port()
    flags = flags_of(node, poll="50ms", call_deadline="1s", http_listen=f"127.0.0.1:{port}")
    async with running(flags) as agent:
        with released_at_the_end(devices):
            await wait_allocatable(node.kubelet, 4)
            await agent.wait_line("Listening", listener="http")
            await agent.wait_line("Listening", listener="control")
            await hang(devices, name)
            await wait_allocatable(node.kubelet, left)
            assert not can_bind(port)
            assert not can_lock(node.directory.agent / "lock")

            await killed(agent)

            # The kernel closes the files one after the other.
            await until(lambda: can_lock(node.directory.agent / "lock"))
            await until(lambda: can_bind(port))
            await until(lambda: rejects(node.directory.device_plugins / "nvidia-gpu.sock"))
            await until(lambda: rejects(Path(agent.flags["control-socket"])))
            assert "D" in states_of_threads(agent.pid)
        assert await agent.ended() == -signal.SIGKILL


@pytest.mark.parametrize(("name", "left"), SCOPES)
async def test_the_successor_registers_without_waiting_for_the_driver_and_advertises_nothing_unhealthy(
    node: SimulatedNode, devices: HangingNodes, name: str, left: int
) -> None:
    flags = flags_of(node, poll="50ms", call_deadline="1s", recovery_quiet="0s", **DRIVER_DEADLINES)
    state = Path(flags["state-dir"], "state.json")
    broken = {node.nvml.uuid(2)} if left else {node.nvml.uuid(gpu) for gpu in range(4)}
    async with running(flags) as first:
        with released_at_the_end(devices):
            await wait_allocatable(node.kubelet, 4)
            await hang(devices, name)
            await wait_allocatable(node.kubelet, left)
            wanted = b"nvml_timeout" if left else b"driver_hung"
            await until(lambda: state.exists() and wanted in state.read_bytes())
            await killed(first)
            lists = len(node.kubelet.lists)
            began = time.monotonic()

            async with running({**flags, "if-running": "fail"}) as second:
                with released_at_the_end(devices):
                    await second.wait_registered()
                    assert time.monotonic() - began < UNWAITED_S
                    await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > lists, PATIENCE_S)
                    await wait_allocatable(node.kubelet, left)
                    for each in node.kubelet.lists[lists:]:
                        assert broken <= set(each.unhealthy)

                    devices.release_all()
                    await wait_allocatable(node.kubelet, 4)
                    assert await second.stop() == 0
        assert await first.ended() == -signal.SIGKILL
