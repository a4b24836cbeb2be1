"""The driver double: device files that answer as the driver does, and books of what it granted."""

import asyncio
import errno
import fcntl
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.errors import AgentError
from agent.simulation.driver_double import abi
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import UVM_MAJOR, inodes
from agent.simulation.gpu_processes.calls import Caller
from agent.threads import in_daemon_thread
from tests.harness import ROOT
from tests.simulation.driver_double_rig import GPUS, VERSION, running_double

PATIENCE_S = 60.0
DEVICE, SPACE, GROUP, SHARE = 0x5C000001, 0x5C000002, 0x5C000003, 0x5C000004


@pytest.fixture
async def double() -> AsyncIterator[DriverDouble]:
    async with running_double() as made:
        yield made


class Program:
    """Calls that this very process makes, and the files it opened for them."""

    def __init__(self, double: DriverDouble, version: str = VERSION) -> None:
        self.call = Caller(str(double.folder), version)
        self._files: list[int] = []

    def open(self, name: str) -> int:
        self._files.append(self.call.open(name))
        return self._files[-1]

    def close(self, descriptor: int) -> None:
        self._files.remove(descriptor)
        os.close(descriptor)

    def client(self) -> tuple[int, int]:
        """A descriptor of nvidiactl and a client of it, with a device, a VA space and a channel group."""
        control = self.open("nvidiactl")
        client = self.call.allocate_client(control)
        self.call.allocate_device(control, client, DEVICE, GPUS[1].instance)
        self.call.allocate(control, client, DEVICE, SPACE, abi.VA_SPACE)
        self.call.allocate(control, client, DEVICE, GROUP, abi.CHANNEL_GROUP)
        return control, client

    def end(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)


@pytest.fixture
async def program(double: DriverDouble) -> AsyncIterator[Program]:
    made = Program(double)
    yield made
    made.end()


# The files


async def test_the_nodes_have_the_numbers_of_the_devices_they_stand_for(double: DriverDouble) -> None:
    expected = inodes(GPUS)
    assert expected["nvidiactl"] == 195 << 20 | 255
    assert expected["nvidia1"] == 195 << 20 | 1
    assert expected["nvidia-uvm"] == UVM_MAJOR << 20
    assert sorted(path.name for path in double.folder.iterdir()) == sorted(expected)
    for name, number in expected.items():
        seen = double.node(name).stat()
        assert seen.st_ino == number
        assert os.major(seen.st_dev) << 20 | os.minor(seen.st_dev) == double.file_system
        assert stat.S_ISREG(seen.st_mode)


async def test_a_killed_double_fails_every_call_and_leaves_nothing(
    double: DriverDouble, program: Program
) -> None:
    control, _ = program.client()
    os.kill(double.pid, signal.SIGKILL)
    with pytest.raises(AgentError, match="exited"):
        await double.books()
    with pytest.raises(OSError, match=r"not connected|aborted"):
        fcntl.ioctl(control, abi.command(abi.FREE, 16), bytearray(16))
    assert "gpu-agent-nodes" not in Path("/proc/self/mounts").read_text(encoding="utf-8")


async def test_the_double_ends_with_its_parent(double: DriverDouble) -> None:
    code = f"""
import asyncio, os
from agent.simulation.driver_double.double import DriverDouble
from tests.simulation.driver_double_rig import GPUS, VERSION
async def main():
    double = await DriverDouble.start(GPUS, version=VERSION)
    print(double.pid, flush=True)
    os.kill(os.getpid(), {int(signal.SIGKILL)})
asyncio.run(main())
"""
    starter = await in_daemon_thread(
        "starter",
        lambda: subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=False),
    )
    pid = int(starter.stdout)
    async with asyncio.timeout(PATIENCE_S):
        while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            await asyncio.sleep(0.01)


# Commands and their forms


@pytest.mark.parametrize(
    ("version", "long_size", "long_status", "short_status", "numa_size"),
    [
        ("515.43.04", 40, 32, 24, 552),
        ("520.56.06", 40, 32, 24, 552),
        ("525.60.11", 40, 36, 24, 552),
        ("535.104.05", 48, 40, 28, 560),
        ("595.45.04", 48, 40, 28, 560),
    ],
)
async def test_sizes_and_places_are_those_of_the_version(
    version: str, long_size: int, long_status: int, short_status: int, numa_size: int
) -> None:
    async with running_double(version) as double:
        program = Program(double, version)
        control = program.open("nvidiactl")
        for size, status_at in ((long_size, long_status), (32, short_status)):
            data = bytearray(abi.ALLOC_HEAD.pack(0, 0, 0, abi.ROOT_CLIENT, 0).ljust(size, b"\xff"))
            fcntl.ioctl(control, abi.command(abi.ALLOC, size), data)
            assert struct.unpack_from("=I", data, status_at) == (0,)
            assert data.count(b"\0\0\0\0", 24) == 1
        wrong = 48 if long_size == 40 else 40
        with pytest.raises(OSError, match="Invalid argument"):
            fcntl.ioctl(control, abi.command(abi.ALLOC, wrong), bytearray(wrong))
        gpu = program.open("nvidia0")
        fcntl.ioctl(gpu, abi.command(abi.NUMA_INFO, numa_size), bytearray(numa_size))
        with pytest.raises(OSError, match="Invalid argument"):
            fcntl.ioctl(gpu, abi.command(abi.NUMA_INFO, numa_size - 8), bytearray(numa_size - 8))
        program.end()


@pytest.mark.parametrize(
    ("node", "number", "size"),
    [
        ("nvidia0", abi.ALLOC, 48),
        ("nvidia0", abi.FREE, 16),
        ("nvidia0", abi.CONTROL, 32),
        ("nvidia0", abi.DUP_OBJECT, 28),
        ("nvidia0", abi.CARD_INFO, 72 * 32),
        ("nvidia0", abi.CHECK_VERSION_STR, 72),
        ("nvidiactl", abi.ALLOC_MEMORY, 56),
        ("nvidiactl", abi.NUMA_INFO, 560),
        ("nvidiactl", abi.FREE, 20),
        ("nvidiactl", abi.CONTROL, 28),
        ("nvidiactl", 99, 16),
        ("nvidiactl", abi.CARD_INFO, 72),
    ],
)
async def test_a_command_on_the_wrong_node_or_of_the_wrong_size_is_invalid(
    program: Program, node: str, number: int, size: int
) -> None:
    descriptor = program.open(node)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        fcntl.ioctl(descriptor, abi.command(number, size), bytearray(size))
    assert caught.value.errno == errno.EINVAL


async def test_a_command_wrapped_in_another_is_done(double: DriverDouble, program: Program) -> None:
    control = program.open("nvidiactl")
    inner = array("B", abi.ALLOC_HEAD.pack(0, 0, 0, abi.ROOT_CLIENT, 0).ljust(48, b"\0"))
    outer = bytearray(abi.XFER_STRUCT.pack(abi.ALLOC, 48, inner.buffer_info()[0]))
    fcntl.ioctl(control, abi.command(abi.XFER_CMD, len(outer)), outer)
    assert abi.ALLOC_HEAD.unpack_from(inner)[2] == (await double.books()).clients[0].client
    outer = bytearray(abi.XFER_STRUCT.pack(abi.ALLOC, 48, 8))
    with pytest.raises(OSError, match="Bad address"):
        fcntl.ioctl(control, abi.command(abi.XFER_CMD, len(outer)), outer)


# Registered files


async def test_a_registered_node_keeps_the_control_file(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    program.call.allocate(control, client, GROUP, SHARE, abi.CONTEXT_SHARE)
    nodes = [program.open("nvidia0"), program.open("nvidia1")]
    for node in nodes:
        program.call.register(node, control)
    program.close(control)
    for node in nodes:
        # The file is held by no process, and by no descriptor of the double either.
        assert len((await double.books()).contexts) == 1
        opened = {path.readlink().name for path in Path(f"/proc/{double.pid}/fd").iterdir()}
        assert "nvidiactl" not in opened
        program.close(node)
    books = await double.books()
    assert books.contexts == ()
    assert books.released == {"nvidiactl": 1, "nvidia0": 1, "nvidia1": 1}


async def test_only_an_open_control_file_can_be_registered_to_and_once(
    program: Program, tmp_path: Path
) -> None:
    control, other = program.open("nvidiactl"), program.open("nvidiactl")
    node = program.open("nvidia0")
    plain = os.open(tmp_path, os.O_RDONLY)
    one, two = socket.socketpair()
    wrong = [node, program.open("nvidia1"), program.open("nvidia-uvm"), plain, one.fileno(), 999, -1]
    for descriptor in wrong:
        with pytest.raises(OSError, match="Invalid argument"):
            program.call.register(node, descriptor)
    with pytest.raises(OSError, match="Invalid argument"):
        program.call.register(control, control)
    program.call.register(node, control)
    with pytest.raises(OSError, match="Invalid argument"):
        program.call.register(node, other)
    # One that is registered to another, or has nodes of its own, cannot be part of a chain.
    with pytest.raises(OSError, match="Invalid argument"):
        program.call.register(control, other)
    os.close(plain)
    one.close()
    two.close()


# Nodes that do not answer, or late


async def test_an_ioctl_is_held_until_its_node_is_released(double: DriverDouble, program: Program) -> None:
    gpu = program.open("nvidia0")
    await double.hold("nvidia0")
    size = abi.layout(VERSION).numa_info_size
    call = in_daemon_thread(
        "held", lambda: fcntl.ioctl(gpu, abi.command(abi.NUMA_INFO, size), bytearray(size))
    )
    held = asyncio.ensure_future(call)  # noqa: TID251 - the test waits for it
    async with asyncio.timeout(PATIENCE_S):
        while await double.held() < 1:
            await asyncio.sleep(0.01)
    # The other nodes answer.
    program.client()
    assert not held.done()
    await double.release("nvidia0")
    async with asyncio.timeout(PATIENCE_S):
        assert await held is not None
