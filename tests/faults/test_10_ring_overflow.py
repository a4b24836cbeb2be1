"""Fault 10: the ring buffer between the kernel and the agent overflows.

Right: each lost event is counted, what is found is marked as incomplete until the snapshot is made anew from
the kernel's own table, which is within one poll, and then every count is exact. At 10,000 events a second
nothing is lost.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.core.usage.gpu_map import GpuMap
from agent.core.usage.tracker import Tracker
from agent.model.facts import GpuUseSeen
from agent.model.health import LeakKind
from agent.model.usage import ProcessUse, Usage
from agent.probe.request import RING_BYTES, Request
from agent.threads import in_daemon_thread
from tests.core.build import START_NS, U0, S
from tests.core.use import POD_A, allocated, found, node, pods, process, repeat_facts, seen
from tests.faults.probed import stand_in, watched
from tests.harness import SLACK_NS
from tests.probe.caller import Caller
from tests.probe.watcher import SETTINGS
from tests.sources.recorder import Recorder

PRIME = 10_007
TINY_RING = 4_096

CONTEXTS = """
fd = os.open(sys.argv[1], os.O_RDWR)
alloc(fd, CLIENT, ROOT, parent=0, client=0)
alloc(fd, 2, GROUP, parent=CLIENT)
for handle in range(int(sys.argv[2])): alloc(fd, handle + 3, CONTEXT)
wait()
for handle in range(int(sys.argv[2])): free(fd, handle + 3)
wait()
"""
STEADY = """
import time
fd = os.open(sys.argv[1], os.O_RDWR)
begun = time.monotonic()
for number in range(int(sys.argv[2]) // 2):
    alloc(fd, 3, CONTEXT)
    free(fd, 3)
    ahead = begun + number / 5_000 - time.monotonic()
    if ahead > 0.001: time.sleep(ahead)
print(time.monotonic() - begun, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return stand_in(tmp_path)


async def blocking(work: Callable[[], Any]) -> Any:
    return await in_daemon_thread("test-caller", work)


@pytest.fixture
def call(gpu: Path) -> Iterator[Callable[..., Any]]:
    """Start a caller, which is ended."""
    callers: list[Caller] = []

    async def start(code: str, count: int) -> Caller:
        callers.append(await blocking(lambda: Caller(code, gpu, count)))
        await blocking(callers[-1].run)
        return callers[-1]

    yield start
    for each in callers:
        each.end()


def use_of(usage: Usage, pid: int) -> ProcessUse | None:
    return next((use for use in usage.processes if use.key.pid == pid), None)


async def wait_contexts(seen: Recorder, pid: int, count: int) -> Usage:
    """Wait until a complete snapshot shows a process with so many contexts; which GPU is not known here."""

    def is_so(fact: GpuUseSeen) -> bool:
        use = use_of(fact.usage, pid)
        return fact.usage.complete and (use is not None and use.unplaced == count)

    seen.forget()
    return (await seen.first(GpuUseSeen, is_so)).usage


async def test_after_an_overflow_every_context_is_counted_exactly(
    call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agent.sources.ebpf.source")
    async with watched(ring_bytes=TINY_RING) as watcher:
        caller = await call(CONTEXTS, PRIME)

        await wait_contexts(watcher.seen, caller.pid, PRIME)
        usage = await watcher.settled_usage()

        assert usage.events_lost > 0
        assert watcher.probe.read_statistics().lost == usage.events_lost
        before = usage.events_lost
        await blocking(caller.resume)
        usage = await wait_contexts(watcher.seen, caller.pid, 0)
        assert usage.events_lost > before
    logged = [record for record in caplog.records if "lost" in record.message]
    assert len(logged) == 1, "at most one line in 30 s"


async def test_the_snapshot_is_made_anew_within_a_poll(call: Callable[..., Any]) -> None:
    async with watched(ring_bytes=TINY_RING) as watcher:
        caller = await call(CONTEXTS, PRIME)
        done_ns = time.monotonic_ns()

        usage = await wait_contexts(watcher.seen, caller.pid, PRIME)

        assert usage.at_ns - done_ns <= SETTINGS.poll_ns + SLACK_NS


def test_a_loss_marks_the_snapshot_until_it_was_made_anew_from_rows_and_a_scan() -> None:
    tracker = Tracker(GpuMap({}))
    tracker.apply_scan((), START_NS)
    assert tracker.usage_snapshot(START_NS).complete

    tracker.handle_lost_events(PRIME)
    assert tracker.needs_rebuild
    marked = tracker.usage_snapshot(START_NS)
    assert (marked.complete, marked.events_lost) == (False, PRIME)

    tracker.rebuild((), START_NS + 1)
    assert not tracker.usage_snapshot(START_NS + 1).complete
    tracker.apply_scan((), START_NS + 2)
    assert tracker.usage_snapshot(START_NS + 2).complete


async def test_nothing_is_lost_at_ten_thousand_events_a_second(call: Callable[..., Any]) -> None:
    count = 3 * PRIME - 1
    async with watched() as watcher:
        assert Request().ring_bytes == RING_BYTES == 1 << 20
        caller = await call(STEADY, count)
        usage = await watcher.settled_usage()

        statistics = watcher.probe.read_statistics()
        assert statistics.lost == usage.events_lost == 0
        # While the ring fills, what a process sends beyond its share is counted and read from the maps.
        assert watcher.probe.ring.received + statistics.unsent >= count
        assert watcher.probe.ring.pending_bytes == 0
        row = await watcher.counters(caller.pid)
        assert row.contexts_allocated == count // 2


def test_what_is_found_while_events_are_lost_is_marked_as_incomplete() -> None:
    watched_node = node()
    facts = (allocated(), pods(a=False))
    repeat_facts(watched_node, 62 * S, seen(process(501, pod=POD_A)), *facts)
    (whole,) = found(watched_node, LeakKind.POD_GONE)
    assert whole.details is not None
    assert not whole.details.incomplete

    watched_node.apply(seen(process(501, pod=POD_A), complete=False))
    (marked,) = found(watched_node, LeakKind.POD_GONE)
    assert marked.details is not None
    assert marked.details.incomplete
    assert marked.placement.gpu == U0

    watched_node.apply(seen(process(501, pod=POD_A)))
    (again,) = found(watched_node, LeakKind.POD_GONE)
    assert again.details is not None
    assert not again.details.incomplete
