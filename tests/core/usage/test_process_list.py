"""Case J4: what NVML lists of processes, and when it is not believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.usage.process_list import NOT_AVAILABLE, believed
from agent.model.usage import MemoryUser

GIB = 2**30
PID_MAX = 4_194_304


def judged(*users: MemoryUser, total: int | None = 16 * GIB) -> object:
    return believed(users, total_bytes=total, pid_max=PID_MAX)


def test_j4a_records_that_were_read_shifted_are_thrown_away() -> None:
    assert judged(MemoryUser(4211081216, 31794), MemoryUser(0, 5368709120)) == ((), "unreliable")


def test_j4c_memory_that_is_not_available_is_unknown_and_not_none_at_all() -> None:
    assert judged(MemoryUser(31794, NOT_AVAILABLE)) == ((MemoryUser(31794, None),), "ok")
    assert judged(MemoryUser(31794, None)) == ((MemoryUser(31794, None),), "ok")
    assert judged(MemoryUser(31794, 0)) == ((MemoryUser(31794, 0),), "ok")


def test_j4_a_process_cannot_have_more_memory_than_the_gpu() -> None:
    assert judged(MemoryUser(31794, 16 * GIB + 1)) == ((), "unreliable")
    assert judged(MemoryUser(31794, 16 * GIB)) == ((MemoryUser(31794, 16 * GIB),), "ok")


@pytest.mark.parametrize(
    ("pid", "is_one"), [(-1, False), (0, False), (1, True), (PID_MAX, True), (PID_MAX + 1, False)]
)
def test_a_pid_is_between_one_and_the_most_there_is(pid: int, *, is_one: bool) -> None:
    assert judged(MemoryUser(pid, 1)) == (((MemoryUser(pid, 1),), "ok") if is_one else ((), "unreliable"))


def test_one_record_that_cannot_be_makes_the_others_unbelievable() -> None:
    assert judged(MemoryUser(100, 1), MemoryUser(0, 1)) == ((), "unreliable")
    assert judged(MemoryUser(100, -1)) == ((), "unreliable")


def test_without_the_size_of_the_gpu_any_memory_can_be() -> None:
    assert judged(MemoryUser(100, 2**50), total=None) == ((MemoryUser(100, 2**50),), "ok")


def test_a_process_that_computes_and_draws_is_one() -> None:
    users = (MemoryUser(7, 5), MemoryUser(7, 9), MemoryUser(7, None))
    assert judged(*users) == ((MemoryUser(7, 9),), "ok")
    assert judged(*reversed(users)) == ((MemoryUser(7, 9),), "ok")


def test_a_process_on_two_mig_devices_is_two() -> None:
    users = (MemoryUser(7, 5, 2, 0), MemoryUser(7, 9, 1, 0))
    assert judged(*users) == ((MemoryUser(7, 9, 1, 0), MemoryUser(7, 5, 2, 0)), "ok")


USERS = st.builds(
    MemoryUser,
    st.sampled_from([-1, 0, 1, 2, PID_MAX, PID_MAX + 1, 4211081216]),
    st.sampled_from([None, 0, 1, 16 * GIB, 16 * GIB + 1, NOT_AVAILABLE]),
)


@given(st.lists(USERS, max_size=4))
def test_what_is_believed_can_be(users: list[MemoryUser]) -> None:
    kept, info = believed(users, total_bytes=16 * GIB, pid_max=PID_MAX)
    assert all(0 < user.pid <= PID_MAX and (user.used_bytes or 0) <= 16 * GIB for user in kept)
    assert {user.pid for user in kept} in ({user.pid for user in users}, set())
    assert info == "ok" or not kept
    assert believed(kept, total_bytes=16 * GIB, pid_max=PID_MAX) == (kept, "ok")
