"""After a reboot: hardware may be another, and what only a person ends waits for its GPU."""

from agent.core.health.state import MAX_AWAITED, initial_state
from agent.model.effects import KeepEvidence
from agent.model.facts import HoldRequested, KernelLogRead, RecoverRequested, UnholdRequested
from agent.model.health import Condition, Health, Reason, Recovery
from agent.model.ids import GpuUuid, Placement
from agent.model.policy import Policy
from agent.model.snapshot import Durable
from agent.model.structs import replace
from tests.core.build import U0, U1, U2, Node, enumerated, gpu, healthy_node, passed, ready, xid


def of_another_boot(kept: Durable) -> Durable:
    """What the state file gives back after a reboot."""
    by_hand = (each for each in kept.conditions if each.recovery is Recovery.BY_HAND)
    return Durable(
        conditions=tuple(replace(each, since_ns=0, last_ns=0) for each in by_hand), holds=kept.holds
    )


def rebooted(*faults: object) -> Node:
    """A node that was rebooted after faults; nothing was seen since."""
    node = healthy_node(gpu(0), gpu(1))
    node.apply(*faults)  # type: ignore[arg-type]
    return Node(Policy(), of_another_boot(node.snapshot().durable))


def arrived(node: Node, *numbers: int) -> Node:
    gpus = [gpu(number) for number in numbers]
    node.apply(ready(), enumerated(*gpus), *(passed(each.uuid) for each in gpus))
    return node


def reasons(node: Node) -> dict[GpuUuid, set[Reason]]:
    found: dict[GpuUuid, set[Reason]] = {}
    for condition in node.state.conditions.values():
        found.setdefault(condition.placement.gpu, set()).add(condition.reason)
    return found


def test_nothing_is_advertised_of_gpus_that_were_not_seen_since_the_reboot() -> None:
    node = rebooted(xid(64, U1))
    assert node.state.gpus == {}
    assert node.snapshot().resources == ()
    assert node.snapshot().gpus == ()


def test_what_a_person_must_end_counts_as_soon_as_its_gpu_is_listed() -> None:
    node = arrived(rebooted(xid(64, U1), xid(79, U0)), 0, 1)
    assert node.health() == {U0: Health.HEALTHY, U1: Health.UNHEALTHY}
    assert node.state.awaited == ()
    (condition,) = node.state.conditions.values()
    assert (condition.since_ns, condition.key.code) == (0, 64)


def test_a_replaced_gpu_leaves_no_device_behind() -> None:
    node = arrived(rebooted(xid(64, U1)), 0, 2)
    assert node.health() == {U0: Health.HEALTHY, U2: Health.HEALTHY}
    assert [len(resource.devices) for resource in node.snapshot().resources] == [2]


def test_it_is_kept_for_as_long_as_its_gpu_stays_away() -> None:
    node = arrived(rebooted(xid(64, U1)), 0)
    again = Node(Policy(), node.snapshot().durable)
    assert arrived(again, 0, 1).health() == {U0: Health.HEALTHY, U1: Health.UNHEALTHY}


def test_how_far_the_kernel_log_was_read_is_kept_for_the_next_process() -> None:
    node = healthy_node(gpu(0))
    assert node.snapshot().durable.kernel_log_read is None
    node.apply(KernelLogRead(7), KernelLogRead(9))
    assert node.snapshot().durable.kernel_log_read == 9
    assert Node(Policy(), node.snapshot().durable).snapshot().durable.kernel_log_read == 9


def test_recover_ends_it_also_while_its_gpu_is_away() -> None:
    node = arrived(rebooted(xid(64, U1)), 0)
    node.apply(RecoverRequested(U1))
    assert node.snapshot().durable.conditions == ()
    assert arrived(node, 0, 1).health()[U1] is Health.HEALTHY


def test_a_hold_survives_the_reboot_and_ends_by_hand() -> None:
    node = arrived(rebooted(HoldRequested(U1, "noisy fan")), 0, 1)
    assert reasons(node) == {U1: {Reason.HELD}}
    node.apply(UnholdRequested(U1))
    assert node.health() == {U0: Health.HEALTHY, U1: Health.HEALTHY}


def test_a_fault_from_before_the_boot_makes_no_new_evidence() -> None:
    node = arrived(rebooted(xid(64, U1)), 0, 1)
    assert not [effect for _, effect in node.effects if isinstance(effect, KeepEvidence)]
    node.apply(xid(79, U1))
    assert [effect.gpu for _, effect in node.effects if isinstance(effect, KeepEvidence)] == [U1]


def test_conditions_that_wait_are_bounded_and_the_newest_stay() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(64))
    (one,) = node.state.conditions.values()
    many = [moved(one, GpuUuid(f"GPU-{number}")) for number in range(MAX_AWAITED + 3)]
    state = initial_state(Policy(), Durable(conditions=tuple(many)), now_ns=1)
    assert state.awaited == tuple(many[3:])


def moved(condition: Condition, to: GpuUuid) -> Condition:
    return replace(condition, key=condition.key._replace(placement=Placement(to)))
