"""What holds in every history of readings, orders, kernel log and machine, over restarts too."""

from collections.abc import Callable, Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from agent.core.health.commands import selectors_of
from agent.core.health.reducer import IDLE_NS, step
from agent.core.health.state import initial_state
from agent.model.effects import KeepEvidence, ReleaseDriver, ResumeDriver
from agent.model.facts import (
    AllocationsListed,
    DeviceNodesSeen,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverModuleSeen,
    DriverReleased,
    DriverUnavailable,
    Fact,
    GpuRebound,
    GpuSampled,
    HoldRequested,
    KernelXidSeen,
    PciGpusSeen,
    PolicyChanged,
    RecoverRequested,
    ReleaseRequested,
    ResumeRequested,
    Tick,
    UnholdRequested,
)
from agent.model.health import Health, Reason, Recovery
from agent.model.ids import DeviceId
from agent.model.policy import Policy
from agent.model.structs import replace
from tests.core.build import (
    MS,
    U0,
    U1,
    UNLOADED,
    Node,
    S,
    enumerated,
    failed,
    gpu,
    overdue,
    passed,
    ready,
    xid,
)
from tests.core.health.test_properties import holds, step_more_often
from tests.core.polls import BAD, HEALTHY, NOTHING, poll, sample

QUIET = 60 * S

ONE = replace(gpu(0), serial="1650921000123")
BOTH = enumerated(ONE, gpu(1))

GAPS = st.sampled_from(
    [0, 0, 0, 1, MS, S, 2 * S, 10 * S, 30 * S, QUIET - 1, QUIET, QUIET + 1, 600 * S, 3600 * S]
)
ON = st.sampled_from([U0, U1])
SOFT = frozenset({Reason.THERMAL, Reason.NVLINK_DOWN})

READINGS = st.sampled_from(
    [
        HEALTHY,
        HEALTHY,
        NOTHING,
        *(sample(**bad) for bad in BAD.values()),
        sample(hw_slowed=True),
        sample(hw_slowed=None),
    ]
)
SELECTORS = st.sampled_from([*selectors_of(ONE), U1, gpu(7).pci])

FACTS: st.SearchStrategy[Fact] = st.one_of(
    st.builds(passed, ON),
    st.builds(passed, ON),
    st.builds(GpuSampled, ON, READINGS),
    st.builds(GpuSampled, ON, READINGS),
    st.builds(xid, st.sampled_from([13, 94, 94, 48, 79, 74, 54, 64, 200]), ON),
    st.builds(
        KernelXidSeen,
        st.sampled_from([ONE.pci, gpu(1).pci, gpu(7).pci]),
        st.sampled_from([94, 79]),
        backlog=st.booleans(),
    ),
    st.builds(failed, ON, st.sampled_from([15, 16, 999])),
    st.builds(overdue, ON),
    st.sampled_from([DriverCallOverdue("wait", S), DriverCallAnswered("wait")]),
    st.sampled_from(
        [UNLOADED, DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "mismatch"), ready(), ready()]
    ),
    st.sampled_from([BOTH, BOTH, enumerated(replace(gpu(1), index=0)), enumerated()]),
    st.sampled_from([DriverModuleSeen(None), DriverModuleSeen(70), DriverModuleSeen(71)]),
    st.builds(GpuRebound, st.just(ONE.pci), bound=st.booleans()),
    st.sampled_from(
        [DeviceNodesSeen(("/dev/nvidia0",)), DeviceNodesSeen(("/dev/nvidiactl",)), DeviceNodesSeen(())]
    ),
    st.sampled_from([PciGpusSeen((ONE.pci, gpu(1).pci)), PciGpusSeen(())]),
    st.sampled_from([AllocationsListed({}), AllocationsListed({DeviceId(U0): "ns1/job-a"})]),
    st.builds(HoldRequested, SELECTORS, st.just("x")),
    st.builds(UnholdRequested, SELECTORS),
    st.builds(RecoverRequested, ON),
    st.builds(
        ReleaseRequested, st.sets(ON, min_size=1).map(frozenset), st.sampled_from([1, 10 * S, 600 * S])
    ),
    st.sampled_from([DriverReleased(), ResumeRequested(), ResumeRequested()]),
)
HISTORIES = st.lists(st.tuples(GAPS, FACTS), max_size=20)

POLICIES = st.builds(
    Policy,
    recovery_clean_probes=st.integers(1, 3),
    recovery_quiet_ns=st.sampled_from([0, 1, QUIET]),
    soft_flips=st.sampled_from([frozenset(), SOFT]),
    sticky_after=st.sampled_from([1, 3, 1000]),
    slowdown_window_polls=st.just(3),
)

ALL_HEALTHY: tuple[Fact, ...] = (*poll(U0), *poll(U1))
NOTHING_READ: tuple[Fact, ...] = (GpuSampled(U0, NOTHING), passed(U0), GpuSampled(U1, NOTHING), passed(U1))

History = Sequence[tuple[int, Fact]]
Check = Callable[[Node, Fact, int], None]


def lived(history: History, policy: Policy, check: Check | None = None) -> Node:
    """A node with two GPUs after a history; ``check`` gets each fact before it is applied, and its moment."""
    node = Node(policy)
    node.apply(ready(), BOTH, *poll(U0), *poll(U1))
    for gap_ns, fact in history:
        node.until(node.now_ns + min(gap_ns, QUIET + 1))
        node.now_ns += max(0, gap_ns - QUIET - 1)
        if check:
            check(node, fact, node.now_ns)
        node.apply(fact)
    return node


# Safety


@given(HISTORIES, POLICIES)
def test_no_device_is_healthy_while_anything_flips_it(history: History, policy: Policy) -> None:
    def check(node: Node, fact: Fact, now_ns: int) -> None:
        new, effects, wake_at_ns = step(node.state, fact, now_ns)
        holds(node.state, new, effects, now_ns)
        assert now_ns <= wake_at_ns <= now_ns + IDLE_NS

    lived(history, policy, check)


@given(HISTORIES, POLICIES)
def test_the_core_never_asks_to_be_woken_at_once_when_nothing_is_to_be_done(
    history: History, policy: Policy
) -> None:
    def check(node: Node, fact: Fact, now_ns: int) -> None:
        # Each batch ends with a Tick, for what time brings.
        settled, _, _ = step(step(node.state, fact, now_ns)[0], Tick(), now_ns)
        again, effects, wake_at_ns = step(settled, Tick(), now_ns)
        assert (again is settled, effects) == (True, ())
        assert wake_at_ns > now_ns

    lived(history, policy, check)


@given(HISTORIES, POLICIES, ON)
def test_a_poll_that_reads_nothing_raises_nothing_and_clears_nothing(
    history: History, policy: Policy, on: object
) -> None:
    node = lived(history, policy)
    node.apply(Tick())  # a release may be over at this very moment
    before = node.state.conditions
    node.apply(GpuSampled(U0 if on == U0 else U1, NOTHING))
    assert node.state.conditions == before


@given(HISTORIES, POLICIES)
def test_exactly_the_gpus_that_are_held_or_released_are_so(history: History, policy: Policy) -> None:
    def check(node: Node, fact: Fact, now_ns: int) -> None:
        state, _, _ = step(node.state, fact, now_ns)
        now: dict[Reason, set[str]] = {Reason.HELD: set(), Reason.MAINTENANCE: set()}
        for item in state.conditions.values():
            if item.lasts and item.reason in now:
                now[item.reason].add(item.placement.gpu)
        held = {uuid for uuid, known in state.gpus.items() if state.holds.keys() & set(selectors_of(known))}
        assert now == {Reason.HELD: held, Reason.MAINTENANCE: set(state.released_gpus)}
        assert (state.released_until_ns is None) == (not state.released_gpus)
        assert {
            item.placement.gpu for item in state.conditions.values() if item.reason is Reason.HELD
        } == held

    lived(history, policy, check)


@given(HISTORIES, POLICIES)
def test_the_driver_is_released_and_resumed_in_turn(history: History, policy: Policy) -> None:
    node = lived(history, policy)
    node.after(600 * S)
    asked = [type(effect) for _, effect in node.effects if isinstance(effect, ReleaseDriver | ResumeDriver)]
    assert asked[::2] == [ReleaseDriver] * (len(asked) // 2)
    assert asked[1::2] == [ResumeDriver] * (len(asked) // 2)


@given(HISTORIES, POLICIES)
def test_evidence_is_kept_once_for_each_time_a_gpu_turns_bad(history: History, policy: Policy) -> None:
    def check(node: Node, fact: Fact, now_ns: int) -> None:
        new, effects, _ = step(node.state, fact, now_ns)
        for effect in effects:
            if isinstance(effect, KeepEvidence):
                assert effect.condition in new.conditions.values()
                assert effect.condition.key not in node.state.conditions
        kept = [effect.gpu for effect in effects if isinstance(effect, KeepEvidence)]
        assert len(kept) == len(set(kept))

    lived(history, policy, check)


# Time


@given(HISTORIES, POLICIES, st.lists(st.integers(0, 200 * S), max_size=20))
def test_stepping_more_often_than_asked_changes_nothing(
    history: History, policy: Policy, extra: list[int]
) -> None:
    seldom, often = Node(policy), Node(policy)
    for node in (seldom, often):
        node.apply(ready(), BOTH)
    step_more_often(seldom, often, history, extra)


# Liveness


def mend(node: Node) -> None:
    """End every cause, also clocks held down in the last polls, and reset everything."""
    node.apply(DriverCallAnswered("wait"), ResumeRequested(), DeviceNodesSeen(()))
    node.apply(*(UnholdRequested(name) for name in list(node.state.holds)))
    node.apply(ready(), BOTH, *(ALL_HEALTHY * node.state.policy.slowdown_window_polls))
    node.apply(UNLOADED, ready(), BOTH)


def comes_back_to_the_probe(node: Node, read: tuple[Fact, ...]) -> None:
    """Everything but what needs a reboot or a person ends after exactly the probes and the time it takes."""
    policy = node.state.policy
    for_ever = {Recovery.REBOOT, Recovery.BY_HAND}
    out = {item.placement.gpu for item in node.conditions() if item.flips and item.recovery in for_ever}
    assert node.unhealthy() == {U0, U1}
    first_ns = node.now_ns
    for _ in range(policy.recovery_clean_probes - 1):
        node.apply(*read)
        assert node.unhealthy() == {U0, U1}
    if policy.recovery_clean_probes == 1 or policy.recovery_quiet_ns == 0:
        node.apply(*read)
    else:
        node.until(first_ns + policy.recovery_quiet_ns)
        node.apply(Tick())
        assert node.unhealthy() == {U0, U1}
        node.apply(*read)
    if policy.recovery_clean_probes == 1 and policy.recovery_quiet_ns:
        node.until(first_ns + policy.recovery_quiet_ns - 1)
        node.apply(Tick())
        assert node.unhealthy() == {U0, U1}
        node.until(first_ns + policy.recovery_quiet_ns)
        node.apply(Tick())
    assert {device.placement.gpu for device in node.devices() if device.health is Health.UNHEALTHY} == out
    assert all(item.recovery in for_ever for item in node.conditions())


@given(HISTORIES, POLICIES, st.sampled_from([ALL_HEALTHY, NOTHING_READ]))
@example([(0, GpuSampled(U0, sample(recovery_action=1)))], Policy(), NOTHING_READ)
@example([(0, GpuSampled(U0, sample(fabric_state=2)))], Policy(), NOTHING_READ)
def test_a_mended_node_comes_back_and_not_one_probe_sooner(
    history: History, policy: Policy, read: tuple[Fact, ...]
) -> None:
    node = lived(history, policy)
    mend(node)
    comes_back_to_the_probe(node, read)


@given(HISTORIES, POLICIES)
def test_recover_brings_back_everything_that_does_not_last(history: History, policy: Policy) -> None:
    node = lived(history, policy)
    mend(node)
    node.apply(*ALL_HEALTHY, RecoverRequested(U0), RecoverRequested(U1))
    assert node.conditions() == []
    assert node.unhealthy() == set()


# Over a restart


@given(HISTORIES, POLICIES, st.sampled_from([0, 1, QUIET, 3600 * S]))
def test_what_was_unhealthy_is_unhealthy_after_a_restart_until_its_rule_is_met(
    history: History, policy: Policy, after_ns: int
) -> None:
    node = lived(history, policy)
    again = node.restarted(after_ns=after_ns)
    kept = {key: (item.flips, item.lasts, item.reset_seen) for key, item in node.state.conditions.items()}
    assert kept == {
        key: (item.flips, item.lasts, item.reset_seen) for key, item in again.state.conditions.items()
    }
    out = {item.placement.gpu for item in node.conditions() if item.flips}
    assert {device.placement.gpu for device in again.devices() if device.health is Health.UNHEALTHY} == out
    assert (again.state.holds, again.state.released_gpus, again.state.module_inode) == (
        node.state.holds,
        node.state.released_gpus,
        node.state.module_inode,
    )
    assert again.state.released_until_ns == node.state.released_until_ns
    again.apply(Tick(), ready(), BOTH)
    for _ in range(policy.recovery_clean_probes - 1):
        again.apply(passed(U0), passed(U1))
        assert out <= again.unhealthy()


@given(HISTORIES, POLICIES, HISTORIES, st.sampled_from([ALL_HEALTHY, NOTHING_READ]))
def test_nothing_lasts_without_a_limit_over_a_restart(
    history: History, policy: Policy, more: History, read: tuple[Fact, ...]
) -> None:
    """Whatever happens before the restart and after it, a mended node recovers."""
    again = lived(history, policy).restarted(after_ns=S)
    again.apply(Tick())
    for gap_ns, fact in more:
        again.until(again.now_ns + min(gap_ns, QUIET + 1))
        again.apply(fact)
    mend(again)
    comes_back_to_the_probe(again, read)


# Policies that change


@given(HISTORIES, POLICIES, POLICIES)
def test_a_policy_that_changes_ends_no_hard_fault(history: History, policy: Policy, other: Policy) -> None:
    calm = replace(other, recovery_clean_probes=1000)
    node = lived(history, policy)
    before = {key for key, item in node.state.conditions.items() if item.flips and key.reason not in SOFT}
    node.apply(PolicyChanged(calm))
    after = {key for key, item in node.state.conditions.items() if item.flips and key.reason not in SOFT}
    assert after == before
    state = initial_state(calm, node.snapshot().durable, now_ns=node.now_ns)
    assert state.conditions.keys() == node.state.conditions.keys()
