"""Raising, counting and clearing conditions.

Invariants: a condition is cleared only by its own recovery rule (recovered_at), and clearing one
never clears another. Quiet time counts from the first of the clean probes, not from the last report:
trouble that lasts is reported once, when it begins, and only a probe can show how long it lasted.
"""

from collections.abc import Container, Iterable, Mapping

from agent.core.health.samples import RULES
from agent.core.reasons import REASON_SPECS
from agent.core.xids import XidClass, class_of
from agent.model.health import Condition, ConditionKey, Details, Evidence, Reason, Recovery
from agent.model.ids import ALL, GpuUuid, Placement, SourceName
from agent.model.policy import Policy
from agent.model.structs import replace

Conditions = Mapping[ConditionKey, Condition]


def raised(
    conditions: Conditions,
    *,
    source: SourceName,
    reason: Reason,
    placement: Placement,
    message: str,
    now_ns: int,
    code: int = 0,
    count: int = 1,
    recovery: Recovery | None = None,
    evidence: Evidence | None = None,
    lasts: bool = False,
    details: Details | None = None,
) -> Conditions:
    """Return the conditions with one raised, or reported once more if it is active.

    What is not given is the reason's. A cause that lasts and is merely seen once more changes nothing.
    """
    key = ConditionKey(source, reason, placement, code)
    active = conditions.get(key)
    spec = REASON_SPECS[reason]
    if active is None:
        active = Condition(
            key=key,
            evidence=spec.evidence if evidence is None else evidence,
            recovery=spec.recovery if recovery is None else recovery,
            flips=spec.flips,
            message=message,
            since_ns=now_ns,
            last_ns=now_ns,
            count=count,
            lasts=lasts,
            details=details,
        )
    elif lasts and active.lasts:
        if (active.message, active.details) == (message, details):
            return conditions
        active = replace(active, message=message, details=details)
    else:
        active = replace(
            active,
            message=message,
            last_ns=now_ns,
            count=active.count + count,
            clean_probes=0,
            reset_seen=False,
            lasts=lasts,
            details=details,
        )
    return {**conditions, key: active}


def eased(
    conditions: Conditions,
    reason: Reason,
    gpu: GpuUuid,
    *,
    is_reset: bool = False,
    but: Container[Placement] = (),
) -> Conditions:
    """Return the conditions after the cause of one ended: from here on probes can cure it.

    ``is_reset``: the end of the cause is itself reset evidence for this condition; ``but`` are
    places where the cause is still there.
    """
    over = {
        key: replace(condition, lasts=False, reset_seen=condition.reset_seen or is_reset)
        for key, condition in conditions.items()
        if key.reason is reason and key.placement.gpu == gpu and condition.lasts and key.placement not in but
    }
    return {**conditions, **over} if over else conditions


def after_clean_probe(conditions: Conditions, gpu: GpuUuid, *, policy: Policy, now_ns: int) -> Conditions:
    """Return the conditions after one health poll of a GPU passed.

    Counts stop at what the policy asks for, so that a well GPU changes nothing.
    """
    links_down = any(
        key.reason is Reason.NVLINK_DOWN and key.placement.gpu == gpu and condition.lasts
        for key, condition in conditions.items()
    )
    counted = {
        key: replace(
            condition,
            clean_probes=condition.clean_probes + 1,
            clean_since_ns=condition.clean_since_ns if condition.clean_probes else now_ns,
        )
        for key, condition in conditions.items()
        if key.placement.gpu == gpu
        and condition.clean_probes < policy.recovery_clean_probes
        and _is_cured_by_probes(condition)
        and not (links_down and _is_of_links(condition))
    }
    return {**conditions, **counted} if counted else conditions


def _is_cured_by_probes(condition: Condition) -> bool:
    if condition.lasts:
        return False
    return condition.recovery is Recovery.SELF_CLEARING or condition.reset_seen


def _is_of_links(condition: Condition) -> bool:
    return condition.reason is Reason.XID and class_of(condition.key.code) is XidClass.LINK


def after_links_down(conditions: Conditions, gpu: GpuUuid) -> Conditions:
    """Return the conditions after links of a GPU were seen to be down: what is theirs begins anew."""
    broken = {
        key: replace(condition, clean_probes=0)
        for key, condition in conditions.items()
        if key.placement.gpu == gpu and condition.clean_probes and _is_of_links(condition)
    }
    return {**conditions, **broken} if broken else conditions


def after_bad_probe(conditions: Conditions, gpu: GpuUuid) -> Conditions:
    """Return the conditions after a health poll of a GPU failed: clean ones must come in a row."""
    broken = {
        key: replace(condition, clean_probes=0)
        for key, condition in conditions.items()
        if key.placement.gpu == gpu and condition.clean_probes
    }
    return {**conditions, **broken}


def after_reset(conditions: Conditions, gpus: Iterable[GpuUuid]) -> Conditions:
    """Return the conditions after reset evidence for some GPUs was seen.

    What was read before the reset is over; if it is not, the next reading raises it again before the
    probe of the same poll counts. So a reading that the driver has no more keeps no GPU unhealthy.
    """
    reset = frozenset(gpus)
    marked = {
        key: replace(
            condition,
            clean_probes=0,
            reset_seen=condition.recovery is Recovery.RESET,
            lasts=condition.lasts and key.reason not in RULES,
        )
        for key, condition in conditions.items()
        if key.placement.gpu in reset
        and (condition.recovery is Recovery.RESET or (condition.lasts and key.reason in RULES))
    }
    return {**conditions, **marked}


def after_new_layout(conditions: Conditions, gpu: GpuUuid, staying: Iterable[Placement]) -> Conditions:
    """Return the conditions after a GPU's MIG instances changed; ``staying`` are those that are the same.

    What was wrong with an instance that was destroyed ended with it, unless only a reboot or a person ends
    it: then the card is to blame, and no new instance on it is known to be without the fault.
    """
    kept: dict[ConditionKey, Condition] = {}
    moved: dict[ConditionKey, Condition] = {}
    places = tuple(staying)
    for key, condition in conditions.items():
        place = key.placement
        is_of_instance = place.gpu == gpu and place.gi != ALL
        if not is_of_instance or any(place.overlaps(other) for other in places):
            kept[key] = condition
        elif condition.recovery in {Recovery.REBOOT, Recovery.BY_HAND}:
            whole = key._replace(placement=Placement(gpu))
            moved.setdefault(whole, replace(condition, key=whole))
    return conditions if len(kept) == len(conditions) else {**moved, **kept}


def after_restart(conditions: Iterable[Condition], gpus: Container[GpuUuid]) -> Conditions:
    """Return the conditions of known GPUs after the process was replaced.

    No probe ran in between, so clean probes have to come in a row anew. What lasted lasts until a reading
    shows otherwise.
    """
    return {
        condition.key: replace(condition, clean_probes=0)
        for condition in conditions
        if condition.placement.gpu in gpus
    }


def recovered_at(condition: Condition, policy: Policy) -> int | None:
    """Return when a condition is cleared if nothing more happens; None: not by time alone."""
    if not _is_cured_by_probes(condition) or condition.clean_probes < policy.recovery_clean_probes:
        return None
    return condition.clean_since_ns + policy.recovery_quiet_ns


def without_recovered(conditions: Conditions, *, policy: Policy, now_ns: int) -> Conditions:
    """Return the conditions that stay; the same object if all do."""
    staying = {
        key: condition
        for key, condition in conditions.items()
        if (at_ns := recovered_at(condition, policy)) is None or now_ns < at_ns
    }
    return staying if len(staying) < len(conditions) else conditions
