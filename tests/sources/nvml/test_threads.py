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
from agent.sources.nvml.threads import (
    AbandonedError,
    Call,
    Completions,
    ThreadEndedError,
    ThreadGroup,
    WorkerThread,
)

P = ParamSpec("P")
T = TypeVar("T")

MS = 1_000_000


@pytest.fixture
async def threads() -> AsyncIterator[ThreadGroup]:
    group = ThreadGroup(keep=(), deadline_ns=lambda _call: 50 * MS, clock=time.monotonic_ns, maximum=4)
    await group.start()
    yield group
    assert await group.wait_idle(20_000 * MS)
    await group.stop()


def files_of(worker: WorkerThread) -> dict[int, str]:
    """Return what a thread has open, by number."""
    return read_links(Path(f"/proc/self/task/{worker.thread_id}/fd"))


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
    worker = await threads.start_worker("other")
    assert threads.shared_files is None
    for each in (threads.first, worker):
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
    worker = await threads.start_worker("other")
    file = tmp_path / "opened-by-a-thread"
    file.touch()
    number = await worker.call(lambda: os.open(file, os.O_RDONLY))
    assert files_of(worker)[number] == files_of(threads.first)[number] == str(file)
    assert str(file) not in read_links(Path("/proc/self/fd")).values()
    assert number >= DECOY_DESCRIPTORS
    await worker.call(lambda: os.close(number))


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
            worker = await group.start_worker("other")
            print(group.shared_files, await worker.call(lambda: "works"))
            await group.stop()

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
    opened = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, before[1]))
    try:
        await group.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in opened:
            os.close(descriptor)
    assert group.shared_files is None
    assert set(files_of(group.first).values()) == {os.devnull, "anon_inode:[eventfd]"}
    await group.stop()


async def test_a_worker_thread_handles_no_signal(threads: ThreadGroup) -> None:
    worker = await threads.start_worker("other")
    blocked = await worker.call(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD} <= blocked
    assert signal.SIGSEGV not in blocked


# Deadlines


async def test_a_call_past_its_deadline_is_reported_once_and_so_is_its_return(threads: ThreadGroup) -> None:
    reported: list[tuple[str, Call]] = []
    overdue = asyncio.Event()
    answered = asyncio.Event()

    def note_overdue(call: Call) -> None:
        reported.append(("overdue", call))
        overdue.set()

    def note_answered(call: Call) -> None:
        reported.append(("answered", call))
        answered.set()

    worker = await threads.start_worker("slow")
    worker.on_overdue, worker.on_answered = note_overdue, note_answered
    go_on = threading.Event()

    def work() -> str:
        worker.log.began("first")
        go_on.wait()
        worker.log.ended()
        worker.log.began("second")
        worker.log.ended()
        return "done"

    async with asyncio.TaskGroup() as group:
        job = group.create_task(worker.call(work))
        await overdue.wait()
        assert threads.stuck
        go_on.set()
        assert await job == "done"
    await answered.wait()
    assert [(what, call.name) for what, call in reported] == [("overdue", "first"), ("answered", "first")]
    assert worker.late
    assert not worker.overdue
    await worker.call(lambda: None)
    assert not worker.late


async def test_the_return_of_one_call_of_a_long_job_is_reported_while_the_job_goes_on(
    threads: ThreadGroup,
) -> None:
    answered = asyncio.Event()
    overdue: asyncio.Queue[str] = asyncio.Queue(maxsize=8)
    worker = await threads.start_worker("slow")
    worker.on_overdue = lambda call: overdue.put_nowait(call.name)
    worker.on_answered = lambda _call: answered.set()
    gates = {name: threading.Event() for name in ("first", "second")}

    def work() -> None:
        for name, gate in gates.items():
            worker.log.began(name)
            gate.wait()
            worker.log.ended()

    async with asyncio.TaskGroup() as group:
        group.create_task(worker.call(work))
        assert await overdue.get() == "first"
        gates["first"].set()
        await answered.wait()
        assert await overdue.get() == "second"
        gates["second"].set()


async def test_jobs_wait_for_each_other_even_if_the_first_is_cancelled(threads: ThreadGroup) -> None:
    worker = await threads.start_worker("slow")
    go_on = threading.Event()
    order: list[str] = []

    def first() -> None:
        go_on.wait()
        order.append("first")

    cancelled = asyncio.get_running_loop().create_task(worker.call(first))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert worker.busy
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.call(lambda: order.append("second")))
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
        await threads.start_worker(f"{number}")
    with pytest.raises(SourceError, match="there are 4 already"):
        await threads.start_worker("one too many")


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
            worker = await group.start_worker("stuck")
            overdue = asyncio.Event()
            worker.on_overdue = lambda call: overdue.set()

            def read():
                worker.log.began("read")
                open({str(pipe)!r}).read()

            task = asyncio.get_running_loop().create_task(worker.call(read))
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


@pytest.mark.parametrize("error", [SystemExit(), None], ids=["raises", "returns"])
async def test_a_thread_that_dies_while_it_is_idle_is_replaced_with_the_same_files(
    error: BaseException | None,
) -> None:
    ends = threading.Event()

    def seam(_kind: guard.Kind, name: str, function: Callable[P, T], /) -> Callable[P, T]:
        def step(*args: P.args, **kwargs: P.kwargs) -> T:
            done = function(*args, **kwargs)
            if ends.is_set() and name != "nvml":
                ends.clear()
                if error is not None:
                    raise error
                return None  # type: ignore[return-value]  # as if there were no more jobs
            return done

        return step

    guard.own(guard.Owner("nvml", lambda _: None, seam))
    group = ThreadGroup(keep=(), deadline_ns=lambda _call: 50 * MS, clock=time.monotonic_ns, maximum=4)
    await group.start()
    worker = await group.start_worker("other")
    first_thread = worker.thread_id
    ends.set()
    await asyncio.gather(worker.call(lambda: None), return_exceptions=True)
    while worker.alive and worker.thread_id == first_thread:
        await asyncio.sleep(0.001)

    assert await worker.call(lambda: 7) == 7
    assert worker.thread_id != first_thread
    assert set(files_of(worker).values()) == {os.devnull, "anon_inode:[eventfd]"}
    await group.stop()


async def test_a_thread_that_hangs_outside_of_a_call_is_abandoned_and_can_make_none_later(
    threads: ThreadGroup,
) -> None:
    worker = await threads.start_worker("other")
    goes_on, rejected = threading.Event(), threading.Event()

    def hang() -> None:
        goes_on.wait()
        try:
            worker.log.began("nvmlDeviceGetUUID")
        except AbandonedError:
            rejected.set()

    hanging = asyncio.get_running_loop().create_task(worker.call(hang))
    while not worker.busy:
        await asyncio.sleep(0)
    threads.abandon_hung()
    with pytest.raises(ThreadEndedError, match="Thread other was replaced: it hung"):
        await hanging
    assert await worker.call(lambda: 7) == 7
    goes_on.set()
    while not rejected.is_set():
        await asyncio.sleep(0.001)


async def test_a_thread_in_a_call_of_the_driver_is_not_abandoned(threads: ThreadGroup) -> None:
    worker = await threads.start_worker("other")
    goes_on = threading.Event()

    def call() -> int:
        worker.log.began("nvmlDeviceGetUUID")
        goes_on.wait()
        worker.log.ended()
        return 7

    calling = asyncio.get_running_loop().create_task(worker.call(call))
    while worker.log.current is None:
        await asyncio.sleep(0.001)
    threads.abandon_hung()
    goes_on.set()
    assert await calling == 7
