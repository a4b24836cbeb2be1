"""Use of GPUs, for tests: processes, usage snapshots, memory, pods."""

from collections.abc import Iterable

from agent.model.facts import AllocationsListed, GpuMemorySeen, GpuUseSeen, PodsSeen
from agent.model.health import Condition, LeakKind
from agent.model.ids import ALL, DeviceId, GpuUuid, Placement
from agent.model.policy import LeakPolicy, Policy
from agent.model.structs import replace
from agent.model.usage import (
    GONE,
    GpuHold,
    GpuMemory,
    GpuTotal,
    MemoryUser,
    NoPod,
    Orphan,
    PodRef,
    PodSeen,
    PodUid,
    ProcessInfo,
    ProcessKey,
    ProcessStatus,
    ProcessUse,
    Usage,
    UsageSource,
)
from tests.core.build import DEFAULT, START_NS, U0, Node, S, gpu, healthy_node

MIB = 2**20

POD_A = PodUid("aaaaaaaa-0000-4000-8000-000000000000")
POD_B = PodUid("bbbbbbbb-0000-4000-8000-000000000000")
A = PodSeen("ns1", "job-a")
B = PodSeen("ns1", "job-b")
BOTH = {POD_A: A, POD_B: B}

LEAKS = LeakPolicy()
FLIPPING = replace(DEFAULT, leaks=replace(LEAKS, effect="unhealthy-when-free"))


def key(pid: int, start: int | None = None) -> ProcessKey:
    """A process's name; by default one that began at its pid."""
    return ProcessKey(pid, pid if start is None else start)


def process_status(
    pid: int,
    *,
    pod: PodUid | None = None,
    comm: str = "python3",
    state: str = "S",
    start: int | None = None,
    service: str | None = "",
) -> ProcessStatus:
    """A process's entry in /proc; ``service`` is what root started it as, None if that is unknown."""
    ref = NoPod.HOST if pod is None else PodRef(pod, None, "burstable")
    started_as = None if service is None else (service,)
    return ProcessStatus(key(pid, start), comm, state, "/", ref, started_as=started_as)


def hold(
    on: GpuUuid = U0,
    contexts: int | None = 1,
    *,
    fds: int = 5,
    freed: int = 0,
    slices: tuple[Placement, ...] = (),
) -> GpuHold:
    """What a process has of a GPU; it made what it has and what it freed."""
    return GpuHold(on, fds, contexts, allocated=(contexts or 0) + freed, freed=freed, slices=slices)


def process(
    pid: int,
    *holds: GpuHold,
    pod: PodUid | None = None,
    comm: str = "python3",
    state: str = "S",
    start: int | None = None,
    since_ns: int = 0,
    exiting_since_ns: int | None = None,
    partial: bool = False,
    is_agent: bool = False,
    service: str | None = "",
) -> ProcessUse:
    """A process with files of the driver; by default with one context on U0."""
    return ProcessUse(
        status=process_status(pid, pod=pod, comm=comm, state=state, start=start, service=service),
        since_ns=since_ns,
        holds=holds or (hold(),),
        files=3,
        fds=9,
        exiting_since_ns=exiting_since_ns,
        partial=partial,
        is_agent=is_agent,
    )


def orphan(
    owner: int, *holders: int, on: GpuUuid | None = U0, contexts: int | None = 4, ended_ns: int = START_NS
) -> Orphan:
    """What a process that ended left with others."""
    return Orphan(
        owner=replace(process_status(owner, pod=POD_A, comm="train"), state=GONE),
        ended_ns=ended_ns,
        gpu=on,
        clients=1,
        contexts=contexts,
        holders=tuple(key(pid) for pid in holders),
        since_ns=0,
    )


def seen(
    *processes: ProcessUse,
    orphans: Iterable[Orphan] = (),
    complete: bool = True,
    source: UsageSource = "probe",
    totals: tuple[GpuTotal, ...] = (),
    at_ns: int = 0,
    doubted: Iterable[GpuUuid] = (),
) -> GpuUseSeen:
    """A usage snapshot; of ``doubted`` GPUs something may be missing."""
    return GpuUseSeen(
        Usage(
            at_ns,
            tuple(processes),
            tuple(orphans),
            totals,
            source=source,
            complete=complete and not doubted,
            doubted=frozenset(doubted),
        )
    )


def user(pid: int, used: int | None, gi: int = ALL, ci: int = ALL) -> MemoryUser:
    """A process that NVML lists; MiB."""
    return MemoryUser(pid, None if used is None else used * MIB, gi, ci)


def memory(
    *users: MemoryUser,
    on: GpuUuid = U0,
    used: int | None = None,
    total: int = 80 * 1024,
    info: ProcessInfo = "ok",
) -> GpuMemorySeen:
    """What NVML reports of the memory of a GPU, in MiB; by default as much is used as its processes have."""
    known = sum(each.used_bytes or 0 for each in users) if used is None else used * MIB
    return GpuMemorySeen(on, GpuMemory(known, total * MIB, tuple(sorted(users)), info))


def allocated(*devices: tuple[str, str]) -> AllocationsListed:
    """The kubelet lists devices and the pods that have them."""
    return AllocationsListed({DeviceId(device): pod for device, pod in devices})


def pods(**alive: bool) -> PodsSeen:
    """The pods A and B, unless they are marked as gone: ``pods(a=False)``."""
    return PodsSeen(
        {POD_A: replace(A, alive=alive.get("a", True)), POD_B: replace(B, alive=alive.get("b", True))}
    )


def node(policy: Policy = DEFAULT) -> Node:
    """A healthy node with two GPUs that no pod has."""
    made = healthy_node(gpu(0), gpu(1), policy=policy)
    made.apply(allocated(), pods())
    return made


def with_leaks(**settings: object) -> Policy:
    """A policy with other settings for leaks."""
    return replace(DEFAULT, leaks=replace(LEAKS, **settings))  # type: ignore[arg-type]


def found(on: Node, kind: LeakKind | None = None) -> list[Condition]:
    """The published findings, as conditions whose cause lasts."""
    return [
        condition
        for condition in on.conditions()
        if condition.lasts and condition.details is not None and kind in {None, condition.details.kind}
    ]


def kinds(on: Node) -> set[tuple[str, GpuUuid]]:
    """What is found where."""
    return {
        (condition.details.kind.value, condition.placement.gpu)
        for condition in found(on)
        if condition.details is not None
    }


def pids(condition: Condition) -> list[int]:
    """The processes that a condition names."""
    assert condition.details is not None
    return [each.pid for each in condition.details.involved]


def repeat_facts(
    on: Node, for_ns: int, *facts: GpuUseSeen | AllocationsListed | PodsSeen | GpuMemorySeen
) -> None:
    """Let time pass while the sources report the same facts again and again, as they do."""
    until_ns = on.now_ns + for_ns
    while on.now_ns < until_ns:
        on.apply(*(_as_of(fact, on.now_ns) for fact in facts))
        on.until(min(on.now_ns + S, until_ns))


def _as_of(
    fact: GpuUseSeen | AllocationsListed | PodsSeen | GpuMemorySeen, now_ns: int
) -> GpuUseSeen | AllocationsListed | PodsSeen | GpuMemorySeen:
    return GpuUseSeen(replace(fact.usage, at_ns=now_ns)) if isinstance(fact, GpuUseSeen) else fact
