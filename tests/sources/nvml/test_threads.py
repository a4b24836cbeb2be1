"""Threads for calls that may never return: their files, their deadlines, their bounds."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from agent import guard
from agent.errors import SourceError
from agent.sources.nvml.fd_table import DECOY_DESCRIPTORS
from agent.sources.nvml.threads import AbandonedError, Call, Completions, Lane, ThreadEndedError, ThreadGroup

P = ParamSpec("P")
T = TypeVar("T")

MS = 1_000_000


@pytest.fixture
async def threads() -> AsyncIterator[ThreadGroup]:
    group = ThreadGroup(keep=(), deadline_ns=lambda _call: 50 * MS, clock=time.monotonic_ns, maximum=4)
    await group.start()
    yield group
    assert await group.wait_idle(20_000 * MS)
    await group.end()


def files_of(lane: Lane) -> dict[int, str]:
    """Return what a thread has open, by number."""
    return read_links(Path(f"/proc/self/task/{lane.thread_id}/fd"))


def read_links(directory: Path) -> dict[int, str]:
    links: dict[int, str] = {}
    for entry in directory.iterdir():
        try:
            links[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            # The directory itself was open while it was read.
            continue
    return links


# Files


async def test_the_threads_have_none_of_the_agents_files(threads: ThreadGroup) -> None:
    lane = await threads.start_lane("other")
    assert threads.shared_files is None
    for each in (threads.first, lane):
        files = files_of(each)
        assert set(files.values()) == {os.devnull, "anon_inode:[eventfd]"}
        assert [n for n, target in files.items() if "eventfd" in target] == [threads.completions.wake_fd]
        assert {0, 1, 2} <= {n for n, target in files.items() if target == os.devnull}


async def test_files_that_the_agent_opens_later_are_not_in_the_threads_table(threads: ThreadGroup) -> None:
    with socket.socket() as listener:
        mine = str(Path(f"/proc/self/fd/{listener.fileno()}").readlink())
        assert mine not in files_of(threads.first).values()


async def test_files_that_a_thread_opens_are_not_in_the_agents_table(
    threads: ThreadGroup, tmp_path: Path
) -> None:
    lane = await threads.start_lane("other")
    file = tmp_path / "opened-by-a-thread"
    file.touch()
    number = await lane.call(lambda: os.open(file, os.O_RDONLY))
    assert files_of(lane)[number] == files_of(threads.first)[number] == str(file)
    assert str(file) not in read_links(Path("/proc/self/fd")).values()
    assert number >= DECOY_DESCRIPTORS
    await lane.call(lambda: os.close(number))


async def test_a_file_of_the_agent_that_a_thread_happens_to_free_stays_open(threads: ThreadGroup) -> None:
    first = await threads.first.call(lambda: os.open(os.devnull, os.O_RDONLY))
    with socket.socket() as listener:
        number = listener.fileno()
        await threads.first.call(lambda: os.close(number))
        assert listener.getsockname() == ("0.0.0.0", 0)
        assert files_of(threads.first)[first] == os.devnull


async def test_where_unshare_is_forbidden_the_threads_share_the_agents_table() -> None:
    """The seccomp filter forbids unshare, as container runtimes do for pods without privileges."""
    script = """
        import asyncio, ctypes, struct, time
        from agent.sources.nvml.threads import ThreadGroup

        UNSHARE = {"x86_64": 272, "aarch64": 97}[__import__("os").uname().machine]
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, UNSHARE), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
        libc = ctypes.CDLL(None)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, program) == 0

        async def main():
            group = ThreadGroup(keep=(), deadline_ns=lambda _: 10**9, clock=time.monotonic_ns, maximum=4)
            await group.start()
            lane = await group.start_lane("other")
            print(group.shared_files, await lane.call(lambda: "works"))
            await group.end()

        asyncio.run(main())
    """
    ended = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(script), stdout=subprocess.PIPE
    )
    out, _ = await ended.communicate()
    assert out.decode().strip() == ("unshare(CLONE_FILES) failed: Operation not permitted (EPERM) works")


async def test_the_threads_get_a_table_with_no_descriptor_left() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    group = ThreadGroup(keep=(), deadline_ns=lambda _call: 50 * MS, clock=time.monotonic_ns, maximum=4)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, before[1]))
    try:
        await group.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)
    assert group.shared_files is None
    assert set(files_of(group.first).values()) == {os.devnull, "anon_inode:[eventfd]"}
    await group.end()


async def test_a_worker_thread_handles_no_signal(threads: ThreadGroup) -> None:
    lane = await threads.start_lane("other")
    blocked = await lane.call(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD} <= blocked
    assert signal.SIGSEGV not in blocked


# Deadlines


async def test_a_call_past_its_deadline_is_reported_once_and_so_is_its_return(threads: ThreadGroup) -> None:
    told: list[tuple[str, Call]] = []
    overdue = asyncio.Event()
    answered = asyncio.Event()

    def note_overdue(call: Call) -> None:
        told.append(("overdue", call))
        overdue.set()

    def note_answered(call: Call) -> None:
        told.append(("answered", call))
        answered.set()

    lane = await threads.start_lane("slow")
    lane.on_overdue, lane.on_answered = note_overdue, note_answered
    go_on = threading.Event()

    def work() -> str:
        lane.log.began("first")
        go_on.wait()
        lane.log.ended()
        lane.log.began("second")
        lane.log.ended()
        return "done"

    async with asyncio.TaskGroup() as group:
        job = group.create_task(lane.call(work))
        await overdue.wait()
        assert threads.stuck
        go_on.set()
        assert await job == "done"
    await answered.wait()
    assert [(what, call.name) for what, call in told] == [("overdue", "first"), ("answered", "first")]
    assert lane.late
    assert not lane.overdue
    await lane.call(lambda: None)
    assert not lane.late


async def test_the_return_of_one_call_of_a_long_job_is_reported_while_the_job_goes_on(
    threads: ThreadGroup,
) -> None:
    answered = asyncio.Event()
    overdue: asyncio.Queue[str] = asyncio.Queue(maxsize=8)
    lane = await threads.start_lane("slow")
    lane.on_overdue = lambda call: overdue.put_nowait(call.name)
    lane.on_answered = lambda _call: answered.set()
    gates = {name: threading.Event() for name in ("first", "second")}

    def work() -> None:
        for name, gate in gates.items():
            lane.log.began(name)
            gate.wait()
            lane.log.ended()

    async with asyncio.TaskGroup() as group:
        group.create_task(lane.call(work))
        assert await overdue.get() == "first"
        gates["first"].set()
        await answered.wait()
        assert await overdue.get() == "second"
        gates["second"].set()


async def test_jobs_wait_for_each_other_even_if_the_first_is_cancelled(threads: ThreadGroup) -> None:
    lane = await threads.start_lane("slow")
    go_on = threading.Event()
    order: list[str] = []

    def first() -> None:
        go_on.wait()
        order.append("first")

    given_up = asyncio.get_running_loop().create_task(lane.call(first))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    assert lane.busy
    async with asyncio.TaskGroup() as group:
        group.create_task(lane.call(lambda: order.append("second")))
        await asyncio.sleep(0)
        go_on.set()
    assert order == ["first", "second"]


async def test_an_error_in_a_job_reaches_its_caller(threads: ThreadGroup) -> None:
    def fail() -> None:
        raise SourceError("no")

    with pytest.raises(SourceError, match="no"):
        await threads.first.call(fail)
    assert await threads.first.call(lambda: "well") == "well"


# Bounds and shutdown


async def test_there_are_no_more_threads_than_the_maximum(threads: ThreadGroup) -> None:
    for number in range(3):
        await threads.start_lane(f"{number}")
    with pytest.raises(SourceError, match="there are 4 already"):
        await threads.start_lane("one too many")


async def test_only_the_newest_callback_of_a_key_is_kept() -> None:
    completions = Completions()
    completions.attach(asyncio.get_running_loop())
    ran: list[int] = []
    done = asyncio.Event()
    for number in range(10_007):
        completions.post("key", lambda number=number: ran.append(number))  # type: ignore[misc]
    completions.post("last", done.set)
    await done.wait()
    assert ran == [10_006]
    completions.close()


async def test_a_stuck_thread_does_not_keep_the_process(tmp_path: Path) -> None:
    pipe = tmp_path / "never-written"
    os.mkfifo(pipe)
    script = f"""
        import asyncio, time
        from agent.sources.nvml.threads import ThreadGroup

        async def main():
            group = ThreadGroup(keep=(), deadline_ns=lambda _: 10**7, clock=time.monotonic_ns, maximum=4)
            await group.start()
            lane = await group.start_lane("stuck")
            overdue = asyncio.Event()
            lane.on_overdue = lambda call: overdue.set()

            def read():
                lane.log.began("read")
                open({str(pipe)!r}).read()

            task = asyncio.get_running_loop().create_task(lane.call(read))
            await overdue.wait()
            task.cancel()
            print(await group.wait_idle(10**7))

        asyncio.run(main())
    """
    ended = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(script), stdout=subprocess.PIPE
    )
    async with asyncio.timeout(20):
        out, _ = await ended.communicate()
    assert (out.decode().strip(), ended.returncode) == ("False", 0)


# Threads that die or hang


async def test_a_base_exception_fails_the_job_and_not_the_thread(threads: ThreadGroup) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(guard.EscapedError, match="SystemExit: 3"):
        await threads.first.call(leave)
    assert await threads.first.call(lambda: 7) == 7


@pytest.mark.parametrize("ending", [SystemExit(), None], ids=["raises", "returns"])
async def test_a_thread_that_dies_while_it_is_idle_is_replaced_with_the_same_files(
    ending: BaseException | None,
) -> None:
    ends = threading.Event()

    def seam(_kind: guard.Kind, name: str, function: Callable[P, T], /) -> Callable[P, T]:
        def step(*args: P.args, **kwargs: P.kwargs) -> T:
            done = function(*args, **kwargs)
            if ends.is_set() and name != "nvml":
                ends.clear()
                if ending is not None:
                    raise ending
                return None  # type: ignore[return-value]  # as if there were no more jobs
            return done

        return step

    guard.own(guard.Owner("nvml", lambda _: None, seam))
    group = ThreadGroup(keep=(), deadline_ns=lambda _call: 50 * MS, clock=time.monotonic_ns, maximum=4)
    await group.start()
    lane = await group.start_lane("other")
    first_thread = lane.thread_id
    ends.set()
    await asyncio.gather(lane.call(lambda: None), return_exceptions=True)
    while lane.alive and lane.thread_id == first_thread:
        await asyncio.sleep(0.001)

    assert await lane.call(lambda: 7) == 7
    assert lane.thread_id != first_thread
    assert set(files_of(lane).values()) == {os.devnull, "anon_inode:[eventfd]"}
    await group.end()


async def test_a_thread_that_hangs_outside_of_a_call_is_abandoned_and_can_make_none_later(
    threads: ThreadGroup,
) -> None:
    lane = await threads.start_lane("other")
    goes_on, refused = threading.Event(), threading.Event()

    def hang() -> None:
        goes_on.wait()
        try:
            lane.log.began("nvmlDeviceGetUUID")
        except AbandonedError:
            refused.set()

    hanging = asyncio.get_running_loop().create_task(lane.call(hang))
    while not lane.busy:
        await asyncio.sleep(0)
    threads.abandon_hung()
    with pytest.raises(ThreadEndedError, match="Thread other was replaced: it hung"):
        await hanging
    assert await lane.call(lambda: 7) == 7
    goes_on.set()
    while not refused.is_set():
        await asyncio.sleep(0.001)


async def test_a_thread_in_a_call_of_the_driver_is_not_abandoned(threads: ThreadGroup) -> None:
    lane = await threads.start_lane("other")
    goes_on = threading.Event()

    def call() -> int:
        lane.log.began("nvmlDeviceGetUUID")
        goes_on.wait()
        lane.log.ended()
        return 7

    calling = asyncio.get_running_loop().create_task(lane.call(call))
    while lane.log.current is None:
        await asyncio.sleep(0.001)
    threads.abandon_hung()
    goes_on.set()
    assert await calling == 7
