"""Pids that are used again, and processes that only seem to have ended: who made what, and who holds it."""

import pytest

from agent.core.usage import clients
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.processes import by_process
from agent.core.usage.quarantine import QUARANTINE_NS
from agent.core.usage.tracker import Tracker
from agent.model.rm import HeldFile, RmEventKind
from agent.model.structs import replace
from agent.model.usage import GONE, NoPod, Orphan, ProcessKey, ProcessStatus
from tests.core.kernel_world import DEVICE, GPUS, SHARE, UVM, V0, V1, VASPACE, Task, gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of


def seemingly_ended(rig: Rig, *, contexts: int = 1) -> tuple[Task, int]:
    """A known process whose first thread exited: what comes next may be of another that got its pid."""
    task, control = rig.job(100, contexts=contexts)
    rig.world.open(task, gpu_file(1))
    rig.apply()
    rig.world.begin_exit(task)
    task.exiting = False
    return task, control


def test_what_it_made_and_freed_since_is_its_own_when_it_is_seen_to_live() -> None:
    rig = Rig()
    task, control = seemingly_ended(rig)
    rig.world.open(task, gpu_file(1))
    first, _ = rig.world.context(task, control, 1)
    rig.world.context(task, control, 1)
    rig.world.free(task, first, first)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    for picture in (rig.tracker.usage_snapshot(0), rig.apply()):
        use = use_of(picture, 100)
        assert (use.fds, use.files, use.exiting_since_ns) == (4, 4, None)
        assert [(hold.gpu, hold.contexts, hold.allocated, hold.freed) for hold in use.holds] == [
            (V0, 1, 1, 0),
            (V1, 1, 2, 1),
        ]
    assert [key.pid for key in rig.tracker.living] == [100]


def test_what_it_opened_since_is_its_own() -> None:
    rig = Rig()
    task, _ = seemingly_ended(rig)
    rig.world.open(task, CONTROL)
    rig.world.open(task, UVM)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 5
    assert use_of(rig.apply(), 100).files == 5
    for file in list(task.fds):
        rig.world.close(task, file)
    assert rig.apply().processes == ()


def test_it_may_seem_to_end_again() -> None:
    rig = Rig()
    task, control = seemingly_ended(rig)
    for number in range(3):
        rig.world.context(task, control)
        rig.tracker.handle_events(rig.world.drain())
        rig.tracker.update_statuses([task.status], rig.world.now_ns)
        assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 2 + number
        rig.world.begin_exit(task)
        task.exiting = False
    rig.end(task)
    assert rig.apply().processes == ()


def test_what_it_put_into_a_message_since_is_its_own() -> None:
    rig = Rig()
    task, _ = seemingly_ended(rig)
    control = rig.world.open(task, CONTROL)
    rig.world.context(task, control)
    kept = rig.world.open(task, CONTROL)
    rig.world.context(task, kept)
    rig.tracker.handle_events(rig.world.drain())
    rig.world.post(task, control)
    files, task.fds = task.fds, []
    rig.tracker.handle_events(rig.world.drain())
    rig.world.now_ns += 1
    rig.tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    task.fds = files
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    rig.world.receive(task)
    picture = rig.apply()
    assert hold_of(picture, 100).contexts == 3
    assert hold_of(picture, 100).freed == 0
    rig.tell_after(QUARANTINE_NS)
    assert hold_of(rig.apply(), 100).contexts == 3


def test_what_it_said_of_gpus_since_is_believed_of_it() -> None:
    rig = Rig(replace(GPUS, by_instance={}))
    task, control = seemingly_ended(rig, contexts=0)
    uvm = rig.world.open(task, UVM)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 1)
    rig.world.register(task, uvm, client, rig.world.alloc(task, client, device, VASPACE), V1)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    other = rig.world.client(task, control)
    rig.world.alloc(task, other, rig.world.alloc(task, other, other, DEVICE, 1), SHARE)
    assert hold_of(rig.apply(), 100, V1).contexts == 1


def test_what_it_had_too_much_of_since_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_OF_OWNER", 8)
    rig = Rig()
    task, control = seemingly_ended(rig)
    for _ in range(5):
        rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    picture = rig.apply()
    assert use_of(picture, 100).partial
    assert picture.incomplete_because.endswith(": 100")


def test_it_has_as_many_descriptors_as_before() -> None:
    rig = Rig()
    task, control = seemingly_ended(rig)
    rig.world.dup(task, control)
    rig.apply()
    rig.world.begin_exit(task)
    task.exiting = False
    rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).fds == 4


def test_what_it_does_then_is_its_own_at_once() -> None:
    rig = Rig()
    task, control = seemingly_ended(rig)
    rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    assert rig.tracker.without_status == ()
    assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 3


def test_what_it_opened_since_may_be_closed_again_without_a_word() -> None:
    rig = Rig()
    task, _ = seemingly_ended(rig)
    file = rig.world.open(task, CONTROL)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 4
    task.fds.remove(file)
    assert use_of(rig.apply(), 100).files == 3


# Who had a pid before


def test_rows_of_several_who_had_a_pid_before_are_each_ones_own() -> None:
    rig = Rig()
    earlier = []
    for number in range(3):
        task, _ = rig.job(100, contexts=number + 1)
        rig.world.fork(task, 200 + number)
        rig.world.exit(task)
        earlier.append(task)
    rig.job(100, contexts=1)
    tracker = Tracker(GPUS)
    looks = [task.status for task in rig.world.alive]
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    tracker.update_statuses(looks, rig.world.now_ns)
    tracker.rebuild(rig.world.rows.values(), rig.world.now_ns, dict(rig.world.opened))
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    picture = tracker.usage_snapshot(0)
    assert [(left.owner.key, left.contexts, left.holders[0].pid) for left in picture.orphans] == [
        (task.key, number + 1, 200 + number) for number, task in enumerate(earlier)
    ]
    assert hold_of(picture, 100).contexts == 1


def test_rows_of_who_had_a_pid_before_are_left_by_that_process() -> None:
    rig = Rig()
    first, control = rig.job(100, contexts=2)
    child = rig.world.fork(first, 101)
    rig.world.exit(first)
    again, _ = rig.job(100, contexts=1)
    tracker = Tracker(GPUS)
    now_ns = rig.world.now_ns
    tracker.apply_scan(rig.world.scan(), now_ns)
    tracker.update_statuses([again.status, child.status], now_ns)
    for _ in range(2):
        tracker.rebuild(rig.world.rows.values(), now_ns, dict(rig.world.opened))
        tracker.apply_scan(rig.world.scan(), now_ns)
        tracker.update_statuses([again.status, child.status], now_ns)
        picture = tracker.usage_snapshot(now_ns)
        (orphan,) = picture.orphans
        assert (orphan.owner.key, orphan.gpu, orphan.contexts) == (first.key, V0, 2)
        assert (orphan.holders, orphan.ended_ns) == ((child.key,), now_ns)
        assert hold_of(picture, 100).contexts == 1
    assert control in rig.world.files


def test_rows_of_a_process_that_is_gone_and_was_known_are_its_own() -> None:
    rig = Rig()
    first, _ = rig.job(100, contexts=2)
    child = rig.world.fork(first, 101)
    rig.apply()
    rig.end(first)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns, dict(rig.world.opened))
    (orphan,) = rig.apply().orphans
    assert (orphan.owner.comm, orphan.contexts, orphan.holders) == ("python3", 2, (child.key,))


# Addresses that may have been used again


def handed_on_while_events_were_lost() -> tuple[Rig, Task]:
    """A file of a process that ended goes from one to another, and nobody hears of it."""
    rig = Rig()
    owner, control = rig.job(100, contexts=2)
    rig.apply()
    holder, last = rig.world.spawn(101), rig.world.spawn(102)
    rig.world.send(holder, control)
    gpu = rig.world.open(holder, gpu_file(1))
    rig.apply()
    rig.end(owner)
    assert [orphan.holders for orphan in rig.apply().orphans] == [(holder.key,)]
    for file in (control, gpu):
        rig.world.send(last, file)
        rig.world.close(holder, file)
    rig.world.drain()
    rig.tracker.handle_lost_events(1)
    rig.world.now_ns += 1
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    return rig, last


def test_a_file_that_none_of_its_holders_has_after_a_loss_may_be_another() -> None:
    rig, last = handed_on_while_events_were_lost()
    picture = rig.apply()
    assert picture.orphans == ()
    assert use_of(picture, 102).key == last.key


def test_an_event_of_a_client_tells_that_it_is_there_after_all() -> None:
    rig, last = handed_on_while_events_were_lost()
    rig.apply()
    client = next(iter(rig.world.clients))
    early_ns = rig.tracker._rebuilt_ns - 1
    rig.world.alloc(last, client, client, DEVICE, 0)
    (event,) = rig.world.drain()
    rig.tracker.handle_events([event._replace(at_ns=early_ns)])
    picture = rig.apply()
    assert [(orphan.contexts, orphan.holders) for orphan in picture.orphans] == [(1, (last.key,))]


def test_a_file_that_one_of_its_holders_has_after_a_loss_is_the_same() -> None:
    rig = Rig()
    owner, control = rig.job(100, contexts=2)
    holder = rig.world.spawn(101)
    rig.world.send(holder, control)
    rig.apply()
    rig.end(owner)
    rig.apply()
    rig.tracker.handle_lost_events(1)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    (orphan,) = rig.apply().orphans
    assert (orphan.contexts, orphan.holders) == (2, (holder.key,))


# Of /proc alone


def test_of_proc_alone_each_process_and_device_is_a_file_of_its_own() -> None:

    held = by_process(
        HeldFile(pid, start, 0, device, fds, 0)
        for pid, start, device, fds in [(7, 1, 5, 1), (7, 1, 5, 2), (7, 1, 6, 1), (7, 2, 5, 1), (8, 1, 5, 1)]
    )
    names = [name for files in held.values() for name in files]
    assert len(set(names)) == 4
    assert all(name < 0 for name in names)
    assert [sorted(found.fds for found in held[key].values()) for key in sorted(held)] == [[1, 3], [1], [1]]
    assert sorted(held) == [ProcessKey(7, 1), ProcessKey(7, 2), ProcessKey(8, 1)]


def test_what_is_left_by_who_was_never_looked_at_has_its_pid_alone() -> None:
    rig = Rig()
    first, _ = rig.job(100, contexts=2)
    made_ns = min(row.at_ns for row in rig.world.rows.values())
    child = rig.world.fork(first, 101)
    rig.world.exit(first)
    again, _ = rig.job(100, contexts=0)
    tracker = Tracker(GPUS)
    tracker.apply_scan(rig.world.scan(), 5)
    tracker.update_statuses([again.status, child.status], 5)
    tracker.rebuild(rig.world.rows.values(), 6, dict(rig.world.opened))
    tracker.apply_scan(rig.world.scan(), 7)
    assert tracker.usage_snapshot(8).orphans == (
        Orphan(ProcessStatus(first.key, "", GONE, "", NoPod.UNKNOWN), 5, V0, 2, 2, (child.key,), made_ns),
    )


def rebuilt_from(rig: Rig, tracker: Tracker, *, ticks: int | None = None) -> None:
    """Only rows tell; whose start they have is another matter."""
    rows = [row if ticks is None else row._replace(start_ticks=ticks) for row in rig.world.rows.values()]
    tracker.rebuild(rows, rig.world.now_ns, dict(rig.world.opened))


def test_rows_without_a_start_are_of_who_has_the_pid_now() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=2)
    tracker = Tracker(GPUS)
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    tracker.update_statuses([task.status], rig.world.now_ns)
    rebuilt_from(rig, tracker, ticks=0)
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    assert hold_of(tracker.usage_snapshot(0), 100).contexts == 2
    assert tracker.usage_snapshot(0).orphans == ()


def test_rows_of_a_pid_that_nobody_knows_are_of_whom_they_name() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=2)
    tracker = Tracker(GPUS)
    rebuilt_from(rig, tracker)
    assert tracker.without_status == (task.key,)
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    tracker.update_statuses([task.status], rig.world.now_ns)
    assert hold_of(tracker.usage_snapshot(0), 100).contexts == 2


def test_rows_without_a_start_that_are_younger_than_the_end_of_a_process_are_anothers() -> None:
    rig = Rig()
    first, _ = rig.job(100, contexts=1)
    child = rig.world.fork(first, 101)
    rig.apply()
    rig.end(first)
    rig.apply()
    rows = [row._replace(start_ticks=0) for row in rig.world.rows.values()]
    again = rig.world.spawn(100)
    rig.world.now_ns += 1
    control = rig.world.open(again, CONTROL)
    rig.world.context(again, control)
    late = [
        row._replace(start_ticks=0)
        for row in rig.world.rows.values()
        if row.tgid == 100 and row.file == control
    ]
    rig.world.drain()
    rig.tracker.handle_lost_events(1)
    rig.world.now_ns += 1
    rig.tracker.rebuild([*rows, *late], rig.world.now_ns, dict(rig.world.opened))
    picture = rig.apply()
    assert use_of(picture, 100).key == again.key
    assert use_of(picture, 100).unplaced == 1
    assert [(orphan.owner.key, orphan.contexts) for orphan in picture.orphans] == [(first.key, 1)]
    assert child.fds


# The driver's own end of a file


def test_the_end_of_a_file_takes_it_from_all_who_had_it() -> None:
    rig = Rig()
    rig.world.tier_driver = True
    rig.tracker.set_release_events(enabled=True)
    task, control = rig.job(100, contexts=1)
    rig.world.open(task, gpu_file(1))
    rig.apply()
    rig.world.close(task, control)
    rig.tracker.handle_events(rig.world.drain())
    use = use_of(rig.tracker.usage_snapshot(0), 100)
    assert (use.files, [hold.contexts for hold in use.holds]) == (2, [0, 0])


def test_an_end_that_is_told_late_ends_no_later_file_of_that_address() -> None:
    rig = Rig()
    rig.world.tier_driver = True
    rig.tracker.set_release_events(enabled=True)
    task, control = rig.job(100, contexts=1)
    rig.apply()
    rig.world.close(task, control)
    told = rig.world.drain()
    release = next(event for event in told if event.kind is RmEventKind.RELEASE)
    rig.tracker.handle_events(told)
    assert rig.world.open(task, CONTROL) == control
    rig.world.context(task, control)
    events = rig.world.drain()
    rig.tracker.handle_events(events)
    rig.tracker.handle_events([release])
    assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 1
    rig.tracker.handle_events([release._replace(at_ns=events[-1].at_ns)])
    use = use_of(rig.tracker.usage_snapshot(0), 100)
    assert (use.files, use.unplaced) == (1, 0)


def test_the_end_of_a_file_that_is_not_known_ends_what_was_put_aside() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    rig.apply()
    rig.world.post(task, control)
    rig.apply()
    rig.world.tier_driver = True
    rig.world.discard(task)
    rig.tracker.handle_events(rig.world.drain())
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert rig.world.rows == {}


# Frees


def test_what_is_freed_in_the_moment_it_was_made_is_gone() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    client, share = rig.world.context(task, control)
    events = rig.world.drain()
    rig.tracker.handle_events(events)
    (made,) = [each for each in events if (each.client, each.handle) == (client, share)]
    rig.tracker.handle_events([made._replace(kind=RmEventKind.FREE)])
    assert hold_of(rig.apply(), 100).freed == 1
    root = next(each for each in events if (each.client, each.handle) == (client, client))
    rig.tracker.handle_events([root._replace(kind=RmEventKind.FREE)])
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert [row for row in rig.world.rows.values() if row.rm_class != 0x41 and row.handle != share] == []


def test_what_is_freed_is_counted_for_the_gpu_it_was_on_and_all_of_it_is_told() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    rig.world.open(task, gpu_file(1))
    made = [rig.world.context(task, control, minor)[0] for minor in (0, 1, 1)]
    rig.apply()
    for client in made[1:]:
        device = next(
            name for name, each in rig.world.clients[client].objects.items() if each.parent == client
        )
        rig.world.free(task, client, device)
    holds = {hold.gpu: (hold.contexts, hold.freed) for hold in use_of(rig.apply(), 100).holds}
    assert holds == {V0: (1, 0), V1: (0, 2)}
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert {row.client for row in rig.world.rows.values() if row.handle != row.client} == {made[0]}
