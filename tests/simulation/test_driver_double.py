"""The driver double: device files that answer as the driver does, and books that say what it granted."""

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
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.errors import AgentError, SourceError
from agent.simulation.driver_double import abi
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.driver import MAX_FILES, MAX_PROCESSES, Driver
from agent.simulation.driver_double.nodes import UVM_MAJOR, inodes
from agent.simulation.driver_double.resources import MAX_CLIENTS, MAX_OBJECTS, Refused, ResourceManager
from agent.simulation.gpu_processes.calls import Caller, CallRefused
from agent.threads import in_daemon_thread
from tests.harness import ROOT
from tests.simulation.driver_double_rig import GPUS, VERSION, WITHOUT_FUSE, running_double

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


def refused(call: pytest.ExceptionInfo[CallRefused]) -> int:
    return call.value.status


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


async def test_nothing_is_mounted_in_any_directory(double: DriverDouble) -> None:
    assert "gpu-agent-nodes" not in Path(f"/proc/{double.pid}/mounts").read_text(encoding="utf-8")


async def test_a_killed_double_fails_every_call_and_leaves_nothing(
    double: DriverDouble, program: Program
) -> None:
    control, _ = program.client()
    os.kill(double.pid, signal.SIGKILL)
    with pytest.raises(AgentError, match="ended"):
        await double.books()
    with pytest.raises(OSError, match=r"not connected|aborted"):
        fcntl.ioctl(control, abi.command(abi.FREE, 16), bytearray(16))
    assert "gpu-agent-nodes" not in Path("/proc/self/mounts").read_text(encoding="utf-8")


async def test_the_double_ends_with_whoever_started_it(double: DriverDouble) -> None:
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


async def test_a_machine_without_the_device_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.simulation.driver_double.double.COMMAND", WITHOUT_FUSE)
    with pytest.raises(SourceError, match="Could not open /nonexistent/fuse: No such file"):
        await DriverDouble.start(GPUS, version=VERSION)


# Clients and objects


async def test_a_context_is_in_the_books_with_its_process_and_gpu(
    double: DriverDouble, program: Program
) -> None:
    control, client = program.client()
    program.call.allocate(control, client, GROUP, SHARE, abi.CONTEXT_SHARE)
    books = await double.books()
    (context,) = books.contexts
    assert (context.client, context.handle, context.pid, context.minor) == (client, SHARE, os.getpid(), 1)
    assert books.live(os.getpid()) == 1
    assert books.processes[os.getpid()]["contexts_allocated"] == 1


async def test_a_freed_group_takes_its_context_with_it(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    program.call.allocate(control, client, GROUP, SHARE, abi.CONTEXT_SHARE)
    program.call.free(control, client, DEVICE, GROUP)
    books = await double.books()
    assert books.contexts == ()
    assert (books.counts["contexts_freed"], books.counts["frees"]) == (1, 1)
    # Its handle may be used again.
    program.call.allocate(control, client, DEVICE, GROUP, abi.CHANNEL_GROUP)


async def test_a_freed_client_takes_everything_with_it(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    program.call.allocate(control, client, GROUP, SHARE, abi.CONTEXT_SHARE)
    program.call.free(control, client, client, client)
    books = await double.books()
    assert (books.contexts, books.clients) == ((), ())
    assert books.counts["allocated"] == books.counts["freed"] == 5


async def test_the_end_of_the_file_frees_its_clients(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    program.call.allocate(control, client, GROUP, SHARE, abi.CONTEXT_SHARE)
    program.close(control)
    books = await double.books()
    assert (books.contexts, books.clients) == ((), ())
    assert books.released == {"nvidiactl": 1}


async def test_a_copy_of_the_descriptor_keeps_the_clients(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    copy = os.dup(control)
    program.close(control)
    assert len((await double.books()).clients) == 1
    program.call.free(copy, client, client, client)
    os.close(copy)


async def test_a_client_of_another_file_is_refused(program: Program) -> None:
    _, client = program.client()
    other = program.open("nvidiactl")
    with pytest.raises(CallRefused) as call:
        program.call.allocate(other, client, GROUP, SHARE, abi.CONTEXT_SHARE)
    assert refused(call) == abi.INVALID_CLIENT
    with pytest.raises(CallRefused) as call:
        program.call.free(other, client, client, client)
    assert refused(call) == abi.INVALID_CLIENT


async def test_what_the_driver_refuses_changes_nothing(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    before = (await double.books()).counts
    for parent, handle, status in [
        (0x77, SHARE, abi.INVALID_OBJECT_PARENT),
        (DEVICE, GROUP, abi.INSERT_DUPLICATE_NAME),
    ]:
        with pytest.raises(CallRefused) as call:
            program.call.allocate(control, client, parent, handle, abi.CHANNEL_GROUP)
        assert refused(call) == status
    with pytest.raises(CallRefused) as call:
        program.call.allocate_device(control, client, 0x99, 7)
    assert refused(call) == abi.INVALID_DEVICE
    with pytest.raises(CallRefused) as call:
        program.call.allocate(control, client, client, 0x99, abi.DEVICE, parameters=8)
    assert refused(call) == abi.INVALID_ADDRESS
    assert (await double.books()).counts == {**before, "refused": before["refused"] + 4}


async def test_to_free_what_is_not_there_is_no_error(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    program.call.free(control, client, DEVICE, 0x77)
    assert (await double.books()).counts["frees"] == 0


async def test_the_driver_chooses_a_handle_where_none_is_given(program: Program) -> None:
    control, client = program.client()
    first = program.call.allocate(control, client, DEVICE, 0, abi.CHANNEL_GROUP)
    second = program.call.allocate(control, client, DEVICE, 0, abi.CHANNEL_GROUP)
    assert (first, second) == (abi.FIRST_OBJECT, abi.FIRST_OBJECT + 1)
    assert client == abi.FIRST_CLIENT


async def test_a_copy_in_another_client_lives_on_its_own(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    program.call.allocate(control, client, GROUP, SHARE, abi.CONTEXT_SHARE)
    other, other_client = program.client()
    program.call.duplicate(other, other_client, DEVICE, 0x55, client, SHARE)
    program.close(control)
    (context,) = (await double.books()).contexts
    assert (context.client, context.handle) == (other_client, 0x55)
    with pytest.raises(CallRefused) as call:
        program.call.duplicate(other, other_client, DEVICE, 0x56, client, SHARE)
    assert refused(call) == abi.INVALID_CLIENT


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


async def test_events_are_allocated_through_the_node_of_a_gpu(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    gpu = program.open("nvidia1")
    with pytest.raises(CallRefused) as call:
        program.call.allocate(gpu, client, DEVICE, 0x66, abi.OS_EVENT)
    # Not before it is registered: the client is another file's.
    assert refused(call) == abi.INVALID_CLIENT
    program.call.register(gpu, control)
    program.call.allocate(gpu, client, DEVICE, 0x66, abi.OS_EVENT)
    program.call.allocate_memory(gpu, client, DEVICE, 0x67)
    assert (await double.books()).clients[0].objects == 5


async def test_the_version_is_told_and_checked(program: Program) -> None:
    control = program.open("nvidiactl")

    def ask(kind: int, version: bytes) -> tuple[int, bytes]:
        data = bytearray(abi.VERSION_STRUCT.pack(kind, 0, version))
        fcntl.ioctl(control, abi.command(abi.CHECK_VERSION_STR, len(data)), data)
        _, reply, told = abi.VERSION_STRUCT.unpack(data)
        return reply, told.rstrip(b"\0")

    assert ask(abi.VERSION_QUERY, b"") == (abi.VERSION_RECOGNIZED, VERSION.encode())
    assert ask(0, VERSION.encode()) == (abi.VERSION_RECOGNIZED, VERSION.encode())
    assert ask(abi.VERSION_RELAXED, b"570.1") == (abi.VERSION_RECOGNIZED, b"570.1")
    with pytest.raises(OSError, match="Invalid argument"):
        ask(0, b"570.148.09")
    with pytest.raises(OSError, match="Invalid argument"):
        ask(abi.VERSION_RELAXED, b"535.148.08")


async def test_the_driver_tells_how_it_numbers_the_gpus(program: Program) -> None:
    control, client = program.client()
    cards = bytearray(abi.CARD_STRUCT.size * 32)
    fcntl.ioctl(control, abi.command(abi.CARD_INFO, len(cards)), cards)
    rows = [row for row in abi.CARD_STRUCT.iter_unpack(cards) if row[0]]
    assert [(row[7], row[13]) for row in rows] == [(gpu.gpu_id, gpu.minor) for gpu in GPUS]
    assert rows[1][2] == 0x11

    for command in (abi.GET_ID_INFO, abi.GET_ID_INFO_V2):
        parameters = array("I", [GPUS[1].gpu_id, *[0] * 11])
        data = bytearray(
            abi.CONTROL_STRUCT.pack(client, client, command, 0, parameters.buffer_info()[0], 48, 0xFFFF)
        )
        fcntl.ioctl(control, abi.command(abi.CONTROL, 32), data)
        assert struct.unpack_from("=I", data, 28) == (0,)
        assert parameters[2] == GPUS[1].instance == 0


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


# Unified memory


async def test_a_space_is_registered_once_for_each_gpu(double: DriverDouble, program: Program) -> None:
    control, client = program.client()
    uvm = program.open("nvidia-uvm")
    gpu = GPUS[1].raw_uuid
    space = abi.VASPACE_STRUCT.pack(gpu, control, client, SPACE, 0)[:-4]
    for command, head, status in [
        (abi.UVM_REGISTER_GPU, gpu, abi.ILLEGAL_ACTION),
        (abi.UVM_INITIALIZE, b"", abi.OK),
        (abi.UVM_REGISTER_GPU_VASPACE, space, abi.INVALID_DEVICE),
        (abi.UVM_REGISTER_GPU, bytes(16), abi.INVALID_DEVICE),
        (abi.UVM_REGISTER_GPU, gpu, abi.OK),
        (abi.UVM_REGISTER_GPU_VASPACE, space, abi.OK),
        (abi.UVM_REGISTER_GPU_VASPACE, space, abi.INVALID_DEVICE),
    ]:
        if status == abi.OK:
            program.call.unified(uvm, command, head)
            continue
        with pytest.raises(CallRefused) as call:
            program.call.unified(uvm, command, head)
        assert refused(call) == status
    assert (await double.books()).spaces == ((gpu.hex(), client, SPACE),)
    program.call.unified(uvm, abi.UVM_UNREGISTER_GPU_VASPACE, gpu)
    assert (await double.books()).spaces == ()


@pytest.mark.parametrize(("version", "status_at"), [("580.142", 24), ("590.44.01", 8)])
async def test_a_channel_is_unregistered_in_the_layout_of_the_version(version: str, status_at: int) -> None:
    async with running_double(version) as double:
        program = Program(double, version)
        uvm = program.open("nvidia-uvm")
        program.call.unified(uvm, abi.UVM_INITIALIZE)
        data = bytearray(b"\xff" * (status_at + 4))
        fcntl.ioctl(uvm, abi.UVM_UNREGISTER_CHANNEL, data)
        program.call.unregister_channel(uvm, GPUS[0].raw_uuid, 0xC1D00001, 7)
        program.close(uvm)

    assert data == b"\xff" * status_at + bytes(4)


async def test_a_space_of_no_client_is_refused(program: Program) -> None:
    control, _ = program.client()
    uvm = program.open("nvidia-uvm")
    gpu = GPUS[0].raw_uuid
    program.call.unified(uvm, abi.UVM_INITIALIZE)
    program.call.unified(uvm, abi.UVM_REGISTER_GPU, gpu)
    head = abi.VASPACE_STRUCT.pack(gpu, control, 0xC1D0FFFF, SPACE, 0)[:-4]
    with pytest.raises(CallRefused) as call:
        program.call.unified(uvm, abi.UVM_REGISTER_GPU_VASPACE, head)
    assert refused(call) == abi.INVALID_CLIENT


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


async def test_a_node_can_answer_late(double: DriverDouble) -> None:
    await double.slow("nvidia1", 200_000_000)
    began = time.monotonic()
    descriptor = await in_daemon_thread("late", lambda: os.open(double.node("nvidia1"), os.O_RDWR))
    assert time.monotonic() - began >= 0.2
    os.close(descriptor)
    await double.release("nvidia1")


async def test_an_unknown_node_cannot_be_held(double: DriverDouble) -> None:
    with pytest.raises(SourceError, match="no node nvidia7"):
        await double.hold("nvidia7")


# Bounds


def test_clients_are_bounded() -> None:
    rm = ResourceManager()
    for _ in range(MAX_CLIENTS):
        rm.allocate_client(1, 1)
    with pytest.raises(Refused) as refusal:
        rm.allocate_client(1, 1)
    assert refusal.value.status == abi.INSUFFICIENT_RESOURCES
    rm.end_file(1)
    assert rm.allocate_client(1, 1) == abi.FIRST_CLIENT + MAX_CLIENTS


def test_objects_are_bounded() -> None:
    rm = ResourceManager()
    client = rm.allocate_client(1, 1)
    for _ in range(MAX_OBJECTS - 1):
        rm.allocate(1, client, client, 0, abi.CHANNEL_GROUP)
    with pytest.raises(Refused) as refusal:
        rm.allocate(1, client, client, 0, abi.CHANNEL_GROUP)
    assert refusal.value.status == abi.INSUFFICIENT_RESOURCES
    rm.free(1, client, client)
    assert rm.counts.allocated == rm.counts.freed == MAX_OBJECTS


def test_open_files_and_counted_processes_are_bounded() -> None:
    driver = Driver(VERSION, GPUS, answer_later=lambda _number, _answer: None)
    control = inodes(GPUS)["nvidiactl"]
    # No thread has such a number, so each counts as a process of its own.
    no_thread = 1 << 30
    for number in range(MAX_FILES):
        driver.opened(control, no_thread + number)
    with pytest.raises(OSError, match="too many open files"):
        driver.opened(control, no_thread)
    assert len(driver.books()["processes"]) == MAX_PROCESSES == MAX_FILES
    driver.released(1)
    driver.opened(control, no_thread + MAX_FILES)
    assert len(driver.books()["processes"]) == MAX_PROCESSES
    assert driver.books()["opened"] == {"nvidiactl": MAX_FILES + 1}
