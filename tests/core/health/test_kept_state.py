"""What an earlier process kept: of many GPUs, lost, and read late."""

import pytest

from agent.core.health.driver import MAX_GPUS
from agent.model import facts
from agent.model.effects import EventKind
from agent.model.health import Health, Reason
from agent.model.snapshot import Durable
from agent.model.structs import replace
from agent.sinks.statefile import MAX_BYTES
from agent.sinks.statefile_format import encoded
from tests.core.build import MS, U0, U1, Node, enumerated, gpu, healthy_node, passed, ready, xid


def test_gpus_whose_uuids_change_at_each_poll_are_bounded_and_what_a_person_must_end_waits() -> None:
    node = Node()
    node.apply(ready(), enumerated(*(gpu(number) for number in range(8))))
    node.apply(xid(64), facts.HoldRequested(U1, "fan"))
    for poll in range(1, 1_500):
        node.after(MS, enumerated(*(replace(gpu(8 * poll + each), index=each) for each in range(8))))
        assert len(node.state.gpus) <= MAX_GPUS
        assert node.state.present <= node.state.gpus.keys()
    known = node.state.gpus.keys()
    assert {key.placement.gpu for key in node.state.conditions} <= known
    assert node.state.probed <= known
    assert len(encoded(node.snapshot().durable, boot_id="b")) < MAX_BYTES // 4
    forgotten = [each for each in node.events(EventKind.GPUS) if "were forgotten" in each.message]
    assert sum(int(str((each.fields or {})["count"])) for each in forgotten) == 8 * 1_500 - MAX_GPUS

    node.apply(enumerated(gpu(0), gpu(1)), passed(), passed(U1))
    assert {U0, U1} <= {view.gpu.uuid for view in node.snapshot().gpus if view.health is Health.UNHEALTHY}
    assert {each.key.code for each in node.conditions(Reason.XID)} == {64}


def test_more_gpus_than_are_kept_may_be_listed() -> None:
    node = Node()
    node.apply(ready(), enumerated(*(gpu(number) for number in range(MAX_GPUS + 5))))
    assert len(node.state.gpus) == MAX_GPUS + 5


def test_a_lost_state_is_a_finding_over_restarts_until_it_is_acknowledged() -> None:
    node = Node(restored=Durable(lost="state.json is damaged")).restarted()
    (finding,) = [each for each in node.snapshot().findings if each.reason is Reason.STATE_LOST]
    assert "state.json is damaged" in finding.message
    node.apply(facts.StateLossAcknowledged())
    assert [event.message for event in node.events()] == ["An operator acknowledged that the state is lost"]
    assert not [each for each in node.restarted().snapshot().findings if each.reason is Reason.STATE_LOST]


@pytest.mark.parametrize("before", [True, False], ids=["before its GPU was listed", "after"])
def test_what_is_read_late_counts_from_then_on(*, before: bool) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), facts.HoldRequested(U1, "fan"))
    kept = node.snapshot().durable
    node = Node() if before else healthy_node(gpu(0), gpu(1))
    node.apply(facts.StateUnread("Input/output error"))
    assert Reason.STATE_LOST in {each.reason for each in node.snapshot().findings}
    node.apply(facts.StateRestored(kept))
    assert Reason.STATE_LOST not in {each.reason for each in node.snapshot().findings}
    assert {condition.reason for condition in node.conditions()} == {Reason.XID, Reason.HELD}
    assert {U0, U1} <= node.unhealthy()
    assert set(kept.conditions) <= set(node.snapshot().durable.conditions)
