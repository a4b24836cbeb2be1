"""What the rows of the kernel's map make of a picture that missed something."""

import itertools

import pytest

from agent.core.usage import clients
from agent.core.usage import files as open_files
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.processes import NO_FILES, OpenFilesByProcess, by_process
from agent.core.usage.quarantine import QUARANTINE_NS
from agent.core.usage.rows import live_rows
from agent.model.rm import REGISTRATION, RmObject
from agent.model.structs import replace
from agent.model.usage import Usage
from tests.core.kernel_world import GPUS, UVM, V0, V1, VASPACE, gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of

UNKNOWN_INSTANCES = replace(GPUS, by_instance={})


def lose(rig: Rig) -> None:
    """What was not told yet is lost."""
    rig.world.drain()
    rig.tracker.handle_lost_events(1)


def rebuild(rig: Rig, *, opened: bool = False, ticks: int | None = None) -> Usage:
    """Make good what was lost."""
    rig.world.now_ns += 1
    rows = [row if ticks is None else row._replace(start_ticks=ticks) for row in rig.world.rows.values()]
    rig.tracker.rebuild(rows, rig.world.now_ns, dict(rig.world.opened) if opened else {})
    return rig.apply()


def test_what_ended_unseen_is_counted_as_freed_where_it_was() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    rig.world.open(task, gpu_file(1))
    ended = [rig.world.context(task, control, 1)[0] for _ in range(3)]
    other, _ = rig.job(101, contexts=2)
    rig.apply()
    for client in ended[:2]:
        rig.world.free(task, client, client)
    lose(rig)
    picture = rebuild(rig)
    assert [(hold.gpu, hold.contexts, hold.allocated, hold.freed) for hold in use_of(picture, 100).holds] == [
        (V0, 1, 1, 0),
        (V1, 1, 3, 2),
    ]
    assert (hold_of(picture, 101).contexts, hold_of(picture, 101).freed) == (2, 0)
    rig.world.free(task, ended[2], ended[2])
    lose(rig)
    assert hold_of(rebuild(rig), 100, V1).freed == 3
    assert other.fds


def test_what_a_dead_process_made_stays_its_own_though_rows_do_not_tell_whose_pid_it_is() -> None:
    rig = Rig()
    parent, _ = rig.job(100, contexts=2)
    child = rig.world.fork(parent, 101)
    rig.apply()
    rig.end(parent)
    rig.apply()
    rig.job(100, contexts=1)
    rig.apply()
    lose(rig)
    picture = rebuild(rig, ticks=0)
    assert hold_of(picture, 100).contexts == 1
    assert [(left.owner.key, left.contexts, left.holders) for left in picture.orphans] == [
        (parent.key, 2, (child.key,))
    ]


@pytest.mark.parametrize(("opened", "contexts"), [(True, [2]), (False, [])])
def test_what_only_rows_tell_of_is_blamed_on_someone_if_its_file_is_known(
    *, opened: bool, contexts: list[int]
) -> None:
    rig = Rig()
    parent, _ = rig.job(100, contexts=2)
    rig.world.fork(parent, 101)
    lose(rig)
    rebuild(rig, opened=opened)
    rig.end(parent)
    assert [left.contexts for left in rig.apply().orphans] == contexts
    assert rig.apply().complete


def test_what_was_known_of_a_client_stays_known() -> None:
    rig = Rig(UNKNOWN_INSTANCES)
    task, control = rig.job(100, contexts=0)
    rig.world.open(task, gpu_file(1))
    client, _ = rig.world.context(task, control)
    rig.world.register(task, rig.world.open(task, UVM), client, 9999, V1)
    assert hold_of(rig.apply(), 100, V1).contexts == 1
    lose(rig)
    assert hold_of(rebuild(rig), 100, V1).contexts == 1


def test_a_client_of_which_only_the_middle_was_seen_is_of_whom_its_row_names() -> None:
    rig = Rig()
    parent, control = rig.job(100, contexts=0)
    child = rig.world.fork(parent, 101)
    rig.apply()
    client = rig.world.client(parent, control)
    rig.world.drain()
    rig.world.context(child, control, client=client)
    assert hold_of(rig.apply(), 101).contexts == 1
    lose(rig)
    picture = rebuild(rig)
    assert [(use.key.pid, hold.contexts) for use in picture.processes for hold in use.holds] == [
        (100, 1),
        (101, 0),
    ]


def test_what_was_put_aside_is_counted_once_as_freed() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=2)
    rig.apply()
    rig.world.post(task, control)
    rig.apply()
    lose(rig)
    hold = hold_of(rebuild(rig), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (0, 2, 2)


def test_a_registration_that_is_older_than_its_control_file_is_stale() -> None:
    rig = Rig()
    ended, first = rig.world.spawn(100), rig.world.spawn(101)
    filler = rig.world.open(first, CONTROL)
    old_control, old_node = rig.world.open(ended, CONTROL), rig.world.open(ended, gpu_file(0))
    rig.world.register_fd(ended, old_node, old_control)
    rig.world.exit(ended)
    rig.world.close(first, filler)
    rig.world.now_ns += 1
    control, node = rig.world.open(first, CONTROL), rig.world.open(first, gpu_file(0))
    assert (control, node) == (filler, old_control)
    rig.world.register_fd(first, node, control)
    rows = live_rows(rig.world.rows.values(), rig.world.opened, frozenset())
    assert [(file, kept) for file, kept, _ in rows.registered] == [(node, control)]
    rig.world.delete_rows(list(rows.stale))
    assert [row.file for row in rig.world.rows.values()] == [node]


@pytest.mark.parametrize("step", [16, -16])
def test_stale_registrations_keep_no_client_however_many_follow_on_one_another(step: int) -> None:
    """An address was a control file's, then a GPU's file that was registered to another, and so on."""
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    (client,) = rig.world.clients
    rows = [row._replace(file=0x2000) for row in rig.world.rows.values() if row.client == client]
    chain = [0x2000 + step * number for number in range(8)]
    for kept, file in itertools.pairwise(chain):
        rows.append(RmObject(file, 0, rig.world.now_ns, 7, file, 100, REGISTRATION, kept, 0))
    rig.world.exec(task, "other")
    rig.apply()
    assert control in task.fds
    rig.tracker.handle_lost_events(1)
    rig.world.now_ns += 1
    rig.tracker.rebuild(rows, rig.world.now_ns, {})
    assert [hold.contexts for use in rig.apply().processes for hold in use.holds if hold.contexts] == []


def test_after_rows_were_read_a_scan_is_wanted() -> None:
    rig = Rig()
    rig.job(100)
    assert rig.apply().complete
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    assert rig.tracker.usage_snapshot(0).incomplete_because == "rows were read and no scan was made since"
    assert rig.apply().complete
    rig.tracker.handle_lost_events(1)
    assert rig.tracker.usage_snapshot(0).incomplete_because == "events were lost"


def test_rows_are_taken_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "STEP", 4)
    rig = Rig()
    rig.job(100, contexts=5)
    rig.apply()
    rows = live_rows(rig.world.rows.values(), {}, rig.tracker.older_files)
    # Thirty rows; and before and after them five clients that are counted.
    assert len(list(rig.tracker.rebuild_steps(rows, rig.world.now_ns))) == 30 // 4 + 2 * (5 // 4 + 1)
    assert hold_of(rig.apply(), 100).contexts == 5


def test_a_scan_is_taken_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "STEP", 2)
    monkeypatch.setattr(open_files, "STEP_UNCHANGED", 4)
    rig = Rig()
    for number in range(9):
        rig.job(100 + number)
    rig.tracker.handle_events(rig.world.drain())
    held: OpenFilesByProcess = {task.key: NO_FILES for task in rig.world.alive}
    rig.apply()
    rig.world.now_ns += 1
    # Of nine processes each loses its files; then nothing changes.
    steps = len(list(rig.tracker.apply_scan_steps(held, rig.world.now_ns)))
    assert steps == 4
    rig.apply()
    scan = by_process(rig.world.scan())
    assert len(list(rig.tracker.apply_scan_steps(scan, rig.world.now_ns + 1))) == 2


def test_nothing_is_kept_of_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_OF_OWNER", 16)
    rig = Rig(UNKNOWN_INSTANCES)
    task, control = rig.job(100, contexts=3)
    uvm = rig.world.open(task, UVM)
    client = next(name for name, each in rig.world.clients.items() if each.file == control)
    vaspace = next(
        name for name, each in rig.world.clients[client].objects.items() if each.rm_class == VASPACE
    )
    rig.world.register(task, uvm, client, vaspace, V0)
    rig.world.free(task, client, client)
    assert use_of(rig.apply(), 100).partial
    rig.world.begin_exit(task)
    rig.apply()
    rig.end(task)
    rig.tell_after(QUARANTINE_NS)
    rig.apply()
    table, kept = rig.tracker._clients, rig.tracker._open_files
    assert [len(table), table.short, table.freed, table._claims, table._sizes] == [
        0, set(), {}, {}, {},
    ]  # fmt: skip
    assert [kept.processes, kept.files, kept._current, kept._by_key] == [{}, {}, {}, {}]
    assert [kept._idle, kept._unsettled, kept._unheld, kept._doubted] == [set()] * 4
    assert rig.world.files == {} or CONTROL not in rig.world.files.values()
