"""The emulated kubelet's life: starting, restarting, and a clean end."""

import asyncio
import contextlib
import os
import random
import socket
from pathlib import Path

import pytest

from agent.errors import AgentError
from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.kubelet.front import SocketFront
from tests.simulation.kubelet.plugins import GPU, plugin_for


async def test_nothing_is_left_when_it_ends(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "warm", tmp_path / "up"):
        pass  # gRPC's own threads and descriptors come with its first use and stay
    files, tasks = open_sockets(), asyncio.all_tasks()
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        plugin = plugin_for(kubelet)
        await plugin.serve()
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        await kubelet.apply_fault("stop_reading", duration="1m")
        await kubelet.apply_fault("absent", duration="1m")
        await kubelet.apply_fault("clear", fault="absent")
        await plugin.stop()
    assert [path for path in tmp_path.rglob("*") if path.is_socket()] == []
    assert asyncio.all_tasks() == tasks
    assert open_sockets() <= files


def open_sockets() -> set[str]:
    """Return the names of this process's unix sockets, those in the file system and abstract ones."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(str(entry.readlink()))
    columns = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in columns if len(line) > 7 and f"socket:[{line[6]}]" in own}


async def test_it_can_come_late(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", present=False) as kubelet:
        assert not kubelet.running
        assert list(kubelet.device_plugins.iterdir()) == []
        async with plugin_for(kubelet) as plugin:
            await kubelet.start()
            assert kubelet.statistics().starts == 1
            assert not plugin.path.exists()
            await plugin.stop()
            await plugin.serve()
            await plugin.register()


async def test_a_resource_from_an_earlier_checkpoint_is_known_without_devices(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet, plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        assert (kubelet.resources, kubelet.capacity(GPU)) == ((GPU,), 0)


async def test_a_bug_in_a_task_of_it_is_raised_and_not_waited_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bug"):
        await _run_with_a_bug(tmp_path)


async def _run_with_a_bug(tmp_path: Path) -> None:
    async def broken() -> None:
        raise ValueError("a bug")

    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        kubelet._spawn(broken(), "broken")
        with pytest.raises(AgentError, match="a bug"):
            await kubelet.wait_for(lambda seen: seen.statistics().starts > 1)


async def test_what_a_client_sends_before_the_server_behind_is_reached_arrives_whole(tmp_path: Path) -> None:
    """Whether asyncio reads before the connection behind exists differs between versions of Python."""
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.readexactly(len(sent)))
        writer.close()

    sent = random.Random(0).randbytes(2_000_000)
    name = f"gpu-agent-test-front-{os.getpid()}"
    front = SocketFront(tmp_path / "front.sock", name)
    async with await asyncio.start_unix_server(read_all, path=f"\0{name}"):
        front.bind()
        await front.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(os.fspath(tmp_path / "front.sock"))
            async with asyncio.timeout(10):
                await asyncio.get_running_loop().sock_sendall(client, sent)
                assert await received == sent
        front.close()
        await front.drained()
