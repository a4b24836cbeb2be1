"""What takes a device out, and what brings it back: not one probe or nanosecond sooner."""

import pytest

from agent.core.health.state import initial_state
from agent.model.effects import EventKind
from agent.model.facts import (
    NVML,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverUnavailable,
    Fact,
    PolicyChanged,
    Tick,
)
from agent.model.gpu import Gpu
from agent.model.health import Condition, ConditionKey, Evidence, Health, Reason, Recovery
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.snapshot import Durable
from tests.core.build import (
    C1B,
    GPU,
    KMSG,
    MS,
    START_NS,
    U0,
    U1,
    Node,
    S,
    answered,
    enumerated,
    failed,
    fields_of,
    gpu,
    healthy_node,
    mig_gpu,
    mig_uuid,
    overdue,
    passed,
    place,
    ready,
    xid,
)

Q = 60 * S

UNLOADED = DriverUnavailable(Reason.DRIVER_NOT_LOADED, "The NVIDIA driver is not loaded", unloaded=True)
MISMATCH = DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "Driver/library version mismatch")


def recovers_by_rule(node: Node) -> None:
    """Three clean probes and 60 s since the first of them, both to the last unit."""
    node.apply(passed(), passed(), passed())
    first_clean_ns = node.now_ns
    node.until(first_clean_ns + Q - 1)
    node.apply(Tick())
    assert U0 in node.unhealthy()
    node.until(first_clean_ns + Q)
    node.apply(Tick())
    assert U0 not in node.unhealthy()


# Clean probes and quiet time


def test_a_device_is_unhealthy_at_once_and_the_others_are_not() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79))
    assert node.unhealthy() == {U0}


def test_quiet_time_counts_from_the_first_clean_probe_after_the_last_report() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94))
    node.after(10 * S)
    recovers_by_rule(node)


def test_quiet_time_alone_does_not_bring_a_device_back() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed())
    node.after(3600 * S)
    assert node.unhealthy() == {U0}
    node.apply(passed())
    assert node.unhealthy() == set()


def test_clean_probes_must_come_in_a_row() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed(), failed(), passed(), passed())
    node.after(Q)
    assert len(node.conditions()) == 2
    node.apply(passed())
    assert node.conditions() == []


def test_a_condition_reported_again_begins_anew() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed(), passed())
    node.after(Q - 1, xid(94, count=4))
    (condition,) = node.conditions()
    assert (condition.count, condition.clean_probes, condition.since_ns, condition.last_ns) == (
        5,
        0,
        START_NS,
        node.now_ns,
    )
    recovers_by_rule(node)


def test_clearing_one_condition_never_clears_another() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), xid(79), failed())
    node.apply(passed(), passed(), passed())
    node.after(Q)
    assert [(item.reason, item.key.code) for item in node.conditions()] == [(Reason.XID, 79)]
    assert node.unhealthy() == {U0}


def test_probes_of_another_gpu_bring_nothing_back() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(94), *[passed(U1)] * 10)
    node.after(3600 * S)
    assert node.unhealthy() == {U0}


def test_a_bad_probe_of_another_gpu_does_not_break_the_row() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(94), passed(), passed(), failed(U1), passed())
    node.after(Q)
    assert node.unhealthy() == {U1}


def test_a_healthy_gpu_that_passes_its_probes_changes_nothing() -> None:
    node = healthy_node(gpu(0))
    before = node.state
    assert node.after(10 * S, passed()) == ()
    assert node.state is before


def test_probes_beyond_those_that_are_needed_change_nothing() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed(), passed())
    before = node.state
    assert node.after(10 * S, passed()) == ()
    assert node.state is before


def test_without_quiet_time_the_last_clean_probe_brings_a_device_back() -> None:
    node = healthy_node(gpu(0), policy=Policy(recovery_clean_probes=3, recovery_quiet_ns=0))
    node.apply(xid(94), passed(), passed())
    assert node.unhealthy() == {U0}
    node.apply(passed())
    assert node.unhealthy() == set()


def test_a_policy_that_asks_for_less_brings_a_device_back_at_once() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed())
    node.apply(PolicyChanged(Policy(recovery_clean_probes=2, recovery_quiet_ns=0)))
    assert node.unhealthy() == set()


# Classes


@pytest.mark.parametrize("code", [79, 48, 74, 54, 151, 64, 200])
def test_clean_probes_and_time_alone_never_bring_a_broken_device_back(code: int) -> None:
    node = healthy_node(gpu(0), policy=Policy(recovery_clean_probes=1, recovery_quiet_ns=0))
    node.apply(xid(code))
    for _ in range(10):
        node.after(3600 * S, passed())
    assert node.unhealthy() == {U0}


@pytest.mark.parametrize("code", [54, 78, 151, 64])
def test_a_reset_does_not_bring_back_what_needs_a_reboot_or_a_person(code: int) -> None:
    node = healthy_node(gpu(0), policy=Policy(recovery_clean_probes=1, recovery_quiet_ns=0))
    node.apply(xid(code), enumerated(), enumerated(gpu(0)), UNLOADED, ready(), passed())
    node.after(3600 * S, passed())
    assert [(item.key.code, item.reset_seen) for item in node.conditions()] == [(code, False)]


def test_no_policy_brings_back_what_needs_a_person() -> None:
    node = healthy_node(gpu(0), policy=Policy(recovery_clean_probes=0, recovery_quiet_ns=0))
    node.apply(xid(64), xid(54), xid(79), passed())
    assert len(node.conditions()) == 3


@pytest.mark.parametrize("code", [48, 62, 74, 79, 95, 119, 142, 200])
@pytest.mark.parametrize("evidence", [[enumerated(gpu(1)), enumerated(gpu(0), gpu(1))], [UNLOADED, ready()]])
def test_after_a_reset_clean_probes_and_quiet_time_bring_a_device_back(
    code: int, evidence: list[Fact]
) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(code), passed(), passed(), passed())
    node.after(2 * Q, *evidence)
    assert U0 in node.unhealthy()
    node.after(S)
    recovers_by_rule(node)


def test_a_driver_that_was_not_unloaded_is_no_reset() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79), MISMATCH, ready(), passed(), passed(), passed())
    node.after(2 * Q)
    assert [item.key.code for item in node.conditions()] == [79]


def test_a_driver_seen_to_be_unloaded_was_reset_whatever_was_reported_meanwhile() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79), UNLOADED, MISMATCH, ready(), passed(), passed(), passed())
    node.after(Q)
    assert node.unhealthy() == set()


def test_a_driver_that_turns_out_to_be_unloaded_was_reset() -> None:
    node = healthy_node(gpu(0))
    first = DriverUnavailable(UNLOADED.reason, UNLOADED.message, unloaded=False)
    node.apply(xid(79), first, UNLOADED, ready(), passed(), passed(), passed())
    node.after(Q)
    assert node.unhealthy() == set()


def test_one_reset_counts_for_one_fault() -> None:
    node = healthy_node(gpu(0))
    node.apply(UNLOADED, ready(), passed(), passed(), passed())
    assert node.state.driver_unloaded is False
    node.after(Q)
    assert node.unhealthy() == set()
    node.apply(xid(79), MISMATCH, ready(), passed(), passed(), passed())
    node.after(2 * Q)
    assert node.unhealthy() == {U0}


def test_a_fault_after_the_reset_needs_another_one() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79), UNLOADED, ready(), passed(), passed(), xid(79), passed(), passed(), passed())
    node.after(2 * Q)
    assert node.unhealthy() == {U0}


# A GPU that is not listed


def test_a_gpu_that_is_not_listed_any_more_stays_in_the_list_as_lost() -> None:
    """Case G1, b: no event, and NVML's count becomes smaller."""
    eight = [gpu(number) for number in range(8)]
    node = healthy_node(*eight)
    node.after(5 * S, enumerated(*eight[:3], *eight[4:]))
    assert len(node.devices()) == 8
    assert node.unhealthy() == {gpu(3).uuid}
    (condition,) = node.conditions()
    assert (condition.reason, condition.key.code, condition.placement) == (
        Reason.GPU_LOST,
        0,
        place(gpu(3).uuid),
    )
    assert condition.message == "NVML does not list the GPU any more"


def test_a_gpu_that_stays_away_is_reported_once() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(enumerated(gpu(1)))
    before = node.state
    assert node.after(10 * S, enumerated(gpu(1))) == ()
    assert node.state is before


@pytest.mark.parametrize("others", [[], [gpu(1)]])
def test_a_gpu_that_is_listed_again_comes_back_by_the_rule_also_when_it_is_the_only_one(
    others: list[Gpu],
) -> None:
    node = healthy_node(gpu(0), *others)
    node.apply(xid(79))
    node.after(S, enumerated(*others))
    node.after(300 * S, enumerated(gpu(0), *others))
    assert all(item.reset_seen for item in node.conditions())
    node.after(S)
    recovers_by_rule(node)


def test_listing_a_gpu_that_is_back_once_more_does_not_begin_its_recovery_anew() -> None:
    node = healthy_node(gpu(0))
    node.apply(enumerated(), enumerated(gpu(0)), passed(), passed(), enumerated(gpu(0)), passed())
    node.after(Q)
    assert node.unhealthy() == set()


def test_a_gpu_that_goes_away_again_while_it_recovers_begins_anew() -> None:
    node = healthy_node(gpu(0))
    node.apply(enumerated(), enumerated(gpu(0)), passed(), passed(), passed())
    node.after(S, enumerated())
    (condition,) = node.conditions()
    assert (condition.count, condition.reset_seen, condition.clean_probes) == (2, False, 0)
    node.after(2 * Q, enumerated(gpu(0)))
    recovers_by_rule(node)


def test_a_gpu_that_was_not_listed_had_no_clean_probes_in_a_row() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(94), passed(), passed(), enumerated(gpu(1)))
    assert {item.clean_probes for item in node.conditions()} == {0}


def test_a_probe_that_was_under_way_when_the_gpu_went_is_no_sign_of_health() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(94), enumerated(gpu(1)))
    before = node.state
    assert node.apply(passed()) == ()
    assert node.state is before
    node.apply(overdue(), passed())
    assert node.state.overdue == {}


def test_a_driver_reload_does_not_bring_back_a_gpu_that_is_not_listed() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(enumerated(gpu(1)), UNLOADED, ready(), enumerated(gpu(1)))
    for _ in range(5):
        node.after(Q, passed(U1))
    assert node.unhealthy() == {U0}


def test_a_gpu_lost_in_an_earlier_process_and_listed_in_this_one_was_reset() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), enumerated(gpu(1)))
    again = node.restarted(after_ns=10 * S)
    again.apply(ready(), enumerated(gpu(0), gpu(1)), passed(U1))
    assert again.unhealthy() == {U0}
    recovers_by_rule(again)


def test_a_gpu_that_was_listed_all_the_time_was_not_reset_by_a_restart_of_the_agent() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), passed(), passed(), passed())
    again.after(2 * Q)
    assert again.unhealthy() == {U0}


# Calls that fail, and calls that hang


@pytest.mark.parametrize(
    ("code", "reason", "recovery"),
    [
        (15, Reason.GPU_LOST, Recovery.RESET),
        (16, Reason.RESET_REQUIRED, Recovery.RESET),
        (999, Reason.NVML_ERROR, Recovery.SELF_CLEARING),
        (1, Reason.NVML_ERROR, Recovery.SELF_CLEARING),
    ],
)
def test_a_return_code_has_its_reason_and_recovery(code: int, reason: Reason, recovery: Recovery) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(failed(code=code))
    assert node.unhealthy() == {U0}
    (condition,) = node.conditions()
    assert condition == Condition(
        key=ConditionKey(NVML, reason, place(U0), code),
        evidence=Evidence.HARD,
        recovery=recovery,
        flips=True,
        message=f"NVML error {code}",
        since_ns=node.now_ns,
        last_ns=node.now_ns,
    )


def test_a_gpu_whose_first_poll_fails_has_a_verdict() -> None:
    node = Node()
    node.apply(ready(), enumerated(gpu(0)), failed())
    assert node.health() == {U0: Health.UNHEALTHY}
    assert node.state.probed == {U0}


def test_a_call_that_hangs_makes_its_gpu_unhealthy_and_is_named() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(overdue())
    assert node.unhealthy() == {U0}
    (condition,) = node.conditions()
    assert condition.reason is Reason.NVML_TIMEOUT
    assert condition.message == "NVML call nvmlDeviceGetMemoryInfo did not answer within 5 s"
    assert not node.state.hung


def test_a_gpu_whose_first_call_hangs_has_a_verdict() -> None:
    node = Node()
    node.apply(ready(), enumerated(gpu(0)), overdue())
    assert node.health() == {U0: Health.UNHEALTHY}
    assert node.state.probed == {U0}


def test_the_quiet_time_of_a_hang_counts_from_its_end() -> None:
    node = healthy_node(gpu(0))
    node.apply(overdue())
    node.after(3600 * S)
    recovers_by_rule(node)


def test_a_probe_broken_by_a_hang_is_no_clean_one() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed(), overdue(), passed())
    node.after(2 * Q)
    assert {item.clean_probes for item in node.conditions()} == {1}


# The driver as a whole


def test_two_calls_that_hang_at_once_are_a_driver_that_hangs() -> None:
    node = healthy_node(gpu(0), gpu(1), gpu(2))
    node.apply(overdue(U0))
    assert node.unhealthy() == {U0}
    node.apply(overdue(U1))
    assert len(node.unhealthy()) == 3
    hung = node.conditions(Reason.DRIVER_HUNG)
    assert [item.placement for item in hung] == [place(gpu(number).uuid) for number in range(3)]
    assert {item.message for item in hung} == {"2 GPUs do not answer at once, so a new pod would hang too"}


def test_a_node_wide_call_that_hangs_is_a_driver_that_hangs() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(DriverCallOverdue("nvmlDeviceGetCount_v2", deadline_ns=5 * S))
    assert len(node.unhealthy()) == 2
    assert {item.message for item in node.conditions()} == {
        "The driver does not answer nvmlDeviceGetCount_v2"
    }


def test_probes_that_pass_while_the_driver_hangs_do_not_count_for_it() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(DriverCallOverdue("init", deadline_ns=5 * S))
    for _ in range(10):
        node.after(Q, passed())
    assert len(node.unhealthy()) == 2
    node.apply(DriverCallAnswered("init"))
    recovers_by_rule(node)


def test_the_driver_hangs_no_more_when_only_one_call_still_does() -> None:
    node = healthy_node(gpu(0), gpu(1), gpu(2))
    node.apply(overdue(U0), overdue(U1))
    node.after(S, passed(U0))
    assert not node.state.hung
    third = gpu(2).uuid
    node.apply(passed(third), passed(third), passed(third))
    node.after(Q)
    assert node.unhealthy() == {U0, U1}


def test_a_hang_ends_when_the_calls_come_back_and_each_gpus_next_probe_counts() -> None:
    node = healthy_node(gpu(0), gpu(1), gpu(2))
    node.apply(overdue(U0), overdue(U1), answered(U0), answered(U1))
    assert not node.state.hung
    assert {*node.health().values()} == {Health.UNHEALTHY}
    node.apply(*[passed(each.uuid) for _ in range(3) for each in (gpu(0), gpu(1), gpu(2))])
    node.after(Q)
    assert node.unhealthy() == set()


def test_a_call_that_comes_back_is_no_clean_probe() -> None:
    node = healthy_node(gpu(0))
    node.apply(overdue(U0), answered(U0), passed(), passed(), answered(U0))
    node.after(Q)
    assert node.unhealthy() == {U0}
    node.apply(passed())
    node.after(Q)
    assert node.unhealthy() == set()


def test_an_error_also_ends_a_hang() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(overdue(U0), overdue(U1), failed(U0))
    assert not node.state.hung
    assert node.state.overdue.keys() == {U1}


def test_a_gpu_found_while_the_driver_hangs_is_unhealthy_too() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(overdue(U0), overdue(U1), enumerated(gpu(0), gpu(1), gpu(2)), passed(gpu(2).uuid))
    assert node.health()[gpu(2).uuid] is Health.UNHEALTHY


def test_a_driver_that_hangs_again_while_it_recovers_begins_anew() -> None:
    node = healthy_node(gpu(0))
    node.apply(DriverCallOverdue("init", 5 * S), DriverCallAnswered("init"), passed(), passed(), passed())
    node.after(S, DriverCallOverdue("wait", 5 * S))
    node.after(3600 * S)
    (condition,) = node.conditions()
    assert (condition.count, condition.message) == (2, "The driver does not answer wait")
    node.apply(DriverCallAnswered("wait"))
    recovers_by_rule(node)


def test_a_driver_that_goes_away_hangs_no_more_but_recovers_by_the_rule() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(overdue(U0), overdue(U1))
    node.after(3600 * S, UNLOADED)
    assert not node.state.hung
    node.apply(ready())
    recovers_by_rule(node)


def test_a_node_wide_call_is_not_overdue_any_more_when_the_driver_went_away() -> None:
    node = healthy_node(gpu(0))
    node.apply(DriverCallOverdue("init", 5 * S), UNLOADED)
    assert not node.state.hung


@pytest.mark.parametrize("fact", [UNLOADED, MISMATCH])
def test_without_a_driver_every_gpu_is_unhealthy(fact: DriverUnavailable) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(fact)
    assert len(node.unhealthy()) == 2
    assert {(item.reason, item.message) for item in node.conditions()} == {(fact.reason, fact.message)}
    assert node.state.driver.ready is False


def test_the_quiet_time_of_a_driver_that_was_away_counts_from_its_return() -> None:
    node = healthy_node(gpu(0))
    node.apply(UNLOADED)
    for _ in range(100):
        node.after(S, UNLOADED)
    node.apply(ready())
    recovers_by_rule(node)


def test_a_driver_that_stays_away_is_reported_once() -> None:
    node = healthy_node(gpu(0))
    node.apply(UNLOADED)
    before = node.state
    assert node.after(S, UNLOADED) == ()
    assert node.state is before


def test_a_probe_that_was_under_way_when_the_driver_went_is_no_sign_of_health() -> None:
    node = healthy_node(gpu(0), policy=Policy(recovery_clean_probes=1, recovery_quiet_ns=0))
    node.apply(UNLOADED)
    before = node.state
    assert node.apply(passed()) == ()
    assert node.state is before
    node.apply(ready(), passed())
    assert node.unhealthy() == set()


def test_no_gpu_is_known_before_the_driver_is_there() -> None:
    """Case A4, the variant with a driver that comes late."""
    node = Node()
    node.apply(UNLOADED)
    assert node.devices() == ()
    assert node.snapshot().findings[0].reason is Reason.DRIVER_NOT_LOADED
    four = [gpu(number) for number in range(4)]
    node.after(20 * S, ready(), enumerated(*four), *(passed(item.uuid) for item in four))
    assert node.unhealthy() == set()
    assert len(node.devices()) == 4


def test_late_gpus_join_the_first_one_whose_id_stays() -> None:
    """Case A4."""
    node = healthy_node(gpu(0))
    four = [gpu(number) for number in range(4)]
    node.after(20 * S, enumerated(*four))
    assert node.health() == {
        U0: Health.HEALTHY,
        **{item.uuid: Health.UNKNOWN for item in four[1:]},
    }
    node.apply(*(passed(item.uuid) for item in four))
    assert node.unhealthy() == set()


# Placements


@pytest.mark.parametrize("code", [79, 48])
def test_every_share_of_a_gpu_flips_in_one_step_and_no_other(code: int) -> None:
    """Case C1, a."""
    node = healthy_node(gpu(0), gpu(1), policy=Policy(sharing=Sharing.of({GPU: 3})))
    node.apply(xid(code))
    assert node.unhealthy() == {f"{U0}::{replica}" for replica in range(3)}
    (event,) = node.events(EventKind.ALLOCATABLE)
    assert fields_of(event)["allocatable"] == 3


@pytest.mark.parametrize(
    ("gi", "ci", "out"),
    [
        (2, 0, {1}),
        (0xFFFFFFFF, 0xFFFFFFFF, {0, 1, 2}),
        (2, 0xFFFFFFFF, {1}),
        (9, 0, set()),
        (2, 1, set()),
    ],
)
def test_an_xid_of_a_gpu_instance_flips_exactly_its_devices(gi: int, ci: int, out: set[int]) -> None:
    """Case C1, b."""
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    node.apply(xid(48, gi=gi, ci=ci))
    assert node.unhealthy() == {mig_uuid(number) for number in out}
    warnings = [event.message for event in node.events(EventKind.XID) if event.warning]
    assert warnings == ([] if out else ["An XID of an unknown MIG device marks no device"])
    assert node.state.xids == {U0: {48: 1}}


def test_two_compute_instances_of_one_gpu_instance_are_apart() -> None:
    node = healthy_node(
        mig_gpu(0, (1, 0, "1c.2g.20gb"), (1, 1, "1c.2g.20gb"), (2, 0, "1c.2g.20gb")),
        policy=Policy(mig_strategy="single"),
    )
    node.apply(xid(48, gi=1, ci=1))
    assert node.unhealthy() == {mig_uuid(1)}
    node.apply(xid(48, gi=1))
    assert node.unhealthy() == {mig_uuid(0), mig_uuid(1)}


def test_an_instance_of_a_gpu_without_mig_is_the_gpu() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(48, gi=9, ci=3), xid(48))
    assert [item.placement for item in node.conditions()] == [place(U0)]
    assert node.unhealthy() == {U0}


# Two sources


def test_the_same_xid_from_two_sources_within_two_seconds_is_one_fault() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    node.after(2 * S, xid(79, source=KMSG))
    assert node.state.xids == {U0: {79: 1}}
    (condition,) = node.conditions()
    assert (condition.key.source, condition.count) == (NVML, 1)


def test_after_two_seconds_another_source_reports_another_fault() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    node.after(2 * S + 1, xid(79, source=KMSG))
    assert node.state.xids == {U0: {79: 2}}
    assert [item.key.source for item in node.conditions()] == [NVML, KMSG]


def test_the_same_source_may_report_as_often_as_it_likes() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79), xid(79, count=2))
    node.after(MS, xid(79))
    assert node.state.xids == {U0: {79: 4}}
    assert [item.count for item in node.conditions()] == [4]


def test_other_xids_and_other_gpus_are_other_faults() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), xid(48, source=KMSG), xid(79, U1, source=KMSG))
    assert node.state.xids == {U0: {79: 1, 48: 1}, U1: {79: 1}}


# Over a restart


def test_an_unhealthy_gpu_is_unhealthy_from_the_start_of_the_next_process() -> None:
    """Case C2, d."""
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79))
    again = node.restarted(after_ns=S)
    assert again.health() == {U0: Health.UNHEALTHY, U1: Health.UNKNOWN}
    assert again.state.xids == {U0: {79: 1}}


def test_clean_probes_of_an_earlier_process_do_not_count() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed(), passed())
    again = node.restarted(after_ns=Q)
    again.apply(Tick())
    assert again.health() == {U0: Health.UNHEALTHY}
    again.apply(ready(), enumerated(gpu(0)))
    recovers_by_rule(again)


def test_what_was_kept_of_gpus_that_are_not_known_touches_no_other() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), xid(79, U1))
    kept = node.snapshot().durable
    state = initial_state(
        Policy(), Durable(gpus=kept.gpus[1:], conditions=kept.conditions, xids=kept.xids), now_ns=1
    )
    assert [item.placement.gpu for item in state.conditions.values()] == [U1]
    assert [item.placement.gpu for item in state.awaited] == [U0]
    assert state.xids == {U1: {79: 1}}
