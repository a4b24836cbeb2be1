"""Whether a process keeps making contexts and frees hardly any: one window for each process and GPU.

Invariants: numbers alone are no growth, for a server may well have many contexts, nor is a single step to
more of them. What a process makes in its first minutes is its set-up. A window holds a bounded number of
samples. What grew is over once half of the most it had is freed, not when it stops growing.
"""

from collections.abc import Hashable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Final, NamedTuple

from agent.core.shares import Shares
from agent.model.health import LeakKind
from agent.model.ids import GpuUuid
from agent.model.policy import LeakPolicy
from agent.model.usage import GpuHold, PodRef, ProcessKey, ProcessUse, Usage

PARTS: Final = 20
"""Samples of a window."""

MIN_STEPS: Final = 2
"""Parts of a window in which what grows has to rise."""

MAX_WINDOWS: Final = 4_096
"""Processes and GPUs that are followed; where there are more, the pod with most loses its newest."""
MAX_OF_HOLDER: Final = MAX_WINDOWS // 4
"""Of one pod, or one cgroup of the host."""


class Sample(NamedTuple):
    """What a process had when a part of the window began, and the most in that part."""

    at_ns: int
    live: int
    allocated: int
    freed: int
    fds: int
    peak_live: int
    peak_fds: int


Window = tuple[Sample, ...]
"""The oldest first. What was before the first is forgotten, so a window is at most a part too short."""

Name = tuple[ProcessKey, GpuUuid]
Windows = Mapping[Name, Window]


def followed(usage: Usage, windows: Windows, policy: LeakPolicy, now_ns: int) -> Windows:
    """Return the windows after a usage snapshot, without those of processes that hold the GPU no more.

    Where something may be missing they stay as they are.
    """
    table: Shares[Hashable, Name, Window] = Shares(MAX_WINDOWS, MAX_OF_HOLDER, rejects=True)
    if not usage.complete:
        for name, window in windows.items():
            if not usage.is_whole(name[1]):
                table.put(None, name, window)
    # Those that are followed already keep their places.
    for process, hold in sorted(
        _of_interest(usage), key=lambda each: (each[0].key, each[1].gpu) not in windows
    ):
        name = (process.key, hold.gpu)
        known = windows.get(name)
        if not usage.is_whole(hold.gpu) or (known is None and now_ns < begins_at(process, policy)):
            continue
        pod = process.status.pod
        holder = pod.uid if isinstance(pod, PodRef) else process.status.cgroup
        table.put(holder, name, _after(known or (), hold, policy, now_ns))
    found = {entry.key: entry.value for entry in table}
    return windows if found == windows else found


def begins_at(process: ProcessUse, policy: LeakPolicy) -> int:
    """Return when a process is taken to have set itself up."""
    return process.since_ns + policy.growth_warm_up_ns


def warm_at(usage: Usage, policy: LeakPolicy, now_ns: int) -> list[int]:
    """Return when the next window begins, if time alone begins one."""
    # Of the newest process, most often; the others have long been warm.
    newest_ns = now_ns - policy.growth_warm_up_ns
    return sorted({begins_at(each, policy) for each, _ in _of_interest(usage) if each.since_ns > newest_ns})[
        :1
    ]


def growth(process: ProcessUse, hold: GpuHold, window: Window, policy: LeakPolicy) -> LeakKind | None:
    """Return which growth a process shows; None: none."""
    if not window:
        return None
    if hold.contexts is not None and _is_growing(hold, hold.contexts, window, policy):
        return LeakKind.CTX_GROWTH
    is_counted = hold.contexts is not None and not process.partial
    if is_counted or hold.fds - window[0].fds < policy.growth_fds:
        return None
    if hold.fds != max(each.peak_fds for each in window):
        return None
    return (
        LeakKind.FD_GROWTH
        if _steps(*((each.fds, each.peak_fds) for each in window), (hold.fds,)) >= MIN_STEPS
        else None
    )


def is_over(kind: LeakKind, hold: GpuHold, worst: int, policy: LeakPolicy) -> bool:
    """Return whether a process has freed half of the most that it had when it grew."""
    if kind is LeakKind.FD_GROWTH:
        return hold.fds <= worst // 2
    live = hold.contexts or 0
    return live <= worst // 2 or live < policy.growth_min_live


def _steps(*parts: tuple[int, ...]) -> int:
    """Return how often a figure rose, from the beginning of a part to its peak and to the next part."""
    return sum(later > earlier for earlier, later in pairwise(chain.from_iterable(parts)))


def next_part_at(window: Window, policy: LeakPolicy) -> list[int]:
    """Return when a window changes by time alone."""
    leaves_at = [sample.at_ns + policy.growth_window_ns for sample in window[:1]]
    return [*(sample.at_ns + _part_ns(policy) for sample in window[-1:]), *leaves_at]


def _of_interest(usage: Usage) -> Iterator[tuple[ProcessUse, GpuHold]]:
    for process in usage.processes:
        for hold in process.holds:
            if hold.contexts or hold.contexts is None or process.partial:
                yield process, hold


def _is_growing(hold: GpuHold, live: int, window: Window, policy: LeakPolicy) -> bool:
    base = window[0]
    made, freed = hold.allocated - base.allocated, hold.freed - base.freed
    return (
        live >= policy.growth_min_live
        and made >= policy.growth_min_new
        and 100 * freed <= policy.growth_freed_percent * made
        and live - base.live >= policy.growth_min_new
        and _steps(*((each.live, each.peak_live) for each in window), (live,)) >= MIN_STEPS
        and live == max(each.peak_live for each in window)
    )


def _after(window: Window, hold: GpuHold, policy: LeakPolicy, now_ns: int) -> Window:
    live = hold.contexts or 0
    if not window or now_ns - window[-1].at_ns >= _part_ns(policy):
        window = (*window, Sample(now_ns, live, hold.allocated, hold.freed, hold.fds, live, hold.fds))
    else:
        last = window[-1]
        if live > last.peak_live or hold.fds > last.peak_fds:
            peaks = (max(last.peak_live, live), max(last.peak_fds, hold.fds))
            window = (*window[:-1], last._replace(peak_live=peaks[0], peak_fds=peaks[1]))
    begin_ns = now_ns - policy.growth_window_ns
    while len(window) > 1 and window[0].at_ns <= begin_ns:
        window = window[1:]
    return window


def _part_ns(policy: LeakPolicy) -> int:
    return max(1, policy.growth_window_ns // PARTS)
