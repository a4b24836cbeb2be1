"""XIDs of the kernel log: words need two witnesses, and one fault reported by two sources is one fault."""

from collections.abc import Callable
from typing import cast

import pytest

from agent.core.health.kernel_log import MAX_EARLY_XIDS, MAX_SWITCH_ERRORS
from agent.core.xids import RECOVERY_ACTION_CHANGED
from agent.model.effects import EventKind, ProbeGpu, ProbeUvm, RecordEvent
from agent.model.facts import (
    KERNEL_LOG,
    NVML,
    DriverCallOverdue,
    Fact,
    GpuRebound,
    GpuSampled,
    KernelLogRead,
    KernelXidSeen,
    PciConfigRead,
    SwitchErrorSeen,
    UvmErrorSeen,
    UvmProbed,
)
from agent.model.health import Health, Reason, Recovery
from agent.model.ids import ALL, GpuUuid
from agent.model.policy import Policy, XidPolicy
from agent.model.structs import replace
from agent.model.xid import NO_WORDS, XidWords
from tests.core.build import (
    C1B,
    DEFAULT,
    MS,
    U0,
    U1,
    Node,
    S,
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
from tests.core.polls import NOTHING, blind_poll, poll, read, reasons


def logged(
    code: int,
    number: int = 0,
    *,
    detail: str = "",
    words: XidWords = NO_WORDS,
    gi: int = ALL,
    ci: int = ALL,
    count: int = 1,
    in_words: bool = False,
) -> Fact:
    return KernelXidSeen(
        gpu(number).pci, code, detail=detail, words=words, gi=gi, ci=ci, count=count, in_words=in_words
    )


def of_backlog(
    code: int,
    number: int = 0,
    *,
    words: XidWords = NO_WORDS,
    count: int = 1,
    repaired: bool = False,
    in_words: bool = False,
) -> Fact:
    return KernelXidSeen(
        gpu(number).pci,
        code,
        words=words,
        backlog=True,
        live=False,
        repaired=repaired,
        in_words=in_words,
        count=count,
    )


def announced(action: int) -> Fact:
    return logged(RECOVERY_ACTION_CHANGED, words=XidWords(action=action))


def probes(node: Node) -> list[GpuUuid]:
    return [effect.gpu for _, effect in node.effects if isinstance(effect, ProbeGpu)]


SOURCES: list[Callable[..., Fact]] = [xid, logged]
ORDERS = pytest.mark.parametrize("first", [0, 1], ids=["NVML first", "kernel log first"])


@pytest.mark.parametrize("xid_policy", ["compat", "catalog"])
@pytest.mark.parametrize("in_words", [True, False])
def test_a_line_alone_makes_no_gpu_unhealthy_and_has_it_probed(
    xid_policy: XidPolicy, *, in_words: bool
) -> None:
    node = healthy_node(gpu(0), gpu(1), policy=replace(DEFAULT, xid_policy=xid_policy))
    node.apply(*poll(U1), logged(79, 1, in_words=in_words))
    assert node.unhealthy() == set()
    (condition,) = node.conditions()
    assert (condition.key.source, condition.reason, condition.key.code) == (
        KERNEL_LOG,
        Reason.UNCONFIRMED,
        79,
    )
    assert condition.message == "XID 79: GPU has fallen off the bus: only the kernel log reports it"
    assert node.state.xids == {U1: {79: 1}}
    assert probes(node) == [U1]
    node.after(S, *poll(U1), *poll(U1), *poll(U1))
    node.after(60 * S, *poll(U1))
    assert node.conditions() == []
    assert not node.state.unconfirmed
    node.apply(failed(U1, code=15))
    assert reasons(node, U1) == {Reason.GPU_LOST}


WITNESSES: dict[str, Fact] = {
    "NVML's event": xid(79),
    "lost": failed(code=15),
    "to be reset": failed(code=16),
    "another error": failed(code=999),
    "overdue": overdue(),
    "recovery action": read(recovery_action=1),
    "not listed": enumerated(gpu(1)),
    "configuration space": PciConfigRead(gpu(0).pci, answers=False),
}


@pytest.mark.parametrize("witness", WITNESSES)
@pytest.mark.parametrize("first", [0, 1], ids=["witness first", "kernel log first"])
def test_a_second_witness_confirms_the_line(witness: str, first: int) -> None:
    node = healthy_node(gpu(0), gpu(1))
    reports = [WITNESSES[witness], logged(79)]
    node.apply(reports[first])
    node.after(S, reports[1 - first])
    assert node.unhealthy() == {U0}
    assert Reason.UNCONFIRMED not in reasons(node)
    (condition,) = node.conditions(Reason.XID)
    assert (condition.recovery, condition.flips) == (Recovery.RESET, True)
    node.after(S, enumerated(gpu(0), gpu(1)), passed(), passed(), passed())
    node.after(3600 * S, *poll(), *poll(), *poll())
    # A GPU that is gone and back was bound anew, which is the evidence of a reset.
    assert (U0 in node.unhealthy()) is (witness != "not listed")


@pytest.mark.parametrize(
    ("code", "reading", "confirms"),
    [
        (95, read(ecc_uncorrected=1), True),
        (48, read(ecc_uncorrected=1), True),
        (74, read(links_down=(3,)), True),
        (64, read(rows_failed=True), True),
        (74, read(ecc_uncorrected=1), False),
        (119, read(pcie_width=8), False),
        (69, read(ecc_uncorrected=1), False),
    ],
)
def test_a_reading_of_what_the_line_is_about_confirms_it(code: int, reading: Fact, *, confirms: bool) -> None:
    node = healthy_node(gpu(0))
    node.apply(logged(code))
    assert node.unhealthy() == set()
    node.after(S, reading)
    assert (Reason.XID in reasons(node)) is confirms


def test_an_application_is_confirmed_by_nvmls_event_alone() -> None:
    node = healthy_node(gpu(0))
    node.apply(logged(69), failed())
    assert reasons(node) == {Reason.UNCONFIRMED, Reason.NVML_ERROR}
    assert probes(node) == []
    node.apply(xid(69))
    assert reasons(node) == {Reason.XID, Reason.NVML_ERROR}


def test_a_driver_that_hangs_confirms_no_line() -> None:
    """It is no evidence about the GPU that the line names."""
    node = healthy_node(gpu(0), gpu(1))
    node.apply(DriverCallOverdue("init", 120 * S), logged(79))
    assert reasons(node) == {Reason.DRIVER_HUNG, Reason.UNCONFIRMED}


def test_what_no_reading_can_deny_stays_shown_until_the_gpu_was_reset() -> None:
    """A driver without field 230 whose events are not heard: clean probes cannot deny a GSP timeout."""
    node = healthy_node(gpu(0))
    node.apply(*blind_poll(), logged(119))
    for _ in range(10):
        node.after(60 * S, *blind_poll())
    assert reasons(node) == {Reason.UNCONFIRMED}
    assert node.unhealthy() == set()
    node.apply(GpuRebound(gpu(0).pci, bound=True), *blind_poll(), *blind_poll(), *blind_poll())
    node.after(60 * S)
    assert node.conditions() == []


def test_the_detail_of_the_line_is_in_the_message() -> None:
    node = healthy_node(gpu(0))
    node.apply(logged(145, detail="RLW_CTRL Nonfatal XC0 i0 Link 04"), xid(145))
    (condition,) = node.conditions()
    assert condition.message == "XID 145: NVLink RLW error (RLW_CTRL Nonfatal XC0 i0 Link 04)"


@ORDERS
@pytest.mark.parametrize(
    ("code", "words", "recovery"),
    [
        (145, XidWords(severity="fatal"), Recovery.RESET),
        (145, XidWords(severity="nonfatal"), None),
        (94, XidWords(reset=True), Recovery.RESET),
        (94, XidWords(reset=False), None),
        (95, XidWords(reset=True), Recovery.RESET),
    ],
)
def test_the_verdict_rests_on_the_words_whichever_source_came_first(
    first: int, code: int, words: XidWords, recovery: Recovery | None
) -> None:
    node = healthy_node(gpu(0), policy=replace(DEFAULT, xid_policy="catalog"))
    reports = [xid(code), logged(code, words=words)]
    node.apply(reports[first], reports[1 - first])
    expected = [] if recovery is None else [recovery]
    assert [item.recovery for item in node.conditions()] == expected


def test_counts_of_merged_lines_are_kept() -> None:
    node = healthy_node(gpu(0))
    node.apply(logged(79, count=3), logged(79, count=2))
    assert node.state.xids == {U0: {79: 5}}
    assert [item.count for item in node.conditions()] == [5]
    node.apply(failed(code=15))
    assert [item.count for item in node.conditions(Reason.XID)] == [5]


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_what_the_policy_ignores_is_ignored_from_the_kernel_log_too(code: int) -> None:
    node = healthy_node(gpu(0))
    node.apply(logged(code))
    assert node.health() == {U0: Health.HEALTHY}
    assert node.state.xids == {U0: {code: 1}}
    (event,) = node.events(EventKind.XID)
    assert not event.warning


def test_a_line_of_an_unknown_address_marks_no_device_and_names_the_address() -> None:
    node = healthy_node(gpu(0))
    before = node.state
    node.apply(logged(79, 5))
    assert node.state is before
    (event,) = node.events()
    assert (event.message, event.warning) == ("An XID of an unknown device marks no device", True)
    assert fields_of(event) == {"xid": 79, "count": 1, "source": KERNEL_LOG, "pci": gpu(5).pci}


def test_an_address_is_that_of_the_gpu_that_is_there_now() -> None:
    swapped = replace(gpu(1), pci=gpu(0).pci)
    node = healthy_node(gpu(0))
    node.apply(enumerated(swapped))
    node.apply(logged(48, 0))
    assert node.state.xids == {U1: {48: 1}}


def test_a_gpu_that_fell_off_the_bus_is_still_known_by_its_address() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(enumerated(gpu(1)), logged(79, 0))
    assert node.state.xids == {U0: {79: 1}}


# Before the agent listened


def test_what_an_application_did_before_the_start_only_counts() -> None:
    node = healthy_node(gpu(0))
    node.apply(of_backlog(13, count=3))
    assert node.health() == {U0: Health.HEALTHY}
    assert node.conditions() == []
    assert node.state.xids == {U0: {13: 3}}
    ((at_ns, effect),) = node.effects
    assert isinstance(effect, RecordEvent)
    assert effect.at_ns == at_ns
    event = effect.event
    assert (event.message, event.warning) == ("An XID from before the start is only counted", False)
    assert fields_of(event)["uuid"] == U0


@pytest.mark.parametrize(
    ("code", "recovery"),
    [(119, Recovery.RESET), (95, Recovery.RESET), (54, Recovery.REBOOT), (64, Recovery.BY_HAND)],
)
@pytest.mark.parametrize("backlog", [True, False], ids=["first agent", "between two agents"])
def test_a_hard_xid_from_before_the_start_counts_unless_it_was_repaired(
    code: int, recovery: Recovery, *, backlog: bool
) -> None:
    fact = replace(cast("KernelXidSeen", of_backlog(code)), backlog=backlog)
    without_field = healthy_node(gpu(0))
    without_field.apply(*blind_poll(), fact)
    assert without_field.unhealthy() == {U0}
    (condition,) = without_field.conditions()
    assert (condition.reason, condition.recovery) == (Reason.XID, recovery)

    repaired = healthy_node(gpu(0))
    repaired.apply(*blind_poll(), replace(fact, repaired=True))
    assert repaired.conditions() == []

    with_field = healthy_node(gpu(0))
    with_field.apply(*poll(), fact)
    # The driver itself denies that anything is to be done, but not for memory that is used up.
    assert with_field.unhealthy() == ({U0} if recovery is Recovery.BY_HAND else set())

    asked = healthy_node(gpu(0))
    asked.apply(*poll(recovery_action=1), fact)
    assert reasons(asked) == {Reason.XID, Reason.RECOVERY_ACTION}


def test_words_from_before_the_start_only_count() -> None:
    node = healthy_node(gpu(0))
    node.apply(*blind_poll(), of_backlog(79, in_words=True))
    assert node.conditions() == []


def test_an_old_line_waits_for_the_first_probe() -> None:
    node = Node()
    node.apply(of_backlog(119), KernelLogRead(7))
    assert node.state.early_xids
    assert node.state.kernel_log_read is None
    node.apply(ready(), enumerated(gpu(0)))
    assert not node.state.early_xids
    assert reasons(node) == {Reason.UNCONFIRMED}
    node.apply(*poll())
    assert node.conditions() == []
    assert node.health() == {U0: Health.HEALTHY}


def test_lines_that_wait_for_the_first_gpu_are_bounded() -> None:
    node = Node()
    for code in range(1, MAX_EARLY_XIDS + 10):
        node.apply(logged(code))
    assert len(node.state.early_xids) == MAX_EARLY_XIDS


def test_an_old_line_of_an_unknown_address_is_nothing() -> None:
    node = healthy_node(gpu(0))
    before = node.state
    assert node.apply(of_backlog(79, 5)) == ()
    assert node.state is before


def test_an_old_line_hides_no_new_fault() -> None:
    node = healthy_node(gpu(0))
    node.apply(*poll(), of_backlog(79), xid(79))
    assert node.unhealthy() == {U0}
    assert node.state.xids == {U0: {79: 2}}


# The recovery action


def test_ten_announcements_around_three_repairs_leave_every_gpu_healthy() -> None:
    for supported in (True, False):
        node = healthy_node(gpu(0), gpu(1))
        polled = poll if supported else lambda **_: blind_poll()
        for repair in range(3):
            node.apply(*polled(), xid(119), logged(119))
            for action in (1, 4, 1) if repair == 0 else (4, 1):
                node.after(
                    S, xid(RECOVERY_ACTION_CHANGED), announced(action), *polled(recovery_action=action)
                )
            assert node.unhealthy() == {U0}
            node.after(S, GpuRebound(gpu(0).pci, bound=True), xid(RECOVERY_ACTION_CHANGED), announced(0))
            node.apply(*polled(), *polled(), *polled())
            node.after(60 * S)
            assert node.conditions() == [], (supported, repair)
        assert node.state.xids[U0] == {119: 3, RECOVERY_ACTION_CHANGED: 10}
        assert node.unhealthy() == set()


@pytest.mark.parametrize("fact", [announced(0), xid(RECOVERY_ACTION_CHANGED), announced(5)])
@pytest.mark.parametrize("xid_policy", ["compat", "catalog"])
def test_the_all_clear_and_what_is_not_about_the_gpu_flip_nothing(fact: Fact, xid_policy: XidPolicy) -> None:
    node = healthy_node(gpu(0), policy=replace(DEFAULT, xid_policy=xid_policy))
    for _ in range(10):
        node.apply(fact, *blind_poll())
    assert node.conditions() == []


@pytest.mark.parametrize(
    "reports",
    [
        (announced(2),),
        (xid(154), announced(2)),
        (announced(2), xid(154)),
        (of_backlog(154, words=XidWords(action=2)),),
    ],
    ids=["the line alone", "NVML first", "line first", "before the start"],
)
def test_a_reboot_that_the_driver_wants_lasts_where_nothing_else_reads_it(reports: tuple[Fact, ...]) -> None:
    node = healthy_node(gpu(0))
    node.apply(*blind_poll(), *reports)
    assert node.state.xids == {U0: {154: 1}}
    for _ in range(10):
        node.after(60 * S, *blind_poll())
    node.apply(GpuRebound(gpu(0).pci, bound=True), *blind_poll(), *blind_poll(), *blind_poll())
    node.after(60 * S, *blind_poll())
    assert node.unhealthy() == {U0}
    assert [(item.reason, item.recovery) for item in node.conditions()] == [
        (Reason.RECOVERY_ACTION, Recovery.REBOOT)
    ]
    node.apply(announced(0), *blind_poll(), *blind_poll(), *blind_poll())
    node.after(60 * S)
    assert node.conditions() == []


def test_where_nvml_reads_the_action_it_counts_and_the_line_has_it_read() -> None:
    node = healthy_node(gpu(0))
    node.apply(*poll(), announced(2))
    assert node.conditions() == []
    assert probes(node) == [U0]
    node.apply(*poll(recovery_action=2))
    assert reasons(node) == {Reason.RECOVERY_ACTION}


def test_a_reading_takes_the_place_of_the_line() -> None:
    node = healthy_node(gpu(0))
    node.apply(*blind_poll(), announced(2), *poll(recovery_action=1))
    assert [(item.key.source, item.message) for item in node.conditions()] == [
        (NVML, "The driver asks to reset the GPU")
    ]


def test_an_override_of_154_is_applied() -> None:
    node = healthy_node(gpu(0), policy=replace(DEFAULT, xid_overrides={RECOVERY_ACTION_CHANGED: "flip"}))
    node.apply(xid(RECOVERY_ACTION_CHANGED))
    assert node.unhealthy() == {U0}


# Switches and unified memory


def test_a_fatal_error_of_a_switch_is_shown_on_gpus_with_links_and_has_them_probed() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(read(), GpuSampled(U1, NOTHING))
    node.apply(SwitchErrorSeen("0000:c3:00.0", 20034, fatal=False))
    assert node.conditions() == []
    node.apply(SwitchErrorSeen("0000:c3:00.0", 24007, fatal=True))
    assert reasons(node) == {Reason.UNCONFIRMED}
    assert reasons(node, U1) == set()
    assert probes(node) == [U0]
    assert node.unhealthy() == set()
    assert [event.warning for event in node.events(EventKind.XID)] == [False, True]
    for sxid in range(100):
        node.apply(SwitchErrorSeen("0000:c3:00.0", sxid, fatal=True))
    assert len(node.conditions()) == MAX_SWITCH_ERRORS + 1


def test_failed_unified_memory_makes_every_gpu_unhealthy_and_the_line_alone_none() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(UvmErrorSeen("NV_ERR_RC_ERROR"))
    assert node.unhealthy() == set()
    assert reasons(node) == reasons(node, U1) == {Reason.UNCONFIRMED}
    assert any(isinstance(effect, ProbeUvm) for _, effect in node.effects)
    node.apply(UvmProbed("Input/output error"))
    assert node.unhealthy() == {U0, U1}
    assert reasons(node) == {Reason.UVM_FAILED}
    (condition, _) = node.conditions()
    assert "NV_ERR_RC_ERROR" in condition.message

    other = healthy_node(gpu(0))
    other.apply(UvmErrorSeen("NV_ERR_RC_ERROR"), UvmProbed(None))
    assert other.conditions() == []


def test_what_an_earlier_process_counted_is_not_counted_again_from_the_backlog() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79, count=2), logged(13, 1))
    for _ in range(3):
        node = node.restarted()
        node.apply(ready(), enumerated(gpu(0), gpu(1)), of_backlog(79), of_backlog(79), of_backlog(13, 1))
        assert node.state.xids == {U0: {79: 2}, U1: {13: 1}}
        assert node.events(EventKind.XID) == []


def test_what_came_while_no_agent_ran_is_counted_from_the_backlog() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79, count=2))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), of_backlog(79, count=3), of_backlog(79), of_backlog(48))
    assert again.state.xids == {U0: {79: 4, 48: 1}}
    again.apply(logged(79))
    assert again.state.xids == {U0: {79: 5, 48: 1}}


def test_codes_outside_the_table_are_bounded_in_the_backlog_too() -> None:
    node = healthy_node(gpu(0))
    for code in range(1000, 1100):
        node.apply(of_backlog(code))
    assert len(node.state.xids[U0]) == 65
    assert sum(node.state.xids[U0].values()) == 100


# Two sources that report one fault


@ORDERS
@pytest.mark.parametrize("delay_ns", [0, MS, 2 * S])
def test_one_fault_reported_by_both_within_two_seconds_counts_once(first: int, delay_ns: int) -> None:
    node = healthy_node(gpu(0))
    node.apply(SOURCES[first](79))
    node.after(delay_ns, SOURCES[1 - first](79))
    assert node.state.xids == {U0: {79: 1}}
    (condition,) = node.conditions()
    assert (condition.key.source, condition.count) == ([NVML, KERNEL_LOG][first], 1)
    assert len(node.events(EventKind.CONDITION)) == (3 if first else 1)


@ORDERS
def test_after_two_seconds_it_is_another_fault(first: int) -> None:
    node = healthy_node(gpu(0))
    node.apply(SOURCES[first](79))
    node.after(2 * S + 1, SOURCES[1 - first](79))
    assert node.state.xids == {U0: {79: 2}}
    assert len(node.conditions()) == 2


@ORDERS
def test_what_one_source_reports_again_is_another_fault(first: int) -> None:
    node = healthy_node(gpu(0))
    one, other = SOURCES[first], SOURCES[1 - first]
    node.apply(one(79), other(79), one(79), other(79))
    assert node.state.xids == {U0: {79: 2}}


@ORDERS
def test_an_ignored_code_reported_by_both_counts_once_too(first: int) -> None:
    node = healthy_node(gpu(0))
    node.apply(SOURCES[first](13), SOURCES[1 - first](13))
    assert node.state.xids == {U0: {13: 1}}
    assert len(node.events(EventKind.XID)) == 1


@ORDERS
def test_a_whole_gpu_and_a_part_of_it_are_one_place(first: int) -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    node.apply(SOURCES[first](48, gi=2, ci=0), SOURCES[1 - first](48))
    assert node.state.xids == {U0: {48: 1}}
    assert node.unhealthy() == {mig_uuid(1)}


def test_an_instance_that_the_line_names_is_marked_alone() -> None:
    node = healthy_node(
        mig_gpu(0, (1, 0, "1c.2g.20gb"), (1, 1, "1c.2g.20gb"), (2, 0, "1c.2g.20gb")),
        policy=Policy(mig_strategy="single"),
    )
    node.apply(logged(48, gi=1, ci=1), xid(48, gi=1, ci=1))
    assert node.unhealthy() == {mig_uuid(1)}
    node.apply(logged(48, gi=9, ci=0))
    (event,) = node.events(EventKind.XID)
    assert (fields_of(event)["uuid"], fields_of(event)["gi"]) == (U0, 9)


@ORDERS
def test_two_instances_are_two_places(first: int) -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    node.apply(SOURCES[first](48, gi=1, ci=0), SOURCES[1 - first](48, gi=2, ci=0))
    assert node.state.xids == {U0: {48: 2}}
    assert node.unhealthy() == {mig_uuid(first)}
    assert {item.placement.gi for item in node.conditions(Reason.UNCONFIRMED)} == {2 - first}


@ORDERS
def test_both_may_report_several_instances_in_any_order(first: int) -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    one, other = SOURCES[first], SOURCES[1 - first]
    node.apply(one(48, gi=1, ci=0), one(48, gi=2, ci=0), other(48, gi=1, ci=0), other(48, gi=2, ci=0))
    assert node.state.xids == {U0: {48: 2}}


@ORDERS
def test_a_report_that_could_not_be_placed_hides_none_that_can(first: int) -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    node.apply(SOURCES[first](48, gi=9, ci=0), SOURCES[1 - first](48))
    assert len(node.unhealthy()) == (3 if first else 0)
    assert [item.placement for item in node.conditions()] == [place(U0)]
    assert node.state.xids == {U0: {48: 2}}


def test_an_instance_of_a_gpu_without_mig_is_the_whole_gpu() -> None:
    node = healthy_node(gpu(0))
    node.apply(logged(48, gi=3, ci=0), xid(48))
    assert node.state.xids == {U0: {48: 1}}
    assert [item.placement for item in node.conditions()] == [place(U0)]


def test_another_code_or_another_gpu_is_another_fault() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), logged(48), logged(79, 1))
    assert node.state.xids == {U0: {79: 1, 48: 1}, U1: {79: 1}}


def test_after_a_restart_no_xid_was_reported_yet() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    again: Node = node.restarted()
    again.apply(ready(), logged(79))
    assert again.state.xids == {U0: {79: 2}}


def test_a_report_is_forgotten_when_it_is_too_old() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), xid(48, GpuUuid(U1)))
    node.after(2 * S, xid(62))
    assert len(node.state.recent_xids) == 3
    node.after(1, xid(95))
    assert {code for _, code in node.state.recent_xids} == {62, 95}


def test_an_ignored_code_at_a_place_that_is_not_there_is_only_ignored() -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    node.apply(xid(13, gi=9, ci=0))
    assert [(event.message, event.warning) for event in node.events()] == [
        ("An XID was ignored by policy", False)
    ]
