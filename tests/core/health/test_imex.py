"""An IMEX channel that is required: while the node has none, no device of it is advertised Healthy."""

from agent.model.facts import GpusEnumerated, PolicyChanged, RecoverRequested
from agent.model.health import Reason
from agent.model.policy import Injection, Policy
from agent.model.structs import replace
from tests.core.build import U0, U1, Node, S, enumerated, gpu, passed, ready, registered_node, xid

CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
REQUIRED = Policy(injection=Injection(imex_channels=(0,), imex_required=True))
WANTED = Policy(injection=Injection(imex_channels=(0,)))
BOTH = {U0, U1}


def listed(*nodes: str) -> GpusEnumerated:
    return replace(enumerated(gpu(0), gpu(1)), control_nodes=nodes)


def started(policy: Policy, *nodes: str) -> Node:
    node = Node(policy)
    node.apply(ready(), listed(*nodes), passed(U0), passed(U1))
    return node


def test_a_required_channel_that_is_missing_makes_every_device_unhealthy() -> None:
    node = started(REQUIRED, "/dev/nvidiactl")
    assert node.unhealthy() == BOTH
    [finding] = [each for each in node.snapshot().findings if each.reason is Reason.IMEX_CHANNEL_MISSING]
    assert finding.message == f"{CHANNEL} does not exist and is required"
    assert finding.gpus == (U0, U1)


def test_the_first_sight_of_the_channel_counts_at_once_however_late_it_comes() -> None:
    node = started(REQUIRED)
    node.after(3600 * S, listed(CHANNEL))
    assert node.unhealthy() == set()
    assert node.conditions() == []


def test_a_channel_that_goes_and_comes_back_is_believed_after_clean_probes_and_quiet_time() -> None:
    node = started(REQUIRED, CHANNEL)
    node.apply(listed())
    assert node.unhealthy() == BOTH
    node.after(S, listed(CHANNEL))
    assert node.unhealthy() == BOTH
    for _ in range(REQUIRED.recovery_clean_probes):
        node.apply(passed(U0), passed(U1))
    node.after(REQUIRED.recovery_quiet_ns)
    assert node.unhealthy() == set()


def test_a_channel_that_is_only_wanted_keeps_no_device_unhealthy() -> None:
    assert started(WANTED).unhealthy() == set()


def test_a_policy_that_requires_a_channel_counts_at_once_and_so_does_one_that_does_not() -> None:
    node = started(WANTED)
    node.apply(PolicyChanged(REQUIRED))
    assert node.unhealthy() == BOTH
    node.apply(PolicyChanged(WANTED))
    assert node.unhealthy() == set()
    # As at a start: it was not required meanwhile.
    node.apply(PolicyChanged(REQUIRED), listed(CHANNEL))
    assert node.unhealthy() == set()


def test_before_the_nodes_were_read_a_channel_has_no_finding() -> None:
    node = started(WANTED).restarted(after_ns=S)
    node.apply(PolicyChanged(REQUIRED))
    assert node.conditions() == []


def test_after_a_restart_a_missing_channel_is_still_missing_and_its_first_sight_counts_at_once() -> None:
    node = started(REQUIRED).restarted(after_ns=S)
    assert len(node.conditions(Reason.IMEX_CHANNEL_MISSING)) == 2
    node.apply(ready(), listed(CHANNEL), passed(U0), passed(U1))
    assert node.unhealthy() == set()


def test_a_channel_that_is_not_required_after_a_restart_is_not_missed() -> None:
    node = started(REQUIRED)
    assert len(node.conditions()) == 2
    assert Node(WANTED, node.snapshot().durable, at_ns=node.now_ns + S).conditions() == []


def test_a_channel_that_comes_and_goes_is_nobodys_flapping() -> None:
    node = started(replace(REQUIRED, recovery_quiet_ns=0, recovery_clean_probes=1), CHANNEL)
    for _ in range(5):
        node.apply(listed(), listed(CHANNEL), passed(U0), passed(U1))
        assert node.unhealthy() == set()
    assert node.conditions(Reason.FLAPPING) == []


def test_another_fault_outlasts_the_missing_channel_and_recover_cannot_declare_it_there() -> None:
    node = started(REQUIRED)
    node.apply(RecoverRequested(U0), xid(48))
    assert node.unhealthy() == BOTH
    node.apply(listed(CHANNEL))
    assert node.unhealthy() == {U0}
    assert [each.reason for each in node.conditions()] == [Reason.XID]


def test_a_card_that_is_found_later_needs_the_channel_too() -> None:
    node = registered_node(gpu(0), policy=REQUIRED)
    node.apply(listed(), passed(U1))
    assert node.unhealthy() == BOTH
