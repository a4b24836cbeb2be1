"""The effect of a finding: a warning; a certain one makes a free device unhealthy where it is configured."""

import pytest

from agent.core.leaks.findings import AWAITED_NS
from agent.model.effects import EventKind, KeepEvidence
from agent.model.facts import GpuUseSeen, PolicyChanged, RecoverRequested
from agent.model.health import Condition, LeakKind, Reason
from agent.model.ids import Placement
from agent.model.policy import Policy
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    DEFAULT,
    U0,
    U1,
    Node,
    S,
    enumerated,
    fields_of,
    gpu,
    healthy_node,
    mig_uuid,
    passed,
    ready,
)
from tests.core.use import (
    POD_A,
    POD_B,
    allocated,
    found,
    hold,
    kinds,
    memory,
    node,
    orphan,
    pids,
    pods,
    process,
    seen,
)

AT_ONCE = replace(
    DEFAULT.leaks,
    orphaned_client_ns=0,
    pod_gone_ns=0,
    stuck_exit_ns=0,
    foreign_process_ns=0,
    memory_held_ns=0,
    growth_warm_up_ns=0,
)
WARN = replace(DEFAULT, leaks=AT_ONCE, recovery_clean_probes=1, recovery_quiet_ns=0)
FLIP = replace(WARN, leaks=replace(AT_ONCE, effect="unhealthy-when-free"))
HOUR = 3600 * S

ORPHANED = seen(process(8, hold(contexts=0)), orphans=[orphan(7, 8)])
GONE = seen(process(7, pod=POD_A))
STUCK = seen(process(7, hold(contexts=0), exiting_since_ns=1))
CERTAIN = [ORPHANED, GONE, STUCK]

NAMES = ["orphaned_client", "pod_gone", "stuck_exit"]


def node_after(policy: Policy, *facts: object) -> Node:
    on = node(policy)
    on.apply(pods(a=False))
    on.apply(*facts)  # type: ignore[arg-type]
    return on


@pytest.mark.parametrize(("leak", "name"), list(zip(CERTAIN, NAMES, strict=True)), ids=NAMES)
def test_a_certain_leak_makes_a_free_device_unhealthy_where_it_is_configured(
    leak: GpuUseSeen, name: str
) -> None:
    assert node_after(WARN, leak).unhealthy() == set()
    on = node_after(FLIP, leak)
    assert kinds(on) == {(name, U0)}
    assert on.unhealthy() == {U0}


@pytest.mark.parametrize("leak", CERTAIN, ids=NAMES)
def test_what_a_pod_has_stays_until_it_gives_it_back(leak: GpuUseSeen) -> None:
    on = node_after(FLIP, allocated((U0, "ns1/job-b")), leak)
    assert on.unhealthy() == set()
    on.apply(allocated())
    assert on.unhealthy() == {U0}


@pytest.mark.parametrize("leak", CERTAIN, ids=NAMES)
def test_with_unknown_allocations_no_device_becomes_unhealthy(leak: GpuUseSeen) -> None:
    on = healthy_node(gpu(0), policy=FLIP)
    on.apply(pods(a=False), leak)
    assert len(kinds(on)) == 1
    assert on.unhealthy() == set()


@pytest.mark.parametrize("leak", CERTAIN, ids=NAMES)
def test_the_device_is_healthy_again_when_the_leak_is_over(leak: GpuUseSeen) -> None:
    on = node_after(FLIP, leak)
    on.apply(passed())
    assert on.unhealthy() == {U0}
    on.apply(seen())
    assert on.unhealthy() == {U0}
    on.apply(passed())
    assert on.unhealthy() == set()
    assert on.conditions() == []


def growing() -> list[GpuUseSeen]:
    return [seen(process(7, hold(contexts=count), pod=POD_B)) for count in (4, 6, 7)]


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ([allocated((U1, "ns1/job-b")), *growing()], LeakKind.CTX_GROWTH),
        (
            [seen(process(7, hold(contexts=None, fds=fds), pod=POD_B)) for fds in (4, 50, 94)],
            LeakKind.FD_GROWTH,
        ),
        ([seen(process(7))], LeakKind.FOREIGN_PROCESS),
        ([seen(), memory(used=9000)], LeakKind.MEMORY_HELD),
    ],
)
def test_an_uncertain_leak_never_makes_a_device_unhealthy(facts: list[object], kind: LeakKind) -> None:
    everything = frozenset(Reason)
    on = node(replace(FLIP, soft_flips=everything))
    for fact in facts:
        on.apply(fact)  # type: ignore[arg-type]
        on.until(on.now_ns + 31 * S)
    assert found(on, kind)
    assert on.unhealthy() == set()


def test_to_name_the_reason_among_soft_evidence_flips_no_leak() -> None:
    assert node_after(replace(WARN, soft_flips=frozenset({Reason.CONTEXT_LEAK})), GONE).unhealthy() == set()


def test_leaks_on_several_gpus_at_once_make_none_unhealthy_and_are_reported() -> None:
    both = seen(process(7, hold(U0), hold(U1), pod=POD_A))
    on = node_after(FLIP, both)
    assert on.unhealthy() == set()
    messages = [event.message for event in on.events(EventKind.CONDITION)]
    assert "Soft evidence on several GPUs at once flips none of them" in messages
    on.apply(seen(process(7, hold(U1), pod=POD_A)))
    assert on.unhealthy() == {U1}


def test_at_most_one_device_becomes_unhealthy_in_an_hour() -> None:
    on = node_after(FLIP, GONE)
    on.apply(seen(), passed(), passed(U1))
    assert on.unhealthy() == set()
    other = seen(process(9, hold(U1), pod=POD_A))
    on.apply(other)
    assert on.unhealthy() == set()
    at_ns = on.now_ns + HOUR
    while on.now_ns < at_ns - 10 * S:
        on.after(10 * S, other, pods(a=False), allocated())
    assert on.unhealthy() == set()
    on.until(at_ns)
    on.after(0)
    assert on.unhealthy() == {U1}


def test_a_leak_that_is_over_makes_no_device_unhealthy_afterwards() -> None:
    on = node_after(FLIP, allocated((U0, "ns1/job-b")), GONE)
    on.apply(seen())
    on.apply(allocated())
    assert [condition.lasts for condition in on.conditions()] == [False]
    assert on.unhealthy() == set()


def test_only_the_mig_device_that_leaks_becomes_unhealthy_though_another_is_in_use() -> None:
    on = healthy_node(C1B, policy=replace(FLIP, mig_strategy="mixed"))
    small = Placement(U0, 1, 0)
    on.apply(pods(a=False), allocated((mig_uuid(1), "ns1/job-b")))
    on.apply(seen(process(7, hold(slices=(small,)), pod=POD_A)))
    (name,) = on.state.devices
    assert on.unhealthy(name) == {mig_uuid(0)}
    on = healthy_node(C1B, policy=replace(FLIP, mig_strategy="mixed"))
    on.apply(pods(a=False), allocated((mig_uuid(1), "ns1/job-b")), GONE)
    assert on.unhealthy(name) == set()


def test_a_change_to_warn_makes_the_device_healthy_again() -> None:
    on = node_after(FLIP, GONE)
    on.apply(PolicyChanged(WARN))
    assert on.unhealthy() == set()
    assert kinds(on) == {("pod_gone", U0)}
    on.apply(PolicyChanged(replace(FLIP, soft_flip_every_ns=0)))
    assert on.unhealthy() == {U0}


def test_a_leak_is_no_fault_of_the_gpu() -> None:
    """It neither flaps by it, nor is there anything to keep for its maker."""
    on = node(replace(FLIP, soft_flip_every_ns=0))
    for _ in range(5):
        on.apply(pods(a=False), GONE)
        assert on.unhealthy() == {U0}
        on.apply(seen(), passed())
        assert on.unhealthy() == set()
    assert on.conditions(Reason.FLAPPING) == []
    assert not [effect for _, effect in on.effects if isinstance(effect, KeepEvidence)]


def test_an_observing_agent_counts_the_flips_that_it_suppresses() -> None:
    on = node_after(replace(FLIP, observe=True), GONE)
    assert on.state.observed_flips == 1


def test_a_leak_that_flips_is_published_once() -> None:
    on = node_after(FLIP, GONE)
    reasons = [each for each in on.snapshot().findings if each.reason is Reason.CONTEXT_LEAK]
    assert [each.gpus for each in reasons] == [(U0,)]


def test_a_finding_is_in_the_log_once_with_every_process() -> None:
    on = node_after(WARN, ORPHANED)
    on.apply(ORPHANED, ORPHANED)
    (event,) = on.events(EventKind.CONDITION)
    fields = fields_of(event)
    assert (fields["reason"], fields["finding"], fields["contexts"]) == ("context_leak", "orphaned_client", 4)
    assert fields["gpu"] == 0
    on.apply(seen(), passed())
    assert [each.message for each in on.events(EventKind.CONDITION)][1:] == ["A condition was cleared"]


# Restarts of the agent


def restarted(on: Node) -> Node:
    other = on.restarted()
    other.apply(ready(), enumerated(gpu(0), gpu(1)), passed(), passed(U1))
    return other


def flipped(leak: GpuUseSeen) -> Node:
    on = node_after(FLIP, leak)
    assert on.unhealthy() == {U0}
    return on


@pytest.mark.parametrize("leak", CERTAIN, ids=NAMES)
def test_a_restart_ends_no_finding(leak: GpuUseSeen) -> None:
    before = flipped(leak)
    on = restarted(before)
    assert [without_owners(each) for each in found(on)] == [without_owners(each) for each in found(before)]
    for _ in range(5):
        on.after(S, passed(), passed(U1))
    assert on.unhealthy() == {U0}


def without_owners(condition: Condition) -> object:
    """Holders and allocations; the next process of the agent does not need an owner that is gone."""
    assert condition.details is not None
    holders = [each for each in condition.details.involved if each.role == "holder"]
    return condition.key, holders, condition.details.used_bytes


@pytest.mark.parametrize("leak", [GONE, STUCK], ids=NAMES[1:])
def test_a_finding_confirmed_after_a_restart_has_no_new_delay(leak: GpuUseSeen) -> None:
    patient = replace(FLIP, leaks=replace(FLIP.leaks, pod_gone_ns=60 * S, stuck_exit_ns=10**6 * S))
    on = flipped(leak)
    on.apply(PolicyChanged(patient))
    on = restarted(on)
    on.apply(allocated(), pods(a=False), leak, passed(), passed())
    assert on.unhealthy() == {U0}
    on.apply(seen(), passed())
    assert on.unhealthy() == set()


def test_an_orphan_of_which_the_new_probe_knows_nothing_lasts_with_its_holder() -> None:
    on = restarted(flipped(ORPHANED))
    on.apply(allocated(), pods(), seen(process(8, hold(contexts=0), partial=True)), passed(), passed())
    assert on.unhealthy() == {U0}
    assert pids(found(on)[0]) == [8]
    on.apply(seen(process(8, hold(contexts=0), start=9000)), passed())
    assert on.unhealthy() == set()


def test_an_operator_can_clear_a_finding_of_an_earlier_agent() -> None:
    on = restarted(flipped(ORPHANED))
    on.apply(allocated(), pods(), seen(process(8, hold(contexts=0), partial=True)), RecoverRequested(U0))
    on.apply(passed())
    assert on.unhealthy() == set()


def test_an_operator_clears_a_finding_on_one_gpu_alone() -> None:
    on = restarted(flipped(ORPHANED))
    holder = seen(process(8, hold(contexts=0), partial=True))
    on.apply(allocated(), pods(), holder, RecoverRequested(U1), passed())
    assert kinds(on) == {("orphaned_client", U0)}
    on.apply(RecoverRequested(U0), holder)
    assert kinds(on) == set()


def test_a_finding_of_an_earlier_agent_is_cleared_when_usage_is_no_longer_read() -> None:
    on = restarted(flipped(GONE))
    begun_ns = on.now_ns
    on.until(begun_ns + AWAITED_NS - 1)
    on.apply(passed())
    assert on.unhealthy() == {U0}
    on.until(begun_ns + AWAITED_NS)
    on.after(0)
    on.apply(passed())
    assert on.unhealthy() == set()


def test_a_finding_of_an_earlier_agent_is_cleared_at_once_when_the_watch_is_disabled() -> None:
    on = restarted(flipped(GONE))
    on.apply(PolicyChanged(replace(FLIP, leaks=replace(FLIP.leaks, is_watched=False))), passed())
    assert kinds(on) == set()
    assert on.unhealthy() == set()


def test_unclaimed_memory_lasts_over_a_restart() -> None:
    on = node_after(WARN, seen(), memory(used=9000))
    on.apply(PolicyChanged(replace(WARN, leaks=replace(AT_ONCE, memory_held_ns=300 * S))))
    on = restarted(on)
    on.apply(allocated(), pods(), seen(), memory(used=9000), passed())
    assert kinds(on) == {("memory_held_no_process", U0)}
    on.apply(memory(used=3), passed())
    assert kinds(on) == set()
