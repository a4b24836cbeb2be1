"""The MPS control daemon: what is shared by it is unhealthy while it is not ready, and nothing else is."""

from agent.model.effects import KeepEvidence
from agent.model.facts import AllocationsListed, MpsSeen, PolicyChanged, RecoverRequested
from agent.model.health import Health, Reason
from agent.model.policy import Policy
from agent.model.sharing import Share, Sharing
from agent.model.structs import replace
from tests.core.build import (
    GPU,
    U0,
    U1,
    Node,
    S,
    enumerated,
    gpu,
    healthy_node,
    passed,
    ready,
    registered_node,
    xid,
)

BY_MPS = Policy(sharing=Sharing("mps", (Share(GPU, 2, gpus=(U0,)),)))
"""One card is shared by MPS, the other one is not shared."""
QUIET_NS = BY_MPS.recovery_quiet_ns

AWAY = MpsSeen(ready=False, message="The MPS control daemon is not ready: /mps/.ready does not exist")
THERE = MpsSeen(ready=True)

SHARES = {f"{U0}::0", f"{U0}::1"}


def serving_node() -> Node:
    node = registered_node(gpu(0), gpu(1), policy=BY_MPS)
    node.apply(THERE)
    assert node.unhealthy() == set()
    node.forget_effects()
    return node


def polls(node: Node, times: int) -> None:
    for _ in range(times):
        node.apply(passed(U0), passed(U1))


def test_nothing_shared_is_advertised_healthy_before_the_daemon_was_probed() -> None:
    node = Node(BY_MPS)
    node.apply(ready(), enumerated(gpu(0), gpu(1)), passed(U0), passed(U1))
    assert node.unhealthy() == SHARES
    (condition,) = node.conditions()
    assert (condition.reason, condition.placement.gpu) == (Reason.MPS_NOT_READY, U0)
    assert "not probed yet" in condition.message


def test_the_first_readiness_counts_at_once_however_late_it_comes() -> None:
    node = registered_node(gpu(0), gpu(1), policy=BY_MPS)
    node.apply(AWAY)
    assert node.unhealthy() == SHARES
    assert AWAY.message in {each.message for each in node.snapshot().findings}
    node.after(3600 * S, THERE)
    assert node.unhealthy() == set()
    assert node.conditions() == []
    assert node.snapshot().ready


def test_a_daemon_that_goes_makes_exactly_what_it_shares_unhealthy() -> None:
    node = serving_node()
    node.apply(AWAY)
    assert node.unhealthy() == SHARES
    assert node.health()[U1] is Health.HEALTHY
    (device, _, _) = node.devices()
    assert [each.reason for each in device.reasons] == [Reason.MPS_NOT_READY]


def test_a_daemon_that_is_back_is_believed_after_clean_probes_and_quiet_time() -> None:
    node = serving_node()
    node.apply(AWAY)
    polls(node, 5)
    node.after(S, THERE)
    assert node.unhealthy() == SHARES
    since_ns = node.now_ns
    polls(node, 3)
    node.until(since_ns + QUIET_NS - 1)
    assert node.unhealthy() == SHARES
    node.after(1)
    assert node.unhealthy() == set()


def test_a_daemon_that_comes_and_goes_is_nobodys_flapping_and_no_evidence() -> None:
    node = registered_node(
        gpu(0), gpu(1), policy=replace(BY_MPS, recovery_quiet_ns=0, recovery_clean_probes=1)
    )
    node.apply(THERE)
    for _ in range(5):
        node.apply(AWAY, THERE, passed(U0))
        assert node.unhealthy() == set()
    assert node.conditions(Reason.FLAPPING) == []
    assert not any(isinstance(effect, KeepEvidence) for _, effect in node.effects)


def test_another_fault_of_the_card_outlasts_the_daemons_absence() -> None:
    node = registered_node(gpu(0), gpu(1), policy=BY_MPS)
    node.apply(AWAY, xid(48), THERE)
    assert node.unhealthy() == SHARES
    assert [each.reason for each in node.conditions()] == [Reason.XID]


def test_recover_cannot_declare_a_missing_daemon_there() -> None:
    node = serving_node()
    node.apply(AWAY, RecoverRequested(U0))
    assert node.unhealthy() == SHARES


def test_a_policy_without_mps_needs_no_daemon_and_one_with_it_does_at_once() -> None:
    node = serving_node()
    node.apply(AWAY)
    plain = replace(BY_MPS, sharing=replace(BY_MPS.sharing, strategy="time-slicing"))
    node.apply(PolicyChanged(plain))
    assert node.unhealthy() == set()
    assert node.conditions() == []
    node.apply(PolicyChanged(BY_MPS))
    assert node.unhealthy() == SHARES
    # As at a start: it was not needed meanwhile.
    node.apply(THERE)
    assert node.unhealthy() == set()
    node.apply(PolicyChanged(plain), PolicyChanged(BY_MPS))
    assert node.unhealthy() == set()


def test_what_is_not_shared_by_mps_does_not_depend_on_the_daemon() -> None:
    node = healthy_node(gpu(0))
    node.apply(AWAY)
    assert node.conditions() == []
    assert node.unhealthy() == set()


def test_a_card_that_is_found_later_needs_the_daemon_too() -> None:
    policy = Policy(sharing=Sharing("mps", (Share(GPU, 2),)))
    node = healthy_node(gpu(0), policy=policy)
    node.apply(THERE)
    node.apply(enumerated(gpu(0), gpu(1)), passed(U1))
    assert node.unhealthy() == set()
    node.apply(AWAY)
    assert len(node.unhealthy()) == 4
    assert len(node.conditions(Reason.MPS_NOT_READY)) == 2


def test_every_card_comes_back_with_the_daemon() -> None:
    policy = Policy(sharing=Sharing("mps", (Share(GPU, 2),)), recovery_quiet_ns=0)
    node = registered_node(gpu(0), gpu(1), policy=policy)
    node.apply(THERE, AWAY, THERE)
    assert len(node.unhealthy()) == 4
    polls(node, 3)
    assert node.unhealthy() == set()


def test_after_a_restart_the_daemon_is_probed_anew() -> None:
    node = serving_node()
    again = node.restarted(after_ns=S)
    again.apply(passed(U0), passed(U1))
    assert again.unhealthy() == SHARES
    again.apply(enumerated(gpu(0), gpu(1)), THERE, passed(U0), passed(U1))
    assert again.unhealthy() == set()


def test_what_was_unhealthy_for_the_daemon_before_a_restart_recovers_with_it() -> None:
    node = serving_node()
    node.apply(AWAY)
    again = node.restarted(after_ns=S)
    again.apply(ready(), enumerated(gpu(0), gpu(1)), passed(U0), passed(U1), AllocationsListed({}))
    assert again.unhealthy() == SHARES
    again.apply(THERE)
    assert again.unhealthy() == set()
