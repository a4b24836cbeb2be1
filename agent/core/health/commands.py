"""Commands of operators: hold and unhold, recover, release and resume.

Invariants: a hold ends only by hand, over restarts and reboots, and holds a GPU by UUID, serial or PCI
address, so also one that is not there yet. A release ends by itself. No command takes a device away from a
running pod; it only changes what is advertised.
"""

from collections.abc import Mapping
from typing import Final

from agent.core.health import conditions
from agent.core.health.handlers import Applied, handles
from agent.core.health.samples import RULES, UNKNOWN, Window
from agent.core.health.state import State
from agent.core.leaks.findings import without_inherited
from agent.model import facts
from agent.model.effects import Event, EventKind, RecordEvent
from agent.model.gpu import Gpu
from agent.model.health import Condition, Reason
from agent.model.ids import GpuUuid, Placement
from agent.model.structs import replace

MAX_HOLDS: Final = 256
"""Holds kept; a node has 16 GPUs, so more is a script gone wild."""


@handles(facts.HoldRequested)
def apply_hold_requested(state: State, fact: facts.HoldRequested, now_ns: int) -> Applied:
    """Hold a GPU unhealthy until it is unheld."""
    if fact.selector not in state.holds and len(state.holds) >= MAX_HOLDS:
        return state, (_notice("A hold was rejected: there are too many", now_ns, selector=fact.selector),)
    kept = replace(state, holds={**state.holds, fact.selector: fact.why})
    notice = _notice("A GPU is held", now_ns, selector=fact.selector, why=fact.why)
    return with_holds(kept, now_ns), (notice,)


@handles(facts.UnholdRequested)
def apply_unhold_requested(state: State, fact: facts.UnholdRequested, now_ns: int) -> Applied:
    """Unhold a GPU: every hold that names it ends."""
    names = (selectors_of(gpu) for gpu in state.gpus.values())
    named = {fact.selector}.union(*(each for each in names if fact.selector in each))
    left = {selector: why for selector, why in state.holds.items() if selector not in named}
    if len(left) == len(state.holds):
        return state, ()
    notice = _notice("A GPU is held no more", now_ns, selector=fact.selector)
    return with_holds(replace(state, holds=left), now_ns), (notice,)


def selectors_of(gpu: Gpu) -> tuple[str, ...]:
    """Return the names by which a GPU can be held."""
    return (gpu.uuid, gpu.pci) if gpu.serial is None else (gpu.uuid, gpu.pci, gpu.serial)


def with_holds(state: State, now_ns: int) -> State:
    """Return the state with a condition on exactly the GPUs that are held."""
    active = state.conditions
    for gpu in state.gpus.values():
        why = _why_held(gpu, state.holds)
        if why is None:
            active = _dropped(active, Reason.HELD, gpu)
        else:
            active = conditions.raised(
                active,
                source=facts.OPERATOR,
                reason=Reason.HELD,
                placement=gpu.placement,
                message=f"Held by an operator: {why}",
                lasts=True,
                now_ns=now_ns,
            )
    return state if active is state.conditions else replace(state, conditions=active)


def _why_held(gpu: Gpu, holds: Mapping[str, str]) -> str | None:
    return next((holds[name] for name in selectors_of(gpu) if name in holds), None)


def _dropped(active: conditions.Conditions, reason: Reason, gpu: Gpu) -> conditions.Conditions:
    return {
        key: condition
        for key, condition in active.items()
        if not (key.reason is reason and key.placement.gpu == gpu.uuid)
    }


@handles(facts.RecoverRequested)
def apply_recover_requested(state: State, fact: facts.RecoverRequested, now_ns: int) -> Applied:
    """Clear the conditions of a GPU but those whose cause is there now, a hold and a release among them."""
    awaited = tuple(each for each in state.awaited if each.placement.gpu != fact.gpu)
    if fact.gpu not in state.gpus and len(awaited) == len(state.awaited):
        return state, ()
    ended = {
        key: condition
        for key, condition in state.conditions.items()
        if key.placement.gpu != fact.gpu or _is_present(state, condition)
    }
    faults = {gpu: times for gpu, times in state.fault_times.items() if gpu != fact.gpu}
    notice = _notice("An operator declared a GPU healthy", now_ns, uuid=fact.gpu)
    found = without_inherited(state.leaks, fact.gpu)
    return replace(state, conditions=ended, fault_times=faults, awaited=awaited, leaks=found), (notice,)


@handles(facts.StateLossAcknowledged)
def apply_state_loss_acknowledged(state: State, _fact: facts.StateLossAcknowledged, now_ns: int) -> Applied:
    """Stop reporting that what was kept before the start is lost."""
    if not state.lost:
        return state, ()
    return replace(state, lost=""), (_notice("An operator acknowledged that the state is lost", now_ns),)


def _is_present(state: State, condition: Condition) -> bool:
    """Whether the cause of a condition is there now, as far as it is still polled.

    A hung call and an absent driver are reported once, so no later report would raise them again.
    """
    gpu, reason = condition.placement.gpu, condition.reason
    if reason is Reason.NVML_TIMEOUT:
        return gpu in state.overdue
    if state.driver.ready is False and reason is state.driver.reason:
        return True
    if reason is Reason.DEVICE_NODE_MISSING:
        return condition.lasts and state.missing_nodes is not None
    return condition.lasts and not _is_read_no_more(state, gpu, reason)


def _is_read_no_more(state: State, gpu: GpuUuid, reason: Reason) -> bool:
    """Whether a reason comes from a reading that the newest poll did not have."""
    rule, sample = RULES.get(reason), state.samples.get(gpu)
    if rule is None or sample is None:
        return False
    return rule(sample, Window(), state.policy) is UNKNOWN


@handles(facts.ReleaseRequested)
def apply_release_requested(state: State, fact: facts.ReleaseRequested, now_ns: int) -> Applied:
    """Release the driver for a time."""
    asked = replace(
        state,
        released_gpus=state.released_gpus | fact.gpus,
        released_until_ns=now_ns + fact.for_ns,
        # Resumed and released once more, the driver may not be released again yet.
        driver_released=state.driver_released and state.released_until_ns is not None,
    )
    notice = _notice("The driver is released", now_ns, gpus=len(asked.released_gpus), for_ns=fact.for_ns)
    return with_maintenance(asked, now_ns), (notice,)


@handles(facts.ResumeRequested)
def apply_resume_requested(state: State, _fact: facts.ResumeRequested, now_ns: int) -> Applied:
    """Resume the driver before the release is over."""
    if state.released_until_ns is None:
        return state, ()
    return resumed(state, now_ns), (_notice("The driver is resumed on request", now_ns),)


def resumed(state: State, now_ns: int) -> State:
    """Return the state after a release ended."""
    return with_maintenance(replace(state, released_gpus=frozenset(), released_until_ns=None), now_ns)


def with_maintenance(state: State, now_ns: int) -> State:
    """Return the state with a condition on exactly the GPUs that are released."""
    active = state.conditions
    for gpu in state.gpus:
        if gpu not in state.released_gpus:
            active = conditions.eased(active, Reason.MAINTENANCE, gpu)
        else:
            active = conditions.raised(
                active,
                source=facts.OPERATOR,
                reason=Reason.MAINTENANCE,
                placement=Placement(gpu),
                message="The driver was released on request",
                lasts=True,
                now_ns=now_ns,
            )
    return state if active is state.conditions else replace(state, conditions=active)


def _notice(message: str, now_ns: int, **fields: object) -> RecordEvent:
    return RecordEvent(Event(EventKind.COMMAND, message, fields=fields), now_ns)
