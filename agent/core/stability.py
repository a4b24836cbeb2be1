"""Against flapping, and against flipping too much on what was only inferred.

Invariants: a GPU whose self-clearing faults come again and again stays out until a person or a reboot
says otherwise. Soft evidence flips only reasons that the operator named, only a GPU that no pod holds,
at most one GPU of the node in a time, and none while several have it at once.
"""

from dataclasses import replace
from typing import Final

from agent.core import conditions
from agent.core.state import State
from agent.model import facts
from agent.model.health import Condition, Evidence, Reason, Recovery
from agent.model.ids import GpuUuid, Placement
from agent.model.policy import SECOND_NS

PODS_KNOWN_FOR_NS: Final = 30 * SECOND_NS
"""An older list of allocations is no knowledge."""

NO_FAULTS: Final = frozenset(
    {
        Reason.MAINTENANCE,
        Reason.HELD,
        Reason.DRIVER_HUNG,
        Reason.DRIVER_NOT_LOADED,
        Reason.NVML_VERSION_MISMATCH,
    }
)
"""What flips a GPU without being its own fault: nothing to count against it."""


def with_flapping(old: State, state: State, now_ns: int) -> State:
    """Return the state with each new self-clearing fault counted, and a GPU that flaps marked."""
    if state.conditions is old.conditions:
        return state
    begun = {
        key.placement.gpu
        for key, condition in state.conditions.items()
        if key not in old.conditions and _may_flap(condition)
    }
    if not begun:
        return state
    policy = state.policy
    active = state.conditions
    times = dict(state.fault_times)
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


def _may_flap(condition: Condition) -> bool:
    return (
        condition.flips and condition.recovery is Recovery.SELF_CLEARING and condition.reason not in NO_FAULTS
    )


def soft_candidates(state: State) -> frozenset[GpuUuid]:
    """Return the GPUs that soft evidence would flip if nothing held it back."""
    if not state.policy.soft_flips:
        return frozenset()
    return frozenset(
        key.placement.gpu for key, condition in state.conditions.items() if _is_soft(state, condition)
    )


def _is_soft(state: State, condition: Condition) -> bool:
    return (
        condition.evidence is Evidence.SOFT
        and not condition.flips
        and condition.reason in state.policy.soft_flips
    )


def with_breaker(state: State, now_ns: int) -> State:
    """Return the state with the one GPU flipped that soft evidence may flip now, if any."""
    candidates = soft_candidates(state)
    if len(candidates) != 1 or now_ns < (breaker_at(state) or now_ns):
        return state
    (gpu,) = candidates
    if not _is_free(state, gpu):
        return state
    flipped = {
        key: replace(condition, flips=True)
        for key, condition in state.conditions.items()
        if key.placement.gpu == gpu and _is_soft(state, condition)
    }
    return replace(state, conditions={**state.conditions, **flipped}, soft_flip_ns=now_ns)


def breaker_at(state: State) -> int | None:
    """Return until when the breaker holds a candidate back; None: there is none, or nothing holds it."""
    if state.soft_flip_ns is None or not soft_candidates(state):
        return None
    return state.soft_flip_ns + state.policy.soft_flip_every_ns


def with_known_pods(state: State, now_ns: int) -> State:
    """Return the state without the list of allocations if that is no knowledge any more."""
    if state.pods is None or now_ns - state.pods_ns <= PODS_KNOWN_FOR_NS:
        return state
    return replace(state, pods=None)


def _is_free(state: State, gpu: GpuUuid) -> bool:
    """Whether it is known that no pod holds a device of a GPU."""
    return state.pods is not None and not any(
        device.id in state.pods
        for devices in state.devices.values()
        for device in devices
        if device.placement.gpu == gpu
    )
