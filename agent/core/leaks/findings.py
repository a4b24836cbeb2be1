"""What is found of the use of GPUs, from one look to the next: suspects age, are told, and end.

Invariants: there is one finding for each kind, process (pid and start) and GPU. It is told when its cause
has lasted for its time, so time alone brings it, and it ends when the cause does. What is not known now
neither makes a finding nor ends one. A restart of the agent ends none: what it found before is taken over.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from agent.core.leaks.growth import Windows, followed, next_part_at, warm_at
from agent.core.leaks.rules import RULES, Scene, Seen, Suspect, SuspectKey, prepared, total
from agent.core.shares import Shares
from agent.core.wording import counted
from agent.model.health import MAX_CULPRITS, Condition, Culprit, Details, LeakKind, Reason
from agent.model.ids import GpuUuid, Placement
from agent.model.policy import SECOND_NS, LeakPolicy
from agent.model.structs import replace
from agent.model.usage import ProcessKey, ProcessUse, Usage

MAX_SUSPECTS: Final = 4_096
"""Findings and what may become one; where there are more, the pod with most of one kind loses its newest."""
MAX_OF_HOLDER: Final = 256
"""Of one kind and pod, or of all processes of the host; those beyond are counted."""

AWAITED_NS: Final = 120 * SECOND_NS
"""What an earlier process of the agent found is kept for so long if nobody tells who uses the driver."""

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
    """All that is kept from one look to the next."""

    suspects: Mapping[SuspectKey, Suspect] = msgspec.field(default_factory=dict)
    windows: Windows = msgspec.field(default_factory=dict)
    due_ns: int | None = None
    """When time alone brings or ends something."""
    begun_ns: int = 0
    """When this process of the agent began."""
    beyond: Mapping[tuple[LeakKind, Placement | None], int] = msgspec.field(default_factory=dict)
    """Suspects for which there is no room, by kind and place."""

    def findings(self) -> Iterator[Suspect]:
        """Yield the suspects that are told."""
        return (suspect for suspect in self.suspects.values() if suspect.told)


def step(leaks: Leaks, scene: Scene) -> Leaks:
    """Return what is found now; the same object if nothing changed."""
    if scene.usage is not None and not scene.usage.is_blind:
        windows = followed(scene.usage, leaks.windows, scene.policy, scene.now_ns)
        leaks = leaks if windows is leaks.windows else replace(leaks, windows=windows)
    scene = prepared(replace(scene, windows=leaks.windows, before=leaks.suspects))
    before: dict[LeakKind, dict[SuspectKey, Suspect]] = {kind: {} for kind in RULES}
    for key, suspect in leaks.suspects.items():
        before[key.kind][key] = suspect
    living = None if scene.usage is None else {process.key: process for process in scene.usage.processes}
    kept: Shares[Hashable, SuspectKey, Suspect] = Shares(MAX_SUSPECTS, MAX_OF_HOLDER, rejects=True)
    beyond: Counter[tuple[LeakKind, Placement | None]] = Counter()
    for kind, rule in RULES.items():
        judged = list(_judged(before[kind], rule(scene), living, scene.now_ns))
        # Those that are known keep their places, so that none ages anew because of others.
        for suspect in sorted(judged, key=lambda each: each.key not in leaks.suspects):
            for lost in kept.put(_holder_of(suspect), suspect.key, suspect):
                beyond[lost.key.kind, lost.value.place] += 1 + lost.value.more
    suspects = {entry.key: entry.value for entry in kept}
    found = replace(
        leaks, suspects=suspects, beyond=dict(beyond), due_ns=_due_at(suspects, scene, leaks.begun_ns)
    )
    return leaks if found == leaks else found


def _holder_of(suspect: Suspect) -> Hashable:
    """Return whose share a suspect takes: a pod's, the host's, or that of a place where nobody is named."""
    kind, _, where = suspect.key
    if not suspect.culprits:
        return (kind, where)
    # Of an orphan the holders follow the owner.
    return (kind, suspect.culprits[-1].pod or suspect.culprits[-1].owner)


Living = Mapping[ProcessKey, ProcessUse] | None


def _judged(
    before: Mapping[SuspectKey, Suspect], seen: Seen, living: Living, now_ns: int
) -> Iterator[Suspect]:
    if seen is None:
        yield from (suspect for suspect in before.values() if _is_there(suspect, living))
        return
    named = set()
    for suspect in seen:
        named.add(suspect.key)
        known = before.get(suspect.key)
        if suspect.known:
            yield _aged(suspect, known, now_ns)
        elif known is not None:
            yield known
    for key, suspect in before.items():
        if suspect.inherited and key not in named and _is_there(suspect, living):
            yield suspect


def _aged(suspect: Suspect, known: Suspect | None, now_ns: int) -> Suspect:
    """Return a suspect that is seen (again), with the time since when it is one."""
    if known is None:
        return replace(suspect, told=True) if now_ns - suspect.since_ns >= suspect.for_ns else suspect
    since_ns = min(known.since_ns, suspect.since_ns)
    culprits = tuple([_since(each, since_ns) for each in suspect.culprits])
    told = known.told or now_ns - since_ns >= suspect.for_ns
    return replace(suspect, culprits=culprits, since_ns=since_ns, told=told)


def _since(culprit: Culprit, since_ns: int) -> Culprit:
    return replace(culprit, since_ns=since_ns) if culprit.since_ns > since_ns else culprit


def _is_there(suspect: Suspect, living: Living) -> bool:
    """Whether who was named may still have the GPU open; that it has not ends what nothing else can.

    Who was found to hold what another left behind has the other's files open, perhaps none of the GPU.
    """
    _, who, where = suspect.key
    if who is None or living is None:
        return True
    process = living.get(who)
    return process is not None and (
        suspect.inherited or where is None or any(hold.gpu == where.gpu for hold in process.holds)
    )


def _due_at(suspects: Mapping[SuspectKey, Suspect], scene: Scene, begun_ns: int) -> int | None:
    times = [suspect.since_ns + suspect.for_ns for suspect in suspects.values() if not suspect.told]
    if scene.usage is not None:
        times += warm_at(scene.usage, scene.policy, scene.now_ns)
    elif suspects:
        times.append(begun_ns + AWAITED_NS)
    for key in suspects:
        if key.kind in {LeakKind.CTX_GROWTH, LeakKind.FD_GROWTH} and key.who and key.where:
            window = scene.windows.get((key.who, key.where.gpu), ())
            times += next_part_at(window, scene.policy)
    return min((at_ns for at_ns in times if at_ns > scene.now_ns), default=None)


def without_news(leaks: Leaks, policy: LeakPolicy, now_ns: int) -> Leaks:
    """Return what is kept if nobody ever told who uses the driver: nobody looks, or not yet."""
    is_awaited = policy.is_watched and now_ns < leaks.begun_ns + AWAITED_NS
    if not leaks.suspects or is_awaited:
        return leaks
    return replace(leaks, suspects={}, due_ns=None)


def without_inherited(leaks: Leaks, gpu: GpuUuid) -> Leaks:
    """Return what is found without what only an earlier process of the agent could know of a GPU."""
    left = {
        key: suspect
        for key, suspect in leaks.suspects.items()
        if not (suspect.inherited and suspect.place is not None and suspect.place.gpu == gpu)
    }
    return leaks if len(left) == len(leaks.suspects) else replace(leaks, suspects=left)


def inherited(conditions: Iterable[Condition], now_ns: int) -> Leaks:
    """Return what a process of the agent begins with, from the conditions that an earlier one left."""
    suspects: dict[SuspectKey, Suspect] = {}
    for condition in conditions:
        if condition.lasts and condition.details is not None:
            for suspect in _taken_over(condition, condition.details):
                suspects[suspect.key] = suspect
    due_ns = now_ns + AWAITED_NS if suspects else None
    return Leaks(suspects=suspects, due_ns=due_ns, begun_ns=now_ns)


def _taken_over(condition: Condition, details: Details) -> Iterator[Suspect]:
    """Yield a suspect for each process that was named, or one where none was.

    Of an orphaned client the probe of the new process knows no owner: it is over when the last that was
    named as its holder is gone.
    """
    place = condition.placement
    culprits: tuple[Culprit | None, ...] = tuple(each for each in details.culprits if each.role == "holder")
    for culprit in culprits or (None,):
        who = None if culprit is None else ProcessKey(culprit.pid, culprit.start_ticks)
        where = place if culprit is None else Placement(place.gpu)
        yield Suspect(
            key=SuspectKey(details.kind, who, where),
            place=place,
            culprits=() if culprit is None else (culprit,),
            contexts=details.contexts if culprit is None else culprit.contexts,
            used_bytes=details.used_bytes if culprit is None else culprit.used_bytes,
            since_ns=condition.since_ns,
            for_ns=0,
            told=True,
            inherited=details.kind is LeakKind.ORPHANED_CLIENT,
        )


# What is told of one place


def grouped(leaks: Leaks) -> Mapping[tuple[LeakKind, Placement], tuple[Suspect, ...]]:
    """Return the findings by kind and place; those of which the GPU is not known are left out."""
    found: dict[tuple[LeakKind, Placement], list[Suspect]] = {}
    for suspect in leaks.findings():
        if suspect.place is not None:
            found.setdefault((suspect.key.kind, suspect.place), []).append(suspect)
    return {name: tuple(suspects) for name, suspects in found.items()}


def details_of(
    kind: LeakKind, findings: Iterable[Suspect], usage: Usage | None, policy: LeakPolicy, *, beyond: int = 0
) -> Details:
    """Return what findings of one kind at one place rest on, together; ``beyond``: further ones."""
    found = tuple(findings)
    named = {(each.pid, each.start_ticks): each for finding in found for each in finding.culprits}
    # Holders rather than owners: they can be ended.
    listed = sorted(named, key=lambda key: (named[key].role == "owner", key))[:MAX_CULPRITS]
    return Details(
        kind=kind,
        culprits=tuple(named[key] for key in sorted(listed)),
        more=len(named) - len(listed) + sum(finding.more for finding in found) + beyond,
        contexts=total(finding.contexts for finding in found),
        used_bytes=total(finding.used_bytes for finding in found),
        incomplete=usage is not None and not usage.complete,
        certainty="verified" if usage is None else usage.certainty,
        critical=any(_is_critical(finding, policy) for finding in found),
    )


def _is_critical(finding: Suspect, policy: LeakPolicy) -> bool:
    if finding.key.kind is not LeakKind.CTX_GROWTH:
        return False
    is_many = (finding.contexts or 0) >= policy.growth_critical_live
    return is_many or finding.grown_ns - finding.since_ns >= LONG * policy.growth_window_ns


def message_of(details: Details, policy: LeakPolicy) -> str:  # noqa: PLR0911 - a table
    """Return what is found in one sentence, without pids and names of pods: it is shown to everyone."""
    holders = sum(each.role == "holder" for each in details.culprits)
    is_orphan = details.kind is LeakKind.ORPHANED_CLIENT
    count = holders if is_orphan else details.more + holders
    processes, s = counted(count, "process", "processes"), "s" if count == 1 else ""
    # Graphics make the same object, and on this driver version nobody has told them apart yet.
    kind = "context" if details.certainty == "verified" else "compute or graphics context"
    contexts = "Contexts" if details.contexts is None else counted(details.contexts, kind)
    be = "is" if details.contexts == 1 else "are"
    memory = "" if details.used_bytes is None else f" and {_mebibytes(details.used_bytes)} of its memory"
    match details.kind:
        case LeakKind.ORPHANED_CLIENT:
            kept = f"kept by {processes}" if count else "in files that no process has open"
            ended = details.more + len(details.culprits) - holders
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
