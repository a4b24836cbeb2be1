"""The probe, the tracker and the source that drives both, on a double of the driver: what they show."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from agent.bus import Latest
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.core.usage.gpu_map import GpuMap
from agent.core.usage.tracker import Tracker
from agent.model.facts import GpuUseSeen, ProbeSeen
from agent.model.health import Health
from agent.model.ids import GpuUuid
from agent.model.policy import MILLISECOND_NS, Policy
from agent.model.rm import ProcessCounters
from agent.model.snapshot import DriverView, GpuView, Snapshot
from agent.model.structs import replace
from agent.model.usage import Usage
from agent.probe.probe import Probe
from agent.probe.request import Request
from agent.simulation.driver_double.double import Books
from agent.simulation.driver_double.nodes import Gpu
from agent.sources.ebpf.rounds import EbpfSettings
from agent.sources.ebpf.source import EbpfSource, Tier
from agent.threads import in_daemon_thread
from tests.core.build import gpu as built_gpu
from tests.sources.recorder import PATIENCE_S, Recorder

ROUNDS = 4
"""After so many rounds nothing that happened before is on its way any more."""
POLL_S = 0.005
SETTINGS = EbpfSettings(
    poll_ns=20 * MILLISECOND_NS, gap_ns=5 * MILLISECOND_NS, rescan_ns=MILLISECOND_NS, publish_ns=0
)

Live = dict[int, dict[str, int]]
"""Live contexts by UUID, of each process that made them."""


def as_books_have_it(books: Books, gpus: tuple[Gpu, ...]) -> Live:
    uuids = {gpu.minor: gpu.uuid for gpu in gpus}
    live: Live = {}
    for context in books.contexts:
        assert context.minor is not None
        of_process = live.setdefault(context.pid, {})
        of_process[uuids[context.minor]] = of_process.get(uuids[context.minor], 0) + 1
    return live


def as_snapshot_has_it(usage: Usage) -> Live:
    live: Live = {}
    for process in usage.processes:
        assert not process.unplaced
        for hold in process.holds:
            if hold.contexts:
                live.setdefault(process.key.pid, {})[hold.gpu] = hold.contexts
    for orphan in usage.orphans:
        if orphan.contexts:
            live.setdefault(orphan.owner.key.pid, {})[str(orphan.gpu)] = orphan.contexts
    return live


def by_process(usage: Usage) -> dict[int, int]:
    """Contexts of living processes, also where no file shows any more which GPUs they had open."""
    sums = {
        process.key.pid: process.unplaced + sum(hold.contexts or 0 for hold in process.holds)
        for process in usage.processes
    }
    return {pid: contexts for pid, contexts in sums.items() if contexts}


class Double(Protocol):
    """A double of the driver, with books of its own."""

    @property
    def folder(self) -> Path:
        """Where its nodes are."""

    async def books(self) -> Books:
        """What it knows."""


class Watcher:
    """Follows the double; each answer is given after the snapshot has settled."""

    def __init__(
        self,
        double: Double,
        gpus: tuple[Gpu, ...],
        source: EbpfSource,
        seen: Recorder,
        running: asyncio.Task[None],
    ) -> None:
        self._double = double
        self._gpus = gpus
        self._source = source
        self.seen = seen
        """Every fact that the source emitted."""
        self._running = running

    @property
    def probe(self) -> Probe:
        """What is in the kernel."""
        assert self._source.probe is not None
        return self._source.probe

    @property
    def is_scan_due(self) -> bool:
        """Whether it has a reason for a scan, now or later."""
        rounds = self._source.rounds
        return rounds.wants_scan or rounds.scan_due_ns is not None

    async def settled_usage(self) -> Usage:
        """Return the usage snapshot after every event so far."""
        signs: set[int | None] = {self._source.last_sign_ns}
        async with asyncio.timeout(PATIENCE_S):
            while len(signs) <= ROUNDS or not self.seen.of(GpuUseSeen):
                if self._running.done():
                    self._running.result()
                # A round without changes emits nothing.
                await asyncio.sleep(POLL_S)
                signs.add(self._source.last_sign_ns)
        return self.seen.of(GpuUseSeen)[-1].usage

    async def agrees(self) -> Live:
        """Assert that the usage snapshot matches the driver's books, and one made from the maps alone, too.

        The maps do not show processes that exited, so the second snapshot is compared without these.
        """
        usage = await self.settled_usage()
        expected = as_books_have_it(await self._double.books(), self._gpus)
        assert usage.complete, usage.incomplete_because
        shown = as_snapshot_has_it(usage)
        assert shown == expected, f"the snapshot has {shown}, the books have {expected}"
        living = {use.key.pid for use in usage.processes}
        of_living = {pid: sum(contexts.values()) for pid, contexts in expected.items() if pid in living}
        anew = by_process(await self._made_anew(usage))
        assert anew == of_living, f"rebuilt it has {anew}, the books have {of_living}"
        return expected

    async def counters(self, pid: int) -> ProcessCounters:
        """What the kernel counted of a process."""
        rows = await in_daemon_thread("test-read", self.probe.read_processes)
        return next(row for row in rows if row.tgid == pid)

    async def _made_anew(self, usage: Usage) -> Usage:
        openings = await in_daemon_thread("test-read", self.probe.read_openings)
        rows = await in_daemon_thread("test-read", self.probe.read_objects)
        scan = await in_daemon_thread("test-scan", self.probe.scan)
        tracker = Tracker(
            GpuMap({gpu.minor: GpuUuid(gpu.uuid) for gpu in self._gpus}, _instances(self._gpus))
        )
        now_ns = time.monotonic_ns()
        tracker.handle_lost_events(0)
        tracker.rebuild(rows, now_ns, openings)
        tracker.apply_scan(scan.held, now_ns)
        tracker.update_statuses([use.status for use in usage.processes], now_ns)
        return tracker.usage_snapshot(now_ns)


def _instances(gpus: tuple[Gpu, ...]) -> dict[int, GpuUuid]:
    return {gpu.instance: GpuUuid(gpu.uuid) for gpu in gpus}


def snapshot_of_gpus(gpus: tuple[Gpu, ...], *, has_instances: bool = False) -> Snapshot:
    """What the core shows while NVML lists these GPUs; with their device instances, or without."""
    views = tuple(
        GpuView(
            replace(
                built_gpu(number, minor=gpu.minor),
                uuid=GpuUuid(gpu.uuid),
                device_instance=gpu.instance if has_instances else None,
            ),
            Health.HEALTHY,
            present=True,
            conditions=(),
            xids={},
        )
        for number, gpu in enumerate(gpus)
    )
    empty = snapshot_of(initial_state(Policy(), None, now_ns=0))
    return replace(empty, driver=DriverView(ready=True), gpus=views)


@contextlib.asynccontextmanager
async def watching(
    double: Double,
    gpus: tuple[Gpu, ...],
    request: Request,
    *,
    tier: Tier = "syscalls",
    has_instances: bool = False,
    settings: EbpfSettings = SETTINGS,
) -> AsyncIterator[Watcher]:
    """Load the probe and follow the double."""
    seen = Recorder()
    source = EbpfSource(
        inbox=seen.inbox,
        latest=Latest(snapshot_of_gpus(gpus, has_instances=has_instances)),
        request=request,
        tier=tier,
        proc_root=Path("/proc"),
        agent_pid=os.getpid(),
        settings=settings,
    )
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(seen.run()), loop.create_task(source.run())]
    try:
        view = (await seen.first(ProbeSeen, lambda fact: fact.probe.state != "loading")).probe
        assert view.state == "running", view.message
        yield Watcher(double, gpus, source, seen, tasks[1])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        source.close()
