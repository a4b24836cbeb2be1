"""Facts of the kubelet applied to the registration of each resource."""

from collections.abc import Iterable
from typing import get_args

from agent.core.health import registration
from agent.core.health.handlers import Applied, handles
from agent.core.health.registration import RegistrationFact
from agent.core.health.state import State
from agent.model import facts
from agent.model.components import LIST_AND_WATCH
from agent.model.effects import ExitProcess
from agent.model.ids import ComponentId
from agent.model.structs import replace


@handles(facts.KubeletSocketSeen)
def apply_kubelet_socket_seen(state: State, fact: facts.KubeletSocketSeen, _now_ns: int) -> State:
    """Keep which kubelet socket there is; None: none."""
    return replace(state, kubelet=fact.identity)


@handles(*get_args(RegistrationFact))
def apply_to_registration(state: State, fact: RegistrationFact, now_ns: int) -> State:
    """Apply a fact to the registration of its resource."""
    standing = state.registrations.get(fact.resource)
    if standing is None:
        return state
    changed = registration.after(standing, fact, policy=state.policy, now_ns=now_ns)
    if changed == standing:
        return state
    # The sink that registered saw the socket itself, perhaps before the watcher of the directory did.
    kubelet = state.kubelet if changed.kubelet == standing.kubelet else changed.kubelet
    return replace(state, kubelet=kubelet, registrations={**state.registrations, fact.resource: changed})


@handles(facts.KubeletCounted)
def apply_kubelet_counted(state: State, fact: facts.KubeletCounted, now_ns: int) -> State:
    """Compare the kubelet's own count of each resource with the newest list that was sent."""
    standings = {
        name: registration.counted(
            standing,
            fact.healthy.get(name, frozenset()),
            asked_ns=fact.asked_ns,
            policy=state.policy,
            now_ns=now_ns,
        )
        for name, standing in state.registrations.items()
    }
    return state if standings == state.registrations else replace(state, registrations=standings)


@handles(facts.WatchedDirectoryDeleted)
def apply_watched_directory_deleted(
    state: State, fact: facts.WatchedDirectoryDeleted, _now_ns: int
) -> Applied:
    """End the process: a directory that was deleted under its mount comes to a new process alone."""
    message = f"{fact.path} was deleted; only a new process can write the one that takes its place"
    return state, (ExitProcess(exit_code=1, message=message),)


def with_overdue_lists(state: State, stale: Iterable[ComponentId], now_ns: int) -> State:
    """Return the state with each resource registered anew whose newest list was not sent for too long."""
    overdue = {
        name: registration.list_overdue(standing, policy=state.policy, now_ns=now_ns)
        for component in stale
        for name, standing in state.registrations.items()
        if component == ComponentId(LIST_AND_WATCH, name)
    }
    return replace(state, registrations={**state.registrations, **overdue}) if overdue else state
