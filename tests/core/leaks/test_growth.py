"""Growth: processes that make contexts and free hardly any, and processes that only have many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.leaks import growth
from agent.core.leaks.growth import PARTS, Sample, followed
from agent.model.health import Details, LeakKind
from agent.model.ids import GpuUuid
from agent.model.policy import LeakPolicy
from agent.model.structs import replace
from agent.model.usage import GpuHold, PodUid, ProcessKey, Usage
from tests.core.build import DEFAULT, U0, U1, Node, S
from tests.core.use import found, hold, key, node, process, seen, with_leaks

WARM_NS = 120 * S
W = 600 * S


def grown(on: Node) -> list[Details]:
    return [each.details for each in found(on, LeakKind.CTX_GROWTH) if each.details is not None]


class Job:
    """A process that makes and frees contexts on U0, observed by a node."""

    def __init__(
        self, *, live: int = 1, service: str = "", age_ns: int = WARM_NS, partial: bool = False
    ) -> None:
        self.on = node(replace(DEFAULT, leaks=replace(DEFAULT.leaks, foreign_process_ns=10**18)))
        self.live, self.freed, self.fds = live, 0, 10
        self.service, self.partial = service, partial
        self.since_ns = self.on.now_ns - age_ns
        self.contexts_known = True
        self.apply()

    def apply(self) -> None:
        contexts = self.live if self.contexts_known else None
        use = process(
            7,
            GpuHold(U0, self.fds, contexts, allocated=self.live + self.freed, freed=self.freed),
            service=self.service,
            since_ns=self.since_ns,
            partial=self.partial,
        )
        self.on.apply(seen(use, at_ns=self.on.now_ns))

    def makes(self, count: int = 1) -> "Job":
        self.live += count
        self.apply()
        return self

    def leaks(self, count: int) -> "Job":
        """Make so many in two steps."""
        return self.makes(count - 1).waits(W // PARTS).makes()

    def frees(self, count: int = 1) -> "Job":
        self.live -= count
        self.freed += count
        self.apply()
        return self

    def opens(self, count: int) -> "Job":
        self.fds += count
        self.apply()
        return self

    def waits(self, for_ns: int) -> "Job":
        """Let time pass; the source emits again every ten seconds."""
        until_ns = self.on.now_ns + for_ns
        while self.on.now_ns < until_ns:
            self.on.until(min(self.on.now_ns + 10 * S, until_ns))
            self.apply()
        return self


def test_a_process_that_makes_contexts_and_frees_none_grows() -> None:
    job = Job().waits(30 * S).makes().waits(60 * S).makes()
    assert grown(job.on) == []
    job.makes()
    (only,) = grown(job.on)
    assert (only.contexts, only.critical) == (4, False)
    (condition,) = found(job.on)
    assert condition.message == "1 process makes contexts and frees hardly any: 4 contexts by now"


def test_three_new_ones_are_growth_only_from_four_on() -> None:
    assert grown(Job(live=0).waits(S).leaks(3).on) == []
    assert len(grown(Job(live=1).waits(S).leaks(3).on)) == 1
    assert grown(Job(live=9).waits(S).makes(2).on) == []


def test_to_have_many_is_no_growth() -> None:
    """A server for video may well have hundreds."""
    job = Job(live=300).waits(3 * W)
    assert found(job.on) == []


def test_contexts_made_during_the_warm_up_are_no_growth() -> None:
    job = Job(live=0, age_ns=0).makes(3).waits(60 * S).makes(3).waits(59 * S).makes(2).waits(2 * S)
    assert grown(job.on) == []
    job.makes(2).waits(W // PARTS)
    assert grown(job.on) == []
    job.makes(1)
    assert len(grown(job.on)) == 1


def test_a_single_step_to_more_is_no_growth() -> None:
    assert grown(Job(live=4).waits(S).makes(9).waits(W + S).on) == []


def test_the_warm_up_ends_at_its_time_without_a_fact() -> None:
    job = Job(live=4, age_ns=WARM_NS - 5 * S)
    job.on.until(job.on.now_ns + 5 * S)
    job.on.after(0)
    job.leaks(3)
    assert len(grown(job.on)) == 1
    early = Job(live=4, age_ns=WARM_NS - 5 * S)
    early.on.until(early.on.now_ns + 5 * S - 1)
    early.leaks(3).waits(W)
    assert grown(early.on) == []


@pytest.mark.parametrize(("freed", "grows"), [(0, True), (1, True), (2, True), (3, False), (5, False)])
def test_a_process_that_frees_more_than_a_fifth_does_not_leak(freed: int, *, grows: bool) -> None:
    """Ten are made, twice the freed ones before."""
    job = Job(live=4).waits(S).makes(freed).frees(freed).leaks(10 - freed)
    assert (len(grown(job.on)) == 1) is grows


def test_what_was_freed_before_the_window_excuses_nothing() -> None:
    job = Job(live=4, age_ns=0).makes(50).frees(50).waits(WARM_NS + S).leaks(3)
    assert len(grown(job.on)) == 1


def test_a_process_with_more_earlier_in_the_window_does_not_grow() -> None:
    job = Job(live=4).waits(S).makes(20).waits(60 * S).frees(1)
    assert grown(job.on) == []
    job.makes(1)
    assert grown(job.on) == []
    job.makes(1)
    assert len(grown(job.on)) == 1


@pytest.mark.parametrize(("freed", "is_over"), [(0, False), (3, False), (4, True)])
def test_growth_is_over_when_half_of_the_most_is_freed(freed: int, *, is_over: bool) -> None:
    """It stays while a plateau holds what was made; three of seven are not half."""
    job = Job(live=4).waits(S).leaks(3).waits(2 * W)
    assert [each.critical for each in grown(job.on)] == [False]
    job.frees(freed)
    assert (grown(job.on) == []) is is_over
    assert (grown(job.makes(1).on) == []) is is_over


def test_a_plateau_alone_never_becomes_critical() -> None:
    assert [each.critical for each in grown(Job(live=4).waits(S).leaks(3).waits(5 * W).on)] == [False]


def test_growth_ends_without_a_fact() -> None:
    job = Job(live=4).waits(S).leaks(3)
    job.on.until(job.on.now_ns + 80 * S)
    assert len(grown(job.on)) == 1


def test_slow_growth_over_hours_is_no_growth_of_a_window() -> None:
    job = Job(live=4)
    for _ in range(12):
        job.waits(W // 2 + S).makes()
    assert grown(job.on) == []


def test_growth_that_goes_on_becomes_critical() -> None:
    """One in three minutes: three windows of that are less than sixteen."""
    job = Job(live=1)
    while not grown(job.on):
        job.waits(180 * S).makes()
    begun_ns = job.on.now_ns
    while job.on.now_ns + 180 * S < begun_ns + 3 * W:
        job.waits(180 * S).makes()
        assert [each.critical for each in grown(job.on)] == [False]
    assert job.live < DEFAULT.leaks.growth_critical_live
    job.waits(180 * S).makes()
    assert [each.critical for each in grown(job.on)] == [True]


@pytest.mark.parametrize(("live", "critical"), [(15, False), (16, True)])
def test_growth_that_went_far_is_critical(live: int, *, critical: bool) -> None:
    job = Job(live=live - 3).waits(S).leaks(3)
    assert [each.critical for each in grown(job.on)] == [critical]


def test_a_server_for_others_may_grow() -> None:
    assert grown(Job(live=4, service="nvidia-cuda-mps-server").waits(S).leaks(9).on) == []
    assert grown(Job(live=4, service="nv-hostengine").waits(S).leaks(9).on) == []


def test_an_incomplete_snapshot_shows_no_growth_and_ends_none() -> None:
    job = Job(live=4).waits(S).makes(3).waits(W // PARTS)
    more = process(7, GpuHold(U0, 9, 9, allocated=9, freed=0), since_ns=job.since_ns)
    job.on.apply(seen(more, complete=False))
    assert grown(job.on) == []
    job.on.apply(seen(more))
    assert len(grown(job.on)) == 1
    job.on.apply(
        seen(process(7, GpuHold(U0, 9, 1, allocated=9, freed=8), since_ns=job.since_ns), complete=False)
    )
    assert len(grown(job.on)) == 1


@pytest.mark.parametrize(("doubted", "is_found"), [(U0, False), (U1, True)])
def test_growth_is_found_except_on_doubted_gpus(doubted: GpuUuid, *, is_found: bool) -> None:
    job = Job(live=4).waits(S).makes(3).waits(W // PARTS)
    more = process(7, GpuHold(U0, 9, 9, allocated=9, freed=0), since_ns=job.since_ns)
    fewer = process(7, GpuHold(U0, 9, 1, allocated=9, freed=8), since_ns=job.since_ns)
    job.on.apply(seen(more, doubted=[doubted]))
    assert len(grown(job.on)) == is_found
    job.on.apply(seen(more))
    assert len(grown(job.on)) == 1
    job.on.apply(seen(fewer, doubted=[doubted]))
    assert len(grown(job.on)) == (not is_found)


def test_a_process_with_the_pid_of_one_that_grew_begins_anew() -> None:
    job = Job(live=4).waits(S).leaks(3)
    job.on.apply(seen(process(7, hold(contexts=9), start=9000, since_ns=0)))
    assert grown(job.on) == []


def test_growth_on_one_gpu_is_none_on_another() -> None:
    on = node(with_leaks(foreign_process_ns=10**18, growth_warm_up_ns=0))
    for live in (4, 6, 7):
        on.apply(seen(process(7, hold(U0, live), hold(U1, 4))))
        on.until(on.now_ns + W // PARTS)
    assert [each.placement.gpu for each in found(on, LeakKind.CTX_GROWTH)] == [U0]


# Descriptors, where contexts are not known


def fds_grown(on: Node) -> int:
    return len(found(on, LeakKind.FD_GROWTH))


@pytest.mark.parametrize("partial", [False, True])
def test_descriptors_show_growth_where_contexts_are_unknown(*, partial: bool) -> None:
    job = Job(live=0, partial=partial)
    job.contexts_known = partial
    job.apply()
    job.waits(S).opens(89).waits(W // PARTS)
    assert fds_grown(job.on) == 0
    job.opens(1)
    assert fds_grown(job.on) == 1
    job.opens(-49)
    assert fds_grown(job.on) == 1
    job.opens(-1)
    assert fds_grown(job.on) == 0


def test_descriptors_that_fell_once_are_no_growth() -> None:
    job = Job(live=0)
    job.contexts_known = False
    job.apply()
    job.waits(S).opens(200).waits(W // PARTS).opens(-5).opens(4)
    assert fds_grown(job.on) == 0


def test_where_contexts_are_known_descriptors_do_not_count() -> None:
    assert fds_grown(Job(live=1).waits(S).opens(400).waits(W // PARTS).opens(100).on) == 0


def test_growth_of_contexts_is_not_reported_as_growth_of_descriptors_too() -> None:
    job = Job(live=4, partial=True).waits(S).opens(200).leaks(3).opens(1)
    assert (len(grown(job.on)), fds_grown(job.on)) == (1, 0)


# Windows


POLICY = LeakPolicy()


def usage_of(*pids: int, contexts: int = 1, since_ns: int = 0) -> Usage:
    return Usage(0, tuple(process(pid, hold(contexts=contexts), since_ns=since_ns) for pid in pids))


def test_only_current_holds_have_windows() -> None:
    windows = followed(usage_of(1, 2), {}, POLICY, WARM_NS)
    assert set(windows) == {(key(1), U0), (key(2), U0)}
    assert set(followed(usage_of(2), windows, POLICY, WARM_NS + 1)) == {(key(2), U0)}
    assert followed(usage_of(1, 2, contexts=0), windows, POLICY, WARM_NS + 1) == {}
    assert followed(usage_of(1, 2), windows, POLICY, WARM_NS + 1) is windows


def test_the_number_of_windows_is_bounded() -> None:
    pods = [PodUid(f"{number:08}-0000-4000-8000-000000000000") for number in range(5)]
    earlier = [process(pid, pod=pods[pid % 5]) for pid in range(5, 10 + growth.MAX_WINDOWS)]
    windows = followed(Usage(0, tuple(earlier)), {}, POLICY, WARM_NS)
    assert len(windows) == growth.MAX_WINDOWS
    later = Usage(0, (process(1, pod=pods[0]), *earlier))
    assert followed(later, windows, POLICY, WARM_NS).keys() == windows.keys()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, S, W // PARTS - 1, W // PARTS, W // PARTS + 1, W, W + 1]),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_a_window_is_bounded_and_covers_its_span(steps: list[tuple[int, int]]) -> None:
    windows = followed(usage_of(1), {}, POLICY, WARM_NS)
    now_ns = WARM_NS
    live = 1
    history = [(now_ns, live)]
    for gap_ns, more in steps:
        now_ns += gap_ns
        live += more
        windows = followed(usage_of(1, contexts=live), windows, POLICY, now_ns)
        history.append((now_ns, live))
        window: tuple[Sample, ...] = windows[ProcessKey(1, 1), U0]
        assert len(window) <= PARTS
        assert [each.at_ns for each in window] == sorted({each.at_ns for each in window})
        assert all(each.at_ns > now_ns - W for each in window)
        assert max(each.peak_live for each in window) == live
        assert (window[0].at_ns, window[0].live) in history
