"""Rebuilds from the rows of the kernel's map after missed events."""

import itertools

import pytest

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.processes import NO_FILES, OpenFilesByProcess, by_process
from agent.core.usage.rows import live_rows
from agent.model.rm import REGISTRATION, RmObject
from agent.model.structs import replace
from agent.model.usage import Usage
from tests.core.kernel_world import GPUS, UVM, V0, V1, VASPACE, gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of

UNKNOWN_INSTANCES = replace(GPUS, by_instance={})


def lose(rig: Rig) -> None:
    """Lose the events that wait in the ring."""
    rig.world.drain()
    rig.tracker.handle_lost_events(1)


def rebuild(rig: Rig, *, opened: bool = False, ticks: int | None = None) -> Usage:
    """Recover from the loss."""
    rig.world.now_ns += 1
    rows = [row if ticks is None else row._replace(start_ticks=ticks) for row in rig.world.rows.values()]
    rig.tracker.rebuild(rows, rig.world.now_ns, dict(rig.world.opened) if opened else {})
    return rig.update()


def test_contexts_freed_without_an_event_count_as_freed_on_their_gpu() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    rig.world.open(task, gpu_file(1))
    ended = [rig.world.context(task, control, 1)[0] for _ in range(3)]
    other, _ = rig.job(101, contexts=2)
    rig.update()
    for client in ended[:2]:
        rig.world.free(task, client, client)
    lose(rig)
    usage = rebuild(rig)
    assert [(hold.gpu, hold.contexts, hold.allocated, hold.freed) for hold in use_of(usage, 100).holds] == [
        (V0, 1, 1, 0),
        (V1, 1, 3, 2),
    ]
    assert (hold_of(usage, 101).contexts, hold_of(usage, 101).freed) == (2, 0)
    rig.world.free(task, ended[2], ended[2])
    lose(rig)
    assert hold_of(rebuild(rig), 100, V1).freed == 3
    assert other.fds


def test_clients_of_a_gone_process_stay_its_own_though_rows_have_no_start() -> None:
    rig = Rig()
    parent, _ = rig.job(100, contexts=2)
    child = rig.world.fork(parent, 101)
    rig.update()
    rig.end(parent)
    rig.update()
    rig.job(100, contexts=1)
    rig.update()
    lose(rig)
    usage = rebuild(rig, ticks=0)
    assert hold_of(usage, 100).contexts == 1
    assert [(left.owner.key, left.contexts, left.holders) for left in usage.orphans] == [
        (parent.key, 2, (child.key,))
    ]


@pytest.mark.parametrize(("opened", "contexts"), [(True, [2]), (False, [])])
def test_a_client_known_from_its_row_alone_makes_an_orphan_if_its_file_is_known(
    *, opened: bool, contexts: list[int]
) -> None:
    rig = Rig()
    parent, _ = rig.job(100, contexts=2)
    rig.world.fork(parent, 101)
    lose(rig)
    rebuild(rig, opened=opened)
    rig.end(parent)
    assert [left.contexts for left in rig.update().orphans] == contexts
    assert rig.update().complete


def test_a_rebuild_keeps_the_gpus_of_a_client() -> None:
    rig = Rig(UNKNOWN_INSTANCES)
    task, control = rig.job(100, contexts=0)
    rig.world.open(task, gpu_file(1))
    client, _ = rig.world.context(task, control)
    rig.world.register(task, rig.world.open(task, UVM), client, 9999, V1)
    assert hold_of(rig.update(), 100, V1).contexts == 1
    lose(rig)
    assert hold_of(rebuild(rig), 100, V1).contexts == 1


def test_a_client_without_its_root_event_is_of_the_process_in_its_row() -> None:
    rig = Rig()
    parent, control = rig.job(100, contexts=0)
    child = rig.world.fork(parent, 101)
    rig.update()
    client = rig.world.client(parent, control)
    rig.world.drain()
    rig.world.context(child, control, client=client)
    assert hold_of(rig.update(), 101).contexts == 1
    lose(rig)
    usage = rebuild(rig)
    assert [(use.key.pid, hold.contexts) for use in usage.processes for hold in use.holds] == [
        (100, 1),
        (101, 0),
    ]


def test_a_quarantined_client_counts_once_as_freed() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=2)
    rig.update()
    rig.world.post(task, control)
    rig.update()
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
def test_a_chain_of_stale_registrations_keeps_no_client(step: int) -> None:
    """An address was a control file's, then a GPU's file that was registered to another, and so on."""
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    (client,) = rig.world.clients
    rows = [row._replace(file=0x2000) for row in rig.world.rows.values() if row.client == client]
    chain = [0x2000 + step * number for number in range(8)]
    for kept, file in itertools.pairwise(chain):
        rows.append(RmObject(file, 0, rig.world.now_ns, 7, file, 100, REGISTRATION, kept, 0))
    rig.world.exec(task, "other")
    rig.update()
    assert control in task.fds
    rig.tracker.handle_lost_events(1)
    rig.world.now_ns += 1
    rig.tracker.rebuild(rows, rig.world.now_ns, {})
    assert [hold.contexts for use in rig.update().processes for hold in use.holds if hold.contexts] == []


def test_after_a_rebuild_the_usage_is_incomplete_until_a_scan() -> None:
    rig = Rig()
    rig.job(100)
    assert rig.update().complete
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    assert rig.tracker.usage_snapshot(0).incomplete_because == "rows were read and no scan was made since"
    assert rig.update().complete
    rig.tracker.handle_lost_events(1)
    assert rig.tracker.usage_snapshot(0).incomplete_because == "events were lost"


def test_a_rebuild_runs_in_steps() -> None:
    rig = Rig(bounds=Bounds(step_rows=4))
    rig.job(100, contexts=5)
    rig.update()
    rows = live_rows(rig.world.rows.values(), {}, rig.tracker.older_files)
    # Thirty rows; and before and after them five clients that are counted.
    assert len(list(rig.tracker.rebuild_steps(rows, rig.world.now_ns))) == 30 // 4 + 2 * (5 // 4 + 1)
    assert hold_of(rig.update(), 100).contexts == 5


def test_a_scan_is_applied_in_steps() -> None:
    rig = Rig(bounds=Bounds(step_changed=2, step_unchanged=4))
    for number in range(9):
        rig.job(100 + number)
    rig.tracker.handle_events(rig.world.drain())
    held: OpenFilesByProcess = {task.key: NO_FILES for task in rig.world.alive}
    rig.update()
    rig.world.now_ns += 1
    # Of nine processes each loses its files; then nothing changes.
    steps = len(list(rig.tracker.apply_scan_steps(held, rig.world.now_ns)))
    assert steps == 4
    rig.update()
    scan = by_process(rig.world.scan())
    assert len(list(rig.tracker.apply_scan_steps(scan, rig.world.now_ns + 1))) == 2


def test_no_table_keeps_an_entry_of_a_process_that_is_gone() -> None:
    rig = Rig(UNKNOWN_INSTANCES, bounds=Bounds(objects_of_owner=16))
    task, control = rig.job(100, contexts=3)
    uvm = rig.world.open(task, UVM)
    client = next(name for name, each in rig.world.clients.items() if each.file == control)
    vaspace = next(
        name for name, each in rig.world.clients[client].objects.items() if each.rm_class == VASPACE
    )
    rig.world.register(task, uvm, client, vaspace, V0)
    rig.world.free(task, client, client)
    assert use_of(rig.update(), 100).partial
    rig.world.begin_exit(task)
    rig.update()
    rig.end(task)
    rig.update_after(BOUNDS.quarantine_ns)
    rig.update()
    table, kept = rig.tracker._clients, rig.tracker._open_files
    assert [len(table), table.short, table.freed, table._claims, table._sizes] == [
        0, set(), {}, {}, {},
    ]  # fmt: skip
    assert [kept.processes, kept.files, kept._current, kept._by_key] == [{}, {}, {}, {}]
    assert [kept._idle, kept._unsettled, kept._unheld, kept._doubted] == [set()] * 4
    assert rig.world.files == {} or CONTROL not in rig.world.files.values()
