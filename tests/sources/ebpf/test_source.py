"""The eBPF source without a probe: holders read from /proc, and the reason.

tests/probe/test_source.py has the tests with a probe in the kernel.
"""

import asyncio
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.bus import Latest
from agent.model.facts import GpuUseSeen, ProbeSeen
from agent.model.ids import GpuUuid
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.model.snapshot import Snapshot
from agent.model.structs import replace
from agent.model.usage import GpuHold, ProcessUse, Usage
from agent.probe.request import Request
from agent.simulation.driver_double.nodes import Gpu
from agent.sources.ebpf.rounds import EbpfSettings
from agent.sources.ebpf.source import EbpfSource, Tier
from tests.probe.machines import Machine
from tests.probe.watcher import snapshot_of_gpus
from tests.sources.recorder import Recorder

QUICK = EbpfSettings(
    poll_ns=20 * MILLISECOND_NS,
    gap_ns=MILLISECOND_NS,
    procfs_scan_ns=40 * MILLISECOND_NS,
    publish_ns=3_600 * SECOND_NS,
)
"""Short periods; an unchanged snapshot is never emitted again."""
GPUS = tuple(
    Gpu(
        minor, f"GPU-{minor + 1:08x}-0000-4000-8000-000000000000", minor, f"0000:{minor:02x}:00.0", 0x233010DE
    )
    for minor in range(2)
)
OF_A_PROCESS = ("stat", "status", "cgroup", "task")
"""Files of a process that are read beside its descriptors."""

Hold = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with only the processes of the test."""
    folder = tmp_path / "proc"
    folder.mkdir()
    return folder


@pytest.fixture
def hold(proc: Path) -> Iterator[Hold]:
    """Start a process that has device files of the driver open, as /proc would show it.

    There is no driver here: its descriptors are links to missing files; its other files are its own.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(*names: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "infinity"])
        started.append(process)
        folder = proc / str(process.pid)
        folder.mkdir()
        for name in OF_A_PROCESS:
            (folder / name).symlink_to(f"/proc/{process.pid}/{name}")
        (folder / "fd").mkdir()
        for number, name in enumerate(names, start=3):
            (folder / "fd" / str(number)).symlink_to(f"/dev/{name}")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes], proc: Path) -> None:
    """Kill a process of ``hold`` without a wait: it stays as a zombie, which has no files any more."""
    process.kill()
    for link in (proc / str(process.pid) / "fd").iterdir():
        link.unlink()


class Followed:
    """A source, the facts that it emitted, and its present run."""

    def __init__(
        self,
        proc: Path,
        settings: EbpfSettings = QUICK,
        *,
        tier: Tier = "procfs",
        request: Request | None = None,
    ) -> None:
        self.seen = Recorder()
        self.latest: Latest[Snapshot] = Latest(snapshot_of_gpus(GPUS))
        self.source = EbpfSource(
            inbox=self.seen.inbox,
            latest=self.latest,
            request=request or Request(),
            tier=tier,
            proc_root=proc,
            agent_pid=1,
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
        """Return the first usage snapshot from now on, or the newest, that matches."""
        emitted = self.seen.of(GpuUseSeen)
        if emitted and matching(emitted[-1].usage):
            return emitted[-1].usage
        self.seen.forget()
        return (await self.seen.first(GpuUseSeen, lambda fact: matching(fact.usage))).usage

    def probes(self) -> list[tuple[str, str]]:
        return [(fact.probe.state, fact.probe.code) for fact in self.seen.of(ProbeSeen)]


@asynccontextmanager
async def following(
    proc: Path, settings: EbpfSettings = QUICK, *, tier: Tier = "procfs", request: Request | None = None
) -> AsyncIterator[Followed]:
    followed = Followed(proc, settings, tier=tier, request=request)
    recording = asyncio.get_running_loop().create_task(followed.seen.run())
    followed.run()
    try:
        yield followed
    finally:
        await followed.stop()
        followed.source.close()
        recording.cancel()


def use_of(usage: Usage, pid: int) -> ProcessUse | None:
    return next((process for process in usage.processes if process.key.pid == pid), None)


def holds(pid: int) -> Callable[[Usage], bool]:
    return lambda usage: use_of(usage, pid) is not None


async def test_holders_are_emitted_without_contexts(hold: Hold, proc: Path) -> None:
    process = hold("nvidia1", "nvidiactl")
    async with following(proc) as followed:
        usage = await followed.usage(holds(process.pid))

    use = use_of(usage, process.pid)
    assert use is not None
    assert use.holds == (GpuHold(GpuUuid(GPUS[1].uuid), fds=2, contexts=None),)
    assert (usage.source, usage.complete, use.files) == ("proc", True, None)
    assert followed.probes() == [("disabled", "not_wanted")]


async def test_the_exit_of_a_holder_is_emitted(hold: Hold, proc: Path) -> None:
    process = hold("nvidia0")
    async with following(proc, replace(QUICK, procfs_scan_ns=3_600 * SECOND_NS, max_readings=2)) as followed:
        await followed.usage(holds(process.pid))
        process.kill()
        process.wait()
        await followed.usage(lambda usage: use_of(usage, process.pid) is None)


async def test_an_unwatched_zombie_holds_nothing(hold: Hold, proc: Path) -> None:
    process = hold("nvidia0")
    async with following(proc, replace(QUICK, max_watched=0)) as followed:
        await followed.usage(holds(process.pid))
        process.kill()
        gone = await followed.usage(lambda usage: use_of(usage, process.pid) is None)
    assert gone.complete


async def test_a_new_holder_is_found_by_the_next_scan(hold: Hold, proc: Path) -> None:
    async with following(proc) as followed:
        await followed.usage(lambda _usage: True)
        process = hold("nvidia0")
        await followed.usage(holds(process.pid))


async def test_the_drivers_numbers_of_gpus_follow_the_inventory(hold: Hold, proc: Path) -> None:
    process = hold("nvidia0")
    async with following(proc) as followed:
        await followed.usage(holds(process.pid))
        other = (GPUS[0]._replace(uuid="GPU-99999999-0000-4000-8000-000000000000"),)
        followed.latest.publish(snapshot_of_gpus(other))

        def has_other(usage: Usage) -> bool:
            use = use_of(usage, process.pid)
            return use is not None and [hold.gpu for hold in use.holds] == [other[0].uuid]

        await followed.usage(has_other)


async def test_an_unchanged_snapshot_is_not_emitted_again(hold: Hold, proc: Path) -> None:
    process = hold("nvidia0")
    async with following(proc) as followed:
        await followed.usage(holds(process.pid))
        emitted = len(followed.seen.of(GpuUseSeen))
        await rounds(followed, 10)

        assert len(followed.seen.of(GpuUseSeen)) == emitted


async def test_an_old_snapshot_is_emitted_again_and_not_rebuilt(hold: Hold, proc: Path) -> None:
    process = hold("nvidia0")
    settings = replace(QUICK, publish_ns=0, procfs_scan_ns=3_600 * SECOND_NS)
    async with following(proc, settings) as followed:
        await followed.usage(holds(process.pid))
        await rounds(followed, 10)
        followed.seen.forget()
        await followed.seen.until(lambda: len(followed.seen.of(GpuUseSeen)) >= 3)

    first, *_, last = (fact.usage for fact in followed.seen.of(GpuUseSeen))
    assert last.at_ns > first.at_ns
    assert last.processes is first.processes


async def test_no_thread_is_started_while_nothing_happens(hold: Hold, proc: Path) -> None:
    hold("nvidia0")
    async with following(proc, replace(QUICK, procfs_scan_ns=MILLISECOND_NS)) as followed:
        await rounds(followed, 3)
        thread = await followed.source._thread.do(threading.get_ident)
        await rounds(followed, 10)

        assert await followed.source._thread.do(threading.get_ident) == thread


async def test_readings_are_bounded_and_every_process_is_read(hold: Hold, proc: Path) -> None:
    processes = [hold("nvidia0") for _ in range(5)]
    async with following(proc, replace(QUICK, procfs_scan_ns=3_600 * SECOND_NS, max_readings=2)) as followed:
        usage = await followed.usage(lambda usage: all(use_of(usage, each.pid) for each in processes))
        snapshots = [fact.usage for fact in followed.seen.of(GpuUseSeen)]

    assert usage is snapshots[-1]
    assert [len(snapshot.processes) for snapshot in snapshots][:2] == [2, 4]


async def test_an_exiting_process_is_read_until_it_is_gone(hold: Hold, proc: Path) -> None:
    process = hold("nvidia0")
    async with following(proc) as followed:
        await followed.usage(holds(process.pid))
        end(process, proc)
        await followed.usage(lambda usage: use_of(usage, process.pid) is None)


async def test_where_the_probe_cannot_be_loaded_its_code_is_emitted_and_proc_is_read(
    hold: Hold, proc: Path, tmp_path: Path
) -> None:
    process = hold("nvidia0")
    machine = Machine(tmp_path / "machine", release="5.4.0-89-generic")
    request = Request(roots=machine.roots)
    async with following(proc, tier="auto", request=request) as followed:
        usage = await followed.usage(holds(process.pid))
        assert usage.source == "proc"
        view = followed.source._view

    assert view is not None
    assert (view.state, view.code, view.tier) == ("disabled", "bpf_unsupported", "procfs")
    assert "5.4.0-89-generic" in view.message


async def test_the_probe_is_loaded_once_in_the_life_of_the_process(
    hold: Hold, proc: Path, tmp_path: Path
) -> None:
    process = hold("nvidia0")
    machine = Machine(tmp_path / "machine", release="5.4.0-89-generic")
    async with following(proc, tier="auto", request=Request(roots=machine.roots)) as followed:
        await followed.usage(holds(process.pid))
        await followed.stop()
        followed.seen.forget()
        followed.run()
        await followed.usage(holds(process.pid))

        assert followed.probes() == []


async def test_a_cancelled_load_is_repeated(proc: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", release="5.4.0-89-generic")
    async with following(proc, tier="auto", request=Request(roots=machine.roots)) as followed:
        await followed.seen.first(ProbeSeen)
        await followed.stop()
        followed.run()
        await followed.seen.first(ProbeSeen, lambda fact: fact.probe.state == "disabled")

    assert followed.probes() == [("loading", ""), ("disabled", "bpf_unsupported")]


async def rounds(followed: Followed, count: int) -> None:
    """Wait for rounds of the source to end."""
    for _ in range(count):
        before = followed.source.last_sign_ns
        async with asyncio.timeout(20):
            while followed.source.last_sign_ns == before:
                await asyncio.sleep(0.001)
