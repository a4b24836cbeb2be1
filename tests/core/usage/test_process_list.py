"""Case J4: NVML's list of processes, and when it is rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.usage.process_list import NOT_AVAILABLE, believed
from agent.model.usage import MemoryUser

GIB = 2**30
PID_MAX = 4_194_304


def validated(*users: MemoryUser, total: int | None = 16 * GIB) -> object:
    return believed(users, total_bytes=total, pid_max=PID_MAX)


def test_j4a_shifted_records_are_dropped() -> None:
    assert validated(MemoryUser(4211081216, 31794), MemoryUser(0, 5368709120)) == ((), "unreliable")


def test_j4c_unavailable_memory_is_unknown_and_not_zero() -> None:
    assert validated(MemoryUser(31794, NOT_AVAILABLE)) == ((MemoryUser(31794, None),), "ok")
    assert validated(MemoryUser(31794, None)) == ((MemoryUser(31794, None),), "ok")
    assert validated(MemoryUser(31794, 0)) == ((MemoryUser(31794, 0),), "ok")


def test_j4_a_process_cannot_have_more_memory_than_the_gpu() -> None:
    assert validated(MemoryUser(31794, 16 * GIB + 1)) == ((), "unreliable")
    assert validated(MemoryUser(31794, 16 * GIB)) == ((MemoryUser(31794, 16 * GIB),), "ok")


@pytest.mark.parametrize(
    ("pid", "is_one"), [(-1, False), (0, False), (1, True), (PID_MAX, True), (PID_MAX + 1, False)]
)
def test_a_pid_is_between_one_and_the_most_there_is(pid: int, *, is_one: bool) -> None:
    assert validated(MemoryUser(pid, 1)) == (((MemoryUser(pid, 1),), "ok") if is_one else ((), "unreliable"))


def test_one_impossible_record_makes_the_list_unreliable() -> None:
    assert validated(MemoryUser(100, 1), MemoryUser(0, 1)) == ((), "unreliable")
    assert validated(MemoryUser(100, -1)) == ((), "unreliable")


def test_without_the_size_of_the_gpu_any_memory_is_possible() -> None:
    assert validated(MemoryUser(100, 2**50), total=None) == ((MemoryUser(100, 2**50),), "ok")


def test_a_process_listed_for_compute_and_graphics_is_one() -> None:
    users = (MemoryUser(7, 5), MemoryUser(7, 9), MemoryUser(7, None))
    assert validated(*users) == ((MemoryUser(7, 9),), "ok")
    assert validated(*reversed(users)) == ((MemoryUser(7, 9),), "ok")


def test_a_process_on_two_mig_devices_is_two() -> None:
    users = (MemoryUser(7, 5, 2, 0), MemoryUser(7, 9, 1, 0))
    assert validated(*users) == ((MemoryUser(7, 9, 1, 0), MemoryUser(7, 5, 2, 0)), "ok")


USERS = st.builds(
    MemoryUser,
    st.sampled_from([-1, 0, 1, 2, PID_MAX, PID_MAX + 1, 4211081216]),
    st.sampled_from([None, 0, 1, 16 * GIB, 16 * GIB + 1, NOT_AVAILABLE]),
)


@given(st.lists(USERS, max_size=4))
def test_accepted_records_are_possible(users: list[MemoryUser]) -> None:
    kept, info = believed(users, total_bytes=16 * GIB, pid_max=PID_MAX)
    assert all(0 < user.pid <= PID_MAX and (user.used_bytes or 0) <= 16 * GIB for user in kept)
    assert {user.pid for user in kept} in ({user.pid for user in users}, set())
    assert info == "ok" or not kept
    assert believed(kept, total_bytes=16 * GIB, pid_max=PID_MAX) == (kept, "ok")
