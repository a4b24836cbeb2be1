"""What is shown of one probe on the driver's double: each scenario is a function that raises if it is not so.

Those that follow the driver are played in their order: the first begins with the probe in the kernel and no
driver, and each leaves the driver as the next one finds it.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.core.usage.gpu_map import folded
from agent.model.ids import GpuUuid
from agent.model.rm import RmEvent, RmEventKind
from agent.probe import kernel
from agent.probe.kernel import Roots
from agent.probe.layout import TracedCall
from agent.probe.probe import Probe
from agent.probe.programs import of_tier
from agent.simulation.driver_double import abi
from agent.simulation.driver_double.nodes import CONTROL, UVM
from agent.simulation.gpu_processes.calls import Caller
from tests.probe.test_workloads import GPUS
from tests.vm.module import VERSION, DriverModule

PRIME: Final = 1009
TOGETHER: Final = 64
"""More threads than any kernel's smallest room for kretprobes."""
PATIENCE_S: Final = 120.0
POLLS: Final = 2
"""Within so many polls the probe is attached to a driver that was loaded."""
OF_DRIVER: Final = frozenset(
    program.name for program in of_tier("driver") if program.kind in {"kprobe", "kretprobe"}
)

_DEVICE, _GROUP, _SPACE, _FIRST_CONTEXT = 1, 2, 3, 10


@dataclass(frozen=True, slots=True)
class Stage:
    """A probe, the driver that it watches, and this process, which makes calls."""

    probe: Probe
    driver: DriverModule

    def events(self) -> list[RmEvent]:
        """Take what the ring holds of this process."""
        found: list[RmEvent] = []
        while batch := self.probe.ring.read():
            found += batch
        return [event for event in found if event.tgid == os.getpid()]


class Client:
    """This process as a program that has one client on the first GPU."""

    def __init__(self, calls: Caller) -> None:
        self.calls: Final = calls
        self.control: Final = calls.open(CONTROL)
        self.node: Final = calls.open("nvidia0")
        calls.register(self.node, self.control)
        self.handle: Final = calls.allocate_client(self.control)
        calls.allocate_device(self.control, self.handle, _DEVICE, GPUS[0].instance)
        calls.allocate(self.control, self.handle, _DEVICE, _GROUP, abi.CHANNEL_GROUP)

    def allocate(self, contexts: int) -> None:
        """Allocate so many contexts."""
        for number in range(contexts):
            self.calls.allocate(self.control, self.handle, _GROUP, _FIRST_CONTEXT + number, abi.CONTEXT_SHARE)

    def free(self, contexts: int) -> None:
        """Free so many contexts."""
        for number in range(contexts):
            self.calls.free(self.control, self.handle, _GROUP, _FIRST_CONTEXT + number)


@contextmanager
def client() -> Iterator[Client]:
    """Be a client; what is left of it ends with its files."""
    made = Client(Caller("/dev", VERSION))
    try:
        yield made
    finally:
        os.close(made.node)
        os.close(made.control)


def driver_is_waited_for(stage: Stage) -> None:
    """Load the driver after the probe."""
    assert set(stage.probe.missing) == OF_DRIVER
    assert not OF_DRIVER & set(stage.probe.attached)
    stage.driver.load()
    stage.probe.refresh()
    _attached_within_polls(stage)


def contexts_are_counted_exactly(stage: Stage) -> None:
    """Allocate and free a prime number of contexts."""
    stage.driver.begin_anew()
    stage.events()
    # As the source does when their files end: the driver, loaded anew, gives the same numbers again.
    stage.probe.forget_objects([(row.client, row.handle, row.at_ns) for row in stage.probe.read_objects()])
    before, lost = _counted(stage), stage.probe.read_statistics().lost
    with client() as program:
        program.allocate(PRIME)
        live = {
            (row.client, row.handle)
            for row in stage.probe.read_objects()
            if row.client == program.handle and row.rm_class == abi.CONTEXT_SHARE
        }
        books = stage.driver.read_books()
        assert {(each.client, each.handle) for each in books.contexts} == live
        assert len(live) == PRIME
        program.free(PRIME)
    reported = Counter(event.kind for event in stage.events())
    after, books = _counted(stage), stage.driver.read_books()
    assert (books.counts["contexts_allocated"], books.counts["contexts_freed"]) == (PRIME, PRIME)
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == (PRIME, PRIME, PRIME + 3, PRIME, 2, 2)
    assert reported[RmEventKind.ALLOC] == PRIME + 3
    assert reported[RmEventKind.FREE] == PRIME
    statistics = stage.probe.read_statistics()
    assert (statistics.lost, statistics.unreadable) == (lost, 0)


def end_of_the_open_file_is_reported(stage: Stage) -> None:
    """Close a descriptor whose copy lives, then the copy."""
    calls = Caller("/dev", VERSION)
    stage.events()
    first = calls.open(CONTROL)
    (opened,) = stage.events()
    copy = os.dup(first)
    os.close(first)
    assert stage.events() == []
    os.close(copy)
    (ended,) = stage.events()
    assert (opened.kind, ended.kind) == (RmEventKind.OPEN, RmEventKind.RELEASE)
    assert opened.file == ended.file
    assert opened.device == ended.device == abi.device_number(abi.MAJOR, abi.CONTROL_MINOR)


def holders_are_found_in_the_kernel(stage: Stage) -> None:
    """Hold a copy, an inherited and two other descriptors while all files are gone through."""
    with client() as program:
        copy = os.dup(program.control)
        program.allocate(1)
        child = os.fork()
        if child == 0:
            os.read(os.pipe()[0], 1)
        scan = stage.probe.scan()
        files = {row.file for row in stage.probe.read_objects() if row.client == program.handle}
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(copy)
    assert scan.source == "kernel"
    assert scan.unseen == ""
    control, node = (abi.device_number(abi.MAJOR, minor) for minor in (abi.CONTROL_MINOR, 0))
    for tgid in (os.getpid(), child):
        held = {each.device: each for each in scan.held if each.tgid == tgid}
        assert {device: each.fds for device, each in held.items()} == {control: 2, node: 1}
        assert {held[control].file} == files


def readiness_is_seen(stage: Stage) -> None:
    """Make the agent's own checks of a GPU and of the control device."""
    calls = Caller("/dev", VERSION)
    for name, number, size in (
        ("nvidia0", abi.NUMA_INFO, abi.layout(VERSION).numa_info_size),
        (CONTROL, abi.CHECK_VERSION_STR, abi.VERSION_STRUCT.size),
    ):
        descriptor = calls.open(name)
        calls.plain(descriptor, number, size)
        os.close(descriptor)
    seen = stage.probe.read_readiness()
    assert set(seen) >= {0, abi.CONTROL_MINOR}
    for minor in (0, abi.CONTROL_MINOR):
        assert seen[minor].ready
        assert seen[minor].check.result == 0
        assert seen[minor].check.took_ns is not None


def call_that_hangs_is_not_ready(stage: Stage) -> None:
    """Let the driver not answer a check."""
    calls = Caller("/dev", VERSION)
    node = calls.open("nvidia0")
    checked = threading.Thread(
        target=calls.plain, args=(node, abi.NUMA_INFO, abi.layout(VERSION).numa_info_size)
    )
    before = stage.probe.read_readiness()[0].check
    with stage.driver.held():
        checked.start()
        _until(lambda: stage.driver.waiting() == 1)
        hanging = stage.probe.read_readiness()[0].check
    checked.join()
    os.close(node)
    answered = stage.probe.read_readiness()[0]
    assert hanging.in_flight
    assert hanging.calls == before.calls + 1
    assert answered.ready
    assert answered.check.took_ns is not None


def calls_at_once_are_counted(stage: Stage) -> None:
    """Have many threads wait in the driver at once, each to make a context."""
    seen, unreturned = _made_at_once(stage, TOGETHER)
    assert (seen, unreturned) == (TOGETHER, 0)


def calls_at_once_are_counted_without_events(stage: Stage) -> None:
    """Have as many of them wait as the kernel follows where its returns are not events.

    Of these it follows twice as many at once as it may have CPUs, at least ten; one more call that waits is
    not seen to return. Source: linux/kernel/kprobes.c. This process attached, and sees no trace file system.
    """
    together = max(10, 2 * (os.cpu_count() or 1))
    seen, unreturned = _made_at_once(stage, together)
    assert (seen, unreturned) == (together, 0)


def calls_beyond_that_are_reported_as_lost(stage: Stage) -> None:
    """Have more of them wait than the kernel follows."""
    seen, unreturned = _made_at_once(stage, TOGETHER)
    assert 0 < seen < TOGETHER
    assert seen + unreturned == TOGETHER


def _made_at_once(stage: Stage, together: int) -> tuple[int, int]:
    """Return how many of so many contexts are in the kernel's table, and how many calls were lost."""
    before = stage.probe.read_statistics().lost
    with client() as program:

        def allocate(number: int) -> None:
            handle = _FIRST_CONTEXT + number
            program.calls.allocate(program.control, program.handle, _GROUP, handle, abi.CONTEXT_SHARE)

        threads = [threading.Thread(target=allocate, args=(number,)) for number in range(together)]
        with stage.driver.held():
            for thread in threads:
                thread.start()
            _until(lambda: stage.driver.waiting() == together)
        for thread in threads:
            thread.join()
        rows = stage.probe.read_objects()
        seen = [row for row in rows if (row.client, row.rm_class) == (program.handle, abi.CONTEXT_SHARE)]
    # A thread may be joined a moment before its end is reported.
    _until(lambda: len(seen) + stage.probe.read_statistics().lost - before >= together)
    return len(seen), stage.probe.read_statistics().lost - before


def _until(condition: Callable[[], bool]) -> None:
    """Wait for something that has no event."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def unified_memory_names_the_gpu(stage: Stage) -> None:
    """Register an address space of a client for a GPU."""
    assert stage.probe.config.uvm_major == kernel.majors(Roots()).uvm
    with client() as program:
        program.calls.allocate(program.control, program.handle, _DEVICE, _SPACE, abi.VA_SPACE)
        node = program.calls.open(UVM)
        stage.events()
        head = abi.VASPACE_STRUCT.pack(GPUS[0].raw_uuid, program.control, program.handle, _SPACE, 0)
        program.calls.unified(node, abi.UVM_REGISTER_GPU_VASPACE, head[:-4])
        (reported,) = stage.events()
        os.close(node)
    assert reported.kind is RmEventKind.UVM
    assert (reported.client, reported.handle) == (program.handle, _SPACE)
    assert (reported.parent, reported.detail) == folded(GpuUuid(GPUS[0].uuid))


def nothing_is_done_while_nothing_changes(stage: Stage) -> None:
    """Poll a few times."""
    attached = stage.probe.attached
    assert [(stage.probe.refresh(), stage.probe.reattach()) for _ in range(5)] == [(False, ())] * 5
    assert stage.probe.attached == attached


def driver_that_is_gone_is_released(stage: Stage) -> None:
    """Unload the driver."""
    stage.driver.unload()
    assert stage.probe.reattach() == ()
    assert stage.probe.missing == dict.fromkeys(OF_DRIVER, "the driver was unloaded")
    assert stage.probe.refresh()
    assert stage.probe.config.uvm_major == 0


def driver_that_came_back_is_attached_to(stage: Stage) -> None:
    """Load it again."""
    stage.driver.load()
    stage.probe.refresh()
    _attached_within_polls(stage)
    contexts_are_counted_exactly(stage)


def driver_reloaded_between_two_polls_is_attached_to(stage: Stage) -> None:
    """Unload and load it between two polls."""
    stage.driver.unload()
    stage.driver.load()
    stage.probe.refresh()
    _attached_within_polls(stage)
    contexts_are_counted_exactly(stage)


def every_call_is_traced(stage: Stage) -> None:
    """Make a prime number of calls, of which one fails."""
    ring = stage.probe.traced_ring()
    calls = Caller("/dev", VERSION)
    with client() as program:
        control, handle = program.control, program.handle
        while ring.read():
            pass
        for _ in range(PRIME):
            calls.control(control, handle, handle, 0x101)
        # Of no client, so it fails.
        calls.plain(control, abi.FREE, abi.FREE_STRUCT.size)
    reported: list[TracedCall] = []
    while batch := ring.read():
        reported += batch
    ring.close()
    assert [call.number for call in reported] == [abi.CONTROL] * PRIME + [abi.FREE]
    assert {call.tgid for call in reported} == {os.getpid()}
    assert {call.device for call in reported} == {abi.device_number(abi.MAJOR, abi.CONTROL_MINOR)}
    assert all(call.took_ns > 0 and call.result == 0 for call in reported)
    assert abi.FREE_STRUCT.unpack_from(reported[-1].block)[3] == abi.INVALID_CLIENT


Scenario = Callable[[Stage], None]

FOLLOWING_THE_DRIVER: Final[tuple[Scenario, ...]] = (
    driver_is_waited_for,
    contexts_are_counted_exactly,
    end_of_the_open_file_is_reported,
    holders_are_found_in_the_kernel,
    readiness_is_seen,
    call_that_hangs_is_not_ready,
    calls_at_once_are_counted_without_events,
    calls_beyond_that_are_reported_as_lost,
    unified_memory_names_the_gpu,
    nothing_is_done_while_nothing_changes,
    driver_that_is_gone_is_released,
    driver_that_came_back_is_attached_to,
    driver_reloaded_between_two_polls_is_attached_to,
)
READING_MAPS: Final[tuple[Scenario, ...]] = (
    holders_are_found_in_the_kernel,
    readiness_is_seen,
    call_that_hangs_is_not_ready,
    calls_at_once_are_counted,
)
"""What may be shown while another reader has the ring."""


@contextmanager
def without_btf() -> Iterator[None]:
    """Let the kernel not describe its structs."""
    place = Path("/sys/kernel/btf")
    _busybox("mount", "-t", "tmpfs", "tmpfs", str(place))
    try:
        yield
    finally:
        _busybox("umount", str(place))


def _busybox(*command: str) -> None:
    assert os.spawnvp(os.P_WAIT, "busybox", ["busybox", *command]) == 0


def _attached_within_polls(stage: Stage) -> None:
    for _ in range(POLLS):
        stage.probe.reattach()
    assert set(stage.probe.attached) >= OF_DRIVER, stage.probe.missing
    assert not stage.probe.missing


def _counted(stage: Stage) -> tuple[int, ...]:
    """Return what the kernel counted of this process."""
    for row in stage.probe.read_processes():
        if row.tgid == os.getpid():
            return (
                row.contexts_allocated,
                row.contexts_freed,
                row.allocs,
                row.frees,
                row.opens,
                row.closes,
            )
    return (0,) * 6
