"""Flapping, the breaker for soft evidence, observing without acting, and policies that change."""

import pytest

from agent.core.health.reducer import IDLE_NS
from agent.core.health.stability import PODS_KNOWN_FOR_NS, soft_candidates
from agent.core.health.state import State
from agent.core.reasons import REASON_SPECS
from agent.model.effects import EventKind, KeepEvidence, RegisterResource
from agent.model.facts import (
    AGENT,
    AllocationsListed,
    DeviceNodesSeen,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverUnavailable,
    Fact,
    KubeletSocketSeen,
    PolicyChanged,
    ReleaseRequested,
    ResumeRequested,
    Tick,
)
from agent.model.health import Condition, ConditionKey, Evidence, Reason, Recovery
from agent.model.ids import DeviceId, GpuUuid
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.snapshot import RegistrationPhase
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    GPU,
    K1,
    U0,
    U1,
    U2,
    Node,
    S,
    enumerated,
    failed,
    fields_of,
    gpu,
    healthy_node,
    mig_uuid,
    overdue,
    passed,
    place,
    ready,
    registered_node,
    xid,
)
from tests.core.polls import poll, read, reasons

Q = 60 * S
HOUR = 3600 * S

AT_ONCE = Policy(recovery_clean_probes=1, recovery_quiet_ns=0)
"""One clean probe brings a GPU back, so that each fault is one of its own."""


def fault_and_back(node: Node, *facts: Fact, on: GpuUuid = U0) -> None:
    node.apply(*facts or (failed(on),))
    node.apply(passed(on))


# Flapping


def test_a_gpu_that_fails_and_comes_back_for_the_third_time_flaps() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=AT_ONCE)
    fault_and_back(node)
    fault_and_back(node)
    assert node.unhealthy() == set()
    node.apply(failed())
    assert reasons(node) == {Reason.NVML_ERROR, Reason.FLAPPING}
    node.apply(passed())
    assert node.conditions() == [
        Condition(
            key=ConditionKey(AGENT, Reason.FLAPPING, place(U0), 0),
            evidence=Evidence.HARD,
            recovery=Recovery.REBOOT,
            flips=True,
            message="3 faults within 600 s",
            since_ns=node.now_ns,
            last_ns=node.now_ns,
        )
    ]
    assert node.unhealthy() == {U0}


@pytest.mark.parametrize("sticky_after", [1, 2, 3, 5])
def test_it_is_the_nth_fault_that_is_flapping(sticky_after: int) -> None:
    node = healthy_node(gpu(0), policy=replace(AT_ONCE, sticky_after=sticky_after))
    for _ in range(sticky_after - 1):
        fault_and_back(node)
        assert node.unhealthy() == set()
    fault_and_back(node)
    assert reasons(node) == {Reason.FLAPPING}
    assert len(node.state.fault_times[U0]) == sticky_after


@pytest.mark.parametrize(("spread_ns", "flaps"), [(600 * S - 1, True), (600 * S, False)])
def test_faults_count_for_as_long_as_the_window(spread_ns: int, *, flaps: bool) -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    fault_and_back(node)
    fault_and_back(node)
    node.until(node.now_ns + spread_ns)
    fault_and_back(node)
    assert (Reason.FLAPPING in reasons(node)) is flaps


def test_the_window_moves_with_the_faults() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    for _ in range(5):
        fault_and_back(node)
        node.after(300 * S)
    assert node.unhealthy() == set()
    fault_and_back(node)
    node.after(S)
    fault_and_back(node)
    assert reasons(node) == {Reason.FLAPPING}


def test_flapping_is_sticky() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    for _ in range(3):
        fault_and_back(node)
    for _ in range(10):
        node.after(HOUR, *poll())
    node.apply(
        DriverUnavailable(Reason.DRIVER_NOT_LOADED, "x", unloaded=True), ready(), enumerated(), *poll()
    )
    node.apply(enumerated(gpu(0)), *poll())
    assert reasons(node) == {Reason.FLAPPING}
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), *poll())
    again.after(HOUR, *poll())
    assert again.unhealthy() == {U0}


def test_more_faults_of_a_gpu_that_flaps_are_counted_and_reported_once() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    for _ in range(5):
        fault_and_back(node)
    (condition,) = node.conditions()
    assert condition.count == 3
    assert len(node.state.fault_times[U0]) == 3
    raised = [fields_of(event).get("reason") for event in node.events(EventKind.CONDITION) if event.warning]
    assert raised.count(Reason.FLAPPING) == 1


def test_conditions_that_overlap_are_one_fault() -> None:
    """One application that dies may leave three XIDs within a millisecond."""
    node = healthy_node(gpu(0), policy=AT_ONCE)
    node.apply(xid(32), xid(69), xid(94), failed(), failed(code=1), xid(94), passed())
    assert node.unhealthy() == set()
    assert len(node.state.fault_times[U0]) == 1


def test_a_fault_that_is_reported_again_while_it_lasts_is_one_fault() -> None:
    node = healthy_node(gpu(0))
    for _ in range(10):
        node.after(S, failed(), passed())
    assert reasons(node) == {Reason.NVML_ERROR}


def test_faults_of_two_gpus_do_not_add_up() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=AT_ONCE)
    for _ in range(2):
        fault_and_back(node, on=U0)
        fault_and_back(node, on=U1)
    assert node.unhealthy() == set()


def test_faults_of_different_kinds_add_up() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    fault_and_back(node, failed(code=1))
    fault_and_back(node, failed())
    fault_and_back(node, overdue())
    assert reasons(node) == {Reason.FLAPPING}


@pytest.mark.parametrize("code", [79, 48, 54, 64])
def test_what_a_gpu_does_not_come_back_from_by_itself_is_not_flapping(code: int) -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    for _ in range(5):
        fault_and_back(node, xid(code))
    assert Reason.FLAPPING not in reasons(node)


@pytest.mark.parametrize("code", [13, 69, 137])
def test_an_application_that_faults_a_thousand_times_takes_no_gpu_from_the_next(code: int) -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    for _ in range(1_000):
        node.after(S // 10, xid(code), passed())
    assert node.unhealthy() == set()
    assert node.conditions() == []


def test_what_flips_nothing_is_not_flapping() -> None:
    node = healthy_node(gpu(0), policy=replace(AT_ONCE, xid_policy="catalog"))
    for _ in range(5):
        node.apply(xid(94), read(pcie_width=8, rows_pending=True, links_down=(1,), ecc_uncorrected=1))
        node.apply(*poll())
    assert node.conditions() == []
    assert node.state.fault_times == {}


ONES_FAULTS: dict[str, tuple[list[Fact], list[Fact]]] = {
    "driver away": (
        [DriverUnavailable(Reason.DRIVER_NOT_LOADED, "x")],
        [ready(), enumerated(gpu(0), gpu(1), gpu(2))],
    ),
    "other versions": ([DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "x")], [ready()]),
    "driver hangs": ([DriverCallOverdue("init", S)], [DriverCallAnswered("init")]),
    "driver hangs in calls": ([overdue(U0), overdue(U1), overdue(U2)], []),
    "driver hangs after one call": (
        [overdue(U0), DriverCallOverdue("wait", S)],
        [DriverCallAnswered("wait")],
    ),
    "release": ([ReleaseRequested(frozenset({U0, U1, U2}), HOUR)], [ResumeRequested()]),
    "no control node": ([DeviceNodesSeen(("/dev/nvidiactl",))], [DeviceNodesSeen(())]),
    "fabric": ([read(number, fabric_state=2) for number in (U0, U1, U2)], []),
}


@pytest.mark.parametrize("trouble", ONES_FAULTS)
def test_trouble_of_the_whole_node_is_no_gpus_flapping(trouble: str) -> None:
    node = healthy_node(gpu(0), gpu(1), gpu(2), policy=AT_ONCE)
    begin, end = ONES_FAULTS[trouble]
    for _ in range(5):
        node.apply(*begin)
        assert len(node.unhealthy()) == 3
        node.after(S, *end)
        for on in (U0, U1, U2, U0, U1):
            node.apply(*poll(on))
        assert node.unhealthy() == set()


def test_one_call_that_hangs_is_still_that_gpus_fault_while_others_answer() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=AT_ONCE)
    for _ in range(3):
        fault_and_back(node, overdue(U0))
    assert reasons(node) == {Reason.FLAPPING}


def test_a_hang_that_begins_with_one_gpu_is_not_its_fault() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=AT_ONCE)
    for _ in range(5):
        node.after(S, overdue(U0))
        node.after(S, overdue(U1))
        node.after(S, passed(U0), passed(U1), passed(U0))
        assert node.unhealthy() == set()


def test_what_ailed_a_gpu_before_its_call_hung_stays_its_own_fault() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=AT_ONCE)
    node.after(S, failed())
    node.after(S, overdue(U0))
    node.after(S, overdue(U1))
    node.after(S, passed(U0), passed(U1), passed(U0))
    fault_and_back(node)
    node.after(S)
    fault_and_back(node)
    assert reasons(node) == {Reason.FLAPPING}


def test_a_hang_of_the_driver_forgets_no_earlier_fault_of_a_gpu() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=AT_ONCE)
    fault_and_back(node)
    node.after(S)
    fault_and_back(node)
    node.after(S, overdue(U1), overdue(U0), passed(U0), passed(U1), passed(U0))
    assert node.unhealthy() == set()
    node.after(S, failed())
    assert Reason.FLAPPING in reasons(node)


# Evidence


def evidence(node: Node) -> list[tuple[GpuUuid, Reason, int]]:
    return [
        (effect.gpu, effect.condition.reason, effect.condition.key.code)
        for _, effect in node.effects
        if isinstance(effect, KeepEvidence)
    ]


def test_evidence_is_kept_once_at_the_first_hard_fault_of_each_gpu() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), xid(48), failed(code=15), enumerated(gpu(1)), xid(62, U1), xid(48, U1))
    assert evidence(node) == [(U0, Reason.XID, 79), (U1, Reason.XID, 62)]


def test_evidence_of_what_an_application_did_is_not_kept() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), xid(13), read(ecc_uncorrected=3, rows_pending=True))
    assert evidence(node) == []
    node.apply(xid(79))
    assert evidence(node) == [(U0, Reason.XID, 79)]


def test_a_gpu_that_was_healthy_meanwhile_gives_evidence_again() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    node.apply(failed(), failed(code=1), passed(), failed())
    assert evidence(node) == [(U0, Reason.NVML_ERROR, 999), (U0, Reason.NVML_ERROR, 999)]


def test_two_first_faults_in_one_step_are_one_piece_of_evidence() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(recovery_action=1, rows_failed=True))
    assert evidence(node) == [(U0, Reason.RECOVERY_ACTION, 0)]


def test_the_fault_an_earlier_process_saw_first_gives_no_evidence_again() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), xid(48))
    assert evidence(again) == []


def test_the_nodes_own_trouble_gives_no_evidence_against_a_gpu() -> None:
    node = healthy_node(gpu(0), gpu(1), gpu(2))
    for begin, _ in ONES_FAULTS.values():
        if not any(fact == overdue(U0) for fact in begin):
            node.apply(*begin)
    assert evidence(node) == []
    assert not any(REASON_SPECS[item.reason].counts_for_flapping for item in node.conditions())


# The breaker


SOFT = replace(AT_ONCE, soft_flips=frozenset({Reason.THERMAL, Reason.NVLINK_DOWN}))


def no_allocations() -> AllocationsListed:
    return AllocationsListed({})


def hot(on: GpuUuid = U0) -> Fact:
    return read(on, temperature_celsius=95)


def soft_node(policy: Policy = SOFT) -> Node:
    node = healthy_node(gpu(0), gpu(1), gpu(2), policy=policy)
    node.apply(no_allocations())
    node.forget_effects()
    return node


def test_soft_evidence_flips_nothing_unless_the_operator_named_it() -> None:
    node = soft_node(AT_ONCE)
    node.apply(hot(), read(U1, links_down=(3,)))
    assert len(node.conditions()) == 2
    assert node.unhealthy() == set()
    assert soft_candidates(node.state) == frozenset()


@pytest.mark.parametrize("facts", [[hot()], [read(links_down=(3,))]], ids=["thermal", "links"])
def test_soft_evidence_that_the_operator_named_flips_a_free_gpu(facts: list[Fact]) -> None:
    node = soft_node()
    node.apply(*facts)
    assert node.unhealthy() == {U0}
    (event,) = node.events(EventKind.DEVICE)
    assert fields_of(event)["evidence"] == Evidence.SOFT


def test_only_the_reasons_that_were_named_flip() -> None:
    node = soft_node(replace(SOFT, soft_flips=frozenset({Reason.NVLINK_DOWN})))
    node.apply(hot())
    assert node.unhealthy() == set()
    node.apply(read(temperature_celsius=95, links_down=(1,)))
    assert {item.reason: item.flips for item in node.conditions()} == {
        Reason.THERMAL: False,
        Reason.NVLINK_DOWN: True,
    }


def test_hard_evidence_that_only_warns_does_not_flip_even_if_it_was_named() -> None:
    node = soft_node(replace(SOFT, soft_flips=frozenset({Reason.ECC_UNCORRECTED, Reason.PCIE_DEGRADED})))
    node.apply(read(ecc_uncorrected=3, pcie_width=4))
    assert node.unhealthy() == set()


def test_a_gpu_flipped_by_soft_evidence_comes_back_by_the_rule() -> None:
    node = soft_node(replace(SOFT, recovery_clean_probes=3, recovery_quiet_ns=Q))
    node.apply(hot(), passed(), passed(), passed())
    node.after(HOUR, *poll(), *poll())
    node.after(Q)
    assert node.unhealthy() == {U0}
    node.apply(*poll())
    assert node.unhealthy() == set()


def test_at_most_one_gpu_flips_within_the_hour_and_the_next_one_at_its_end() -> None:
    node = soft_node()
    began_ns = node.now_ns
    node.apply(hot(U0))
    node.after(S, *poll(U0), hot(U1))
    assert node.unhealthy() == set()
    while node.now_ns < began_ns + HOUR - 10 * S:
        node.after(10 * S, no_allocations())
    node.until(began_ns + HOUR - 1)
    node.apply(Tick())
    assert node.unhealthy() == set()
    node.until(began_ns + HOUR + 1)
    assert node.unhealthy() == {U1}
    assert [at_ns for at_ns, effect in node.effects if _flips(effect)][-1] == began_ns + HOUR


def _flips(effect: object) -> bool:
    event = getattr(effect, "event", None)
    return event is not None and event.kind is EventKind.DEVICE and event.warning


def test_of_a_gpu_that_is_unhealthy_by_soft_evidence_a_second_kind_waits_too() -> None:
    node = soft_node()
    node.apply(hot())
    node.after(S, read(temperature_celsius=95, links_down=(1,)))
    assert [item.flips for item in node.conditions()] == [True, False]


def test_two_kinds_on_one_gpu_at_once_are_one_flip() -> None:
    node = soft_node()
    node.apply(read(temperature_celsius=95, links_down=(1,)))
    assert [item.flips for item in node.conditions()] == [True, True]


def test_several_at_once_flip_none_and_are_reported_once() -> None:
    node = soft_node()
    node.apply(xid(79), xid(79, U1), xid(79, U2))
    node.state = replace(node.state, conditions={})
    node.apply(AllocationsListed({DeviceId(U0): "ns/job"}))
    node.forget_effects()
    node.apply(hot(U0), hot(U1), hot(U2))
    node.after(HOUR, no_allocations(), hot(U0), hot(U1))
    assert node.unhealthy() == set()
    reported = [event for event in node.events(EventKind.CONDITION) if "several" in event.message]
    assert [fields_of(event)["gpus"] for event in reported] == [[U0, U1], [U0, U1, U2]]
    assert all(event.warning for event in reported)


def test_when_only_one_is_left_it_flips() -> None:
    node = soft_node()
    node.apply(AllocationsListed({DeviceId(U0): "ns/job"}), hot(U0), hot(U1))
    assert node.unhealthy() == set()
    node.apply(no_allocations(), *poll(U0))
    assert node.unhealthy() == {U1}


def test_a_gpu_that_a_pod_holds_does_not_flip_until_it_is_free() -> None:
    node = soft_node()
    node.apply(AllocationsListed({DeviceId(U0): "ns/job"}), hot())
    assert node.unhealthy() == set()
    node.after(10 * S, AllocationsListed({DeviceId(U1): "ns/job"}))
    assert node.unhealthy() == {U0}


def test_a_gpu_of_which_a_pod_holds_one_share_or_slice_is_not_free() -> None:
    shared = healthy_node(gpu(0), policy=replace(SOFT, sharing=Sharing.of({GPU: 3})))
    shared.apply(AllocationsListed({DeviceId(f"{U0}::2"): "ns/job"}), hot())
    assert shared.unhealthy() == set()
    sliced = healthy_node(C1B, policy=replace(SOFT, mig_strategy="single"))
    sliced.apply(AllocationsListed({DeviceId(mig_uuid(2)): "ns/job"}), hot())
    assert sliced.unhealthy() == set()
    sliced.apply(no_allocations())
    assert len(sliced.unhealthy()) == 3


def test_while_the_pods_are_unknown_nothing_flips() -> None:
    node = healthy_node(gpu(0), policy=SOFT)
    node.apply(hot())
    assert node.unhealthy() == set()
    node.apply(no_allocations())
    assert node.unhealthy() == {U0}


@pytest.mark.parametrize(("age_ns", "known"), [(PODS_KNOWN_FOR_NS - 1, True), (PODS_KNOWN_FOR_NS, False)])
def test_an_old_list_of_allocations_is_no_knowledge(age_ns: int, *, known: bool) -> None:
    assert PODS_KNOWN_FOR_NS == 30 * S
    node = healthy_node(gpu(0), policy=SOFT)
    node.apply(no_allocations())
    node.until(node.now_ns + age_ns)
    node.apply(hot())
    assert (node.unhealthy() == {U0}) is known
    assert (node.snapshot().pods is not None) is known


def test_a_list_of_allocations_goes_stale_by_itself() -> None:
    node = healthy_node(gpu(0))
    node.after(3 * S, AllocationsListed({DeviceId(U0): "ns/job"}))
    listed_ns = node.now_ns
    assert node.snapshot().pods == {DeviceId(U0): "ns/job"}
    node.until(listed_ns + 30 * S + 1)
    assert node.snapshot().pods is None
    assert node.snapshot().at_ns == listed_ns + 30 * S


@pytest.mark.parametrize(
    "facts",
    [
        [hot(U1)],
        [hot(U1), AllocationsListed({DeviceId(U1): "ns/job"})],
        [hot(U1), hot(U2)],
    ],
    ids=["held back by nothing but old pods", "held by a pod", "several"],
)
def test_a_breaker_that_is_closed_again_does_not_keep_the_core_awake(facts: list[Fact]) -> None:
    node = soft_node()
    node.apply(hot(U0), *poll(U0))
    node.until(node.now_ns + HOUR)
    node.apply(*facts)
    for _ in range(3):
        node.apply(Tick())
        assert node.wake_at_ns == node.now_ns + IDLE_NS
        node.until(node.now_ns + S)


def test_while_the_breaker_holds_one_back_the_core_asks_to_be_woken_at_its_end() -> None:
    node = soft_node()
    began_ns = node.now_ns
    node.apply(hot(U0), *poll(U0))
    node.until(began_ns + HOUR - S)
    node.apply(no_allocations(), hot(U1))
    assert node.wake_at_ns == began_ns + HOUR
    node.apply(*poll(U1))
    assert node.wake_at_ns == node.now_ns + IDLE_NS


def test_over_a_restart_what_was_flipped_stays_and_the_breaker_counts_from_there() -> None:
    node = soft_node()
    node.apply(hot())
    again = node.restarted(after_ns=S)
    began_ns = again.now_ns
    again.apply(
        ready(),
        enumerated(gpu(0), gpu(1), gpu(2)),
        passed(U1),
        passed(U2),
        hot(U0),
        no_allocations(),
        hot(U1),
    )
    assert again.unhealthy() == {U0}
    again.until(began_ns + HOUR - S)
    again.apply(no_allocations())
    assert again.unhealthy() == {U0}
    again.after(S)
    assert again.unhealthy() == {U0, U1}


def test_a_restart_alone_trips_no_breaker() -> None:
    node = soft_node()
    node.apply(xid(94), xid(79, U1))
    again = node.restarted(after_ns=S)
    assert again.state.soft_flip_ns is None


# Policies that change


def changed(node: Node, **settings: object) -> PolicyChanged:
    return PolicyChanged(replace(node.state.policy, **settings))  # type: ignore[arg-type]


def test_soft_evidence_flips_when_the_operator_names_it_and_no_more_when_not() -> None:
    node = soft_node(AT_ONCE)
    node.apply(hot())
    node.apply(changed(node, soft_flips=frozenset({Reason.THERMAL})))
    assert node.unhealthy() == {U0}
    node.apply(changed(node, soft_flips=frozenset({Reason.NVLINK_DOWN})))
    assert node.unhealthy() == set()
    assert [(item.reason, item.flips) for item in node.conditions()] == [(Reason.THERMAL, False)]


def test_no_policy_takes_away_what_hard_evidence_flipped() -> None:
    node = soft_node()
    node.apply(xid(79), xid(94, U1), read(U2, fabric_state=1))
    every = frozenset(Reason)
    node.apply(changed(node, soft_flips=every), changed(node, soft_flips=frozenset()))
    assert node.unhealthy() == {U0, U1, U2}


def test_an_xid_policy_holds_for_what_comes_and_not_for_what_was() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=AT_ONCE)
    node.apply(xid(94), PolicyChanged(replace(AT_ONCE, xid_policy="catalog")), xid(94, U1))
    assert node.unhealthy() == {U0}
    node.apply(passed())
    assert node.unhealthy() == set()
    node.apply(xid(94), xid(109, U1))
    assert node.unhealthy() == {U1}


def test_an_override_holds_from_then_on() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    node.apply(changed(node, xid_overrides={79: "ignore", 13: "flip"}), xid(79))
    assert node.unhealthy() == set()
    node.apply(xid(13))
    assert node.unhealthy() == {U0}


def test_another_number_of_faults_holds_from_the_next_fault_on() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    fault_and_back(node)
    node.apply(changed(node, sticky_after=2))
    assert node.unhealthy() == set()
    fault_and_back(node)
    assert reasons(node) == {Reason.FLAPPING}


def test_a_shorter_window_forgets_what_is_too_old_for_it() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    fault_and_back(node)
    fault_and_back(node)
    node.after(60 * S, changed(node, sticky_window_ns=60 * S))
    fault_and_back(node)
    assert node.unhealthy() == set()


def test_the_same_policy_again_changes_nothing() -> None:
    node = soft_node()
    node.apply(hot())
    before = node.state
    assert node.apply(PolicyChanged(replace(SOFT))) == ()
    assert node.state is before


# Observing


OBSERVE = replace(AT_ONCE, observe=True)


def registrations_asked(node: Node) -> int:
    return sum(isinstance(effect, RegisterResource) for _, effect in node.effects)


def test_an_observing_agent_registers_nothing_and_decides_everything() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=OBSERVE)
    node.apply(KubeletSocketSeen(K1), xid(79))
    assert node.unhealthy() == {U0}
    assert registrations_asked(node) == 0
    (resource,) = node.snapshot().resources
    assert (resource.phase, resource.message, resource.allocatable) == (
        RegistrationPhase.WAITING,
        "Observing only",
        1,
    )
    assert [event.message for event in node.events(EventKind.DEVICE)] == ["Health would have changed"]


def test_each_device_that_would_have_become_unhealthy_is_counted() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=replace(OBSERVE, sharing=Sharing.of({GPU: 3})))
    assert node.snapshot().observed_flips == 0
    node.apply(xid(94), xid(69))
    assert node.snapshot().observed_flips == 3
    node.apply(passed(), xid(79, U1))
    assert node.snapshot().observed_flips == 6
    node.apply(xid(94))
    assert node.snapshot().observed_flips == 9


def test_an_acting_agent_counts_nothing() -> None:
    node = healthy_node(gpu(0), policy=AT_ONCE)
    node.apply(xid(94))
    assert node.snapshot().observed_flips == 0


def test_an_agent_that_stops_observing_registers() -> None:
    node = healthy_node(gpu(0), policy=OBSERVE)
    node.apply(KubeletSocketSeen(K1), xid(94), PolicyChanged(AT_ONCE))
    assert registrations_asked(node) == 1
    assert node.snapshot().observed_flips == 1


@pytest.mark.parametrize("backing_off", [True, False])
def test_an_agent_that_begins_to_observe_tries_no_registration_any_more_and_sleeps(
    *, backing_off: bool
) -> None:
    node = registered_node(gpu(0), policy=AT_ONCE)
    node.end_stream()
    if not backing_off:
        node.after(S)
    asked = registrations_asked(node)
    node.apply(PolicyChanged(OBSERVE))
    for _ in range(20):
        node.until(node.now_ns + S)
        node.apply(Tick())
        assert node.wake_at_ns == node.now_ns + IDLE_NS
    assert registrations_asked(node) == asked


def test_observing_takes_no_part_in_what_is_known() -> None:
    acting, observing = healthy_node(gpu(0), policy=AT_ONCE), healthy_node(gpu(0), policy=OBSERVE)
    for node in (acting, observing):
        node.apply(xid(94), passed(), xid(94), passed(), xid(94))
    plain: State = replace(observing.state, policy=AT_ONCE, observed_flips=0, registrations={})
    assert plain == replace(acting.state, registrations={})
