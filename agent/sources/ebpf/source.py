"""Emits which processes really use each GPU: feeds a tracker from the kernel's probe, or from /proc alone.

Guarantees:

1. The probe is loaded once in the life of the process. Where that fails, its error code is emitted and /proc
   is read instead, which finds the holders of GPUs but no contexts; nothing else of the agent waits for it.
2. Events are evaluated within ``settings.gap_ns``. A scan finds the holders of files after events that may
   have moved them (a fork, an exit, a close of a file that stays open), for one pod at most every
   ``settings.rescan_ns``, and at least every ``settings.scan_ns``. Then all processes are read
   again, since their names and states change.
3. Events that the kernel lost make the usage snapshot incomplete until it is rebuilt from the
   kernel's own table, within one poll. A process with more events than the kernel sends is named, and the
   table is read for it, too, every ``settings.rescan_ns``; the others stay complete.
4. A usage snapshot is emitted when it changed, at most once in ``settings.gap_ns``, and every
   ``settings.publish_ns``.
5. Nothing here blocks the loop: one thread does the blocking calls, one at a time.
6. While nothing happens, a poll reads a few numbers and makes no snapshot. Under load the pauses grow
   with the work, up to a poll: it takes at most one tenth of the time.
7. A process that exited is removed from the kernel's table once that was emitted, so that the table has room
   for living ones.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from agent.bus import Inbox, Latest
from agent.core.usage.gpu_map import GpuMap
from agent.core.usage.pods import MACHINE, Hierarchy
from agent.core.usage.processes import OpenFilesByProcess, by_process
from agent.core.usage.rows import Rows, live_rows
from agent.core.usage.scan_pace import ScanPace
from agent.core.usage.tracker import Tracker
from agent.errors import ProbeLoadError
from agent.log import about
from agent.model.facts import DeviceCallsSeen, Fact, GpuUseSeen, ProbeSeen
from agent.model.ids import GpuUuid
from agent.model.policy import SECOND_NS
from agent.model.rm import LAST, RmEvent, RmEventKind
from agent.model.snapshot import Snapshot
from agent.model.structs import replace
from agent.model.usage import DeviceCall, ProbeView, ProcessKey, ProcessStatus, Usage, UsageSource
from agent.probe import kernel, procfs
from agent.probe.kernel import Majors
from agent.probe.loading import load
from agent.probe.probe import Probe, Readiness
from agent.probe.procfs import Scan
from agent.probe.request import Request
from agent.sources.ebpf.process_exits import ProcessExits
from agent.sources.ebpf.reading import (
    StaleRows,
    Unseen,
    evaluate_calls,
    forget,
    has_exited,
    map_of,
    read,
    view_of,
)
from agent.sources.ebpf.rounds import EbpfSettings, Losses, Rounds
from agent.sources.ebpf.scheduler import StepScheduler
from agent.sources.ebpf.unsent import PostponedScans, Unsent
from agent.sources.processes import NoReading, read_process
from agent.threads import DaemonThread

Tier = Literal["auto", "driver", "syscalls", "procfs"]

READINGS_AT_ONCE: Final = 256
"""Readings that are applied without a pause: about 2 ms."""
REFRESHED_AT_ONCE: Final = 64
"""Processes whose records are refreshed without a pause: about 2 ms."""
MAX_REFRESHES: Final = 1_024
MAX_BATCHES: Final = 64
"""Batches of events that are read at the end of a scan: twice what the ring holds."""

_log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """The holders that a scan found, and the driver's device numbers that it used."""

    held: OpenFilesByProcess
    files: frozenset[int]
    unseen: str
    majors: Majors


def _found(scan: Scan, majors: Majors) -> _Found:
    return _Found(by_process(scan.held), frozenset(each.file for each in scan.held), scan.unseen, majors)


def _is_end(event: RmEvent) -> bool:
    """Return whether an event is the end of an open file."""
    is_last = event.kind is RmEventKind.CLOSE and event.detail == LAST
    return is_last or event.kind is RmEventKind.RELEASE


class EbpfSource:
    """Loads the probe, follows it, and emits usage snapshots."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        latest: Latest[Snapshot],
        request: Request,
        tier: Tier,
        proc_root: Path,
        agent_pid: int,
        where: Hierarchy = MACHINE,
        clock: Callable[[], int] = time.monotonic_ns,
        settings: EbpfSettings | None = None,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """``proc_root`` is where processes are read; ``request`` is how the probe is loaded."""
        self._inbox = inbox
        self._latest = latest
        self._request = request
        self._tier = tier
        self._proc_root = proc_root
        self._agent_pid = agent_pid
        self._where = where
        self._clock = clock
        self._prove = prove
        self._settings = settings or EbpfSettings()
        self._thread = DaemonThread("probe-reader")
        self._was_loaded = False
        self._probe: Probe | None = None
        self._view: ProbeView | None = None
        self._wake = asyncio.Event()
        self.rounds = Rounds()
        """What is to be done, and when it was done."""
        self._held: set[int] = set()
        """The open files that the last scan found, and those of events since."""
        self._waited_ns = 0
        """For how long the present round has only waited."""
        self._unsent, self._postponed = Unsent(self._settings, 0), PostponedScans(self._settings)
        self._sends_releases = False
        self._was_followed = False
        """The probe was followed before, so it is not new in the kernel."""
        self._majors = Majors()
        self._map = GpuMap({})
        self._published: Usage | None = None
        self._unseen = Unseen()
        self._exiting: dict[ProcessKey, ProcessStatus | NoReading | None] = {}
        """The processes that began to exit, with their last readings."""
        self._ended_since: set[ProcessKey] = set()
        """The processes that exited since the last round started."""
        self._may_have_ended = True
        """There may be more processes that exited in the kernel's table."""
        self._calls: dict[GpuUuid, DeviceCall] = {}
        self._tracker = Tracker(self._map)
        self._scheduler = StepScheduler()
        self._exits = ProcessExits(proc_root, self._handle_exit, self._settings.max_watched)
        self.last_sign_ns: int | None = None
        """When the last round completed."""

    @property
    def probe(self) -> Probe | None:
        """The probe while it is in the kernel."""
        return self._probe

    async def run(self) -> None:
        """Follow until cancelled. May be run again afterwards; two at once are not allowed."""
        # A hanging thread of an earlier run must not block this one.
        self._thread.end()
        self._thread = DaemonThread("probe-reader")
        if not self._was_loaded:
            await self._load()
            self._was_loaded = True
        await self._begin()
        try:
            while True:
                began_ns = self._clock()
                await self._round()
                self.last_sign_ns = self._clock()
                self._prove()
                await self._pause(began_ns, self.last_sign_ns - began_ns - self._waited_ns)
        finally:
            self._exits.close()
            if self._probe is not None:
                self._probe.ring.unsubscribe()

    def request_scan(self) -> None:
        """Scan in the next round, which begins soon."""
        self._happened(scan=True)

    def close(self) -> None:
        """Remove the probe from the kernel, when the thread is done with it."""
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.ring.unsubscribe()
            try:
                self._thread.post(probe.close)
            except RuntimeError:  # no thread can be started
                probe.close()
        self._thread.end()

    # The probe

    async def _load(self) -> None:
        if self._tier == "procfs":
            self._show(ProbeView("disabled", tier="procfs", code="not_wanted", message="Only /proc is read"))
            return
        self._show(ProbeView("loading"))
        try:
            probe = self._probe = await load(dataclasses.replace(self._request, tier=self._tier))
        except ProbeLoadError as error:
            self._show(ProbeView("disabled", tier="procfs", code=error.code, message=str(error)))
            _log.warning(
                "The probe is off (%(code)s), so holders of GPUs are read from /proc: %(reason)s",
                about(code=error.code, reason=str(error)),
            )
            _log.debug("Output of the probe's loader: %(detail)s", about(detail=error.detail))
            return
        self._show(view_of(probe))
        _log.info(
            "The probe is attached: tier %(tier)s, loader %(loader)s",
            about(tier=probe.tier, loader=probe.loader, missing=sorted(probe.missing)),
        )

    async def _load_anew(self, old: Probe) -> None:
        """Replace a probe by one of the tier that the present driver needs."""
        try:
            probe = await load(dataclasses.replace(self._request, tier="auto"), instead_of=old)
        except ProbeLoadError as error:
            due_ns = self._clock() + self._settings.reload_ns
            self.rounds = replace(self.rounds, reload_due_ns=due_ns)
            _log.warning(
                "The probe stays at tier %(tier)s although the driver needs another: %(reason)s; "
                "retrying in %(retry_s)d s",
                about(
                    tier=old.tier,
                    code=error.code,
                    reason=str(error),
                    retry_s=self._settings.reload_ns // SECOND_NS,
                ),
            )
            return
        old.ring.unsubscribe()
        self._probe = probe
        self._show(view_of(probe))
        _log.info(
            "The probe was reloaded for the present driver: tier %(tier)s",
            about(tier=probe.tier, loader=probe.loader, missing=sorted(probe.missing)),
        )
        self._thread.post(old.close)
        await self._begin()

    def _show(self, view: ProbeView) -> None:
        if view != self._view:
            self._view = view
            self._inbox.put(ProbeSeen(view))

    async def _begin(self) -> None:
        """Start with an empty tracker: the kernel's table has what happened before."""
        probe = self._probe
        source: UsageSource = "proc" if probe is None else "probe"
        self._majors = await self._thread.do(self._read_majors)
        self._map = map_of(self._latest.value, self._majors)
        self._tracker = Tracker(
            self._map,
            source=source,
            agent_pid=self._agent_pid,
            pace=ScanPace(self._settings.rescan_ns),
            was_kept=self._was_followed or (probe is not None and probe.was_kept),
            bounds=self._settings.tables,
        )
        self._was_followed = True
        self._scheduler = StepScheduler()
        self.rounds = self.rounds.begin(0 if probe is None else probe.read_statistics().lost)
        self._published, self._exiting, self._unseen = None, {}, Unseen()
        self._held, self._ended_since = set(), set()
        if probe is not None:
            self._unsent = Unsent(self._settings, probe.read_statistics().unsent)
            self._tracker.handle_lost_events(0)
            probe.ring.subscribe(asyncio.get_running_loop(), self._handle_events)

    def _handle_events(self, events: list[RmEvent]) -> None:
        self._scheduler.submit(lambda: self._apply_events(events), len(events))

    def _apply_events(self, events: list[RmEvent]) -> None:
        due_ns = self._tracker.handle_events(events)
        self._held.update(event.file for event in events if event.file)
        self._held.difference_update(event.file for event in events if _is_end(event))
        # A scan rebuilds it.
        self._happened(scan=len(self._held) > self._settings.max_held, scan_by_ns=due_ns)

    def _handle_exit(self, key: ProcessKey) -> None:
        self._scheduler.submit(lambda: self._apply_exit(key), 1)

    def _apply_exit(self, key: ProcessKey) -> None:
        self._tracker.handle_process_gone(key, self._clock())
        if len(self._ended_since) < self._settings.max_ended:
            self._ended_since.add(key)
        self._happened(scan=True)

    def _happened(self, *, scan: bool = False, scan_by_ns: int | None = None) -> None:
        self.rounds = self.rounds.happened(scan=scan, scan_by_ns=scan_by_ns)
        self._wake.set()

    # Rounds

    async def _round(self) -> None:
        """Update the usage snapshot and emit it if it changed."""
        self._waited_ns = 0
        began_ns, ended = self._clock(), frozenset(self._ended_since)
        self._ended_since.clear()
        if self._probe is not None:
            await self._follow_kernel(self._probe)
        self._follow_gpus()
        period_ns = self._settings.procfs_scan_ns if self._probe is None else self._settings.scan_ns
        if self.rounds.needs_scan(self._clock(), period_ns):
            await self._scan()
        if self.rounds.needs_readings(self._clock(), period_ns):
            self.rounds = self.rounds.reread(self._clock())
            self._tracker.mark_statuses_stale()
        is_stale, self.rounds = self.rounds.is_stale, self.rounds.snapshot()
        unlooked = self._tracker.without_status if is_stale else ()
        if is_stale:
            self._follow_exiting()
        if await self._read_processes(unlooked[: self._settings.max_readings]):
            is_stale = True
            self._follow_exiting()
        if is_stale:
            await self._exits.watch(self._tracker.living, self._tracker.holder_of)
            await self._forget(began_ns, ended)
        await self._publish(is_stale=is_stale)
        if len(unlooked) > self._settings.max_readings:
            self._happened()

    def _follow_gpus(self) -> None:
        found = map_of(self._latest.value, self._majors)
        if found != self._map:
            self._map = found
            self._tracker.set_gpus(found)
            self.rounds = self.rounds.happened()

    async def _follow_kernel(self, probe: Probe) -> None:
        if self.rounds.retries_load(self._clock()):
            self.rounds = replace(self.rounds, reload_due_ns=None)
            probe.consider_again()
        reading = await self._thread.do(lambda: read(probe))
        self._majors = reading.majors
        self._sends_releases = reading.sends_releases
        self._tracker.set_release_events(enabled=reading.sends_releases)
        self._show(view_of(probe))
        if reading.is_outdated:
            await self._load_anew(probe)
            if self._probe is not None and self._probe is not probe:
                # The copied rows are read before a scan settles the doubt about them.
                await self._rebuild(self._probe)
                return
        if reading.attached:
            # Files of the reloaded driver may have been opened and closed before.
            self._tracker.handle_lost_events(0)
        self._emit_device_calls(probe, reading.readiness)
        self.rounds, losses = self.rounds.follow(
            lost=reading.lost, unkept=reading.unkept, rejected=reading.rejected, now_ns=self._clock()
        )
        if losses.lost:
            self._tracker.handle_lost_events(losses.lost)
        if losses.is_logged:
            _log.warning(
                "Events of the probe were lost, %(total)s so far; rebuilding the usage",
                about(total=reading.lost),
            )
        await self._follow_unsent(probe, reading.unsent)
        if self._tracker.needs_rebuild:
            await self._rebuild(probe)
        await self._follow_room(probe, losses)

    async def _follow_unsent(self, probe: Probe, unsent: int) -> None:
        """Name the processes with unsent events, and read the table where these have stopped."""
        if self._unsent.has_more(unsent):
            rows = await self._thread.do(probe.read_processes)
            self._tracker.set_unsent_events(self._unsent.of_processes(rows, self._clock()))
            self.rounds = self.rounds.happened()
        elif self._unsent.is_read and self._tracker.set_unsent_events({}):
            self.rounds = self.rounds.happened()
        if self._unsent.is_due(self._clock()):
            await self._rebuild(probe)

    async def _follow_room(self, probe: Probe, losses: Losses) -> None:
        """Mark the processes of which the kernel did not keep every object."""
        if losses.is_full:
            self._tracker.handle_full_object_table()
        if losses.is_rejected:
            rows = await self._thread.do(probe.read_processes)
            self._tracker.handle_rejected_objects(
                ProcessKey(row.tgid, row.start_ticks) for row in rows if row.rejected
            )

    async def _rebuild(self, probe: Probe) -> None:
        at_ns, older = self._clock(), self._tracker.older_files

        def read_rows() -> tuple[Rows, Mapping[int, int], Mapping[ProcessKey, int]]:
            # Openings from here on send events; the rows of files opened meanwhile are newer than that.
            openings = probe.read_openings()
            minors = {ProcessKey(row.tgid, row.start_ticks): row.minors for row in probe.read_processes()}
            return live_rows(probe.read_objects(), openings, older), openings, minors

        rows, openings, minors = await self._thread.do(read_rows)
        await self._in_turn(self._tracker.rebuild_steps(rows, at_ns, openings))
        self._tracker.add_opened_devices(minors)
        self.rounds = self.rounds.happened(scan=True)

    async def _in_turn(self, steps: Iterator[None]) -> None:
        """Run something long step by step; events that arrive meanwhile are applied after it."""
        if dropped := await self._scheduler.run(steps):
            self._tracker.handle_lost_events(dropped)

    def _emit_device_calls(self, probe: Probe, readiness: Mapping[int, Readiness]) -> None:
        calls: dict[GpuUuid, DeviceCall] = {}
        for call in evaluate_calls(
            readiness,
            self._map,
            now_ns=self._clock(),
            answer_within_ns=self._request.answer_within_ns,
            stale_ns=self._settings.stale_call_ns,
        ):
            calls[call.gpu] = call.call
            if call.is_flag_wrong:
                probe.set_ready(call.minor, ready=False)
        if calls != self._calls:
            self._calls = calls
            self._inbox.put(DeviceCallsSeen(calls))

    async def _scan(self) -> None:
        self.rounds = self.rounds.scan(self._clock())
        self._postponed.follow(self._tracker, self._clock())
        at_ns = self._scan_begins()
        probe = self._probe
        found = await self._thread.do(lambda: self._scan_now(probe))
        if not self._sends_releases and not self._held <= found.files:
            # A file that is in a message is in no process's table, and open all the same.
            self._waited_ns = self._settings.confirm_ns
            await asyncio.sleep(self._waited_ns / 1e9)
            at_ns = self._scan_begins()
            self.rounds = self.rounds.scan(at_ns, again=True)
            found = await self._thread.do(lambda: self._scan_now(probe))
        self._held, self._majors = set(found.files), found.majors
        self._may_have_ended = True
        if probe is not None:
            await self._catch_up(probe)
        self._unseen.of_scan = found.unseen
        self._tracker.set_unreadable_reason(self._unseen.reason(self._tracker.without_status))
        await self._in_turn(self._tracker.apply_scan_steps(found.held, at_ns, is_whole=not found.unseen))
        self.rounds = self.rounds.happened()

    def _scan_begins(self) -> int:
        self._tracker.begin_scan()
        return self._clock()

    async def _catch_up(self, probe: Probe) -> None:
        """Handle the events up to the end of a scan, which are to be applied before it."""
        for _ in range(MAX_BATCHES):
            events = probe.ring.read()
            if not events:
                break
            self._handle_events(events)
            await asyncio.sleep(0)

    def _scan_now(self, probe: Probe | None) -> _Found:
        majors = self._read_majors()
        if probe is not None:
            scan = probe.scan()
            probe.watch(scan.held)
            return _found(scan, majors)
        doubles = self._request.doubles
        scan = procfs.scan(
            proc_root=str(self._proc_root),
            majors=majors,
            filesystem=0 if doubles is None else doubles.filesystem,
        )
        return _found(scan, majors)

    def _read_majors(self) -> Majors:
        probe = self._probe
        if probe is None:
            return kernel.majors(self._request.roots)
        return Majors(probe.config.nvidia_major, probe.config.uvm_major, probe.config.caps_major)

    def _follow_exiting(self) -> None:
        exiting = self._tracker.exiting[: self._settings.max_readings]
        self._exiting = {key: self._exiting.get(key) for key in exiting}

    async def _read_processes(self, unlooked: Sequence[ProcessKey]) -> bool:
        """Read new processes, and again those that are exiting; return whether anything changed."""
        keys = dict.fromkeys((*unlooked, *self._exiting))
        if not keys:
            return False
        readings = await self._thread.do(lambda: self._read_now(keys))
        now_ns = self._clock()
        known = self._exiting.keys() - set(unlooked)
        news = {
            key: reading
            for key, reading in readings.items()
            if key not in known or reading != self._exiting[key]
        }
        gone = [key for key, reading in readings.items() if has_exited(reading)]
        self._exiting = {key: readings[key] for key in self._exiting}
        self._unseen.apply_readings(readings)
        self._tracker.set_unreadable_reason(self._unseen.reason(self._tracker.without_status))
        there = [reading for reading in news.values() if isinstance(reading, ProcessStatus)]
        for at in range(0, len(there), READINGS_AT_ONCE):
            self._tracker.update_statuses(there[at : at + READINGS_AT_ONCE], now_ns)
            await asyncio.sleep(0)
        for key in gone:
            self._handle_exit(key)
        return bool(news or gone)

    def _read_now(self, keys: Iterable[ProcessKey]) -> dict[ProcessKey, ProcessStatus | NoReading]:
        return {key: read_process(self._proc_root, key.pid, self._where) for key in keys}

    async def _forget(self, began_ns: int, ended: frozenset[ProcessKey]) -> None:
        """Delete stale rows from the kernel's tables; this round has read the counts of their processes."""
        stale = StaleRows(self._tracker.pop_removed(), ended, began_ns if self._may_have_ended else 0)
        probe = self._probe
        if probe is not None and any(stale):
            self._may_have_ended = await self._thread.do(
                lambda: forget(probe, stale, self._settings.max_ended)
            )
            if self._may_have_ended:
                self._happened()

    async def _publish(self, *, is_stale: bool) -> None:
        """Emit the usage snapshot if it changed, or if the last one is old."""
        now_ns, last = self._clock(), self._published
        is_due = self.rounds.must_publish(now_ns, self._settings)
        if not is_stale and not is_due:
            return
        for _ in range(MAX_REFRESHES):
            if not self._tracker.refresh(REFRESHED_AT_ONCE):
                break
            await asyncio.sleep(0)
        usage = (
            self._tracker.usage_snapshot(now_ns) if last is None or is_stale else replace(last, at_ns=now_ns)
        )
        if is_due or last is None or replace(usage, at_ns=last.at_ns) != last:
            self._published = usage
            self.rounds = replace(self.rounds, published_ns=now_ns)
            self._inbox.put(GpuUseSeen(usage))

    async def _pause(self, began_ns: int, took_ns: int) -> None:
        """Wait for something to do, at most a poll, and at least the gap between two rounds."""
        rest_ns = self.rounds.rest_ns(began_ns, took_ns, self._clock(), self._settings)
        await asyncio.sleep(rest_ns / 1e9)
        try:
            async with asyncio.timeout(self.rounds.idle_ns(began_ns, self._clock(), self._settings) / 1e9):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
