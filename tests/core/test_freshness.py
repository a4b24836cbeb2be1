"""A component without a proof for too long is stale: never early, and never because the loop stood still."""

from collections.abc import Iterator, Mapping
from itertools import accumulate, count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.core.freshness import (
    VOUCHERS,
    Expected,
    Freshness,
    Rests,
    Terms,
    check_components,
)
from agent.model import facts
from agent.model.components import GPU_PROBER, KUBELET_COUNT, NVML_EVENTS, NVML_NODE
from agent.model.facts import ComponentsStale, KernelXidSeen
from agent.model.health import Health, Reason
from agent.model.ids import ComponentId, GpuUuid
from agent.model.policy import SECOND_NS
from agent.model.structs import replace
from tests.core.build import U0, U1, Node, gpu, registered_node, uuid
from tests.core.polls import HEALTHY

COMPONENT = ComponentId(facts.SYSFS)
terms = st.builds(Terms, st.integers(0, 20 * SECOND_NS), st.integers(0, 10 * SECOND_NS))


def checks(
    each: Terms, proofs: list[int], until_ns: int, stalls: Mapping[int, int]
) -> Iterator[tuple[int, bool]]:
    """Check as the engine does; the checks of some numbers are late."""
    freshness, now_ns = Freshness(), proofs[0]
    for number in count():
        proven_ns = max(at_ns for at_ns in proofs if at_ns <= now_ns)
        freshness = check_components(freshness, {COMPONENT: Expected(each, proven_ns)}, now_ns)
        yield now_ns, bool(freshness.stale)
        assert freshness.due_ns is not None
        now_ns = freshness.due_ns + stalls.get(number, 0)
        if now_ns > until_ns:
            return


@given(terms, st.integers(0, 10**12))
def test_without_a_proof_it_is_stale_at_three_periods_and_its_deadline(each: Terms, begin_ns: int) -> None:
    stale_ns = [at_ns for at_ns, stale in checks(each, [begin_ns], begin_ns + 9 * each.limit_ns, {}) if stale]
    assert stale_ns[0] == begin_ns + each.limit_ns


@given(terms, st.lists(st.booleans(), min_size=3, max_size=20))
def test_a_component_with_proofs_in_time_is_never_stale(each: Terms, slow: list[bool]) -> None:
    """Even if proofs take their whole deadline after two periods."""
    gaps = [2 * each.period_ns + is_slow * each.deadline_ns for is_slow in slow]
    proofs = list(accumulate(gaps, initial=0))
    assert not any(stale for _, stale in checks(each, proofs, proofs[-1], {}))


@given(
    terms,
    st.dictionaries(st.integers(0, 6), st.integers(1, 3600 * SECOND_NS), max_size=4),
)
@example(Terms(SECOND_NS, 0), {0: 3600 * SECOND_NS})
@example(Terms(SECOND_NS, 0), {2: 3600 * SECOND_NS})
def test_a_loop_that_stood_still_leaves_each_component_a_period(each: Terms, stalls: dict[int, int]) -> None:
    """No component can give a proof meanwhile: a suspended or stopped process makes none stale."""
    stood_ns = 0
    for number, (at_ns, stale) in enumerate(checks(each, [0], 10**15, stalls)):
        if stale:
            assert at_ns - stood_ns >= each.least_period_ns
            return
        if stalls.get(number - 1, 0) >= each.least_period_ns:
            stood_ns = at_ns
    raise AssertionError("it was never stale")


def test_a_restart_is_due_at_once_and_then_ever_more_rarely() -> None:
    freshness, now_ns, restarts = Freshness(), 0, []
    each = Expected(Terms(10 * SECOND_NS, 0), 0)
    for _ in range(200):
        freshness = check_components(freshness, {COMPONENT: each}, now_ns)
        if freshness.restart:
            restarts.append(now_ns // SECOND_NS)
        assert freshness.due_ns is not None
        now_ns = freshness.due_ns
    assert restarts == [30, 60, 120, 240, 480, 960, 1920]


def test_a_component_is_fresh_after_a_proof_or_when_none_is_expected() -> None:
    stale = Freshness()
    for at_ns in (1, 2, 3):
        stale = check_components(stale, {COMPONENT: Expected(Terms(1, 0), 0)}, at_ns * SECOND_NS)
    assert stale.stale == {COMPONENT}
    assert check_components(stale, {COMPONENT: Expected(Terms(1, 0), 5)}, 4 * SECOND_NS).stale == frozenset()
    assert check_components(stale, {}, 4 * SECOND_NS).stale == frozenset()


def test_a_stale_component_is_covered_while_its_alternative_is_expected_and_fresh() -> None:
    events, log = ComponentId(NVML_EVENTS), ComponentId(facts.KERNEL_LOG)
    each = Expected(Terms(SECOND_NS, 0), 5)
    covered = []
    for proven_ns in (None, 0, 3 * SECOND_NS):
        freshness = Freshness()
        for at_ns in range(SECOND_NS, 5 * SECOND_NS, SECOND_NS):
            other = {} if proven_ns is None else {log: Expected(Terms(SECOND_NS, 0), proven_ns)}
            freshness = check_components(freshness, {events: each, **other}, at_ns)
        assert events in freshness.stale
        covered.append(dict(freshness.covered))
    assert covered == [{}, {}, {events: 5}]


def test_each_row_names_what_rests_on_it_and_the_task_to_restart() -> None:
    assert {each.rests for each in VOUCHERS.values()} == set(Rests)
    assert all(each.vouches_for and each.proof and each.task for each in VOUCHERS.values())


# What rests on it


def health(node: Node) -> dict[GpuUuid, Health]:
    return {view.gpu.uuid: view.health for view in node.snapshot().gpus}


def test_a_gpu_with_a_stale_prober_is_unknown_until_its_next_probe() -> None:
    node = registered_node(gpu(0), gpu(1))
    component = ComponentId(GPU_PROBER, U0)
    node.apply(ComponentsStale(frozenset({component})))
    assert (health(node)[U0], health(node)[U1]) == (Health.UNKNOWN, Health.HEALTHY)
    assert [each.gpus for each in node.snapshot().findings if each.reason is Reason.NOT_PROBED] == [(U0,)]

    # That no proof is expected any more is no proof.
    node.apply(ComponentsStale(frozenset()))
    assert health(node)[U0] is Health.UNKNOWN
    node.apply(facts.GpuProbePassed(U0))
    assert health(node)[U0] is Health.HEALTHY


def test_without_a_source_of_xids_every_gpu_is_unknown_whatever_its_probes_show() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(ComponentsStale(frozenset({ComponentId(NVML_EVENTS)})), facts.GpuProbePassed(U0))
    assert set(health(node).values()) == {Health.UNKNOWN}
    assert not node.snapshot().ready
    node.apply(ComponentsStale(frozenset()))
    assert set(health(node).values()) == {Health.HEALTHY}


def test_with_the_kernel_log_alone_its_xids_make_a_gpu_unhealthy() -> None:
    node = registered_node(gpu(0), gpu(1), gpu(2))
    node.apply(KernelXidSeen(gpu(2).pci, 95))
    node.after(SECOND_NS, facts.GpuProbePassed(U0))
    covered_ns = node.now_ns
    node.after(SECOND_NS, KernelXidSeen(gpu(0).pci, 95), KernelXidSeen(gpu(1).pci, 95, in_words=True))
    assert set(health(node).values()) == {Health.HEALTHY}

    events = ComponentId(NVML_EVENTS)
    node.apply(ComponentsStale(frozenset({events}), {events: covered_ns}))
    # The silence of NVML on later lines proves nothing; words that a user can write never count alone.
    assert list(health(node).values()) == [Health.UNHEALTHY, Health.HEALTHY, Health.HEALTHY]
    assert {each.reason for each in node.snapshot().findings} == {Reason.XID}
    node.apply(KernelXidSeen(gpu(1).pci, 119))
    assert health(node)[U1] is Health.UNHEALTHY

    node.apply(ComponentsStale(frozenset({events, ComponentId(facts.KERNEL_LOG)})))
    assert health(node)[uuid(2)] is Health.UNKNOWN
    node.apply(ComponentsStale(frozenset()))
    assert list(health(node).values()) == [Health.UNHEALTHY, Health.UNHEALTHY, Health.HEALTHY]


@pytest.mark.parametrize("is_heard_again", [False, True], ids=["while it lasts", "when it is over"])
def test_a_line_from_while_no_event_set_kept_xids_makes_its_gpu_unhealthy(is_heard_again: bool) -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(KernelXidSeen(gpu(0).pci, 95))
    node.after(SECOND_NS)
    lost_ns = node.now_ns
    node.after(SECOND_NS, KernelXidSeen(gpu(1).pci, 95))
    assert set(health(node).values()) == {Health.HEALTHY}
    node.after(SECOND_NS, facts.XidEventsHeard(lost_ns, is_heard=is_heard_again))
    assert list(health(node).values()) == [Health.HEALTHY, Health.UNHEALTHY]
    # It is over: from here on NVML's silence denies a line.
    node.apply(facts.XidEventsHeard(lost_ns, is_heard=True))
    node.after(SECOND_NS, KernelXidSeen(gpu(0).pci, 95))
    assert list(health(node).values()) == [Health.HEALTHY, Health.UNHEALTHY]


def test_an_older_reading_denies_no_line_from_while_no_event_set_kept_xids() -> None:
    node = registered_node(gpu(0))
    reading = replace(HEALTHY, recovery_action=0)
    node.apply(facts.GpuSampled(U0, reading))
    lost_ns = node.now_ns
    node.after(SECOND_NS, KernelXidSeen(gpu(0).pci, 95), facts.XidEventsHeard(lost_ns, is_heard=False))
    assert health(node)[U0] is Health.HEALTHY
    view = node.snapshot().view_of(U0)
    assert view is not None
    assert [each.reason for each in view.conditions] == [Reason.UNCONFIRMED]
    node.apply(facts.GpuSampled(U0, replace(reading, recovery_action=1)))
    assert health(node)[U0] is Health.UNHEALTHY


def test_a_stale_component_without_devices_is_named_and_makes_none_unknown() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(
        ComponentsStale(
            frozenset({ComponentId(NVML_NODE), ComponentId(KUBELET_COUNT), ComponentId(facts.KERNEL_LOG)})
        )
    )
    assert set(health(node).values()) == {Health.HEALTHY}
    named = [
        each.message.split()[0] for each in node.snapshot().findings if each.reason is Reason.SOURCE_FAILED
    ]
    assert named == [str(NVML_NODE)]


def test_an_overdue_gpu_and_a_released_driver_have_nothing_to_prove() -> None:
    node = registered_node(gpu(0), gpu(1))
    assert U0 in node.state.due_gpus
    node.apply(facts.GpuCallOverdue(U0, "nvmlDeviceGetUUID", SECOND_NS))
    assert U0 not in node.state.due_gpus
    node.apply(facts.DriverReleased())
    assert node.state.due_gpus == frozenset()
