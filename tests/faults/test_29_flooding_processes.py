"""Fault 29: a process does what the probe reports as often as it can, beside one that leaks.

Right: no event of anyone is lost, the leak beside is found as without it, scans are bounded in number, and a
process of which not each event was sent is named, with how many, until what came of them was read. A process
whose requests for scans are postponed again and again is logged.
"""

import asyncio
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.core.usage.scan_pace import BURST
from agent.model.facts import GpuUseSeen
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.model.structs import replace
from agent.model.usage import Usage
from agent.sources.ebpf.rounds import EbpfSettings
from agent.threads import in_daemon_thread
from tests.faults.probed import stand_in, watched
from tests.probe.caller import Caller
from tests.probe.conftest import quicker_loader
from tests.probe.watcher import Watcher
from tests.sources.recorder import until

_log = logging.getLogger(__name__)

SETTINGS = EbpfSettings(
    poll_ns=50 * MILLISECOND_NS,
    gap_ns=20 * MILLISECOND_NS,
    scan_ns=3_600 * SECOND_NS,
    publish_ns=3_600 * SECOND_NS,
)
"""Nothing is scanned for but what gives a reason for it; pods are paced as on a node."""
CONTEXTS = 7
LOOPS = 20_000
MORE_MIB = 16
MANY = 12
"""Together they fill the ring in less than one of their windows."""

OPENED = "fd = os.open(sys.argv[1], os.O_RDWR)\n"
LEAK = (
    OPENED
    + f"""
alloc(fd, CLIENT, ROOT, parent=0, client=0)
for handle in range({CONTEXTS}): alloc(fd, handle + 3, CONTEXT, parent=CLIENT)
reading, writing = int(sys.argv[2]), int(sys.argv[3])
if os.fork() == 0:
    os.close(writing)
    os.close(1)
    os.read(reading, 1)
    os._exit(0)
wait()
os._exit(0)
"""
)
FLOODS = {
    "dup2": "os.dup2(fd, 100)",
    "dup and close": "os.close(os.dup(fd))",
    "open and close": "os.close(os.open(sys.argv[1], os.O_RDWR))",
    "allocate and free": "alloc(fd, 3, CONTEXT, client=7); free(fd, 3, client=7)",
}
FLOOD = OPENED + "wait()\nwhile True:\n    for _ in range(int(sys.argv[2])): {0}\n    wait()\n"


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return stand_in(tmp_path)


async def blocking(work: Callable[[], Any]) -> Any:
    return await in_daemon_thread("test-caller", work)


@pytest.fixture
def call(gpu: Path) -> Iterator[Callable[..., Any]]:
    """Start a caller, which is ended."""
    callers: list[Caller] = []

    async def start(code: str, *arguments: object, keep: tuple[int, ...] = ()) -> Caller:
        callers.append(await blocking(lambda: Caller(code, gpu, *arguments, keep=keep)))
        await blocking(callers[-1].run)
        return callers[-1]

    yield start
    for each in callers:
        each.process.kill()
        each.process.communicate()


class Flood:
    """A caller that goes on until the context ends, with how often it did what."""

    def __init__(self, caller: Caller) -> None:
        self.pid = caller.pid
        self.loops = 0
        self._caller = caller
        self._is_over = False

    async def run(self) -> None:
        """Count its loops."""
        while not self._is_over:
            await blocking(self._caller.resume)
            self.loops += LOOPS

    def stop(self) -> None:
        """Let it end."""
        self._is_over = True


@asynccontextmanager
async def flooding(call: Callable[..., Any], what: str) -> Any:
    flood = Flood(await call(FLOOD.format(FLOODS[what]), LOOPS))
    running = asyncio.get_running_loop().create_task(flood.run())
    await until(lambda: flood.loops > 0)
    yield flood
    flood.stop()
    await running


async def leak_is_found(watched: Watcher, call: Callable[..., Any]) -> tuple[Usage, float]:
    """Leak, and return the snapshot that shows it, and how long after the owner's end."""
    reading, writing = os.pipe()
    # The child that keeps the file lives until this end is closed.
    owner = await call(LEAK, reading, writing, keep=(reading, writing))
    os.close(reading)
    await watched.seen.until(lambda: _contexts(watched, owner.pid) == CONTEXTS)
    ended = time.monotonic()
    await blocking(owner.resume)
    await watched.seen.until(
        lambda: any(each.owner.key.pid == owner.pid for each in _newest(watched).orphans)
    )
    os.close(writing)
    return _newest(watched), time.monotonic() - ended


def _newest(watched: Watcher) -> Usage:
    facts = watched.seen.of(GpuUseSeen)
    return facts[-1].usage if facts else Usage(0)


def _contexts(watched: Watcher, pid: int) -> int | None:
    return next((use.unplaced for use in _newest(watched).processes if use.key.pid == pid), None)


@pytest.mark.parametrize("what", FLOODS)
async def test_a_leak_beside_a_flood_is_found_as_without_it(
    call: Callable[..., Any], what: str, record_property: Callable[[str, object], None]
) -> None:
    async with watched(SETTINGS) as watching:
        _, quiet_s = await leak_is_found(watching, call)
        memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with flooding(call, what) as flood:
            began, scans, cpu = time.monotonic(), watching.probe.config.scan, time.process_time()
            received = watching.probe.ring.received
            usage, flooded_s = await leak_is_found(watching, call)
            (orphan,) = [each for each in usage.orphans if each.contexts == CONTEXTS][-1:]
            assert orphan.holders
            # For the rest of some periods it goes on alone.
            await until(lambda: time.monotonic() - began > 3 * SETTINGS.rescan_ns / SECOND_NS)
            took = time.monotonic() - began
            scanned = watching.probe.config.scan - scans
            cpu = time.process_time() - cpu
            heard = watching.probe.ring.received - received
        grew_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib) / 1024

        statistics = watching.probe.read_statistics()
        assert statistics.lost == 0
        periods = took / (SETTINGS.rescan_ns / SECOND_NS)
        # Each of the flood's may be confirmed by a second; the others are the leak's.
        assert scanned <= 2 * (periods + 1) + 2 * BURST + 12, (scanned, took)
        assert grew_mib <= MORE_MIB
        if what in {"dup2", "dup and close"}:
            assert statistics.unsent == 0
            assert heard < 100
        for name, figure in {
            "found after, s": f"{quiet_s:.3f} quiet, {flooded_s:.3f} flooded",
            "loops a second": round(flood.loops / took),
            "scans a second": round(scanned / took, 1),
            "events a second": round(heard / took),
            "CPU of the agent, % of a core": round(100 * cpu / took, 1),
            "memory, MiB": round(grew_mib, 1),
        }.items():
            record_property(name, figure)
            _log.info("%s: %s: %s", what, name, figure)


@pytest.mark.skipif(quicker_loader() != "core", reason="bcc cannot ask how full the ring is")
@pytest.mark.parametrize("what", ["dup2", "open and close"])
async def test_a_leak_beside_many_floods_is_found_as_without_them(
    call: Callable[..., Any], what: str, record_property: Callable[[str, object], None]
) -> None:
    async with watched(SETTINGS) as watching, AsyncExitStack() as stack:
        _, quiet_s = await leak_is_found(watching, call)
        memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        floods = [await stack.enter_async_context(flooding(call, what)) for _ in range(MANY)]
        loops = sum(flood.loops for flood in floods)
        usage, flooded_s = await leak_is_found(watching, call)
        (orphan,) = [each for each in usage.orphans if each.contexts == CONTEXTS][-1:]
        assert orphan.holders
        await until(lambda: sum(flood.loops for flood in floods) > loops)
        grew_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib) / 1024

        statistics = watching.probe.read_statistics()
        assert statistics.lost == 0
        assert grew_mib <= MORE_MIB
        for name, figure in {
            "found after, s": f"{quiet_s:.3f} quiet, {flooded_s:.3f} flooded",
            "events not sent": statistics.unsent,
            "memory, MiB": round(grew_mib, 1),
        }.items():
            record_property(name, figure)
            _log.info("%d x %s: %s: %s", MANY, what, name, figure)


async def test_a_process_that_does_more_than_is_sent_is_named_until_what_came_of_it_was_read(
    call: Callable[..., Any],
) -> None:
    async with watched(SETTINGS) as watching:
        async with flooding(call, "open and close") as flood:
            await watching.seen.until(lambda: f": {flood.pid} (" in _newest(watching).incomplete_because)
            named = _newest(watching)
            assert not named.complete
        await watching.seen.until(lambda: _newest(watching).complete)
        row = await watching.counters(flood.pid)
        # Another process may exceed its share of a full ring too.
        assert 0 < row.unsent <= watching.probe.read_statistics().unsent
        assert watching.probe.read_statistics().lost == 0


async def test_a_process_that_changes_its_descriptors_in_a_loop_is_logged(
    call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(SETTINGS, many_scans=2, logged_ns=4 * SETTINGS.rescan_ns)
    async with watched(settings), flooding(call, "dup2") as flood:
        await until(lambda: f"Process {flood.pid} changes its descriptors in a loop" in caplog.text)


async def test_a_close_that_ends_a_file_costs_no_scan(call: Callable[..., Any]) -> None:
    async with watched(SETTINGS) as watching:
        await call(OPENED + "wait()\n")
        await watching.settled_usage()
        # A process that starts gives reasons for scans, the later ones of which are paced.
        await until(lambda: not watching.is_scan_due)
        scans = watching.probe.config.scan
        code = "for _ in range(int(sys.argv[2])): os.close(os.open(sys.argv[1], os.O_RDWR))\nwait()\n"
        await call(code, 200)
        await watching.settled_usage()

        assert not watching.is_scan_due
        assert watching.probe.config.scan == scans
