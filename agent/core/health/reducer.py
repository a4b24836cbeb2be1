"""The only writer of state: one fact in, the new state and what is to be done out.

Invariants: step is pure and total: every fact in any state gives a state. What is to be done is
read off the difference of the two states (core.changes), so nothing can change without being told,
and nothing is told twice. All effects of one fact come out of one step.

What a fact means stands in core.faults (devices), core.kernel_log, core.driver (driver and machine),
core.orders (operators) and core.registration (kubelet); here is the table, and what follows from the
state and from time alone.
"""

from collections.abc import Iterable, Mapping
from typing import Final, assert_never

from agent.core.allocation import topology
from agent.core.freshness import unknown_gpus
from agent.core.health import (
    commands as orders,
)
from agent.core.health import (
    conditions,
    driver,
    faults,
    kernel_log,
    registration,
    stability,
)
from agent.core.health import (
    leak_conditions as findings,
)
from agent.core.health.changes import changes
from agent.core.health.inventory import unfit
from agent.core.health.registration import Registration
from agent.core.health.state import State, initial_state
from agent.core.health.verdicts import Devices, differing, verdicts
from agent.model import facts
from agent.model.effects import Effect, EndProcess, Event, EventKind, RecordEvent
from agent.model.health import Health
from agent.model.ids import DeviceId, GpuUuid, Part, ResourceName
from agent.model.parts import LIST_AND_WATCH
from agent.model.policy import SECOND_NS
from agent.model.snapshot import Durable, TaskView
from agent.model.structs import replace

IDLE_NS: Final = 5 * SECOND_NS
"""The engine steps at least this often."""


def step(state: State, fact: facts.Fact, now_ns: int) -> tuple[State, tuple[Effect, ...], int]:
    """Return the new state, what is to be done, and when to step again at the latest.

    If nothing changed, the state is the same object and nothing is to be done. A fact that changes nothing
    leaves what time brings to the next Tick: most facts are of that kind, and each batch ends with one.
    """
    applied, notices = _apply(state, fact, now_ns)
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


_HARD: Final = (
    facts.XidReported
    | facts.KernelXidSeen
    | facts.GpuCallFailed
    | facts.GpuCallOverdue
    | facts.GpuProbePassed
    | facts.DriverUnavailable
    | facts.DriverCallOverdue
    | facts.GpusEnumerated
    | facts.HoldRequested
)
"""Facts without which a sick GPU may pass for a well one."""


def refusal(state: State, fact: facts.Fact, error: Exception) -> facts.FactRefused | facts.FactsLost:
    """Return what to step through in place of a fact on which the core fails again and again."""
    if not isinstance(fact, _HARD):
        return facts.FactsLost(lost_from=fact.source, source=fact.source)
    gpu: GpuUuid | None = None
    if isinstance(fact, facts.KernelXidSeen):
        there = driver.gpu_at(state, fact.pci)
        gpu = None if there is None else there.uuid
    elif not isinstance(
        fact, facts.DriverUnavailable | facts.DriverCallOverdue | facts.GpusEnumerated | facts.HoldRequested
    ):
        gpu = fact.gpu
    return facts.FactRefused(gpu, f"{fact}: {error!r}")


_Applied = tuple[State, tuple[Effect, ...]]


def _apply(state: State, fact: facts.Fact, now_ns: int) -> _Applied:  # noqa: C901, PLR0911, PLR0912 - a table
    match fact:
        case facts.XidReported():
            return faults.xid_reported(state, fact, now_ns)
        case facts.KernelXidSeen():
            return kernel_log.xid_seen(state, fact, now_ns)
        case facts.SwitchErrorSeen():
            return kernel_log.switch_error_seen(state, fact, now_ns)
        case facts.UvmErrorSeen():
            return kernel_log.uvm_error_seen(state, fact, now_ns)
        case facts.GpusEnumerated():
            return kernel_log.early_xids_seen(driver.enumerated(state, fact, now_ns), now_ns)
        case facts.FactsLost():
            return _facts_lost(state, fact, now_ns)
        case facts.HoldRequested():
            return orders.held(state, fact, now_ns)
        case facts.UnholdRequested():
            return orders.unheld(state, fact, now_ns)
        case facts.RecoverRequested():
            return orders.recovered(state, fact, now_ns)
        case facts.StateLossAcknowledged():
            return orders.loss_acknowledged(state, now_ns)
        case facts.ReleaseRequested():
            return orders.release_asked(state, fact, now_ns)
        case facts.ResumeRequested():
            return orders.resume_asked(state, now_ns)
        case facts.HealthEventsUnsupported():
            return state, (_unsupported(state, fact, now_ns),)
        case facts.WatchedDirectoryDeleted():
            return state, (_directory_deleted(fact),)
        case _:
            return _known(state, fact, now_ns), ()


_Quiet = (
    facts.Tick
    | facts.GpuProbePassed
    | facts.GpuCallFailed
    | facts.GpuCallOverdue
    | facts.GpuCallAnswered
    | facts.GpuSampled
    | facts.TopologySeen
    | facts.DriverReady
    | facts.DriverUnavailable
    | facts.DriverCallOverdue
    | facts.DriverCallAnswered
    | facts.DriverReleased
    | facts.KernelLogRead
    | facts.UvmProbed
    | facts.PciConfigRead
    | facts.PciGpusSeen
    | facts.DriverModuleSeen
    | facts.DeviceNodesSeen
    | facts.GpuRebound
    | facts.AllocationsListed
    | facts.GpuUseSeen
    | facts.ProbeSeen
    | facts.DeviceCallsSeen
    | facts.GpuMemorySeen
    | facts.PodsSeen
    | facts.KubeletSocketSeen
    | facts.OwnSocketLost
    | facts.RegisterSent
    | facts.Registered
    | facts.RegistrationFailed
    | facts.WatchersChanged
    | facts.SocketFreed
    | facts.ListWritten
    | facts.KubeletCounted
    | facts.MpsSeen
    | facts.TaskReported
    | facts.CdiReported
    | facts.PolicyChanged
    | facts.StateUnread
    | facts.StateRestored
    | facts.PartsStale
    | facts.FactRefused
)
"""Facts of which nothing is told but what they change."""


def _known(state: State, fact: _Quiet, now_ns: int) -> State:  # noqa: C901, PLR0911, PLR0912 - a table
    match fact:
        case facts.Tick():
            return state
        case facts.GpuProbePassed():
            return faults.probe_passed(state, fact, now_ns)
        case facts.GpuCallFailed():
            return faults.call_failed(state, fact, now_ns)
        case facts.GpuCallOverdue():
            return faults.call_overdue(state, fact, now_ns)
        case facts.GpuCallAnswered():
            return faults.call_answered(state, fact)
        case facts.GpuSampled():
            return faults.sampled(state, fact, now_ns)
        case facts.TopologySeen():
            return driver.surveyed(state, fact)
        case facts.DriverReady():
            return driver.ready(state, fact)
        case facts.DriverUnavailable():
            return driver.unavailable(state, fact, now_ns)
        case facts.DriverCallOverdue():
            return replace(state, driver_overdue=fact.call)
        case facts.DriverCallAnswered():
            return replace(state, driver_overdue=None)
        case facts.DriverReleased():
            return driver.released(state, now_ns)
        case facts.KernelLogRead():
            # What waits for the first GPU is in no state that is kept: the next process has to read it again.
            return state if state.early_xids else replace(state, kernel_log_read=fact.until)
        case facts.UvmProbed():
            return kernel_log.uvm_probed(state, fact, now_ns)
        case facts.PciConfigRead():
            return kernel_log.pci_config_read(state, fact, now_ns)
        case facts.PciGpusSeen():
            return replace(state, bus=fact.addresses)
        case facts.DriverModuleSeen():
            return driver.module_seen(state, fact, now_ns)
        case facts.DeviceNodesSeen():
            return driver.nodes_seen(state, fact, now_ns)
        case facts.GpuRebound():
            return driver.rebound(state, fact)
        case facts.AllocationsListed():
            return replace(state, pods=fact.pods, pods_ns=now_ns)
        case facts.GpuUseSeen():
            return replace(state, usage=fact.usage, usage_ns=now_ns)
        case facts.GpuMemorySeen():
            return replace(state, memory={**state.memory, fact.gpu: fact.memory})
        case facts.ProbeSeen():
            return replace(state, probe=fact.probe)
        case facts.DeviceCallsSeen():
            return replace(state, device_calls=fact.calls)
        case facts.PodsSeen():
            return findings.pods_seen(state, fact, now_ns)
        case facts.KubeletSocketSeen():
            return replace(state, kubelet=fact.identity)
        case (
            facts.RegisterSent()
            | facts.Registered()
            | facts.RegistrationFailed()
            | facts.WatchersChanged()
            | facts.ListWritten()
            | facts.SocketFreed()
            | facts.OwnSocketLost()
        ):
            return _registration_told(state, fact, now_ns)
        case facts.KubeletCounted():
            return _kubelet_counted(state, fact, now_ns)
        case facts.MpsSeen():
            return driver.mps_seen(state, fact, now_ns)
        case facts.TaskReported():
            return _task_reported(state, fact)
        case facts.CdiReported():
            return replace(state, cdi_trouble=fact.trouble)
        case facts.PartsStale():
            # A GPU whose prober was stale is known again by its next probe alone.
            unknown = unknown_gpus((part for part in fact.stale if part.of), state.probed)
            state = _lists_overdue(state, fact.stale - state.stale, now_ns)
            return replace(state, stale=fact.stale, covered=fact.covered, probed=state.probed - unknown)
        case facts.FactRefused():
            return replace(state, refused={**state.refused, fact.gpu: fact.message})
        case facts.StateUnread():
            return replace(state, unread=fact.why)
        case facts.StateRestored():
            return _restored(replace(state, unread=""), fact.durable, now_ns)
        case facts.PolicyChanged():
            offered = driver.with_offers(stability.with_policy(state, fact.policy), now_ns)
            return driver.with_nodes(offered, now_ns)
        case _:
            assert_never(fact)


def _restored(state: State, durable: Durable | None, now_ns: int) -> State:
    """Return the state with what an earlier process kept and what was not known when this one began."""
    if durable is None:
        return state
    kept = initial_state(state.policy, durable, now_ns=now_ns)
    known = replace(
        state,
        gpus={**kept.gpus, **state.gpus},
        conditions={**kept.conditions, **state.conditions},
        awaited=kept.awaited,
        xids={**kept.xids, **state.xids},
        lost=kept.lost,
        holds={**kept.holds, **state.holds},
        released_gpus=state.released_gpus or kept.released_gpus,
        released_until_ns=state.released_until_ns or kept.released_until_ns,
    )
    known = driver.with_awaited(known, state.present)
    return orders.with_maintenance(orders.with_holds(driver.with_offers(known, now_ns), now_ns), now_ns)


# Kubelet and tasks


def _registration_told(state: State, fact: registration.Told, now_ns: int) -> State:
    standing = state.registrations.get(fact.resource)
    if standing is None:
        return state
    told = registration.told(standing, fact, policy=state.policy, now_ns=now_ns)
    if told == standing:
        return state
    # Who registered looked at the socket itself, perhaps before who watches the directory did.
    kubelet = state.kubelet if told.kubelet == standing.kubelet else told.kubelet
    return replace(state, kubelet=kubelet, registrations={**state.registrations, fact.resource: told})


def _kubelet_counted(state: State, fact: facts.KubeletCounted, now_ns: int) -> State:
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


def _lists_overdue(state: State, stale: Iterable[Part], now_ns: int) -> State:
    overdue = {
        name: registration.list_overdue(standing, policy=state.policy, now_ns=now_ns)
        for part in stale
        for name, standing in state.registrations.items()
        if part == Part(LIST_AND_WATCH, name)
    }
    return replace(state, registrations={**state.registrations, **overdue}) if overdue else state


def _task_reported(state: State, fact: facts.TaskReported) -> State:
    old = state.tasks.get(fact.task)
    failures = (0 if old is None else old.failures) + (0 if fact.running else 1)
    new = TaskView(running=fact.running, failures=failures, message=fact.message)
    return replace(state, tasks={**state.tasks, fact.task: new})


def _facts_lost(state: State, fact: facts.FactsLost, now_ns: int) -> _Applied:
    total = state.facts_lost.get(fact.lost_from, 0) + fact.count
    event = Event(
        EventKind.LOSS,
        "Facts were lost because the inbox was full"
        if fact.source == facts.AGENT
        else f"Facts of {fact.lost_from} were lost before they could be read",
        warning=True,
        fields={"source": fact.lost_from, "count": fact.count, "total": total},
    )
    lost = {**state.facts_lost, fact.lost_from: total}
    return replace(state, facts_lost=lost), (RecordEvent(event, now_ns),)


def _unsupported(state: State, fact: facts.HealthEventsUnsupported, now_ns: int) -> RecordEvent:
    gpu = state.gpus.get(fact.gpu)
    event = Event(
        EventKind.GPUS,
        "The driver offers no XID events for a GPU, which is watched by probes alone",
        warning=True,
        fields={"uuid": fact.gpu, "gpu": None if gpu is None else gpu.index, "detail": fact.message},
    )
    return RecordEvent(event, now_ns)


def _directory_deleted(fact: facts.WatchedDirectoryDeleted) -> EndProcess:
    return EndProcess(
        exit_code=1,
        message=f"{fact.path} was deleted; only a new process can write the one that takes its place",
    )


# What time brings


def _settle(old: State, state: State, now_ns: int) -> State:
    """Return the state after everything that follows from it and from the time."""
    if state.released_until_ns is not None and now_ns >= state.released_until_ns:
        state = orders.resumed(state, now_ns)
    state = findings.with_findings(old, stability.with_known_pods(state, now_ns), now_ns)
    active = driver.hang_conditions(state, now_ns)
    active = conditions.without_recovered(active, policy=state.policy, now_ns=now_ns)
    if active is not state.conditions:
        state = replace(state, conditions=active)
    state = kernel_log.with_witnesses(state)
    state = stability.with_flapping(old, state, now_ns)
    state = stability.with_breaker(state, now_ns)
    if (
        state.conditions is not old.conditions
        or state.offers is not old.offers
        or state.probed is not old.probed
        or state.stale is not old.stale
        or state.covered is not old.covered
        or state.refused is not old.refused
    ):
        devices = _devices(old, state)
        state = replace(state, devices=devices, observed_flips=_observed_flips(state, devices))
    if state.surveys is not old.surveys or state.present is not old.present or state.gpus is not old.gpus:
        connected = topology.topology_of(state.gpus.values(), state.surveys, state.present)
        state = replace(state, topology=connected)
    if not state.first_probes_in and _probes_ready(state, now_ns):
        state = replace(state, first_probes_in=True)
    standings = _advanced(state, now_ns)
    return state if standings == state.registrations else replace(state, registrations=standings)


def _devices(old: State, state: State) -> Devices:
    return verdicts(
        state.offers,
        state.conditions,
        state.known_gpus,
        known={name: old.devices[name] for name, each in old.offers.items() if state.offers[name] is each},
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
    for name, offered in state.offers.items():
        standing = state.registrations.get(name)
        if standing is None:
            if not offered and name not in unfit(state.gpus.values(), state.policy):
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
    times += findings.due_at(state)
    if not state.first_probes_in and state.first_probes_by_ns is not None:
        times.append(state.first_probes_by_ns)
    for standing in () if state.policy.observe else state.registrations.values():
        at_ns = registration.due_at(standing, state.policy)
        if at_ns is not None:
            times.append(at_ns)
        elif standing.waits_for_probes and state.first_probes_by_ns is not None:
            times.append(state.first_probes_by_ns)
    return max(now_ns, min(times))
