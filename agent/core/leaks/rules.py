"""Rules on the use of GPUs, one for each kind of finding: pure functions of one evaluation input.

Invariants: a rule without the input it needs returns None, not an empty list; where one process lacks it,
its finding is not ``known``. No finding names the agent or a process of the allow list. Absolute numbers
make no finding of a leak.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from agent.core.leaks.growth import Name, Windows, growth, is_over
from agent.core.usage.ownership import (
    Allocated,
    holding,
    is_allocated,
    is_in_use,
    is_killable,
    is_service,
    name_of,
    places_of,
    pod_name,
    unclaimed_bytes,
    user_of,
)
from agent.model.health import InvolvedProcess, LeakKind
from agent.model.ids import GpuUuid, Placement
from agent.model.policy import LeakPolicy
from agent.model.structs import replace
from agent.model.usage import (
    GpuHold,
    GpuMemory,
    MemoryUser,
    NoPod,
    Orphan,
    PodRef,
    Pods,
    ProcessKey,
    ProcessStatus,
    ProcessUse,
    Usage,
)


class Growth(NamedTuple):
    """A process that makes contexts or opens files and frees hardly any."""

    kind: LeakKind
    worst: int | None
    """Its peak; None: unknown."""
    at_ns: int
    """When it last grew."""
    known: bool = True


GROWING: Final = (LeakKind.CTX_GROWTH, LeakKind.FD_GROWTH)


class FindingKey(NamedTuple):
    """What identifies a finding from one evaluation to the next."""

    kind: LeakKind
    process: ProcessKey | None
    where: Placement | None
    """The whole GPU, or the idle device; None: unknown GPU."""


class PendingFinding(msgspec.Struct, frozen=True):
    """A finding, reported once it has lasted for its time."""

    key: FindingKey
    place: Placement | None
    """Where it counts: a MIG device if the process uses only that."""
    involved: tuple[InvolvedProcess, ...]
    contexts: int | None
    used_bytes: int | None
    since_ns: int
    for_ns: int
    """How long it must last."""
    known: bool = True
    """False: unknown at this evaluation, which neither makes nor ends the finding."""
    reported: bool = False
    more: int = 0
    """Further exited processes whose clients the same holder keeps open."""
    inherited: bool = False
    """Found by an earlier agent process; this one may lack the input to find it again."""
    worst: int | None = None
    """The peak of what grows; None: only an earlier agent process counted it."""
    grown_ns: int = 0
    """When it last grew."""


Seen = Iterable[PendingFinding] | None
"""The findings of one rule; None: its input is unknown."""


class EvaluationInput(msgspec.Struct, frozen=True):
    """What one evaluation reads. None: unknown now."""

    now_ns: int
    policy: LeakPolicy
    usage: Usage | None = None
    gpus: frozenset[GpuUuid] = frozenset()
    """The GPUs that NVML lists."""
    memory: Mapping[GpuUuid, GpuMemory] = msgspec.field(default_factory=dict)
    allocated: Allocated | None = None
    pods: Pods | None = None
    has_all_pods: bool = True
    """Whether a pod that is not in ``pods`` is gone; otherwise it may just have no device."""
    windows: Windows = msgspec.field(default_factory=dict)
    watched: tuple[ProcessUse, ...] = ()
    """The processes that findings may name."""
    workers: tuple[ProcessUse, ...] = ()
    """Those of them that are no servers: what a server holds is its clients'."""
    before: Mapping[FindingKey, PendingFinding] = msgspec.field(default_factory=dict)
    """The findings of the last evaluation."""
    growing: Mapping[Name, Growth] = msgspec.field(default_factory=dict)
    """The processes and GPUs that grow, or have not freed what they grew by."""

    def user(self, process: ProcessUse, gpu: GpuUuid) -> MemoryUser | None:
        """Return NVML's entry of a process on a GPU."""
        return user_of(self.memory.get(gpu), process.key.pid)

    def is_free(self, process: ProcessUse) -> bool:
        """Return whether no finding may name a process."""
        return is_service(process, self.policy.allowed, self.policy.namespaces, self.pods)

    def lives(self, process: ProcessUse) -> bool | None:
        """Return whether the pod of a process is alive; None: unknown, or in no pod."""
        pod = process.status.pod
        if not isinstance(pod, PodRef) or self.pods is None:
            return None
        seen = self.pods.get(pod.uid)
        if seen is None:
            return False if self.has_all_pods else None
        return seen.alive


# Exited owners, deleted pods, exiting processes


def _orphaned(inputs: EvaluationInput) -> Seen:
    """Find clients whose owner exited while other processes hold their file, with contexts in them.

    A file without a visible holder may be in an unread message, or only be mapped. A client from before the
    probe was attached may have no context: a monitor makes clients and no context.
    """
    if inputs.usage is None:
        return None
    by_key = {process.key: process for process in inputs.usage.processes}
    found = []
    for orphan in inputs.usage.orphans:
        holders = [by_key[key] for key in orphan.holders if key in by_key]
        if not orphan.holders or any(not inputs.is_free(holder) for holder in holders):
            found.append(replace(_orphan(orphan, holders, inputs), known=orphan.contexts is not None))
    return found


def _orphan(orphan: Orphan, holders: list[ProcessUse], inputs: EvaluationInput) -> PendingFinding:
    place = None if orphan.gpu is None else Placement(orphan.gpu)
    names = tuple(
        _involved(holder.status, _hold_of(holder, orphan.gpu), inputs, orphan.ended_ns) for holder in holders
    )
    owner = replace(
        _involved(orphan.owner, None, inputs, orphan.ended_ns),
        role="owner",
        contexts=orphan.contexts,
    )
    return PendingFinding(
        key=FindingKey(LeakKind.ORPHANED_CLIENT, orphan.owner.key, place),
        place=place,
        involved=(owner, *names),
        contexts=orphan.contexts,
        used_bytes=total(involved.used_bytes for involved in names),
        since_ns=orphan.ended_ns,
        for_ns=inputs.policy.orphaned_client_ns,
        more=orphan.more,
    )


def _hold_of(process: ProcessUse, gpu: GpuUuid | None) -> GpuHold | None:
    return next((hold for hold in process.holds if hold.gpu == gpu), None)


def _pod_gone(inputs: EvaluationInput) -> Seen:
    """Find processes that hold a GPU and whose pod is gone."""
    if inputs.usage is None or inputs.pods is None:
        return None
    for_ns = inputs.policy.pod_gone_ns
    return [
        _finding(LeakKind.POD_GONE, process, hold, inputs, for_ns, known=lives is False)
        for process in inputs.watched
        if isinstance(process.status.pod, PodRef) and (lives := inputs.lives(process)) is not True
        for hold in process.holds
    ]


def _stuck(inputs: EvaluationInput) -> Seen:
    """Find processes that began to exit, have not exited, and have files of the driver open."""
    if inputs.usage is None:
        return None
    for_ns = inputs.policy.stuck_exit_ns
    found = []
    for process in inputs.watched:
        if process.exiting_since_ns is None:
            continue
        holds: tuple[GpuHold | None, ...] = process.holds or (None,)
        for hold in holds:
            finding = _finding(LeakKind.STUCK_EXIT, process, hold, inputs, for_ns)
            found.append(replace(finding, since_ns=process.exiting_since_ns))
    return found


# Growth


def _context_growth(inputs: EvaluationInput) -> Seen:
    """Find processes that make contexts and free hardly any."""
    return _grown(LeakKind.CTX_GROWTH, inputs)


def _fd_growth(inputs: EvaluationInput) -> Seen:
    """Find processes with unknown contexts that open files of the driver and close none."""
    return _grown(LeakKind.FD_GROWTH, inputs)


def _grown(kind: LeakKind, inputs: EvaluationInput) -> Seen:
    usage = inputs.usage
    if usage is None or usage.is_blind:
        return None
    if usage.complete and not inputs.growing:
        return []
    found = []
    for process in inputs.workers:
        for hold in process.holds:
            shown = inputs.growing.get((process.key, hold.gpu))
            is_whole = usage.is_whole(hold.gpu)
            if is_whole and (shown is None or shown.kind is not kind):
                continue
            known = is_whole and shown is not None and shown.known
            finding = _finding(kind, process, hold, inputs, 0, known=known)
            if shown is not None:
                finding = replace(finding, worst=shown.worst, grown_ns=shown.at_ns)
            found.append(finding)
    return found


# Foreign processes, and memory of no process


def _foreign(inputs: EvaluationInput) -> Seen:
    """Find processes that use a GPU that is not allocated to their pod, or that are in no pod."""
    if inputs.usage is None or inputs.allocated is None:
        return None
    allocated, for_ns = inputs.allocated, inputs.policy.foreign_process_ns
    return [
        _finding(LeakKind.FOREIGN_PROCESS, process, hold, inputs, for_ns, known=is_foreign is True)
        for process in inputs.workers
        for hold in process.holds
        if (is_foreign := _is_foreign(process, hold, allocated, inputs)) is not False
    ]


def _is_foreign(
    process: ProcessUse, hold: GpuHold, allocated: Allocated, inputs: EvaluationInput
) -> bool | None:
    """Whether a process is foreign to a GPU; None: unknown. In a deleted pod it is another finding."""
    memory = inputs.memory.get(hold.gpu)
    is_used = is_in_use(process, hold, memory)
    if is_used is False:
        return False
    if isinstance(process.status.pod, PodRef):
        lives = inputs.lives(process)
        if not lives:
            return None if lives is None else False
        places = places_of(hold, user_of(memory, process.key.pid))
        if is_allocated(allocated, places, name_of(process.status.pod, inputs.pods)):
            return False
    return is_used if process.status.pod is not NoPod.UNKNOWN else None


_UNKNOWN_MEMORY: Final = GpuMemory(used_bytes=None, total_bytes=None)


def _memory_held(inputs: EvaluationInput) -> Seen:
    """Find used memory of no process that NVML lists, on GPUs that no process holds."""
    if inputs.usage is None or inputs.usage.is_blind:
        return None
    found = []
    for gpu in sorted(inputs.gpus):
        memory = inputs.memory.get(gpu, _UNKNOWN_MEMORY)
        held = unclaimed_bytes(memory)
        share = (memory.total_bytes or 0) * inputs.policy.memory_held_percent // 100
        limit = max(inputs.policy.memory_held_bytes, share)
        is_whole = inputs.usage.is_whole(gpu)
        if not is_whole or ((held is None or held > limit) and not _may_be_held(gpu, inputs.usage, inputs)):
            finding = _of_place(LeakKind.MEMORY_HELD, Placement(gpu), inputs, inputs.policy.memory_held_ns)
            found.append(replace(finding, used_bytes=held, known=is_whole and held is not None))
    return found


def _may_be_held(gpu: GpuUuid, usage: Usage, inputs: EvaluationInput) -> bool:
    """Whether a process may have the memory of a GPU; a service has what NVML lists, no more."""
    memory = inputs.memory.get(gpu)
    return any(orphan.gpu in {gpu, None} for orphan in usage.orphans) or any(
        hold.contexts is None or process.partial or is_in_use(process, hold, memory) is not False
        for process, hold in holding(usage, gpu)
        if not inputs.is_free(process)
    )


# For information


def _idle(inputs: EvaluationInput) -> Seen:
    """Find devices that are allocated to a pod and that no process has open."""
    usage = inputs.usage
    if usage is None or usage.is_blind or inputs.allocated is None:
        return None
    return [
        replace(
            _of_place(LeakKind.IDLE, place, inputs, inputs.policy.idle_ns), known=usage.is_whole(place.gpu)
        )
        for place in inputs.allocated
        if not usage.is_whole(place.gpu) or not _is_open(place, usage, inputs)
    ]


def _is_open(place: Placement, usage: Usage, inputs: EvaluationInput) -> bool:
    memory = inputs.memory.get(place.gpu)
    users = () if memory is None else memory.users
    return (
        any(Placement(place.gpu, user.gi, user.ci).overlaps(place) for user in users)
        or any(orphan.gpu in {place.gpu, None} for orphan in usage.orphans)
        or any(
            each.overlaps(place)
            for process, hold in holding(usage, place.gpu)
            if not inputs.is_free(process)
            for each in places_of(hold, inputs.user(process, place.gpu))
        )
    )


def _many_contexts(inputs: EvaluationInput) -> Seen:
    """Find GPUs with very many contexts, of whatever processes."""
    if inputs.usage is None:
        return None
    return [
        replace(_of_place(LeakKind.MANY_CONTEXTS, Placement(each.gpu), inputs, 0), contexts=each.contexts)
        for each in inputs.usage.totals
        if each.contexts is not None and each.contexts > inputs.policy.contexts_many
    ]


def prepared(inputs: EvaluationInput) -> EvaluationInput:
    """Return the input with what several rules need of every process, computed once."""
    if inputs.usage is None:
        return inputs
    growing: dict[Name, Growth] = {}
    policy = inputs.policy
    watched = tuple([each for each in inputs.usage.processes if not inputs.is_free(each)])
    workers = tuple(
        [each for each in watched if not is_service(each, policy.servers, policy.namespaces, inputs.pods)]
    )
    if inputs.windows or inputs.before:
        for process in workers:
            for hold in process.holds:
                shown = _growth_of(process, hold, inputs)
                if shown is not None:
                    growing[process.key, hold.gpu] = shown
    return replace(inputs, watched=watched, workers=workers, growing=growing)


def _growth_of(process: ProcessUse, hold: GpuHold, inputs: EvaluationInput) -> Growth | None:
    """Return the growth of a process, present or not yet freed."""
    window = inputs.windows.get((process.key, hold.gpu))
    now = growth(process, hold, window, inputs.policy) if window else None
    for kind in GROWING if now is None else (now,):
        key = FindingKey(kind, process.key, Placement(hold.gpu))
        before = inputs.before.get(key)
        amount = (hold.contexts or 0) if kind is LeakKind.CTX_GROWTH else hold.fds
        if now is not None:
            worst = (before and before.worst) or 0
            return Growth(kind, max(amount, worst), inputs.now_ns)
        if before is None or not before.reported:
            continue
        if before.worst is None and process.partial:
            # Only an earlier agent process could count it.
            return Growth(kind, None, before.grown_ns, known=False)
        worst = before.worst if before.worst is not None else (before.contexts or 0)
        if not is_over(kind, hold, worst, inputs.policy):
            return Growth(kind, worst, before.grown_ns)
    return None


RULES: Final[Mapping[LeakKind, Callable[[EvaluationInput], Seen]]] = {
    LeakKind.ORPHANED_CLIENT: _orphaned,
    LeakKind.POD_GONE: _pod_gone,
    LeakKind.STUCK_EXIT: _stuck,
    LeakKind.CTX_GROWTH: _context_growth,
    LeakKind.FD_GROWTH: _fd_growth,
    LeakKind.MEMORY_HELD: _memory_held,
    LeakKind.FOREIGN_PROCESS: _foreign,
    LeakKind.IDLE: _idle,
    LeakKind.MANY_CONTEXTS: _many_contexts,
}


# Findings


def _finding(
    kind: LeakKind,
    process: ProcessUse,
    hold: GpuHold | None,
    inputs: EvaluationInput,
    for_ns: int,
    *,
    known: bool = True,
) -> PendingFinding:
    where = None if hold is None else Placement(hold.gpu)
    involved = _involved(process.status, hold, inputs, inputs.now_ns)
    places = () if hold is None else places_of(hold, inputs.user(process, hold.gpu))
    return PendingFinding(
        key=FindingKey(kind, process.key, where),
        place=places[0] if len(places) == 1 else where,
        involved=(involved,),
        contexts=involved.contexts,
        used_bytes=involved.used_bytes,
        since_ns=inputs.now_ns,
        for_ns=for_ns,
        known=known,
    )


def _of_place(kind: LeakKind, place: Placement, inputs: EvaluationInput, for_ns: int) -> PendingFinding:
    return PendingFinding(
        key=FindingKey(kind, None, place),
        place=place,
        involved=(),
        contexts=None,
        used_bytes=None,
        since_ns=inputs.now_ns,
        for_ns=for_ns,
    )


def _involved(
    status: ProcessStatus, hold: GpuHold | None, inputs: EvaluationInput, since_ns: int
) -> InvolvedProcess:
    user = None if hold is None else user_of(inputs.memory.get(hold.gpu), status.key.pid)
    return InvolvedProcess(
        pid=status.key.pid,
        start_ticks=status.key.start_ticks,
        comm=status.comm,
        owner=status.owner,
        pod=pod_name(status, inputs.pods),
        state=status.state,
        killable=is_killable(status),
        contexts=None if hold is None else hold.contexts,
        used_bytes=None if user is None else user.used_bytes,
        since_ns=since_ns,
    )


def total(figures: Iterable[int | None]) -> int | None:
    """Return the sum; None if there is no figure, or one is missing."""
    found = tuple(figures)
    known = [figure for figure in found if figure is not None]
    return sum(known) if known and len(known) == len(found) else None
