"""What operators ask for: hold and unhold, recover, release and resume.

Invariants: a hold ends only by hand, over restarts and reboots, and holds a GPU by UUID, serial or PCI
address, so also one that is not there yet. A release ends by itself. No order takes a device away from a
running pod; it only changes what is offered.
"""

from collections.abc import Mapping
from typing import Final

from agent.core.health import conditions
from agent.core.health.samples import RULES, UNKNOWN, Window
from agent.core.health.state import State
from agent.core.leaks.findings import without_inherited
from agent.model import facts
from agent.model.effects import Effect, Event, EventKind, RecordEvent
from agent.model.gpu import Gpu
from agent.model.health import Condition, Reason
from agent.model.ids import GpuUuid, Placement
from agent.model.structs import replace

MAX_HOLDS: Final = 256
"""Holds kept; a node has 16 GPUs, so more is a script gone wild."""


def held(state: State, fact: facts.HoldRequested, now_ns: int) -> tuple[State, tuple[Effect, ...]]:
    """Take a GPU out until it is given back."""
    if fact.selector not in state.holds and len(state.holds) >= MAX_HOLDS:
        return state, (_told("A hold was refused: there are too many", now_ns, selector=fact.selector),)
    kept = replace(state, holds={**state.holds, fact.selector: fact.why})
    told = _told("A GPU is held", now_ns, selector=fact.selector, why=fact.why)
    return with_holds(kept, now_ns), (told,)


def unheld(state: State, fact: facts.UnholdRequested, now_ns: int) -> tuple[State, tuple[Effect, ...]]:
    """Give a held GPU back: every hold that names it ends."""
    names = (selectors_of(gpu) for gpu in state.gpus.values())
    named = {fact.selector}.union(*(each for each in names if fact.selector in each))
    left = {selector: why for selector, why in state.holds.items() if selector not in named}
    if len(left) == len(state.holds):
        return state, ()
    told = _told("A GPU is held no more", now_ns, selector=fact.selector)
    return with_holds(replace(state, holds=left), now_ns), (told,)


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


def recovered(state: State, fact: facts.RecoverRequested, now_ns: int) -> tuple[State, tuple[Effect, ...]]:
    """End every condition of a GPU but those whose cause is still seen, a hold and a release among them."""
    awaited = tuple(each for each in state.awaited if each.placement.gpu != fact.gpu)
    if fact.gpu not in state.gpus and len(awaited) == len(state.awaited):
        return state, ()
    ended = {
        key: condition
        for key, condition in state.conditions.items()
        if key.placement.gpu != fact.gpu or _is_still_seen(state, condition)
    }
    faults = {gpu: times for gpu, times in state.fault_times.items() if gpu != fact.gpu}
    told = _told("An operator declared a GPU well", now_ns, uuid=fact.gpu)
    found = without_inherited(state.leaks, fact.gpu)
    return replace(state, conditions=ended, fault_times=faults, awaited=awaited, leaks=found), (told,)


def loss_acknowledged(state: State, now_ns: int) -> tuple[State, tuple[Effect, ...]]:
    """Stop reporting that what was kept before the start is lost."""
    if not state.lost:
        return state, ()
    return replace(state, lost=""), (_told("An operator acknowledged that the state is lost", now_ns),)


def _is_still_seen(state: State, condition: Condition) -> bool:
    """Whether the cause of a condition is there now, as far as anyone still looks at it.

    A call that hangs and a driver that is away are told of once, so no later report would raise them again.
    """
    gpu, reason = condition.placement.gpu, condition.reason
    if reason is Reason.NVML_TIMEOUT:
        return gpu in state.overdue
    if state.driver.ready is False and reason is state.driver.reason:
        return True
    if reason is Reason.DEVICE_NODE_MISSING:
        return condition.lasts and state.missing_nodes is not None
    return condition.lasts and not _is_offered_no_more(state, gpu, reason)


def _is_offered_no_more(state: State, gpu: GpuUuid, reason: Reason) -> bool:
    """Whether a reason comes from a reading that the newest poll did not have."""
    rule, sample = RULES.get(reason), state.samples.get(gpu)
    if rule is None or sample is None:
        return False
    return rule(sample, Window(), state.policy) is UNKNOWN


def release_asked(
    state: State, fact: facts.ReleaseRequested, now_ns: int
) -> tuple[State, tuple[Effect, ...]]:
    """Let the driver go for a time."""
    asked = replace(
        state,
        released_gpus=state.released_gpus | fact.gpus,
        released_until_ns=now_ns + fact.for_ns,
        # Taken back and asked for once more, it may not have been let go of again yet.
        driver_released=state.driver_released and state.released_until_ns is not None,
    )
    told = _told("The driver is released", now_ns, gpus=len(asked.released_gpus), for_ns=fact.for_ns)
    return with_maintenance(asked, now_ns), (told,)


def resume_asked(state: State, now_ns: int) -> tuple[State, tuple[Effect, ...]]:
    """Take the driver back."""
    if state.released_until_ns is None:
        return state, ()
    return resumed(state, now_ns), (_told("The driver is taken back on request", now_ns),)


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
                message="The driver was let go of on request",
                lasts=True,
                now_ns=now_ns,
            )
    return state if active is state.conditions else replace(state, conditions=active)


def _told(message: str, now_ns: int, **fields: object) -> RecordEvent:
    return RecordEvent(Event(EventKind.ORDER, message, fields=fields), now_ns)
