"""Lines of the kernel log about GPUs, and what follows from them: see core.health.witnesses.

Invariants: a line makes no GPU unhealthy before a second witness was read. XID 154 and the recovery action
that NVML reads are one reading of two sources, and the driver's answer counts where it gives one. What was
written before the agent listened counts by its class and by the signs of repair that followed.
"""

from typing import Final

from agent.core import xids
from agent.core.health import conditions
from agent.core.health.driver import enumerated, gpu_at
from agent.core.health.faults import (
    ANNOUNCED,
    IGNORED,
    UNKNOWN_DEVICE,
    UNKNOWN_INSTANCE,
    announced_action,
    eased,
    is_reported_by_another,
    listed_code,
    place_of,
    with_count,
    with_raised,
    with_reporter,
    without,
    xid_notice,
)
from agent.core.health.handlers import Applied, handles
from agent.core.health.samples import REBOOT_ACTIONS, RULES, UNKNOWN, Window
from agent.core.health.state import State
from agent.core.health.witnesses import UnconfirmedFault, Verdict, reads_action, shown_key, verdict_on
from agent.core.reasons import REASON_SPECS
from agent.model import facts
from agent.model.components import NVML_EVENTS
from agent.model.effects import Effect, Event, EventKind, ProbeGpu, ProbeUvm, RecordEvent
from agent.model.gpu import Gpu
from agent.model.health import Condition, ConditionKey, Reason, Recovery
from agent.model.ids import ComponentId, GpuUuid, Placement
from agent.model.sample import GpuSample
from agent.model.structs import replace

MAX_EARLY_XIDS: Final = 256
"""XIDs kept until NVML lists the first GPU; the oldest go when there are more."""

MAX_SWITCH_ERRORS: Final = 16
"""Different SXids shown on one GPU; further ones are OTHER_SXID."""
OTHER_SXID: Final = -2

BEFORE_START: Final = "An XID from before the start is only counted"


# XIDs


@handles(facts.KernelXidSeen)
def apply_kernel_xid_seen(state: State, fact: facts.KernelXidSeen, now_ns: int) -> Applied:
    """Count an XID of the kernel log; raise what a second witness confirms."""
    gpu = gpu_at(state, fact.pci)
    if gpu is not None:
        state, notices = _xid_of(state, fact, gpu, now_ns)
        return state, (*notices, *((ProbeGpu(gpu.uuid, gpu.pci),) if _asks_for_probe(state, fact) else ()))
    if not state.gpus:
        return replace(state, early_xids=(*state.early_xids, fact)[-MAX_EARLY_XIDS:]), ()
    # A device of another driver, or one that NVML never listed.
    notice = xid_notice(UNKNOWN_DEVICE, _report_of(fact, None), None, now_ns, pci=fact.pci)
    return state, (notice,) if fact.live else ()


def _xid_of(state: State, fact: facts.KernelXidSeen, gpu: Gpu, now_ns: int) -> Applied:
    report = _report_of(fact, gpu)
    code = listed_code(fact.xid, state.xids.get(gpu.uuid, {}))
    place = place_of(gpu, report)
    is_action = fact.xid == xids.RECOVERY_ACTION_CHANGED and fact.xid not in state.policy.xid_overrides
    if fact.live and place is not None and is_reported_by_another(state, place, code, fact.source, now_ns):
        # NVML reported the number; only the line names the action.
        if is_action:
            return _action_announced(state, fact, gpu, now_ns)
        return _refined(state, fact, place, code, now_ns), ()
    state, count = _counted(state, fact, gpu.uuid, code)
    if not count:
        return state, ()
    if fact.live and place is not None:
        recent = with_reporter(state.recent_xids, place, code, fact.source, now_ns)
        state = replace(state, recent_xids=recent)
    if is_action:
        return _action_announced(state, fact, gpu, now_ns)
    why = _why_only_counted(state, fact)
    if why is not None or place is None:
        notice = xid_notice(why or UNKNOWN_INSTANCE, report, gpu, now_ns, warning=why is None)
        return state, (notice,)
    return _with_unconfirmed(state, fact, _condition_of(state, fact, place, code, count, now_ns), now_ns), ()


def _why_only_counted(state: State, fact: facts.KernelXidSeen) -> str | None:
    if not fact.live and (fact.repaired or fact.in_words or _recovery(state, fact) is Recovery.SELF_CLEARING):
        return BEFORE_START
    return None if _flips(state, fact) else IGNORED


def _report_of(fact: facts.KernelXidSeen, gpu: Gpu | None) -> facts.XidReported:
    return facts.XidReported(
        gpu=None if gpu is None else gpu.uuid,
        xid=fact.xid,
        gi=fact.gi,
        ci=fact.ci,
        count=fact.count,
        source=fact.source,
    )


def _branch(state: State) -> int | None:
    return xids.branch_of(state.driver.driver_version)


def _flips(state: State, fact: facts.KernelXidSeen) -> bool:
    return xids.flips(fact.xid, state.policy, fact.words, _branch(state))


def _recovery(state: State, fact: facts.KernelXidSeen) -> Recovery:
    return xids.recovery_of(fact.xid, fact.words, _branch(state))


def _asks_for_probe(state: State, fact: facts.KernelXidSeen) -> bool:
    """Whether a probe may confirm it: of an application's fault it shows nothing."""
    is_announced = fact.xid == xids.RECOVERY_ACTION_CHANGED
    return fact.live and (is_announced or _recovery(state, fact) is not Recovery.SELF_CLEARING)


def _counted(state: State, fact: facts.KernelXidSeen, gpu: GpuUuid, code: int) -> tuple[State, int]:
    """Return the state with an XID counted, and how many of them no earlier process had counted."""
    known = state.xids_before.get((gpu, code), 0) if fact.backlog else 0
    repeated = min(known, fact.count)
    if repeated:
        state = replace(state, xids_before={**state.xids_before, (gpu, code): known - repeated})
    if repeated == fact.count:
        return state, 0
    count = fact.count - repeated
    return replace(state, xids=with_count(state.xids, gpu, code, count)), count


def _condition_of(
    state: State, fact: facts.KernelXidSeen, place: Placement, code: int, count: int, now_ns: int
) -> Condition:
    """Return the condition that a line makes once it is confirmed."""
    branch = _branch(state)
    return Condition(
        key=ConditionKey(fact.source, Reason.XID, place, code),
        evidence=xids.evidence_of(fact.xid, fact.words, branch),
        recovery=_recovery(state, fact),
        flips=True,
        message=xids.text_of(fact.xid, fact.detail, branch),
        since_ns=now_ns,
        last_ns=now_ns,
        count=count,
    )


def _refined(state: State, fact: facts.KernelXidSeen, place: Placement, code: int, now_ns: int) -> State:
    """Return the state after the line of an XID that NVML reported just now: the line has details."""
    reported = _condition_of(state, fact, place, code, fact.count, now_ns)
    known = {
        key: condition
        for key, condition in state.conditions.items()
        if key.reason is Reason.XID and key.code == code and key.placement.overlaps(place)
    }
    if not known and _flips(state, fact) and not xids.flips(fact.xid, state.policy, branch=_branch(state)):
        # The number alone flipped nothing; NVML has confirmed the line.
        return with_raised(state, {reported.key: UnconfirmedFault(reported, frozenset(), is_live=True)})
    active = dict(state.conditions)
    for key, condition in known.items():
        if key.source == fact.source or condition.count > fact.count:
            continue
        if _flips(state, fact):
            active[key] = replace(
                condition, message=reported.message, recovery=reported.recovery, evidence=reported.evidence
            )
        else:
            del active[key]
    return state if active == state.conditions else replace(state, conditions=active)


# Witnesses


def _with_unconfirmed(state: State, fact: facts.KernelXidSeen, reported: Condition, now_ns: int) -> State:
    readings = xids.WITNESSES.get(xids.class_of(fact.xid, fact.words, _branch(state)), frozenset())
    known = state.unconfirmed.get(reported.key)
    if known is not None:
        reported = replace(
            reported, since_ns=known.condition.since_ns, count=known.condition.count + reported.count
        )
    unconfirmed = UnconfirmedFault(reported, readings, is_live=fact.live, in_words=fact.in_words)
    is_deniable = (
        reported.recovery is Recovery.SELF_CLEARING
        or xids.class_of(fact.xid) is xids.XidClass.LOST
        or reads_action(state.samples.get(reported.placement.gpu))
    )
    shown = conditions.raised(
        state.conditions,
        source=fact.source,
        reason=Reason.UNCONFIRMED,
        placement=reported.placement,
        code=reported.key.code,
        count=fact.count,
        message=f"{reported.message}: only the kernel log reports it",
        recovery=Recovery.SELF_CLEARING if is_deniable else reported.recovery,
        now_ns=now_ns,
    )
    return replace(state, unconfirmed={**state.unconfirmed, reported.key: unconfirmed}, conditions=shown)


def with_witnesses(state: State) -> State:
    """Return the state with each unconfirmed fault confirmed or denied by the readings of its GPU."""
    if not state.unconfirmed:
        return state
    deaf = (state.covered.get(ComponentId(NVML_EVENTS)), state.deaf_since_ns)
    deaf_since_ns = min((since_ns for since_ns in deaf if since_ns is not None), default=None)
    confirmed: dict[ConditionKey, UnconfirmedFault] = {}
    denied: dict[ConditionKey, UnconfirmedFault] = {}
    for key, unconfirmed in state.unconfirmed.items():
        gpu = key.placement.gpu
        sample = state.samples.get(gpu)
        verdict = verdict_on(
            unconfirmed,
            state.conditions,
            sample,
            is_probed=gpu in state.probed,
            deaf_since_ns=deaf_since_ns,
        )
        if unconfirmed.shown_as not in state.conditions or verdict is Verdict.DENIED:
            # Clean probes cleared what was shown, or the driver itself denies the fault.
            denied[key] = unconfirmed
        elif verdict is Verdict.CONFIRMED:
            confirmed[key] = unconfirmed
    if denied:
        over = {unconfirmed.shown_as for unconfirmed in denied.values()}
        active = {key: each for key, each in state.conditions.items() if key not in over}
        state = replace(state, conditions=active, unconfirmed=without(state.unconfirmed, denied))
    return with_raised(state, confirmed) if confirmed else state


@handles(facts.XidEventsHeard)
def apply_xid_events_heard(state: State, fact: facts.XidEventsHeard, _now_ns: int) -> State:
    """Keep since when NVML keeps no XID; when that is over, evaluate what was logged meanwhile."""
    deaf = replace(state, deaf_since_ns=fact.lost_since_ns)
    return replace(with_witnesses(deaf), deaf_since_ns=None) if fact.is_heard else deaf


# The recovery action


def _action_announced(state: State, fact: facts.KernelXidSeen, gpu: Gpu, now_ns: int) -> Applied:
    """Apply an announced recovery action: the same reading as NVML's, whose answer counts."""
    action = fact.words.action
    fields = {
        "gpu": gpu.index,
        "uuid": gpu.uuid,
        "action": action,
        "count": fact.count,
        "detail": fact.detail,
    }
    notice = RecordEvent(Event(EventKind.XID, ANNOUNCED, fields=fields), now_ns)
    if action is None or fact.repaired or reads_action(state.samples.get(gpu.uuid)):
        return state, (notice,)
    reason = Reason.RECOVERY_ACTION
    key = announced_action(gpu.uuid)
    state = replace(state, unconfirmed=without(state.unconfirmed, (key,)))
    message = RULES[reason](GpuSample(recovery_action=action), Window(), state.policy)
    if message is UNKNOWN:
        return state, (notice,)
    if message is None:
        shown = {each: state.conditions[each] for each in state.conditions if each != shown_key(key)}
        return replace(state, conditions=eased(shown, reason, gpu.uuid)), (notice,)
    reported = Condition(
        key=key,
        evidence=REASON_SPECS[reason].evidence,
        recovery=Recovery.REBOOT if action in REBOOT_ACTIONS else REASON_SPECS[reason].recovery,
        flips=True,
        message=message,
        since_ns=now_ns,
        last_ns=now_ns,
        lasts=True,
    )
    unconfirmed = UnconfirmedFault(reported, frozenset(), is_live=fact.live)
    active = conditions.raised(
        state.conditions,
        source=fact.source,
        reason=Reason.UNCONFIRMED,
        placement=reported.placement,
        code=shown_key(key).code,
        message=f"{message}: only the kernel log reports it",
        now_ns=now_ns,
    )
    announced = replace(state, unconfirmed={**state.unconfirmed, key: unconfirmed}, conditions=active)
    return announced, (notice,)


# Lines about no single GPU


@handles(facts.GpusEnumerated)
def apply_gpus_enumerated(state: State, fact: facts.GpusEnumerated, now_ns: int) -> Applied:
    """Keep the list of GPUs, and apply the XIDs that were read before the first one."""
    state = enumerated(state, fact, now_ns)
    if not state.early_xids or not state.gpus:
        return state, ()
    early, state = state.early_xids, replace(state, early_xids=())
    effects: list[Effect] = []
    for xid in early:
        state, more = apply_kernel_xid_seen(state, xid, now_ns)
        effects += more
    return state, tuple(effects)


@handles(facts.SwitchErrorSeen)
def apply_switch_error_seen(state: State, fact: facts.SwitchErrorSeen, now_ns: int) -> Applied:
    """Show a fatal error of an NVSwitch on the GPUs that have links, and have their links read now.

    Only links and fabric show whether a GPU is impaired.
    """
    fields = {
        "pci": fact.pci,
        "sxid": fact.sxid,
        "fatal": fact.fatal,
        "count": fact.count,
        "detail": fact.detail,
    }
    notice = RecordEvent(
        Event(EventKind.XID, "An NVSwitch reported an error", warning=fact.fatal, fields=fields), now_ns
    )
    if not fact.fatal:
        return state, (notice,)
    linked = [state.gpus[gpu] for gpu in sorted(state.present) if _has_links(state.samples.get(gpu))]
    active = state.conditions
    for gpu in linked:
        active = conditions.raised(
            active,
            source=fact.source,
            reason=Reason.UNCONFIRMED,
            placement=Placement(gpu.uuid),
            code=_switch_code(active, gpu.uuid, fact.sxid),
            count=fact.count,
            message=f"NVSwitch {fact.pci} reports fatal SXid {fact.sxid}: only the kernel log reports it",
            now_ns=now_ns,
        )
    probes = (ProbeGpu(gpu.uuid, gpu.pci) for gpu in linked)
    return (state if active is state.conditions else replace(state, conditions=active)), (notice, *probes)


def _has_links(sample: GpuSample | None) -> bool:
    return sample is not None and bool(sample.links_total or sample.fabric_state)


def _switch_code(active: conditions.Conditions, gpu: GpuUuid, sxid: int) -> int:
    shown = {
        key.code for key in active if key.reason is Reason.UNCONFIRMED and key.placement == Placement(gpu)
    }
    return sxid if sxid in shown or len(shown) < MAX_SWITCH_ERRORS else OTHER_SXID


@handles(facts.UvmErrorSeen)
def apply_uvm_error_seen(state: State, fact: facts.UvmErrorSeen, now_ns: int) -> Applied:
    """Show that the unified memory driver may reject every call, and have it probed."""
    active = state.conditions
    for gpu in state.gpus:
        active = conditions.raised(
            active,
            source=fact.source,
            reason=Reason.UNCONFIRMED,
            placement=Placement(gpu),
            message=f"nvidia-uvm met a fatal error ({fact.status}): only the kernel log reports it",
            now_ns=now_ns,
        )
    return replace(state, uvm_status=fact.status, conditions=active), (ProbeUvm(),)


@handles(facts.UvmProbed)
def apply_uvm_probed(state: State, fact: facts.UvmProbed, now_ns: int) -> State:
    """Mark every GPU while the unified memory driver rejects calls."""
    over = {ConditionKey(facts.KERNEL_LOG, Reason.UNCONFIRMED, Placement(gpu), 0) for gpu in state.gpus}
    active: conditions.Conditions = {key: each for key, each in state.conditions.items() if key not in over}
    for gpu in state.gpus:
        if fact.error is None:
            active = conditions.eased(active, Reason.UVM_FAILED, gpu)
            continue
        active = conditions.raised(
            active,
            source=fact.source,
            reason=Reason.UVM_FAILED,
            placement=Placement(gpu),
            message=f"nvidia-uvm rejects every call ({fact.error}) after a fatal error: {state.uvm_status}",
            lasts=True,
            now_ns=now_ns,
        )
    return replace(state, conditions=active, uvm_status=None if fact.error is None else state.uvm_status)


@handles(facts.PciConfigRead)
def apply_pci_config_read(state: State, fact: facts.PciConfigRead, now_ns: int) -> State:
    """Mark a GPU that does not answer on the bus."""
    gpu = gpu_at(state, fact.pci)
    if gpu is None or fact.answers:
        return state
    active = conditions.raised(
        conditions.after_bad_probe(state.conditions, gpu.uuid),
        source=fact.source,
        reason=Reason.GPU_LOST,
        placement=Placement(gpu.uuid),
        message="The PCI configuration space of the GPU does not answer",
        now_ns=now_ns,
    )
    return replace(state, conditions=active)


@handles(facts.KernelLogRead)
def apply_kernel_log_read(state: State, fact: facts.KernelLogRead, _now_ns: int) -> State:
    """Keep up to where the log was read; not while XIDs wait for the first GPU, which no state file has."""
    return state if state.early_xids else replace(state, kernel_log_read=fact.until)
