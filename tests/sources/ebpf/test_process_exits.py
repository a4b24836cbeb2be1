"""The end of processes is watching once, of the process that was meant."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from agent.model.usage import ProcessKey
from agent.sources.ebpf import process_exits
from agent.sources.ebpf.process_exits import ProcessExits
from tests.sources.recorder import until

PROC = Path("/proc")

Spawn = Callable[[], tuple[subprocess.Popen[bytes], ProcessKey]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], ProcessKey]:
        process = subprocess.Popen(
            [sys.executable, "-ISc", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        started.append(process)
        numbers = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return process, ProcessKey(process.pid, int(numbers[19]))

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Watching:
    def __init__(self) -> None:
        self.exits: list[ProcessKey] = []
        self.watcher = ProcessExits(PROC, self.exits.append, 1_024)


@pytest.fixture
async def watching() -> AsyncIterator[Watching]:
    before = descriptors()
    one = Watching()
    yield one
    one.watcher.close()
    assert descriptors() == before


def descriptors() -> int:
    """How many pidfds this process has."""
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return sum(link.endswith("anon_inode:[pidfd]") for link in links)


async def test_the_exit_of_a_process_is_reported_once(watching: Watching, spawn: Spawn) -> None:
    process, key = spawn()
    await watching.watcher.watch([key])
    process.kill()
    await until(lambda: bool(watching.exits))
    await watching.watcher.watch([])

    assert watching.exits == [key]


async def test_a_process_that_had_exited_before_is_reported(watching: Watching, spawn: Spawn) -> None:
    process, key = spawn()
    process.kill()
    process.communicate()
    await watching.watcher.watch([key])
    assert watching.exits == []
    await until(lambda: bool(watching.exits))

    assert watching.exits == [key]


async def test_a_process_with_a_reused_pid_is_another_process(watching: Watching, spawn: Spawn) -> None:
    _process, key = spawn()
    earlier = ProcessKey(key.pid, key.start_ticks - 1)
    await watching.watcher.watch([earlier, key])
    await until(lambda: bool(watching.exits))

    assert watching.exits == [earlier]


async def test_a_process_that_is_watched_already_is_not_opened_again(
    watching: Watching, spawn: Spawn
) -> None:
    _process, key = spawn()
    before = descriptors()
    for _ in range(3):
        await watching.watcher.watch([key])

    assert descriptors() == before + 1


async def test_a_process_that_is_no_longer_watched_is_not_reported(watching: Watching, spawn: Spawn) -> None:
    (first, first_key), (second, second_key) = spawn(), spawn()
    await watching.watcher.watch([first_key, second_key])
    await watching.watcher.watch([second_key])
    first.kill()
    first.communicate()
    second.kill()
    await until(lambda: bool(watching.exits))

    assert watching.exits == [second_key]


async def test_after_the_close_no_exit_is_reported(watching: Watching, spawn: Spawn) -> None:
    process, key = spawn()
    await watching.watcher.watch([key])
    watching.watcher.close()
    process.kill()
    process.communicate()
    await asyncio.sleep(0)

    assert watching.exits == []


async def test_so_many_are_watched_and_no_more(watching: Watching, spawn: Spawn) -> None:
    watching.watcher = ProcessExits(PROC, watching.exits.append, max_watched=2)
    started = [spawn() for _ in range(4)]
    keys = [key for _, key in started]
    before = descriptors()
    await watching.watcher.watch(keys)
    assert descriptors() == before + 2
    assert watching.watcher.unwatched == 2

    started[0][0].kill()
    await until(lambda: watching.exits == keys[:1])
    await watching.watcher.watch(keys[1:])
    assert watching.watcher.unwatched == 1


async def test_a_holder_that_forks_takes_no_others_place(watching: Watching, spawn: Spawn) -> None:
    watching.watcher = ProcessExits(PROC, watching.exits.append, max_watched=3)
    greedy = [spawn()[1] for _ in range(4)]
    neighbour, key = spawn()
    before = descriptors()
    await watching.watcher.watch(greedy, lambda _: "pod-a")
    assert descriptors() == before + 3
    await watching.watcher.watch([*greedy, key], lambda each: "pod-b" if each == key else "pod-a")
    assert descriptors() == before + 3
    neighbour.kill()
    await until(lambda: watching.exits == [key])


async def test_without_descriptors_no_exit_is_reported(watching: Watching, spawn: Spawn) -> None:
    _process, key = spawn()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened_files = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened_files[0] + 1, hard))
    try:
        while True:
            opened_files.append(os.dup(opened_files[0]))
    except OSError:
        pass
    try:
        await watching.watcher.watch([key])
    finally:
        for descriptor in opened_files:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (watching.watcher.unwatched, watching.exits) == (1, [])

    await watching.watcher.watch([key])
    assert watching.watcher.unwatched == 0


async def test_a_watch_that_is_cancelled_leaves_no_descriptor(
    watching: Watching, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    _process, key = spawn()
    before = descriptors()
    opened, go = asyncio.Event(), process_exits._open_all
    loop = asyncio.get_running_loop()

    def open_and_notify(proc_root: Path, keys: list[ProcessKey]) -> dict[ProcessKey, int | None]:
        found = go(proc_root, keys)
        loop.call_soon_threadsafe(opened.set)
        return found

    monkeypatch.setattr(process_exits, "_open_all", open_and_notify)
    task = loop.create_task(watching.watcher.watch([key]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await opened.wait()
    await until(lambda: descriptors() == before)
