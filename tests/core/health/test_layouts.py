"""MIG layouts that change while running: what ends with an instance, and what stays with the card."""

import pytest

from agent.model.facts import PolicyChanged, RecoverRequested
from agent.model.health import Health, Reason
from agent.model.ids import ALL, ResourceName
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    GPU,
    U0,
    U1,
    Node,
    enumerated,
    failed,
    gpu,
    healthy_node,
    mig_gpu,
    mig_uuid,
    passed,
    registered_node,
    xid,
)

SMALL = ResourceName("nvidia.com/mig-1g.10gb")
LARGE = ResourceName("nvidia.com/mig-3g.40gb")
MIXED = Policy(mig_strategy="mixed")

CONTAINED, RESET, REBOOT, RMA = 94, 48, 54, 64
"""XIDs of the classes self-clearing, reset, reboot and by hand."""

HALVES = mig_gpu(0, (4, 0, "3g.40gb"), (5, 0, "3g.40gb"))


def node_with(code: int, *, gi: int = 2, ci: int = 0) -> Node:
    """A node of three slices, with an XID on one of them."""
    node = registered_node(C1B, gpu(1), policy=MIXED)
    node.apply(xid(code, gi=gi, ci=ci))
    assert node.unhealthy(SMALL) == {mig_uuid(1)}
    return node


def places(node: Node) -> set[tuple[int, int, int]]:
    return {(each.key.code, each.placement.gi, each.placement.ci) for each in node.conditions()}


@pytest.mark.parametrize("code", [CONTAINED, RESET])
def test_what_was_wrong_with_an_instance_ends_with_it(code: int) -> None:
    node = node_with(code)
    node.apply(enumerated(HALVES, gpu(1)))
    assert node.conditions() == []
    assert set(node.health(LARGE).values()) == {Health.HEALTHY}
    assert node.devices(SMALL) == ()


@pytest.mark.parametrize("code", [REBOOT, RMA])
def test_what_only_a_reboot_or_a_person_ends_stays_on_the_card(code: int) -> None:
    node = node_with(code)
    node.apply(enumerated(HALVES, gpu(1)))
    assert places(node) == {(code, ALL, ALL)}
    assert set(node.health(LARGE).values()) == {Health.UNHEALTHY}
    node.apply(enumerated(gpu(0), gpu(1)))
    assert node.unhealthy(GPU) == {U0}
    node.apply(RecoverRequested(U0))
    assert node.unhealthy(GPU) == set()


def test_one_fault_of_the_card_is_made_of_those_of_several_instances() -> None:
    node = node_with(RMA)
    node.apply(xid(RMA, gi=1, ci=0), enumerated(HALVES, gpu(1)))
    assert places(node) == {(RMA, ALL, ALL)}


def test_an_instance_that_stays_keeps_what_is_wrong_with_it() -> None:
    node = node_with(RESET)
    larger = mig_gpu(0, (1, 0, "1g.10gb"), (2, 0, "1g.10gb"))
    node.apply(enumerated(larger, gpu(1)))
    assert places(node) == {(RESET, 2, 0)}
    assert node.unhealthy(SMALL) == {mig_uuid(1)}


def test_a_new_instance_with_an_old_number_is_another_one() -> None:
    node = node_with(RESET)
    node.apply(enumerated(mig_gpu(0, (1, 0, "1g.10gb"), (2, 0, "2g.20gb")), gpu(1)))
    assert node.conditions() == []


def test_a_fault_of_a_whole_instance_lasts_while_a_part_of_it_does() -> None:
    parts = mig_gpu(0, (2, 0, "1c.2g.20gb"), (2, 1, "1c.2g.20gb"))
    node = registered_node(parts, policy=Policy(mig_strategy="single"))
    node.apply(xid(RESET, gi=2, ci=ALL))
    node.apply(enumerated(mig_gpu(0, (2, 0, "1c.2g.20gb"))))
    assert places(node) == {(RESET, 2, ALL)}


@pytest.mark.parametrize("code", [CONTAINED, RESET, RMA])
def test_what_is_wrong_with_the_card_is_untouched_by_its_layout(code: int) -> None:
    node = registered_node(C1B, gpu(1), policy=MIXED)
    node.apply(xid(code), failed())
    before = node.state.conditions
    node.apply(enumerated(HALVES, gpu(1)), enumerated(gpu(0), gpu(1)))
    assert node.state.conditions == before


def test_a_layout_of_one_card_does_not_count_for_another() -> None:
    other = mig_gpu(1, (2, 0, "1g.10gb"))
    node = registered_node(C1B, other, policy=MIXED)
    node.apply(xid(RESET, U1, gi=2, ci=0), enumerated(HALVES, other))
    assert places(node) == {(RESET, 2, 0)}


def test_the_order_in_which_nvml_lists_slices_is_no_layout() -> None:
    node = node_with(RESET)
    before = node.state.conditions
    node.apply(enumerated(replace(C1B, mig_devices=C1B.mig_devices[::-1]), gpu(1)))
    assert node.state.conditions == before


def test_a_layout_that_changed_between_two_processes_is_seen_by_the_second() -> None:
    again = node_with(RESET).restarted()
    again.apply(enumerated(HALVES, gpu(1)), passed(), passed(U1))
    assert again.conditions() == []
    assert set(again.health(LARGE).values()) == {Health.HEALTHY}


def test_a_card_that_comes_back_with_another_layout_keeps_only_its_own_faults() -> None:
    node = node_with(RESET)
    node.apply(enumerated(gpu(1)), enumerated(HALVES, gpu(1)))
    assert {each.reason for each in node.conditions()} == {Reason.GPU_LOST}


# What a change costs


def test_a_fault_of_one_card_leaves_the_shares_of_the_others_the_same_objects() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=Policy(sharing=Sharing.of({GPU: 3})))
    before = node.devices()
    node.apply(xid(48, U1))
    after = node.devices()
    assert [one is other for one, other in zip(before, after, strict=True)] == [True] * 3 + [False] * 3
    assert {device.health for device in after[3:]} == {Health.UNHEALTHY}


def test_a_change_of_one_resource_leaves_the_other_ones_list_the_same_object() -> None:
    node = healthy_node(C1B, gpu(1), policy=MIXED)
    whole, slices = node.devices(GPU), node.devices(SMALL)
    node.apply(xid(48, gi=1, ci=0))
    assert node.devices(GPU) is whole
    assert node.devices(SMALL) is not slices
    node.apply(enumerated(HALVES, gpu(1)))
    assert node.devices(GPU) is whole


def test_an_equal_layout_changes_nothing() -> None:
    node = healthy_node(C1B, gpu(1), policy=MIXED)
    before = node.state
    assert node.apply(enumerated(C1B, gpu(1)), PolicyChanged(MIXED)) == ()
    assert node.state is before
