"""Facts of the agent's own process: its tasks, its components, its inbox, its state file and its policy."""

from typing import Final

from agent.core.freshness import unknown_gpus
from agent.core.health import driver, stability
from agent.core.health.handlers import Applied, handles
from agent.core.health.kubelet import with_overdue_lists
from agent.core.health.state import State, initial_state
from agent.model import facts
from agent.model.effects import Event, EventKind, RecordEvent
from agent.model.ids import GpuUuid
from agent.model.snapshot import Durable, TaskView
from agent.model.structs import replace

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
"""Facts without which an unhealthy GPU may pass for a healthy one."""


def substitute(state: State, fact: facts.Fact, error: Exception) -> facts.FactRejected | facts.FactsLost:
    """Return the fact to apply in place of one on which the core fails again and again."""
    if not isinstance(fact, _HARD):
        return facts.FactsLost(lost_from=fact.source, source=fact.source)
    gpu: GpuUuid | None = None
    if isinstance(fact, facts.KernelXidSeen):
        at_address = driver.gpu_at(state, fact.pci)
        gpu = None if at_address is None else at_address.uuid
    elif not isinstance(
        fact, facts.DriverUnavailable | facts.DriverCallOverdue | facts.GpusEnumerated | facts.HoldRequested
    ):
        gpu = fact.gpu
    return facts.FactRejected(gpu, f"{fact}: {error!r}")


@handles(facts.Tick)
def apply_tick(state: State, _fact: facts.Tick, _now_ns: int) -> State:
    """Change nothing: what time alone brings is evaluated after every fact."""
    return state


@handles(facts.FactRejected)
def apply_fact_rejected(state: State, fact: facts.FactRejected, _now_ns: int) -> State:
    """Keep that a hard fact could not be applied: the GPU is unknown until it is probed."""
    return replace(state, failed_facts={**state.failed_facts, fact.gpu: fact.message})


@handles(facts.FactsLost)
def apply_facts_lost(state: State, fact: facts.FactsLost, now_ns: int) -> Applied:
    """Count lost facts by source, and record the loss."""
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


@handles(facts.TaskReported)
def apply_task_reported(state: State, fact: facts.TaskReported, _now_ns: int) -> State:
    """Keep whether a task runs, and count its failures."""
    old = state.tasks.get(fact.task)
    failures = (0 if old is None else old.failures) + (0 if fact.running else 1)
    new = TaskView(running=fact.running, failures=failures, message=fact.message)
    return replace(state, tasks={**state.tasks, fact.task: new})


@handles(facts.ComponentsStale)
def apply_components_stale(state: State, fact: facts.ComponentsStale, now_ns: int) -> State:
    """Keep which components are stale; a GPU whose prober was stale is known again by its next probe."""
    unknown = unknown_gpus((component for component in fact.stale if component.of), state.probed)
    state = with_overdue_lists(state, fact.stale - state.stale, now_ns)
    return replace(state, stale=fact.stale, covered=fact.covered, probed=state.probed - unknown)


@handles(facts.CdiReported)
def apply_cdi_reported(state: State, fact: facts.CdiReported, _now_ns: int) -> State:
    """Keep why the CDI specification does not resolve each device."""
    return replace(state, cdi_trouble=fact.trouble)


@handles(facts.StateUnread)
def apply_state_unread(state: State, fact: facts.StateUnread, _now_ns: int) -> State:
    """Keep why the state file cannot be read now."""
    return replace(state, unread=fact.why)


@handles(facts.StateRestored)
def apply_state_restored(state: State, fact: facts.StateRestored, now_ns: int) -> State:
    """Add what an earlier process kept to what this one has found out meanwhile."""
    state = replace(state, unread="")
    return state if fact.durable is None else _with_durable(state, fact.durable, now_ns)


def _with_durable(state: State, durable: Durable, now_ns: int) -> State:
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
    return driver.with_devices(known, now_ns)


@handles(facts.PolicyChanged)
def apply_policy_changed(state: State, fact: facts.PolicyChanged, now_ns: int) -> State:
    """Evaluate everything again under another policy."""
    advertised = driver.with_advertised(stability.with_policy(state, fact.policy), now_ns)
    return driver.with_nodes(advertised, now_ns)
