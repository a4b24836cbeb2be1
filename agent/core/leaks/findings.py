"""Findings on the use of GPUs from one evaluation to the next: they age, are reported, and end.

Invariants: there is one finding for each kind, process (pid and start) and GPU. It is reported when its cause
has lasted for its time, so time alone brings it, and it ends when the cause does. What is unknown now neither
makes a finding nor ends one. A restart of the agent ends none: the next process inherits them.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from agent.core.leaks.growth import Windows, followed, next_part_at, warm_at
from agent.core.leaks.rules import RULES, EvaluationInput, FindingKey, PendingFinding, Seen, prepared, total
from agent.core.shares import Shares
from agent.core.wording import counted
from agent.model.health import MAX_INVOLVED, Condition, Details, InvolvedProcess, LeakKind, Reason
from agent.model.ids import GpuUuid, Placement
from agent.model.policy import SECOND_NS, LeakPolicy
from agent.model.structs import replace
from agent.model.usage import ProcessKey, ProcessUse, Usage

MAX_PENDING: Final = 4_096
"""Findings and what may become one; where there are more, the pod with most of one kind loses its newest."""
MAX_OF_HOLDER: Final = 256
"""Of one kind and pod, or of all processes of the host; those beyond are counted."""

AWAITED_NS: Final = 120 * SECOND_NS
"""Findings of an earlier agent process are kept for so long without a usage snapshot."""

LONG: Final = 3
"""Windows of growth that make it critical."""

REASONS: Final[Mapping[LeakKind, Reason]] = {
    LeakKind.ORPHANED_CLIENT: Reason.CONTEXT_LEAK,
    LeakKind.POD_GONE: Reason.CONTEXT_LEAK,
    LeakKind.STUCK_EXIT: Reason.CONTEXT_LEAK,
    LeakKind.CTX_GROWTH: Reason.CONTEXT_LEAK,
    LeakKind.FD_GROWTH: Reason.CONTEXT_LEAK,
    LeakKind.MEMORY_HELD: Reason.MEMORY_HELD_NO_PROCESS,
    LeakKind.FOREIGN_PROCESS: Reason.FOREIGN_PROCESS,
    LeakKind.IDLE: Reason.ALLOCATED_IDLE,
    LeakKind.MANY_CONTEXTS: Reason.MANY_CONTEXTS,
}

CERTAIN: Final = frozenset({LeakKind.ORPHANED_CLIENT, LeakKind.POD_GONE, LeakKind.STUCK_EXIT})
"""They rest on a process or pod that is gone and on no guess, so that they may take a free device out."""

BLOCKING: Final = CERTAIN | {LeakKind.MEMORY_HELD, LeakKind.FOREIGN_PROCESS}
"""With these a GPU is not what its next user thinks it gets."""


class Leaks(msgspec.Struct, frozen=True):
    """What is kept from one evaluation to the next."""

    pending: Mapping[FindingKey, PendingFinding] = msgspec.field(default_factory=dict)
    windows: Windows = msgspec.field(default_factory=dict)
    due_ns: int | None = None
    """When time alone brings or ends something."""
    begun_ns: int = 0
    """When this process of the agent began."""
    beyond: Mapping[tuple[LeakKind, Placement | None], int] = msgspec.field(default_factory=dict)
    """Pending for which there is no room, by kind and place."""

    def reported(self) -> Iterator[PendingFinding]:
        """Yield the findings that are reported."""
        return (finding for finding in self.pending.values() if finding.reported)


def step(leaks: Leaks, inputs: EvaluationInput) -> Leaks:
    """Return what is found now; the same object if nothing changed."""
    if inputs.usage is not None and not inputs.usage.is_blind:
        windows = followed(inputs.usage, leaks.windows, inputs.policy, inputs.now_ns)
        leaks = leaks if windows is leaks.windows else replace(leaks, windows=windows)
    inputs = prepared(replace(inputs, windows=leaks.windows, before=leaks.pending))
    before: dict[LeakKind, dict[FindingKey, PendingFinding]] = {kind: {} for kind in RULES}
    for key, finding in leaks.pending.items():
        before[key.kind][key] = finding
    living = None if inputs.usage is None else {process.key: process for process in inputs.usage.processes}
    kept: Shares[Hashable, FindingKey, PendingFinding] = Shares(MAX_PENDING, MAX_OF_HOLDER, rejects=True)
    beyond: Counter[tuple[LeakKind, Placement | None]] = Counter()
    for kind, rule in RULES.items():
        updated = list(_updated(before[kind], rule(inputs), living, inputs.now_ns))
        # Those that are known keep their places, so that none ages anew because of others.
        for finding in sorted(updated, key=lambda each: each.key not in leaks.pending):
            for lost in kept.put(_holder_of(finding), finding.key, finding):
                beyond[lost.key.kind, lost.value.place] += 1 + lost.value.more
    pending = {entry.key: entry.value for entry in kept}
    found = replace(
        leaks, pending=pending, beyond=dict(beyond), due_ns=_due_at(pending, inputs, leaks.begun_ns)
    )
    return leaks if found == leaks else found


def _holder_of(finding: PendingFinding) -> Hashable:
    """Return the holder whose share a finding takes: a pod, the host, or a place without a process."""
    kind, _, where = finding.key
    if not finding.involved:
        return (kind, where)
    # Of an orphan the holders follow the owner.
    return (kind, finding.involved[-1].pod or finding.involved[-1].owner)


Living = Mapping[ProcessKey, ProcessUse] | None


def _updated(
    before: Mapping[FindingKey, PendingFinding], seen: Seen, living: Living, now_ns: int
) -> Iterator[PendingFinding]:
    if seen is None:
        yield from (finding for finding in before.values() if _is_there(finding, living))
        return
    named = set()
    for finding in seen:
        named.add(finding.key)
        known = before.get(finding.key)
        if finding.known:
            yield _aged(finding, known, now_ns)
        elif known is not None:
            yield known
    for key, finding in before.items():
        if finding.inherited and key not in named and _is_there(finding, living):
            yield finding


def _aged(finding: PendingFinding, known: PendingFinding | None, now_ns: int) -> PendingFinding:
    """Return a finding as of now, with the time of its first evaluation."""
    if known is None:
        return replace(finding, reported=True) if now_ns - finding.since_ns >= finding.for_ns else finding
    since_ns = min(known.since_ns, finding.since_ns)
    involved = tuple([_since(each, since_ns) for each in finding.involved])
    reported = known.reported or now_ns - since_ns >= finding.for_ns
    return replace(finding, involved=involved, since_ns=since_ns, reported=reported)


def _since(involved: InvolvedProcess, since_ns: int) -> InvolvedProcess:
    return replace(involved, since_ns=since_ns) if involved.since_ns > since_ns else involved


def _is_there(finding: PendingFinding, living: Living) -> bool:
    """Whether the process may still have the GPU open; if not, the finding ends without its rule.

    The holder of an orphaned client has the owner's files open, perhaps none of the GPU itself.
    """
    _, key, where = finding.key
    if key is None or living is None:
        return True
    process = living.get(key)
    return process is not None and (
        finding.inherited or where is None or any(hold.gpu == where.gpu for hold in process.holds)
    )


def _due_at(
    pending: Mapping[FindingKey, PendingFinding], inputs: EvaluationInput, begun_ns: int
) -> int | None:
    times = [finding.since_ns + finding.for_ns for finding in pending.values() if not finding.reported]
    if inputs.usage is not None:
        times += warm_at(inputs.usage, inputs.policy, inputs.now_ns)
    elif pending:
        times.append(begun_ns + AWAITED_NS)
    for key in pending:
        if key.kind in {LeakKind.CTX_GROWTH, LeakKind.FD_GROWTH} and key.process and key.where:
            window = inputs.windows.get((key.process, key.where.gpu), ())
            times += next_part_at(window, inputs.policy)
    return min((at_ns for at_ns in times if at_ns > inputs.now_ns), default=None)


def without_news(leaks: Leaks, policy: LeakPolicy, now_ns: int) -> Leaks:
    """Return what is kept while there was no usage snapshot yet: the probe is off, or has to start."""
    is_awaited = policy.is_watched and now_ns < leaks.begun_ns + AWAITED_NS
    if not leaks.pending or is_awaited:
        return leaks
    return replace(leaks, pending={}, due_ns=None)


def without_inherited(leaks: Leaks, gpu: GpuUuid) -> Leaks:
    """Return what is found without what only an earlier process of the agent could know of a GPU."""
    left = {
        key: finding
        for key, finding in leaks.pending.items()
        if not (finding.inherited and finding.place is not None and finding.place.gpu == gpu)
    }
    return leaks if len(left) == len(leaks.pending) else replace(leaks, pending=left)


def inherited(conditions: Iterable[Condition], now_ns: int) -> Leaks:
    """Return what a process of the agent begins with, from the conditions that an earlier one left."""
    pending: dict[FindingKey, PendingFinding] = {}
    for condition in conditions:
        if condition.lasts and condition.details is not None:
            for finding in _inherited_from(condition, condition.details):
                pending[finding.key] = finding
    due_ns = now_ns + AWAITED_NS if pending else None
    return Leaks(pending=pending, due_ns=due_ns, begun_ns=now_ns)


def _inherited_from(condition: Condition, details: Details) -> Iterator[PendingFinding]:
    """Yield a finding for each process that was named, or one where none was.

    Of an orphaned client the probe of the new process knows no owner: it is over when the last that was
    named as its holder is gone.
    """
    place = condition.placement
    holders = (each for each in details.involved if each.role == "holder")
    named: tuple[InvolvedProcess | None, ...] = tuple(holders) or (None,)
    for involved in named:
        process = None if involved is None else ProcessKey(involved.pid, involved.start_ticks)
        where = place if involved is None else Placement(place.gpu)
        yield PendingFinding(
            key=FindingKey(details.kind, process, where),
            place=place,
            involved=() if involved is None else (involved,),
            contexts=details.contexts if involved is None else involved.contexts,
            used_bytes=details.used_bytes if involved is None else involved.used_bytes,
            since_ns=condition.since_ns,
            for_ns=0,
            reported=True,
            inherited=details.kind is LeakKind.ORPHANED_CLIENT,
        )


# What is reported of one place


def grouped(leaks: Leaks) -> Mapping[tuple[LeakKind, Placement], tuple[PendingFinding, ...]]:
    """Return the findings by kind and place; without those whose GPU is unknown."""
    found: dict[tuple[LeakKind, Placement], list[PendingFinding]] = {}
    for finding in leaks.reported():
        if finding.place is not None:
            found.setdefault((finding.key.kind, finding.place), []).append(finding)
    return {name: tuple(findings) for name, findings in found.items()}


def details_of(
    kind: LeakKind,
    findings: Iterable[PendingFinding],
    usage: Usage | None,
    policy: LeakPolicy,
    *,
    beyond: int = 0,
) -> Details:
    """Return what findings of one kind at one place rest on, together; ``beyond``: further ones."""
    found = tuple(findings)
    named = {(each.pid, each.start_ticks): each for finding in found for each in finding.involved}
    # Holders rather than owners: they can be ended.
    listed = sorted(named, key=lambda key: (named[key].role == "owner", key))[:MAX_INVOLVED]
    return Details(
        kind=kind,
        involved=tuple(named[key] for key in sorted(listed)),
        more=len(named) - len(listed) + sum(finding.more for finding in found) + beyond,
        contexts=total(finding.contexts for finding in found),
        used_bytes=total(finding.used_bytes for finding in found),
        incomplete=usage is not None and not usage.complete,
        certainty="verified" if usage is None else usage.certainty,
        critical=any(_is_critical(finding, policy) for finding in found),
    )


def _is_critical(finding: PendingFinding, policy: LeakPolicy) -> bool:
    if finding.key.kind is not LeakKind.CTX_GROWTH:
        return False
    is_many = (finding.contexts or 0) >= policy.growth_critical_live
    return is_many or finding.grown_ns - finding.since_ns >= LONG * policy.growth_window_ns


def message_of(details: Details, policy: LeakPolicy) -> str:  # noqa: PLR0911 - a table
    """Return what is found in one sentence, without pids and names of pods: it is shown to everyone."""
    holders = sum(each.role == "holder" for each in details.involved)
    is_orphan = details.kind is LeakKind.ORPHANED_CLIENT
    count = holders if is_orphan else details.more + holders
    processes, s = counted(count, "process", "processes"), "s" if count == 1 else ""
    # Graphics create objects of the same class, which nothing distinguishes on this driver version yet.
    kind = "context" if details.certainty == "verified" else "compute or graphics context"
    contexts = "Contexts" if details.contexts is None else counted(details.contexts, kind)
    be = "is" if details.contexts == 1 else "are"
    memory = "" if details.used_bytes is None else f" and {_mebibytes(details.used_bytes)} of its memory"
    match details.kind:
        case LeakKind.ORPHANED_CLIENT:
            kept = f"kept by {processes}" if count else "in files that no process has open"
            ended = details.more + len(details.involved) - holders
            whose = "a process" if ended <= 1 else counted(ended, "process", "processes")
            return f"{contexts} of {whose} that ended {be} {kept}"
        case LeakKind.POD_GONE:
            return f"{processes} of pods that are gone hold{s} the GPU{memory}"
        case LeakKind.STUCK_EXIT:
            return f"{processes} cannot exit and hold{s} the GPU{memory}"
        case LeakKind.CTX_GROWTH:
            return f"{processes} make{s} contexts and free{s} hardly any: {contexts.lower()} by now"
        case LeakKind.FD_GROWTH:
            return f"{processes} open{s} files of the driver and close{s} none"
        case LeakKind.MEMORY_HELD:
            return f"{_mebibytes(details.used_bytes or 0)} of memory are used and no process has them"
        case LeakKind.FOREIGN_PROCESS:
            return f"{processes} use{s} the GPU{memory} without having been given it"
        case LeakKind.IDLE:
            return f"A pod has it and no process opened it for {policy.idle_ns // (60 * SECOND_NS)} min"
        case LeakKind.MANY_CONTEXTS:
            return f"{contexts} {be} on the GPU"


def _mebibytes(figure: int) -> str:
    return f"{figure // 2**20} MiB"
