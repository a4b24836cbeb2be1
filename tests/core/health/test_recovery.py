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
    GpuRebound,
    PolicyChanged,
    Tick,
)
from agent.model.health import Condition, ConditionKey, Evidence, Health, Reason, Recovery
from agent.model.ids import SourceName
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.snapshot import Durable
from agent.model.structs import replace
from tests.core.build import (
    AT_ONCE,
    BACK,
    C1B,
    CLEAN,
    CLEAN_1,
    CLEAN_2,
    GPU,
    KMSG,
    MISMATCH,
    MS,
    QUIET,
    START_NS,
    U0,
    U1,
    U2,
    UNLOADED,
    Node,
    S,
    Step,
    answered,
    enumerated,
    example,
    failed,
    fields_of,
    follow_example,
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
from tests.core.polls import read

HANGS, ANSWERS = DriverCallOverdue("init", deadline_ns=5 * S), DriverCallAnswered("init")
ALL = {U0, U1, U2}


def often(times: int, *steps: Step) -> list[Step]:
    return [*steps] * times


@pytest.mark.parametrize(
    ("count", "policy", "then"),
    [
        # Clean probes and quiet time
        example("a GPU is unhealthy at once and the others are not", 2, [xid(79), {U0}]),
        example(
            "quiet time counts from the first clean probe after the last report", 1, [xid(94), 10 * S, *BACK]
        ),
        example(
            "a fault reported again begins anew", 1, [xid(94), *CLEAN, QUIET - 1, xid(94, count=4), *BACK]
        ),
        example("quiet time is not enough", 1, [xid(94), *CLEAN[1:], 3600 * S, {U0}, passed(), set()]),
        example(
            "clean probes come in a row",
            1,
            [xid(94), *CLEAN[1:], failed(), *CLEAN[1:], QUIET, {U0}, passed(), set()],
        ),
        example("probes of another GPU bring nothing back", 2, [xid(94), *[passed(U1)] * 10, 3600 * S, {U0}]),
        example("a bad probe of another GPU", 2, [xid(94), *CLEAN[1:], failed(U1), passed(), QUIET, {U1}]),
        example(
            "without quiet time the last clean probe brings a GPU back",
            1,
            [xid(94), *CLEAN[1:], {U0}, passed(), set()],
            policy=Policy(recovery_clean_probes=3, recovery_quiet_ns=0),
        ),
        example(
            "a policy that asks for less brings a GPU back at once",
            1,
            [xid(94), *CLEAN[1:], PolicyChanged(Policy(recovery_clean_probes=2, recovery_quiet_ns=0)), set()],
        ),
        # Resets
        example(
            "a driver that was not unloaded is no reset",
            1,
            [xid(79), MISMATCH, ready(), *CLEAN, 2 * QUIET, {U0}],
        ),
        example(
            "a driver that was unloaded was reset whatever was reported meanwhile",
            1,
            [xid(79), UNLOADED, MISMATCH, ready(), *CLEAN, QUIET, set()],
        ),
        example(
            "a driver that turns out to be unloaded was reset",
            1,
            [xid(79), replace(UNLOADED, unloaded=False), UNLOADED, ready(), *CLEAN, QUIET, set()],
        ),
        example(
            "one reset counts for one fault",
            1,
            [UNLOADED, ready(), *CLEAN, QUIET, set(), xid(79), MISMATCH, ready(), *CLEAN, 2 * QUIET, {U0}],
        ),
        example(
            "a fault after the reset needs another one",
            1,
            [xid(79), UNLOADED, ready(), *CLEAN[1:], xid(79), *CLEAN, 2 * QUIET, {U0}],
        ),
        # A GPU that is not listed
        example(
            "the only GPU is listed again",
            1,
            [xid(79), S, enumerated(), 300 * S, enumerated(gpu(0)), S, *BACK],
        ),
        example(
            "one of two GPUs is listed again",
            2,
            [xid(79), S, enumerated(gpu(1)), 300 * S, enumerated(gpu(0), gpu(1)), S, *BACK],
        ),
        example(
            "listing a GPU that is back once more begins nothing anew",
            1,
            [enumerated(), enumerated(gpu(0)), *CLEAN[1:], enumerated(gpu(0)), passed(), QUIET, set()],
        ),
        example(
            "a driver reload does not bring back a GPU that is not listed",
            2,
            [enumerated(gpu(1)), UNLOADED, ready(), enumerated(gpu(1)), *often(5, QUIET, passed(U1)), {U0}],
        ),
        # Calls that hang
        example("the quiet time of a hang counts from its end", 1, [overdue(), 3600 * S, *BACK]),
        example(
            "a hang breaks the row of clean probes",
            1,
            [xid(94), *CLEAN[1:], overdue(), passed(), 2 * QUIET, passed(), {U0}, passed(), set()],
        ),
        example(
            "probes that pass while the driver hangs do not count for it",
            1,
            [HANGS, *often(10, QUIET, passed()), {U0}, ANSWERS, *BACK],
        ),
        example(
            "the driver hangs no more when only one call still does",
            3,
            [overdue(U0), overdue(U1), ALL, S, passed(U0), *CLEAN_2, QUIET, {U0, U1}],
        ),
        example(
            "an error also ends a hang",
            3,
            [overdue(U0), overdue(U1), ALL, failed(U0), *CLEAN_2, QUIET, {U0, U1}],
        ),
        example(
            "a hang ends when the calls return and the next probe of each GPU counts",
            3,
            [
                overdue(U0),
                overdue(U1),
                answered(U0),
                answered(U1),
                ALL,
                *CLEAN,
                *CLEAN_1,
                *CLEAN_2,
                QUIET,
                set(),
            ],
        ),
        example(
            "a call that returns is no clean probe",
            1,
            [overdue(), answered(), *CLEAN[1:], answered(), QUIET, {U0}, passed(), QUIET, set()],
        ),
        example(
            "a GPU found while the driver hangs is unhealthy too",
            2,
            [overdue(U0), overdue(U1), enumerated(gpu(0), gpu(1), gpu(2)), passed(U2), ALL],
        ),
        example(
            "a driver that goes away hangs no more but recovers by the rule",
            2,
            [
                overdue(U0),
                overdue(U1),
                3600 * S,
                UNLOADED,
                ready(),
                *CLEAN_1,
                *CLEAN,
                QUIET - 1,
                {U0, U1},
                1,
                set(),
            ],
        ),
        example("a call on the node is overdue no more", 1, [HANGS, UNLOADED, ready(), *CLEAN, QUIET, set()]),
        # A driver that is away
        example("a driver that was away", 1, [UNLOADED, *often(100, S, UNLOADED), ready(), *BACK]),
        example(
            "a probe that was under way when the driver went is no sign of health",
            1,
            [UNLOADED, passed(), {U0}, ready(), passed(), set()],
            policy=AT_ONCE,
        ),
        # Classes
        *(
            example(
                f"clean probes never end XID {code}",
                1,
                [xid(code), *often(10, 3600 * S, passed()), {U0}],
                policy=AT_ONCE,
            )
            for code in (79, 48, 74, 54, 151, 64, 200)
        ),
        *(
            example(
                f"no reset ends XID {code}",
                1,
                [
                    xid(code),
                    enumerated(),
                    enumerated(gpu(0)),
                    UNLOADED,
                    ready(),
                    passed(),
                    3600 * S,
                    passed(),
                    {U0},
                ],
                policy=AT_ONCE,
            )
            for code in (54, 78, 151, 64)
        ),
        *(
            example(
                f"{what} ends XID {code}",
                2,
                [xid(code), *CLEAN, 2 * QUIET, *reset, S, *CLEAN_1, *CLEAN, QUIET - 1, out, 1, set()],
            )
            for code in (48, 62, 74, 79, 95, 119, 142, 200)
            for what, reset, out in (
                ("listing it again", (enumerated(gpu(1)), enumerated(gpu(0), gpu(1))), {U0}),
                ("loading the driver", (UNLOADED, ready()), {U0, U1}),
            )
        ),
    ],
)
def test_a_gpu_is_unhealthy_until_its_rule_is_met(count: int, policy: Policy, then: list[Step]) -> None:
    follow_example(count, policy, then)


@pytest.mark.parametrize(
    ("before", "fact"),
    [
        pytest.param([], passed(), id="a healthy GPU passes its probe"),
        pytest.param([xid(94), *CLEAN], passed(), id="a probe more than is needed"),
        pytest.param([enumerated(gpu(1))], enumerated(gpu(1)), id="a GPU stays away"),
        pytest.param([UNLOADED], UNLOADED, id="the driver stays away"),
        pytest.param([xid(94), enumerated(gpu(1))], passed(), id="a probe under way when the GPU went"),
        pytest.param([UNLOADED], passed(), id="a probe under way when the driver went"),
        pytest.param([UNLOADED], read(recovery_action=1), id="readings taken before the driver went"),
        pytest.param([], read(U2, recovery_action=1), id="readings of an unknown GPU"),
        pytest.param([], passed(U2), id="a probe of an unknown GPU"),
        pytest.param([], failed(U2), id="a failed call of an unknown GPU"),
        pytest.param([], overdue(U2), id="an overdue call of an unknown GPU"),
        pytest.param([xid(79)], GpuRebound(gpu(5).pci, bound=True), id="an unknown GPU is bound"),
        pytest.param([], GpuRebound(gpu(0).pci, bound=False), id="a healthy GPU is taken from its driver"),
        pytest.param([], GpuRebound(gpu(0).pci, bound=True), id="a healthy GPU is bound anew"),
    ],
)
def test_what_brings_no_news_changes_nothing(before: list[Fact], fact: Fact) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(*before)
    state = node.state
    assert node.after(3 * S, fact) == ()
    assert node.state is state


@pytest.mark.parametrize("fact", [failed(), overdue()])
def test_a_gpu_whose_first_poll_fails_or_hangs_has_a_verdict(fact: Fact) -> None:
    node = Node()
    node.apply(ready(), enumerated(gpu(0)), fact)
    assert node.health() == {U0: Health.UNHEALTHY}
    assert node.state.probed == {U0}


def test_an_overdue_call_of_a_gpu_that_went_is_over_with_its_probe() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(enumerated(gpu(1)), overdue(), passed())
    assert node.state.overdue == {}


@pytest.mark.parametrize(
    ("delay_ns", "source", "count", "xids", "conditions"),
    [
        (2 * S, KMSG, 1, 1, [(NVML, 1)]),
        (2 * S + 1, KMSG, 1, 2, [(NVML, 1), (KMSG, 1)]),
        (MS, NVML, 3, 4, [(NVML, 4)]),
    ],
    ids=["another source within 2 s", "another source later", "the same source"],
)
def test_two_reports_are_one_fault_if_two_sources_make_them_within_two_seconds(
    delay_ns: int, source: SourceName, count: int, xids: int, conditions: list[tuple[SourceName, int]]
) -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    node.after(delay_ns, xid(79, source=source, count=count))
    assert node.state.xids == {U0: {79: xids}}
    assert [(item.key.source, item.count) for item in node.conditions()] == conditions


def test_a_condition_reported_again_begins_anew() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed(), passed())
    node.after(QUIET - 1, xid(94, count=4))
    (condition,) = node.conditions()
    assert (condition.count, condition.clean_probes, condition.since_ns, condition.last_ns) == (
        5,
        0,
        START_NS,
        node.now_ns,
    )
    node.follow(*BACK)


def test_clearing_one_condition_never_clears_another() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), xid(79), failed())
    node.apply(passed(), passed(), passed())
    node.after(QUIET)
    assert [(item.reason, item.key.code) for item in node.conditions()] == [(Reason.XID, 79)]
    assert node.unhealthy() == {U0}


def test_no_policy_brings_back_what_needs_a_person() -> None:
    node = healthy_node(gpu(0), policy=Policy(recovery_clean_probes=0, recovery_quiet_ns=0))
    node.apply(xid(64), xid(54), xid(79), passed())
    assert len(node.conditions()) == 3


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


def test_a_gpu_that_goes_away_again_while_it_recovers_begins_anew() -> None:
    node = healthy_node(gpu(0))
    node.apply(enumerated(), enumerated(gpu(0)), passed(), passed(), passed())
    node.after(S, enumerated())
    (condition,) = node.conditions()
    assert (condition.count, condition.reset_seen, condition.clean_probes) == (2, False, 0)
    node.after(2 * QUIET, enumerated(gpu(0)))
    node.follow(*BACK)


def test_a_gpu_lost_in_an_earlier_process_and_listed_in_this_one_was_reset() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), enumerated(gpu(1)))
    again = node.restarted(after_ns=10 * S)
    again.apply(ready(), enumerated(gpu(0), gpu(1)), passed(U1))
    assert again.unhealthy() == {U0}
    again.follow(*BACK)


def test_a_gpu_that_was_listed_all_the_time_was_not_reset_by_a_restart_of_the_agent() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), passed(), passed(), passed())
    again.after(2 * QUIET)
    assert again.unhealthy() == {U0}


# Calls that fail, calls that hang, and the driver as a whole


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


def test_a_call_that_hangs_makes_its_gpu_unhealthy_and_is_named() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(overdue())
    assert node.unhealthy() == {U0}
    (condition,) = node.conditions()
    assert condition.reason is Reason.NVML_TIMEOUT
    assert condition.message == "NVML call nvmlDeviceGetMemoryInfo did not answer within 5 s"
    assert not node.state.hung


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


def test_a_driver_that_hangs_again_while_it_recovers_begins_anew() -> None:
    node = healthy_node(gpu(0))
    node.apply(DriverCallOverdue("init", 5 * S), DriverCallAnswered("init"), passed(), passed(), passed())
    node.after(S, DriverCallOverdue("wait", 5 * S))
    node.after(3600 * S)
    (condition,) = node.conditions()
    assert (condition.count, condition.message) == (2, "The driver does not answer wait")
    node.apply(DriverCallAnswered("wait"))
    node.follow(*BACK)


@pytest.mark.parametrize("fact", [UNLOADED, MISMATCH])
def test_without_a_driver_every_gpu_is_unhealthy(fact: DriverUnavailable) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(fact)
    assert len(node.unhealthy()) == 2
    assert {(item.reason, item.message) for item in node.conditions()} == {(fact.reason, fact.message)}
    assert node.state.driver.ready is False


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
    again = node.restarted(after_ns=QUIET)
    again.apply(Tick())
    assert again.health() == {U0: Health.UNHEALTHY}
    again.apply(ready(), enumerated(gpu(0)))
    again.follow(*BACK)


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
