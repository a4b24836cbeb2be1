"""Files in messages (SCM_RIGHTS) and mappings: they are open without a descriptor in any process."""

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.gpu_map import CONTROL
from tests.core.kernel_world import V0, World
from tests.core.usage.test_tracker import Rig, hold_of


def rig_of(*, release_events: bool, bounds: Bounds = BOUNDS) -> Rig:
    rig = Rig(bounds=bounds)
    rig.world = World(tier_driver=release_events)
    rig.tracker.set_release_events(enabled=release_events)
    rig.update()
    return rig


# With release events


def test_a_client_in_a_message_counts_while_the_message_exists() -> None:
    rig = rig_of(release_events=True)
    task, control = rig.job(100, contexts=2)
    rig.world.post(task, control)
    assert hold_of(rig.update_after(BOUNDS.quarantine_ns), 100).contexts == 2
    rig.world.discard(task)
    assert hold_of(rig.update(), 100).contexts == 0


def test_a_client_in_a_message_of_a_gone_process_is_an_orphan_without_holders() -> None:
    rig = rig_of(release_events=True)
    task, control = rig.job(100, contexts=2)
    rig.update()
    rig.world.post(task, control)
    rig.end(task)
    (orphan,) = rig.update_after(BOUNDS.quarantine_ns).orphans
    assert (orphan.owner.key, orphan.gpu, orphan.contexts, orphan.holders) == (task.key, V0, 2, ())
    other = rig.world.spawn(200)
    rig.world.receive(other)
    (orphan,) = rig.update().orphans
    assert (orphan.contexts, orphan.holders) == (2, (other.key,))
    rig.end(other)
    assert rig.update().orphans == ()


def test_after_a_loss_a_file_without_a_holder_counts_as_closed() -> None:
    """Its release may have been among the lost events."""
    rig = rig_of(release_events=True)
    task, control = rig.job(100, contexts=2)
    rig.update()
    rig.world.post(task, control)
    rig.world.drain()
    rig.tracker.handle_lost_events(1)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    assert hold_of(rig.update(), 100).contexts == 0


# With scans alone


def test_a_received_client_is_restored() -> None:
    rig = rig_of(release_events=False)
    task, control = rig.job(100, contexts=2)
    rig.update()
    rig.world.post(task, control)
    hold = hold_of(rig.update_after(BOUNDS.quarantine_ns - 10**9), 100)
    assert (hold.contexts, hold.allocated) == (0, 2)
    other = rig.world.spawn(200)
    rig.world.receive(other)
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (2, 2, 0)
    assert rig.tracker.pop_removed() == []


def test_a_call_with_a_received_file_restores_its_clients() -> None:
    rig = rig_of(release_events=False)
    task, control = rig.job(100, contexts=2)
    rig.update()
    client = next(iter(rig.world.clients))
    rig.world.post(task, control)
    rig.update()
    rig.world.free(rig.world.spawn(200), client, client)
    rig.tracker.handle_events(rig.world.drain())
    hold = hold_of(rig.tracker.usage_snapshot(0), 100)
    assert (hold.contexts, hold.freed) == (1, 1)


def test_a_received_client_of_a_gone_process_is_its_orphan() -> None:
    rig = rig_of(release_events=False)
    task, control = rig.job(100, contexts=2)
    rig.update()
    rig.world.post(task, control)
    rig.end(task)
    assert rig.update().orphans == ()
    other = rig.world.spawn(200)
    rig.world.receive(other)
    (orphan,) = rig.update().orphans
    assert (orphan.owner.key, orphan.contexts, orphan.holders) == (task.key, 2, (other.key,))


def test_a_client_that_no_process_receives_counts_as_gone_after_a_time() -> None:
    rig = rig_of(release_events=False)
    task, control = rig.job(100, contexts=2)
    rig.update()
    rig.world.post(task, control)
    rig.update()
    assert rig.tracker.pop_removed() == []
    rig.world.now_ns += BOUNDS.quarantine_ns
    rig.update()
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert rig.world.rows == {}
    other = rig.world.spawn(200)
    rig.world.receive(other)
    assert hold_of(rig.update(), 100).contexts == 0


def test_a_reused_address_restores_no_client() -> None:
    rig = rig_of(release_events=False)
    task, control = rig.job(100, contexts=2)
    rig.update()
    rig.world.close(task, control)
    rig.update()
    assert rig.world.open(task, CONTROL) == control
    assert hold_of(rig.update(), 100).contexts == 0
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert rig.world.rows == {}


def test_the_quarantine_is_bounded() -> None:
    rig = rig_of(release_events=False, bounds=Bounds(quarantined=15))
    jobs = [rig.job(100 + number) for number in range(5)]
    rig.update()
    for task, control in jobs:
        rig.world.post(task, control)
        rig.update()
    rig.world.delete_rows(rig.tracker.pop_removed())
    # Each client has five objects that are tracked.
    assert len(rig.world.rows) <= 15
    other = rig.world.spawn(200)
    for _ in jobs:
        rig.world.receive(other)
    usage = rig.update()
    assert [hold_of(usage, 100 + number).contexts for number in range(5)] == [0, 0, 0, 1, 1]
