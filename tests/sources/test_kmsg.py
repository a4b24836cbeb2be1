"""The kernel log source over a simulated log, a pipe, and the kernel's own device where there is one."""

import asyncio
import ctypes
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from agent.errors import SourceError
from agent.model.facts import (
    KERNEL_LOG,
    FactsLost,
    KernelLogRead,
    KernelXidSeen,
    SwitchErrorSeen,
    UvmErrorSeen,
)
from agent.simulation.kernel_log import MAX_RECORDS, KernelLog
from agent.sources.kmsg import (
    KERNEL_LOG_PATH,
    MAX_RECORD_BYTES,
    MAX_RECORDS_PER_TURN,
    RECENT_LINES,
    EarlierLines,
    KernelLogSource,
)
from agent.sources.kmsg_records import RepairLine, XidLine
from tests.harness import short_directory
from tests.sources.recorder import Recorder, until

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FALLEN = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."
DBE = "NVRM: Xid (PCI:0000:5e:00): 48, pid=7, name=x, DBE"


@pytest.fixture
async def log() -> AsyncIterator[tuple[KernelLog, Path]]:
    with short_directory() as directory:
        path = directory / "kmsg"
        async with KernelLog(path) as log:
            yield log, path


StartSource = Callable[..., Awaitable[KernelLogSource]]


@pytest.fixture
async def start(recorder: Recorder) -> AsyncIterator[StartSource]:
    tasks: list[asyncio.Task[None]] = []

    async def start(path: Path, read_until: int | None = None) -> KernelLogSource:
        source = KernelLogSource(
            inbox=recorder.inbox, path=path, clock=time.monotonic_ns, read_until=read_until
        )
        tasks.append(asyncio.get_running_loop().create_task(source.run(), name="kernel-log"))
        await asyncio.sleep(0)  # it begins to read in its first turn
        return source

    yield start
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError, SourceError):
            await task


def line(sequence: int, text: str, *, time_us: int | None = None, priority: int = 3) -> bytes:
    at_us = time.monotonic_ns() // 1_000 + 1 if time_us is None else time_us
    return f"{priority},{sequence},{at_us},-;{text}\n".encode()


class Pipe:
    """A named pipe that stands for the log; what is written is exactly what is read."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        # Opened for both, so that the source finds a writer and no end of file.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def write(self, data: bytes) -> None:
        assert os.write(self._descriptor, data) == len(data)

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
async def pipe(tmp_path: Path) -> AsyncIterator[Pipe]:
    pipe = Pipe(tmp_path / "kmsg")
    yield pipe
    pipe.close()


# Facts


async def test_a_line_is_emitted_at_once(
    log: tuple[KernelLog, Path], start: StartSource, recorder: Recorder
) -> None:
    kernel, path = log
    kernel.write("a line before the start, so that the source is known to read")
    source = await start(path)
    await until(lambda: source.records == 1)
    kernel.write(LOST)
    seen = await recorder.first(KernelXidSeen)
    assert seen == KernelXidSeen(pci="0000:3b:00.0", xid=79)


async def test_two_lines_of_one_fault_are_emitted_once(
    log: tuple[KernelLog, Path], start: StartSource, recorder: Recorder
) -> None:
    kernel, path = log
    source = await start(path)
    kernel.write("first")
    await until(lambda: source.records == 1)
    for text in (LOST, FALLEN, DBE):
        kernel.write(text)
    await recorder.first(KernelXidSeen, lambda fact: fact.xid == 48)
    assert [fact.xid for fact in recorder.of(KernelXidSeen)] == [79, 48]


async def test_what_was_in_the_log_before_is_backlog(
    log: tuple[KernelLog, Path], start: StartSource, recorder: Recorder
) -> None:
    kernel, path = log
    kernel.write(DBE)
    kernel.write(DBE)
    source = await start(path)
    await until(lambda: source.records == 2)
    kernel.write(LOST)
    await recorder.first(KernelXidSeen, lambda fact: fact.xid == 79)
    emitted = [(fact.xid, fact.backlog) for fact in recorder.of(KernelXidSeen) for _ in range(fact.count)]
    assert emitted == [(48, True), (48, True), (79, False)]


async def test_what_came_while_no_agent_read_is_no_backlog(
    pipe: Pipe, start: StartSource, recorder: Recorder
) -> None:
    await start(pipe.path, read_until=2)
    pipe.write(line(1, LOST, time_us=1) + line(2, LOST, time_us=2) + line(3, DBE, time_us=3))
    seen = await recorder.first(KernelXidSeen)
    assert (seen.pci, seen.xid, seen.backlog, seen.live) == ("0000:5e:00.0", 48, False, False)
    assert (await recorder.first(KernelLogRead)).until == 3
    assert len(recorder.of(KernelXidSeen)) == 1


LOADED = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.129.03"
ADDED = "pci 0000:5e:00.0: [10de:2330] type 00 class 0x030200"
ALL_CLEAR = (
    "NVRM: Xid (PCI:0000:5e:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
)


@pytest.mark.parametrize(
    ("later", "repaired"), [(LOADED, True), (ADDED, True), (ALL_CLEAR, True), (FALLEN, False)]
)
async def test_a_later_record_shows_whether_earlier_faults_are_repaired(
    pipe: Pipe, start: StartSource, recorder: Recorder, later: str, *, repaired: bool
) -> None:
    pipe.write(line(1, DBE, time_us=1) + line(2, later, time_us=2) + line(3, LOST, time_us=3))
    await start(pipe.path)
    seen = await recorder.first(KernelXidSeen, lambda fact: fact.xid == 48)
    assert (seen.backlog, seen.live, seen.repaired) == (True, False, repaired)
    other = await recorder.first(KernelXidSeen, lambda fact: fact.xid == 79)
    assert not other.repaired


def test_earlier_lines_are_kept_within_bounds() -> None:
    earlier = EarlierLines(max_lines=3, max_addresses=2)
    for bus in range(5):
        earlier.add(bus, XidLine(f"0000:0{bus}:00.0", 48))
    for bus in range(5):
        earlier.add(10 + bus, RepairLine(f"0000:0{bus}:00.0"))
    emitted = [
        fact
        for fact in earlier.facts(after=None, before=None, backlog=True)
        if isinstance(fact, KernelXidSeen)
    ]
    assert [(fact.pci[5:7], fact.repaired) for fact in emitted] == [("02", False), ("03", True), ("04", True)]


async def test_errors_of_switches_and_of_unified_memory_are_emitted_and_kept(
    pipe: Pipe, start: StartSource, recorder: Recorder
) -> None:
    source = await start(pipe.path)
    pipe.write(line(1, "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 30 sourcetrack"))
    uvm = "nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover."
    pipe.write(line(2, f"NVRM: {uvm}"))
    assert await recorder.first(SwitchErrorSeen) == SwitchErrorSeen(
        "0000:c3:00.0", 24007, fatal=True, detail="Link 30 sourcetrack"
    )
    assert await recorder.first(UvmErrorSeen) == UvmErrorSeen("0x60")
    assert len(source.recent()) == 2


async def test_the_read_position_is_emitted_at_the_start_and_after_each_xid(
    pipe: Pipe, start: StartSource, recorder: Recorder
) -> None:
    source = await start(pipe.path)
    pipe.write(line(5, "a line"))
    assert (await recorder.first(KernelLogRead)).until == 5
    pipe.write(line(6, "another line"))
    await until(lambda: source.records == 2)
    pipe.write(line(7, DBE))
    await until(lambda: len(recorder.of(KernelLogRead)) == 2)
    emitted = [fact for fact in recorder.facts if isinstance(fact, KernelLogRead | KernelXidSeen)]
    assert [type(fact) for fact in emitted] == [KernelLogRead, KernelXidSeen, KernelLogRead]
    assert recorder.of(KernelLogRead)[-1].until == 7


async def test_the_instance_of_a_mig_device_is_emitted(
    pipe: Pipe, start: StartSource, recorder: Recorder
) -> None:
    await start(pipe.path)
    pipe.write(line(1, "NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 94, Contained"))
    seen = await recorder.first(KernelXidSeen)
    assert (seen.gi, seen.ci, seen.detail) == (5, 0, "Contained")


async def test_what_a_process_wrote_is_no_xid(pipe: Pipe, start: StartSource, recorder: Recorder) -> None:
    source = await start(pipe.path)
    pipe.write(line(1, LOST, priority=8 + 3) + line(2, DBE))
    await recorder.first(KernelXidSeen)
    assert [fact.xid for fact in recorder.of(KernelXidSeen)] == [48]
    assert source.of_processes == 1
    assert len(source.recent()) == 1


async def test_the_newest_lines_of_the_driver_are_kept(pipe: Pipe, start: StartSource) -> None:
    source = await start(pipe.path)
    pipe.write(line(1, "usb 1-1: new device", time_us=12_000_001))
    pipe.write(
        line(2, "NVRM: first\\x0aNVRM: second", time_us=12_000_002) + line(3, "NVRM: third", time_us=3)
    )
    await until(lambda: source.records == 3)
    assert source.recent() == (
        "[   12.000002] NVRM: first",
        "[   12.000002] NVRM: second",
        "[    0.000003] NVRM: third",
    )


async def test_an_xid_that_repeats_evicts_no_other_line(pipe: Pipe, start: StartSource) -> None:
    source = await start(pipe.path)
    pipe.write(line(0, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."))
    for number in range(1, RECENT_LINES + 50):
        pipe.write(line(number, "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=job"))
    await until(lambda: source.records == RECENT_LINES + 50)
    recent = source.recent()
    assert len(recent) == RECENT_LINES
    assert "fallen off the bus" in recent[0]


async def test_so_many_lines_are_kept(pipe: Pipe, start: StartSource) -> None:
    source = await start(pipe.path)
    for number in range(RECENT_LINES + 50):
        pipe.write(line(number, f"NVRM: line {number}"))
    await until(lambda: source.records == RECENT_LINES + 50)
    assert len(source.recent()) == RECENT_LINES
    assert source.recent()[0].endswith(" line 50")


# Gaps and garbage


async def test_a_gap_in_the_log_is_counted_and_emitted(
    pipe: Pipe, start: StartSource, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = await start(pipe.path)
    pipe.write(line(10, "first") + line(14, DBE))
    lost = await recorder.first(FactsLost)
    assert (lost.lost_from, lost.count) == (KERNEL_LOG, 3)
    await recorder.first(KernelXidSeen)
    assert source.lost == 3
    assert caplog.messages == ["3 records of the kernel log were lost before they could be read"]


async def test_an_overrun_is_survived(
    pipe: Pipe, start: StartSource, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    overruns = iter((True, False))
    read = os.read

    def overrun_once(descriptor: int, length: int) -> bytes:
        if length == MAX_RECORD_BYTES and next(overruns, False):
            raise BrokenPipeError
        return read(descriptor, length)

    monkeypatch.setattr(os, "read", overrun_once)
    source = await start(pipe.path)
    pipe.write(line(10, DBE))
    await recorder.first(KernelXidSeen)
    assert (await recorder.first(FactsLost)).count == 1
    assert source.lost == 1


async def test_other_lines_are_skipped(pipe: Pipe, start: StartSource, recorder: Recorder) -> None:
    source = await start(pipe.path)
    pipe.write(b"garbage\n\xff\xfe\x00;\n" + line(1, "x") + b" SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n")
    pipe.write(line(2, DBE))
    await recorder.first(KernelXidSeen)
    assert (source.records, source.malformed) == (2, 2)


async def test_a_record_in_pieces_is_put_together(pipe: Pipe, start: StartSource, recorder: Recorder) -> None:
    source = await start(pipe.path)
    whole = line(1, LOST)
    for piece in (whole[:7], whole[7:40], whole[40:]):
        pipe.write(piece)
        await asyncio.sleep(0)
    assert (await recorder.first(KernelXidSeen)).xid == 79
    assert source.malformed == 0


async def test_a_record_without_a_line_end_is_dropped(
    pipe: Pipe, start: StartSource, recorder: Recorder
) -> None:
    source = await start(pipe.path)
    pipe.write(b"x" * (MAX_RECORD_BYTES + 1))
    await until(lambda: source.malformed == 1)
    pipe.write(b"the rest\n" + line(1, DBE))
    await recorder.first(KernelXidSeen)
    assert source.malformed == 2


async def test_a_storm_does_not_block_the_loop(
    log: tuple[KernelLog, Path], start: StartSource, recorder: Recorder
) -> None:
    """Everything waits at once; the loop gets a turn after each batch, and nothing is lost."""
    kernel, path = log
    for number in range(MAX_RECORDS):
        kernel.write(f"NVRM: Xid (PCI:0000:{number % 8:02x}:00): 48, DBE")
    turns = 0
    source = await start(path)
    while source.records < MAX_RECORDS:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= MAX_RECORDS // (2 * MAX_RECORDS_PER_TURN)
    await recorder.until(lambda: sum(fact.count for fact in recorder.of(KernelXidSeen)) == MAX_RECORDS)


async def test_a_storm_of_garbage_does_not_block_the_loop(pipe: Pipe, start: StartSource) -> None:
    source = await start(pipe.path)
    pipe.write(b"\n" * 60_000)
    await until(lambda: source.malformed == 60_000)


async def test_a_reader_that_lags_sees_the_gap(recorder: Recorder, start: StartSource) -> None:
    with short_directory() as directory:
        async with KernelLog(directory / "kmsg") as kernel:
            for _ in range(MAX_RECORDS + 10):
                kernel.write("old")
            source = await start(directory / "kmsg")
            await until(lambda: source.records == MAX_RECORDS)
            # Records overwritten before the source started are not its loss.
            assert source.lost == 0


# Where it cannot read


async def failure_of(recorder: Recorder, path: Path) -> str:
    source = KernelLogSource(inbox=recorder.inbox, path=path, clock=time.monotonic_ns)
    with pytest.raises(SourceError) as raised:
        await source.run()
    return str(raised.value)


async def test_a_missing_log_is_named(recorder: Recorder, tmp_path: Path) -> None:
    message = await failure_of(recorder, tmp_path / "kmsg")
    assert f"The kernel log {tmp_path / 'kmsg'} does not exist" in message
    assert "--kernel-log" in message


async def test_a_file_is_no_log(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "kmsg").touch()
    assert "is no device, pipe or socket" in await failure_of(recorder, tmp_path / "kmsg")


async def test_a_device_that_is_no_log_is_named(recorder: Recorder) -> None:
    """Some container runtimes mount it in the place of the log."""
    assert "cannot be polled" in await failure_of(recorder, Path("/dev/null"))


async def test_a_log_at_its_end_is_reported(recorder: Recorder, tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "kmsg")
    async with asyncio.TaskGroup() as group:
        message = group.create_task(failure_of(recorder, pipe.path))
        await asyncio.sleep(0)
        pipe.close()
    assert "has ended" in message.result()


async def test_a_socket_without_a_listener_is_named(recorder: Recorder) -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(directory / "kmsg"))
        assert "could not be opened" in await failure_of(recorder, directory / "kmsg")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up rights")
async def test_a_log_that_may_not_be_read_names_the_capability(recorder: Recorder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kmsg", 0o600)
    libc = ctypes.CDLL(None)
    # Of this thread alone, and with it the right to read files of other users.
    libc.setfsuid(65_534)
    try:
        assert "give the agent CAP_SYSLOG" in await failure_of(recorder, tmp_path / "kmsg")
    finally:
        libc.setfsuid(0)


# The kernel's own device


def kernel_line(text: str) -> None:
    with KERNEL_LOG_PATH.open("wb", buffering=0) as device:
        # Without a line end the kernel would wait for its continuation and not show it.
        device.write(f"<6>gpu-agent test: {text}\n".encode())


def needs_the_device() -> None:
    if not os.access(KERNEL_LOG_PATH, os.R_OK | os.W_OK):
        pytest.skip(f"{KERNEL_LOG_PATH} cannot be read and written here")
    try:
        os.close(os.open(KERNEL_LOG_PATH, os.O_RDONLY))
    except OSError as error:
        pytest.skip(f"{KERNEL_LOG_PATH} cannot be read here: {error}")


async def test_lines_of_the_real_kernel_log_are_read(start: StartSource, recorder: Recorder) -> None:
    needs_the_device()
    source = await start(KERNEL_LOG_PATH)
    kernel_line("a harmless line")
    # The backlog is not counted, so this one line is what was read.
    await until(lambda: source.of_processes >= 1)
    assert source.malformed == 0
    assert source.lost == 0


async def test_a_source_of_the_real_log_continues_where_it_stopped(recorder: Recorder) -> None:
    needs_the_device()
    source = KernelLogSource(inbox=recorder.inbox, path=KERNEL_LOG_PATH, clock=time.monotonic_ns)
    for number in range(2):
        task = asyncio.get_running_loop().create_task(source.run(), name="kernel-log")
        await asyncio.sleep(0)
        kernel_line(f"line {number} while it runs")
        # With the line between the two runs there are three in the end.
        await until(lambda wanted=2 * number + 1: source.of_processes >= wanted)  # type: ignore[misc]
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        kernel_line(f"line {number} while it does not")
    assert source.lost == 0


@pytest.mark.parametrize("others", ["write to it", "own it"])
async def test_a_log_that_others_may_write_is_not_read(
    tmp_path: Path, recorder: Recorder, others: str
) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    if others == "write to it":
        path.chmod(0o622)
    elif os.geteuid() == 0:
        os.chown(path, 65_534, -1)
    else:
        pytest.skip("needs root to give a file away")
    source = KernelLogSource(inbox=recorder.inbox, path=path, clock=time.monotonic_ns)
    with pytest.raises(SourceError, match="Other users may write to the kernel log"):
        await source.run()
