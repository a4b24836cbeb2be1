"""Against flapping, and against flipping too much on what was only inferred.

Invariants: a GPU whose self-clearing faults come again and again stays unhealthy until an operator
recovers it or the node reboots. Soft evidence flips only reasons that the operator named, only a GPU that
no pod holds, at most one GPU of the node in a time, and none while several have it at once.
"""

from collections.abc import Mapping
from typing import Final

from agent.core.health import conditions
from agent.core.health.state import State
from agent.core.leaks.findings import CERTAIN
from agent.core.reasons import REASON_SPECS
from agent.model import facts
from agent.model.health import Condition, Evidence, Reason, Recovery
from agent.model.ids import GpuUuid, Placement
from agent.model.policy import SECOND_NS, Policy
from agent.model.structs import replace

PODS_KNOWN_FOR_NS: Final = 30 * SECOND_NS
"""An older list of allocations is no knowledge."""


def with_flapping(old: State, state: State, now_ns: int) -> State:
    """Return the state with each fault that a GPU recovers from counted, and a GPU that flaps marked.

    Conditions that overlap in time are one fault, for the GPU was unhealthy all along. What one GPU suffers
    while the driver as a whole hangs is no fault of that GPU.
    """
    if state.conditions is old.conditions:
        return state
    times = dict(state.fault_times if old.hung or not state.hung else _without_hanging(state))
    begun = frozenset() if state.hung else _flappers(state) - _flappers(old)
    policy = state.policy
    active = state.conditions
    for gpu in begun:
        recent = [at_ns for at_ns in times.get(gpu, ()) if now_ns - at_ns < policy.sticky_window_ns]
        times[gpu] = (*recent, now_ns)[-policy.sticky_after :]
        if len(times[gpu]) >= policy.sticky_after:
            active = conditions.raised(
                active,
                source=facts.AGENT,
                reason=Reason.FLAPPING,
                placement=Placement(gpu),
                message=f"{policy.sticky_after} faults within {policy.sticky_window_ns / SECOND_NS:g} s",
                now_ns=now_ns,
            )
    return replace(state, conditions=active, fault_times=times)


def _without_hanging(state: State) -> Mapping[GpuUuid, tuple[int, ...]]:
    """Return the fault times without the calls that turned out to hang with the whole driver."""
    hanging = {
        (key.placement.gpu, condition.since_ns)
        for key, condition in state.conditions.items()
        if key.reason is Reason.NVML_TIMEOUT and key.placement.gpu in state.overdue
    }
    return {
        gpu: tuple(at_ns for at_ns in times if (gpu, at_ns) not in hanging)
        for gpu, times in state.fault_times.items()
    }


def _flappers(state: State) -> frozenset[GpuUuid]:
    """Return the GPUs that are unhealthy by a fault of their own that clears itself.

    An XID that clears itself does not count: an application makes it, or the catalog asks for no action. A
    pod must not be able to take its GPU from the next one.
    """
    return frozenset(
        condition.placement.gpu
        for condition in state.conditions.values()
        if condition.flips
        and condition.recovery is Recovery.SELF_CLEARING
        and REASON_SPECS[condition.reason].counts_for_flapping
        and condition.reason is not Reason.XID
    )


def soft_candidates(state: State) -> frozenset[GpuUuid]:
    """Return the GPUs that soft evidence would flip if nothing held it back."""
    if not state.policy.soft_flips and state.policy.leaks.effect == "warn":
        return frozenset()
    return frozenset(
        key.placement.gpu for key, condition in state.conditions.items() if _is_soft(state, condition)
    )


def _is_soft(state: State, condition: Condition) -> bool:
    is_over = condition.details is not None and not condition.lasts
    return not condition.flips and not is_over and may_flip(condition, state.policy)


def may_flip(condition: Condition, policy: Policy) -> bool:
    """Return whether the operator lets soft evidence take a free device out; of leaks only certain ones."""
    if condition.evidence is not Evidence.SOFT:
        return False
    if condition.details is not None:
        return policy.leaks.effect == "unhealthy-when-free" and condition.details.kind in CERTAIN
    return condition.reason in policy.soft_flips


def with_breaker(state: State, now_ns: int) -> State:
    """Return the state with the one GPU flipped that soft evidence may flip now, if any."""
    candidates = soft_candidates(state)
    if len(candidates) != 1 or _is_held_back(state, now_ns):
        return state
    flipped = {
        key: replace(condition, flips=True)
        for key, condition in state.conditions.items()
        if key.placement.gpu in candidates and _is_soft(state, condition) and _is_free(state, key.placement)
    }
    if not flipped:
        return state
    return replace(state, conditions={**state.conditions, **flipped}, soft_flip_ns=now_ns)


def _is_held_back(state: State, now_ns: int) -> bool:
    return state.soft_flip_ns is not None and now_ns < state.soft_flip_ns + state.policy.soft_flip_every_ns


def breaker_at(state: State, now_ns: int) -> int | None:
    """Return until when the breaker holds a candidate back; None: there is none, or nothing holds it."""
    if state.soft_flip_ns is None or not _is_held_back(state, now_ns) or not soft_candidates(state):
        return None
    return state.soft_flip_ns + state.policy.soft_flip_every_ns


def with_policy(state: State, policy: Policy) -> State:
    """Return the state under another policy: soft evidence that may flip no more does not."""
    kept = {
        key: replace(condition, flips=False)
        for key, condition in state.conditions.items()
        if condition.flips
        and REASON_SPECS[key.reason].evidence is Evidence.SOFT
        and not may_flip(condition, policy)
    }
    return replace(state, policy=policy, conditions={**state.conditions, **kept})


def with_known_pods(state: State, now_ns: int) -> State:
    """Return the state without the list of allocations if that is no knowledge any more."""
    until_ns = pods_known_until(state)
    return state if until_ns is None or now_ns < until_ns else replace(state, pods=None)


def pods_known_until(state: State) -> int | None:
    """Return when the list of allocations is no knowledge any more; None: it is none now."""
    return None if state.pods is None else state.pods_ns + PODS_KNOWN_FOR_NS


def _is_free(state: State, place: Placement) -> bool:
    """Whether it is known that no pod holds a device at a place."""
    return state.pods is not None and not any(
        device.id in state.pods
        for devices in state.advertised.values()
        for device in devices
        if device.placement.overlaps(place)
    )
