"""Findings on any history: none without its cause, none withheld, none for a new process with an old pid."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from agent.core.health.leak_conditions import USAGE_KNOWN_FOR_NS
from agent.core.health.stability import PODS_KNOWN_FOR_NS
from agent.model.facts import GpuUseSeen, PodsSeen
from agent.model.health import LeakKind
from agent.model.ids import GpuUuid
from agent.model.structs import replace
from agent.model.usage import PodRef, PodUid, ProcessKey, ProcessUse
from tests.core.build import DEFAULT, START_NS, U0, U1, Node, S, gpu, healthy_node, passed
from tests.core.use import POD_A, POD_B, A, B, allocated, hold, key, pods, process, seen

GRACE_NS = DEFAULT.leaks.pod_gone_ns
FOREIGN_NS = DEFAULT.leaks.foreign_process_ns

GAPS = st.sampled_from([0, 1, S, 10 * S, 29 * S, GRACE_NS - 1, GRACE_NS, GRACE_NS + 1, 90 * S])

PODS = st.sampled_from([POD_A, POD_B, None])
PROCESSES = st.builds(
    lambda pid, start, pod, on, contexts: process(pid, hold(on, contexts), pod=pod, start=start),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([10, 20]),
    PODS,
    st.sampled_from([U0, U1]),
    st.sampled_from([0, 1, 3]),
)
SNAPSHOTS = st.lists(PROCESSES, max_size=3, unique_by=lambda each: each.key.pid).map(lambda them: seen(*them))
LISTS = st.sampled_from([pods(), pods(a=False), PodsSeen({POD_B: B}), PodsSeen({})])
GIVEN = st.sampled_from([allocated(), allocated((U0, "ns1/job-a")), allocated((U1, "ns1/job-b"))])

STEPS = st.lists(
    st.tuples(GAPS, SNAPSHOTS | LISTS | GIVEN | st.builds(passed, st.sampled_from([U0, U1]))), max_size=20
)


@dataclass
class Naive:
    """The rules for pods that are gone, written down again as simply as can be."""

    usage: tuple[ProcessUse, ...] | None = None
    usage_ns: int = 0
    pods: dict[PodUid, bool] | None = None
    pods_ns: int = 0
    began: dict[tuple[ProcessKey, GpuUuid], int] = field(default_factory=dict)
    reported: set[tuple[ProcessKey, GpuUuid]] = field(default_factory=set)

    def apply(self, fact: object, now_ns: int) -> None:
        if isinstance(fact, GpuUseSeen):
            self.usage, self.usage_ns = fact.usage.processes, now_ns
        if isinstance(fact, PodsSeen):
            self.pods, self.pods_ns = {uid: pod.alive for uid, pod in fact.pods.items()}, now_ns
        if now_ns >= self.usage_ns + USAGE_KNOWN_FOR_NS:
            self.usage = None
        if now_ns >= self.pods_ns + PODS_KNOWN_FOR_NS:
            self.pods = None
        self.evaluate(now_ns)

    def evaluate(self, now_ns: int) -> None:
        if self.usage is None:
            return
        there = {(each.key, held.gpu) for each in self.usage for held in each.holds}
        if self.pods is None:
            self.began = {name: at_ns for name, at_ns in self.began.items() if name in there}
        else:
            gone = {
                (each.key, held.gpu)
                for each in self.usage
                for held in each.holds
                if isinstance(each.status.pod, PodRef) and not self.pods.get(each.status.pod.uid, False)
            }
            self.began = {name: self.began.get(name, now_ns) for name in gone}
            self.reported |= {name for name in gone if now_ns - self.began[name] >= GRACE_NS}
        self.reported &= self.began.keys()


def reported_by(node: Node, kind: LeakKind) -> set[tuple[ProcessKey, GpuUuid]]:
    return {
        (ProcessKey(each.pid, each.start_ticks), condition.placement.gpu)
        for condition in node.conditions()
        if condition.lasts and condition.details is not None and condition.details.kind is kind
        for each in condition.details.involved
    }


@given(STEPS)
@example(
    [(0, seen(process(1, pod=POD_A))), (0, pods(a=False)), (30 * S, pods(a=False)), (30 * S, pods(a=False))]
)
@example([(0, seen(process(1, pod=POD_A))), (0, pods(a=False)), (90 * S, pods(a=False))])
def test_pods_that_are_gone_are_found_as_a_naive_reader_would(steps: list[tuple[int, object]]) -> None:
    node, naive = healthy_node(gpu(0), gpu(1)), Naive()
    for gap_ns, fact in steps:
        # The naive reader evaluates whenever the core asked to be woken.
        until_ns = node.now_ns + gap_ns
        while node.wake_at_ns <= until_ns:
            node.until(node.wake_at_ns)
            node.after(0)
            naive.apply(None, node.now_ns)
        node.until(until_ns)
        node.apply(fact)  # type: ignore[arg-type]
        naive.apply(fact, node.now_ns)
        assert reported_by(node, LeakKind.POD_GONE) == naive.reported


@given(STEPS)
def test_no_absent_process_is_named(steps: list[tuple[int, object]]) -> None:
    node = healthy_node(gpu(0), gpu(1))
    for gap_ns, fact in steps:
        node.after(gap_ns, fact)  # type: ignore[arg-type]
        usage = node.state.usage
        if usage is None:
            continue
        there = {(each.key, held.gpu) for each in usage.processes for held in each.holds}
        for kind in LeakKind:
            assert reported_by(node, kind) <= there or kind is LeakKind.ORPHANED_CLIENT
        assert {name[0].pid for name in reported_by(node, LeakKind.FOREIGN_PROCESS)} <= {
            each.key.pid for each in usage.processes if each.holds[0].contexts
        } or node.state.pods is None


@given(STEPS, st.sampled_from([POD_A, POD_B]), st.sampled_from([U0, U1]))
def test_a_lasting_leak_is_found_in_its_time_after_any_history(
    steps: list[tuple[int, object]], pod: PodUid, on: GpuUuid
) -> None:
    node = healthy_node(gpu(0), gpu(1))
    play(node, steps)
    leaking = process(9, hold(on), pod=pod)
    living = PodsSeen({POD_A: replace(A, alive=pod != POD_A), POD_B: replace(B, alive=pod != POD_B)})
    begin_ns = node.now_ns
    for second in range(0, GRACE_NS // S, 10):
        node.until(begin_ns + second * S)
        node.apply(living, seen(leaking))
    assert reported_by(node, LeakKind.POD_GONE) == set()
    node.until(begin_ns + GRACE_NS)
    node.after(0)
    assert reported_by(node, LeakKind.POD_GONE) == {(leaking.key, on)}


@given(STEPS)
def test_a_healthy_node_is_clean_in_its_time_after_any_history(
    steps: list[tuple[int, object]],
) -> None:
    node = healthy_node(gpu(0), gpu(1))
    play(node, steps)
    well = process(1, hold(U0), pod=POD_A, start=30)
    begin_ns = node.now_ns
    quiet_ns = DEFAULT.recovery_quiet_ns
    for _ in range(DEFAULT.recovery_clean_probes + quiet_ns // (10 * S)):
        node.apply(pods(), allocated((U0, "ns1/job-a")), seen(well), passed(U0), passed(U1))
        node.after(10 * S)
    assert node.conditions() == []
    assert node.now_ns - begin_ns <= quiet_ns + DEFAULT.recovery_clean_probes * 10 * S


def play(node: Node, steps: Iterable[tuple[int, object]]) -> None:
    for gap_ns, fact in steps:
        node.after(gap_ns, fact)  # type: ignore[arg-type]


@given(st.lists(st.tuples(GAPS, SNAPSHOTS), max_size=12), st.sampled_from([0, START_NS, 10**18]))
def test_findings_do_not_depend_on_when_the_clock_began(
    steps: list[tuple[int, GpuUseSeen]], at_ns: int
) -> None:
    ages = []
    for start_ns in (START_NS, START_NS + at_ns):
        node = Node(DEFAULT, at_ns=start_ns)
        node.apply(pods(a=False), allocated())
        reported = []
        for gap_ns, fact in steps:
            node.after(gap_ns, fact)
            reported.append(
                sorted(
                    (each.key.kind, each.key.process or key(0), each.since_ns - start_ns, each.reported)
                    for each in node.state.leaks.pending.values()
                )
            )
        ages.append(reported)
    assert ages[0] == ages[1]
