"""XIDs of the kernel log beside those of NVML: one fault told by two is one fault."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.model.effects import EventKind, RecordEvent
from agent.model.facts import KERNEL_LOG, NVML, Fact, KernelXidSeen
from agent.model.health import Health, Reason
from agent.model.ids import ALL, GpuUuid
from agent.model.policy import Policy
from tests.core.build import (
    C1B,
    MS,
    U0,
    U1,
    Node,
    S,
    enumerated,
    fields_of,
    gpu,
    mig_gpu,
    mig_uuid,
    place,
    ready,
    well_node,
    xid,
)


def logged(
    code: int, number: int = 0, *, detail: str = "", gi: int = ALL, ci: int = ALL, count: int = 1
) -> Fact:
    return KernelXidSeen(gpu(number).pci, code, detail=detail, gi=gi, ci=ci, count=count)


def of_backlog(code: int, number: int = 0, *, count: int = 1) -> Fact:
    return KernelXidSeen(gpu(number).pci, code, backlog=True, count=count)


TELLERS: list[Callable[..., Fact]] = [xid, logged]
ORDERS = pytest.mark.parametrize("first", [0, 1], ids=["NVML first", "kernel log first"])


def test_an_xid_of_the_kernel_log_takes_out_the_gpu_at_its_address() -> None:
    node = well_node(gpu(0), gpu(1))
    node.tell(logged(79, 1))
    assert node.unhealthy() == {U1}
    (condition,) = node.conditions()
    assert (condition.key.source, condition.reason, condition.key.code) == (KERNEL_LOG, Reason.XID, 79)
    assert condition.message == "XID 79: GPU has fallen off the bus"
    assert node.state.xids == {U1: {79: 1}}


def test_what_the_line_says_beside_the_number_is_in_the_message() -> None:
    node = well_node(gpu(0))
    node.tell(logged(145, detail="RLW_CTRL Nonfatal XC0 i0 Link 04"))
    (condition,) = node.conditions()
    assert condition.message == "XID 145: NVLink RLW error (RLW_CTRL Nonfatal XC0 i0 Link 04)"


def test_a_code_without_a_name_is_shown_with_what_the_line_says() -> None:
    node = well_node(gpu(0))
    node.tell(logged(200, detail="new"))
    assert [item.message for item in node.conditions()] == ["XID 200 (new)"]


def test_counts_of_merged_lines_are_kept() -> None:
    node = well_node(gpu(0))
    node.tell(logged(79, count=3), logged(79, count=2))
    assert node.state.xids == {U0: {79: 5}}
    assert [item.count for item in node.conditions()] == [5]


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_what_the_policy_ignores_is_ignored_from_the_kernel_log_too(code: int) -> None:
    node = well_node(gpu(0))
    node.tell(logged(code))
    assert node.health() == {U0: Health.HEALTHY}
    assert node.state.xids == {U0: {code: 1}}
    (event,) = node.events(EventKind.XID)
    assert not event.warning


def test_a_line_of_an_unknown_address_marks_no_device_and_names_the_address() -> None:
    node = well_node(gpu(0))
    before = node.state
    node.tell(logged(79, 5))
    assert node.state is before
    (event,) = node.events()
    assert (event.message, event.warning) == ("An XID of an unknown device marks no device", True)
    assert fields_of(event) == {"xid": 79, "count": 1, "source": KERNEL_LOG, "pci": gpu(5).pci}


def test_an_address_is_that_of_the_gpu_that_is_there_now() -> None:
    swapped = replace(gpu(1), pci=gpu(0).pci)
    node = well_node(gpu(0))
    node.tell(enumerated(swapped))
    node.tell(logged(48, 0))
    assert node.state.xids == {U1: {48: 1}}


def test_a_gpu_that_fell_off_the_bus_is_still_known_by_its_address() -> None:
    node = well_node(gpu(0), gpu(1))
    node.tell(enumerated(gpu(1)), logged(79, 0))
    assert node.state.xids == {U0: {79: 1}}


# The backlog


@pytest.mark.parametrize("code", [79, 13])
def test_an_xid_from_before_the_start_only_counts(code: int) -> None:
    node = well_node(gpu(0))
    node.tell(of_backlog(code, count=3))
    assert node.health() == {U0: Health.HEALTHY}
    assert node.conditions() == []
    assert node.state.xids == {U0: {code: 3}}
    ((at_ns, effect),) = node.effects
    assert isinstance(effect, RecordEvent)
    assert effect.at_ns == at_ns
    event = effect.event
    assert (event.message, event.warning) == ("An XID from before the start is only counted", False)
    assert fields_of(event)["uuid"] == U0


def test_an_old_line_of_an_unknown_address_is_nothing() -> None:
    node = well_node(gpu(0))
    before = node.state
    assert node.tell(of_backlog(79, 5)) == ()
    assert node.state is before


def test_an_old_line_hides_no_new_fault() -> None:
    node = well_node(gpu(0))
    node.tell(of_backlog(79), xid(79))
    assert node.unhealthy() == {U0}
    assert node.state.xids == {U0: {79: 2}}


def test_what_an_earlier_process_counted_is_not_counted_again_from_the_backlog() -> None:
    node = well_node(gpu(0), gpu(1))
    node.tell(xid(79, count=2), logged(13, 1))
    for _ in range(3):
        node = node.restarted()
        node.tell(ready(), enumerated(gpu(0), gpu(1)), of_backlog(79), of_backlog(79), of_backlog(13, 1))
        assert node.state.xids == {U0: {79: 2}, U1: {13: 1}}
        assert node.events(EventKind.XID) == []


def test_what_came_while_no_agent_ran_is_counted_from_the_backlog() -> None:
    node = well_node(gpu(0))
    node.tell(xid(79, count=2))
    again = node.restarted()
    again.tell(ready(), enumerated(gpu(0)), of_backlog(79, count=3), of_backlog(79), of_backlog(48))
    assert again.state.xids == {U0: {79: 4, 48: 1}}
    assert len(again.events(EventKind.XID)) == 3
    again.tell(logged(79))
    assert again.state.xids == {U0: {79: 5, 48: 1}}


def test_codes_outside_the_table_are_bounded_in_the_backlog_too() -> None:
    node = well_node(gpu(0))
    for code in range(1000, 1100):
        node.tell(of_backlog(code))
    assert len(node.state.xids[U0]) == 65
    assert sum(node.state.xids[U0].values()) == 100


# Two who tell of one fault


@ORDERS
@pytest.mark.parametrize("delay_ns", [0, MS, 2 * S])
def test_one_fault_told_by_both_within_two_seconds_counts_once(first: int, delay_ns: int) -> None:
    node = well_node(gpu(0))
    node.tell(TELLERS[first](79))
    node.after(delay_ns, TELLERS[1 - first](79))
    assert node.state.xids == {U0: {79: 1}}
    (condition,) = node.conditions()
    assert (condition.key.source, condition.count) == ([NVML, KERNEL_LOG][first], 1)
    assert len(node.events(EventKind.CONDITION)) == 1


@ORDERS
def test_after_two_seconds_it_is_another_fault(first: int) -> None:
    node = well_node(gpu(0))
    node.tell(TELLERS[first](79))
    node.after(2 * S + 1, TELLERS[1 - first](79))
    assert node.state.xids == {U0: {79: 2}}
    assert len(node.conditions()) == 2


@ORDERS
def test_what_one_of_them_tells_again_is_another_fault(first: int) -> None:
    node = well_node(gpu(0))
    one, other = TELLERS[first], TELLERS[1 - first]
    node.tell(one(79), other(79), one(79), other(79))
    assert node.state.xids == {U0: {79: 2}}


@ORDERS
def test_an_ignored_code_told_by_both_counts_once_too(first: int) -> None:
    node = well_node(gpu(0))
    node.tell(TELLERS[first](13), TELLERS[1 - first](13))
    assert node.state.xids == {U0: {13: 1}}
    assert len(node.events(EventKind.XID)) == 1


@ORDERS
def test_a_whole_gpu_and_a_part_of_it_are_one_place(first: int) -> None:
    node = well_node(C1B, policy=Policy(mig_strategy="single"))
    node.tell(TELLERS[first](48, gi=2, ci=0), TELLERS[1 - first](48))
    assert node.state.xids == {U0: {48: 1}}
    assert node.unhealthy() == {mig_uuid(1)}


def test_an_instance_that_the_line_names_is_marked_alone() -> None:
    node = well_node(
        mig_gpu(0, (1, 0, "1c.2g.20gb"), (1, 1, "1c.2g.20gb"), (2, 0, "1c.2g.20gb")),
        policy=Policy(mig_strategy="single"),
    )
    node.tell(logged(48, gi=1, ci=1))
    assert node.unhealthy() == {mig_uuid(1)}
    node.tell(logged(48, gi=9, ci=0))
    (event,) = node.events(EventKind.XID)
    assert (fields_of(event)["uuid"], fields_of(event)["gi"]) == (U0, 9)


@ORDERS
def test_two_instances_are_two_places(first: int) -> None:
    node = well_node(C1B, policy=Policy(mig_strategy="single"))
    node.tell(TELLERS[first](48, gi=1, ci=0), TELLERS[1 - first](48, gi=2, ci=0))
    assert node.state.xids == {U0: {48: 2}}
    assert node.unhealthy() == {mig_uuid(0), mig_uuid(1)}


@ORDERS
def test_both_may_tell_of_several_instances_in_any_order(first: int) -> None:
    node = well_node(C1B, policy=Policy(mig_strategy="single"))
    one, other = TELLERS[first], TELLERS[1 - first]
    node.tell(one(48, gi=1, ci=0), one(48, gi=2, ci=0), other(48, gi=1, ci=0), other(48, gi=2, ci=0))
    assert node.state.xids == {U0: {48: 2}}


@ORDERS
def test_a_report_that_could_not_be_placed_hides_none_that_can(first: int) -> None:
    node = well_node(C1B, policy=Policy(mig_strategy="single"))
    node.tell(TELLERS[first](48, gi=9, ci=0), TELLERS[1 - first](48))
    assert len(node.unhealthy()) == 3
    assert node.state.xids == {U0: {48: 2}}


def test_an_instance_of_a_gpu_without_mig_is_the_whole_gpu() -> None:
    node = well_node(gpu(0))
    node.tell(logged(48, gi=3, ci=0), xid(48))
    assert node.state.xids == {U0: {48: 1}}
    assert [item.placement for item in node.conditions()] == [place(U0)]


def test_another_code_or_another_gpu_is_another_fault() -> None:
    node = well_node(gpu(0), gpu(1))
    node.tell(xid(79), logged(48), logged(79, 1))
    assert node.state.xids == {U0: {79: 1, 48: 1}, U1: {79: 1}}


def test_after_a_restart_nobody_told_yet() -> None:
    node = well_node(gpu(0))
    node.tell(xid(79))
    again: Node = node.restarted()
    again.tell(ready(), logged(79))
    assert again.state.xids == {U0: {79: 2}}


def test_what_was_told_is_forgotten_when_it_is_too_old() -> None:
    node = well_node(gpu(0), gpu(1))
    node.tell(xid(79), xid(48, GpuUuid(U1)))
    node.after(2 * S, xid(62))
    assert len(node.state.recent_xids) == 3
    node.after(1, xid(95))
    assert {code for _, code in node.state.recent_xids} == {62, 95}


def test_an_ignored_code_at_a_place_that_is_not_there_is_only_ignored() -> None:
    node = well_node(C1B, policy=Policy(mig_strategy="single"))
    node.tell(xid(13, gi=9, ci=0))
    assert [(event.message, event.warning) for event in node.events()] == [
        ("An XID was ignored by policy", False)
    ]
