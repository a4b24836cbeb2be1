"""What holds in every history: safety after every step, and that what is mended recovers."""

from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.core.health.handlers import handled
from agent.core.health.reducer import IDLE_NS, step
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import State, initial_state
from agent.model.effects import Effect, EventKind, RecordEvent
from agent.model.facts import (
    AGENT,
    NVML,
    DriverCallAnswered,
    DriverCallOverdue,
    Fact,
    FactsLost,
    TaskReported,
    Tick,
)
from agent.model.health import Health, Recovery
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    GPU,
    START_NS,
    U0,
    U1,
    UNLOADED,
    Node,
    S,
    enumerated,
    events_of,
    failed,
    fields_of,
    gpu,
    healthy_node,
    overdue,
    passed,
    ready,
    registered_node,
    xid,
)
from tests.core.histories import HEALTH_HISTORIES, HISTORIES, ONE_OF_EACH, QUIET

History = Sequence[tuple[int, Fact]]

QUIETS = st.sampled_from([0, 1, QUIET])
PROBES = st.integers(1, 3)


def policy_of(probes: int, quiet_ns: int) -> Policy:
    return Policy(recovery_clean_probes=probes, recovery_quiet_ns=quiet_ns)


def follow(node: Node, history: History) -> None:
    for gap_ns, fact in history:
        node.until(node.now_ns + min(gap_ns, QUIET + 1))
        node.now_ns += max(0, gap_ns - QUIET - 1)
        node.apply(fact)


# Every fact in every state


def rich_state() -> State:
    node = registered_node(C1B, gpu(1), policy=Policy(mig_strategy="mixed", sharing=Sharing.of({GPU: 2})))
    node.apply(xid(48, gi=2, ci=0), xid(79, U1), failed(U1, 15), overdue(U1), DriverCallOverdue("init", S))
    node.apply(TaskReported(AGENT, running=True), enumerated(C1B), FactsLost(NVML, count=1))
    return node.state


def test_there_is_one_fact_of_each_kind_here_and_each_kind_has_a_handler() -> None:
    kinds = set(get_args(Fact))
    assert {type(fact) for fact in ONE_OF_EACH} == kinds
    assert handled() == kinds


@pytest.mark.parametrize("fact", ONE_OF_EACH, ids=lambda fact: type(fact).__name__)
@pytest.mark.parametrize(
    "state",
    [initial_state(Policy(), None, now_ns=START_NS), rich_state()],
    ids=["at the beginning", "when much has happened"],
)
def test_every_fact_is_taken_in_every_state_and_the_old_state_stays_as_it_was(
    state: State, fact: Fact
) -> None:
    copy = replace(state)
    new, effects, wake_at_ns = step(state, fact, START_NS + S)
    assert state == copy
    assert START_NS + S <= wake_at_ns <= START_NS + S + IDLE_NS
    assert step(state, fact, START_NS + S) == (new, effects, wake_at_ns)
    assert snapshot_of(new).at_ns == (state.changed_ns if new is state else START_NS + S)


# Safety, after every step


def holds(old: State, new: State, effects: tuple[Effect, ...], now_ns: int) -> None:
    """The invariants of one step."""
    ids = [device.id for devices in new.devices.values() for device in devices]
    assert len(ids) == len(set(ids))
    for devices in new.devices.values():
        for device in devices:
            touching = [
                item
                for item in new.conditions.values()
                if item.flips and item.placement.overlaps(device.placement)
            ]
            is_known = device.placement.gpu in new.known_gpus
            assert (device.health is Health.HEALTHY) is (is_known and not touching)
            assert [item for item in device.reasons if item.flips] == sorted(
                touching, key=lambda item: item.since_ns
            )
            assert device.health is not Health.UNKNOWN or not is_known
    assert all(now_ns >= item.last_ns >= item.since_ns for item in new.conditions.values())
    if new == old:
        assert new is old
    assert (new.changed_ns == now_ns) or new is old
    published = [str(fields_of(event)["resource"]) for event in events_of(effects, EventKind.ALLOCATABLE)]
    assert len(published) == len(set(published))
    assert [effect for effect in effects if isinstance(effect, RecordEvent) and effect.at_ns != now_ns] == []


@given(HISTORIES, PROBES, QUIETS)
def test_a_device_is_healthy_iff_it_was_probed_and_nothing_flips_it(
    history: History, probes: int, quiet_ns: int
) -> None:
    state = initial_state(policy_of(probes, quiet_ns), None, now_ns=START_NS)
    now_ns = START_NS
    for gap_ns, fact in history:
        now_ns += gap_ns
        new, effects, wake_at_ns = step(state, fact, now_ns)
        assert now_ns <= wake_at_ns <= now_ns + IDLE_NS
        holds(state, new, effects, now_ns)
        state = new


@given(HEALTH_HISTORIES)
def test_capacity_and_order_do_not_change_because_of_health(history: History) -> None:
    node = healthy_node(gpu(0), gpu(1))
    ids = [device.id for device in node.devices()]
    for gap_ns, fact in history:
        node.now_ns += gap_ns
        node.apply(fact)
        assert [device.id for device in node.devices()] == ids


# Time


def step_more_often(seldom: Node, often: Node, history: History, extra: list[int]) -> None:
    """Live one history in two nodes of which one is stepped more often; find that nothing differs."""
    ticks = sorted(START_NS + at_ns for at_ns in extra)
    for gap_ns, fact in history:
        at_ns = seldom.now_ns + min(gap_ns, QUIET + 1)
        seldom.until(at_ns)
        for tick_ns in [tick_ns for tick_ns in ticks if often.now_ns < tick_ns < at_ns]:
            often.until(tick_ns)
            often.apply(Tick())
        often.until(at_ns)
        seldom.apply(fact)
        often.apply(fact)
        assert seldom.state == often.state
    assert seldom.effects == often.effects


@given(HISTORIES, st.lists(st.integers(0, 200 * S), max_size=30), PROBES, QUIETS)
def test_stepping_more_often_than_the_core_asks_for_changes_nothing(
    history: History, extra: list[int], probes: int, quiet_ns: int
) -> None:
    """So wake_at misses nothing, and nothing depends on how often the core is stepped."""
    seldom, often = Node(policy_of(probes, quiet_ns)), Node(policy_of(probes, quiet_ns))
    step_more_often(seldom, often, history, extra)


@given(HISTORIES, st.integers(1, 2**70))
def test_nothing_depends_on_when_the_clock_began(history: History, shift_ns: int) -> None:
    one, other = Node(), Node(at_ns=START_NS + shift_ns)
    follow(one, history)
    follow(other, history)
    assert one.health() == other.health()
    assert [(at_ns + shift_ns, type(effect)) for at_ns, effect in one.effects] == [
        (at_ns, type(effect)) for at_ns, effect in other.effects
    ]


# Liveness


@given(HEALTH_HISTORIES, PROBES, QUIETS, st.sampled_from([0, 1, S, QUIET]))
@example([(0, overdue(U0)), (0, overdue(U1))], 3, QUIET, 0)
@example([(0, DriverCallOverdue("init", S))], 1, 0, 0)
@example([(0, xid(79)), (S, enumerated())], 3, QUIET, 1)
def test_a_mended_node_comes_back_and_not_one_probe_or_nanosecond_sooner(
    history: History, probes: int, quiet_ns: int, between_ns: int
) -> None:
    node = Node(policy_of(probes, quiet_ns))
    node.apply(ready(), enumerated(gpu(0), gpu(1)), passed(U0), passed(U1))
    follow(node, history)
    node.apply(DriverCallAnswered("init"), UNLOADED, ready(), enumerated(gpu(0), gpu(1)))
    # The driver's absence is on both GPUs, so from here on every device has something to recover from.
    assert node.unhealthy() == {U0, U1}
    first_clean_ns = node.now_ns
    for number in range(probes):
        assert node.unhealthy() == {U0, U1}
        if number:
            node.until(node.now_ns + between_ns)
        node.apply(passed(U0), passed(U1))
    healthy_at_ns = max(node.now_ns, first_clean_ns + quiet_ns)
    for_ever = {
        item.placement.gpu
        for item in node.conditions()
        if item.recovery in {Recovery.REBOOT, Recovery.BY_HAND}
    }
    if healthy_at_ns > node.now_ns:
        node.until(healthy_at_ns - 1)
        node.apply(Tick())
        assert node.unhealthy() == {U0, U1}
        node.until(healthy_at_ns)
        node.apply(Tick())
    assert node.unhealthy() == for_ever


# Over a restart


@given(HEALTH_HISTORIES, PROBES, QUIETS, st.sampled_from([0, 1, QUIET, 3600 * S]))
def test_no_restart_makes_an_unhealthy_gpu_healthy_before_its_rule_is_met(
    history: History, probes: int, quiet_ns: int, after_ns: int
) -> None:
    node = Node(policy_of(probes, quiet_ns))
    node.apply(ready(), enumerated(gpu(0), gpu(1)), passed(U0), passed(U1))
    follow(node, history)
    unhealthy = {item.placement.gpu for item in node.conditions()}
    again = node.restarted(after_ns=after_ns)
    assert {
        device.placement.gpu for device in again.devices() if device.health is Health.UNHEALTHY
    } == unhealthy
    assert not any(device.health is Health.HEALTHY for device in again.devices())
    again.apply(Tick(), ready(), enumerated(gpu(0), gpu(1)))
    for _ in range(probes - 1):
        again.apply(passed(U0), passed(U1))
        assert unhealthy <= again.unhealthy()
    again.apply(passed(U0), passed(U1))
    assert quiet_ns == 0 or unhealthy <= again.unhealthy()
    healthy = {U0, U1} - unhealthy
    assert not healthy & again.unhealthy()
    kept = again.restarted().snapshot().durable
    assert {item.key for item in kept.conditions} == {item.key for item in again.conditions()}
    assert set(kept.gpus) == set(again.snapshot().durable.gpus)
    assert set(kept.xids) == set(again.snapshot().durable.xids)
