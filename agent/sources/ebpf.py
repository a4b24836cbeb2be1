"""Tells who really uses each GPU: keeps a tracker fed from the probe in the kernel, or from /proc alone.

Guarantees:

1. The probe is loaded once in the life of the process. Where it cannot be, its code is told and /proc is
   read instead, which finds who holds GPUs and nothing of contexts; nothing else of the agent waits for it.
2. What events tell is scanned for within ``settings.gap_ns``; who holds files is scanned for after every
   close, fork and exit of a process that has any, and at least every ``settings.scan_ns``.
3. Events that the kernel could not hand over make the picture incomplete until it is made anew from the
   kernel's own table, which is done within one poll.
4. A picture is told when it changed, at most once in ``settings.gap_ns``, and every ``settings.tell_ns``.
5. Nothing here blocks the loop: scans and reads of whole tables run in one thread, one at a time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeVar

from agent.bus import Inbox, Latest
from agent.core.tracker import GpuMap, Tracker
from agent.errors import ProbeLoadError
from agent.log import fields
from agent.model.facts import DeviceCallsSeen, Fact, GpuUseSeen, ProbeSeen
from agent.model.ids import GpuUuid, Placement
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.model.rm import RmEvent
from agent.model.snapshot import Snapshot
from agent.model.usage import DeviceCall, ProbeView, ProcessKey, ProcessLook, Usage
from agent.probe import kernel, procfs
from agent.probe.loading import load
from agent.probe.probe import Probe
from agent.probe.procfs import Scan
from agent.probe.request import Request
from agent.sources.process_ends import ProcessEnds
from agent.sources.processes import look_at
from agent.threads import in_daemon_thread

Tier = Literal["auto", "driver", "syscalls", "procfs"]

STALE_CALL_NS: Final = 60 * SECOND_NS
"""A device that was not called for so long is not known to answer."""
MAX_LOOKS: Final = 4_096
"""Processes that are looked at in one round."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EbpfSettings:
    """Times of the source, in nanoseconds."""

    poll_ns: int = SECOND_NS
    """Between two looks at what tells nothing by itself: losses, a driver that was loaded anew."""
    gap_ns: int = 100 * MILLISECOND_NS
    """Between two rounds."""
    scan_ns: int = 30 * SECOND_NS
    procfs_scan_ns: int = 10 * SECOND_NS
    """Without the probe, which costs more and is all there is."""
    tell_ns: int = 10 * SECOND_NS


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
        clock: Callable[[], int] = time.monotonic_ns,
        settings: EbpfSettings | None = None,
    ) -> None:
        """``proc_root`` is where processes are looked at; ``request`` says how the probe is loaded."""
        self._inbox = inbox
        self._latest = latest
        self._request = request
        self._tier = tier
        self._proc_root = proc_root
        self._agent_pid = agent_pid
        self._clock = clock
        self._settings = settings or EbpfSettings()
        self._probe: Probe | None = None
        self._view: ProbeView | None = None
        self._wake = asyncio.Event()
        self._wants_scan = True
        self._scanned_ns = 0
        self._lost = 0
        self._map = GpuMap({})
        self._told: Usage | None = None
        self._calls: dict[GpuUuid, DeviceCall] = {}
        self._tracker = Tracker(self._map)
        self._ends = ProcessEnds(proc_root, self._ended)
        self.last_sign_ns: int | None = None
        """When the last round ended."""

    @property
    def probe(self) -> Probe | None:
        """The probe while it is in the kernel."""
        return self._probe

    async def run(self) -> None:
        """Follow for ever. May be run again after it ended; two at once are not allowed."""
        if self._view is None:
            await self._load()
        self._begin()
        try:
            while True:
                began_ns = self._clock()
                await self._round()
                self.last_sign_ns = self._clock()
                await self._pause(began_ns)
        finally:
            self._ends.close()
            if self._probe is not None:
                self._probe.ring.unsubscribe()

    def close(self) -> None:
        """Take the probe out of the kernel."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    # The probe

    async def _load(self) -> None:
        if self._tier == "procfs":
            self._show(ProbeView("disabled", tier="procfs", code="not_wanted", message="Only /proc is read"))
            return
        self._show(ProbeView("loading"))
        try:
            probe = self._probe = await load(replace(self._request, tier=self._tier))
        except ProbeLoadError as error:
            self._show(ProbeView("disabled", tier="procfs", code=error.code, message=str(error)))
            _log.warning(
                "The probe is off, holders of GPUs are read off /proc",
                extra=fields(code=error.code, reason=str(error)),
            )
            _log.debug("The probe's loader said", extra=fields(detail=error.detail))
            return
        self._show(_view_of(probe))
        _log.info(
            "The probe is attached",
            extra=fields(tier=probe.tier, loader=probe.loader, missing=sorted(probe.missing)),
        )

    def _show(self, view: ProbeView) -> None:
        if view != self._view:
            self._view = view
            self._inbox.put(ProbeSeen(view))

    def _begin(self) -> None:
        """Begin a picture anew: what happened while nobody followed is in the kernel's table."""
        self._map = _map_of(self._latest.value, self._majors().caps)
        self._tracker = Tracker(
            self._map, source="proc" if self._probe is None else "probe", agent_pid=self._agent_pid
        )
        self._wants_scan = True
        self._told = None
        if self._probe is not None:
            self._lost = self._probe.read_statistics().lost
            self._tracker.lost(0)
            self._probe.ring.subscribe(asyncio.get_running_loop(), self._take)

    def _take(self, events: list[RmEvent]) -> None:
        self._wants_scan |= self._tracker.take(events)
        self._wake.set()

    def _ended(self, key: ProcessKey) -> None:
        self._tracker.exited(key, self._clock())
        self._wants_scan = True
        self._wake.set()

    # Rounds

    async def _round(self) -> None:
        """Bring the picture up to date and tell it if it is another one."""
        self._follow_gpus()
        if self._probe is not None:
            await self._follow_kernel(self._probe)
        now_ns = self._clock()
        period_ns = self._settings.procfs_scan_ns if self._probe is None else self._settings.scan_ns
        if self._wants_scan or now_ns - self._scanned_ns >= period_ns:
            await self._scan()
        await self._look()
        await self._ends.watch(self._tracker.living)
        self._forget()
        self._tell()

    def _follow_gpus(self) -> None:
        found = _map_of(self._latest.value, self._majors().caps)
        if found != self._map:
            self._map = found
            self._tracker.gpus_are(found)
            self._wake.set()

    async def _follow_kernel(self, probe: Probe) -> None:
        # Both read files of the kernel's.
        await _in_thread(probe.refresh)
        if await _in_thread(probe.reattach):
            self._show(_view_of(probe))
        self._tell_device_calls(probe)
        lost = probe.read_statistics().lost
        if lost > self._lost:
            self._tracker.lost(lost - self._lost)
            self._lost = lost
        if self._tracker.needs_rebuild:
            at_ns = self._clock()
            rows = await _in_thread(probe.read_objects)
            self._tracker.rebuilt(rows, at_ns)
            self._wants_scan = True

    def _tell_device_calls(self, probe: Probe) -> None:
        """Tell whether the driver answers on each GPU; one whose call hangs, or is long ago, is not ready."""
        now_ns = self._clock()
        calls: dict[GpuUuid, DeviceCall] = {}
        for minor, readiness in probe.read_readiness().items():
            check, gpu = readiness.check, self._map.by_minor.get(minor)
            if gpu is None:
                continue
            age_ns = now_ns - check.entered_ns
            is_late = age_ns > (self._request.answer_within_ns if check.in_flight else STALE_CALL_NS)
            if is_late and readiness.ready:
                probe.set_ready(minor, ready=False)
            calls[gpu] = DeviceCall(readiness.ready and not is_late, check.entered_ns, check.took_ns)
        if calls != self._calls:
            self._calls = calls
            self._inbox.put(DeviceCallsSeen(calls))

    async def _scan(self) -> None:
        self._wants_scan = False
        at_ns = self._scanned_ns = self._clock()
        scan = await _in_thread(self._scan_now)
        if self._probe is not None:
            # What happened up to the end of the scan is to be told before it.
            while events := self._probe.ring.read():
                self._take(events)
            self._probe.watch(scan.held)
        self._tracker.blind("" if scan.complete else "there are more descriptors than are looked at")
        self._tracker.scanned(scan.held, at_ns)

    def _scan_now(self) -> Scan:
        if self._probe is not None:
            return self._probe.scan()
        doubles = self._request.doubles
        return procfs.scan(
            proc_root=str(self._proc_root),
            majors=self._majors(),
            filesystem=0 if doubles is None else doubles.filesystem,
        )

    async def _look(self) -> None:
        """Look at processes that are new, and at those that began to end."""
        keys = list(dict.fromkeys((*self._tracker.unlooked, *self._tracker.exiting)))[:MAX_LOOKS]
        if not keys:
            return
        looks = await _in_thread(lambda: self._look_at(keys))
        now_ns = self._clock()
        self._tracker.looked([look for look in looks.values() if look is not None], now_ns)
        for key, look in looks.items():
            if look is None:
                self._tracker.exited(key, now_ns)

    def _look_at(self, keys: Iterable[ProcessKey]) -> dict[ProcessKey, ProcessLook | None]:
        return {key: look_at(self._proc_root, key.pid) for key in keys}

    def _forget(self) -> None:
        removed = self._tracker.take_removed()
        if self._probe is not None and removed:
            self._probe.forget_objects(removed)

    def _tell(self) -> None:
        now_ns = self._clock()
        usage = self._tracker.picture(now_ns)
        told = self._told
        is_news = told is None or replace(usage, at_ns=told.at_ns) != told
        if not is_news and told is not None and now_ns - told.at_ns < self._settings.tell_ns:
            return
        self._told = usage
        self._inbox.put(GpuUseSeen(usage))

    async def _pause(self, began_ns: int) -> None:
        """Wait for something to do, at most a poll; never less than the gap between two rounds."""
        await asyncio.sleep(max(0, began_ns + self._settings.gap_ns - self._clock()) / 1e9)
        try:
            async with asyncio.timeout(max(0, began_ns + self._settings.poll_ns - self._clock()) / 1e9):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _majors(self) -> kernel.Majors:
        if self._probe is not None:
            config = self._probe.config
            return kernel.Majors(config.nvidia_major, config.uvm_major, config.caps_major)
        return kernel.majors(self._request.roots)


async def _in_thread(work: Callable[[], T]) -> T:
    return await in_daemon_thread("probe-reader", work)


def _view_of(probe: Probe) -> ProbeView:
    return ProbeView(
        "running",
        tier=probe.tier,
        loader=probe.loader,
        headers=probe.headers,
        attached=probe.attached,
        missing=tuple(sorted(probe.missing.items())),
        load_ms=probe.load_ms,
        attach_ms=probe.attach_ms,
    )


def _map_of(snapshot: Snapshot, capabilities_major: int) -> GpuMap:
    """Return how the driver numbers the GPUs that NVML lists."""
    present = [view.gpu for view in snapshot.gpus if view.present]
    by_capability: dict[int, Placement] = {}
    for gpu in present:
        for mig in gpu.mig_devices:
            if mig.ci_minor is not None:
                by_capability[mig.ci_minor] = Placement(gpu.uuid, mig.gi, mig.ci)
    return GpuMap(
        by_minor={gpu.minor: gpu.uuid for gpu in present if gpu.minor is not None},
        by_capability=by_capability,
        capabilities_major=capabilities_major or None,
    )
