"""Snapshots refreshed by what changed against those made from nothing: after each step they are equal."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from agent.core.usage.bounds import Bounds
from agent.core.usage.gpu_map import CONTROL, GpuMap
from agent.core.usage.processes import by_process
from agent.model.ids import Placement
from agent.model.rm import RmEventKind
from tests.core.kernel_world import GPUS, V0, V1, gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of
from tests.core.usage.test_tracker_world import AgainstTheKernel

CAPABILITIES = 511
NUMBERINGS = (
    GPUS,
    GpuMap(by_minor={0: V0, 1: V1}, by_instance={0: V1, 1: V0}),
    GpuMap(by_minor={0: V0}, by_instance={0: V0}),
    GpuMap(by_minor={}),
    GpuMap(by_minor={0: V1, 1: V0}),
    GpuMap(
        by_minor={0: V0, 1: V1},
        by_instance={0: V0, 1: V1},
        by_capability={1: Placement(V0, 1, 0), 2: Placement(V0, 2, 0)},
        capabilities_major=CAPABILITIES,
    ),
)
"""A driver that was loaded anew, GPUs that are lost or numbered otherwise, one that was partitioned."""
SMALL = Bounds(files=12, files_of_process=6, processes=3, objects=60, objects_of_owner=25, quarantined=10)


class ByWhatChanged(AgainstTheKernel):
    """All events and readings, in any order, true or not."""

    @initialize(tier_driver=st.booleans(), reports_starts=st.booleans(), reports_opens=st.booleans())
    def begin(self, *, tier_driver: bool, reports_starts: bool, reports_opens: bool) -> None:
        self.numbering = GPUS
        super().begin(tier_driver=tier_driver, reports_starts=reports_starts, reports_opens=reports_opens)

    @rule(numbering=st.sampled_from(NUMBERINGS))
    def number(self, numbering: GpuMap) -> None:
        self.numbering = numbering
        self.tracker.set_gpus(numbering)

    @rule(enabled=st.booleans())
    def report_releases(self, *, enabled: bool) -> None:
        self.tracker.set_release_events(enabled=enabled)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), minor=st.sampled_from([1, 2]))
    def open_part(self, data: st.DataObject, minor: int) -> None:
        task = self.draw_task(data)
        if not task.exiting:
            self.world.open(task, CAPABILITIES << 20 | minor)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), state=st.sampled_from("SDZ"), killed=st.booleans())
    def read_state(self, data: st.DataObject, state: str, *, killed: bool) -> None:
        task = self.draw_task(data)
        task.state, task.killed = state, killed
        self.tracker.update_statuses([task.status], self.world.now_ns)

    @rule()
    def fill_object_table(self) -> None:
        self.tracker.handle_full_object_table()

    @rule(data=st.data(), is_whole=st.booleans())
    def scan_before_events(self, data: st.DataObject, *, is_whole: bool) -> None:
        at_ns = self.world.now_ns = self.world.now_ns + 1
        held = self.world.scan()
        if not is_whole and held:
            held = data.draw(st.lists(st.sampled_from(held), unique=True))
        for _ in self.tracker.apply_scan_steps(by_process(held), at_ns, is_whole=is_whole):
            pass

    def settle(self) -> None:
        """The truth is the subject of another test."""

    @invariant()
    def only_changes_differ(self) -> None:
        if hasattr(self, "tracker"):
            usage = self.tracker.usage_snapshot(self.world.now_ns)
            self.tracker.set_gpus(self.numbering)
            assert usage == self.tracker.usage_snapshot(self.world.now_ns)


class WithLittleRoom(ByWhatChanged):
    """Every bound is reached all the time."""

    bounds = SMALL


TestByWhatChanged = ByWhatChanged.TestCase
TestByWhatChanged.settings = settings(stateful_step_count=50)
TestWithLittleRoom = WithLittleRoom.TestCase
TestWithLittleRoom.settings = settings(stateful_step_count=50)


# One by one


def test_with_release_events_from_now_on_a_client_in_a_message_is_an_orphan() -> None:
    rig = Rig()
    task, control = rig.job()
    rig.update()
    rig.world.post(task, control)
    rig.end(task)
    assert rig.tracker.usage_snapshot(0).orphans == ()
    rig.tracker.set_release_events(enabled=True)
    assert [orphan.contexts for orphan in rig.tracker.usage_snapshot(0).orphans] == [1]


def test_a_gpu_with_only_a_close_event_was_open() -> None:
    rig = Rig()
    task = rig.world.spawn(100)
    control = rig.world.open(task, CONTROL)
    gpu = rig.world.open(task, gpu_file(1))
    rig.world.context(task, control, 1)
    events = [
        each for each in rig.world.drain() if each.kind is not RmEventKind.OPEN or each.device != gpu_file(1)
    ]
    rig.tracker.handle_events(events)
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).unplaced == 1
    rig.world.close(task, gpu)
    rig.tracker.handle_events(rig.world.drain())
    assert hold_of(rig.tracker.usage_snapshot(0), 100, V1).contexts == 1


def test_an_evicted_process_is_not_mistaken_for_the_next_one_with_its_pid() -> None:
    rig = Rig()
    task, _ = rig.job(100)
    rig.update()
    rig.world.begin_exit(task)
    task.exiting = False
    rig.world.open(task, CONTROL)
    rig.tracker.handle_events(rig.world.drain())
    first = task.key
    rig.tracker.handle_lost_events(1)
    rig.tracker.handle_process_gone(first, rig.world.now_ns)
    rig.tracker.handle_process_gone(
        next(key for key in rig.tracker.without_status if key.pid == 100), rig.world.now_ns
    )
    rig.tracker.handle_full_object_table()
    rig.world.open(task, CONTROL)
    rig.tracker.handle_events(rig.world.drain())
    rig.tracker.update_statuses([task.status], rig.world.now_ns)
    assert use_of(rig.tracker.usage_snapshot(0), 100).files == 1
