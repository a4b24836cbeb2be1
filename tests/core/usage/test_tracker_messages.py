"""Files in messages (SCM_RIGHTS) and mappings: nobody has them in a table of descriptors, and they live."""

import pytest

from agent.core.usage import quarantine
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.quarantine import QUARANTINE_NS
from tests.core.kernel_world import V0, World
from tests.core.usage.test_tracker import Rig, hold_of


def rig_of(*, tells_releases: bool) -> Rig:
    rig = Rig()
    rig.world = World(tier_driver=tells_releases)
    rig.tracker.set_release_events(enabled=tells_releases)
    rig.apply()
    return rig


# Where the driver tells the end of each file


def test_what_is_in_a_message_is_counted_as_long_as_it_is_there() -> None:
    rig = rig_of(tells_releases=True)
    task, control = rig.job(100, contexts=2)
    rig.world.post(task, control)
    assert hold_of(rig.tell_after(QUARANTINE_NS), 100).contexts == 2
    rig.world.discard(task)
    assert hold_of(rig.apply(), 100).contexts == 0


def test_what_is_in_a_message_of_a_process_that_ended_is_left_with_nobody() -> None:
    rig = rig_of(tells_releases=True)
    task, control = rig.job(100, contexts=2)
    rig.apply()
    rig.world.post(task, control)
    rig.end(task)
    (orphan,) = rig.tell_after(QUARANTINE_NS).orphans
    assert (orphan.owner.key, orphan.gpu, orphan.contexts, orphan.holders) == (task.key, V0, 2, ())
    other = rig.world.spawn(200)
    rig.world.receive(other)
    (orphan,) = rig.apply().orphans
    assert (orphan.contexts, orphan.holders) == (2, (other.key,))
    rig.end(other)
    assert rig.apply().orphans == ()


def test_after_a_loss_what_nobody_holds_is_taken_for_gone() -> None:
    """Its end may have been among what was lost."""
    rig = rig_of(tells_releases=True)
    task, control = rig.job(100, contexts=2)
    rig.apply()
    rig.world.post(task, control)
    rig.world.drain()
    rig.tracker.handle_lost_events(1)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    assert hold_of(rig.apply(), 100).contexts == 0


# Where only scans tell


def test_what_comes_out_of_a_message_is_as_it_was() -> None:
    rig = rig_of(tells_releases=False)
    task, control = rig.job(100, contexts=2)
    rig.apply()
    rig.world.post(task, control)
    hold = hold_of(rig.tell_after(QUARANTINE_NS - 10**9), 100)
    assert (hold.contexts, hold.allocated) == (0, 2)
    other = rig.world.spawn(200)
    rig.world.receive(other)
    hold = hold_of(rig.apply(), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (2, 2, 0)
    assert rig.tracker.pop_removed() == []


def test_a_call_with_a_file_from_a_message_brings_back_what_was_made_with_it() -> None:
    rig = rig_of(tells_releases=False)
    task, control = rig.job(100, contexts=2)
    rig.apply()
    client = next(iter(rig.world.clients))
    rig.world.post(task, control)
    rig.apply()
    rig.world.free(rig.world.spawn(200), client, client)
    rig.tracker.handle_events(rig.world.drain())
    hold = hold_of(rig.tracker.usage_snapshot(0), 100)
    assert (hold.contexts, hold.freed) == (1, 1)


def test_what_a_process_that_ended_put_into_a_message_is_its_own_when_it_comes_out() -> None:
    rig = rig_of(tells_releases=False)
    task, control = rig.job(100, contexts=2)
    rig.apply()
    rig.world.post(task, control)
    rig.end(task)
    assert rig.apply().orphans == ()
    other = rig.world.spawn(200)
    rig.world.receive(other)
    (orphan,) = rig.apply().orphans
    assert (orphan.owner.key, orphan.contexts, orphan.holders) == (task.key, 2, (other.key,))


def test_what_nobody_receives_is_taken_for_gone_after_a_time() -> None:
    rig = rig_of(tells_releases=False)
    task, control = rig.job(100, contexts=2)
    rig.apply()
    rig.world.post(task, control)
    rig.apply()
    assert rig.tracker.pop_removed() == []
    rig.world.now_ns += QUARANTINE_NS
    rig.apply()
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert rig.world.rows == {}
    other = rig.world.spawn(200)
    rig.world.receive(other)
    assert hold_of(rig.apply(), 100).contexts == 0


def test_an_address_that_is_used_again_brings_nothing_back() -> None:
    rig = rig_of(tells_releases=False)
    task, control = rig.job(100, contexts=2)
    rig.apply()
    rig.world.close(task, control)
    rig.apply()
    assert rig.world.open(task, CONTROL) == control
    assert hold_of(rig.apply(), 100).contexts == 0
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert rig.world.rows == {}


def test_what_may_come_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_QUARANTINED", 15)
    rig = rig_of(tells_releases=False)
    jobs = [rig.job(100 + number) for number in range(5)]
    rig.apply()
    for task, control in jobs:
        rig.world.post(task, control)
        rig.apply()
    rig.world.delete_rows(rig.tracker.pop_removed())
    # Each client has five objects that are tracked.
    assert len(rig.world.rows) <= 15
    other = rig.world.spawn(200)
    for _ in jobs:
        rig.world.receive(other)
    picture = rig.apply()
    assert [hold_of(picture, 100 + number).contexts for number in range(5)] == [0, 0, 0, 1, 1]
