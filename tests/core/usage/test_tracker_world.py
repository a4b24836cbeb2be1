"""The tracker against a small kernel that knows the truth: any order of calls, scans, exits and losses."""

from collections import Counter
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent.core.usage.bounds import BOUNDS
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.processes import UNKNOWN_START
from agent.core.usage.tracker import Tracker
from agent.model.ids import GpuUuid
from agent.model.rm import RmEventKind
from agent.model.usage import ProcessKey, Usage
from tests.core.kernel_world import CHANNEL, DEVICE, GPUS, GROUP, SHARE, UVM, VASPACE, Task, World, gpu_file

PIDS = (100, 101, 102)
Name = TypeVar("Name")
Found = Counter[tuple[ProcessKey, GpuUuid | None]]


class AgainstTheKernel(RuleBasedStateMachine):
    """Few pids and addresses, so that they are reused all the time."""

    bounds = BOUNDS

    @initialize(tier_driver=st.booleans(), reports_starts=st.booleans(), reports_opens=st.booleans())
    def begin(self, *, tier_driver: bool, reports_starts: bool, reports_opens: bool) -> None:
        self.world = World(
            tier_driver=tier_driver, reports_starts=reports_starts, reports_opens=reports_opens
        )
        self.tracker = Tracker(GPUS, bounds=self.bounds)
        self.tracker.set_release_events(enabled=tier_driver)
        self.reported_gone: set[ProcessKey] = set()
        self.seen: set[ProcessKey] = set()
        self.reused_unseen = False
        """A pid was reused before its status was read, or while events were lost."""
        self.was_lost = self.was_ever_lost = False
        self.was_lost_with_messages = False
        """A file was in a message while events were lost, so that its close may have been among them."""
        self.scan()

    def draw_task(self, data: st.DataObject) -> Task:
        return data.draw(st.sampled_from(self.world.alive))

    # What processes do

    @rule(pid=st.sampled_from(PIDS))
    def spawn(self, pid: int) -> None:
        if self.is_free(pid):
            self.world.spawn(pid)

    def is_free(self, pid: int) -> bool:
        if any(task.key.pid == pid for task in self.world.alive):
            return False
        earlier = [task.key for task in self.world.tasks if task.key.pid == pid]
        if earlier and (earlier[-1] not in self.seen or self.was_lost):
            self.reused_unseen = True
        return True

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), device=st.sampled_from([CONTROL, CONTROL, gpu_file(0), gpu_file(1), UVM]))
    def open(self, data: st.DataObject, device: int) -> None:
        task = self.draw_task(data)
        if not task.exiting:
            self.world.open(task, device)

    @precondition(lambda self: self.world.alive and self.world.messages)
    @rule(data=st.data(), is_received=st.booleans())
    def end_message(self, data: st.DataObject, *, is_received: bool) -> None:
        task = self.draw_task(data)
        if is_received and not task.exiting:
            self.world.receive(task)
        elif not is_received:
            self.world.discard(task)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), what=st.sampled_from(["dup", "close", "send", "post"]))
    def move(self, data: st.DataObject, what: str) -> None:
        task = self.draw_task(data)
        if not task.fds or task.exiting:
            return
        file = data.draw(st.sampled_from(task.fds))
        if what == "dup":
            self.world.dup(task, file)
        elif what == "close":
            self.world.close(task, file)
        elif what == "post":
            self.world.post(task, file)
        else:
            self.world.send(self.draw_task(data), file)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), pid=st.sampled_from(PIDS))
    def fork(self, data: st.DataObject, pid: int) -> None:
        task = self.draw_task(data)
        if not task.exiting and self.is_free(pid):
            self.world.fork(task, pid)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data())
    def exec(self, data: st.DataObject) -> None:
        task = self.draw_task(data)
        if not task.exiting:
            self.world.exec(task, "sh")

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), is_only_begun=st.booleans())
    def exit(self, data: st.DataObject, *, is_only_begun: bool) -> None:
        task = self.draw_task(data)
        if is_only_begun and not task.exiting:
            self.world.begin_exit(task)
        else:
            self.world.exit(task)

    # What they do with the driver

    def control_files(self) -> list[tuple[Task, int]]:
        return [
            (task, file)
            for task in self.world.alive
            if not task.exiting
            for file in task.fds
            if self.world.files[file] == CONTROL
        ]

    @precondition(lambda self: self.control_files())
    @rule(data=st.data())
    def context(self, data: st.DataObject) -> None:
        task, file = data.draw(st.sampled_from(self.control_files()))
        if instances := self.world.gpus_of(task):
            self.world.context(task, file, data.draw(st.sampled_from(instances)))

    @precondition(lambda self: self.control_files())
    @rule(data=st.data())
    def register_fd(self, data: st.DataObject) -> None:
        task, control = data.draw(st.sampled_from(self.control_files()))
        nodes = [
            file
            for file in task.fds
            if self.world.files[file] in {gpu_file(0), gpu_file(1)} and file not in self.world.keeps
        ]
        if nodes:
            self.world.register_fd(task, data.draw(st.sampled_from(nodes)), control)

    @precondition(lambda self: self.usable())
    @rule(data=st.data(), rm_class=st.sampled_from([DEVICE, VASPACE, GROUP, SHARE, CHANNEL]))
    def alloc(self, data: st.DataObject, rm_class: int) -> None:
        task, name = data.draw(st.sampled_from(self.usable()))
        client = self.world.clients[name]
        parents = [name] if rm_class == DEVICE else list(client.objects) or [name]
        parent = data.draw(st.sampled_from(parents))
        instances = self.world.gpus_of(client.owner) if rm_class == DEVICE else [0xFFFFFFFF]
        if len(client.objects) < 30 and instances:
            instance = data.draw(st.sampled_from(instances))
            self.world.alloc(task, name, parent, rm_class, instance)

    @precondition(lambda self: self.usable())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        task, name = data.draw(st.sampled_from(self.usable()))
        handle = data.draw(st.sampled_from([name, *self.world.clients[name].objects]))
        self.world.free(task, name, handle)

    def usable(self) -> list[tuple[Task, int]]:
        """Return which processes can call the driver for which client: every holder of its file."""
        return [
            (task, name)
            for name, client in self.world.clients.items()
            for task in self.world.alive
            if not task.exiting and client.file in task.fds
        ]

    # Input of the tracker

    @rule()
    def drain(self) -> None:
        self.tracker.handle_events(self.world.drain())
        self.world.delete_rows(self.tracker.pop_removed())

    @rule()
    def scan(self) -> None:
        at_ns = self.world.now_ns = self.world.now_ns + 1
        held = self.world.scan()
        self.drain()
        self.tracker.apply_scan(held, at_ns)
        self.seen |= {ProcessKey(each.tgid, each.start_ticks) for each in held}
        self.world.delete_rows(self.tracker.pop_removed())
        if not self.tracker.needs_rebuild:
            self.was_lost = False

    @rule()
    def read_statuses(self) -> None:
        for key in self.tracker.without_status:
            living = [task for task in self.world.alive if task.key.pid == key.pid]
            is_same = living and key.start_ticks in {living[0].key.start_ticks, UNKNOWN_START}
            if is_same:
                self.tracker.update_statuses([living[0].status], self.world.now_ns)
                self.seen.add(living[0].key)
            else:
                self.drain()
                self.tracker.handle_process_gone(key, self.world.now_ns)

    @rule()
    def report_exits(self) -> None:
        self.drain()
        for task in self.world.tasks:
            if not task.alive and task.key not in self.reported_gone:
                self.reported_gone.add(task.key)
                self.tracker.handle_process_gone(task.key, self.world.now_ns)

    @rule()
    def lose(self) -> None:
        lost = self.world.drain()
        if lost:
            self.was_lost = self.was_ever_lost = True
            self.was_lost_with_messages |= bool(self.world.messages) or any(
                each.kind is RmEventKind.CLOSE for each in lost
            )
            alive = {task.key.pid for task in self.world.alive}
            if any(task.key.pid in alive and not task.alive for task in self.world.tasks):
                self.reused_unseen = True
            self.tracker.handle_lost_events(len(lost))

    @rule()
    def rebuild(self) -> None:
        self.drain()
        at_ns = self.world.now_ns = self.world.now_ns + 1
        rows = list(self.world.rows.values())
        self.tracker.rebuild(rows, at_ns, dict(self.world.opened))
        self.world.delete_rows(self.tracker.pop_removed())

    @rule()
    def settle(self) -> None:
        """After all input the usage has to be the truth."""
        self.report_exits()
        self.scan()
        self.read_statuses()
        for _ in range(3):
            if self.tracker.needs_rebuild:
                self.rebuild()
                self.read_statuses()
                self.scan()
        self.report_exits()
        self.read_statuses()
        self.scan()
        usage = self.tracker.usage_snapshot(self.world.now_ns)
        assert usage.complete
        assert {use.key: (use.fds, use.files) for use in usage.processes if use.fds} == {
            task.key: (len(task.fds), len(set(task.fds))) for task in self.world.alive if task.fds
        }
        if self.was_ever_lost and not self.world.reports_opens:
            # A file at an address reused while events were lost is not distinguishable from the earlier one.
            return
        if self.was_lost_with_messages:
            return
        assert totals_of(usage).total() == self.true_totals().total()
        if not self.reused_unseen:
            assert by_process(contexts_of(usage)) == by_process(self.true_contexts())
            assert by_process(left_in(usage)) == by_process(self.true_left())
        if not self.reused_unseen and not self.was_ever_lost:
            # The kernel saw which GPUs a process had open, and only those count.
            assert totals_of(usage) == self.true_totals()
            assert contexts_of(usage) == self.true_contexts()
            assert left_in(usage) == self.true_left()
        self.another_tracker_agrees(usage)

    def another_tracker_agrees(self, usage: Usage) -> None:
        """Another tracker, with the rows and a scan alone, has the same usage."""
        if any(not self.world.keepers(client.file) for client in self.world.clients.values()):
            # A client in a message cannot be distinguished from one that is gone.
            return
        other = Tracker(GPUS)
        other.rebuild(list(self.world.rows.values()), self.world.now_ns, dict(self.world.opened))
        other.apply_scan(self.world.scan(), self.world.now_ns)
        for key in other.without_status:
            living = [task for task in self.world.alive if task.key.pid == key.pid]
            if living:
                other.update_statuses([living[0].status], self.world.now_ns)
            else:
                other.handle_process_gone(key, self.world.now_ns)
        anew = other.usage_snapshot(self.world.now_ns)
        if not self.world.reports_opens:
            # Then a client that is known from its row alone makes no orphan.
            assert by_process(contexts_of(anew)) == by_process(contexts_of(usage)) or self.reused_unseen
            assert not anew.orphans
            return
        assert totals_of(anew).total() == totals_of(usage).total()
        pids = set() if self.world.reports_starts else {task.key.pid for task in self.world.alive}
        if not pids & {
            client.owner.key.pid for client in self.world.clients.values() if not client.owner.alive
        }:
            assert by_process(contexts_of(anew)) == by_process(contexts_of(usage))
            assert by_process(left_in(anew)) == by_process(left_in(usage))

    # What must never be reported

    @invariant()
    def no_living_process_has_orphans(self) -> None:
        if not hasattr(self, "world"):
            return
        alive = {task.key for task in self.world.alive}
        usage = self.tracker.usage_snapshot(self.world.now_ns)
        for orphan in usage.orphans:
            assert orphan.owner.key not in alive
            if orphan.owner.key.start_ticks == UNKNOWN_START and not self.reused_unseen:
                assert orphan.owner.key.pid not in {key.pid for key in alive} or not self.is_sole(
                    orphan.owner.key.pid
                )

    def is_sole(self, pid: int) -> bool:
        return len([task for task in self.world.tasks if task.key.pid == pid]) == 1

    # The truth

    def true_totals(self) -> Counter[GpuUuid | None]:
        found: Counter[GpuUuid | None] = Counter()
        for (_, gpu), count in self.true().items():
            found[gpu] += count
        return found

    def true(self) -> Found:
        """All that can be known: without the end of files, nothing of what is in a message."""
        return self.world.contexts(with_unheld=self.world.tier_driver)

    def true_contexts(self) -> Found:
        alive = {task.key for task in self.world.alive}
        return Counter({key: count for key, count in self.true().items() if key[0] in alive})

    def true_left(self) -> Counter[tuple[int, GpuUuid | None]]:
        alive = {task.key for task in self.world.alive}
        found: Counter[tuple[int, GpuUuid | None]] = Counter()
        for (key, gpu), count in self.true().items():
            if key not in alive:
                found[key.pid, gpu] += count
        return found


def contexts_of(usage: Usage) -> Found:
    found: Found = Counter()
    for use in usage.processes:
        for hold in use.holds:
            found[use.key, hold.gpu] += hold.contexts or 0
        found[use.key, None] += use.unplaced
    return +found


def left_in(usage: Usage) -> Counter[tuple[int, GpuUuid | None]]:
    found: Counter[tuple[int, GpuUuid | None]] = Counter()
    for orphan in usage.orphans:
        found[orphan.owner.key.pid, orphan.gpu] += orphan.contexts or 0
    return found


def by_process(found: Counter[tuple[Name, GpuUuid | None]]) -> Counter[Name]:
    """Return the orphans without their GPU: after its file is closed no scan shows it."""
    sums: Counter[Name] = Counter()
    for (name, _), count in found.items():
        sums[name] += count
    return sums


def totals_of(usage: Usage) -> Counter[GpuUuid | None]:
    found: Counter[GpuUuid | None] = Counter()
    for (_, gpu), count in (contexts_of(usage) + left_in(usage)).items():
        found[gpu] += count
    assert {total.gpu: total.contexts for total in usage.totals if total.contexts} == {
        gpu: count for gpu, count in found.items() if gpu is not None
    }
    return found


TestAgainstTheKernel = AgainstTheKernel.TestCase
TestAgainstTheKernel.settings = settings(stateful_step_count=50)
