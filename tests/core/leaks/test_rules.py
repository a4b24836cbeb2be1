"""Each kind of finding: when it begins, when it ends, and what keeps it from being found."""

import pytest

from agent.core.health.leak_conditions import USAGE_KNOWN_FOR_NS
from agent.core.leaks.findings import MAX_PENDING
from agent.model.facts import GpuMemorySeen, PodsSeen, RecoverRequested
from agent.model.health import MAX_INVOLVED, Condition, Details, LeakKind, Reason
from agent.model.ids import Placement
from agent.model.policy import Policy
from agent.model.structs import replace
from agent.model.usage import GONE, GpuTotal, PodUid
from tests.core.build import C1B, DEFAULT, U0, U1, Node, S, enumerated, gpu, healthy_node, mig_uuid, passed
from tests.core.use import (
    BOTH,
    MIB,
    POD_A,
    POD_B,
    A,
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
    repeat_facts,
    seen,
    user,
    with_leaks,
)

GIVEN_A = allocated((U0, "ns1/job-a"))
MINUTE = 60 * S


def details(condition: Condition) -> Details:
    assert condition.details is not None
    return condition.details


def only(on: Node, kind: LeakKind) -> Details:
    (condition,) = found(on, kind)
    return details(condition)


def lasts_for(on: Node, kind: LeakKind, for_ns: int, *facts: object) -> None:
    """Check that facts make a finding after that time, and not a nanosecond sooner."""
    begin_ns = on.now_ns
    repeat_facts(on, for_ns - 1, *facts)  # type: ignore[arg-type]
    assert on.now_ns == begin_ns + for_ns - 1
    assert found(on, kind) == []
    on.until(begin_ns + for_ns)
    on.after(0)
    assert len(found(on, kind)) == 1


# Orphaned clients


def test_contexts_of_a_dead_owner_are_found_after_their_time() -> None:
    on = node()
    left = seen(process(8, pod=POD_B), orphans=[orphan(7, 8, ended_ns=on.now_ns)])
    lasts_for(on, LeakKind.ORPHANED_CLIENT, 30 * S, left, pods())
    finding = only(on, LeakKind.ORPHANED_CLIENT)
    assert finding.contexts == 4
    assert [
        (each.pid, each.comm, each.role, each.state, each.killable, each.contexts)
        for each in finding.involved
    ] == [
        (7, "train", "owner", GONE, False, 4),
        (8, "python3", "holder", "S", True, 1),
    ]
    assert [each.pod for each in finding.involved] == ["ns1/job-a", "ns1/job-b"]


def test_the_time_of_an_orphan_counts_from_the_end_of_its_owner() -> None:
    on = node()
    on.apply(seen(process(8), orphans=[orphan(7, 8, ended_ns=on.now_ns - 29 * S)]))
    assert found(on, LeakKind.ORPHANED_CLIENT) == []
    on.after(S)
    assert len(found(on, LeakKind.ORPHANED_CLIENT)) == 1


def test_an_orphan_without_holders_is_reported_after_its_time() -> None:
    on = node()
    left = seen(orphans=[orphan(7, ended_ns=on.now_ns)])
    lasts_for(on, LeakKind.ORPHANED_CLIENT, 30 * S, left)
    (condition,) = found(on, LeakKind.ORPHANED_CLIENT)
    assert condition.message == "4 contexts of a process that ended are in files that no process has open"
    on.apply(seen())
    assert kinds(on) == set()


def test_an_orphan_ends_with_its_last_holder() -> None:
    on = node()
    on.apply(seen(process(8), orphans=[orphan(7, 8, ended_ns=0)]))
    assert kinds(on) == {("orphaned_client", U0)}
    on.apply(seen())
    assert kinds(on) == set()


@pytest.mark.parametrize("names", [("dcgm-exporter",), ("nv-hostengine", "nvidia-persistenced")])
def test_an_orphan_that_only_services_hold_is_no_finding(names: tuple[str, ...]) -> None:
    on = node()
    services = [process(8 + place, service=name) for place, name in enumerate(names)]
    left = orphan(7, *(each.key.pid for each in services), ended_ns=0)
    on.apply(seen(*services, orphans=[left]))
    assert kinds(on) == set()
    on.apply(seen(*services, process(20), orphans=[replace(left, holders=(*left.holders, process(20).key))]))
    assert kinds(on) == {("orphaned_client", U0)}


def test_orphans_of_two_owners_are_one_finding_with_the_memory_of_their_holder() -> None:
    on = node()
    on.apply(
        memory(user(8, 70)), seen(process(8), orphans=[orphan(6, 8, ended_ns=0), orphan(7, 8, ended_ns=0)])
    )
    finding = only(on, LeakKind.ORPHANED_CLIENT)
    assert [each.pid for each in finding.involved] == [6, 7, 8]
    assert finding.contexts == 8
    on.apply(seen(process(8), orphans=[orphan(6, 8, ended_ns=0)]))
    finding = only(on, LeakKind.ORPHANED_CLIENT)
    assert (finding.contexts, finding.used_bytes) == (4, 70 * MIB)


def test_an_orphan_of_unknown_contexts_makes_no_finding_and_ends_none() -> None:
    on = node()
    unknown = seen(process(8), orphans=[orphan(7, 8, contexts=None, ended_ns=0)])
    on.apply(unknown)
    assert kinds(on) == set()
    on.apply(seen(process(8), orphans=[orphan(7, 8, ended_ns=0)]), unknown)
    assert kinds(on) == {("orphaned_client", U0)}


def test_an_orphan_on_an_unknown_gpu_is_reported_for_the_node() -> None:
    on = node()
    on.apply(seen(process(8), orphans=[orphan(7, 8, on=None, ended_ns=0)]))
    assert found(on) == []
    (finding,) = [each for each in on.snapshot().findings if each.reason is Reason.CONTEXT_LEAK]
    assert (finding.gpus, finding.message) == ((), "4 contexts of a process that ended are kept by 1 process")


# Pods that are gone


@pytest.mark.parametrize("gone", [pods(a=False), PodsSeen({POD_B: BOTH[POD_B]})], ids=["ended", "unknown"])
def test_a_process_whose_pod_is_gone_is_found_after_its_time(gone: PodsSeen) -> None:
    on = node()
    lasts_for(on, LeakKind.POD_GONE, MINUTE, seen(process(7, pod=POD_A)), gone, allocated())
    assert kinds(on) == {("pod_gone", U0)}


def test_to_hold_a_gpu_of_a_dead_pod_is_enough() -> None:
    on = node(with_leaks(pod_gone_ns=0))
    on.apply(pods(a=False), seen(process(7, hold(contexts=0), pod=POD_A)))
    assert kinds(on) == {("pod_gone", U0)}


def test_a_pod_that_comes_into_the_list_late_is_not_gone() -> None:
    on = node()
    late = PodUid("cccccccc-0000-4000-8000-000000000000")
    repeat_facts(on, 59 * S, seen(process(7, pod=late)), pods(), allocated((U0, "ns1/late")))
    known = PodsSeen({**BOTH, late: replace(BOTH[POD_A], name="late")})
    repeat_facts(on, 2 * MINUTE, seen(process(7, pod=late)), known, allocated((U0, "ns1/late")))
    assert on.conditions() == []
    repeat_facts(on, 59 * S, seen(process(7, pod=late)), pods(), allocated())
    assert found(on) == []


def test_a_stale_list_of_pods_makes_no_finding() -> None:
    on = node()
    on.apply(seen(process(7, pod=POD_A)), pods(a=False))
    repeat_facts(on, 3 * MINUTE, seen(process(7, pod=POD_A)))
    assert found(on) == []
    on.apply(pods(a=False))
    assert kinds(on) == {("pod_gone", U0)}


def test_a_list_of_pods_that_grows_old_ends_nothing() -> None:
    on = node(with_leaks(pod_gone_ns=0))
    on.apply(seen(process(7, pod=POD_A)), pods(a=False))
    repeat_facts(on, 3 * MINUTE, seen(process(7, pod=POD_A)))
    assert kinds(on) == {("pod_gone", U0)}
    on.apply(pods())
    assert kinds(on) == set()


def test_where_only_pods_with_devices_are_known_another_may_live() -> None:
    on = node(with_leaks(pod_gone_ns=0))
    unknown = PodUid("dddddddd-0000-4000-8000-000000000000")
    with_devices = PodsSeen({POD_B: BOTH[POD_B]}, complete=False)
    on.apply(seen(process(8, pod=POD_A)), with_devices)
    on.apply(seen(process(7, pod=unknown), process(8, pod=POD_A)))
    assert kinds(on) == set()
    on.apply(PodsSeen({POD_B: BOTH[POD_B]}))
    assert kinds(on) == {("pod_gone", U0)}


def test_services_make_no_finding_but_processes_with_their_name_do() -> None:
    on = node(with_leaks(pod_gone_ns=0, foreign_process_ns=0, stuck_exit_ns=0))
    on.apply(pods(a=False), seen(process(9, service="nv-hostengine", exiting_since_ns=1)))
    assert kinds(on) == set()
    on.apply(seen(process(9, comm="nv-hostengine", exiting_since_ns=1)))
    assert kinds(on) == {("foreign_process", U0), ("stuck_exit", U0)}
    on.apply(seen(process(7, pod=POD_A, comm="nv-hostengine", exiting_since_ns=1)))
    assert kinds(on) == {("pod_gone", U0), ("stuck_exit", U0)}


def test_the_agent_itself_makes_no_finding() -> None:
    on = node(with_leaks(foreign_process_ns=0, stuck_exit_ns=0))
    on.apply(seen(process(7, is_agent=True, exiting_since_ns=1)))
    assert kinds(on) == set()


def test_a_name_of_ones_own_can_be_allowed() -> None:
    on = node(with_leaks(foreign_process_ns=0, allowed=frozenset({"my-very-long-monitor-name"})))
    on.apply(
        seen(process(7, service="my-very-long-monitor-name"), process(8, hold(U1), service="nv-hostengine"))
    )
    assert kinds(on) == {("foreign_process", U1)}


def test_a_pod_that_has_no_device_any_more_is_gone_where_only_those_with_devices_are_known() -> None:
    on = node(with_leaks(pod_gone_ns=0))
    on.apply(seen(process(7, pod=POD_A)), PodsSeen(BOTH, complete=False))
    on.apply(PodsSeen({POD_B: BOTH[POD_B]}, complete=False))
    assert kinds(on) == {("pod_gone", U0)}


def test_a_process_that_is_gone_is_found_no_more_whatever_is_known_of_pods() -> None:
    on = node(with_leaks(pod_gone_ns=0))
    on.apply(seen(process(7, pod=POD_A)), pods(a=False))
    on.after(MINUTE)
    on.apply(seen())
    assert kinds(on) == set()


# Exits that do not end


def test_a_process_that_cannot_exit_is_found_after_its_time() -> None:
    on = node()
    began_ns = on.now_ns
    stuck = seen(process(7, pod=POD_A, state="D", exiting_since_ns=began_ns))
    lasts_for(on, LeakKind.STUCK_EXIT, MINUTE, stuck, GIVEN_A, pods())
    (involved,) = only(on, LeakKind.STUCK_EXIT).involved
    assert (involved.state, involved.killable) == ("D", False)
    on.apply(seen())
    assert kinds(on) == set()


def test_a_process_that_only_sleeps_in_the_driver_is_not_exiting() -> None:
    on = node()
    repeat_facts(on, 3 * MINUTE, seen(process(7, pod=POD_A, state="D")), GIVEN_A, pods())
    assert found(on) == []


def test_a_stuck_exit_that_holds_no_gpu_is_reported_for_the_node() -> None:
    on = node(with_leaks(stuck_exit_ns=0))
    on.apply(seen(replace(process(7, exiting_since_ns=1), holds=())))
    assert [each.reason for each in on.snapshot().findings][:1] == [Reason.CONTEXT_LEAK]


# Processes where they should not be


def test_a_process_of_the_host_on_a_gpu_is_foreign_after_its_time() -> None:
    on = node()
    lasts_for(on, LeakKind.FOREIGN_PROCESS, MINUTE, seen(process(7)), pods(), allocated())
    (involved,) = only(on, LeakKind.FOREIGN_PROCESS).involved
    assert (involved.owner, involved.pod) == ("host", None)


def foreign_at_once(policy: Policy = DEFAULT) -> Policy:
    return replace(policy, leaks=replace(policy.leaks, foreign_process_ns=0))


def test_a_process_on_the_gpu_of_its_pod_is_not_foreign() -> None:
    on = node(foreign_at_once())
    on.apply(GIVEN_A, seen(process(7, pod=POD_A)))
    assert kinds(on) == set()
    on.apply(seen(process(7, hold(U0), hold(U1), pod=POD_A)))
    assert kinds(on) == {("foreign_process", U1)}


def test_a_process_that_has_every_gpu_open_and_uses_none_is_not_foreign() -> None:
    """So does nvidia-smi, and every monitor."""
    on = node(foreign_at_once())
    on.apply(seen(process(7, hold(U0, 0), hold(U1, 0))))
    assert kinds(on) == set()
    on.apply(memory(user(7, 5), on=U1))
    assert kinds(on) == {("foreign_process", U1)}


def test_where_the_use_of_a_gpu_is_unknown_there_is_no_finding() -> None:
    on = node(foreign_at_once())
    holds_only = seen(process(7, hold(U0, None)), source="proc")
    on.apply(memory(info="unsupported"), holds_only)
    assert kinds(on) == set()
    on.apply(memory(user(7, None)))
    assert kinds(on) == {("foreign_process", U0)}
    on.apply(memory(info="unreliable"))
    assert kinds(on) == {("foreign_process", U0)}
    on.apply(memory())
    assert kinds(on) == set()


def test_without_a_list_of_allocations_no_process_is_foreign() -> None:
    on = healthy_node(gpu(0), policy=foreign_at_once())
    on.apply(pods(), seen(process(7)))
    assert kinds(on) == set()
    on.apply(allocated())
    assert kinds(on) == {("foreign_process", U0)}


def test_without_a_list_of_pods_only_a_process_of_the_host_is_foreign() -> None:
    on = healthy_node(gpu(0), policy=foreign_at_once())
    on.apply(allocated(), seen(process(7, pod=POD_A), process(8)))
    assert pids(found(on)[0]) == [8]


def test_of_a_pod_that_is_gone_it_is_another_finding() -> None:
    on = node(with_leaks(foreign_process_ns=0, pod_gone_ns=0))
    on.apply(pods(a=False), seen(process(7, pod=POD_A)))
    assert kinds(on) == {("pod_gone", U0)}


def test_a_server_for_others_is_not_foreign() -> None:
    on = node(foreign_at_once())
    on.apply(seen(process(7, service="nvidia-cuda-mps-server")))
    assert kinds(on) == set()


def mig_node() -> Node:
    on = healthy_node(C1B, policy=replace(foreign_at_once(), mig_strategy="mixed"))
    on.apply(allocated((mig_uuid(0), "ns1/job-a")), pods())
    return on


def test_a_process_on_another_mig_device_than_its_own_is_foreign_there() -> None:
    on = mig_node()
    on.apply(seen(process(7, hold(slices=(Placement(U0, 1, 0),)), pod=POD_A)))
    assert found(on) == []
    on.apply(seen(process(7, hold(slices=(Placement(U0, 2, 0),)), pod=POD_A)))
    assert [each.placement for each in found(on)] == [Placement(U0, 2, 0)]


def test_where_the_mig_device_is_unknown_any_of_the_gpu_counts() -> None:
    on = mig_node()
    on.apply(seen(process(7, pod=POD_A)))
    assert found(on) == []
    on.apply(memory(user(7, 5, 3, 0)))
    assert [each.placement for each in found(on)] == [Placement(U0, 3, 0)]


# Unclaimed memory

LIMIT = 512


def held_node(**settings: object) -> Node:
    return node(with_leaks(**{"memory_held_ns": 0, **settings}))


def test_unclaimed_memory_is_found_after_its_time() -> None:
    on = node()
    big = memory(used=4000)
    lasts_for(on, LeakKind.MEMORY_HELD, 5 * MINUTE, seen(), big)
    assert only(on, LeakKind.MEMORY_HELD).used_bytes == 4000 * MIB
    (condition,) = found(on)
    assert condition.message == "4000 MiB of memory are used and no process has them"


@pytest.mark.parametrize(
    ("total", "at_most"),
    [(80 * 1024, 1638), (16 * 1024, 512), (25600, 512), (25650, 513)],
)
def test_a_little_memory_is_the_drivers_own(total: int, at_most: int) -> None:
    """512 MiB or two percent of the GPU, whichever is more."""
    on = held_node()
    on.apply(seen(), memory(used=at_most, total=total))
    assert kinds(on) == set()
    on.apply(memory(used=at_most + 1, total=total))
    assert kinds(on) == {("memory_held_no_process", U0)}


def test_memory_that_processes_have_is_not_counted() -> None:
    on = held_node(foreign_process_ns=3600 * S)
    service = process(7, hold(contexts=0), service="nv-hostengine")
    on.apply(seen(service), memory(user(7, 4000), used=4000 + LIMIT, total=1024))
    assert kinds(on) == set()
    on.apply(memory(user(7, 4000), used=4001 + LIMIT, total=1024))
    assert only(on, LeakKind.MEMORY_HELD).used_bytes == (LIMIT + 1) * MIB


@pytest.mark.parametrize("used", [4000, None])
def test_memory_of_a_process_that_only_nvml_lists_is_its_own(used: int | None) -> None:
    on = held_node()
    on.apply(seen(), memory(user(505, used), used=4000))
    assert kinds(on) == set()


@pytest.mark.parametrize(
    ("holder", "may_have_it"),
    [
        (process(7, hold(contexts=1)), True),
        (process(7, hold(contexts=0)), False),
        (process(7, hold(contexts=0), partial=True), True),
        (process(7, hold(contexts=None)), True),
        (process(7, hold(U1, contexts=1)), False),
    ],
)
def test_memory_of_a_gpu_with_a_possible_user_may_be_its_own(holder: object, *, may_have_it: bool) -> None:
    on = held_node(foreign_process_ns=3600 * S)
    on.apply(memory(used=4000), seen(holder))  # type: ignore[arg-type]
    assert kinds(on) == (set() if may_have_it else {("memory_held_no_process", U0)})


@pytest.mark.parametrize("where", [U0, None])
def test_memory_of_orphans_is_their_own(where: object) -> None:
    on = held_node(orphaned_client_ns=3600 * S)
    left = orphan(7, 8, on=where, ended_ns=on.now_ns)  # type: ignore[arg-type]
    on.apply(memory(used=4000), seen(process(8, hold(contexts=0)), orphans=[left]))
    assert kinds(on) == set()


def test_unknown_memory_makes_no_finding_and_ends_none() -> None:
    on = held_node()
    on.apply(memory(used=4000), seen(complete=False))
    assert kinds(on) == set()
    on.apply(seen())
    assert kinds(on) == {("memory_held_no_process", U0)}
    on.apply(GpuMemorySeen(U0, replace(memory(used=4000).memory, used_bytes=None)))
    on.apply(seen(complete=False), memory(used=3, info="unreliable"))
    on.apply(seen())
    assert kinds(on) == {("memory_held_no_process", U0)}
    on.apply(memory(used=3))
    assert kinds(on) == set()


def test_a_doubted_gpu_does_not_keep_others_from_evaluation() -> None:
    on = held_node(idle_ns=0)
    on.apply(memory(used=4000), memory(on=U1, used=4000), allocated((U0, "ns1/a"), (U1, "ns1/b")), pods())
    on.apply(seen(doubted=[U0]))
    assert kinds(on) == {("memory_held_no_process", U1), ("allocated_idle", U1)}
    on.apply(seen(doubted=[U1]))
    assert kinds(on) == {
        (kind, gpu) for kind in ("memory_held_no_process", "allocated_idle") for gpu in (U0, U1)
    }
    on.apply(seen(process(8, hold(on=U0), hold(on=U1)), doubted=[U0]))
    assert kinds(on) & {("memory_held_no_process", U0), ("allocated_idle", U0)}
    assert not kinds(on) & {("memory_held_no_process", U1), ("allocated_idle", U1)}


def test_memory_of_a_gpu_that_is_gone_is_not_evaluated() -> None:
    on = held_node()
    on.apply(memory(used=4000, on=U1), seen())
    assert kinds(on) == {("memory_held_no_process", U1)}
    on.apply(enumerated(gpu(0)))
    assert kinds(on) == set()


# For information


def test_a_device_that_no_process_opened_for_long_is_reported() -> None:
    on = node()
    lasts_for(on, LeakKind.IDLE, 3600 * S, seen(), GIVEN_A, pods())
    (condition,) = found(on)
    assert (condition.reason, condition.message) == (
        Reason.ALLOCATED_IDLE,
        "A pod has it and no process opened it for 60 min",
    )
    on.apply(seen(process(7, hold(contexts=0), pod=POD_A)))
    assert kinds(on) == set()


def test_what_shows_that_a_device_is_not_idle() -> None:
    on = node(with_leaks(idle_ns=0))
    on.apply(GIVEN_A, seen())
    assert kinds(on) == {("allocated_idle", U0)}
    on.apply(memory(user(7, 1)))
    assert kinds(on) == set()
    on.apply(memory(), seen(process(8, hold(U1, 0)), orphans=[orphan(7, 8)]))
    assert kinds(on) == set()
    on.apply(seen(process(9, hold(), service="nv-hostengine")))
    assert kinds(on) == {("allocated_idle", U0)}
    on.apply(allocated())
    assert kinds(on) == set()


def test_an_idle_mig_device_is_reported_alone() -> None:
    on = healthy_node(C1B, policy=replace(with_leaks(idle_ns=0), mig_strategy="mixed"))
    on.apply(allocated((mig_uuid(0), "ns1/job-a"), (mig_uuid(1), "ns1/job-b")), pods())
    on.apply(seen(process(7, hold(slices=(Placement(U0, 1, 0),)), pod=POD_A)))
    assert [each.placement for each in found(on)] == [Placement(U0, 2, 0)]


def test_very_many_contexts_are_reported() -> None:
    on = node()
    on.apply(seen(totals=(GpuTotal(U0, 3, 100), GpuTotal(U1, 3, None))))
    assert kinds(on) == set()
    on.apply(seen(totals=(GpuTotal(U0, 3, 101), GpuTotal(U1, 3, None))))
    assert only(on, LeakKind.MANY_CONTEXTS).contexts == 101


def test_information_keeps_no_node_from_work() -> None:
    on = node(with_leaks(idle_ns=0))
    on.apply(GIVEN_A, seen(totals=(GpuTotal(U0, 3, 101),)))
    assert len(kinds(on)) == 2
    assert {each.reason for each in on.snapshot().findings} == {Reason.KUBELET_UNAVAILABLE}


# How findings are reported


def test_findings_of_one_kind_on_one_gpu_are_one_condition() -> None:
    on = node(foreign_at_once())
    on.apply(seen(process(9), process(7), process(8, hold(U1))), memory(user(7, 5), user(9, 6)))
    by_gpu = {each.placement.gpu: details(each) for each in found(on)}
    assert [each.pid for each in by_gpu[U0].involved] == [7, 9]
    assert (by_gpu[U0].used_bytes, by_gpu[U0].contexts) == (11 * MIB, 2)
    assert (by_gpu[U1].used_bytes, by_gpu[U1].contexts) == (None, 1)


def test_at_most_so_many_processes_are_named() -> None:
    on = node(foreign_at_once())
    on.apply(seen(*(process(100 + number) for number in range(MAX_INVOLVED + 3))))
    finding = only(on, LeakKind.FOREIGN_PROCESS)
    assert (len(finding.involved), finding.more) == (MAX_INVOLVED, 3)
    assert found(on)[0].message.startswith("19 processes use the GPU")


def test_pending_findings_are_bounded() -> None:
    on = node(foreign_at_once())
    names = [PodUid(f"{number:08}-0000-4000-8000-000000000000") for number in range(20)]
    on.apply(PodsSeen({uid: replace(A, name=uid) for uid in names}))
    many = [process(100 + number, pod=names[number % 20]) for number in range(MAX_PENDING + 100)]
    on.apply(seen(*many))
    assert len(on.state.leaks.pending) == MAX_PENDING


def test_an_incomplete_snapshot_is_marked() -> None:
    on = node(foreign_at_once())
    on.apply(seen(process(7), complete=False))
    assert only(on, LeakKind.FOREIGN_PROCESS).incomplete
    on.apply(seen(process(7)))
    assert not only(on, LeakKind.FOREIGN_PROCESS).incomplete


def test_the_certainty_of_the_counts_is_reported() -> None:
    on = node(foreign_at_once())
    unsure = seen(process(7))
    on.apply(replace(unsure, usage=replace(unsure.usage, certainty="unverified")))
    assert only(on, LeakKind.FOREIGN_PROCESS).certainty == "unverified"


def test_public_documents_have_no_pid_and_no_name() -> None:
    on = node(with_leaks(pod_gone_ns=0, foreign_process_ns=0, stuck_exit_ns=0, orphaned_client_ns=0))
    on.apply(
        pods(a=False),
        seen(
            process(70001, pod=POD_A, comm="secret", exiting_since_ns=1),
            process(70002),
            orphans=[orphan(70003, 70002, ended_ns=0)],
        ),
        memory(user(70001, 5)),
    )
    assert len(kinds(on)) == 4
    words = " ".join(f"{each.reason} {each.message}" for each in on.snapshot().findings)
    for hidden in ("7000", "job-a", "ns1", "secret", "python3", str(POD_A)):
        assert hidden not in words


def test_a_stale_snapshot_ends_no_finding_and_begins_none() -> None:
    on = node(with_leaks(foreign_process_ns=3 * USAGE_KNOWN_FOR_NS, pod_gone_ns=0))
    on.apply(seen(process(7), process(8, pod=POD_A)), pods(a=False))
    repeat_facts(on, 4 * USAGE_KNOWN_FOR_NS, pods(a=False), allocated())
    assert kinds(on) == {("pod_gone", U0)}


def test_findings_of_a_gpu_that_is_not_known_mark_nothing() -> None:
    on = healthy_node(gpu(0), policy=foreign_at_once())
    on.apply(allocated(), pods(), seen(process(7, hold(U1))))
    assert on.conditions() == []


def test_a_finding_that_is_over_is_cleared_by_clean_probes_and_quiet_time() -> None:
    on = node(foreign_at_once())
    on.apply(seen(process(7)))
    for _ in range(5):
        on.after(10 * S, passed())
    on.apply(seen())
    (condition,) = on.conditions()
    assert (condition.lasts, condition.clean_probes) == (False, 0)
    on.apply(passed())
    first_ns = on.now_ns
    on.apply(passed(), passed())
    on.until(first_ns + MINUTE - 1)
    on.after(0)
    assert len(on.conditions()) == 1
    on.after(1)
    assert on.conditions() == []


def test_a_finding_that_recurs_before_it_is_cleared_is_the_same_condition() -> None:
    on = node(foreign_at_once())
    on.apply(seen(process(7)))
    on.apply(seen(), passed(), passed())
    on.apply(seen(process(7)))
    (condition,) = on.conditions()
    assert (condition.lasts, condition.count, condition.clean_probes) == (True, 2, 0)


def test_an_operator_cannot_clear_a_finding_that_is_still_seen() -> None:
    on = node(foreign_at_once())
    on.apply(seen(process(7)))
    on.apply(RecoverRequested(U0))
    assert kinds(on) == {("foreign_process", U0)}
