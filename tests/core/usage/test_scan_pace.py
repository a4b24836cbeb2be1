"""When scans are due for a pod that asks for them again and again."""

from hypothesis import given
from hypothesis import strategies as st

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.file_links import Registrations
from agent.core.usage.rows import Removed
from agent.core.usage.scan_pace import ScanPace

PERIOD, BURST = 1_000, 3


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([2, 3]), st.booleans()), max_size=200))
def test_a_pod_gets_its_scans_at_once_then_one_in_a_period_and_delays_no_other(
    asked: list[tuple[int, int, bool]],
) -> None:
    pace = ScanPace(PERIOD, burst=BURST)
    now, due_since_scan, charged = 10**9, dict[int, int](), dict[int, int]()
    began = now
    for later, cgroup, scans in asked:
        now += later
        due = pace.due_ns(cgroup, 100 + cgroup, now)
        if cgroup in due_since_scan:
            assert due == due_since_scan[cgroup], "one scan serves all"
        else:
            assert now <= due <= now + PERIOD
            due_since_scan[cgroup] = due
            charged[cgroup] = charged.get(cgroup, 0) + (due == now)
        if scans and now >= max(due_since_scan.values()):
            pace.begin_scan()
            due_since_scan.clear()
    for count in charged.values():
        assert count <= BURST + (now - began) / PERIOD + 1


def test_a_first_request_is_never_delayed() -> None:
    pace = ScanPace(PERIOD, burst=BURST)
    for at in range(100):
        pace.due_ns(2, 100, at)
        pace.begin_scan()
    assert pace.due_ns(3, 200, 100) == 100
    assert pace.due_ns(2, 101, 100) > 100, "another process of the pod"
    assert pace.due_ns(1, 101, 100) == 100, "in the root each process is its own"
    assert [pace.due_ns(1, 101, 100)] == [100]


def test_requests_beyond_the_share_are_counted_for_their_process_alone() -> None:
    pace = ScanPace(PERIOD, burst=BURST)
    for at in range(10):
        pace.due_ns(2, 100, at)
        pace.begin_scan()
    pace.due_ns(3, 200, 10)
    assert pace.pop_postponed() == {100: 10 - BURST}
    assert pace.pop_postponed() == {}


def test_the_table_of_requesters_is_bounded() -> None:
    pace = ScanPace(PERIOD, burst=1, max_asking=8)
    for cgroup in range(2, 1_000):
        pace.due_ns(cgroup, cgroup, 0)
        pace.due_ns(cgroup, cgroup, 0)
    assert len(pace._due) == len(pace._charged) == 8
    pace.begin_scan()
    for pid in range(2, 1_000):
        pace.due_ns(999, pid, 0)
    assert len(pace.pop_postponed()) == 8


def test_registrations_beyond_the_room_evict_the_oldest() -> None:
    kept = Registrations(Bounds(registrations=2))
    for file in (1, 2, 3):
        kept.add(file, 9, at_ns=file)
    assert [kept.get(file) is None for file in (1, 2, 3)] == [True, False, False]
    assert kept.remove(3, before_ns=3) is None, "it is newer"
    assert kept.remove(3) == Removed(3, 0, 3)


def test_the_registration_of_a_file_without_a_holder_stays_for_a_time() -> None:
    kept = Registrations()
    kept.add(5 << 32 | 1, 9, at_ns=7)
    assert list(kept.expired((), 100)) == []
    assert list(kept.expired({5 << 32 | 1}, 200)) == []
    assert list(kept.expired((), 300)) == []
    assert list(kept.expired((), 300 + BOUNDS.quarantine_ns)) == [Removed(1, 5, 7)]
    assert len(kept) == 0
