"""The only writer of state: one fact in, the new state and what is to be done out.

Invariants: step is pure and total: every fact in any state gives a state. What is to be done is
read off the difference of the two states (core.changes), so nothing can change without being told,
and nothing is told twice. All effects of one fact come out of one step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, assert_never

from agent.core import conditions, registration, xids
from agent.core.changes import changes
from agent.core.inventory import offers
from agent.core.registration import Registration
from agent.core.state import State
from agent.model import facts
from agent.model.effects import Effect, EndProcess, Event, EventKind, RecordEvent
from agent.model.gpu import Gpu
from agent.model.health import ConditionKey, Reason
from agent.model.ids import ALL, GpuUuid, Placement, ResourceName
from agent.model.policy import SECOND_NS
from agent.model.snapshot import DriverView, TaskView

IDLE_NS: Final = 5 * SECOND_NS
"""The engine steps at least this often."""

MAX_UNLISTED_XIDS: Final = 64
"""Different XIDs that are not in the table kept apart on one GPU; further ones are OTHER_XID."""

OTHER_XID: Final = -1

SAME_FAULT_NS: Final = 2 * SECOND_NS
"""Two sources that report the same XID of a GPU within this time saw one fault."""

_REASONS: Final[Mapping[int, Reason]] = {15: Reason.GPU_LOST, 16: Reason.RESET_REQUIRED}
"""What NVML's return codes GPU_IS_LOST and RESET_REQUIRED mean; any other is NVML_ERROR."""


def step(state: State, fact: facts.Fact, now_ns: int) -> tuple[State, tuple[Effect, ...], int]:
    """Return the new state, what is to be done, and when to step again at the latest.

    If nothing changed, the state is the same object and nothing is to be done.
    """
    applied, notices = _apply(state, fact, now_ns)
    settled = _settle(state, applied, now_ns)
    if settled is state and not notices:
        return state, (), _wake_at(state, now_ns)
    if settled is not state:
        settled = replace(settled, changed_ns=now_ns)
    effects = (*notices, *changes(state, settled, now_ns))
    return settled, effects, _wake_at(settled, now_ns)


_Applied = tuple[State, tuple[Effect, ...]]


def _apply(state: State, fact: facts.Fact, now_ns: int) -> _Applied:  # noqa: C901, PLR0911, PLR0912 - a table
    match fact:
        case facts.Tick():
            return state, ()
        case facts.XidReported():
            return _xid_reported(state, fact, now_ns)
        case facts.GpuProbePassed():
            return _probe_passed(state, fact, now_ns), ()
        case facts.GpuCallFailed():
            return _call_failed(state, fact, now_ns), ()
        case facts.GpuCallOverdue():
            return _call_overdue(state, fact, now_ns), ()
        case facts.GpusEnumerated():
            return _enumerated(state, fact, now_ns), ()
        case facts.DriverReady():
            return _driver_ready(state, fact), ()
        case facts.DriverUnavailable():
            return _driver_unavailable(state, fact, now_ns), ()
        case facts.DriverCallOverdue():
            return _unless_equal(state, replace(state, driver_overdue=fact.call)), ()
        case facts.DriverCallAnswered():
            return _unless_equal(state, replace(state, driver_overdue=None)), ()
        case facts.KubeletSocketSeen():
            return _unless_equal(state, replace(state, kubelet=fact.identity)), ()
        case (
            facts.Registered() | facts.RegistrationFailed() | facts.WatchersChanged() | facts.OwnSocketLost()
        ):
            return _registration_told(state, fact, now_ns), ()
        case facts.TaskReported():
            return _task_reported(state, fact), ()
        case facts.FactsLost():
            return _facts_lost(state, fact, now_ns)
        case facts.PolicyChanged():
            return _policy_changed(state, fact), ()
        case facts.HealthEventsUnsupported():
            return state, (_unsupported(state, fact, now_ns),)
        case facts.WatchedDirectoryDeleted():
            return state, (_directory_deleted(fact),)
        case _:
            assert_never(fact)


def _unless_equal(old: State, new: State) -> State:
    """Return the old object if nothing changed."""
    return old if new == old else new


# XIDs


def _xid_reported(state: State, fact: facts.XidReported, now_ns: int) -> _Applied:
    if fact.gpu is None or fact.gpu not in state.gpus:
        return state, (_xid_notice("An XID of an unknown device marks no device", fact, None, now_ns),)
    gpu = state.gpus[fact.gpu]
    code = _code(fact.xid, state.xids.get(gpu.uuid, {}))
    seen = state.recent_xids.get((gpu.uuid, code))
    if seen is not None and seen[0] != fact.source and now_ns - seen[1] <= SAME_FAULT_NS:
        return state, ()
    counted = _with_xid_counted(state, gpu.uuid, code, fact, now_ns)
    if not xids.flips_under_compat(fact.xid, state.policy.extra_ignored_xids):
        ignored = _xid_notice("An XID was ignored by policy", fact, gpu, now_ns, warning=False)
        return counted, (ignored,)
    place = _place(gpu, fact)
    if place is None:
        return counted, (_xid_notice("An XID of an unknown MIG device marks no device", fact, gpu, now_ns),)
    flipped = conditions.raised(
        counted.conditions,
        source=fact.source,
        reason=Reason.XID,
        placement=place,
        code=code,
        count=fact.count,
        message=f"XID {fact.xid} was reported",
        recovery=xids.recovery_of(code),
        evidence=xids.evidence_of(code),
        now_ns=now_ns,
    )
    return replace(counted, conditions=flipped), ()


def _code(xid: int, counts: Mapping[int, int]) -> int:
    """Return the XID, or what stands for it where the driver invents ever new ones."""
    if xid in xids.CLASSES or xid in counts:
        return xid
    return xid if len(counts.keys() - xids.CLASSES.keys()) < MAX_UNLISTED_XIDS else OTHER_XID


def _place(gpu: Gpu, fact: facts.XidReported) -> Placement | None:
    """Return where the fault is; None: at a MIG device that the GPU does not have."""
    if not gpu.mig_devices:
        return gpu.placement
    place = Placement(gpu.uuid, fact.gi, fact.ci)
    there = (Placement(gpu.uuid, mig.gi, mig.ci) for mig in gpu.mig_devices)
    return place if any(place.overlaps(device) for device in there) else None


def _with_xid_counted(state: State, gpu: GpuUuid, code: int, fact: facts.XidReported, now_ns: int) -> State:
    counts = state.xids.get(gpu, {})
    recent = {key: seen for key, seen in state.recent_xids.items() if now_ns - seen[1] <= SAME_FAULT_NS}
    return replace(
        state,
        xids={**state.xids, gpu: {**counts, code: counts.get(code, 0) + fact.count}},
        recent_xids={**recent, (gpu, code): (fact.source, now_ns)},
    )


def _xid_notice(
    message: str, fact: facts.XidReported, gpu: Gpu | None, now_ns: int, *, warning: bool = True
) -> RecordEvent:
    fields: dict[str, object] = {"xid": fact.xid, "count": fact.count, "source": fact.source}
    if gpu is not None:
        fields |= {"gpu": gpu.index, "uuid": gpu.uuid}
    if fact.gi != ALL:
        fields |= {"gi": fact.gi, "ci": fact.ci}
    return RecordEvent(Event(EventKind.XID, message, warning=warning, fields=fields), now_ns)


# Probes and calls


def _probe_passed(state: State, fact: facts.GpuProbePassed, now_ns: int) -> State:
    if fact.gpu not in state.gpus:
        return state
    answered = _with_answer(state, fact.gpu)
    if state.driver.ready is False or fact.gpu not in state.present:
        # It was under way when the driver or the GPU went, and says nothing of their return.
        return answered
    active = conditions.after_clean_probe(
        answered.conditions, fact.gpu, hung=answered.hung, policy=state.policy, now_ns=now_ns
    )
    return answered if active is answered.conditions else replace(answered, conditions=active)


def _call_failed(state: State, fact: facts.GpuCallFailed, now_ns: int) -> State:
    if fact.gpu not in state.gpus:
        return state
    active = conditions.raised(
        conditions.after_bad_probe(state.conditions, fact.gpu),
        source=fact.source,
        reason=_REASONS.get(fact.code, Reason.NVML_ERROR),
        placement=Placement(fact.gpu),
        code=fact.code,
        message=fact.message,
        now_ns=now_ns,
    )
    return replace(_with_answer(state, fact.gpu), conditions=active)


def _call_overdue(state: State, fact: facts.GpuCallOverdue, now_ns: int) -> State:
    if fact.gpu not in state.gpus:
        return state
    active = conditions.raised(
        conditions.after_bad_probe(state.conditions, fact.gpu),
        source=fact.source,
        reason=Reason.NVML_TIMEOUT,
        placement=Placement(fact.gpu),
        message=f"NVML call {fact.call} did not answer within {fact.deadline_ns / SECOND_NS:g} s",
        now_ns=now_ns,
    )
    return replace(
        state,
        conditions=active,
        overdue={**state.overdue, fact.gpu: fact.call},
        probed=state.probed | {fact.gpu},
    )


def _with_answer(state: State, gpu: GpuUuid) -> State:
    """Return the state after a GPU answered, well or not: it has a verdict and is not overdue."""
    if gpu in state.probed and gpu not in state.overdue:
        return state
    overdue = {other: call for other, call in state.overdue.items() if other != gpu}
    return replace(state, overdue=overdue, probed=state.probed | {gpu})


# Driver and inventory


def _enumerated(state: State, fact: facts.GpusEnumerated, now_ns: int) -> State:
    present = frozenset(gpu.uuid for gpu in fact.gpus)
    known = {**state.gpus, **{gpu.uuid: gpu for gpu in fact.gpus}}
    first_probes_by_ns = state.first_probes_by_ns
    if present - state.present - state.probed:
        first_probes_by_ns = now_ns + state.policy.first_probe_wait_ns
    listed = replace(
        state,
        gpus=known,
        present=present,
        control_nodes=fact.control_nodes,
        conditions=_with_missing_gpus(state.conditions, known, present, now_ns),
        first_probes_by_ns=first_probes_by_ns,
    )
    return _unless_equal(state, _with_offers(listed))


def _with_missing_gpus(
    active: conditions.Conditions, known: Iterable[GpuUuid], present: frozenset[GpuUuid], now_ns: int
) -> conditions.Conditions:
    """Note each GPU that is not listed; one that was noted and is listed again was re-bound."""
    for gpu in known:
        note = active.get(ConditionKey(facts.NVML, Reason.GPU_LOST, Placement(gpu), 0))
        is_noted = note is not None and not note.reset_seen
        if is_noted and gpu in present:
            active = conditions.after_reset(active, (gpu,))
        elif not is_noted and gpu not in present:
            active = conditions.raised(
                conditions.after_bad_probe(active, gpu),
                source=facts.NVML,
                reason=Reason.GPU_LOST,
                placement=Placement(gpu),
                message="NVML does not list the GPU any more",
                now_ns=now_ns,
            )
    return active


def _with_offers(state: State) -> State:
    return replace(state, offers=offers(state.gpus.values(), state.policy, state.offers))


def _driver_ready(state: State, fact: facts.DriverReady) -> State:
    view = DriverView(
        ready=True,
        driver_version=fact.driver_version,
        nvml_version=fact.nvml_version,
        cuda_version=fact.cuda_version,
    )
    active = state.conditions
    if state.driver_unloaded:
        active = conditions.after_reset(active, state.gpus)
    return _unless_equal(state, replace(state, driver=view, driver_unloaded=False, conditions=active))


def _driver_unavailable(state: State, fact: facts.DriverUnavailable, now_ns: int) -> State:
    view = DriverView(ready=False, reason=fact.reason, message=fact.message)
    unloaded = state.driver_unloaded or fact.unloaded
    if view == state.driver:
        return _unless_equal(state, replace(state, driver_unloaded=unloaded))
    active = state.conditions
    for gpu in state.gpus:
        active = conditions.raised(
            conditions.after_bad_probe(active, gpu),
            source=fact.source,
            reason=fact.reason,
            placement=Placement(gpu),
            message=fact.message,
            now_ns=now_ns,
        )
    return replace(
        state,
        driver=view,
        driver_unloaded=unloaded,
        conditions=active,
        overdue={},
        driver_overdue=None,
    )


def _policy_changed(state: State, fact: facts.PolicyChanged) -> State:
    return _unless_equal(state, _with_offers(replace(state, policy=fact.policy)))


# Kubelet and tasks


def _registration_told(state: State, fact: registration.Told, now_ns: int) -> State:
    standing = state.registrations.get(fact.resource)
    if standing is None:
        return state
    told = registration.told(standing, fact, policy=state.policy, now_ns=now_ns)
    if told == standing:
        return state
    # Who registered looked at the socket itself, perhaps before who watches the directory did.
    kubelet = state.kubelet if told.kubelet == standing.kubelet else told.kubelet
    return replace(state, kubelet=kubelet, registrations={**state.registrations, fact.resource: told})


def _task_reported(state: State, fact: facts.TaskReported) -> State:
    old = state.tasks.get(fact.task)
    failures = (0 if old is None else old.failures) + (0 if fact.running else 1)
    new = TaskView(running=fact.running, failures=failures, message=fact.message)
    return _unless_equal(state, replace(state, tasks={**state.tasks, fact.task: new}))


def _facts_lost(state: State, fact: facts.FactsLost, now_ns: int) -> _Applied:
    total = state.facts_lost.get(fact.lost_from, 0) + fact.count
    event = Event(
        EventKind.LOSS,
        "Facts were lost because the inbox was full",
        warning=True,
        fields={"source": fact.lost_from, "count": fact.count, "total": total},
    )
    lost = {**state.facts_lost, fact.lost_from: total}
    return replace(state, facts_lost=lost), (RecordEvent(event, now_ns),)


def _unsupported(state: State, fact: facts.HealthEventsUnsupported, now_ns: int) -> RecordEvent:
    gpu = state.gpus.get(fact.gpu)
    event = Event(
        EventKind.GPUS,
        "The driver offers no XID events for a GPU, which is watched by probes alone",
        warning=True,
        fields={"uuid": fact.gpu, "gpu": None if gpu is None else gpu.index, "detail": fact.message},
    )
    return RecordEvent(event, now_ns)


def _directory_deleted(fact: facts.WatchedDirectoryDeleted) -> EndProcess:
    return EndProcess(
        exit_code=1,
        message=f"{fact.path} was deleted under its mount; a new process has to mount it anew",
    )


# What time brings


def _settle(old: State, state: State, now_ns: int) -> State:
    """Return the state after everything that follows from it and from the time."""
    active = _with_hang(old, state, now_ns)
    active = conditions.without_recovered(active, policy=state.policy, now_ns=now_ns)
    if active is not state.conditions:
        state = replace(state, conditions=active)
    if (
        state.conditions is not old.conditions
        or state.offers is not old.offers
        or state.probed is not old.probed
    ):
        devices = conditions.verdicts(state.offers, state.conditions, state.probed)
        state = replace(state, devices=devices)
    standings = _advanced(state, now_ns)
    return state if standings == state.registrations else replace(state, registrations=standings)


def _with_hang(old: State, state: State, now_ns: int) -> conditions.Conditions:
    """Return the conditions with one on every GPU for as long as the driver as a whole hangs."""
    active = state.conditions
    if not state.hung:
        return active
    if state.driver_overdue is not None:
        message = f"The driver does not answer {state.driver_overdue}"
    else:
        message = f"{len(state.overdue)} GPUs do not answer at once, so a new pod would hang too"
    for gpu in state.gpus:
        key = ConditionKey(facts.NVML, Reason.DRIVER_HUNG, Placement(gpu), 0)
        if key not in active or not old.hung:
            active = conditions.raised(
                active,
                source=facts.NVML,
                reason=Reason.DRIVER_HUNG,
                placement=key.placement,
                message=message,
                now_ns=now_ns,
            )
    return active


def _advanced(state: State, now_ns: int) -> Mapping[ResourceName, Registration]:
    ready = _probes_ready(state, now_ns)
    standings = {}
    for name, offered in state.offers.items():
        standing = state.registrations.get(name)
        if standing is None:
            if not offered:
                continue
            standing = Registration(since_ns=now_ns)
        standings[name] = registration.advance(
            standing, kubelet=state.kubelet, ready=ready, policy=state.policy, now_ns=now_ns
        )
    return standings


def _probes_ready(state: State, now_ns: int) -> bool:
    if state.first_probes_by_ns is not None and now_ns >= state.first_probes_by_ns:
        return True
    return bool(state.present) and state.present <= state.probed


def _wake_at(state: State, now_ns: int) -> int:
    times = [now_ns + IDLE_NS]
    for condition in state.conditions.values():
        at_ns = conditions.recovered_at(condition, state.policy)
        if at_ns is not None:
            times.append(at_ns)
    for standing in state.registrations.values():
        at_ns = registration.due_at(standing, state.policy)
        if at_ns is not None:
            times.append(at_ns)
        elif standing.waits_for_probes and state.first_probes_by_ns is not None:
            times.append(state.first_probes_by_ns)
    return max(now_ns, min(times))
