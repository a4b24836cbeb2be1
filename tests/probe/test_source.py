"""The eBPF source with a probe in the kernel: its guarantees, on the driver double."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.bus import Latest
from agent.errors import ProbeLoadError, SourceError
from agent.model.facts import DeviceCallsSeen, GpuUseSeen, ProbeSeen
from agent.model.ids import GpuUuid
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.model.rm import ProcessCounters
from agent.model.snapshot import Snapshot
from agent.model.structs import replace
from agent.model.usage import DeviceCall, ProcessUse, Usage
from agent.probe import syscalls
from agent.probe.layout import MAX_OBJECTS_EACH, PROCESS_KEY, encode_process
from agent.probe.probe import Probe
from agent.probe.request import Doubles, Request
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import UVM_MAJOR, Gpu
from agent.simulation.gpu_processes.process import SimulatedProcess
from agent.sources.ebpf import source as ebpf
from agent.sources.ebpf.rounds import EbpfSettings
from agent.sources.ebpf.source import EbpfSource
from agent.threads import in_daemon_thread
from tests.probe.caller import Caller, ran
from tests.probe.watcher import snapshot_of_gpus
from tests.sources.recorder import PATIENCE_S, Recorder, until

VERSION = "570.148.08"
GPUS = tuple(
    Gpu(
        minor, f"GPU-{minor + 1:08x}-0000-4000-8000-000000000000", minor, f"0000:{minor:02x}:00.0", 0x233010DE
    )
    for minor in range(2)
)
NUMA_INFO, NUMA_INFO_BYTES = 215, 560
MAP_GET_FD_BY_ID = 14
QUIET = EbpfSettings(
    poll_ns=20 * MILLISECOND_NS,
    gap_ns=5 * MILLISECOND_NS,
    scan_ns=3_600 * SECOND_NS,
    publish_ns=3_600 * SECOND_NS,
)
"""Only events trigger snapshots and scans."""
ALLOCATE = """
fd = os.open(sys.argv[1], os.O_RDWR)
alloc(fd, CLIENT, ROOT, client=0, parent=0)
wait()
for handle in range(int(sys.argv[2])): alloc(fd, handle + 3, CONTEXT, parent=CLIENT)
wait()
"""


class Followed:
    """A source on a double, and the facts that it emitted."""

    def __init__(self, double: DriverDouble, settings: EbpfSettings, loader: dict[str, Any]) -> None:
        self.double = double
        self.seen = Recorder()
        self.latest: Latest[Snapshot] = Latest(snapshot_of_gpus(GPUS))
        options: dict[str, Any] = {
            "doubles": Doubles(filesystem=double.file_system, uvm_major=UVM_MAJOR),
            "answer_within_ns": SECOND_NS,
            **loader,
        }
        self.source = EbpfSource(
            inbox=self.seen.inbox,
            latest=self.latest,
            request=Request(**options),
            tier="syscalls",
            proc_root=Path("/proc"),
            agent_pid=os.getpid(),
            settings=settings,
        )
        self.running: asyncio.Task[None] | None = None

    def run(self) -> None:
        self.running = asyncio.get_running_loop().create_task(self.source.run())

    async def stop(self) -> None:
        assert self.running is not None
        self.running.cancel()
        await asyncio.wait((self.running,))

    async def usage(self, matching: Callable[[Usage], bool]) -> Usage:
        """Return the newest usage snapshot, once it matches."""
        await self.seen.until(lambda: any(map(matching, self._newest())))
        return self._newest()[0]

    def _newest(self) -> list[Usage]:
        return [fact.usage for fact in self.seen.of(GpuUseSeen)[-1:]]

    async def call(self, matching: Callable[[DeviceCall], bool]) -> DeviceCall:
        """Return the call state of the first GPU, once it matches."""
        gpu = GpuUuid(GPUS[0].uuid)
        fact = await self.seen.first(
            DeviceCallsSeen, lambda fact: gpu in fact.calls and matching(fact.calls[gpu])
        )
        return fact.calls[gpu]


@asynccontextmanager
async def following(
    double: DriverDouble, loader: dict[str, Any], settings: EbpfSettings = QUIET
) -> AsyncIterator[Followed]:
    followed = Followed(double, settings, loader)
    recording = asyncio.get_running_loop().create_task(followed.seen.run())
    followed.run()
    try:
        view = (await followed.seen.first(ProbeSeen, lambda fact: fact.probe.state != "loading")).probe
        assert view.state == "running", view.message
        await followed.usage(lambda usage: usage.complete)
        yield followed
    finally:
        await followed.stop()
        followed.source.close()
        recording.cancel()


@pytest.fixture
async def double() -> AsyncIterator[DriverDouble]:
    try:
        started = await DriverDouble.start(GPUS, version=VERSION)
    except SourceError as error:
        pytest.skip(str(error))
    async with started:
        yield started


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as one:
        yield one


async def started(double: DriverDouble, stack: AsyncExitStack, comm: str = "python") -> SimulatedProcess:
    process = await SimulatedProcess.start(comm, folder=double.folder, version=VERSION, gpus=GPUS)
    return await stack.enter_async_context(process)


def use_of(usage: Usage, pid: int) -> ProcessUse | None:
    return next((process for process in usage.processes if process.key.pid == pid), None)


def has(pid: int, contexts: int) -> Callable[[Usage], bool]:
    """Whether a process has so many contexts on the first GPU."""

    def is_so(usage: Usage) -> bool:
        use = use_of(usage, pid)
        return use is not None and any(
            (hold.gpu, hold.contexts) == (GPUS[0].uuid, contexts) for hold in use.holds
        )

    return is_so


async def test_events_are_emitted_without_waiting_for_a_scan(
    core: dict[str, Any], double: DriverDouble, stack: AsyncExitStack
) -> None:
    async with following(double, core, replace(QUIET, poll_ns=3_600 * SECOND_NS)) as followed:
        process = await started(double, stack)
        await process.create(0, 3)
        await followed.usage(has(process.pid, 3))
        await process.destroy(1)
        await followed.usage(has(process.pid, 2))
        await process.exit()
        usage = await followed.usage(lambda usage: use_of(usage, process.pid) is None)

    assert usage.orphans == ()
    assert usage.totals == ()


@pytest.mark.parametrize("how", ["close-range", "exit"])
async def test_holders_are_scanned_after_descriptors_were_closed(
    core: dict[str, Any], double: DriverDouble, stack: AsyncExitStack, how: str
) -> None:
    async with following(double, core) as followed:
        process = await started(double, stack)
        await process.create(0)
        await followed.usage(has(process.pid, 1))
        child = await stack.enter_async_context(await process.fork("child"))
        await followed.usage(lambda usage: use_of(usage, child.pid) is not None)
        if how == "exit":
            await child.exit()
        else:
            await child.command("close-range")
        usage = await followed.usage(lambda usage: use_of(usage, child.pid) is None)

    assert has(process.pid, 1)(usage)


async def test_lost_events_are_made_up_for_from_the_kernels_table(
    core: dict[str, Any], double: DriverDouble, stack: AsyncExitStack
) -> None:
    del stack
    async with following(double, core | {"ring_bytes": 4096}) as followed:
        with Caller(ALLOCATE, double.node("nvidiactl"), 100) as caller:
            await followed.usage(lambda usage: use_of(usage, caller.pid) is not None)
            # The loop is blocked, so the ring is not read.
            caller.resume()
            usage = await followed.usage(lambda usage: usage.complete and usage.events_lost > 0)
            use = use_of(usage, caller.pid)

    assert use is not None
    assert use.unplaced == 100


HAND_OVER = """
import socket
ours, theirs = socket.socketpair()
fd = os.open(sys.argv[1], os.O_RDWR)
alloc(fd, CLIENT, ROOT, client=0, parent=0)
alloc(fd, 3, CONTEXT, parent=CLIENT)
wait()
socket.send_fds(ours, [b"x"], [fd])
os.close(fd)
wait()
received = socket.recv_fds(theirs, 1, 1)
wait()
"""


async def test_a_file_in_a_message_is_not_gone(core: dict[str, Any], double: DriverDouble) -> None:
    settings = replace(QUIET, confirm_ns=3 * SECOND_NS)
    async with following(double, core, settings) as followed:
        caller = await in_daemon_thread("test-caller", lambda: Caller(HAND_OVER, double.node("nvidiactl")))
        await in_daemon_thread("test-caller", caller.run)
        await followed.usage(lambda usage: contexts(usage, caller.pid) == 1)
        await in_daemon_thread("test-caller", caller.resume)
        await until(lambda: followed.source._waited_ns > 0)
        await in_daemon_thread("test-caller", caller.resume)
        signs = followed.source.last_sign_ns
        await until(lambda: followed.source.last_sign_ns != signs)
        usage = await followed.usage(lambda usage: usage.complete)
        use = use_of(usage, caller.pid)
        assert use is not None
        assert (use.unplaced, use.fds) == (1, 1)
        await in_daemon_thread("test-caller", caller.end)


async def test_a_file_that_was_long_in_a_message_is_unchanged_when_it_is_received(
    core: dict[str, Any], double: DriverDouble
) -> None:
    settings = replace(QUIET, confirm_ns=MILLISECOND_NS)
    async with following(double, core, settings) as followed:
        caller = await in_daemon_thread("test-caller", lambda: Caller(HAND_OVER, double.node("nvidiactl")))
        await in_daemon_thread("test-caller", caller.run)
        await followed.usage(lambda usage: contexts(usage, caller.pid) == 1)
        await in_daemon_thread("test-caller", caller.resume)
        await followed.usage(lambda usage: usage.complete and contexts(usage, caller.pid) == 0)
        await in_daemon_thread("test-caller", caller.resume)
        # Receiving a message sends no event; the next scan finds it.
        followed.source.request_scan()
        await followed.usage(lambda usage: contexts(usage, caller.pid) == 1)
        await in_daemon_thread("test-caller", caller.end)


async def test_a_process_beyond_its_share_of_objects_is_partial_and_named(
    core: dict[str, Any], double: DriverDouble
) -> None:
    async with following(double, core | {"ring_bytes": 4 << 20}) as followed:
        caller = await in_daemon_thread(
            "test-caller", lambda: Caller(ALLOCATE, double.node("nvidiactl"), MAX_OBJECTS_EACH + 10)
        )
        await in_daemon_thread("test-caller", caller.run)
        await followed.usage(lambda usage: usage.complete)
        await in_daemon_thread("test-caller", caller.resume)
        usage = await followed.usage(lambda usage: usage.incomplete_because.endswith(f": {caller.pid}"))
        use = use_of(usage, caller.pid)
        await in_daemon_thread("test-caller", caller.end)

    assert use is not None
    assert use.partial


@pytest.mark.parametrize("is_followed", [True, False])
async def test_an_exited_process_leaves_no_row_in_the_kernel(
    core: dict[str, Any], double: DriverDouble, *, is_followed: bool
) -> None:
    async with following(double, core) as followed:
        if not is_followed:
            await followed.stop()
        code = "os.open(sys.argv[1], os.O_RDWR)"
        pids = {
            await in_daemon_thread("test-caller", lambda: ran(code, double.node("nvidia0"))) for _ in "123"
        }
        if not is_followed:
            assert await rows_of(followed, pids)
            followed.run()
        async with asyncio.timeout(PATIENCE_S):
            while await rows_of(followed, pids):
                await asyncio.sleep(0.02)


async def rows_of(followed: Followed, pids: Collection[int]) -> list[ProcessCounters]:
    """What the kernel has of these processes."""
    probe = followed.source.probe
    assert probe is not None
    rows = await in_daemon_thread("test-read", probe.read_processes)
    return [row for row in rows if row.tgid in pids]


ROOM = 4_096
NO_PIDS = 1 << 23
"""Linux gives no number as high as that to a process."""


async def test_exited_processes_take_no_room_of_living_ones(
    core: dict[str, Any], double: DriverDouble
) -> None:
    settings = replace(QUIET, max_ended=ROOM // 8)
    async with following(double, core | {"processes": ROOM}, settings=settings) as followed:
        quiet = await in_daemon_thread("test-caller", lambda: Caller(ALLOCATE, double.node("nvidiactl"), 5))
        await in_daemon_thread("test-caller", quiet.run)
        await in_daemon_thread("test-caller", quiet.resume)
        await followed.usage(lambda usage: contexts(usage, quiet.pid) == 5)
        for first in range(NO_PIDS, NO_PIDS + 4 * ROOM, ROOM // 4):
            ended = range(first, first + ROOM // 4)
            await in_daemon_thread("test-caller", partial(put_ended, followed, ended))
            followed.source.request_scan()
            async with asyncio.timeout(PATIENCE_S):
                while await rows_of(followed, ended):
                    await asyncio.sleep(0.02)
        (row,) = await rows_of(followed, {quiet.pid})
        await in_daemon_thread("test-caller", quiet.end)

    assert row.contexts_allocated == 5


def put_ended(followed: Followed, pids: Iterable[int]) -> None:
    """Let the kernel have rows of processes that ended."""
    assert followed.source.probe is not None
    row = bytearray(encode_process(1, 7, 8))
    struct.pack_into("=Q", row, 32, 9)
    for pid in pids:
        syscalls.map_update(followed.source.probe.maps["processes"], PROCESS_KEY.pack(pid), bytes(row))


def contexts(usage: Usage, pid: int) -> int:
    use = use_of(usage, pid)
    return 0 if use is None else use.unplaced


async def test_the_files_kept_from_scan_to_scan_are_bounded(
    core: dict[str, Any], double: DriverDouble
) -> None:
    code = "kept = [os.open(sys.argv[1], os.O_RDWR) for _ in range(5)]\nwait()\n"
    async with following(double, core, replace(QUIET, max_held=3)) as followed:
        scanned_ns = followed.source.rounds.scanned_ns
        caller = await in_daemon_thread("test-caller", lambda: Caller(code, double.node("nvidia0")))
        await in_daemon_thread("test-caller", caller.run)
        # Opening a file is no reason to scan, and the next scan is an hour away.
        await until(lambda: followed.source.rounds.scanned_ns > scanned_ns)
        await in_daemon_thread("test-caller", caller.end)


async def test_the_snapshot_can_be_rebuilt_with_the_present_probe(
    core: dict[str, Any], double: DriverDouble, stack: AsyncExitStack
) -> None:
    async with following(double, core) as followed:
        process = await started(double, stack)
        await process.create(0, 2)
        await followed.usage(has(process.pid, 2))
        probe = followed.source.probe
        await followed.stop()
        await process.create(0, 1)
        followed.seen.forget()
        followed.run()
        usage = await followed.usage(has(process.pid, 3))

        assert followed.source.probe is probe
        assert followed.seen.of(ProbeSeen) == []
        use = use_of(usage, process.pid)
        assert use is not None
        assert use.status.comm == "python"


async def test_closing_the_source_removes_the_probe_from_the_kernel(
    core: dict[str, Any], double: DriverDouble
) -> None:
    async with following(double, core) as followed:
        assert followed.source.probe is not None
        number = syscalls.map_info(followed.source.probe.ring.fileno()).number
        assert is_in_the_kernel(number)
    # The kernel frees it in a thread of its own.
    await until(lambda: not is_in_the_kernel(number))


def is_in_the_kernel(number: int) -> bool:
    """Whether there is a map of this number."""
    try:
        os.close(syscalls.bpf(MAP_GET_FD_BY_ID, struct.pack("=III", number, 0, 0)))
    except FileNotFoundError:
        return False
    return True


async def test_the_drivers_numbers_of_gpus_follow_the_inventory(
    core: dict[str, Any], double: DriverDouble, stack: AsyncExitStack
) -> None:
    async with following(double, core) as followed:
        process = await started(double, stack)
        await process.create(0)
        await followed.usage(has(process.pid, 1))
        other = GPUS[0]._replace(uuid="GPU-99999999-0000-4000-8000-000000000000")
        followed.latest.publish(snapshot_of_gpus((other,)))

        def has_other(usage: Usage) -> bool:
            use = use_of(usage, process.pid)
            return use is not None and other.uuid in {hold.gpu for hold in use.holds}

        await followed.usage(has_other)


# ---- whether the driver answers ----

CALL = f"""
fd = os.open(sys.argv[1], os.O_RDWR)
wait()
while True:
    call(fd, {NUMA_INFO}, bytes({NUMA_INFO_BYTES}))
    wait()
"""


@asynccontextmanager
async def calling(double: DriverDouble) -> AsyncIterator[Caller]:
    """A process that stands for the agent, which calls the driver on the first GPU."""
    caller = await in_daemon_thread("test-caller", lambda: Caller(CALL, double.node("nvidia0")))
    await in_daemon_thread("test-caller", caller.run)
    try:
        yield caller
    finally:
        await double.release_all()
        await in_daemon_thread("test-caller", caller.process.kill)
        await in_daemon_thread("test-caller", caller.end)


RENAMED = """
fd = os.open(sys.argv[1], os.O_RDWR)
wait()
open("/proc/self/comm", "w").write("renamed")
wait()
"""


async def test_a_changed_name_is_emitted_after_the_next_reading_of_all_processes(
    core: dict[str, Any], double: DriverDouble
) -> None:
    settings = replace(QUIET, scan_ns=200 * MILLISECOND_NS)
    caller = Caller(RENAMED, double.node("nvidia0"))

    def comms(usage: Usage) -> list[str]:
        return [use.status.comm for use in usage.processes if use.key.pid == caller.pid]

    try:
        await in_daemon_thread("test-caller", caller.run)
        async with following(double, core, settings) as followed:
            await followed.usage(lambda usage: bool(comms(usage)) and comms(usage) != ["renamed"])
            await in_daemon_thread("test-caller", caller.resume)
            await followed.usage(lambda usage: comms(usage) == ["renamed"])
    finally:
        await in_daemon_thread("test-caller", caller.end)


async def test_a_device_that_answered_is_ready(core: dict[str, Any], double: DriverDouble) -> None:
    async with (
        calling(double) as caller,
        following(double, core | {"agent_tgid": caller.pid}) as followed,
    ):
        await in_daemon_thread("test-caller", caller.resume)
        call = await followed.call(lambda call: call.took_ns is not None)

    assert call.ready
    assert call.took_ns is not None
    assert 0 < call.took_ns < SECOND_NS


async def test_a_device_with_a_hanging_call_is_not_ready_in_the_kernels_flag_either(
    core: dict[str, Any], double: DriverDouble
) -> None:
    async with (
        calling(double) as caller,
        following(double, core | {"agent_tgid": caller.pid}) as followed,
    ):
        probe = followed.source.probe
        assert probe is not None
        await in_daemon_thread("test-caller", caller.resume)
        await followed.call(lambda call: call.ready)
        # It was not ready either while the call was on its way.
        followed.seen.forget()
        await double.hold("nvidia0")
        hanging = asyncio.get_running_loop().create_task(in_daemon_thread("test-caller", caller.resume))
        call = await followed.call(lambda call: not call.ready)
        assert call.took_ns is None
        assert not probe.read_readiness()[0].ready
        followed.seen.forget()
        await double.release("nvidia0")
        await hanging
        late = await followed.call(lambda call: call.took_ns is not None)
        assert not late.ready

        await in_daemon_thread("test-caller", caller.resume)
        await followed.call(lambda call: call.ready)
        assert probe.read_readiness()[0].ready


async def test_a_device_that_was_not_called_for_long_is_not_ready(
    core: dict[str, Any], double: DriverDouble
) -> None:
    settings = replace(QUIET, stale_call_ns=500 * MILLISECOND_NS)
    async with (
        calling(double) as caller,
        following(double, core | {"agent_tgid": caller.pid}, settings) as followed,
    ):
        await in_daemon_thread("test-caller", caller.resume)
        # While the call is under way the device is not ready either, and then it is for a time.
        await followed.call(lambda call: call.took_ns is not None and not call.ready)
        probe = followed.source.probe
        assert probe is not None
        assert not probe.read_readiness()[0].ready


async def test_a_failed_load_for_another_driver_is_retried(
    double: DriverDouble, core: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Request] = []

    def is_outdated(probe: Probe) -> bool:
        """As for a driver that wants another tier for good."""
        considered, probe._considered = probe._considered, (1,)
        return considered == ()

    async def fails(request: Request, **_: object) -> Probe:
        tries.append(request)
        raise ProbeLoadError("bcc_failed", "The probe's loader took over 120 s")

    async with following(double, core, replace(QUIET, reload_ns=0)) as followed:
        monkeypatch.setattr(Probe, "is_outdated", is_outdated)
        monkeypatch.setattr(ebpf, "load", fails)
        assert followed.source.probe is not None
        followed.source.probe.consider_again()
        await until(lambda: len(tries) >= 3)

    assert tries[0].tier == "auto"
