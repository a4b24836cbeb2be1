"""The bounds: a process over its share loses its own entries alone, and is named."""

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.gpu_map import CONTROL
from agent.model.usage import ProcessKey, Usage
from tests.core.kernel_world import DEVICE, GROUP, SHARE, V0, V1, Task, gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of, wants


def hog(rig: Rig, pid: int, objects: int) -> Task:
    """Make a process with one client that has so many objects."""
    rig.world.handles = 1_000
    task = rig.world.spawn(pid)
    control = rig.world.open(task, CONTROL)
    rig.world.open(task, gpu_file(0))
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    for _ in range(objects - 1):
        rig.world.alloc(task, client, device, SHARE)
    return task


def names(usage: Usage, *pids: int) -> bool:
    """Return whether the usage is incomplete because of these processes and no others."""
    named = usage.incomplete_because.rpartition(": ")[2]
    return not usage.complete and named == ", ".join(map(str, pids))


SMALL = Bounds(objects=64, objects_of_owner=16)


def test_a_process_with_too_many_objects_loses_its_own_alone_and_is_named() -> None:
    rig = Rig(bounds=SMALL)
    rig.job(100, contexts=2)
    rig.update()
    hog(rig, 200, objects=100)
    rig.job(300, contexts=2)
    usage = rig.update()
    assert [hold_of(usage, pid).contexts for pid in (100, 300)] == [2, 2]
    assert [use_of(usage, pid).partial for pid in (100, 200, 300)] == [False, True, False]
    assert names(usage, 200)
    assert hold_of(usage, 200).contexts == 16 - 2
    assert usage.evicted == 100 - 15


def test_rows_of_rejected_objects_are_stale() -> None:
    rig = Rig(bounds=SMALL)
    hog(rig, 200, objects=60)
    rig.update()
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert len(rig.world.rows) == 16


def test_freed_objects_free_their_share() -> None:
    rig = Rig(bounds=SMALL)
    task = hog(rig, 200, objects=100)
    rig.update()
    client = next(iter(rig.world.clients))
    rig.world.free(task, client, client)
    control = next(file for file in task.fds if rig.world.files[file] == CONTROL)
    rig.world.context(task, control)
    usage = rig.update()
    assert hold_of(usage, 200).contexts == 1
    assert use_of(usage, 200).partial


def test_objects_made_and_freed_in_turn_use_no_more_room() -> None:
    rig = Rig(bounds=SMALL)
    task, control = rig.job(100, contexts=0)
    client = rig.world.client(task, control)
    for _ in range(30):
        device = rig.world.alloc(task, client, client, DEVICE, 0)
        rig.world.alloc(task, client, device, SHARE)
        rig.world.free(task, client, device)
    usage = rig.update()
    assert usage.complete
    assert (hold_of(usage, 100).allocated, hold_of(usage, 100).freed) == (30, 30)
    assert [len(rig.tracker._clients), rig.tracker._clients._sizes] == [1, {1: 1}]


def test_a_process_over_its_share_is_named_until_it_is_gone() -> None:
    rig = Rig(bounds=SMALL)
    task = hog(rig, 200, objects=100)
    assert names(rig.update(), 200)
    rig.end(task)
    rig.update_after(60 * 10**9)
    assert rig.update().complete


def test_processes_at_their_share_lose_before_one_with_little() -> None:
    rig = Rig(bounds=SMALL)
    rig.job(100, contexts=1)
    for number in range(8):
        hog(rig, 200 + number, objects=15)
    usage = rig.update()
    assert hold_of(usage, 100).contexts == 1
    assert not use_of(usage, 100).partial
    assert not usage.complete
    assert "and" in usage.incomplete_because
    assert rig.tracker.pop_removed() == []


def test_room_is_made_by_evicting_the_oldest_clients_of_the_largest_owner() -> None:
    rig = Rig(bounds=SMALL)
    task, control = rig.job(100, contexts=1)
    for number in range(3):
        hog(rig, 200 + number, objects=14)
    rig.world.handles = 40
    rig.job(300, contexts=1)
    rig.tracker.handle_events(rig.world.drain())
    assert rig.tracker.usage_snapshot(0).evicted == 0
    rig.world.context(task, control)
    rig.job(301, contexts=1)
    usage = rig.update()
    # Of 64, 63 were in use; one hog of 15 makes room, so that at most 7 of 8 are in use.
    assert [use.partial for use in usage.processes] == [False, True, False, False, False, False]
    assert usage.evicted == 15
    assert hold_of(usage, 200).contexts == 0
    assert hold_of(usage, 200).freed == 13


def test_a_process_over_its_share_is_so_after_a_rebuild_too() -> None:
    rig = Rig(bounds=SMALL)
    rig.job(100, contexts=2)
    hog(rig, 200, objects=100)
    rig.world.drain()
    rig.tracker.handle_lost_events(1)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    usage = rig.update()
    assert hold_of(usage, 100).contexts == 2
    assert names(usage, 200)


def test_a_process_with_too_many_files_loses_its_own_alone_and_is_named() -> None:
    rig = Rig(bounds=Bounds(files_of_process=10))
    rig.job(100)
    task, _ = rig.job(200)
    for _ in range(30):
        rig.world.open(task, gpu_file(0))
    for _ in range(2):
        usage = rig.update()
        assert [use_of(usage, pid).files for pid in (100, 200)] == [2, 10]
        assert [hold_of(usage, pid).contexts for pid in (100, 200)] == [1, 1]
        assert names(usage, 200)


def test_with_too_many_files_the_process_with_the_most_loses() -> None:
    rig = Rig(bounds=Bounds(files=24))
    rig.job(100)
    task, _ = rig.job(200)
    for _ in range(30):
        rig.world.open(task, gpu_file(0))
    usage = rig.update()
    assert (use_of(usage, 100).files, hold_of(usage, 100).contexts) == (2, 1)
    assert sum(use.files or 0 for use in usage.processes) == 24 * 7 // 8
    assert not usage.complete
    assert rig.tracker.pop_removed() == []
    for file in task.fds[2:]:
        rig.world.close(task, file)
    rig.update()
    assert rig.tracker.needs_rebuild


def test_with_a_file_each_room_is_made_for_many_at_once() -> None:
    rig = Rig(bounds=Bounds(files=80))
    for pid in range(81):
        rig.world.open(rig.world.spawn(1000 + pid), CONTROL)
    rig.tracker.handle_events(rig.world.drain())
    rig.read_statuses()
    usage = rig.tracker.usage_snapshot(rig.world.now_ns)
    assert (len(usage.processes), usage.evicted) == (70, 11)


def test_an_evicted_process_is_known_again_when_there_is_room() -> None:
    rig = Rig(bounds=Bounds(processes=3))
    rig.job(100, contexts=2)
    others = [rig.job(200 + number)[0] for number in range(4)]
    usage = rig.update()
    assert not usage.complete
    assert wants(rig) == (False, False)
    for other in others:
        rig.world.exit(other)
        rig.tracker.handle_events(rig.world.drain())
        rig.tracker.handle_process_gone(other.key, rig.world.now_ns)
    for _ in range(3):
        usage = rig.update_after(BOUNDS.quarantine_ns)
        if rig.tracker.needs_rebuild:
            rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
        rig.world.delete_rows(rig.tracker.pop_removed())
    usage = rig.update()
    assert usage.complete
    assert hold_of(usage, 100).contexts == 2


def test_a_process_with_objects_that_the_kernel_rejected_is_named() -> None:
    rig = Rig()
    task, _ = rig.job(100)
    rig.job(200)
    rig.update()
    rig.tracker.handle_rejected_objects([task.key, ProcessKey(200, 1)])
    usage = rig.update()
    assert [use_of(usage, pid).partial for pid in (100, 200)] == [True, False]
    assert names(usage, 100)


def test_only_the_gpus_of_a_process_with_missing_entries_are_doubted() -> None:
    rig = Rig()
    task, _ = rig.job(100, minor=0)
    rig.job(200, minor=1)
    assert rig.update().doubted == frozenset()
    rig.tracker.handle_rejected_objects([task.key])
    usage = rig.update()
    assert usage.doubted == {V0}
    assert [usage.is_whole(gpu) for gpu in (V0, V1)] == [False, True]
    rig.tracker.handle_lost_events(1)
    assert rig.tracker.usage_snapshot(0).is_blind


def test_a_closed_gpu_stays_doubted() -> None:
    rig = Rig()
    task, _ = rig.job(100, minor=0)
    other = rig.world.open(task, gpu_file(1))
    rig.update()
    rig.world.close(task, other)
    rig.tracker.handle_rejected_objects([task.key])
    assert rig.update().doubted == {V0, V1}


def test_a_process_without_room_for_a_file_may_have_any_gpu() -> None:
    rig = Rig(bounds=Bounds(files_of_process=3))
    task, _ = rig.job(100)
    for minor in (0, 1):
        rig.world.open(task, gpu_file(minor))
    assert rig.update().is_blind


def test_a_process_without_a_known_open_may_have_any_gpu() -> None:
    rig = Rig()
    task = rig.world.spawn(100)
    rig.world.open(task, CONTROL)
    rig.update()
    rig.tracker.handle_rejected_objects([task.key])
    assert rig.update().is_blind


def test_with_a_full_table_in_the_kernel_any_process_may_have_more() -> None:
    rig = Rig()
    rig.job(100)
    rig.update()
    rig.tracker.handle_full_object_table()
    rig.job(200)
    usage = rig.update()
    assert [use_of(usage, pid).partial for pid in (100, 200)] == [True, False]
    assert names(usage, 100)


def test_at_most_three_processes_are_named() -> None:
    rig = Rig()
    for number in range(5):
        rig.job(100 + number)
    rig.update()
    rig.tracker.handle_full_object_table()
    assert rig.update().incomplete_because.endswith(": 100, 101, 102 and 2 more")


def test_after_a_partial_scan_no_file_counts_as_gone() -> None:
    rig = Rig()
    rig.job(100, contexts=2)
    rig.update()
    rig.world.now_ns += 1
    for _ in rig.tracker.apply_scan_steps({}, rig.world.now_ns, is_whole=False):
        pass
    assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 2
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 2


def test_a_group_of_objects_above_the_share_is_not_counted_as_freed() -> None:
    rig = Rig(bounds=Bounds(objects_of_owner=3))
    task, control = rig.job(contexts=0)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    rig.world.alloc(task, client, device, SHARE)
    group = rig.world.alloc(task, client, device, GROUP)
    rig.world.free(task, client, group)
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.freed) == (1, 0)


def test_objects_that_the_kernel_rejected_do_not_count_as_evicted() -> None:
    rig = Rig()
    task, _ = rig.job(100)
    rig.update()
    rig.tracker.handle_rejected_objects([task.key])
    rig.tracker.handle_full_object_table()
    assert rig.update().evicted == 0


def test_losses_add_up() -> None:
    rig = Rig()
    rig.tracker.handle_lost_events(3)
    rig.tracker.handle_lost_events(4)
    usage = rig.update()
    assert (usage.events_lost, usage.incomplete_because) == (7, "events were lost")


def test_evicted_files_count_with_their_clients() -> None:
    rig = Rig(bounds=Bounds(files=24))
    task, control = rig.job(200, contexts=1)
    for _ in range(20):
        rig.world.open(task, gpu_file(0))
    rig.job(100, contexts=1)
    assert rig.update().complete
    rig.world.open(task, gpu_file(0))
    rig.tracker.handle_events(rig.world.drain())
    usage = rig.tracker.usage_snapshot(0)
    # Four of 25 files, and the client of six objects in the first of them.
    assert usage.evicted == 4 + 6
    assert [use.files for use in usage.processes] == [2, 19]
    assert hold_of(usage, 200).contexts == 0
    assert [use.partial for use in usage.processes] == [False, True]
    assert rig.tracker.pop_removed() == []
    assert control in rig.world.files


def test_a_process_that_loses_files_is_partial_though_they_have_no_clients() -> None:
    rig = Rig(bounds=Bounds(files=20))
    task = rig.world.spawn(200)
    for _ in range(20):
        rig.world.open(task, gpu_file(0))
    assert rig.update().complete
    rig.world.open(task, gpu_file(0))
    rig.tracker.handle_events(rig.world.drain())
    (use,) = rig.tracker.usage_snapshot(0).processes
    assert use.partial


def test_files_without_a_holder_are_evicted_too() -> None:
    rig = Rig(bounds=Bounds(files=4))
    rig.tracker.set_release_events(enabled=True)
    rig.world.tier_driver = True
    for number in range(5):
        task, control = rig.job(100 + number, contexts=1)
        rig.world.post(task, control)
        rig.world.exit(task)
        rig.update()
    assert len(rig.update().orphans) == 3


# Steps


def test_records_are_refreshed_a_few_at_a_time_and_unchanged_ones_stay_the_same_objects() -> None:
    rig = Rig()
    jobs = [rig.job(100 + number) for number in range(5)]
    before = rig.update()
    assert not rig.tracker.refresh(1)
    for task, control in jobs[:3]:
        rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    assert [rig.tracker.refresh(1) for _ in range(3)] == [True, True, False]
    after = rig.tracker.usage_snapshot(0)
    assert [use is old for use, old in zip(after.processes, before.processes, strict=True)] == [
        False, False, False, True, True,
    ]  # fmt: skip
    assert rig.tracker.usage_snapshot(1).processes is after.processes
    assert rig.tracker.usage_snapshot(1).orphans is after.orphans
