"""What is found of the use of GPUs as conditions of GPUs and MIG devices.

Invariants: a condition lasts while its findings do, and is then cleared by its own recovery rule. Knowledge
that is too old is none. A finding whose GPU is unknown is reported and is no condition.
"""

from collections.abc import Iterator
from typing import Final

from agent.core.health import conditions
from agent.core.health.handlers import handles
from agent.core.health.stability import PODS_KNOWN_FOR_NS
from agent.core.health.state import State
from agent.core.leaks import findings as leaks
from agent.core.leaks.rules import EvaluationInput
from agent.core.usage.ownership import allocated_by_place
from agent.model import facts
from agent.model.health import ConditionKey, LeakKind, Reason
from agent.model.ids import Placement, SourceName
from agent.model.policy import SECOND_NS
from agent.model.structs import replace
from agent.model.usage import PodRef, ProcessUse

USAGE_KNOWN_FOR_NS: Final = 90 * SECOND_NS
"""An older usage snapshot is stale; its source sends one every 30 s at least."""

_KINDS: Final = tuple(LeakKind)
_REASONS: Final = frozenset(leaks.REASONS.values())


def with_findings(old: State, state: State, now_ns: int) -> State:
    """Return the state with what is found of the use of its GPUs now."""
    state = _with_known(state, now_ns)
    if not _is_due(old, state, now_ns):
        return state
    found = state.leaks
    if state.usage_ns == 0:
        found = leaks.without_news(found, state.policy.leaks, now_ns)
    found = leaks.step(found, _inputs(state, now_ns))
    active = _conditions(state, found, now_ns)
    if found is state.leaks and active is state.conditions:
        return state
    return replace(state, leaks=found, conditions=active)


@handles(facts.PodsSeen)
def apply_pods_seen(state: State, fact: facts.PodsSeen, now_ns: int) -> State:
    """Keep the pods that are alive; a deleted one keeps its name while a process of it is there."""
    used = {process.status.pod.uid for process in _processes(state) if isinstance(process.status.pod, PodRef)}
    gone = {
        uid: replace(pod, alive=False)
        for uid, pod in (state.pods_seen or {}).items()
        if uid in used and uid not in fact.pods and (fact.complete or not state.pods_seen_all)
    }
    return replace(state, pods_seen={**fact.pods, **gone}, pods_seen_ns=now_ns, pods_seen_all=fact.complete)


@handles(facts.AllocationsListed)
def apply_allocations_listed(state: State, fact: facts.AllocationsListed, now_ns: int) -> State:
    """Keep which pod has which device."""
    return replace(state, pods=fact.pods, pods_ns=now_ns)


@handles(facts.GpuUseSeen)
def apply_gpu_use_seen(state: State, fact: facts.GpuUseSeen, now_ns: int) -> State:
    """Keep the usage snapshot."""
    return replace(state, usage=fact.usage, usage_ns=now_ns)


@handles(facts.GpuMemorySeen)
def apply_gpu_memory_seen(state: State, fact: facts.GpuMemorySeen, _now_ns: int) -> State:
    """Keep the memory of a GPU and its users."""
    return replace(state, memory={**state.memory, fact.gpu: fact.memory})


@handles(facts.ProbeSeen)
def apply_probe_seen(state: State, fact: facts.ProbeSeen, _now_ns: int) -> State:
    """Keep the status of the eBPF probe."""
    return replace(state, probe=fact.probe)


@handles(facts.DeviceCallsSeen)
def apply_device_calls_seen(state: State, fact: facts.DeviceCallsSeen, _now_ns: int) -> State:
    """Keep the counts of calls on the devices."""
    return replace(state, device_calls=fact.calls)


def _processes(state: State) -> tuple[ProcessUse, ...]:
    return () if state.usage is None else state.usage.processes


def due_at(state: State) -> Iterator[int]:
    """Yield when time alone may change what is found."""
    if state.usage is not None:
        yield state.usage_ns + USAGE_KNOWN_FOR_NS
    if state.pods_seen is not None:
        yield state.pods_seen_ns + PODS_KNOWN_FOR_NS
    if state.leaks.due_ns is not None:
        yield state.leaks.due_ns


def _with_known(state: State, now_ns: int) -> State:
    if state.usage is not None and now_ns >= state.usage_ns + USAGE_KNOWN_FOR_NS:
        state = replace(state, usage=None)
    if state.pods_seen is not None and now_ns >= state.pods_seen_ns + PODS_KNOWN_FOR_NS:
        state = replace(state, pods_seen=None)
    return state


def _is_due(old: State, state: State, now_ns: int) -> bool:
    if state.leaks.due_ns is not None and now_ns >= state.leaks.due_ns:
        return True
    return not (
        state.usage is old.usage
        and state.memory is old.memory
        and state.pods is old.pods
        and state.pods_seen is old.pods_seen
        and state.advertised is old.advertised
        and state.present is old.present
        and state.policy is old.policy
        and state.conditions is old.conditions
    )


def _inputs(state: State, now_ns: int) -> EvaluationInput:
    advertised = (device for devices in state.advertised.values() for device in devices)
    return EvaluationInput(
        now_ns=now_ns,
        policy=state.policy.leaks,
        usage=state.usage,
        gpus=state.present,
        memory=state.memory,
        allocated=None
        if state.pods is None
        else allocated_by_place(((device.id, device.placement) for device in advertised), state.pods),
        pods=state.pods_seen,
        has_all_pods=state.pods_seen_all,
    )


def _conditions(state: State, found: leaks.Leaks, now_ns: int) -> conditions.Conditions:
    active = state.conditions
    lasting: set[ConditionKey] = set()
    for (kind, place), pending in leaks.grouped(found).items():
        if place.gpu not in state.gpus:
            continue
        key = _key(kind, place)
        lasting.add(key)
        details = leaks.details_of(
            kind, pending, state.usage, state.policy.leaks, beyond=found.beyond.get((kind, place), 0)
        )
        active = conditions.raised(
            active,
            source=key.source,
            reason=key.reason,
            placement=place,
            code=key.code,
            message=leaks.message_of(details, state.policy.leaks),
            details=details,
            lasts=True,
            now_ns=now_ns,
        )
    over = [
        key
        for key, condition in active.items()
        if key.reason in _REASONS and condition.lasts and key not in lasting
    ]
    return {**active, **{key: replace(active[key], lasts=False) for key in over}} if over else active


def _key(kind: LeakKind, place: Placement) -> ConditionKey:
    reason = leaks.REASONS[kind]
    code = _KINDS.index(kind) + 1 if reason is Reason.CONTEXT_LEAK else 0
    return ConditionKey(_source(kind), reason, place, code)


def _source(kind: LeakKind) -> SourceName:
    return facts.NVML if kind is LeakKind.MEMORY_HELD else facts.PROBE
