"""The MPS source on real directories."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from agent.errors import SourceError
from agent.model.facts import MpsSeen
from agent.sources.mps import READY_FILE, MpsSettings, MpsSource
from tests.sources.recorder import Recorder, until

NEVER_NS = 3_600_000_000_000
SOON_NS = 10_000_000

EVENTS_ONLY = MpsSettings(recheck_ns=NEVER_NS, poll_ns=NEVER_NS)
POLLS = MpsSettings(recheck_ns=SOON_NS, poll_ns=SOON_NS)

Start = Callable[[MpsSettings], MpsSource]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "mps"


@pytest.fixture
async def start(recorder: Recorder, root: Path) -> AsyncIterator[Start]:
    tasks: list[asyncio.Task[None]] = []

    def start(settings: MpsSettings) -> MpsSource:
        source = MpsSource(
            inbox=recorder.inbox,
            mps_root=root,
            container_root=root.parent / "container",
            settings=settings,
        )
        tasks.append(asyncio.get_running_loop().create_task(source.run(), name="mps"))
        return source

    yield start
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def emitted(recorder: Recorder, *ready: bool) -> list[MpsSeen]:
    """Wait until exactly this was emitted, in this order."""
    await recorder.until(lambda: [fact.ready for fact in recorder.of(MpsSeen)] == list(ready))
    return recorder.of(MpsSeen)


async def test_a_ready_daemon_is_emitted_at_the_first_poll(
    root: Path, start: Start, recorder: Recorder
) -> None:
    root.mkdir()
    (root / READY_FILE).touch()
    start(EVENTS_ONLY)
    await emitted(recorder, True)


async def test_a_daemon_that_is_not_ready_is_emitted_with_the_missing_file(
    root: Path, start: Start, recorder: Recorder
) -> None:
    start(EVENTS_ONLY)
    (fact,) = await emitted(recorder, False)
    assert f"{root / READY_FILE} does not exist" in fact.message


async def test_each_start_and_exit_of_the_daemon_is_emitted_once(
    root: Path, start: Start, recorder: Recorder
) -> None:
    root.mkdir()
    start(EVENTS_ONLY)
    await emitted(recorder, False)
    (root / READY_FILE).write_text('{"resources":[]}')
    await emitted(recorder, False, True)
    (root / "other").touch()
    (root / READY_FILE).unlink()
    await emitted(recorder, False, True, False)


async def test_a_root_that_is_made_later_is_found(root: Path, start: Start, recorder: Recorder) -> None:
    start(POLLS)
    await emitted(recorder, False)
    root.mkdir()
    (root / READY_FILE).touch()
    await emitted(recorder, False, True)


async def test_a_root_that_is_made_anew_is_watched_again(
    root: Path, start: Start, recorder: Recorder
) -> None:
    root.mkdir()
    (root / READY_FILE).touch()
    start(POLLS)
    await emitted(recorder, True)
    shutil.rmtree(root)
    await emitted(recorder, True, False)
    root.mkdir()
    (root / READY_FILE).touch()
    await emitted(recorder, True, False, True)


async def test_in_a_container_the_mounted_root_counts(root: Path, start: Start, recorder: Recorder) -> None:
    mounted = root.parent / "container"
    mounted.mkdir()
    (mounted / READY_FILE).touch()
    start(EVENTS_ONLY)
    await emitted(recorder, True)


async def test_a_root_that_cannot_be_read_does_not_count(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / READY_FILE).touch()
    # Root may read everything, but not a name that no file system supports.
    source = MpsSource(
        inbox=recorder.inbox,
        mps_root=tmp_path / ("x" * 300),
        container_root=tmp_path,
        settings=EVENTS_ONLY,
    )
    running = asyncio.get_running_loop().create_task(source.run(), name="mps")
    await emitted(recorder, True)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_root_of_this_node_counts_before_a_mounted_one(
    root: Path, start: Start, recorder: Recorder
) -> None:
    mounted = root.parent / "container"
    mounted.mkdir()
    (mounted / READY_FILE).touch()
    root.mkdir()
    start(EVENTS_ONLY)
    (fact,) = await emitted(recorder, False)
    assert str(root) in fact.message


async def test_something_else_in_the_place_of_the_file_is_no_readiness(
    root: Path, start: Start, recorder: Recorder
) -> None:
    (root / READY_FILE).mkdir(parents=True)
    start(EVENTS_ONLY)
    (fact,) = await emitted(recorder, False)
    assert "is no regular file" in fact.message


async def test_without_inotify_the_directory_is_polled_repeatedly(
    root: Path, start: Start, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_the_limit(_directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agent.sources.mps.DirectoryWatch", at_the_limit)
    root.mkdir()
    start(POLLS)
    await emitted(recorder, False)
    (root / READY_FILE).touch()
    await emitted(recorder, False, True)


async def test_a_directory_that_does_not_answer_holds_up_the_source_alone(
    recorder: Recorder, root: Path
) -> None:
    answers, made = threading.Event(), []

    class Stuck(type(root)):  # type: ignore[misc]
        """A root that cannot be read until the test allows it."""

        def is_dir(self, **_: bool) -> bool:
            made.append(threading.current_thread())
            answers.wait()
            return False

    settings = MpsSettings(recheck_ns=NEVER_NS, poll_ns=NEVER_NS, deadline_ns=SOON_NS)
    source = MpsSource(inbox=recorder.inbox, mps_root=Stuck(root), settings=settings)
    try:
        for _ in range(2):
            with pytest.raises(SourceError, match="cannot be read within"):
                await source.run()
        # The second run waits for it, and starts none beside it.
        assert len(made) == 1
        assert made[0] is not threading.main_thread()
        assert made[0].daemon
    finally:
        answers.set()
    task = asyncio.get_running_loop().create_task(source.run())
    await emitted(recorder, False)
    task.cancel()


async def test_a_watch_that_came_too_late_is_closed(recorder: Recorder, root: Path) -> None:
    root.mkdir()
    before = inotify_descriptors()
    source = MpsSource(inbox=recorder.inbox, mps_root=root, settings=EVENTS_ONLY)
    for _ in range(5):
        task = asyncio.get_running_loop().create_task(source.run())
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await until(lambda: all(thread.name != "mps-read" for thread in threading.enumerate()))
    await until(lambda: inotify_descriptors() <= before)


def inotify_descriptors() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += str(entry.readlink()) == "anon_inode:inotify"
    return found
