"""The inbox: nothing with a key is lost, everything else is counted, the loop is woken once a batch."""

import asyncio
import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Self

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.bus import CAPACITY, MAX_LOST_SOURCES, Inbox
from agent.model.facts import Fact, XidReported
from agent.model.ids import GpuUuid, SourceName
from agent.model.structs import replace

SOURCE = SourceName("test")
FAR_NS = 2**62
CLONE_FILES = 0x400


class Note(msgspec.Struct, frozen=True):
    """A fact with whatever key a test gives it."""

    key: Hashable | None
    count: int = 1
    text: str = ""
    source: SourceName = SOURCE

    def merged_with(self, newer: Self) -> Self:
        return replace(newer, count=self.count + newer.count)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def inbox() -> Iterator[Inbox[Note]]:
    box: Inbox[Note] = Inbox(clock=time.monotonic_ns)
    yield box
    box.close()


def small(capacity: int) -> Inbox[Note]:
    return Inbox(clock=time.monotonic_ns, capacity=capacity)


def popped(box: Inbox[Note]) -> list[Note]:
    return [item.fact for item in box.pop_all()[0]]


# Order and merging


def test_facts_come_out_in_the_order_they_were_put(inbox: Inbox[Note]) -> None:
    notes = [Note("a"), Note(None, text="1"), Note("b"), Note(None, text="2")]
    for note in notes:
        inbox.put(note)
    assert popped(inbox) == notes
    assert popped(inbox) == []


def test_facts_of_one_key_are_merged_and_the_newer_one_keeps_its_place(inbox: Inbox[Note]) -> None:
    for note in (Note("a", text="old"), Note("b"), Note("a", count=2, text="new")):
        inbox.put(note)
    assert popped(inbox) == [Note("b"), Note("a", count=3, text="new")]


def test_what_was_taken_is_not_merged_with(inbox: Inbox[Note]) -> None:
    inbox.put(Note("a"))
    assert popped(inbox) == [Note("a")]
    inbox.put(Note("a"))
    assert popped(inbox) == [Note("a")]


@pytest.mark.parametrize("key", [0, 1, 2, "", (), ("x", 1)])
def test_any_key_is_a_key_of_its_own(inbox: Inbox[Note], key: Hashable) -> None:
    for note in (Note(None), Note(key), Note(None), Note(key)):
        inbox.put(note)
    assert popped(inbox) == [Note(None), Note(None), Note(key, count=2)]


def test_a_fact_is_stamped_with_the_time_of_the_first_one_merged_into_it() -> None:
    clock = Clock()
    box: Inbox[Note] = Inbox(clock=clock)
    box.put(Note("a"))
    clock.now_ns = 2_000
    box.put(Note("a"))
    box.put(Note("b"))
    clock.now_ns = 3_000
    assert [(item.fact.key, item.at_ns) for item in box.pop_all()[0]] == [("a", 1_000), ("b", 2_000)]
    box.close()


def test_xids_of_one_place_are_counted_and_others_are_apart() -> None:
    box: Inbox[Fact] = Inbox(clock=time.monotonic_ns)
    one = GpuUuid("GPU-1")
    for fact in (
        XidReported(one, 79),
        XidReported(one, 48),
        XidReported(one, 79, gi=1, ci=0),
        XidReported(one, 79, source=SourceName("kmsg")),
        XidReported(None, 79),
        XidReported(one, 79, count=4),
    ):
        box.put(fact)
    waiting = [item.fact for item in box.pop_all()[0]]
    assert len(waiting) == 5
    assert waiting[-1] == XidReported(one, 79, count=5)
    box.close()


# Bounds and losses


def test_facts_without_a_key_are_lost_when_the_inbox_is_full_and_each_is_counted() -> None:
    box = small(3)
    for number in range(5):
        box.put(Note(None, text=str(number)))
    box.put(Note(None, source=SourceName("other")))
    waiting, losses = box.pop_all()
    assert [item.fact.text for item in waiting] == ["0", "1", "2"]
    assert [(loss.lost_from, loss.count) for loss in losses] == [(SOURCE, 2), ("other", 1)]
    assert box.pop_all() == ([], [])
    box.close()


def test_after_it_was_emptied_the_inbox_takes_as_many_again() -> None:
    box = small(2)
    for _ in range(3):
        box.put(Note(None))
    box.pop_all()
    for _ in range(2):
        box.put(Note(None))
    assert box.statistics().lost == 1
    assert len(popped(box)) == 2
    box.close()


def test_a_full_inbox_still_takes_every_fact_with_a_key() -> None:
    box = small(1)
    for number in range(100):
        box.put(Note(None))
        box.put(Note(number % 10))
    waiting, losses = box.pop_all()
    assert sum(item.fact.count for item in waiting if item.fact.key is not None) == 100
    assert [loss.count for loss in losses] == [99]
    box.close()


def test_the_inbox_has_room_for_its_capacity() -> None:
    box = small(CAPACITY)
    for _ in range(CAPACITY + 7):
        box.put(Note(None))
    statistics = box.statistics()
    assert (statistics.waiting, statistics.lost) == (CAPACITY, 7)
    box.close()


def test_losses_of_more_sources_than_are_kept_apart_are_counted_with_the_last_one() -> None:
    box = small(0)
    for number in range(MAX_LOST_SOURCES + 10):
        box.put(Note(None, source=SourceName(f"s{number}")))
    box.put(Note(None, source=SourceName("s0")))
    _, losses = box.pop_all()
    counts = {loss.lost_from: loss.count for loss in losses}
    assert len(counts) == MAX_LOST_SOURCES
    assert counts[SourceName("s0")] == 2
    assert counts[SourceName(f"s{MAX_LOST_SOURCES - 1}")] == 11
    assert sum(counts.values()) == MAX_LOST_SOURCES + 11
    box.close()


@given(st.lists(st.one_of(st.none(), st.integers(0, 3), st.just("take"))), st.integers(0, 4))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_what_was_put_is_taken_merged_lost_or_waits(moves: list[Hashable], capacity: int) -> None:
    box = small(capacity)
    sent = got = lost = 0
    for move in moves:
        if move == "take":
            waiting, losses = box.pop_all()
            got += sum(item.fact.count for item in waiting)
            lost += sum(loss.count for loss in losses)
        else:
            box.put(Note(move))
            sent += 1
        statistics = box.statistics()
        assert statistics.put == statistics.popped + statistics.merged + statistics.lost + statistics.waiting
    waiting, losses = box.pop_all()
    got += sum(item.fact.count for item in waiting)
    lost += sum(loss.count for loss in losses)
    assert got + lost == sent == box.statistics().put
    assert lost == box.statistics().lost
    box.close()


# Waking the loop


def test_the_loop_is_woken_once_for_each_batch(inbox: Inbox[Note]) -> None:
    for number in range(5):
        inbox.put(Note(number % 2))
    assert inbox.statistics().wakeups == 1
    inbox.pop_all()
    assert inbox.statistics().wakeups == 1
    inbox.put(Note("a"))
    assert inbox.statistics().wakeups == 2
    assert os.eventfd_read(inbox.wake_fd) == 2


async def test_a_wait_ends_when_something_is_put(inbox: Inbox[Note]) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(inbox.wait_nonempty(FAR_NS))
        await asyncio.sleep(0)
        assert not waiting.done()
        inbox.put(Note("a"))
    assert popped(inbox) == [Note("a")]


async def test_a_wait_ends_at_once_when_something_waits(inbox: Inbox[Note]) -> None:
    inbox.put(Note("a"))
    await inbox.wait_nonempty(FAR_NS)
    assert popped(inbox) == [Note("a")]


async def test_a_wait_ends_at_its_time(inbox: Inbox[Note]) -> None:
    until_ns = time.monotonic_ns() + 2_000_000
    await inbox.wait_nonempty(until_ns)
    # The loop's timers may fire up to its clock's resolution early.
    assert time.monotonic_ns() >= until_ns - 1_000_000
    await inbox.wait_nonempty(0)
    assert popped(inbox) == []


async def test_a_wait_that_was_given_up_leaves_nothing_behind(inbox: Inbox[Note]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await inbox.wait_nonempty(FAR_NS)
    assert not asyncio.get_running_loop().remove_reader(inbox.wake_fd)
    inbox.put(Note("a"))
    await inbox.wait_nonempty(FAR_NS)
    assert popped(inbox) == [Note("a")]


async def test_a_wakeup_of_a_batch_that_was_taken_already_does_no_harm(inbox: Inbox[Note]) -> None:
    inbox.put(Note("a"))
    inbox.pop_all()
    await inbox.wait_nonempty(FAR_NS)
    assert popped(inbox) == []
    inbox.put(Note("b"))
    await inbox.wait_nonempty(FAR_NS)
    assert popped(inbox) == [Note("b")]


# Threads


async def test_facts_of_several_threads_are_all_taken_merged_or_counted_as_lost() -> None:
    box = small(50)
    each, threads = 5_000, 4
    keys = 7

    def work(source: SourceName) -> None:
        for number in range(each):
            box.put(Note(number % keys if number % 2 else None, source=source))

    workers = [threading.Thread(target=work, args=(SourceName(f"t{number}"),)) for number in range(threads)]
    for worker in workers:
        worker.start()
    keyed = keyless = batches = 0
    lost: Counter[SourceName] = Counter()
    while any(worker.is_alive() for worker in workers) or box.statistics().waiting:
        await box.wait_nonempty(time.monotonic_ns() + 10_000_000)
        waiting, losses = box.pop_all()
        batches += bool(waiting)
        keyed += sum(item.fact.count for item in waiting if item.fact.key is not None)
        keyless += sum(item.fact.count for item in waiting if item.fact.key is None)
        lost.update({loss.lost_from: loss.count for loss in losses})
    for worker in workers:
        worker.join()
    statistics = box.statistics()
    assert keyed == threads * each // 2
    assert keyless + lost.total() == threads * each // 2
    assert statistics.put == threads * each
    assert statistics.lost == lost.total()
    assert statistics.wakeups == batches
    box.close()


async def test_a_thread_with_a_descriptor_table_of_its_own_wakes_the_loop(inbox: Inbox[Note]) -> None:
    reader, writer = os.pipe()
    failures: list[OSError] = []

    def work() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_FILES) != 0:
            failures.append(OSError(ctypes.get_errno(), "unshare"))
            return
        os.closerange(3, inbox.wake_fd)
        os.closerange(inbox.wake_fd + 1, 1024)
        inbox.put(Note("from afar"))

    worker = threading.Thread(target=work)
    worker.start()
    await inbox.wait_nonempty(FAR_NS if not failures else 0)
    worker.join()
    assert failures == []
    assert popped(inbox) == [Note("from afar")]
    # The thread closed its own copies only.
    os.close(reader)
    os.close(writer)
