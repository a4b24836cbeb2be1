"""Fault 11: a fork bomb of processes that use GPUs, and pids that are used again.

Right: every table is bounded and what was forgotten is counted; no process is reported to have left
anything behind that has not. Here a short burst of real forks, and longer ones on a clock of the test's own.
"""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.tracker import Tracker
from agent.model.facts import GpuUseSeen
from agent.model.structs import replace
from agent.model.usage import Usage
from agent.probe.layout import MAX_OBJECTS_EACH
from agent.probe.request import PROCESSES
from agent.sources.ebpf.rounds import EbpfSettings
from agent.threads import in_daemon_thread
from tests.core.build import Node, S, enumerated, gpu, passed, ready
from tests.core.kernel_world import GPUS, V0, V1, Task, World, gpu_file
from tests.core.use import allocated, found, pods
from tests.faults.probed import stand_in, watched
from tests.probe.caller import CLIENT, ran
from tests.probe.watcher import SETTINGS, Watcher
from tests.sources.recorder import PATIENCE_S

ROOM = 256
BURST = 601
BOMB = """
for number in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        fd = os.open(sys.argv[1], os.O_RDWR)
        client = CLIENT + number
        alloc(fd, client, ROOT, parent=0, client=0)
        alloc(fd, 2, GROUP, parent=client, client=client)
        alloc(fd, 3, CONTEXT, client=client)
        os._exit(0)
    os.waitpid(pid, 0)
"""


# With real forks


@pytest.mark.slow
async def test_a_burst_of_real_forks_leaves_nothing(tmp_path: Path) -> None:
    # What no process holds may be in a message, for a while.
    settings = replace(SETTINGS, tables=Bounds(quarantine_ns=0))
    double = await in_daemon_thread("test-device", lambda: stand_in(tmp_path))
    async with watched(settings, processes=ROOM) as watcher:
        await in_daemon_thread("test-bomb", lambda: ran(BOMB, double, BURST))
        usage = await watcher.settled_usage()
        rows = await in_daemon_thread("test-read", watcher.probe.read_processes)

        assert all(not fact.usage.orphans for fact in watcher.seen.of(GpuUseSeen))
        assert [use for use in usage.processes if use.unplaced] == []
        assert usage.complete
        assert len(rows) <= ROOM
        async with asyncio.timeout(PATIENCE_S):
            while await rows_left(watcher):
                await asyncio.sleep(0.02)


async def rows_left(watcher: Watcher) -> bool:
    """Whether the kernel's tables still have something of the bomb."""
    objects = await in_daemon_thread("test-read", watcher.probe.read_objects)
    processes = await in_daemon_thread("test-read", watcher.probe.read_processes)
    of_bomb = any(CLIENT <= each.client < CLIENT + BURST for each in objects)
    return of_bomb or any(each.exited_ns for each in processes)


def test_the_tables_have_room_for_what_was_promised() -> None:
    assert PROCESSES == BOUNDS.processes == 65_536
    assert EbpfSettings().max_watched == 1_024
    assert BOUNDS.objects_of_owner == MAX_OBJECTS_EACH == 16_384


# On a clock of the test's own


class Bomb:
    """A machine, the tracker that follows it late, and the core that gets its snapshot once a second."""

    def __init__(self, seed: int, pids: int, bounds: Bounds = BOUNDS) -> None:
        self.world = World()
        self.tracker = Tracker(GPUS, bounds=bounds)
        self.node = Node()
        self.node.apply(
            ready(),
            enumerated(*(replace(gpu(number), uuid=uuid) for number, uuid in enumerate((V0, V1)))),
            passed(V0),
            passed(V1),
        )
        self.world.now_ns = self.node.now_ns
        self._chance = random.Random(seed)
        self._pids = range(100, 100 + pids)
        self._unreported: list[Task] = []
        self.scan()

    def second(self, spawned: int) -> None:
        """So many processes come and go, some of it is seen, and a second passes."""
        for _ in range(spawned):
            self._one(self._chance.choice(self._pids))
        self.tracker.handle_events(self.world.drain())
        for see in (self.scan, self.read_statuses, self.report_ends):
            if self._chance.random() < 0.4:
                see()
        self.report()
        self.node.until(self.node.now_ns + S)
        self.world.now_ns = max(self.world.now_ns, self.node.now_ns)

    def _one(self, pid: int) -> None:
        if any(task.key.pid == pid for task in self.world.alive):
            return
        task = self.world.spawn(pid)
        control = self.world.open(task, CONTROL)
        self.world.open(task, gpu_file(self._chance.choice((0, 1))))
        self.world.context(task, control, self._chance.choice((0, 1)))
        if self._chance.random() < 0.3:
            self.world.close(task, control)
        self.exit(task)

    def exit(self, task: Task) -> None:
        self.world.exit(task)
        self._unreported.append(task)

    def scan(self) -> None:
        at_ns = self.world.now_ns = self.world.now_ns + 1
        held = self.world.scan()
        self.tracker.handle_events(self.world.drain())
        self.tracker.apply_scan(held, at_ns)
        self.world.delete_rows(self.tracker.pop_removed())

    def read_statuses(self) -> None:
        alive = {task.key.pid: task for task in self.world.alive}
        for key in self.tracker.without_status:
            if key.pid in alive:
                self.tracker.update_statuses([alive[key.pid].status], self.world.now_ns)
            else:
                self.tracker.handle_process_gone(key, self.world.now_ns)

    def report_ends(self) -> None:
        for task in self._unreported:
            self.tracker.handle_process_gone(task.key, self.world.now_ns)
        self._unreported.clear()

    def report(self) -> Usage:
        snapshot = self.tracker.usage_snapshot(self.node.now_ns)
        self.node.apply(GpuUseSeen(snapshot), allocated(), pods())
        return snapshot

    def settled(self) -> Usage:
        for _ in range(2):
            self.report_ends()
            if self.tracker.needs_rebuild:
                self.tracker.rebuild(list(self.world.rows.values()), self.world.now_ns)
            self.scan()
            self.read_statuses()
        return self.report()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), pids=st.integers(1, 6), spawned=st.integers(1, 8))
def test_pids_that_are_used_again_and_again_make_no_finding(seed: int, pids: int, spawned: int) -> None:
    bomb = Bomb(seed, pids)
    for _ in range(90):
        bomb.second(spawned)
        assert found(bomb.node) == []

    snapshot = bomb.settled()
    assert (snapshot.processes, snapshot.orphans, snapshot.totals) == ((), (), ())
    bomb.world.now_ns += BOUNDS.quarantine_ns
    bomb.scan()
    assert bomb.world.rows == {}
    assert bomb.tracker.living == ()


def test_when_there_are_more_processes_than_room_the_others_are_counted_and_accused_of_nothing() -> None:
    bomb = Bomb(seed=11, pids=1, bounds=Bounds(processes=50))
    living = []
    for pid in range(1_000, 1_200):
        task = bomb.world.spawn(pid)
        living.append(task)
        bomb.world.context(task, bomb.world.open(task, CONTROL))
        bomb.tracker.handle_events(bomb.world.drain())
        if pid % 20 == 0:
            bomb.settled()

    snapshot = bomb.settled()

    assert len(snapshot.processes) <= 50
    assert snapshot.evicted >= 150
    assert snapshot.orphans == ()
    for _ in range(40):
        bomb.node.until(bomb.node.now_ns + S)
        bomb.settled()
    assert [
        each for each in found(bomb.node) if each.details and each.details.kind != "foreign_process"
    ] == []
    for task in living:
        bomb.exit(task)
    snapshot = bomb.settled()
    assert (snapshot.processes, snapshot.orphans) == ((), ())
