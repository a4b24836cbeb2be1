"""Reused pids, and processes that only seem to be gone: the owners and holders of clients."""

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.processes import by_process
from agent.core.usage.tracker import Tracker
from agent.model.rm import HeldFile, RmEventKind
from agent.model.structs import replace
from agent.model.usage import GONE, NoPod, Orphan, ProcessKey, ProcessStatus
from tests.core.kernel_world import DEVICE, GPUS, SHARE, UVM, V0, V1, VASPACE, Task, gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of


def seemingly_gone(rig: Rig, *, contexts: int = 1) -> tuple[Task, int]:
    """A known process whose first thread exited: later events may be of another process with its pid."""
    task, control = rig.job(100, contexts=contexts)
    rig.world.open(task, gpu_file(1))
    rig.update()
    rig.world.begin_exit(task)
    task.exiting = False
    return task, control


def test_contexts_made_and_freed_since_are_its_own_when_it_proves_alive() -> None:
    rig = Rig()
    task, control = seemingly_gone(rig)
    rig.world.open(task, gpu_file(1))
    first, _ = rig.world.context(task, control, 1)
    rig.world.context(task, control, 1)
    rig.world.free(task, first, first)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    for usage in (rig.tracker.usage_snapshot(0), rig.update()):
        use = use_of(usage, 100)
        assert (use.fds, use.files, use.exiting_since_ns) == (4, 4, None)
        assert [(hold.gpu, hold.contexts, hold.allocated, hold.freed) for hold in use.holds] == [
            (V0, 1, 1, 0),
            (V1, 1, 2, 1),
        ]
    assert [key.pid for key in rig.tracker.living] == [100]


def test_files_opened_since_are_its_own() -> None:
    rig = Rig()
    task, _ = seemingly_gone(rig)
    rig.world.open(task, CONTROL)
    rig.world.open(task, UVM)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 5
    assert use_of(rig.update(), 100).files == 5
    for file in list(task.fds):
        rig.world.close(task, file)
    assert rig.update().processes == ()


def test_it_may_seem_gone_again() -> None:
    rig = Rig()
    task, control = seemingly_gone(rig)
    for number in range(3):
        rig.world.context(task, control)
        rig.tracker.handle_events(rig.world.drain())
        rig.tracker.update_statuses([task.status], rig.world.now_ns)
        assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 2 + number
        rig.world.begin_exit(task)
        task.exiting = False
    rig.end(task)
    assert rig.update().processes == ()


def test_a_file_sent_since_is_its_own() -> None:
    rig = Rig()
    task, _ = seemingly_gone(rig)
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
    usage = rig.update()
    assert hold_of(usage, 100).contexts == 3
    assert hold_of(usage, 100).freed == 0
    rig.update_after(BOUNDS.quarantine_ns)
    assert hold_of(rig.update(), 100).contexts == 3


def test_claims_on_gpus_since_count_for_it() -> None:
    rig = Rig(replace(GPUS, by_instance={}))
    task, control = seemingly_gone(rig, contexts=0)
    uvm = rig.world.open(task, UVM)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 1)
    rig.world.register(task, uvm, client, rig.world.alloc(task, client, device, VASPACE), V1)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    other = rig.world.client(task, control)
    rig.world.alloc(task, other, rig.world.alloc(task, other, other, DEVICE, 1), SHARE)
    assert hold_of(rig.update(), 100, V1).contexts == 1


def test_a_share_exceeded_since_is_its_own() -> None:
    rig = Rig(bounds=Bounds(objects_of_owner=8))
    task, control = seemingly_gone(rig)
    for _ in range(5):
        rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    usage = rig.update()
    assert use_of(usage, 100).partial
    assert usage.incomplete_because.endswith(": 100")


def test_it_has_as_many_descriptors_as_before() -> None:
    rig = Rig()
    task, control = seemingly_gone(rig)
    rig.world.dup(task, control)
    rig.update()
    rig.world.begin_exit(task)
    task.exiting = False
    rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).fds == 4


def test_later_events_are_its_own_at_once() -> None:
    rig = Rig()
    task, control = seemingly_gone(rig)
    rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    rig.world.context(task, control)
    rig.tracker.handle_events(rig.world.drain())
    assert rig.tracker.without_status == ()
    assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 3


def test_a_file_opened_since_may_be_closed_without_an_event() -> None:
    rig = Rig()
    task, _ = seemingly_gone(rig)
    file = rig.world.open(task, CONTROL)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 4
    task.fds.remove(file)
    assert use_of(rig.update(), 100).files == 3


# Earlier processes of a pid


def test_rows_of_several_earlier_processes_of_a_pid_stay_with_each() -> None:
    rig = Rig()
    earlier = []
    for number in range(3):
        task, _ = rig.job(100, contexts=number + 1)
        rig.world.fork(task, 200 + number)
        rig.world.exit(task)
        earlier.append(task)
    rig.job(100, contexts=1)
    tracker = Tracker(GPUS)
    statuses = [task.status for task in rig.world.alive]
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    tracker.update_statuses(statuses, rig.world.now_ns)
    tracker.rebuild(rig.world.rows.values(), rig.world.now_ns, dict(rig.world.opened))
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    usage = tracker.usage_snapshot(0)
    assert [(left.owner.key, left.contexts, left.holders[0].pid) for left in usage.orphans] == [
        (task.key, number + 1, 200 + number) for number, task in enumerate(earlier)
    ]
    assert hold_of(usage, 100).contexts == 1


def test_rows_of_an_earlier_process_of_a_pid_are_its_orphans() -> None:
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
        usage = tracker.usage_snapshot(now_ns)
        (orphan,) = usage.orphans
        assert (orphan.owner.key, orphan.gpu, orphan.contexts) == (first.key, V0, 2)
        assert (orphan.holders, orphan.ended_ns) == ((child.key,), now_ns)
        assert hold_of(usage, 100).contexts == 1
    assert control in rig.world.files


def test_rows_of_a_known_process_that_is_gone_stay_with_it() -> None:
    rig = Rig()
    first, _ = rig.job(100, contexts=2)
    child = rig.world.fork(first, 101)
    rig.update()
    rig.end(first)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns, dict(rig.world.opened))
    (orphan,) = rig.update().orphans
    assert (orphan.owner.comm, orphan.contexts, orphan.holders) == ("python3", 2, (child.key,))


# Addresses that may have been reused


def handed_on_while_events_were_lost() -> tuple[Rig, Task]:
    """A file of a gone process is handed on while events are lost."""
    rig = Rig()
    owner, control = rig.job(100, contexts=2)
    rig.update()
    holder, last = rig.world.spawn(101), rig.world.spawn(102)
    rig.world.send(holder, control)
    gpu = rig.world.open(holder, gpu_file(1))
    rig.update()
    rig.end(owner)
    assert [orphan.holders for orphan in rig.update().orphans] == [(holder.key,)]
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
    usage = rig.update()
    assert usage.orphans == ()
    assert use_of(usage, 102).key == last.key


def test_an_event_of_a_client_makes_it_certain_again() -> None:
    rig, last = handed_on_while_events_were_lost()
    early_ns = rig.world.now_ns - 1  # just before the rebuild
    rig.update()
    client = next(iter(rig.world.clients))
    rig.world.alloc(last, client, client, DEVICE, 0)
    (event,) = rig.world.drain()
    rig.tracker.handle_events([event._replace(at_ns=early_ns)])
    usage = rig.update()
    assert [(orphan.contexts, orphan.holders) for orphan in usage.orphans] == [(1, (last.key,))]


def test_a_file_that_one_of_its_holders_has_after_a_loss_is_the_same() -> None:
    rig = Rig()
    owner, control = rig.job(100, contexts=2)
    holder = rig.world.spawn(101)
    rig.world.send(holder, control)
    rig.update()
    rig.end(owner)
    rig.update()
    rig.tracker.handle_lost_events(1)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    (orphan,) = rig.update().orphans
    assert (orphan.contexts, orphan.holders) == (2, (holder.key,))


# With /proc alone


def test_with_proc_alone_each_process_and_device_is_a_file_of_its_own() -> None:

    held = by_process(
        HeldFile(pid, start, 0, device, fds, 0)
        for pid, start, device, fds in [(7, 1, 5, 1), (7, 1, 5, 2), (7, 1, 6, 1), (7, 2, 5, 1), (8, 1, 5, 1)]
    )
    names = [name for files in held.values() for name in files]
    assert len(set(names)) == 4
    assert all(name < 0 for name in names)
    assert [sorted(found.fds for found in held[key].values()) for key in sorted(held)] == [[1, 3], [1], [1]]
    assert sorted(held) == [ProcessKey(7, 1), ProcessKey(7, 2), ProcessKey(8, 1)]


def test_an_orphan_of_a_process_without_a_status_has_only_its_pid() -> None:
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
    """Rebuild a tracker from rows alone, which may have another start, or none."""
    rows = [row if ticks is None else row._replace(start_ticks=ticks) for row in rig.world.rows.values()]
    tracker.rebuild(rows, rig.world.now_ns, dict(rig.world.opened))


def test_rows_without_a_start_are_of_the_current_process_of_the_pid() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=2)
    tracker = Tracker(GPUS)
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    tracker.update_statuses([task.status], rig.world.now_ns)
    rebuilt_from(rig, tracker, ticks=0)
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    assert hold_of(tracker.usage_snapshot(0), 100).contexts == 2
    assert tracker.usage_snapshot(0).orphans == ()


def test_rows_of_an_unknown_pid_are_of_the_process_that_they_name() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=2)
    tracker = Tracker(GPUS)
    rebuilt_from(rig, tracker)
    assert tracker.without_status == (task.key,)
    tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    tracker.update_statuses([task.status], rig.world.now_ns)
    assert hold_of(tracker.usage_snapshot(0), 100).contexts == 2


def test_rows_without_a_start_from_after_an_exit_are_of_another_process() -> None:
    rig = Rig()
    first, _ = rig.job(100, contexts=1)
    child = rig.world.fork(first, 101)
    rig.update()
    rig.end(first)
    rig.update()
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
    usage = rig.update()
    assert use_of(usage, 100).key == again.key
    assert use_of(usage, 100).unplaced == 1
    assert [(orphan.owner.key, orphan.contexts) for orphan in usage.orphans] == [(first.key, 1)]
    assert child.fds


# The driver's release of a file


def test_the_release_of_a_file_removes_it_from_every_holder() -> None:
    rig = Rig()
    rig.world.tier_driver = True
    rig.tracker.set_release_events(enabled=True)
    task, control = rig.job(100, contexts=1)
    rig.world.open(task, gpu_file(1))
    rig.update()
    rig.world.close(task, control)
    rig.tracker.handle_events(rig.world.drain())
    use = use_of(rig.tracker.usage_snapshot(0), 100)
    assert (use.files, [hold.contexts for hold in use.holds]) == (2, [0, 0])


def test_a_late_release_does_not_close_the_next_file_at_the_address() -> None:
    rig = Rig()
    rig.world.tier_driver = True
    rig.tracker.set_release_events(enabled=True)
    task, control = rig.job(100, contexts=1)
    rig.update()
    rig.world.close(task, control)
    events = rig.world.drain()
    release = next(event for event in events if event.kind is RmEventKind.RELEASE)
    rig.tracker.handle_events(events)
    assert rig.world.open(task, CONTROL) == control
    rig.world.context(task, control)
    events = rig.world.drain()
    rig.tracker.handle_events(events)
    rig.tracker.handle_events([release])
    assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 1
    rig.tracker.handle_events([release._replace(at_ns=events[-1].at_ns)])
    use = use_of(rig.tracker.usage_snapshot(0), 100)
    assert (use.files, use.unplaced) == (1, 0)


def test_the_release_of_an_unknown_file_drops_its_quarantined_clients() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    rig.update()
    rig.world.post(task, control)
    rig.update()
    rig.world.tier_driver = True
    rig.world.discard(task)
    rig.tracker.handle_events(rig.world.drain())
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert rig.world.rows == {}


# Frees


def test_an_object_freed_at_the_time_of_its_allocation_is_gone() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    client, share = rig.world.context(task, control)
    events = rig.world.drain()
    rig.tracker.handle_events(events)
    (made,) = [each for each in events if (each.client, each.handle) == (client, share)]
    rig.tracker.handle_events([made._replace(kind=RmEventKind.FREE)])
    assert hold_of(rig.update(), 100).freed == 1
    root = next(each for each in events if (each.client, each.handle) == (client, client))
    rig.tracker.handle_events([root._replace(kind=RmEventKind.FREE)])
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert [row for row in rig.world.rows.values() if row.rm_class != 0x41 and row.handle != share] == []


def test_freed_contexts_count_for_their_gpu_and_all_their_rows_are_stale() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    rig.world.open(task, gpu_file(1))
    made = [rig.world.context(task, control, minor)[0] for minor in (0, 1, 1)]
    rig.update()
    for client in made[1:]:
        device = next(
            name for name, each in rig.world.clients[client].objects.items() if each.parent == client
        )
        rig.world.free(task, client, device)
    holds = {hold.gpu: (hold.contexts, hold.freed) for hold in use_of(rig.update(), 100).holds}
    assert holds == {V0: (1, 0), V1: (0, 2)}
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert {row.client for row in rig.world.rows.values() if row.handle != row.client} == {made[0]}
