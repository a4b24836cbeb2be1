"""Real reports as cases (C2, G1, O1), and for every reason: what brings a GPU back, also over a restart."""

import pytest

from agent.core.allocation.injection import ContainerAnswer
from agent.core.allocation.preference import prefer
from agent.core.allocation.requests import allocate
from agent.core.reasons import REASON_SPECS, advice_of
from agent.model.effects import EventKind
from agent.model.facts import (
    DeviceNodesSeen,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverModuleSeen,
    DriverReleased,
    DriverUnavailable,
    Fact,
    GpuRebound,
    GpuSampled,
    HealthEventsUnsupported,
    HoldRequested,
    RecoverRequested,
    ReleaseRequested,
    ResumeRequested,
    Tick,
    UnholdRequested,
    UvmProbed,
)
from agent.model.health import Health, Reason, Recovery
from agent.model.policy import Policy
from agent.model.snapshot import Durable
from agent.model.structs import replace
from tests.core.build import (
    U0,
    U1,
    U3,
    UNLOADED,
    Node,
    S,
    enumerated,
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
from tests.core.polls import NOTHING, bad, blind_poll, poll, read, reasons

Q = 60 * S

C2 = Policy(recovery_clean_probes=3, recovery_quiet_ns=0, sticky_after=3, sticky_window_ns=60 * S)
"""The settings of case C2; a poll is a second."""


def rebooted(node: Node) -> Node:
    """What the state file gives back after a reboot, and a machine that has the same GPUs."""
    kept = node.snapshot().durable
    by_hand = (each for each in kept.conditions if each.recovery is Recovery.BY_HAND)
    durable = Durable(
        conditions=tuple(replace(each, since_ns=0, last_ns=0, lasts=False) for each in by_hand),
        holds=kept.holds,
    )
    again = Node(node.state.policy, durable, at_ns=5 * S)
    again.apply(ready(), enumerated(*node.state.gpus.values()))
    return again


# C2: a GPU that was marked Unhealthy recovers


def test_c2_a_with_a_recovery_action_a_gpu_is_back_three_clean_probes_after_it_reads_none() -> None:
    node = healthy_node(gpu(0), policy=C2)
    began_ns = node.now_ns
    node.apply(xid(119), read(recovery_action=1))
    assert node.unhealthy() == {U0}
    for _ in range(19):
        node.after(S, *poll(recovery_action=1))
        assert node.unhealthy() == {U0}
    for _ in range(2):
        node.after(S, *poll())
        assert node.unhealthy() == {U0}
    node.after(S, *poll())
    assert node.unhealthy() == set()
    assert node.conditions() == []
    assert node.now_ns == began_ns + 22 * S


def test_c2_a_the_poll_before_the_reset_counts_for_nothing() -> None:
    node = healthy_node(gpu(0), policy=C2)
    node.apply(xid(119))
    node.after(S, *poll(), *poll(), *poll())
    assert node.unhealthy() == {U0}
    node.after(S, *poll(recovery_action=1), *poll(), *poll())
    assert node.unhealthy() == {U0}
    node.apply(*poll())
    assert node.unhealthy() == set()


@pytest.mark.parametrize("evidence", ["bound anew", "reboot", "recover"])
def test_c2_a2_without_a_recovery_action_it_takes_other_evidence_or_a_person(evidence: str) -> None:
    node = healthy_node(gpu(0), policy=C2)
    node.apply(xid(119))
    for _ in range(100):
        node.after(60 * S, *blind_poll())
    assert node.unhealthy() == {U0}
    match evidence:
        case "bound anew":
            node.apply(GpuRebound(gpu(0).pci, bound=True), *blind_poll(), *blind_poll())
            assert node.unhealthy() == {U0}
            node.apply(*blind_poll())
        case "reboot":
            node = rebooted(node)
            node.apply(*blind_poll())
        case _:
            node.apply(RecoverRequested(U0))
    assert node.unhealthy() == set()


def lost_node() -> Node:
    """Case C2 b: XID 79, then every call returns GPU_IS_LOST."""
    node = healthy_node(gpu(0), policy=C2)
    node.apply(xid(79))
    for _ in range(60):
        node.after(S, failed(code=15))
    return node


def test_c2_b_a_gpu_whose_calls_all_fail_as_lost_stays_unhealthy() -> None:
    node = lost_node()
    assert node.health() == {U0: Health.UNHEALTHY}
    assert {(item.reason, item.key.code, item.count) for item in node.conditions()} == {
        (Reason.XID, 79, 1),
        (Reason.GPU_LOST, 15, 60),
    }


def test_c2_b_when_the_handle_answers_again_a_reset_is_still_needed() -> None:
    node = lost_node()
    for _ in range(60):
        node.after(S, *blind_poll())
    assert node.unhealthy() == {U0}
    node.apply(GpuRebound(gpu(0).pci, bound=True), *blind_poll(), *blind_poll(), *blind_poll())
    assert node.unhealthy() == set()


def test_c2_c_three_faults_within_the_minute_are_sticky_although_probes_are_clean() -> None:
    node = healthy_node(gpu(0), policy=C2)
    for _ in range(3):
        node.after(S, failed())
        for _ in range(10):
            node.after(S, *poll())
    assert node.unhealthy() == {U0}
    assert reasons(node) == {Reason.FLAPPING}
    for _ in range(100):
        node.after(60 * S, passed())
    assert node.unhealthy() == {U0}
    assert rebooted(node).conditions() == []


def test_c2_d_after_a_restart_the_gpu_is_unhealthy_from_the_first_moment() -> None:
    again = lost_node().restarted(after_ns=S)
    assert again.health() == {U0: Health.UNHEALTHY}
    again.apply(Tick(), ready(), enumerated(gpu(0)))
    assert again.health() == {U0: Health.UNHEALTHY}
    for _ in range(60):
        again.after(S, *poll())
    assert again.health() == {U0: Health.UNHEALTHY}


def test_c2_e_a_gpu_without_xid_events_is_probed_all_the_same_and_reported_once() -> None:
    node = registered_node(gpu(0), policy=C2)
    node.apply(HealthEventsUnsupported(U0, "Not Supported"))
    (event,) = node.events()
    assert event.warning
    assert fields_of(event)["uuid"] == U0
    assert node.unhealthy() == set()
    node.apply(failed())
    assert node.unhealthy() == {U0}
    node.apply(*poll(), *poll(), *poll())
    assert node.unhealthy() == set()


# G1: a GPU falls off the bus


@pytest.mark.parametrize("variant", ["a", "b"])
def test_g1_one_lost_gpu_is_one_gpu_lost(variant: str) -> None:
    eight = [gpu(number) for number in range(8)]
    node = registered_node(*eight, policy=C2)
    node.until(node.now_ns + 5 * S)
    if variant == "a":
        node.apply(xid(79, U3), failed(U3, 15))
    else:
        node.apply(
            enumerated(
                *(replace(each, index=each.index - (each.index > 3)) for each in eight if each.uuid != U3)
            )
        )
    assert node.unhealthy() == {U3}
    (resource,) = node.snapshot().resources
    assert (resource.capacity, resource.allocatable) == (8, 7)
    view = next(view for view in node.snapshot().gpus if view.gpu.uuid == U3)
    lost = next(item for item in view.conditions if item.reason is Reason.GPU_LOST)
    assert (view.gpu.pci, view.xids) == ("0000:13:00.0", {79: 1} if variant == "a" else {})
    assert advice_of(lost) == "reset the GPU or reboot the node"
    reported = [fields_of(event) for event in node.events(EventKind.CONDITION)]
    assert ("gpu_lost", "0000:13:00.0") in {(fields["reason"], fields["pci"]) for fields in reported}


def test_g1_the_seven_others_are_allocated_as_before() -> None:
    node = registered_node(*[gpu(number) for number in range(8)], policy=C2)
    node.apply(xid(79, U3), failed(U3, 15))
    (resource,) = node.snapshot().resources
    others = [str(device.id) for device in resource.devices if device.placement.gpu != U3]
    for size in (1, 2, 7):
        chosen = prefer(node.snapshot(), resource, others, (), size)
        assert isinstance(chosen, tuple)
        assert len(chosen) == size
        assert isinstance(allocate(node.snapshot(), resource, chosen), ContainerAnswer)


# O1: the driver is updated under the agent


def test_o1_a_other_versions_at_the_start_are_named_and_nothing_is_advertised() -> None:
    node = Node(C2)
    mismatch = DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "Driver/library version mismatch")
    node.apply(mismatch)
    for _ in range(120):
        node.after(S, mismatch)
    assert node.snapshot().findings[0].reason is Reason.NVML_VERSION_MISMATCH
    assert not node.snapshot().ready
    assert node.devices() == ()
    assert len(node.events()) == 1


def dying_driver() -> tuple[Node, list[DriverUnavailable]]:
    """Case O1 b: from t=10 every call returns 999, on all eight GPUs, and so does each new init."""
    eight = [gpu(number) for number in range(8)]
    node = registered_node(*eight, policy=C2)
    node.until(node.now_ns + 10 * S)
    gone = DriverUnavailable(Reason.DRIVER_NOT_LOADED, "nvmlInit_v2: Unknown Error")
    node.apply(*(failed(each.uuid, 999) for each in eight), gone)
    return node, [gone]


def test_o1_b_no_gpu_is_healthy_until_the_driver_is_back() -> None:
    node, gone = dying_driver()
    assert len(node.unhealthy()) == 8
    for number in range(30):
        late = [passed(gpu(number % 8).uuid)]
        node.after(S, *gone, *late)
        assert len(node.unhealthy()) == 8
    warnings = [event for event in node.events(EventKind.DRIVER) if event.warning]
    assert len(warnings) == 1


def test_o1_c_all_gpus_are_back_after_three_clean_probes_and_xids_count_again() -> None:
    node, gone = dying_driver()
    eight = [gpu(number) for number in range(8)]
    node.after(30 * S, *gone)
    node.apply(ready(), enumerated(*eight))
    for _ in range(2):
        node.after(S, *(fact for each in eight for fact in poll(each.uuid)))
        assert len(node.unhealthy()) == 8
    node.after(S, *(fact for each in eight for fact in poll(each.uuid)))
    assert node.unhealthy() == set()
    assert node.snapshot().ready
    node.after(5 * S, xid(79, U3))
    assert node.unhealthy() == {U3}


# Every reason that takes a GPU out: what begins it, what ends its cause


CAUSES: dict[Reason, tuple[list[Fact], list[Fact]]] = {
    Reason.XID: ([xid(48)], [GpuRebound(gpu(0).pci, bound=True)]),
    Reason.GPU_LOST: ([enumerated(gpu(1))], [enumerated(gpu(0), gpu(1))]),
    Reason.RESET_REQUIRED: ([failed(code=16)], [GpuRebound(gpu(0).pci, bound=True)]),
    Reason.RECOVERY_ACTION: ([read(recovery_action=1)], []),
    Reason.FABRIC_NOT_READY: ([read(fabric_state=2)], []),
    Reason.FABRIC_FAILED: ([read(fabric_status=999)], []),
    Reason.NVML_ERROR: ([failed()], []),
    Reason.NVML_TIMEOUT: ([overdue()], []),
    Reason.DRIVER_HUNG: ([DriverCallOverdue("wait", S)], [DriverCallAnswered("wait")]),
    Reason.DRIVER_NOT_LOADED: ([UNLOADED], [ready()]),
    Reason.NVML_VERSION_MISMATCH: ([DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "x")], [ready()]),
    Reason.UVM_FAILED: ([UvmProbed("Input/output error")], [UvmProbed(None)]),
    Reason.DEVICE_NODE_MISSING: ([DeviceNodesSeen(("/dev/nvidia0",))], [DeviceNodesSeen(())]),
    Reason.MAINTENANCE: (
        [ReleaseRequested(frozenset({U0}), 3600 * S), DriverReleased()],
        [ResumeRequested(), ready()],
    ),
}
"""Those that end by themselves or by a reset."""

OF_THE_POLICY = {
    Reason.MIG_SINGLE_NOT_UNIFORM,
    Reason.MPS_REPLICAS_OVER_LIMIT,
    Reason.MPS_NOT_READY,
    Reason.IMEX_CHANNEL_MISSING,
    Reason.CDI_UNRESOLVABLE,
}
"""Those that come of what is asked for: findings, the daemon that only MPS needs (test_mps), a
channel (test_imex), a name for CDI (test_cdi)."""

BY_HAND: dict[Reason, list[Fact]] = {
    Reason.ROW_REMAP_FAILED: [read(rows_failed=True)],
    Reason.HELD: [HoldRequested(U0, "x")],
}


def test_every_reason_that_makes_a_gpu_unhealthy_is_here() -> None:
    flipping = {reason for reason, spec in REASON_SPECS.items() if spec.flips}
    assert flipping - OF_THE_POLICY == {*CAUSES, *BY_HAND, Reason.FLAPPING}


def comes_back_by_rule(node: Node) -> None:
    """Three clean polls and 60 s since the first of them, both to the last unit."""
    first_ns = node.now_ns
    node.apply(*poll(), *poll())
    node.until(first_ns + 2 * Q)
    node.apply(Tick())
    assert U0 in node.unhealthy()
    node.apply(*poll())
    assert U0 not in node.unhealthy()


@pytest.mark.parametrize("reason", CAUSES)
def test_a_gpu_whose_cause_ended_comes_back_and_not_one_probe_sooner(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    begin, end = CAUSES[reason]
    node.apply(*begin)
    assert reason in reasons(node)
    assert U0 in node.unhealthy()
    node.after(3600 * S, *end)
    comes_back_by_rule(node)


@pytest.mark.parametrize("reason", CAUSES)
def test_quiet_time_counts_from_the_first_clean_poll_after_the_end_of_the_cause(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    begin, end = CAUSES[reason]
    node.apply(*begin)
    node.after(3600 * S, *end, *poll(), *poll(), *poll())
    first_ns = node.now_ns
    node.until(first_ns + Q - 1)
    node.apply(Tick())
    assert U0 in node.unhealthy()
    node.after(1)
    assert U0 not in node.unhealthy()


LASTING = [
    reason for reason in CAUSES if reason not in {Reason.XID, Reason.RESET_REQUIRED, Reason.NVML_ERROR}
]


@pytest.mark.parametrize("reason", [each for each in LASTING if each is not Reason.NVML_TIMEOUT])
def test_while_the_cause_is_seen_no_probe_counts(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1), policy=Policy(recovery_clean_probes=1, recovery_quiet_ns=0))
    begin, _ = CAUSES[reason]
    node.apply(*begin)
    for _ in range(10):
        node.after(Q, *blind_poll())
    assert U0 in node.unhealthy()


@pytest.mark.parametrize("reason", CAUSES)
@pytest.mark.parametrize("ended", ["before", "while away", "after"])
def test_over_a_restart_no_cause_is_forgotten_and_none_lasts_for_ever(reason: Reason, ended: str) -> None:
    """Whether the cause ended before the process did, while there was none, or under the next one."""
    node = healthy_node(gpu(0), gpu(1))
    node.apply(DriverModuleSeen(70))
    begin, end = CAUSES[reason]
    # A GPU bound anew while no agent runs is no evidence; a module loaded anew is.
    module = 71 if ended == "while away" else 70
    node.apply(*begin)
    if ended == "before":
        node.apply(*end)
    again = node.restarted(after_ns=S)
    assert again.health()[U0] is Health.UNHEALTHY
    again.apply(Tick(), ready(), enumerated(gpu(0), gpu(1)), DriverModuleSeen(module))
    if ended == "after" and reason in LASTING:
        again.apply(*begin)
        again.after(Q, *end)
    elif ended == "after":
        again.apply(*end)
    if ended == "while away":
        again.apply(ResumeRequested(), DeviceNodesSeen(()), UvmProbed(None))
    comes_back_by_rule(again)
    assert reasons(again) == set()


@pytest.mark.parametrize("reason", [*CAUSES, *BY_HAND, Reason.FLAPPING])
def test_after_a_restart_a_gpu_is_unhealthy_until_its_rule_is_met(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    if reason is Reason.FLAPPING:
        node = healthy_node(gpu(0), gpu(1), policy=Policy(recovery_clean_probes=1, recovery_quiet_ns=0))
        for _ in range(3):
            node.apply(failed(), passed())
    else:
        node.apply(*(BY_HAND.get(reason) or CAUSES[reason][0]))
    again = node.restarted(after_ns=3600 * S)
    assert again.health() == {
        U0: Health.UNHEALTHY,
        U1: Health.UNKNOWN
        if all(item.placement.gpu == U0 for item in node.conditions())
        else Health.UNHEALTHY,
    }
    again.apply(Tick())
    assert again.health()[U0] is Health.UNHEALTHY


@pytest.mark.parametrize("reason", [*CAUSES, *BY_HAND])
def test_after_a_reboot_only_what_a_person_ends_is_left(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(*(BY_HAND.get(reason) or CAUSES[reason][0]))
    again = rebooted(node)
    again.apply(passed(U0), passed(U1))
    assert again.unhealthy() == ({U0} if reason in BY_HAND else set())
    again.apply(RecoverRequested(U0), UnholdRequested(U0))
    assert again.unhealthy() == set()


@pytest.mark.parametrize("reason", [Reason.RECOVERY_ACTION, Reason.FABRIC_NOT_READY, Reason.FABRIC_FAILED])
def test_a_reading_that_is_no_longer_supported_is_ended_by_a_reset_or_an_operator(reason: Reason) -> None:
    """An agent without the rights, or a driver of another version, came in between."""
    for last in (GpuRebound(gpu(0).pci, bound=True), DriverModuleSeen(71)):
        node = healthy_node(gpu(0))
        node.apply(DriverModuleSeen(70), GpuSampled(U0, bad(reason)))
        again = node.restarted()
        again.apply(ready(), enumerated(gpu(0)), *blind_poll(), *blind_poll(), *blind_poll())
        again.after(Q)
        assert again.unhealthy() == {U0}
        by_hand = Node(again.state.policy, again.snapshot().durable, at_ns=again.now_ns)
        by_hand.apply(ready(), enumerated(gpu(0)), *blind_poll(), RecoverRequested(U0))
        assert by_hand.unhealthy() == set()
        again.apply(last, GpuSampled(U0, NOTHING), passed(), passed(), passed())
        again.after(Q)
        assert again.unhealthy() == set()


@pytest.mark.parametrize("broken", [overdue(), failed(code=1), UNLOADED])
def test_a_bad_poll_breaks_the_row_of_every_condition(broken: Fact) -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed(), broken, ready(), passed(), passed())
    node.after(2 * Q)
    assert {item.clean_probes for item in node.conditions(Reason.XID)} == {2}


# Links


@pytest.mark.parametrize("code", [74, 144, 150])
def test_a_link_error_needs_the_links_up_beside_the_reset(code: int) -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(code), read(links_down=(3,)), GpuRebound(gpu(0).pci, bound=True))
    for _ in range(10):
        node.after(Q, *poll(links_down=(3,)))
    assert node.unhealthy() == {U0}
    comes_back_by_rule(node)


def test_links_that_go_down_again_while_it_recovers_begin_its_recovery_anew() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(74), GpuRebound(gpu(0).pci, bound=True), *poll(), *poll(), *poll())
    node.after(Q - 1, *poll(links_down=(3,)))
    node.after(2 * Q, *poll(links_down=(3,)))
    assert node.unhealthy() == {U0}
    comes_back_by_rule(node)


def test_links_that_are_down_hold_back_no_other_fault() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(48), GpuRebound(gpu(0).pci, bound=True))
    node.apply(*poll(links_down=(3,)), *poll(links_down=(3,)), *poll(links_down=(3,)))
    node.after(Q)
    assert node.unhealthy() == set()
    assert reasons(node) == {Reason.NVLINK_DOWN}


def test_links_of_another_gpu_hold_nothing_back() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(74), read(U1, links_down=(3,)), GpuRebound(gpu(0).pci, bound=True))
    comes_back_by_rule(node)


def test_where_links_cannot_be_read_a_link_error_is_as_any_that_needs_a_reset() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(74), GpuRebound(gpu(0).pci, bound=True), *blind_poll(), *blind_poll(), *blind_poll())
    node.after(Q)
    assert node.unhealthy() == set()


# Several at once


def test_a_reset_that_the_driver_confirms_counts_for_every_fault_that_needs_one() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(119), xid(48), failed(code=16), read(recovery_action=4), xid(119, U1))
    node.apply(*poll(), *poll(), *poll(), passed(U1), passed(U1), passed(U1))
    node.after(Q)
    assert node.unhealthy() == {U1}


def test_a_recovery_action_that_was_none_all_along_is_no_reset() -> None:
    node = healthy_node(gpu(0))
    node.apply(*poll(), xid(119), *poll(), *poll(), *poll())
    node.after(2 * Q)
    assert node.unhealthy() == {U0}


def test_a_recovery_action_that_names_another_step_is_still_one() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(119), read(recovery_action=1))
    node.after(S, *poll(recovery_action=2), *poll(recovery_action=2), *poll(recovery_action=2))
    node.after(2 * Q)
    (action,) = node.conditions(Reason.RECOVERY_ACTION)
    assert (action.message, action.lasts) == ("The driver asks to reboot the node", True)
    assert node.unhealthy() == {U0}


def test_uncorrected_memory_errors_end_with_the_count_that_a_reset_sets_back() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(ecc_uncorrected=3))
    assert node.unhealthy() == set()
    node.apply(*poll(), *poll(), *poll())
    node.after(Q)
    assert reasons(node) == set()
