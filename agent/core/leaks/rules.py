"""Rules on the use of GPUs, one for each kind of finding: pure functions of what is seen at one moment.

Invariants: a rule that cannot see what it needs says so (None) instead of saying that all is well; where
that is so of a single process, its suspect is not ``known``. Nothing is said of the agent, nor of who is
on the allow list. Absolute numbers make no finding of a leak.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from agent.core.leaks.growth import Name, Windows, growth, is_over
from agent.core.usage.ownership import (
    Given,
    holding,
    is_given,
    is_in_use,
    is_killable,
    is_service,
    name_of,
    places_of,
    pod_name,
    unclaimed_bytes,
    user_of,
)
from agent.model.health import Culprit, LeakKind
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
    ProcessLook,
    ProcessUse,
    Usage,
)


class Growth(NamedTuple):
    """That a process makes contexts or opens files and frees hardly any."""

    kind: LeakKind
    worst: int | None
    """The most that it had; None: unknown."""
    at_ns: int
    """When it was last seen to grow."""
    known: bool = True


GROWING: Final = (LeakKind.CTX_GROWTH, LeakKind.FD_GROWTH)


class SuspectKey(NamedTuple):
    """What makes two looks see the same thing."""

    kind: LeakKind
    who: ProcessKey | None
    where: Placement | None
    """The whole GPU, or the device that is idle; None: not known which GPU."""


class Suspect(msgspec.Struct, frozen=True):
    """A finding, or what will be one if it lasts."""

    key: SuspectKey
    place: Placement | None
    """Where it counts: a MIG device where the process is known to use only that."""
    culprits: tuple[Culprit, ...]
    contexts: int | None
    used_bytes: int | None
    since_ns: int
    for_ns: int
    """How long it must last."""
    known: bool = True
    """False: this time it cannot be told whether it is so, and nothing is concluded."""
    told: bool = False
    more: int = 0
    """Further processes that ended, of which the same holder keeps something."""
    inherited: bool = False
    """An earlier process of the agent found it, and what is known now may not be enough to find it again."""
    worst: int | None = None
    """Of what grows, the most that there was; None: only an earlier process of the agent counted it."""
    grown_ns: int = 0
    """When it was last seen to grow."""


Seen = Iterable[Suspect] | None
"""What a rule sees; None: it cannot see anything now."""


class Scene(msgspec.Struct, frozen=True):
    """All that is seen at one moment. None is what is not known now."""

    now_ns: int
    policy: LeakPolicy
    usage: Usage | None = None
    gpus: frozenset[GpuUuid] = frozenset()
    """The GPUs that NVML lists."""
    memory: Mapping[GpuUuid, GpuMemory] = msgspec.field(default_factory=dict)
    given: Given | None = None
    pods: Pods | None = None
    has_all_pods: bool = True
    """A pod that is not among ``pods`` is gone; otherwise it may only have no device."""
    windows: Windows = msgspec.field(default_factory=dict)
    watched: tuple[ProcessUse, ...] = ()
    """The processes of which something may be told."""
    workers: tuple[ProcessUse, ...] = ()
    """Those of them that do no work of others: what a server has is not its own."""
    before: Mapping[SuspectKey, Suspect] = msgspec.field(default_factory=dict)
    """What was found at the moment before."""
    growing: Mapping[Name, Growth] = msgspec.field(default_factory=dict)
    """The processes and GPUs that show growth, or have not freed what they grew by."""

    def user(self, process: ProcessUse, gpu: GpuUuid) -> MemoryUser | None:
        """Return what NVML lists of a process on a GPU."""
        return user_of(self.memory.get(gpu), process.key.pid)

    def is_free(self, process: ProcessUse) -> bool:
        """Return whether a process is one of which nothing is told."""
        return is_service(process, self.policy.allowed, self.policy.namespaces, self.pods)

    def lives(self, process: ProcessUse) -> bool | None:
        """Return whether the pod of a process lives; None: not known. A process in no pod has none."""
        pod = process.look.pod
        if not isinstance(pod, PodRef) or self.pods is None:
            return None
        seen = self.pods.get(pod.uid)
        if seen is None:
            return False if self.has_all_pods else None
        return seen.alive


# Of dead owners, dead pods, dying processes


def _orphaned(scene: Scene) -> Seen:
    """Find clients whose owner ended while others hold their file, with contexts in them.

    A file without a visible holder may be in a message that is never read, or only be mapped. What was made
    before the probe was attached may be no context at all: a monitor makes clients and no context.
    """
    if scene.usage is None:
        return None
    by_key = {process.key: process for process in scene.usage.processes}
    found = []
    for orphan in scene.usage.orphans:
        holders = [by_key[key] for key in orphan.holders if key in by_key]
        if not orphan.holders or any(not scene.is_free(holder) for holder in holders):
            found.append(replace(_orphan(orphan, holders, scene), known=orphan.contexts is not None))
    return found


def _orphan(orphan: Orphan, holders: list[ProcessUse], scene: Scene) -> Suspect:
    place = None if orphan.gpu is None else Placement(orphan.gpu)
    names = tuple(
        _culprit(holder.look, _hold_of(holder, orphan.gpu), scene, orphan.ended_ns) for holder in holders
    )
    owner = replace(
        _culprit(orphan.owner, None, scene, orphan.ended_ns),
        role="owner",
        contexts=orphan.contexts,
    )
    return Suspect(
        key=SuspectKey(LeakKind.ORPHANED_CLIENT, orphan.owner.key, place),
        place=place,
        culprits=(owner, *names),
        contexts=orphan.contexts,
        used_bytes=total(culprit.used_bytes for culprit in names),
        since_ns=orphan.ended_ns,
        for_ns=scene.policy.orphaned_client_ns,
        more=orphan.more,
    )


def _hold_of(process: ProcessUse, gpu: GpuUuid | None) -> GpuHold | None:
    return next((hold for hold in process.holds if hold.gpu == gpu), None)


def _pod_gone(scene: Scene) -> Seen:
    """Find processes that hold a GPU and whose pod is none that lives."""
    if scene.usage is None or scene.pods is None:
        return None
    for_ns = scene.policy.pod_gone_ns
    return [
        _suspect(LeakKind.POD_GONE, process, hold, scene, for_ns, known=lives is False)
        for process in scene.watched
        if isinstance(process.look.pod, PodRef) and (lives := scene.lives(process)) is not True
        for hold in process.holds
    ]


def _stuck(scene: Scene) -> Seen:
    """Find processes that began to exit, are not gone, and still have files of the driver."""
    if scene.usage is None:
        return None
    for_ns = scene.policy.stuck_exit_ns
    found = []
    for process in scene.watched:
        if process.exiting_since_ns is None:
            continue
        holds: tuple[GpuHold | None, ...] = process.holds or (None,)
        for hold in holds:
            suspect = _suspect(LeakKind.STUCK_EXIT, process, hold, scene, for_ns)
            found.append(replace(suspect, since_ns=process.exiting_since_ns))
    return found


# Of what grows


def _context_growth(scene: Scene) -> Seen:
    """Find processes that make contexts and free hardly any."""
    return _grown(LeakKind.CTX_GROWTH, scene)


def _fd_growth(scene: Scene) -> Seen:
    """Find processes of unknown contexts that open files of the driver and close none."""
    return _grown(LeakKind.FD_GROWTH, scene)


def _grown(kind: LeakKind, scene: Scene) -> Seen:
    usage = scene.usage
    if usage is None or usage.is_blind:
        return None
    if usage.complete and not scene.growing:
        return []
    found = []
    for process in scene.workers:
        for hold in process.holds:
            shown = scene.growing.get((process.key, hold.gpu))
            is_whole = usage.is_whole(hold.gpu)
            if is_whole and (shown is None or shown.kind is not kind):
                continue
            known = is_whole and shown is not None and shown.known
            suspect = _suspect(kind, process, hold, scene, 0, known=known)
            if shown is not None:
                suspect = replace(suspect, worst=shown.worst, grown_ns=shown.at_ns)
            found.append(suspect)
    return found


# Of who should not be there, and of what nobody has


def _foreign(scene: Scene) -> Seen:
    """Find processes that use a GPU of which their pod was given nothing, or that are in no pod."""
    if scene.usage is None or scene.given is None:
        return None
    given, for_ns = scene.given, scene.policy.foreign_process_ns
    return [
        _suspect(LeakKind.FOREIGN_PROCESS, process, hold, scene, for_ns, known=is_foreign is True)
        for process in scene.workers
        for hold in process.holds
        if (is_foreign := _is_foreign(process, hold, given, scene)) is not False
    ]


def _is_foreign(process: ProcessUse, hold: GpuHold, given: Given, scene: Scene) -> bool | None:
    """Whether a process is where it should not be; None: not known. Of a dead pod it is another finding."""
    memory = scene.memory.get(hold.gpu)
    is_used = is_in_use(process, hold, memory)
    if is_used is False:
        return False
    if isinstance(process.look.pod, PodRef):
        lives = scene.lives(process)
        if not lives:
            return None if lives is None else False
        places = places_of(hold, user_of(memory, process.key.pid))
        if is_given(given, places, name_of(process.look.pod, scene.pods)):
            return False
    return is_used if process.look.pod is not NoPod.UNKNOWN else None


_UNTOLD: Final = GpuMemory(used_bytes=None, total_bytes=None)


def _memory_held(scene: Scene) -> Seen:
    """Find used memory that no process has which NVML lists, on GPUs that no process holds."""
    if scene.usage is None or scene.usage.is_blind:
        return None
    found = []
    for gpu in sorted(scene.gpus):
        memory = scene.memory.get(gpu, _UNTOLD)
        held = unclaimed_bytes(memory)
        share = (memory.total_bytes or 0) * scene.policy.memory_held_percent // 100
        limit = max(scene.policy.memory_held_bytes, share)
        is_whole = scene.usage.is_whole(gpu)
        if not is_whole or ((held is None or held > limit) and not _may_be_held(gpu, scene.usage, scene)):
            suspect = _of_place(LeakKind.MEMORY_HELD, Placement(gpu), scene, scene.policy.memory_held_ns)
            found.append(replace(suspect, used_bytes=held, known=is_whole and held is not None))
    return found


def _may_be_held(gpu: GpuUuid, usage: Usage, scene: Scene) -> bool:
    """Whether the memory of a GPU may be that of a process; a service only has what NVML says."""
    memory = scene.memory.get(gpu)
    return any(orphan.gpu in {gpu, None} for orphan in usage.orphans) or any(
        hold.contexts is None or process.partial or is_in_use(process, hold, memory) is not False
        for process, hold in holding(usage, gpu)
        if not scene.is_free(process)
    )


# For information


def _idle(scene: Scene) -> Seen:
    """Find devices that a pod has and no process has open."""
    usage = scene.usage
    if usage is None or usage.is_blind or scene.given is None:
        return None
    return [
        replace(_of_place(LeakKind.IDLE, place, scene, scene.policy.idle_ns), known=usage.is_whole(place.gpu))
        for place in scene.given
        if not usage.is_whole(place.gpu) or not _is_open(place, usage, scene)
    ]


def _is_open(place: Placement, usage: Usage, scene: Scene) -> bool:
    memory = scene.memory.get(place.gpu)
    users = () if memory is None else memory.users
    return (
        any(Placement(place.gpu, user.gi, user.ci).overlaps(place) for user in users)
        or any(orphan.gpu in {place.gpu, None} for orphan in usage.orphans)
        or any(
            each.overlaps(place)
            for process, hold in holding(usage, place.gpu)
            if not scene.is_free(process)
            for each in places_of(hold, scene.user(process, place.gpu))
        )
    )


def _many_contexts(scene: Scene) -> Seen:
    """Find GPUs with very many contexts, whoever has them."""
    if scene.usage is None:
        return None
    return [
        replace(_of_place(LeakKind.MANY_CONTEXTS, Placement(each.gpu), scene, 0), contexts=each.contexts)
        for each in scene.usage.totals
        if each.contexts is not None and each.contexts > scene.policy.contexts_many
    ]


def prepared(scene: Scene) -> Scene:
    """Return a scene with what several rules need of every process, found out once."""
    if scene.usage is None:
        return scene
    growing: dict[Name, Growth] = {}
    policy = scene.policy
    watched = tuple([each for each in scene.usage.processes if not scene.is_free(each)])
    workers = tuple(
        [each for each in watched if not is_service(each, policy.servers, policy.namespaces, scene.pods)]
    )
    if scene.windows or scene.before:
        for process in workers:
            for hold in process.holds:
                shown = _growth_of(process, hold, scene)
                if shown is not None:
                    growing[process.key, hold.gpu] = shown
    return replace(scene, watched=watched, workers=workers, growing=growing)


def _growth_of(process: ProcessUse, hold: GpuHold, scene: Scene) -> Growth | None:
    """Return the growth that a process shows, or showed and has not freed."""
    window = scene.windows.get((process.key, hold.gpu))
    now = growth(process, hold, window, scene.policy) if window else None
    for kind in GROWING if now is None else (now,):
        key = SuspectKey(kind, process.key, Placement(hold.gpu))
        before = scene.before.get(key)
        amount = (hold.contexts or 0) if kind is LeakKind.CTX_GROWTH else hold.fds
        if now is not None:
            worst = (before and before.worst) or 0
            return Growth(kind, max(amount, worst), scene.now_ns)
        if before is None or not before.told:
            continue
        if before.worst is None and process.partial:
            # What an earlier process of the agent counted cannot be counted any more.
            return Growth(kind, None, before.grown_ns, known=False)
        worst = before.worst if before.worst is not None else (before.contexts or 0)
        if not is_over(kind, hold, worst, scene.policy):
            return Growth(kind, worst, before.grown_ns)
    return None


RULES: Final[Mapping[LeakKind, Callable[[Scene], Seen]]] = {
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


# Suspects


def _suspect(
    kind: LeakKind,
    process: ProcessUse,
    hold: GpuHold | None,
    scene: Scene,
    for_ns: int,
    *,
    known: bool = True,
) -> Suspect:
    where = None if hold is None else Placement(hold.gpu)
    culprit = _culprit(process.look, hold, scene, scene.now_ns)
    places = () if hold is None else places_of(hold, scene.user(process, hold.gpu))
    return Suspect(
        key=SuspectKey(kind, process.key, where),
        place=places[0] if len(places) == 1 else where,
        culprits=(culprit,),
        contexts=culprit.contexts,
        used_bytes=culprit.used_bytes,
        since_ns=scene.now_ns,
        for_ns=for_ns,
        known=known,
    )


def _of_place(kind: LeakKind, place: Placement, scene: Scene, for_ns: int) -> Suspect:
    return Suspect(
        key=SuspectKey(kind, None, place),
        place=place,
        culprits=(),
        contexts=None,
        used_bytes=None,
        since_ns=scene.now_ns,
        for_ns=for_ns,
    )


def _culprit(look: ProcessLook, hold: GpuHold | None, scene: Scene, since_ns: int) -> Culprit:
    user = None if hold is None else user_of(scene.memory.get(hold.gpu), look.key.pid)
    return Culprit(
        pid=look.key.pid,
        start_ticks=look.key.start_ticks,
        comm=look.comm,
        owner=look.owner,
        pod=pod_name(look, scene.pods),
        state=look.state,
        killable=is_killable(look),
        contexts=None if hold is None else hold.contexts,
        used_bytes=None if user is None else user.used_bytes,
        since_ns=since_ns,
    )


def total(figures: Iterable[int | None]) -> int | None:
    """Return the sum; None if there is no figure, or one is missing."""
    found = tuple(figures)
    known = [figure for figure in found if figure is not None]
    return sum(known) if known and len(known) == len(found) else None
