"""Late events, and events of unknown processes: they do not override newer readings."""

from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.processes import UNKNOWN_START
from agent.model.rm import RmEventKind
from agent.model.usage import ProcessKey
from tests.core.kernel_world import gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of


def test_an_event_from_before_the_exit_counts_for_the_process_though_it_arrives_late() -> None:
    rig = Rig()
    parent, control = rig.job(100, contexts=1)
    rig.world.fork(parent, 101)
    rig.update()
    rig.world.context(parent, control)
    late = rig.world.drain()
    rig.tracker.handle_process_gone(parent.key, late[-1].at_ns)
    rig.tracker.handle_events(late)
    assert [left.contexts for left in rig.tracker.usage_snapshot(0).orphans] == [2]
    assert rig.tracker.without_status == ()


def test_an_event_from_after_the_exit_is_of_the_next_process_with_the_pid() -> None:
    rig = Rig()
    parent, _ = rig.job(100, contexts=1)
    rig.world.fork(parent, 101)
    rig.update()
    rig.end(parent)
    again = rig.world.spawn(100)
    control = rig.world.open(again, CONTROL)
    rig.world.open(again, gpu_file(0))
    rig.world.context(again, control)
    rig.tracker.handle_events(rig.world.drain())
    assert rig.tracker.without_status == (ProcessKey(100, UNKNOWN_START),)
    rig.read_statuses()
    usage = rig.update()
    assert (use_of(usage, 100).key, hold_of(usage, 100).contexts) == (again.key, 1)
    assert use_of(usage, 100).since_ns > parent.key.start_ticks
    assert [(left.owner.key, left.contexts) for left in usage.orphans] == [(parent.key, 1)]


def test_a_late_use_of_a_file_closed_before_a_scan_adds_no_holder() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=0)
    rig.update()
    control = rig.world.open(task, CONTROL)
    rig.world.context(task, control)
    rig.world.close(task, control)
    late = rig.world.drain()
    rig.update()
    rig.tracker.handle_events(late)
    assert (
        use_of(rig.tracker.usage_snapshot(0), 100).files,
        hold_of(rig.tracker.usage_snapshot(0), 100).contexts,
    ) == (
        2,
        0,
    )


def test_a_use_from_before_a_scan_without_the_file_adds_no_holder() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    rig.update()
    client = next(iter(rig.world.clients))
    other, _ = rig.job(200, contexts=0)
    rig.world.send(other, control)
    rig.world.alloc(other, client, client, 0x80, 0)
    rig.world.close(other, control)
    late = [event for event in rig.world.drain() if event.kind is RmEventKind.ALLOC]
    rig.update()
    rig.tracker.handle_events(late)
    usage = rig.tracker.usage_snapshot(0)
    assert [use_of(usage, pid).files for pid in (100, 200)] == [2, 2]
    assert task.fds


def test_the_status_of_an_unknown_pid_is_dropped() -> None:
    rig = Rig()
    rig.tracker.update_statuses([rig.world.spawn(100).status], rig.world.now_ns)
    assert (rig.tracker.living, rig.tracker.without_status) == ((), ())


def test_a_process_that_registers_a_file_holds_it() -> None:
    rig = Rig()
    _, control = rig.job(100, contexts=0)
    other, _ = rig.job(200, contexts=0)
    rig.update()
    rig.world.send(other, control)
    rig.world.emit(other, RmEventKind.REGISTER_FD, file=control, device=CONTROL)
    rig.tracker.handle_events(rig.world.drain())
    assert [use_of(rig.tracker.usage_snapshot(0), pid).files for pid in (100, 200)] == [2, 3]


def test_a_file_closed_without_an_event_is_gone_after_the_next_scan() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=0)
    rig.update()
    file = rig.world.open(task, gpu_file(0))
    rig.tracker.handle_events(rig.world.drain())
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 3
    task.fds.remove(file)
    assert use_of(rig.update(), 100).files == 2
