"""Orphans without end: one holder's are bounded and counted, and cost no other holder a finding."""

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.leaks import growth
from agent.core.leaks.findings import MAX_OF_HOLDER
from agent.core.usage.orphans import MAX_APART, OrphanGroups
from agent.model.facts import AllocationsListed
from agent.model.health import MAX_INVOLVED, LeakKind, Reason
from agent.model.structs import replace
from agent.model.usage import Orphan
from tests.core.build import DEFAULT, U0, U1, S, gpu, healthy_node
from tests.core.usage.test_tracker import Rig
from tests.core.use import LEAKS, POD_A, POD_B, hold, key, orphan, pods, process, seen

STEPS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([U0, U1, None]), st.sampled_from([None, 1, 4])), max_size=80
)


@given(STEPS, st.integers(1, 4), st.integers(1, 4))
def test_each_orphan_is_in_exactly_one_record_and_the_records_are_bounded(
    steps: list[tuple[int, str | None, int | None]], apart: int, groups: int
) -> None:
    """A step adds what an owner left, or removes it if it is there."""
    made = OrphanGroups(max_apart=apart, max_groups=groups)
    there: dict[object, Orphan] = {}
    for owner, on_gpu, contexts in steps:
        left = orphan(owner, 500, on=on_gpu, contexts=contexts)  # type: ignore[arg-type]
        name = (left.owner.key, left.gpu)
        if name in there:
            made.remove(there.pop(name))
        else:
            there[name] = left
            made.add(left, owner % 5)
        records = made.records()
        assert records is made.records()
        for on in (U0, U1, None):
            for is_counted in (True, False):
                some = [each for each in records if (each.gpu, each.contexts is not None) == (on, is_counted)]
                true = [
                    each
                    for each in there.values()
                    if (each.gpu, each.contexts is not None) == (on, is_counted)
                ]
                assert sum(1 + each.more for each in some) == len(true)
                assert sum(each.clients for each in some) == sum(each.clients for each in true)
                assert sum(each.contexts or 0 for each in some) == sum(each.contexts or 0 for each in true)
        assert len(records) <= (groups + 6) * (apart + 1)
        assert [each.owner.key for each in records] == sorted(each.owner.key for each in records)


def test_orphans_of_one_holder_are_merged_and_a_neighbours_are_not() -> None:
    rig = Rig()
    holder = rig.world.spawn(90)
    jobs = [rig.job(1_000 + number, contexts=1) for number in range(40)]
    neighbour, control = rig.job(99_000, contexts=3)
    other = rig.world.spawn(91)
    rig.update()
    for task, file in jobs:
        rig.world.send(holder, file)
        rig.end(task)
    rig.world.send(other, control)
    rig.end(neighbour)
    usage = rig.update()
    assert len(usage.orphans) <= MAX_APART + 2
    assert sum(1 + each.more for each in usage.orphans) == 41
    assert sum(each.contexts or 0 for each in usage.orphans) == 43


def test_6000_orphans_of_one_holder_cost_the_loop_what_a_few_do(capsys: pytest.CaptureFixture[str]) -> None:
    groups = OrphanGroups()
    began_s = time.process_time()
    for number in range(6_000):
        groups.add(orphan(1_000 + number, 90, contexts=1), "pod-a")
    groups.add(orphan(99_000, 91, contexts=3), "pod-b")
    records = groups.records()
    added_s = time.process_time() - began_s
    assert len(records) == MAX_APART + 2
    node = healthy_node(gpu(0))
    facts = [seen(process(90), process(91), orphans=records, at_ns=at_ns) for at_ns in range(20)]
    began_s = time.process_time()
    for fact in facts:
        node.after(10 * S, fact)
    took_s = (time.process_time() - began_s) / len(facts)
    (condition,) = node.conditions(Reason.CONTEXT_LEAK)
    assert condition.details is not None
    assert condition.message == "6003 contexts of 6001 processes that ended are kept by 2 processes"
    assert {each.pid for each in condition.details.involved} >= {90, 91, 99_000}
    with capsys.disabled():
        print(  # noqa: T201 - the figures
            f"\n6,000 orphans of one holder: {added_s / 6 * 1e3:.0f} us each to add,"
            f" {took_s * 1e3:.2f} ms of CPU time a step"
        )


def test_one_pod_with_4096_findings_displaces_no_other_and_its_excess_is_counted() -> None:
    policy = replace(DEFAULT, leaks=replace(DEFAULT.leaks, foreign_process_ns=0))
    node = healthy_node(gpu(0), gpu(1), policy=policy)
    node.apply(AllocationsListed({}), pods())
    greedy = [process(1_000 + number, pod=POD_A) for number in range(4_096)]
    node.apply(seen(*greedy, process(9_000, pod=POD_B), process(9_001, hold(U1))))
    kept = {finding.key.process for finding in node.state.leaks.pending.values()}
    assert {key(9_000), key(9_001)} <= kept
    assert len(kept) == MAX_OF_HOLDER + 2
    (on_first,) = [each for each in node.conditions(Reason.FOREIGN_PROCESS) if each.placement.gpu == U0]
    assert on_first.details is not None
    assert (len(on_first.details.involved), on_first.details.more) == (MAX_INVOLVED, 4_097 - MAX_INVOLVED)
    assert on_first.message.startswith("4097 processes use the GPU")

    # Known findings keep their places whatever comes before them.
    node.apply(seen(process(5, pod=POD_A), *greedy, process(9_000, pod=POD_B), process(9_001, hold(U1))))
    assert {finding.key.process for finding in node.state.leaks.pending.values()} == kept


def test_windows_of_growth_are_shared_between_holders() -> None:
    share = growth.MAX_OF_HOLDER
    of_a = (process(pid, pod=POD_A) for pid in range(1, share + 10))
    usage = seen(*of_a, process(9_999, pod=POD_B)).usage
    windows = growth.followed(usage, {}, LEAKS, LEAKS.growth_warm_up_ns + 1)
    assert Counter(name.pid for name, _ in windows) == Counter([*range(1, share + 1), 9_999])


def test_a_merged_orphan_is_found_with_its_count() -> None:
    node = healthy_node(gpu(0))
    merged = replace(orphan(7, 90, contexts=40), more=5_990)
    node.apply(pods(), seen(process(90), orphans=[merged]))
    node.after(2 * DEFAULT.leaks.orphaned_client_ns, seen(process(90), orphans=[merged], at_ns=1))
    (condition,) = node.conditions(Reason.CONTEXT_LEAK)
    assert condition.details is not None
    assert (condition.details.kind, condition.details.more) == (LeakKind.ORPHANED_CLIENT, 5_990)
    assert condition.message == "40 contexts of 5991 processes that ended are kept by 1 process"
