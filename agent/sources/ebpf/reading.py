"""What the probe's source reads of the kernel in one go, and what it makes of it.

Invariants: what blocks is called by the source's own thread; the rest is made of what was read and of time.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from agent.core.usage.gpu_map import GpuMap
from agent.core.usage.rows import Removed
from agent.model.gpu import Gpu
from agent.model.ids import GpuUuid, Placement
from agent.model.snapshot import Snapshot
from agent.model.usage import DeviceCall, ProbeView, ProcessKey
from agent.probe.kernel import Majors
from agent.probe.probe import Probe, Readiness

TELLS_RELEASES: Final = "driver_close"
"""The program that is run when the driver lets go of an open file, whoever held it last."""


MAX_ENDED: Final = 4_096
"""Ended processes that are taken out of the kernel's table in one round, 40 ms; the others in the next."""


class Reading(NamedTuple):
    """The small things that tell nothing by themselves."""

    majors: Majors
    attached: bool
    """Programs were attached anew, to a driver that was loaded since."""
    lost: int
    """Events that found no room so far."""
    unkept: int
    """Objects that found no room in the kernel's map so far, whoever made them."""
    refused: int
    """Objects that the kernel did not keep so far: who made them has too many, or another has them."""
    unsent: int
    """Events so far of processes that had their share of the ring."""
    tells_releases: bool
    """The end of each open file is told as an event."""
    readiness: Mapping[int, Readiness]
    """Of each minor that the agent called."""
    is_outdated: bool
    """The driver that is loaded now wants another tier."""


def read(probe: Probe) -> Reading:
    """Read what has to be asked for once a poll. Blocks for less than a millisecond."""
    probe.refresh()
    attached = bool(probe.reattach())
    config = probe.config
    statistics = probe.read_statistics()
    return Reading(
        majors=Majors(config.nvidia_major, config.uvm_major, config.caps_major),
        attached=attached,
        lost=statistics.lost,
        unkept=statistics.objects_full,
        refused=statistics.rejected,
        unsent=statistics.unsent,
        tells_releases=TELLS_RELEASES in probe.attached,
        readiness=probe.read_readiness(),
        is_outdated=probe.is_outdated(),
    )


class Over(NamedTuple):
    """What may be taken out of the kernel's tables."""

    objects: Collection[Removed]
    processes: Collection[ProcessKey]
    """Those that are known to be gone."""
    ended_before_ns: int
    """Who is seen there to have ended before that time; 0: nobody is looked for."""


def forget(probe: Probe, over: Over) -> bool:
    """Take out what is over; return whether there is more. Blocks for 70 ms at most, in a table that is full.

    Of a process that ended before the kernel saw anything of it nothing in its row says so.
    """
    probe.forget_objects(over.objects)
    ended: list[tuple[int, int]] = [*over.processes]
    if over.ended_before_ns:
        ended += probe.read_ended(over.ended_before_ns)
    probe.forget_processes(ended[:MAX_ENDED])
    return len(ended) > MAX_ENDED


class JudgedCall(NamedTuple):
    """Whether the driver answers on a GPU."""

    gpu: GpuUuid
    minor: int
    call: DeviceCall
    is_flag_wrong: bool
    """The kernel's flag says ready, of a call that hangs or is long ago."""


def judged_calls(
    readiness: Mapping[int, Readiness], gpus: GpuMap, *, now_ns: int, answer_within_ns: int, stale_ns: int
) -> Iterator[JudgedCall]:
    """Yield how each GPU that is known answered; one whose call hangs, or is long ago, is not ready.

    A call that is long ago is one that should have followed and did not get that far: opening the file, or
    what the agent asks before, does not return.
    """
    for minor, (is_ready, check) in readiness.items():
        gpu = gpus.by_minor.get(minor)
        if gpu is None:
            continue
        age_ns = now_ns - check.entered_ns
        is_late = age_ns > (answer_within_ns if check.in_flight else stale_ns)
        call = DeviceCall(is_ready and not is_late, check.entered_ns, check.took_ns)
        yield JudgedCall(gpu, minor, call, is_flag_wrong=is_ready and is_late)


def view_of(probe: Probe) -> ProbeView:
    """Return how a probe that runs is shown."""
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
    """Return the GPUs by device instance, without what two have: one of them is stale."""
    instances = [gpu.device_instance for gpu in present]
    return {
        gpu.device_instance: gpu.uuid
        for gpu in present
        if gpu.device_instance is not None and instances.count(gpu.device_instance) == 1
    }


def map_of(snapshot: Snapshot, majors: Majors) -> GpuMap:
    """Return how the driver numbers the GPUs that NVML lists."""
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
