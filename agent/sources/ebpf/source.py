"""Tells who really uses each GPU: keeps a tracker fed from the probe in the kernel, or from /proc alone.

Guarantees:

1. The probe is loaded once in the life of the process. Where it cannot be, its code is told and /proc is
   read instead, which finds who holds GPUs and nothing of contexts; nothing else of the agent waits for it.
2. What events tell is looked into within ``settings.gap_ns``. Who holds files is scanned for after what may
   have moved them (a fork, an exit, a close of a file that lives on), where one pod asks often at most every
   ``settings.rescan_ns`` for it, and at least every ``settings.scan_ns``. Then all processes are looked at
   again, for their names and states change.
3. Events that the kernel could not hand over make the picture incomplete until it is made anew from the
   kernel's own table, which is done within one poll. A process that does more than the kernel tells event by
   event is named, and what it did is read there, too, every ``settings.rescan_ns``; nobody else is in doubt.
4. A picture is told when it changed, at most once in ``settings.gap_ns``, and every ``settings.tell_ns``.
5. Nothing here blocks the loop: what blocks is done by one thread, one thing at a time.
6. While nothing happens, a poll reads a few numbers and makes no picture. While much happens, the pauses grow
   with what has to be done, up to a poll: at most one tenth of the time is spent on it.
7. Who ended is taken out of the kernel's table once that was told, so that it is full of the living alone.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

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
from agent.model.policy import MILLISECOND_NS, SECOND_NS
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
from agent.sources.ebpf.process_exits import ProcessEnds
from agent.sources.ebpf.reading import MAX_ENDED, Over, Reading, forget, judged_calls, map_of, read, view_of
from agent.sources.ebpf.scheduler import Turns
from agent.sources.ebpf.unseen import Unseen, has_ended
from agent.sources.ebpf.unsent import Unsent
from agent.sources.processes import NoReading, read_process
from agent.threads import DaemonThread

Tier = Literal["auto", "driver", "syscalls", "procfs"]

MAX_LOOKS: Final = 4_096
"""Processes that are looked at in one round; the others in the next."""
LOSS_LOGGED_NS: Final = 30 * SECOND_NS
"""Losses are logged at most once in this time; all of them are in the picture."""
LOOKS_AT_ONCE: Final = 256
"""Looks that are taken without a pause: about 2 ms."""
REFRESHED_AT_ONCE: Final = 64
"""Processes whose records are made without a pause: about 2 ms."""
MAX_REFRESHES: Final = 1_024
MAX_HELD: Final = 65_536
"""Open files that are kept from scan to scan; with more there is one at once."""
MAX_BATCHES: Final = 64
"""Of events that are taken at the end of a scan: twice what the ring holds."""
PAUSE_RATIO: Final = 10
"""The time from one round to the next is at least so many times that which the round took, up to a poll."""

_log = logging.getLogger(__name__)


class EbpfSettings(msgspec.Struct, frozen=True):
    """Times of the source, in nanoseconds."""

    poll_ns: int = SECOND_NS
    """Between two looks at what tells nothing by itself: losses, a driver that was loaded anew."""
    gap_ns: int = 100 * MILLISECOND_NS
    """Between two rounds."""
    scan_ns: int = 30 * SECOND_NS
    rescan_ns: int = SECOND_NS
    """Between two scans that the same pod is the reason for, after the first few."""
    procfs_scan_ns: int = 10 * SECOND_NS
    """Without the probe, which costs more and is all there is."""
    tell_ns: int = 10 * SECOND_NS
    confirm_ns: int = 50 * MILLISECOND_NS
    """Until a second look for a file that nobody has any more: it may be on its way to another process."""
    reload_ns: int = 60 * SECOND_NS
    """Until another try, where the probe could not be loaded for another driver."""
    stale_call_ns: int = 60 * SECOND_NS
    """A device that the agent has not called for so long is not known to answer."""


class _Found(NamedTuple):
    """What a scan found, and the driver's device numbers as it knew them."""

    held: OpenFilesByProcess
    files: frozenset[int]
    unseen: str
    majors: Majors


def _found(scan: Scan, majors: Majors) -> _Found:
    return _Found(by_process(scan.held), frozenset(each.file for each in scan.held), scan.unseen, majors)


def _is_end(event: RmEvent) -> bool:
    """Return whether an event tells the end of a file."""
    is_last = event.kind is RmEventKind.CLOSE and event.detail == LAST
    return is_last or event.kind is RmEventKind.RELEASE


class EbpfSource:
    """Loads the probe, follows it, and tells pictures of who uses the driver."""

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
        """``proc_root`` is where processes are looked at; ``request`` says how the probe is loaded."""
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
        self._wants_scan = True
        self._scan_due_ns: int | None = None
        """When a scan is due that somebody asked for who asks often."""
        self._scanned_ns = self._looked_ns = 0
        self._held: set[int] = set()
        """The open files that the last scan found, and those of which events told since."""
        self._waited_ns = 0
        """For how long the round that is under way has only waited."""
        self._lost = self._unkept = self._refused = 0
        self._unsent = Unsent(self._settings.rescan_ns, 0)
        self._tells_releases = False
        self._reload_due_ns: int | None = None
        """When loading for another driver, which failed, is tried again."""
        self._loss_logged_ns: int | None = None
        self._was_followed = False
        """The picture of the probe was made before, so that it is not new in the kernel."""
        self._majors = Majors()
        self._map = GpuMap({})
        self._told: Usage | None = None
        self._is_stale = True
        """Something happened since the last picture was made."""
        self._unseen = Unseen()
        self._ending: dict[ProcessKey, ProcessStatus | NoReading | None] = {}
        """The processes that began to end, as they were when they were looked at last."""
        self._ended_since: set[ProcessKey] = set()
        """The processes whose end was told since the last round began."""
        self._may_have_ended = True
        """There may be more processes that ended in the kernel's table."""
        self._calls: dict[GpuUuid, DeviceCall] = {}
        self._tracker = Tracker(self._map)
        self._turns = Turns()
        self._ends = ProcessEnds(proc_root, self._ended)
        self.last_sign_ns: int | None = None
        """When the last round ended."""

    @property
    def probe(self) -> Probe | None:
        """The probe while it is in the kernel."""
        return self._probe

    async def run(self) -> None:
        """Follow for ever. May be run again after it ended; two at once are not allowed."""
        # What the thread of an earlier run hangs in does not keep this one.
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
            self._ends.close()
            if self._probe is not None:
                self._probe.ring.unsubscribe()

    def close(self) -> None:
        """Take the probe out of the kernel, when the thread is done with it."""
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.ring.unsubscribe()
            try:
                self._thread.post(probe.close)
            except RuntimeError:  # no thread can be had
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
            _log.debug("The probe's loader said: %(detail)s", about(detail=error.detail))
            return
        self._show(view_of(probe))
        _log.info(
            "The probe is attached: tier %(tier)s, loader %(loader)s",
            about(tier=probe.tier, loader=probe.loader, missing=sorted(probe.missing)),
        )

    async def _load_anew(self, old: Probe) -> None:
        """Load a probe of the tier that suits the driver that is there now, in the place of another."""
        try:
            probe = await load(dataclasses.replace(self._request, tier="auto"), instead_of=old)
        except ProbeLoadError as error:
            self._reload_due_ns = self._clock() + self._settings.reload_ns
            _log.warning(
                "The probe stays at tier %(tier)s although the driver wants another: %(reason)s; "
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
            "The probe was loaded anew for the driver that is there now: tier %(tier)s",
            about(tier=probe.tier, loader=probe.loader, missing=sorted(probe.missing)),
        )
        self._thread.post(old.close)
        await self._begin()

    def _show(self, view: ProbeView) -> None:
        if view != self._view:
            self._view = view
            self._inbox.put(ProbeSeen(view))

    async def _begin(self) -> None:
        """Begin a picture anew: what happened while nobody followed is in the kernel's table."""
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
        )
        self._was_followed = True
        self._turns = Turns()
        self._wants_scan = self._is_stale = True
        self._scan_due_ns = None
        self._told, self._ending, self._unseen = None, {}, Unseen()
        self._held, self._ended_since = set(), set()
        if probe is not None:
            statistics = probe.read_statistics()
            self._lost, self._unsent = statistics.lost, Unsent(self._settings.rescan_ns, statistics.unsent)
            self._unkept = self._refused = 0
            self._tracker.handle_lost_events(0)
            probe.ring.subscribe(asyncio.get_running_loop(), self._take)

    def _take(self, events: list[RmEvent]) -> None:
        self._turns.tell(lambda: self._take_now(events), len(events))

    def _take_now(self, events: list[RmEvent]) -> None:
        due_ns = self._tracker.handle_events(events)
        if due_ns is not None:
            self._scan_due_ns = min(due_ns, self._scan_due_ns or due_ns)
        self._held.update(event.file for event in events if event.file)
        self._held.difference_update(event.file for event in events if _is_end(event))
        # A scan begins it anew.
        self._wants_scan |= len(self._held) > MAX_HELD
        self._happened()

    def _ended(self, key: ProcessKey) -> None:
        self._turns.tell(lambda: self._ended_now(key), 1)

    def _ended_now(self, key: ProcessKey) -> None:
        self._tracker.handle_process_gone(key, self._clock())
        if len(self._ended_since) < MAX_ENDED:
            self._ended_since.add(key)
        self._wants_scan = True
        self._happened()

    def _happened(self) -> None:
        self._is_stale = True
        self._wake.set()

    # Rounds

    async def _round(self) -> None:
        """Bring the picture up to date and tell it if it is another one."""
        self._waited_ns = 0
        began_ns, ended = self._clock(), frozenset(self._ended_since)
        self._ended_since.clear()
        if self._probe is not None:
            await self._follow_kernel(self._probe)
        self._follow_gpus()
        period_ns = self._settings.procfs_scan_ns if self._probe is None else self._settings.scan_ns
        now_ns = self._clock()
        is_due = self._scan_due_ns is not None and self._scan_due_ns <= now_ns
        if self._wants_scan or is_due or now_ns - self._scanned_ns >= period_ns:
            await self._scan()
        if self._clock() - self._looked_ns >= period_ns:
            self._looked_ns = self._clock()
            self._tracker.mark_statuses_stale()
            self._is_stale = True
        # What happens from here on is for the next round.
        is_stale, self._is_stale = self._is_stale, False
        unlooked = self._tracker.without_status if is_stale else ()
        if is_stale:
            self._follow_ending()
        if await self._look(unlooked[:MAX_LOOKS]):
            is_stale = True
            self._follow_ending()
        if is_stale:
            await self._ends.watch(self._tracker.living, self._tracker.holder_of)
            await self._forget(began_ns, ended)
        await self._tell(is_stale=is_stale)
        if len(unlooked) > MAX_LOOKS:
            self._happened()

    def _follow_gpus(self) -> None:
        found = map_of(self._latest.value, self._majors)
        if found != self._map:
            self._map = found
            self._tracker.set_gpus(found)
            self._is_stale = True

    async def _follow_kernel(self, probe: Probe) -> None:
        if self._reload_due_ns is not None and self._clock() >= self._reload_due_ns:
            self._reload_due_ns = None
            probe.consider_again()
        reading = await self._thread.do(lambda: read(probe))
        self._majors = reading.majors
        self._tells_releases = reading.tells_releases
        self._tracker.set_release_events(enabled=reading.tells_releases)
        self._show(view_of(probe))
        if reading.is_outdated:
            await self._load_anew(probe)
            if self._probe is not None and self._probe is not probe:
                # The rows that were copied are read before a scan ends the doubt about them.
                await self._rebuild(self._probe)
                return
        if reading.attached:
            # Files of the driver that was loaded anew may have come and gone before.
            self._tracker.handle_lost_events(0)
        self._tell_device_calls(probe, reading.readiness)
        if reading.lost > self._lost:
            self._tracker.handle_lost_events(reading.lost - self._lost)
            self._lost = reading.lost
            self._log_loss()
        await self._follow_unsent(probe, reading.unsent)
        if self._tracker.needs_rebuild:
            await self._rebuild(probe)
        await self._follow_room(probe, reading)

    async def _follow_unsent(self, probe: Probe, unsent: int) -> None:
        """Name who does more than is told, and read what came of it where there is nothing more of that."""
        if self._unsent.has_more(unsent):
            rows = await self._thread.do(probe.read_processes)
            self._tracker.set_unsent_events(self._unsent.of_processes(rows, self._clock()))
            self._is_stale = True
        elif self._unsent.is_read and self._tracker.set_unsent_events({}):
            self._is_stale = True
        if self._unsent.is_due(self._clock()):
            await self._rebuild(probe)

    async def _follow_room(self, probe: Probe, reading: Reading) -> None:
        """Tell of whom the kernel did not keep everything."""
        if reading.unkept > self._unkept:
            self._unkept = reading.unkept
            self._tracker.handle_full_object_table()
            self._is_stale = True
        if reading.refused > self._refused:
            self._refused = reading.refused
            rows = await self._thread.do(probe.read_processes)
            self._tracker.handle_rejected_objects(
                ProcessKey(row.tgid, row.start_ticks) for row in rows if row.refused
            )
            self._is_stale = True

    async def _rebuild(self, probe: Probe) -> None:
        at_ns, older = self._clock(), self._tracker.older_files

        def read_rows() -> tuple[Rows, Mapping[int, int], Mapping[ProcessKey, int]]:
            # What is opened from here on is told; the rows of what is opened meanwhile are newer than that.
            openings = probe.read_openings()
            minors = {ProcessKey(row.tgid, row.start_ticks): row.minors for row in probe.read_processes()}
            return live_rows(probe.read_objects(), openings, older), openings, minors

        rows, openings, minors = await self._thread.do(read_rows)
        await self._in_turn(self._tracker.rebuild_steps(rows, at_ns, openings))
        self._tracker.add_opened_devices(minors)
        self._wants_scan = True

    async def _in_turn(self, steps: Iterator[None]) -> None:
        """Take something long step by step; what happens meanwhile is told after it."""
        if unheard := await self._turns.take(steps):
            self._tracker.handle_lost_events(unheard)

    def _log_loss(self) -> None:
        now_ns = self._clock()
        if self._loss_logged_ns is None or now_ns - self._loss_logged_ns >= LOSS_LOGGED_NS:
            self._loss_logged_ns = now_ns
            _log.warning(
                "Events of the probe were lost, %(total)s so far; the usage is read anew",
                about(total=self._lost),
            )

    def _tell_device_calls(self, probe: Probe, readiness: Mapping[int, Readiness]) -> None:
        calls: dict[GpuUuid, DeviceCall] = {}
        for call in judged_calls(
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
        self._wants_scan, self._scan_due_ns = False, None
        at_ns = self._scanned_ns = self._scan_begins()
        probe = self._probe
        found = await self._thread.do(lambda: self._scan_now(probe))
        if not self._tells_releases and not self._held <= found.files:
            # What is in a message is in nobody's table, and lives all the same.
            self._waited_ns = self._settings.confirm_ns
            await asyncio.sleep(self._waited_ns / 1e9)
            at_ns = self._scanned_ns = self._scan_begins()
            found = await self._thread.do(lambda: self._scan_now(probe))
        self._held, self._majors = set(found.files), found.majors
        self._may_have_ended = True
        if probe is not None:
            await self._catch_up(probe)
        self._unseen.of_scan = found.unseen
        self._tracker.set_unreadable_reason(self._unseen.why(self._tracker.without_status))
        await self._in_turn(self._tracker.apply_scan_steps(found.held, at_ns, is_whole=not found.unseen))
        self._is_stale = True

    def _scan_begins(self) -> int:
        self._tracker.begin_scan()
        return self._clock()

    async def _catch_up(self, probe: Probe) -> None:
        """Take what happened up to the end of a scan, which is to be told before it."""
        for _ in range(MAX_BATCHES):
            events = probe.ring.read()
            if not events:
                break
            self._take(events)
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

    def _follow_ending(self) -> None:
        self._ending = {key: self._ending.get(key) for key in self._tracker.exiting[:MAX_LOOKS]}

    async def _look(self, unlooked: Sequence[ProcessKey]) -> bool:
        """Look at processes that are new, and again at those that are ending; return whether that is news."""
        keys = dict.fromkeys((*unlooked, *self._ending))
        if not keys:
            return False
        looks = await self._thread.do(lambda: self._look_at(keys))
        now_ns = self._clock()
        known = self._ending.keys() - set(unlooked)
        news = {key: look for key, look in looks.items() if key not in known or look != self._ending[key]}
        gone = [key for key, look in looks.items() if has_ended(look)]
        self._ending = {key: looks[key] for key in self._ending}
        self._unseen.looked(looks)
        self._tracker.set_unreadable_reason(self._unseen.why(self._tracker.without_status))
        there = [look for look in news.values() if isinstance(look, ProcessStatus)]
        for at in range(0, len(there), LOOKS_AT_ONCE):
            self._tracker.update_statuses(there[at : at + LOOKS_AT_ONCE], now_ns)
            await asyncio.sleep(0)
        for key in gone:
            self._ended(key)
        return bool(news or gone)

    def _look_at(self, keys: Iterable[ProcessKey]) -> dict[ProcessKey, ProcessStatus | NoReading]:
        return {key: read_process(self._proc_root, key.pid, self._where) for key in keys}

    async def _forget(self, began_ns: int, ended: frozenset[ProcessKey]) -> None:
        """Take out of the kernel's tables what is over; of whom this round has read what they counted."""
        over = Over(self._tracker.pop_removed(), ended, began_ns if self._may_have_ended else 0)
        probe = self._probe
        if probe is not None and any(over):
            self._may_have_ended = await self._thread.do(lambda: forget(probe, over))
            if self._may_have_ended:
                self._happened()

    async def _tell(self, *, is_stale: bool) -> None:
        """Tell the picture if it is another one, or if it was not told for long."""
        now_ns, told = self._clock(), self._told
        is_due = told is None or now_ns - told.at_ns >= self._settings.tell_ns
        if not is_stale and not is_due:
            return
        for _ in range(MAX_REFRESHES):
            if not self._tracker.refresh(REFRESHED_AT_ONCE):
                break
            await asyncio.sleep(0)
        usage = (
            self._tracker.usage_snapshot(now_ns) if told is None or is_stale else replace(told, at_ns=now_ns)
        )
        if is_due or told is None or replace(usage, at_ns=told.at_ns) != told:
            self._told = usage
            self._inbox.put(GpuUseSeen(usage))

    async def _pause(self, began_ns: int, took_ns: int) -> None:
        """Wait for something to do, at most a poll, and never less than is due between two rounds."""
        poll_ns = self._settings.poll_ns
        least_ns = max(self._settings.gap_ns, min(poll_ns, PAUSE_RATIO * took_ns))
        await asyncio.sleep(max(0, began_ns + least_ns - self._clock()) / 1e9)
        until_ns = min(began_ns + poll_ns, self._scan_due_ns or began_ns + poll_ns)
        try:
            async with asyncio.timeout(max(0, until_ns - self._clock()) / 1e9):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
