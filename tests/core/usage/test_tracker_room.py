"""Where there is no room: who takes too much loses of its own alone, and is named."""

import pytest

from agent.core.usage import clients
from agent.core.usage import files as open_files
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.quarantine import QUARANTINE_NS
from agent.model.usage import ProcessKey, Usage
from tests.core.kernel_world import DEVICE, GROUP, SHARE, V0, V1, Task, gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of, wants


def hog(rig: Rig, pid: int, objects: int) -> Task:
    """A process with one client that has so many objects in it."""
    rig.world.handles = 1_000
    task = rig.world.spawn(pid)
    control = rig.world.open(task, CONTROL)
    rig.world.open(task, gpu_file(0))
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    for _ in range(objects - 1):
        rig.world.alloc(task, client, device, SHARE)
    return task


def names(picture: Usage, *pids: int) -> bool:
    """Whether the picture is not complete because of these processes, and of no others."""
    named = picture.incomplete_because.rpartition(": ")[2]
    return not picture.complete and named == ", ".join(map(str, pids))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with room for 64 objects, 16 of one owner."""
    monkeypatch.setattr(clients, "MAX_OBJECTS", 64)
    monkeypatch.setattr(clients, "MAX_OF_OWNER", 16)


@pytest.mark.usefixtures("small")
def test_who_makes_too_many_objects_loses_of_its_own_alone_and_is_named() -> None:
    rig = Rig()
    rig.job(100, contexts=2)
    rig.apply()
    hog(rig, 200, objects=100)
    rig.job(300, contexts=2)
    picture = rig.apply()
    assert [hold_of(picture, pid).contexts for pid in (100, 300)] == [2, 2]
    assert [use_of(picture, pid).partial for pid in (100, 200, 300)] == [False, True, False]
    assert names(picture, 200)
    assert hold_of(picture, 200).contexts == 16 - 2
    assert picture.evicted == 100 - 15


@pytest.mark.usefixtures("small")
def test_rows_of_objects_that_are_not_kept_make_room_in_the_kernel() -> None:
    rig = Rig()
    hog(rig, 200, objects=60)
    rig.apply()
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert len(rig.world.rows) == 16


@pytest.mark.usefixtures("small")
def test_a_share_is_free_again_when_what_took_it_is_freed() -> None:
    rig = Rig()
    task = hog(rig, 200, objects=100)
    rig.apply()
    client = next(iter(rig.world.clients))
    rig.world.free(task, client, client)
    control = next(file for file in task.fds if rig.world.files[file] == CONTROL)
    rig.world.context(task, control)
    picture = rig.apply()
    assert hold_of(picture, 200).contexts == 1
    assert use_of(picture, 200).partial


@pytest.mark.usefixtures("small")
def test_what_is_made_and_freed_again_and_again_takes_no_more_room() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=0)
    client = rig.world.client(task, control)
    for _ in range(30):
        device = rig.world.alloc(task, client, client, DEVICE, 0)
        rig.world.alloc(task, client, device, SHARE)
        rig.world.free(task, client, device)
    picture = rig.apply()
    assert picture.complete
    assert (hold_of(picture, 100).allocated, hold_of(picture, 100).freed) == (30, 30)
    assert [len(rig.tracker._clients), rig.tracker._clients._sizes] == [1, {1: 1}]


@pytest.mark.usefixtures("small")
def test_the_name_of_who_has_too_much_goes_with_its_end() -> None:
    rig = Rig()
    task = hog(rig, 200, objects=100)
    assert names(rig.apply(), 200)
    rig.end(task)
    rig.tell_after(60 * 10**9)
    assert rig.apply().complete


@pytest.mark.usefixtures("small")
def test_many_who_take_their_share_lose_before_who_takes_little() -> None:
    rig = Rig()
    rig.job(100, contexts=1)
    for number in range(8):
        hog(rig, 200 + number, objects=15)
    picture = rig.apply()
    assert hold_of(picture, 100).contexts == 1
    assert not use_of(picture, 100).partial
    assert not picture.complete
    assert "and" in picture.incomplete_because
    assert rig.tracker.pop_removed() == []


@pytest.mark.usefixtures("small")
def test_room_is_made_by_the_quietest_clients_of_whoever_takes_most() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    for number in range(3):
        hog(rig, 200 + number, objects=14)
    rig.world.handles = 40
    rig.job(300, contexts=1)
    rig.tracker.handle_events(rig.world.drain())
    assert rig.tracker.usage_snapshot(0).evicted == 0
    rig.world.context(task, control)
    rig.job(301, contexts=1)
    picture = rig.apply()
    # Of 64, 63 were taken; one hog of 15 makes room, so that 7 of 8 are taken at most.
    assert [use.partial for use in picture.processes] == [False, True, False, False, False, False]
    assert picture.evicted == 15
    assert hold_of(picture, 200).contexts == 0
    assert hold_of(picture, 200).freed == 13


@pytest.mark.usefixtures("small")
def test_who_is_too_much_is_so_after_a_rebuild_too() -> None:
    rig = Rig()
    rig.job(100, contexts=2)
    hog(rig, 200, objects=100)
    rig.world.drain()
    rig.tracker.handle_lost_events(1)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    picture = rig.apply()
    assert hold_of(picture, 100).contexts == 2
    assert names(picture, 200)


def test_who_opens_too_many_files_loses_of_its_own_alone_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_files, "MAX_FILES_OF_PROCESS", 10)
    rig = Rig()
    rig.job(100)
    task, _ = rig.job(200)
    for _ in range(30):
        rig.world.open(task, gpu_file(0))
    for _ in range(2):
        picture = rig.apply()
        assert [use_of(picture, pid).files for pid in (100, 200)] == [2, 10]
        assert [hold_of(picture, pid).contexts for pid in (100, 200)] == [1, 1]
        assert names(picture, 200)


def test_where_there_are_too_many_files_who_has_most_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MAX_FILES", 24)
    rig = Rig()
    rig.job(100)
    task, _ = rig.job(200)
    for _ in range(30):
        rig.world.open(task, gpu_file(0))
    picture = rig.apply()
    assert (use_of(picture, 100).files, hold_of(picture, 100).contexts) == (2, 1)
    assert sum(use.files or 0 for use in picture.processes) == 24 * 7 // 8
    assert not picture.complete
    assert rig.tracker.pop_removed() == []
    for file in task.fds[2:]:
        rig.world.close(task, file)
    rig.apply()
    assert rig.tracker.needs_rebuild


def test_where_many_have_a_file_each_room_is_made_for_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MAX_FILES", 80)
    rig = Rig()
    for pid in range(81):
        rig.world.open(rig.world.spawn(1000 + pid), CONTROL)
    rig.tracker.handle_events(rig.world.drain())
    rig.look()
    picture = rig.tracker.usage_snapshot(rig.world.now_ns)
    assert (len(picture.processes), picture.evicted) == (70, 11)


def test_who_was_forgotten_for_others_is_known_again_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_files, "MAX_PROCESSES", 3)
    rig = Rig()
    rig.job(100, contexts=2)
    others = [rig.job(200 + number)[0] for number in range(4)]
    picture = rig.apply()
    assert not picture.complete
    assert wants(rig) == (False, False)
    for other in others:
        rig.world.exit(other)
        rig.tracker.handle_events(rig.world.drain())
        rig.tracker.handle_process_gone(other.key, rig.world.now_ns)
    for _ in range(3):
        picture = rig.tell_after(QUARANTINE_NS)
        if rig.tracker.needs_rebuild:
            rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
        rig.world.delete_rows(rig.tracker.pop_removed())
    picture = rig.apply()
    assert picture.complete
    assert hold_of(picture, 100).contexts == 2


def test_of_whom_the_kernel_keeps_no_more_is_named() -> None:
    rig = Rig()
    task, _ = rig.job(100)
    rig.job(200)
    rig.apply()
    rig.tracker.handle_rejected_objects([task.key, ProcessKey(200, 1)])
    picture = rig.apply()
    assert [use_of(picture, pid).partial for pid in (100, 200)] == [True, False]
    assert names(picture, 100)


def test_of_whom_not_all_is_kept_the_gpus_alone_are_in_doubt() -> None:
    rig = Rig()
    task, _ = rig.job(100, minor=0)
    rig.job(200, minor=1)
    assert rig.apply().doubted == frozenset()
    rig.tracker.handle_rejected_objects([task.key])
    picture = rig.apply()
    assert picture.doubted == {V0}
    assert [picture.is_whole(gpu) for gpu in (V0, V1)] == [False, True]
    rig.tracker.handle_lost_events(1)
    assert rig.tracker.usage_snapshot(0).is_blind


def test_a_gpu_that_was_closed_stays_in_doubt() -> None:
    rig = Rig()
    task, _ = rig.job(100, minor=0)
    other = rig.world.open(task, gpu_file(1))
    rig.apply()
    rig.world.close(task, other)
    rig.tracker.handle_rejected_objects([task.key])
    assert rig.apply().doubted == {V0, V1}


def test_who_has_no_room_for_a_file_may_have_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MAX_FILES_OF_PROCESS", 3)
    rig = Rig()
    task, _ = rig.job(100)
    for minor in (0, 1):
        rig.world.open(task, gpu_file(minor))
    assert rig.apply().is_blind


def test_who_opened_no_gpu_that_is_known_may_have_any() -> None:
    rig = Rig()
    task = rig.world.spawn(100)
    rig.world.open(task, CONTROL)
    rig.apply()
    rig.tracker.handle_rejected_objects([task.key])
    assert rig.apply().is_blind


def test_while_the_kernels_table_is_full_anyone_may_have_more() -> None:
    rig = Rig()
    rig.job(100)
    rig.apply()
    rig.tracker.handle_full_object_table()
    rig.job(200)
    picture = rig.apply()
    assert [use_of(picture, pid).partial for pid in (100, 200)] == [True, False]
    assert names(picture, 100)


def test_at_most_three_are_named() -> None:
    rig = Rig()
    for number in range(5):
        rig.job(100 + number)
    rig.apply()
    rig.tracker.handle_full_object_table()
    assert rig.apply().incomplete_because.endswith(": 100, 101, 102 and 2 more")


def test_a_scan_that_saw_not_all_takes_nothing_for_gone() -> None:
    rig = Rig()
    rig.job(100, contexts=2)
    rig.apply()
    rig.world.now_ns += 1
    for _ in rig.tracker.apply_scan_steps({}, rig.world.now_ns, is_whole=False):
        pass
    assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 2
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 2


def test_a_group_of_objects_above_the_share_is_not_counted_as_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "MAX_OF_OWNER", 3)
    rig = Rig()
    task, control = rig.job(contexts=0)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    rig.world.alloc(task, client, device, SHARE)
    group = rig.world.alloc(task, client, device, GROUP)
    rig.world.free(task, client, group)
    hold = hold_of(rig.apply(), 100)
    assert (hold.contexts, hold.freed) == (1, 0)


def test_what_the_kernel_did_not_keep_is_no_entry_that_was_forgotten() -> None:
    rig = Rig()
    task, _ = rig.job(100)
    rig.apply()
    rig.tracker.handle_rejected_objects([task.key])
    rig.tracker.handle_full_object_table()
    assert rig.apply().evicted == 0


def test_losses_add_up() -> None:
    rig = Rig()
    rig.tracker.handle_lost_events(3)
    rig.tracker.handle_lost_events(4)
    picture = rig.apply()
    assert (picture.events_lost, picture.incomplete_because) == (7, "events were lost")


def test_files_that_are_forgotten_are_counted_with_what_was_made_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    task, control = rig.job(200, contexts=1)
    for _ in range(20):
        rig.world.open(task, gpu_file(0))
    rig.job(100, contexts=1)
    assert rig.apply().complete
    monkeypatch.setattr(open_files, "MAX_FILES", 16)
    rig.tracker.handle_events([])
    picture = rig.tracker.usage_snapshot(0)
    # Ten of 24 files, and the client of six objects in the first of them.
    assert picture.evicted == 10 + 6
    assert [use.files for use in picture.processes] == [2, 12]
    assert hold_of(picture, 200).contexts == 0
    assert [use.partial for use in picture.processes] == [False, True]
    assert rig.tracker.pop_removed() == []
    assert control in rig.world.files


def test_who_loses_files_is_partial_though_nothing_was_made_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    task = rig.world.spawn(200)
    for _ in range(20):
        rig.world.open(task, gpu_file(0))
    rig.apply()
    monkeypatch.setattr(open_files, "MAX_FILES", 16)
    rig.tracker.handle_events([])
    (use,) = rig.tracker.usage_snapshot(0).processes
    assert use.partial


def test_files_that_nobody_holds_make_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.tracker.set_release_events(enabled=True)
    rig.world.tier_driver = True
    for number in range(6):
        task, control = rig.job(100 + number, contexts=1)
        rig.world.post(task, control)
        rig.world.exit(task)
        rig.apply()
    monkeypatch.setattr(open_files, "MAX_FILES", 4)
    rig.tracker.handle_events([])
    assert len(rig.apply().orphans) == 3


# Steps


def test_records_are_made_a_few_at_a_time_and_what_did_not_change_stays_as_it_is() -> None:
    rig = Rig()
    jobs = [rig.job(100 + number) for number in range(5)]
    before = rig.apply()
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
