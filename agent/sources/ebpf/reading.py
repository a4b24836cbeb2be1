"""The reads that the probe's source makes in the kernel, and their evaluation.

Invariants: the source's own thread makes the blocking calls; the rest is pure, of readings and time.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from agent.core.usage.gpu_map import GpuMap
from agent.core.usage.rows import Removed
from agent.model.gpu import Gpu
from agent.model.ids import GpuUuid, Placement
from agent.model.snapshot import Snapshot
from agent.model.usage import ENDED, DeviceCall, ProbeView, ProcessKey, ProcessStatus
from agent.probe.kernel import Majors
from agent.probe.probe import Probe, Readiness
from agent.sources.processes import NoReading

RELEASE_PROGRAM: Final = "driver_close"
"""The program that runs when the driver releases an open file, with its last reference."""


class Reading(NamedTuple):
    """Values that send no event when they change."""

    majors: Majors
    attached: bool
    """Programs were attached again, to a driver that was loaded since."""
    lost: int
    """Events that found no room so far."""
    unkept: int
    """Objects that found no room in the kernel's map so far, of any process."""
    rejected: int
    """Objects that the kernel did not keep so far: their process has too many, or they are another's."""
    unsent: int
    """Events so far of processes that had used their share of the ring."""
    sends_releases: bool
    """The end of each open file sends an event."""
    readiness: Mapping[int, Readiness]
    """Of each minor that the agent called."""
    is_outdated: bool
    """The loaded driver needs another tier."""


def read(probe: Probe) -> Reading:
    """Read the values of one poll. Blocks for less than a millisecond."""
    probe.refresh()
    attached = bool(probe.reattach())
    config = probe.config
    statistics = probe.read_statistics()
    return Reading(
        majors=Majors(config.nvidia_major, config.uvm_major, config.caps_major),
        attached=attached,
        lost=statistics.lost,
        unkept=statistics.objects_full,
        rejected=statistics.rejected,
        unsent=statistics.unsent,
        sends_releases=RELEASE_PROGRAM in probe.attached,
        readiness=probe.read_readiness(),
        is_outdated=probe.is_outdated(),
    )


class StaleRows(NamedTuple):
    """The rows that may be deleted from the kernel's tables."""

    objects: Collection[Removed]
    processes: Collection[ProcessKey]
    """Processes that are known to be gone."""
    ended_before_ns: int
    """Processes whose rows show an exit before that time; 0: none."""


def forget(probe: Probe, stale: StaleRows, max_ended: int) -> bool:
    """Delete stale rows, of so many exited processes at most; return whether there are more.

    Blocks for 70 ms at most, with a full table. The row of a process that exited before the kernel recorded
    it does not show the exit.
    """
    probe.forget_objects(stale.objects)
    ended: list[tuple[int, int]] = [*stale.processes]
    if stale.ended_before_ns:
        ended += probe.read_ended(stale.ended_before_ns)
    probe.forget_processes(ended[:max_ended])
    return len(ended) > max_ended


class GpuReadiness(NamedTuple):
    """Whether the driver answers on a GPU."""

    gpu: GpuUuid
    minor: int
    call: DeviceCall
    is_flag_wrong: bool
    """The kernel's flag is ready although the call hangs or is long ago."""


def evaluate_calls(
    readiness: Mapping[int, Readiness], gpus: GpuMap, *, now_ns: int, answer_within_ns: int, stale_ns: int
) -> Iterator[GpuReadiness]:
    """Yield how each known GPU answered; one whose call hangs, or is long ago, is not ready.

    Where the last call is long ago, the next one did not start: opening the file, or an earlier call of the
    agent, does not return.
    """
    for minor, (is_ready, check) in readiness.items():
        gpu = gpus.by_minor.get(minor)
        if gpu is None:
            continue
        age_ns = now_ns - check.entered_ns
        is_late = age_ns > (answer_within_ns if check.in_flight else stale_ns)
        call = DeviceCall(is_ready and not is_late, check.entered_ns, check.took_ns)
        yield GpuReadiness(gpu, minor, call, is_flag_wrong=is_ready and is_late)


def view_of(probe: Probe) -> ProbeView:
    """Return the view of a running probe."""
    return ProbeView(
        "running",
        tier=probe.tier,
        loader=probe.loader,
        headers=probe.headers,
        attached=probe.attached,
        missing=tuple(sorted(probe.missing.items())),
        load_ms=probe.load_ms,
        attach_ms=probe.attach_ms,
        entry_points=tuple(sorted(set(probe.entry_points.values()))),
        why_not_driver=probe.why_not_driver,
        pinned=probe.pinned,
        not_pinned=probe.not_pinned,
    )


def _by_instance(present: Collection[Gpu]) -> dict[int, GpuUuid]:
    """Return the GPUs by device instance, without one that two have: one of them is stale."""
    instances = [gpu.device_instance for gpu in present]
    return {
        gpu.device_instance: gpu.uuid
        for gpu in present
        if gpu.device_instance is not None and instances.count(gpu.device_instance) == 1
    }


def map_of(snapshot: Snapshot, majors: Majors) -> GpuMap:
    """Return the driver's numbers of the GPUs that NVML lists."""
    present = [view.gpu for view in snapshot.gpus if view.present]
    by_capability: dict[int, Placement] = {}
    for gpu in present:
        for mig in gpu.mig_devices:
            if mig.ci_minor is not None:
                by_capability[mig.ci_minor] = Placement(gpu.uuid, mig.gi, mig.ci)
    return GpuMap(
        by_minor={gpu.minor: gpu.uuid for gpu in present if gpu.minor is not None},
        by_instance=_by_instance(present),
        by_capability=by_capability,
        capabilities_major=majors.caps or None,
    )


MAX_NAMED: Final = 3
"""Processes that a reason names."""


class Unseen:
    """Reads that failed in the last scan and the last readings."""

    def __init__(self) -> None:
        self.of_scan = ""
        """Why the last scan may have missed holders."""
        self._unreadable: set[ProcessKey] = set()

    def apply_readings(self, readings: Mapping[ProcessKey, ProcessStatus | NoReading]) -> None:
        """Apply readings of processes from /proc."""
        self._unreadable.difference_update(readings)
        self._unreadable.update(key for key, reading in readings.items() if reading is NoReading.UNREADABLE)

    def reason(self, unlooked: Iterable[ProcessKey]) -> str:
        """Return why holders may be missing; empty: none are. ``unlooked``: processes with no reading."""
        self._unreadable.intersection_update(unlooked)
        if not self._unreadable:
            return self.of_scan
        pids = ", ".join(str(key.pid) for key in sorted(self._unreadable)[:MAX_NAMED])
        hidden = f"{len(self._unreadable)} of the processes with open files may not be read, such as {pids}"
        return f"{self.of_scan}; {hidden}" if self.of_scan else hidden


def has_exited(reading: ProcessStatus | NoReading) -> bool:
    """Return whether a process is gone, or a zombie: the kernel closes its files before it is one."""
    return reading is NoReading.GONE or (isinstance(reading, ProcessStatus) and reading.state in ENDED)
