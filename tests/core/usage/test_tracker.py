"""The tracker's answer to single events; any order of them is in test_tracker_world."""

import pytest

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.client_tree import CHANNEL_GROUPS, CONTEXT_SHARE, DEBUGGER, Marker
from agent.core.usage.gpu_map import CONTROL, GpuMap, folded
from agent.core.usage.processes import UNKNOWN_START
from agent.core.usage.tracker import Tracker
from agent.model.ids import GpuUuid, Placement
from agent.model.rm import HeldFile, RmEvent, RmEventKind, RmObject
from agent.model.structs import replace
from agent.model.usage import MAX_HOLDERS, GpuHold, Orphan, ProcessKey, ProcessUse, Usage
from tests.core.kernel_world import DEVICE, GPUS, GROUP, SHARE, UVM, V0, V1, VASPACE, Task, World, gpu_file

MS = 10**6


class Rig:
    """A kernel and a tracker that gets everything at once."""

    def __init__(
        self, gpus: GpuMap = GPUS, *, marker: Marker = CONTEXT_SHARE, bounds: Bounds = BOUNDS
    ) -> None:
        self.world = World()
        self.tracker = Tracker(gpus, marker=marker, bounds=bounds)
        self.update()

    def update(self) -> Usage:
        """Apply events, then a scan, then the statuses that are asked for; return the usage."""
        world, tracker = self.world, self.tracker
        world.now_ns += 1
        tracker.handle_events(world.drain())
        tracker.apply_scan(world.scan(), world.now_ns)
        self.read_statuses()
        return tracker.usage_snapshot(world.now_ns)

    def update_after(self, time_ns: int) -> Usage:
        """Update now and again after a time, which expires files without a holder."""
        self.update()
        self.world.now_ns += time_ns
        return self.update()

    def read_statuses(self) -> None:
        for key in (*self.tracker.without_status, *self.tracker.exiting):
            living = [task for task in self.world.alive if task.key.pid == key.pid]
            if living:
                self.tracker.update_statuses([living[0].status], self.world.now_ns)
            else:
                self.tracker.handle_process_gone(key, self.world.now_ns)

    def end(self, task: Task) -> None:
        self.world.exit(task)
        self.tracker.handle_events(self.world.drain())
        self.tracker.handle_process_gone(task.key, self.world.now_ns)

    def job(self, pid: int = 100, *, contexts: int = 1, minor: int = 0) -> tuple[Task, int]:
        """A process with contexts on one GPU; returns it and its control file."""
        task = self.world.spawn(pid)
        control = self.world.open(task, CONTROL)
        self.world.open(task, gpu_file(minor))
        for _ in range(contexts):
            self.world.context(task, control, minor)
        return task, control


def use_of(usage: Usage, pid: int) -> ProcessUse:
    (use,) = [each for each in usage.processes if each.key.pid == pid]
    return use


def hold_of(usage: Usage, pid: int, gpu: GpuUuid = V0) -> GpuHold:
    (hold,) = [each for each in use_of(usage, pid).holds if each.gpu == gpu]
    return hold


# Contexts


def test_contexts_are_counted_by_process_and_gpu() -> None:
    rig = Rig()
    rig.job(100, contexts=3)
    rig.job(101, contexts=2, minor=1)
    usage = rig.update()
    assert hold_of(usage, 100).contexts == 3
    assert hold_of(usage, 101, V1).contexts == 2
    assert [(total.gpu, total.processes, total.contexts) for total in usage.totals] == [
        (V0, 1, 3),
        (V1, 1, 2),
    ]


def test_a_context_ends_with_anything_above_it() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    client, _ = rig.world.context(task, control)
    (device,) = [name for name, each in rig.world.clients[client].objects.items() if each.rm_class == DEVICE]
    assert hold_of(rig.update(), 100).contexts == 1
    rig.world.free(task, client, device)
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (0, 1, 1)


def test_rows_of_objects_freed_with_their_parent_are_stale() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    client, share = rig.world.context(task, control)
    rig.update()
    rig.world.free(task, client, client)
    rig.update()
    removed = {(each.client, each.handle) for each in rig.tracker.pop_removed()}
    assert (client, share) in removed
    assert removed >= set(rig.world.rows)
    assert rig.tracker.pop_removed() == []


def test_what_a_process_freed_stays_counted() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    for _ in range(7):
        client, _ = rig.world.context(task, control)
        rig.world.free(task, client, client)
    rig.world.context(task, control)
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (1, 8, 7)


def test_a_repeated_event_changes_nothing() -> None:
    rig = Rig()
    rig.job(contexts=2)
    events = rig.world.drain()
    rig.tracker.handle_events(events)
    rig.tracker.handle_events(events)
    rig.tracker.handle_events(events)
    assert hold_of(rig.update(), 100).contexts == 2
    assert hold_of(rig.update(), 100).allocated == 2


def test_a_late_free_does_not_free_the_next_object_with_the_handle() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    group = rig.world.alloc(task, client, device, GROUP)
    rig.tracker.handle_events(rig.world.drain())
    rig.world.free(task, client, group)
    (late,) = rig.world.drain()
    rig.tracker.handle_events([late])
    rig.world.last_handle = group - 1
    assert rig.world.alloc(task, client, device, GROUP) == group
    rig.world.alloc(task, client, group, SHARE)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.handle_events([late])
    assert hold_of(rig.update(), 100).contexts == 1


def test_a_ring_of_parents_ends() -> None:
    """No driver makes one; a wrong reading may."""
    rig = Rig()
    task, control = rig.job(contexts=0)
    client = rig.world.client(task, control)
    rig.tracker.handle_events(rig.world.drain())
    one = made(rig, task, client, handle=5, parent=6)
    rig.tracker.handle_events([one, made(rig, task, client, handle=6, parent=5)])
    assert use_of(rig.update(), 100).unplaced + (hold_of(rig.update(), 100).contexts or 0) == 2
    rig.world.now_ns += 1
    rig.tracker.handle_events([one._replace(kind=RmEventKind.FREE, at_ns=rig.world.now_ns)])
    assert hold_of(rig.update(), 100).contexts == 0


def made(
    rig: Rig, task: Task, client: int, *, handle: int, parent: int, rm_class: int = SHARE, after_ns: int = 1
) -> RmEvent:
    """An event of an object that the world does not have."""
    rig.world.now_ns += after_ns
    pid = task.key.pid
    return RmEvent(
        at_ns=rig.world.now_ns,
        cgroup_id=7,
        file=rig.world.clients[client].file,
        tgid=pid,
        pid=pid,
        device=CONTROL,
        fd=3,
        kind=RmEventKind.ALLOC,
        rm_class=rm_class,
        client=client,
        parent=parent,
        handle=handle,
        detail=0xFFFFFFFF,
    )


# The markers of a context


def test_channel_groups_made_at_once_are_one_context() -> None:
    """Nine groups are one context; 250 ms later another begins."""
    rig = Rig(marker=CHANNEL_GROUPS)
    task, control = rig.job(contexts=0)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    rig.tracker.handle_events(rig.world.drain())

    def groups(first: int, count: int, *, after_ns: int) -> list[RmEvent]:
        return [
            made(
                rig, task, client, handle=1000 + first + place, parent=device, rm_class=GROUP,
                after_ns=MS if place else after_ns,
            )
            for place in range(count)
        ]  # fmt: skip

    rig.tracker.handle_events(groups(0, 9, after_ns=1))
    assert hold_of(rig.update(), 100).contexts == 1
    rig.tracker.handle_events(groups(10, 9, after_ns=249 * MS))
    assert hold_of(rig.update(), 100).contexts == 1
    rig.tracker.handle_events(groups(20, 9, after_ns=250 * MS))
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (2, 2, 0)


def test_a_context_of_channel_groups_lives_while_one_of_them_does() -> None:
    rig = Rig(marker=CHANNEL_GROUPS)
    task, control = rig.job(contexts=0)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    groups = [rig.world.alloc(task, client, device, GROUP) for _ in range(3)]
    for left, group in zip((1, 1, 0), groups, strict=True):
        rig.world.free(task, client, group)
        assert hold_of(rig.update(), 100).contexts == left
    assert hold_of(rig.update(), 100).freed == 1


def test_the_debugger_object_can_stand_for_a_context() -> None:
    rig = Rig(marker=DEBUGGER)
    task, control = rig.job(contexts=2)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    rig.world.alloc(task, client, device, DEBUGGER.rm_class)
    assert hold_of(rig.update(), 100).contexts == 1


# Which GPU a context is on

UNKNOWN_INSTANCES = replace(GPUS, by_instance={})


def test_the_device_instance_names_the_gpu() -> None:
    """Not the minor that happens to be open: the instance 1 is the GPU of minor 0 here."""
    rig = Rig(replace(GPUS, by_instance={0: V1, 1: V0}))
    task, control = rig.job(contexts=0)
    rig.world.open(task, gpu_file(1))
    rig.world.context(task, control, 0)
    usage = rig.update()
    # Without unified memory they may be of graphics.
    assert (hold_of(usage, 100, V1).contexts, hold_of(usage, 100, V1).compute) == (1, 0)
    assert hold_of(usage, 100, V0).contexts == 0


def test_unified_memory_names_the_gpu_of_a_device_instance_and_takes_precedence() -> None:
    rig = Rig(replace(GPUS, by_instance={0: V0, 1: V1}))
    task, control = rig.job(contexts=0)
    uvm = rig.world.open(task, UVM)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 1)
    vaspace = rig.world.alloc(task, client, device, VASPACE)
    rig.world.register(task, uvm, client, vaspace, V0)
    rig.world.context(task, control, 1)
    usage = rig.update()
    assert hold_of(usage, 100, V0).contexts == 1


def test_claims_on_device_instances_are_void_after_a_load_of_the_driver() -> None:
    rig = Rig(UNKNOWN_INSTANCES)
    task, control = rig.job(contexts=0)
    rig.world.open(task, gpu_file(1))
    uvm = rig.world.open(task, UVM)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 1)
    rig.world.register(task, uvm, client, rig.world.alloc(task, client, device, VASPACE), V1)
    rig.world.context(task, control, 1)
    assert hold_of(rig.update(), 100, V1).contexts == 1
    rig.tracker.set_gpus(replace(GPUS, by_instance={1: V0}))
    assert hold_of(rig.update(), 100, V0).contexts == 1


def test_a_client_that_was_registered_for_one_gpu_is_on_it() -> None:
    """Its address space is older than the probe, so that no device instance is known."""
    rig = Rig(UNKNOWN_INSTANCES)
    task, control = rig.job(contexts=0)
    rig.world.open(task, gpu_file(1))
    uvm = rig.world.open(task, UVM)
    client, _ = rig.world.context(task, control)
    use = use_of(rig.update(), 100)
    assert (use.unplaced, use.partial) == (1, True)
    rig.world.register(task, uvm, client, 9999, V1)
    held = hold_of(rig.update(), 100, V1)
    assert (held.contexts, held.compute, use_of(rig.update(), 100).partial) == (1, 1, False)
    rig.world.register(task, uvm, client, 9999, V0)
    assert use_of(rig.update(), 100).unplaced == 1


def test_a_process_with_one_gpu_open_has_its_contexts_there() -> None:
    rig = Rig(UNKNOWN_INSTANCES)
    rig.job(contexts=2, minor=1)
    usage = rig.update()
    assert hold_of(usage, 100, V1).contexts == 2


def test_a_process_with_two_gpus_open_may_have_contexts_of_no_known_gpu() -> None:
    rig = Rig(UNKNOWN_INSTANCES)
    task, _ = rig.job(contexts=2)
    rig.world.open(task, gpu_file(1))
    use = use_of(rig.update(), 100)
    assert use.unplaced == 2
    assert [(hold.gpu, hold.contexts) for hold in use.holds] == [(V0, 0), (V1, 0)]


def test_gpus_with_the_same_folded_uuid_name_no_gpu() -> None:
    """Their halves make the same by exclusive or."""
    one = GpuUuid("GPU-01020304-0506-0708-0000-000000000000")
    other = GpuUuid("GPU-00000000-0000-0000-0102-030405060708")
    assert folded(one) == folded(other)
    rig = Rig(GpuMap({0: one, 1: other}))
    task, control = rig.job(contexts=0)
    rig.world.open(task, gpu_file(1))
    uvm = rig.world.open(task, UVM)
    client, _ = rig.world.context(task, control)
    rig.world.register(task, uvm, client, 9999, one)
    assert use_of(rig.update(), 100).unplaced == 1


def test_a_uuid_is_folded_as_the_driver_has_it_in_memory() -> None:
    assert folded(GpuUuid("GPU-01020304-0506-0708-0000-000000000000")) == (0x04030201, 0x08070605)
    assert folded(GpuUuid("GPU-00000000-0000-0000-0102-030405060708")) == (0x04030201, 0x08070605)
    assert folded(GpuUuid("GPU-01020304-0506-0708-0102-030405060708")) == (0, 0)
    assert folded(GpuUuid("nonsense")) == (-1, -1)


def test_a_mig_device_that_was_opened_is_named() -> None:
    place = Placement(V0, 1, 0)
    rig = Rig(replace(GPUS, by_capability={30: place}, capabilities_major=236))
    task, _ = rig.job()
    assert hold_of(rig.update(), 100).slices == ()
    rig.world.open(task, 236 << 20 | 30)
    rig.world.open(task, 236 << 20 | 31)
    rig.world.open(task, 235 << 20 | 30)
    assert hold_of(rig.update(), 100).slices == (place,)


# Files and descriptors


def test_descriptors_are_those_of_the_gpu_and_shared_ones_if_it_is_the_only_one() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    rig.world.dup(task, control)
    rig.world.open(task, gpu_file(0))
    assert hold_of(rig.update(), 100).fds == 4
    assert (use_of(rig.update(), 100).files, use_of(rig.update(), 100).fds) == (3, 4)
    rig.world.open(task, gpu_file(1))
    usage = rig.update()
    assert [(hold.gpu, hold.fds) for hold in use_of(usage, 100).holds] == [(V0, 2), (V1, 1)]


def test_a_process_that_closed_everything_is_not_in_the_usage() -> None:
    rig = Rig()
    task, _ = rig.job()
    assert rig.update().processes
    for file in list(task.fds):
        rig.world.close(task, file)
    usage = rig.update()
    assert (usage.processes, usage.totals) == ((), ())


def test_a_process_without_a_status_is_not_in_the_usage() -> None:
    rig = Rig()
    rig.job()
    rig.tracker.handle_events(rig.world.drain())
    assert rig.tracker.usage_snapshot(0).processes == ()
    assert rig.tracker.without_status == (ProcessKey(100, UNKNOWN_START),)


def test_after_exec_the_status_is_read_again() -> None:
    rig = Rig()
    task, _ = rig.job()
    rig.update()
    assert list(rig.tracker.without_status) == []
    rig.world.exec(task, "sh")
    rig.tracker.handle_events(rig.world.drain())
    assert list(rig.tracker.without_status) == [task.key]
    use = use_of(rig.update(), 100)
    assert (use.status.comm, use.files) == ("sh", 1)


def test_stale_statuses_stay_in_the_usage_until_they_are_read_again() -> None:
    rig = Rig()
    task, _ = rig.job()
    before = rig.update()
    rig.tracker.mark_statuses_stale()
    assert list(rig.tracker.without_status) == [task.key]
    assert rig.tracker.usage_snapshot(before.at_ns) == before
    task.comm, task.state = "worker", "D"
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    use = use_of(rig.update(), 100)
    assert (use.status.comm, use.status.state) == ("worker", "D")
    assert list(rig.tracker.without_status) == []


def test_events_that_need_a_scan_return_when_it_is_due() -> None:
    rig = Rig()
    task, control = rig.job()
    assert rig.tracker.handle_events(rig.world.drain()) is None
    rig.world.dup(task, control)
    rig.world.close(task, control)
    assert rig.tracker.handle_events(rig.world.drain()) is not None
    for happens in (
        lambda: rig.world.fork(task, 101),
        lambda: rig.world.exec(task, "a"),
        lambda: rig.world.exit(task),
    ):
        happens()
        assert rig.tracker.handle_events(rig.world.drain()) is not None
    assert rig.tracker.handle_events([]) is None


def test_a_scan_that_began_before_an_open_does_not_undo_it() -> None:
    rig = Rig()
    at_ns, held = rig.world.now_ns, rig.world.scan()
    rig.job(contexts=1)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.apply_scan(held, at_ns)
    rig.read_statuses()
    assert hold_of(rig.tracker.usage_snapshot(0), 100).contexts == 1


# Exits


def left(usage: Usage) -> list[Orphan]:
    return list(usage.orphans)


def forked(rig: Rig, contexts: int = 2) -> tuple[Task, Task]:
    """The classic: a parent with contexts, and a child that keeps the parent's files."""
    parent, _ = rig.job(100, contexts=contexts)
    child = rig.world.fork(parent, 101)
    rig.update()
    return parent, child


def test_contexts_of_a_parent_that_is_gone_are_orphans_that_its_child_holds() -> None:
    rig = Rig()
    parent, child = forked(rig)
    assert left(rig.update()) == []
    rig.end(parent)
    rig.tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    (orphan,) = rig.tracker.usage_snapshot(0).orphans
    assert (orphan.owner.key, orphan.owner.comm) == (parent.key, "python3")
    assert (orphan.gpu, orphan.contexts, orphan.holders) == (V0, 2, (child.key,))
    assert orphan.ended_ns == rig.world.now_ns
    assert [total.contexts for total in rig.update().totals] == [2]


def test_an_orphan_is_gone_with_its_last_holder() -> None:
    rig = Rig()
    parent, child = forked(rig)
    rig.end(parent)
    assert len(left(rig.update())) == 1
    rig.end(child)
    assert left(rig.update()) == []
    assert len(rig.world.rows) > 0
    rig.update_after(BOUNDS.quarantine_ns)
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert rig.world.rows == {}


def test_a_client_without_a_context_makes_an_orphan_without_contexts() -> None:
    rig = Rig()
    parent, _child = forked(rig, contexts=0)
    rig.end(parent)
    assert left(rig.update()) == []


def test_a_client_in_a_file_that_another_process_holds_stays_its_makers() -> None:
    rig = Rig()
    parent, _child = forked(rig)
    for file in list(parent.fds):
        rig.world.close(parent, file)
    usage = rig.update()
    assert left(usage) == []
    assert hold_of(usage, 100).contexts == 2


def test_a_process_with_a_reused_pid_inherits_nothing() -> None:
    rig = Rig()
    parent, _child = forked(rig)
    rig.end(parent)
    again = rig.world.spawn(100)
    rig.world.send(again, next(iter(rig.world.files)))
    usage = rig.update()
    (orphan,) = usage.orphans
    assert orphan.owner.key == parent.key
    assert use_of(usage, 100).key == again.key
    assert {hold.contexts for hold in use_of(usage, 100).holds} <= {0}


def test_an_exit_event_frees_the_pid_before_the_process_is_gone() -> None:
    rig = Rig()
    task, _ = rig.job(100, contexts=3)
    rig.update()
    rig.world.exit(task)
    rig.job(100, contexts=1)
    usage = rig.update()
    assert hold_of(usage, 100).contexts == 1
    assert hold_of(usage, 100).allocated == 1
    assert left(usage) == []


def test_the_exit_of_a_thread_is_no_exit_of_the_process() -> None:
    """An exit event is of the whole process when a status shows it, or when no event follows."""
    rig = Rig()
    task, control = rig.job(100, contexts=1)
    rig.world.fork(task, 101)
    rig.update()
    rig.world.begin_exit(task)
    task.exiting = False
    rig.world.context(task, control)
    usage = rig.update()
    assert hold_of(usage, 100).contexts == 2
    assert left(usage) == []
    assert use_of(usage, 100).exiting_since_ns is None


def test_an_orphan_names_a_bounded_number_of_holders() -> None:
    rig = Rig()
    parent, _ = rig.job(100)
    for number in range(MAX_HOLDERS + 4):
        rig.world.fork(parent, 200 + number)
    rig.update()
    rig.end(parent)
    (orphan,) = left(rig.update())
    assert [key.pid for key in orphan.holders] == list(range(200, 200 + MAX_HOLDERS))


# Exits that hang


def test_a_process_that_hangs_in_its_exit_holds_its_files() -> None:
    """Its descriptors are gone at once, its files only when the driver releases them."""
    rig = Rig()
    task, _ = rig.job(contexts=2)
    rig.update()
    rig.world.begin_exit(task)
    began_ns = rig.world.now_ns
    task.state = "D"
    files, task.fds = task.fds, []
    usage = rig.update()
    use = use_of(usage, 100)
    assert (use.exiting_since_ns, use.status.state, use.files) == (began_ns, "D", len(files))
    assert hold_of(usage, 100).contexts == 2
    assert rig.tracker.exiting == (task.key,)
    rig.tracker.handle_process_gone(task.key, rig.world.now_ns)
    assert rig.update().processes == ()


@pytest.mark.parametrize(
    ("state", "killed", "is_exiting"),
    [("Z", False, True), ("X", False, True), ("D", True, True), ("D", False, False), ("S", True, False)],
)
def test_a_status_can_show_that_a_process_exits(state: str, *, killed: bool, is_exiting: bool) -> None:
    rig = Rig()
    task, _ = rig.job()
    rig.update()
    task.state, task.killed = state, killed
    rig.world.now_ns += 1
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    exiting_ns = use_of(rig.tracker.usage_snapshot(0), 100).exiting_since_ns
    assert (exiting_ns == rig.world.now_ns) if is_exiting else (exiting_ns is None)
    task.state, task.killed = "S", False
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).exiting_since_ns is None


# Files and processes older than the probe


def older_rig(pids: tuple[int, ...] = (100,)) -> tuple[Rig, list[Task], int]:
    """Processes that shared a control file before the probe was attached; the first made it."""
    rig = Rig.__new__(Rig)
    rig.world, rig.tracker = World(), Tracker(GPUS)
    rig.world.probed = False
    first, control = rig.job(pids[0], contexts=2)
    tasks = [first, *(rig.world.fork(first, pid) for pid in pids[1:])]
    rig.world.probed = True
    rig.update()
    return rig, tasks, control


def test_a_process_with_files_from_before_the_probe_is_partial() -> None:
    rig, (task,), control = older_rig()
    usage = rig.update()
    assert use_of(usage, 100).partial
    assert hold_of(usage, 100).contexts == 0
    rig.world.context(task, control)
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (1, 1, 0)


def test_a_process_from_after_the_probe_is_not_partial_though_it_holds_older_files() -> None:
    rig, (task,), _ = older_rig()
    rig.world.fork(task, 101)
    rig.job(102)
    usage = rig.update()
    assert [(use.key.pid, use.partial) for use in usage.processes] == [
        (100, True),
        (101, False),
        (102, False),
    ]


def test_frees_of_unknown_objects_are_ignored() -> None:
    rig, (task,), _ = older_rig()
    client = next(iter(rig.world.clients))
    rig.world.free(task, client, client)
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.freed) == (0, 0)


def test_an_orphan_of_an_older_process_has_unknown_contexts() -> None:
    rig, (first, second), _ = older_rig((100, 101))
    rig.end(first)
    (orphan,) = left(rig.update())
    assert (orphan.owner.key, orphan.gpu, orphan.contexts) == (first.key, V0, None)
    assert orphan.holders == (second.key,)


def test_of_the_holders_of_an_older_file_the_oldest_process_counts_as_its_maker() -> None:
    rig, (_first, second), _ = older_rig((100, 101))
    rig.end(second)
    assert left(rig.update()) == []


def test_files_with_events_before_the_first_scan_are_not_older() -> None:
    world, tracker = World(), Tracker(GPUS)
    rig = Rig.__new__(Rig)
    rig.world, rig.tracker = world, tracker
    rig.job()
    assert not use_of(rig.update(), 100).partial


# Losses


def test_without_a_scan_the_usage_is_incomplete() -> None:
    tracker = Tracker(GPUS)
    assert not tracker.usage_snapshot(0).complete
    tracker.apply_scan([], 1)
    assert tracker.usage_snapshot(0).complete
    assert tracker.usage_snapshot(0).incomplete_because == ""


def test_after_a_loss_the_usage_is_complete_after_a_rebuild_and_a_scan() -> None:
    rig = Rig()
    rig.job(contexts=3)
    lost = rig.world.drain()
    rig.tracker.handle_lost_events(len(lost))
    assert wants(rig) == (True, False)
    rig.tracker.apply_scan(rig.world.scan(), rig.world.now_ns)
    usage = rig.tracker.usage_snapshot(0)
    assert (usage.complete, usage.incomplete_because) == (False, "events were lost")
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    assert wants(rig) == (False, False)
    usage = rig.update()
    assert usage.complete
    assert usage.events_lost == len(lost)
    assert hold_of(usage, 100).contexts == 3


def wants(rig: Rig) -> tuple[bool, bool]:
    """Whether a rebuild is wanted, and whether the usage is complete."""
    return rig.tracker.needs_rebuild, rig.tracker.usage_snapshot(0).complete


def test_contexts_freed_while_events_were_lost_count_as_freed() -> None:
    rig = Rig()
    task, control = rig.job(contexts=3)
    rig.update()
    client = next(iter(rig.world.clients))
    rig.world.free(task, client, client)
    rig.world.context(task, control)
    rig.world.context(task, control)
    rig.world.drain()
    rig.tracker.handle_lost_events(1)
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.freed) == (4, 0)
    assert hold.allocated == 4


def test_events_from_before_a_rebuild_change_nothing() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    rig.world.context(task, control)
    late = rig.world.drain()
    rig.world.now_ns += 1
    rig.tracker.rebuild(rig.world.rows.values(), rig.world.now_ns)
    rig.tracker.handle_events(late)
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (1, 1, 0)


def test_rows_that_are_older_than_their_file_are_of_an_earlier_one() -> None:
    rig = Rig()
    task, control = rig.job(contexts=1)
    rows = list(rig.world.rows.values())
    rig.tracker.rebuild(rows, rig.world.now_ns, {control: rig.world.now_ns})
    assert {(each.client, each.handle) for each in rig.tracker.pop_removed()} == set(rig.world.rows)
    assert task.fds


def test_a_row_with_a_younger_parent_is_stale() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    client, share = rig.world.context(task, control)
    rows = dict(rig.world.rows)
    group = rig.world.clients[client].objects[share].parent
    rows[client, group] = rows[client, group]._replace(at_ns=rows[client, share].at_ns + 1)
    rig.tracker.rebuild(rows.values(), rig.world.now_ns + 2)
    rig.tracker.apply_scan(rig.world.scan(), rig.world.now_ns + 2)
    assert [each.handle for each in rig.tracker.pop_removed() if each.handle == share] == [share]


def test_processes_that_cannot_be_read_make_the_usage_incomplete() -> None:
    rig = Rig()
    rig.tracker.set_unreadable_reason("no host PID namespace")
    usage = rig.update()
    assert (usage.complete, usage.incomplete_because) == (False, "no host PID namespace")
    rig.tracker.set_unreadable_reason("")
    assert rig.update().complete


# Without the probe


def test_with_proc_alone_contexts_and_files_are_unknown() -> None:
    tracker = Tracker(GPUS, source="proc")
    task = World().spawn(700)
    held = [
        HeldFile(700, task.key.start_ticks, 0, gpu_file(0), 3, 0),
        HeldFile(700, task.key.start_ticks, 0, CONTROL, 2, 0),
    ]
    tracker.apply_scan(held, 1)
    tracker.update_statuses([task.status], 1)
    usage = tracker.usage_snapshot(2)
    (use,) = usage.processes
    assert (use.key.pid, use.files, use.fds, use.partial) == (700, None, 5, False)
    assert use.holds == (GpuHold(V0, 5, None),)
    assert [(total.processes, total.contexts) for total in usage.totals] == [(1, None)]
    assert (usage.source, usage.complete) == ("proc", True)
    tracker.apply_scan([], 3)
    assert tracker.usage_snapshot(4).processes == ()


def test_the_agent_is_known_by_its_pid() -> None:
    rig = Rig()
    rig.tracker = Tracker(GPUS, agent_pid=101)
    rig.job(100)
    rig.job(101)
    assert [use.is_agent for use in rig.update().processes] == [False, True]


# Bounds


def test_the_process_with_the_oldest_event_is_evicted() -> None:
    rig = Rig(bounds=Bounds(processes=3))
    jobs = [rig.job(100 + number) for number in range(3)]
    rig.tracker.handle_events(rig.world.drain())
    rig.world.context(*jobs[0])
    rig.job(200)
    rig.tracker.handle_events(rig.world.drain())
    assert sorted(key.pid for key in rig.tracker.without_status) == [100, 102, 200]
    assert rig.tracker.usage_snapshot(0).evicted == 1


def test_an_evicted_process_leaves_no_orphan() -> None:
    rig = Rig(bounds=Bounds(processes=2))
    parent, _child = forked(rig)
    rig.update()
    rig.job(200)
    rig.tracker.handle_events(rig.world.drain())
    assert rig.tracker.usage_snapshot(0).evicted > 0
    rig.tracker.handle_process_gone(parent.key, rig.world.now_ns)
    assert rig.tracker.usage_snapshot(0).orphans == ()
    assert rig.tracker.pop_removed() == []


def test_the_file_with_the_oldest_event_is_evicted() -> None:
    rig = Rig(bounds=Bounds(files=3))
    rig.job(100)
    rig.job(101)
    usage = rig.update()
    assert usage.evicted > 0
    assert sum(use.files or 0 for use in usage.processes) == 2


def test_the_client_with_the_oldest_event_is_evicted() -> None:
    rig = Rig(bounds=Bounds(objects=12))
    rig.job(100, contexts=4)
    usage = rig.update()
    assert hold_of(usage, 100).contexts == 2
    assert usage.evicted == 12
    assert rig.tracker.pop_removed() == []


def test_clients_without_objects_are_bounded_too() -> None:
    rig = Rig(bounds=Bounds(objects_of_owner=5))
    task, control = rig.job(contexts=0)
    for _ in range(9):
        rig.world.client(task, control)
    assert rig.update().evicted == 4


def test_a_flood_of_short_processes_leaves_nothing() -> None:
    """Each has a reused pid."""
    rig = Rig()
    for number in range(2_000):
        task, _ = rig.job(100 + number % 7)
        rig.world.exit(task)
        if number % 50 == 0:
            rig.update()
    rig.update()
    usage = rig.update()
    assert (usage.processes, usage.orphans, usage.totals, usage.evicted) == ((), (), (), 0)
    assert rig.tracker.living == ()
    rig.update_after(BOUNDS.quarantine_ns)
    rig.world.delete_rows(rig.tracker.pop_removed())
    assert rig.world.rows == {}


def test_a_prime_number_of_contexts_is_counted_exactly() -> None:
    rig = Rig()
    task, control = rig.job(contexts=0)
    client = rig.world.client(task, control)
    device = rig.world.alloc(task, client, client, DEVICE, 0)
    rig.tracker.handle_events(rig.world.drain())
    events = [made(rig, task, client, handle=10_000 + number, parent=device) for number in range(10_007)]
    rig.tracker.handle_events(events)
    assert hold_of(rig.update(), 100).contexts == 10_007
    rig.tracker.handle_events(
        [each._replace(kind=RmEventKind.FREE, at_ns=rig.world.now_ns + 1) for each in events[:9_973]]
    )
    hold = hold_of(rig.update(), 100)
    assert (hold.contexts, hold.allocated, hold.freed) == (34, 10_007, 9_973)


def test_many_rows_of_earlier_processes_of_pids_in_use_take_no_longer_each() -> None:
    count = 20_000
    tracker = Tracker(GPUS)
    tracker.apply_scan([HeldFile(pid, 1000, pid, CONTROL, 1, 0) for pid in range(1, count)], 10)
    rows = [
        RmObject(
            client=pid, handle=pid, at_ns=5, cgroup_id=0, file=1, tgid=pid, rm_class=0x41, parent=0, gpu=0,
            start_ticks=7,
        )
        for pid in range(1, count)
    ]  # fmt: skip

    tracker.rebuild(rows, 20)

    assert {key.start_ticks for key in tracker.living} == {1000}
