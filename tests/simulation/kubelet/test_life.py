"""The emulated kubelet's life: starting, restarting, and a clean end."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from agent.errors import AgentError, UsageError
from agent.simulation.kubelet import EmulatedKubelet
from tests.simulation.kubelet.plugins import GPU, plugin_for, refuses


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


async def test_it_can_leave_its_sockets_as_a_real_one_does(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", remove_sockets=False):
        pass
    assert refuses(tmp_path / "dp" / "kubelet.sock")
    assert refuses(tmp_path / "pr" / "kubelet.sock")


async def test_it_leaves_a_socket_file_that_is_not_its_own(tmp_path: Path) -> None:
    own = tmp_path / "dp" / "kubelet.sock"
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr"):
        own.unlink()
        own.touch()
    assert own.exists()


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


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\x00", b'{"Data":{"RegisteredDevices":null}}'])
async def test_a_broken_checkpoint_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dp").mkdir()
    (tmp_path / "dp" / "kubelet_internal_checkpoint").write_bytes(content)
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        assert kubelet.resources == ()


async def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    with pytest.raises(UsageError, match="longer than 107 bytes; choose a shorter directory"):
        async with EmulatedKubelet(long, tmp_path / "pr"):
            pass


async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AgentError, match=f"cannot make its directories.*{tmp_path}/file"):
        async with EmulatedKubelet(tmp_path / "file", tmp_path / "pr"):
            pass


async def test_a_socket_that_cannot_be_bound_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "dp" / "kubelet.sock").mkdir(parents=True)
    with pytest.raises(AgentError, match=f"cannot serve in {tmp_path}/dp: .*in use"):
        async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr"):
            pass
    assert not (tmp_path / "pr" / "kubelet.sock").exists()


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
