"""Watching directories: what wakes the reader, and what happens to the watch of a deleted directory."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.directory_watch import MAX_EVENTS_AT_ONCE, ChangeWaiter, DirectoryWatch

NEVER_NS = 3_600_000_000_000
SOON_NS = 20_000_000
PATIENCE_S = 60.0


@pytest.fixture
def waiter() -> Iterator[ChangeWaiter]:
    made = ChangeWaiter()
    yield made
    made.close()


async def test_a_storm_of_events_is_read_in_bounded_parts(tmp_path: Path) -> None:
    watch = DirectoryWatch(tmp_path)
    for number in range(MAX_EVENTS_AT_ONCE + 500):
        (tmp_path / f"{number}").touch()
    assert await watch.wait_readable(NEVER_NS)
    assert watch.read_events()
    # Unread events stay in the kernel's queue.
    assert await watch.wait_readable(NEVER_NS)
    watch.close()


async def test_a_change_wakes_the_reader_once(tmp_path: Path, waiter: ChangeWaiter) -> None:
    waiter.use(DirectoryWatch(tmp_path))
    (tmp_path / "one").touch()
    (tmp_path / "two").touch()
    assert await waiter.wait(NEVER_NS)
    assert not await waiter.wait(SOON_NS)


async def test_a_quiet_directory_is_read_after_the_period(tmp_path: Path, waiter: ChangeWaiter) -> None:
    waiter.use(DirectoryWatch(tmp_path))
    assert not await waiter.wait(SOON_NS)


async def test_without_a_watch_the_period_alone_wakes_the_reader(waiter: ChangeWaiter) -> None:
    assert not await waiter.wait(SOON_NS)


async def test_a_watch_that_begins_wakes_the_reader(tmp_path: Path, waiter: ChangeWaiter) -> None:
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(waiter.wait(NEVER_NS))
        await asyncio.sleep(0)
        waiter.use(DirectoryWatch(tmp_path))
        assert not await waiting


async def test_a_watch_whose_directory_is_deleted_is_closed(tmp_path: Path, waiter: ChangeWaiter) -> None:
    directory = tmp_path / "here"
    directory.mkdir()
    waiter.use(DirectoryWatch(directory))
    directory.rmdir()
    assert await waiter.wait(NEVER_NS)
    assert waiter.watch is None


async def test_a_new_watch_replaces_the_previous_one(tmp_path: Path, waiter: ChangeWaiter) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    waiter.use(DirectoryWatch(before))
    waiter.use(DirectoryWatch(after))
    (before / "unseen").touch()
    assert not await waiter.wait(SOON_NS)
    (after / "seen").touch()
    assert await waiter.wait(NEVER_NS)


async def test_events_close_to_one_another_wake_the_reader_once(tmp_path: Path) -> None:
    waiter = ChangeWaiter(gap_ns=10 * SOON_NS)
    waiter.use(DirectoryWatch(tmp_path))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(waiter.wait(NEVER_NS))
        for number in range(10):
            (tmp_path / f"{number}").touch()
            await asyncio.sleep(0)
        assert await waiting
    assert not await waiter.wait(SOON_NS)
    waiter.close()


async def test_a_directory_recreated_under_the_name_is_another(tmp_path: Path) -> None:
    directory, other = tmp_path / "here", tmp_path / "other"
    directory.mkdir()
    other.mkdir()
    watch = DirectoryWatch(directory)
    assert watch.is_on(directory.stat())
    assert not watch.is_on(other.stat())
    watch.close()
