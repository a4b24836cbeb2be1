"""What is told late, or of whom nobody knows: it changes nothing that is known better."""

from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.processes import UNKNOWN_START
from agent.model.rm import RmEventKind
from agent.model.usage import ProcessKey
from tests.core.kernel_world import gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of


def test_what_a_process_did_before_it_ended_is_its_own_though_it_is_told_later() -> None:
    rig = Rig()
    parent, control = rig.job(100, contexts=1)
    rig.world.fork(parent, 101)
    rig.apply()
    rig.world.context(parent, control)
    late = rig.world.drain()
    rig.tracker.handle_process_gone(parent.key, late[-1].at_ns)
    rig.tracker.handle_events(late)
    assert [left.contexts for left in rig.tracker.usage_snapshot(0).orphans] == [2]
    assert rig.tracker.without_status == ()


def test_what_comes_after_the_end_of_a_process_is_of_another_that_has_its_pid() -> None:
    rig = Rig()
    parent, _ = rig.job(100, contexts=1)
    rig.world.fork(parent, 101)
    rig.apply()
    rig.end(parent)
    again = rig.world.spawn(100)
    control = rig.world.open(again, CONTROL)
    rig.world.open(again, gpu_file(0))
    rig.world.context(again, control)
    rig.tracker.handle_events(rig.world.drain())
    assert rig.tracker.without_status == (ProcessKey(100, UNKNOWN_START),)
    rig.look()
    picture = rig.apply()
    assert (use_of(picture, 100).key, hold_of(picture, 100).contexts) == (again.key, 1)
    assert use_of(picture, 100).since_ns > parent.key.start_ticks
    assert [(left.owner.key, left.contexts) for left in picture.orphans] == [(parent.key, 1)]


def test_a_file_that_was_closed_before_a_scan_is_not_held_though_its_use_is_told_later() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=0)
    rig.apply()
    control = rig.world.open(task, CONTROL)
    rig.world.context(task, control)
    rig.world.close(task, control)
    late = rig.world.drain()
    rig.apply()
    rig.tracker.handle_events(late)
    assert (
        use_of(rig.tracker.usage_snapshot(0), 100).files,
        hold_of(rig.tracker.usage_snapshot(0), 100).contexts,
    ) == (
        2,
        0,
    )


def test_who_used_a_file_before_a_scan_that_does_not_show_it_does_not_hold_it() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    rig.apply()
    client = next(iter(rig.world.clients))
    other, _ = rig.job(200, contexts=0)
    rig.world.send(other, control)
    rig.world.alloc(other, client, client, 0x80, 0)
    rig.world.close(other, control)
    late = [event for event in rig.world.drain() if event.kind is RmEventKind.ALLOC]
    rig.apply()
    rig.tracker.handle_events(late)
    picture = rig.tracker.usage_snapshot(0)
    assert [use_of(picture, pid).files for pid in (100, 200)] == [2, 2]
    assert task.fds


def test_a_look_at_a_pid_of_which_nothing_was_told_is_not_kept() -> None:
    rig = Rig()
    rig.tracker.update_statuses([rig.world.spawn(100).status], rig.world.now_ns)
    assert (rig.tracker.living, rig.tracker.without_status) == ((), ())


def test_who_gives_a_file_to_the_driver_holds_it() -> None:
    rig = Rig()
    _, control = rig.job(100, contexts=0)
    other, _ = rig.job(200, contexts=0)
    rig.apply()
    rig.world.send(other, control)
    rig.world._emit(other, RmEventKind.REGISTER_FD, file=control, device=CONTROL)
    rig.tracker.handle_events(rig.world.drain())
    assert [use_of(rig.tracker.usage_snapshot(0), pid).files for pid in (100, 200)] == [2, 3]


def test_a_file_that_went_without_a_word_is_gone_in_the_next_scan() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=0)
    rig.apply()
    file = rig.world.open(task, gpu_file(0))
    rig.tracker.handle_events(rig.world.drain())
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 3
    task.fds.remove(file)
    assert use_of(rig.apply(), 100).files == 2
