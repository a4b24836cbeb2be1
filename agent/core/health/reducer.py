"""The only writer of state: one fact in, the new state and the effects out.

Invariants: step is pure and total: every fact in any state gives a state. Effects are the difference of the
two states (core.health.changes), so nothing can change without an effect, and no effect is repeated. All
effects of one fact come out of one step.

The handler of a fact stands beside its rule: faults and kernel_log (devices), driver (driver and machine),
commands (operators), kubelet (registration), leak_conditions (usage of GPUs), process (the agent itself).
Here is what follows from the state and from time alone.
"""

from collections.abc import Mapping
from typing import Final

from agent.core.allocation import topology
from agent.core.health import (
    commands,
    conditions,
    driver,
    faults,
    kernel_log,
    kubelet,
    leak_conditions,
    process,
    registration,
    stability,
)
from agent.core.health.changes import changes
from agent.core.health.handlers import apply
from agent.core.health.inventory import unfit
from agent.core.health.registration import Registration
from agent.core.health.state import State
from agent.core.health.verdicts import Devices, differing, verdicts
from agent.model import facts
from agent.model.effects import Effect
from agent.model.health import Health
from agent.model.ids import DeviceId, ResourceName
from agent.model.policy import SECOND_NS
from agent.model.structs import replace

HANDLERS: Final = (commands, driver, faults, kernel_log, kubelet, leak_conditions, process)
"""The modules whose handlers register themselves when they are imported."""

IDLE_NS: Final = 5 * SECOND_NS
"""The engine steps at least this often."""


def step(state: State, fact: facts.Fact, now_ns: int) -> tuple[State, tuple[Effect, ...], int]:
    """Return the new state, what is to be done, and when to step again at the latest.

    If nothing changed, the state is the same object and nothing is to be done. A fact that changes nothing
    leaves what time brings to the next Tick: most facts are of that kind, and each batch ends with one.
    """
    applied, notices = apply(state, fact, now_ns)
    is_same = applied is state or applied == state
    if is_same and not notices and not isinstance(fact, facts.Tick):
        return state, (), _wake_at(state, now_ns)
    settled = _settle(state, state if is_same else applied, now_ns)
    if settled is state and not notices:
        return state, (), _wake_at(state, now_ns)
    if settled is not state:
        settled = replace(settled, changed_ns=now_ns)
    effects = (*notices, *changes(state, settled, now_ns))
    return settled, effects, _wake_at(settled, now_ns)


# What follows from the state and from time


def _settle(old: State, state: State, now_ns: int) -> State:
    """Return the state after everything that follows from it and from the time."""
    if state.released_until_ns is not None and now_ns >= state.released_until_ns:
        state = commands.resumed(state, now_ns)
    state = leak_conditions.with_findings(old, stability.with_known_pods(state, now_ns), now_ns)
    active = driver.hang_conditions(state, now_ns)
    active = conditions.without_recovered(active, policy=state.policy, now_ns=now_ns)
    if active is not state.conditions:
        state = replace(state, conditions=active)
    state = kernel_log.with_witnesses(state)
    state = stability.with_flapping(old, state, now_ns)
    state = stability.with_breaker(state, now_ns)
    if (
        state.conditions is not old.conditions
        or state.advertised is not old.advertised
        or state.probed is not old.probed
        or state.stale is not old.stale
        or state.covered is not old.covered
        or state.failed_facts is not old.failed_facts
    ):
        devices = _devices(old, state)
        state = replace(state, devices=devices, observed_flips=_observed_flips(state, devices))
    if (
        state.topology_samples is not old.topology_samples
        or state.present is not old.present
        or state.gpus is not old.gpus
    ):
        connected = topology.topology_of(state.gpus.values(), state.topology_samples, state.present)
        state = replace(state, topology=connected)
    if not state.first_probes_in and _probes_ready(state, now_ns):
        state = replace(state, first_probes_in=True)
    standings = _advanced(state, now_ns)
    return state if standings == state.registrations else replace(state, registrations=standings)


def _devices(old: State, state: State) -> Devices:
    return verdicts(
        state.advertised,
        state.conditions,
        state.known_gpus,
        known={
            name: old.devices[name] for name, each in old.advertised.items() if state.advertised[name] is each
        },
        stale=differing(old.conditions, state.conditions, old.known_gpus, state.known_gpus),
    )


def _observed_flips(state: State, devices: Devices) -> int:
    """Return how many devices would have turned Unhealthy by now, had the agent not only observed."""
    if not state.policy.observe:
        return state.observed_flips
    was_unhealthy = _unhealthy(state.devices)
    return state.observed_flips + len(_unhealthy(devices) - was_unhealthy)


def _unhealthy(devices: Devices) -> frozenset[tuple[ResourceName, DeviceId]]:
    return frozenset(
        (name, device.id)
        for name, listed in devices.items()
        for device in listed
        if device.health is Health.UNHEALTHY
    )


def _advanced(state: State, now_ns: int) -> Mapping[ResourceName, Registration]:
    if state.policy.observe:
        return state.registrations
    ready = _probes_ready(state, now_ns)
    standings = {}
    for name, advertised in state.advertised.items():
        standing = state.registrations.get(name)
        if standing is None:
            if not advertised and name not in unfit(state.gpus.values(), state.policy):
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
    others = (
        state.released_until_ns,
        stability.pods_known_until(state),
        stability.breaker_at(state, now_ns),
    )
    times += [at_ns for at_ns in others if at_ns is not None]
    times += leak_conditions.due_at(state)
    if not state.first_probes_in and state.first_probes_by_ns is not None:
        times.append(state.first_probes_by_ns)
    for standing in () if state.policy.observe else state.registrations.values():
        at_ns = registration.due_at(standing, state.policy)
        if at_ns is not None:
            times.append(at_ns)
        elif standing.waits_for_probes and state.first_probes_by_ns is not None:
            times.append(state.first_probes_by_ns)
    return max(now_ns, min(times))
