"""Fault 24: a bug blocks the event loop.

Right: no sign of life is sent while it does, so the watchdog misses and systemd starts the process
anew. A driver that hangs is no such thing: then the signs of life go on.
"""

import asyncio
import itertools
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import PATIENCE_S, flags_of, running, short_directory, simulated_node, wait_allocatable

pytestmark = pytest.mark.slow

WATCHDOG_S = 1.0
BLOCKED_S = 3.0

BLOCKS_ON_SIGUSR1 = f"""
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep({BLOCKED_S}))
"""


@dataclass
class Manager:
    """The service manager: what it was sent, and when."""

    socket: socket.socket
    received: list[tuple[float, str]] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = (await loop.sock_recv(self.socket, 4096)).decode()
            self.received.append((time.monotonic(), message))
            self.more.set()
            self.more = asyncio.Event()

    def environment(self) -> dict[str, str]:
        return {
            "NOTIFY_SOCKET": self.socket.getsockname(),
            "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6)),
        }

    def moments(self, message: str) -> list[float]:
        return [at_s for at_s, received in self.received if received.split("\n")[0].startswith(message)]

    async def wait(self, message: str, count: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.moments(message)) < count:
                await self.more.wait()


@pytest.fixture
async def manager() -> AsyncIterator[Manager]:
    with short_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(directory / "notify"))
        bound.setblocking(False)
        made = Manager(bound)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(made.listen(), name="manager")
            yield made
            task.cancel()


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


async def test_a_blocked_loop_gives_no_sign_of_life(node: SimulatedNode, manager: Manager) -> None:
    flags = flags_of(node)
    async with running(flags, environment=manager.environment(), prelude=BLOCKS_ON_SIGUSR1) as agent:
        await manager.wait("READY=1")
        await manager.wait("WATCHDOG=1", count=3)
        agent.signal(signal.SIGUSR1)
        before = len(manager.moments("WATCHDOG=1"))
        await manager.wait("WATCHDOG=1", count=before + 3)
        moments = manager.moments("WATCHDOG=1")
        silences = [later - earlier for earlier, later in itertools.pairwise(moments)]
        assert max(silences) > BLOCKED_S - WATCHDOG_S / 2
        assert max(silences) > WATCHDOG_S


async def test_a_driver_that_hangs_does_not_keep_the_signs_of_life_back(
    node: SimulatedNode, manager: Manager
) -> None:
    flags = flags_of(node, poll="50ms", call_deadline="1s")
    async with running(flags, environment=manager.environment()) as agent:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.hang()
        await wait_allocatable(node.kubelet, 0)
        before = len(manager.moments("WATCHDOG=1"))
        await manager.wait("WATCHDOG=1", count=before + 5)
        node.nvml.clear_faults()
        assert await agent.stop() == 0


async def test_systemd_is_notified_of_each_turn_of_the_agents_life(
    node: SimulatedNode, manager: Manager
) -> None:
    async with running(flags_of(node), environment=manager.environment()) as agent:
        await manager.wait("READY=1")
        await manager.wait("STATUS=4 GPUs, registered")
        agent.signal(signal.SIGHUP)
        await manager.wait("RELOADING=1")
        await manager.wait("READY=1", count=2)
        assert await agent.stop() == 0
        await manager.wait("STOPPING=1")
        assert manager.moments("EXTEND_TIMEOUT_USEC=")


async def test_a_command_that_follows_the_start_is_answered(node: SimulatedNode, manager: Manager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    flags = flags_of(node, http_listen=f"127.0.0.1:{address[1]}")
    async with running(flags, environment=manager.environment()) as agent:
        await manager.wait("READY=1")
        with socket.socket(socket.AF_UNIX) as control, socket.create_connection(address) as public:
            control.connect(flags["control-socket"])
            public.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            public.settimeout(PATIENCE_S)
            assert b" 200 " in public.recv(64)
        assert await agent.stop() == 0


async def test_a_port_that_is_taken_keeps_no_node_from_being_ready(
    node: SimulatedNode, manager: Manager
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags = flags_of(node, http_listen=f"127.0.0.1:{listener.getsockname()[1]}")
        async with running(flags, environment=manager.environment()) as agent:
            await manager.wait("READY=1")
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(flags["control-socket"])
            await wait_allocatable(node.kubelet, 4)
            assert await agent.stop() == 0
