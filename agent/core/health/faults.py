"""Evidence of the devices themselves: XIDs, readings, and results of driver calls.

Invariants: a fault marks exactly the place it names, or nothing if that place does not exist. The same
XID reported by two sources within two seconds is one fault.
"""

from collections.abc import Container, Mapping
from typing import Final

from agent.core import xids
from agent.core.health import conditions
from agent.core.health.driver import hang_conditions
from agent.core.health.handlers import Applied, handles
from agent.core.health.samples import UNKNOWN, Window, evaluate
from agent.core.health.state import State, UnconfirmedFaults
from agent.core.health.witnesses import UnconfirmedFault, reads_action
from agent.model import facts
from agent.model.effects import Event, EventKind, RecordEvent
from agent.model.gpu import Gpu
from agent.model.health import ConditionKey, Reason, Recovery
from agent.model.ids import ALL, GpuUuid, Placement, SourceName
from agent.model.policy import SECOND_NS
from agent.model.structs import replace

MAX_UNLISTED_XIDS: Final = 64
"""Different XIDs that are not in the table kept apart on one GPU; further ones are OTHER_XID."""

OTHER_XID: Final = -1

UNKNOWN_DEVICE: Final = "An XID of an unknown device marks no device"
UNKNOWN_INSTANCE: Final = "An XID of an unknown MIG device marks no device"
IGNORED: Final = "An XID was ignored by policy"
ANNOUNCED: Final = "The driver announced another recovery action"

SAME_FAULT_NS: Final = 2 * SECOND_NS
"""Two sources that report the same XID of a GPU within this time saw one fault."""

_REASONS: Final[Mapping[int, Reason]] = {15: Reason.GPU_LOST, 16: Reason.RESET_REQUIRED}
"""What NVML's return codes GPU_IS_LOST and RESET_REQUIRED mean; any other is NVML_ERROR."""


# XIDs


@handles(facts.XidReported)
def apply_xid_reported(state: State, fact: facts.XidReported, now_ns: int) -> Applied:
    """Count an XID of NVML and mark the place it names, if the policy flips it.

    It confirms the kernel log's line of just before, with the details of that line.
    """
    if fact.gpu is None or fact.gpu not in state.gpus:
        return state, (xid_notice(UNKNOWN_DEVICE, fact, None, now_ns),)
    gpu = state.gpus[fact.gpu]
    code = listed_code(fact.xid, state.xids.get(gpu.uuid, {}))
    place = place_of(gpu, fact)
    if place is not None and is_reported_by_another(state, place, code, fact.source, now_ns):
        return confirmed_xid(state, place, code), ()
    counts = with_count(state.xids, gpu.uuid, code, fact.count)
    recent = state.recent_xids
    if place is not None:
        recent = with_reporter(recent, place, code, fact.source, now_ns)
    branch = xids.branch_of(state.driver.driver_version)
    if not xids.flips(fact.xid, state.policy, branch=branch):
        is_announced = fact.xid == xids.RECOVERY_ACTION_CHANGED and fact.xid not in state.policy.xid_overrides
        notice = xid_notice(ANNOUNCED if is_announced else IGNORED, fact, gpu, now_ns, warning=False)
        return replace(state, xids=counts, recent_xids=recent), (notice,)
    if place is None:
        notice = xid_notice(UNKNOWN_INSTANCE, fact, gpu, now_ns)
        return replace(state, xids=counts), (notice,)
    flipped = conditions.raised(
        state.conditions,
        source=fact.source,
        reason=Reason.XID,
        placement=place,
        code=code,
        count=fact.count,
        message=xids.text_of(fact.xid, branch=branch),
        recovery=xids.recovery_of(code, branch=branch),
        evidence=xids.evidence_of(code, branch=branch),
        now_ns=now_ns,
    )
    return replace(state, xids=counts, recent_xids=recent, conditions=flipped), ()


def confirmed_xid(state: State, place: Placement, code: int) -> State:
    """Return the state after NVML reported an XID of the kernel log: the line is confirmed."""
    confirmed = {
        key: unconfirmed
        for key, unconfirmed in state.unconfirmed.items()
        if key.reason is Reason.XID and key.code == code and key.placement.overlaps(place)
    }
    return with_raised(state, confirmed) if confirmed else state


def with_raised(state: State, confirmed: Mapping[ConditionKey, UnconfirmedFault]) -> State:
    """Return the state with confirmed faults raised as conditions."""
    shown = {unconfirmed.shown_as for unconfirmed in confirmed.values()}
    active = {key: each for key, each in state.conditions.items() if key not in shown}
    for key, unconfirmed in confirmed.items():
        known = active.get(key)
        count = unconfirmed.condition.count + (0 if known is None else known.count)
        since_ns = unconfirmed.condition.since_ns if known is None else known.since_ns
        active[key] = replace(unconfirmed.condition, count=count, since_ns=since_ns)
    return replace(state, conditions=active, unconfirmed=without(state.unconfirmed, confirmed))


def without(unconfirmed: UnconfirmedFaults, gone: Container[ConditionKey]) -> UnconfirmedFaults:
    """Return the unconfirmed faults without some."""
    return {key: unconfirmed for key, unconfirmed in unconfirmed.items() if key not in gone}


def listed_code(xid: int, counts: Mapping[int, int]) -> int:
    """Return the XID, or what stands for it where the driver invents ever new ones."""
    if xid in xids.CLASSES or xid in counts:
        return xid
    return xid if len(counts.keys() - xids.CLASSES.keys()) < MAX_UNLISTED_XIDS else OTHER_XID


def place_of(gpu: Gpu, fact: facts.XidReported) -> Placement | None:
    """Return where the fault is; None: at a MIG device that the GPU does not have."""
    if not gpu.mig_devices:
        return gpu.placement
    place = Placement(gpu.uuid, fact.gi, fact.ci)
    there = (Placement(gpu.uuid, mig.gi, mig.ci) for mig in gpu.mig_devices)
    return place if any(place.overlaps(device) for device in there) else None


def is_reported_by_another(
    state: State, place: Placement, code: int, source: SourceName, now_ns: int
) -> bool:
    """Return whether another source just reported the same XID at an overlapping place."""
    return any(
        reported_code == code
        and reporter != source
        and now_ns - at_ns <= SAME_FAULT_NS
        and at.overlaps(place)
        for (at, reported_code), (reporter, at_ns) in state.recent_xids.items()
    )


Reporters = Mapping[tuple[Placement, int], tuple[SourceName, int]]


def with_reporter(
    reporters: Reporters, place: Placement, code: int, source: SourceName, now_ns: int
) -> Reporters:
    """Return which source reported which XID lately, with one more."""
    recent = {key: seen for key, seen in reporters.items() if now_ns - seen[1] <= SAME_FAULT_NS}
    return {**recent, (place, code): (source, now_ns)}


Counts = Mapping[GpuUuid, Mapping[int, int]]


def with_count(counts: Counts, gpu: GpuUuid, code: int, count: int) -> Counts:
    """Return the counts of XIDs with some more."""
    of_gpu = counts.get(gpu, {})
    return {**counts, gpu: {**of_gpu, code: of_gpu.get(code, 0) + count}}


def xid_notice(
    message: str,
    fact: facts.XidReported,
    gpu: Gpu | None,
    now_ns: int,
    *,
    warning: bool = True,
    pci: str | None = None,
) -> RecordEvent:
    """Return the event of an XID that changes nothing."""
    fields: dict[str, object] = {"xid": fact.xid, "count": fact.count, "source": fact.source}
    if pci is not None:
        fields["pci"] = pci
    if gpu is not None:
        fields |= {"gpu": gpu.index, "uuid": gpu.uuid}
    if fact.gi != ALL:
        fields |= {"gi": fact.gi, "ci": fact.ci}
    return RecordEvent(Event(EventKind.XID, message, warning=warning, fields=fields), now_ns)


# Readings


@handles(facts.GpuSampled)
def apply_gpu_sampled(state: State, fact: facts.GpuSampled, now_ns: int) -> State:
    """Raise the conditions that the readings of a GPU show, and ease those they no longer show."""
    if fact.gpu not in state.gpus or state.driver.ready is False:
        return state
    window = state.slowdowns.get(fact.gpu, Window())
    if fact.sample.hw_slowed is not None:
        window = window.with_reading(slowed=fact.sample.hw_slowed, length=state.policy.slowdown_window_polls)
    active = state.conditions
    for reason, verdict in evaluate(fact.sample, window, state.policy).items():
        if verdict is UNKNOWN:
            continue
        if verdict is None:
            active = eased(active, reason, fact.gpu)
        else:
            if reason is Reason.NVLINK_DOWN:
                active = conditions.after_links_down(active, fact.gpu)
            active = conditions.raised(
                active,
                source=fact.source,
                reason=reason,
                placement=Placement(fact.gpu),
                message=verdict,
                lasts=True,
                now_ns=now_ns,
            )
    if reads_action(fact.sample) and fact.sample.recovery_action:
        # The kernel log reported the same reading; the driver's own answer counts instead.
        active = without_announced(active, fact.gpu)
    samples = {**state.samples, fact.gpu: fact.sample}
    slowdowns = {**state.slowdowns, fact.gpu: window}
    # A poll that reads what the last one did is what happens most.
    if (active, samples, slowdowns) == (state.conditions, state.samples, state.slowdowns):
        return state
    return replace(state, conditions=active, samples=samples, slowdowns=slowdowns)


def eased(active: conditions.Conditions, reason: Reason, gpu: GpuUuid) -> conditions.Conditions:
    """Return the conditions after a reading went back to well.

    That the driver asks for no recovery any more is the evidence that the GPU was reset.
    """
    over = conditions.eased(active, reason, gpu, is_reset=reason is Reason.ECC_UNCORRECTED)
    if reason is not Reason.RECOVERY_ACTION:
        return over
    key = announced_action(gpu)
    announced = over.get(key)
    if announced is not None and announced.recovery is Recovery.REBOOT:
        # It asked for a reboot, and the driver takes that back.
        over = {**over, key: replace(announced, recovery=Recovery.RESET, lasts=False)}
    return over if over is active else conditions.after_reset(over, (gpu,))


def announced_action(gpu: GpuUuid) -> ConditionKey:
    """Return the key of the recovery action that the kernel log reported."""
    return ConditionKey(facts.KERNEL_LOG, Reason.RECOVERY_ACTION, Placement(gpu), 0)


def without_announced(active: conditions.Conditions, gpu: GpuUuid) -> conditions.Conditions:
    """Return the conditions without the recovery action that the kernel log reported."""
    key = announced_action(gpu)
    return {each: active[each] for each in active if each != key} if key in active else active


# Calls


@handles(facts.GpuProbePassed)
def apply_gpu_probe_passed(state: State, fact: facts.GpuProbePassed, now_ns: int) -> State:
    """Count a clean probe of a GPU."""
    if fact.gpu not in state.gpus:
        return state
    answered = _with_answer(state, fact.gpu)
    if state.driver.ready is False or fact.gpu not in state.present:
        # It was under way when the driver or the GPU went, and shows nothing of their return.
        return answered
    # The probe that ends a hang of the driver is also the first clean one after it.
    active = hang_conditions(answered, now_ns)
    active = conditions.after_clean_probe(active, fact.gpu, policy=state.policy, now_ns=now_ns)
    return answered if active is answered.conditions else replace(answered, conditions=active)


@handles(facts.GpuCallFailed)
def apply_gpu_call_failed(state: State, fact: facts.GpuCallFailed, now_ns: int) -> State:
    """Mark a GPU on which a call failed."""
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


@handles(facts.GpuCallOverdue)
def apply_gpu_call_overdue(state: State, fact: facts.GpuCallOverdue, now_ns: int) -> State:
    """Mark a GPU on which a call does not answer."""
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


@handles(facts.GpuCallAnswered)
def apply_gpu_call_answered(state: State, fact: facts.GpuCallAnswered, _now_ns: int) -> State:
    """Note that nothing on a GPU is overdue any more; its condition is left to clean probes."""
    if fact.gpu not in state.overdue:
        return state
    return replace(state, overdue=_without(state.overdue, fact.gpu))


def _with_answer(state: State, gpu: GpuUuid) -> State:
    """Return the state after a GPU answered, well or not: it has a verdict and is not overdue."""
    if gpu in state.probed and gpu not in state.overdue:
        return state
    return replace(state, overdue=_without(state.overdue, gpu), probed=state.probed | {gpu})


def _without(overdue: Mapping[GpuUuid, str], gpu: GpuUuid) -> Mapping[GpuUuid, str]:
    return {other: call for other, call in overdue.items() if other != gpu}


@handles(facts.HealthEventsUnsupported)
def apply_health_events_unsupported(
    state: State, fact: facts.HealthEventsUnsupported, now_ns: int
) -> Applied:
    """Record that a GPU has no XID events."""
    gpu = state.gpus.get(fact.gpu)
    event = Event(
        EventKind.GPUS,
        "The driver has no XID events for a GPU, which is watched by probes alone",
        warning=True,
        fields={"uuid": fact.gpu, "gpu": None if gpu is None else gpu.index, "detail": fact.message},
    )
    return state, (RecordEvent(event, now_ns),)
