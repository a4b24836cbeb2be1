"""What the kernel side makes of driver calls, with both loaders: counts, objects, events."""

import struct
from pathlib import Path
from uuid import UUID

import pytest

from agent.core.usage.gpu_map import folded
from agent.model.ids import GpuUuid
from agent.model.rm import LAST, REGISTRATION, HeldFile, RmEventKind, joined
from agent.probe.kernel import Majors
from agent.probe.probe import Probe
from agent.simulation.driver_double import abi
from tests.probe.caller import CLIENT, CONTEXT, DEVICE, ROOT, Caller, ran
from tests.probe.conftest import MEMORY_MAJOR, device_of
from tests.probe.readings import counters, events, kinds, objects

PRIME = 10_007


OPENED = "fd = os.open(sys.argv[1], os.O_RDWR)\n"


def test_a_prime_number_of_opens_and_closes_is_counted_exactly(probe: Probe, gpu: Path) -> None:
    pid = ran("for _ in range(int(sys.argv[2])): os.close(os.open(sys.argv[1], os.O_RDWR))", gpu, PRIME)

    row = counters(probe, pid)
    assert (row.opens, row.closes) == (PRIME, PRIME)


def test_a_prime_number_of_contexts_and_frees_is_counted_exactly(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
for handle in range(int(sys.argv[2])): alloc(fd, handle + 3, CONTEXT)
wait()
for handle in range(int(sys.argv[2])): free(fd, handle + 3)
"""
    )
    with Caller(code, gpu, PRIME) as caller:
        assert len(objects(probe, caller.pid)) == PRIME

        caller.end()

    row = counters(probe, caller.pid)
    assert (row.allocs, row.contexts_allocated) == (PRIME, PRIME)
    assert (row.frees, row.contexts_freed) == (PRIME, PRIME)
    assert row.calls == 2 * PRIME
    assert objects(probe, caller.pid) == []


def test_every_event_is_on_the_ring_or_counted_as_lost(probe: Probe, gpu: Path) -> None:
    before = probe.read_statistics()
    pid = ran("for _ in range(int(sys.argv[2])): os.close(os.open(sys.argv[1], os.O_RDWR))", gpu, PRIME)

    after = probe.read_statistics()
    sent = sum((after.events, after.lost, after.unsent)) - sum((before.events, before.lost, before.unsent))
    # Another process may use the device meanwhile, so at least.
    assert sent >= 2 * PRIME + 1
    # It takes longer than the window of time in which it has its share of the ring once.
    assert after.unsent > before.unsent
    assert counters(probe, pid).unsent == after.unsent - before.unsent
    assert 0 < len(events(probe, pid)) <= after.events - before.events


def test_an_object_has_its_process_and_its_file(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "alloc(fd, 7, CONTEXT, parent=5)\nwait()\n", gpu) as caller:
        (one,) = objects(probe, caller.pid)
        (held,) = [held for held in probe.scan().held if held.file == one.file]

        assert (one.client, one.handle, one.rm_class, one.parent) == (CLIENT, 7, CONTEXT, 5)
        assert (held.tgid, held.start_ticks) == (caller.pid, one.start_ticks)
        assert held.device == device_of(gpu)
        assert one.start_ticks == start_ticks(caller.pid)
        assert counters(probe, caller.pid).start_ticks == one.start_ticks


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_lifecycle_events_are_sent_in_order(probe: Probe, gpu: Path) -> None:
    pid = ran(OPENED + "alloc(fd, 7, CONTEXT)\nfree(fd, 7)\nos.close(fd)", gpu)

    sent = events(probe, pid)
    assert [event.kind for event in sent] == [
        RmEventKind.OPEN,
        RmEventKind.ALLOC,
        RmEventKind.FREE,
        RmEventKind.CLOSE,
        RmEventKind.EXIT,
    ]
    opened, allocated, freed, closed, _ = sent
    assert opened.file == allocated.file == freed.file == closed.file
    assert {event.device for event in sent[:4]} == {device_of(gpu)}
    assert (allocated.client, allocated.handle, allocated.rm_class) == (CLIENT, 7, CONTEXT)
    assert [event.at_ns for event in sent] == sorted(event.at_ns for event in sent)


def test_a_class_unrelated_to_contexts_is_only_counted(probe: Probe, gpu: Path) -> None:
    pid = ran(OPENED + "alloc(fd, 7, MEMORY)\nfree(fd, 7)\n", gpu)

    row = counters(probe, pid)
    assert (row.allocs, row.frees, row.contexts_allocated) == (1, 1, 0)
    assert RmEventKind.ALLOC not in kinds(probe, pid)


def test_a_failed_call_creates_nothing(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "alloc(fd, 7, CONTEXT, status=0x1F)\nwait()\n", gpu) as caller:
        assert objects(probe, caller.pid) == []
        row = counters(probe, caller.pid)
        assert (row.allocs, row.contexts_allocated, row.errors) == (1, 0, 1)


@pytest.mark.parametrize(
    "version", ["515.43.04", "520.56.06", "525.147.05", "530.41.03", "535.104.05", "570.148.08"]
)
def test_a_status_is_read_where_the_branch_of_the_driver_has_it(
    probe: Probe, gpu: Path, version: str
) -> None:
    """All that follows the head is other than zero but for the status, and then the status alone is."""
    known = abi.layout(version)
    before = probe.config
    code = (
        OPENED
        + """
size, at = map(int, sys.argv[2:])
for handle, (fill, status) in enumerate(((1, 0), (0, 0x1F)), start=7):
    block = bytearray(struct.pack("=IIIIQ", CLIENT, 2, handle, CONTEXT, 0).ljust(size, bytes([fill])))
    struct.pack_into("=I", block, at, status)
    call(fd, 0x2B, block)
wait()
"""
    )
    try:
        probe._set_config(before._replace(driver_branch=int(version.partition(".")[0])))
        for size in (known.nvos21_size, known.nvos64_size):
            with Caller(code, gpu, size, known.alloc_status(size)) as caller:
                assert [each.handle for each in objects(probe, caller.pid)] == [7]
                assert counters(probe, caller.pid).errors == 1
    finally:
        probe._set_config(before)


def test_a_failed_free_leaves_the_object(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "alloc(fd, 7, CONTEXT)\nfree(fd, 7, status=0x1F)\nwait()\n", gpu) as caller:
        assert len(objects(probe, caller.pid)) == 1
        assert counters(probe, caller.pid).contexts_freed == 0


def test_a_client_is_its_own_root(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "alloc(fd, 0xC1D00009, ROOT, client=0, parent=0)\nwait()\n", gpu) as caller:
        (client,) = objects(probe, caller.pid)
        assert (client.client, client.handle, client.rm_class) == (0xC1D00009, 0xC1D00009, ROOT)


def test_a_device_has_its_instance(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
params = ctypes.create_string_buffer(struct.pack("=I", 5), 64)
alloc(fd, 7, DEVICE, params=ctypes.addressof(params))
wait()
"""
    )
    with Caller(code, gpu) as caller:
        (device,) = objects(probe, caller.pid)
        assert (device.rm_class, device.gpu) == (DEVICE, 5)


def test_a_copy_lives_on_its_own(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
alloc(fd, 7, CONTEXT)
dup(fd, 8, 7, client=CLIENT + 1)
free(fd, 7)
wait()
"""
    )
    with Caller(code, gpu) as caller:
        (copy,) = objects(probe, caller.pid)
        assert (copy.client, copy.handle, copy.rm_class) == (CLIENT + 1, 8, CONTEXT)
        assert RmEventKind.DUP in kinds(probe, caller.pid)


def test_a_process_cannot_free_or_create_objects_in_a_client_of_another_file(probe: Probe, gpu: Path) -> None:
    code = OPENED + "alloc(fd, CLIENT + 9, ROOT)\nalloc(fd, 7, CONTEXT, client=CLIENT + 9)\nwait()\n"
    # The status is in the caller's memory, so the caller may forge a success.
    forging = (
        OPENED
        + """
free(fd, 7, client=CLIENT + 9)
free(fd, CLIENT + 9, client=CLIENT + 9)
alloc(fd, 8, CONTEXT, client=CLIENT + 9)
alloc(fd, 5, CONTEXT)
dup(fd, 9, 5, client=CLIENT + 9)
"""
    )
    with Caller(code, gpu) as caller:
        forger = ran(forging, gpu)

        assert {one.handle for one in objects(probe, caller.pid)} == {7, CLIENT + 9}
        assert {one.handle for one in objects(probe, forger)} == {5}
        assert kinds(probe, forger).count(RmEventKind.ALLOC) == 1
        assert counters(probe, forger).errors == 4


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("=IIIIQII", 32),
        ("=IIIIQQII", 40),
        ("=IIIIQQIIII", 48),
    ],
    ids=["NVOS21", "NVOS64 before 535", "NVOS64"],
)
def test_every_form_of_an_allocation_is_read(probe: Probe, gpu: Path, layout: str, size: int) -> None:
    more = len(layout) - 1 - 4
    block = struct.pack(layout, CLIENT, 2, 7, CONTEXT, *[0] * more)
    assert len(block) == size
    with Caller(OPENED + "call(fd, 0x2B, bytes.fromhex(sys.argv[2]))\nwait()\n", gpu, block.hex()) as caller:
        (one,) = objects(probe, caller.pid)
        assert one.handle == 7


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        ("=IIIIQII", (0, 0, 9)),  # at 28
        ("=IIIIQQII", (0, 0, 0, 9)),  # at 36
        ("=IIIIQQIIII", (0, 0, 0, 0, 9, 0)),  # at 40
    ],
    ids=["NVOS21", "NVOS64 before 535", "NVOS64"],
)
def test_every_form_of_a_failure_is_read(
    probe: Probe, gpu: Path, layout: str, values: tuple[int, ...]
) -> None:
    block = struct.pack(layout, CLIENT, 2, 7, CONTEXT, *values)
    with Caller(OPENED + "call(fd, 0x2B, bytes.fromhex(sys.argv[2]))\nwait()\n", gpu, block.hex()) as caller:
        assert objects(probe, caller.pid) == []
        assert counters(probe, caller.pid).errors == 1


def test_a_command_wrapped_in_another_is_read(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
inner = ctypes.create_string_buffer(nvos64(7, CONTEXT), 48)
call(fd, 211, struct.pack("=IIQ", 0x2B, 48, ctypes.addressof(inner)))
wait()
"""
    )
    with Caller(code, gpu) as caller:
        (one,) = objects(probe, caller.pid)
        assert one.handle == 7


def test_the_type_of_a_command_does_not_matter_as_it_does_not_to_the_driver(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "call(fd, 0x2B, nvos64(7, CONTEXT), kind=0)\nwait()\n", gpu) as caller:
        assert [one.handle for one in objects(probe, caller.pid)] == [7]


def test_a_block_that_cannot_be_read_is_counted(probe: Probe, gpu: Path) -> None:
    before = probe.read_statistics().unreadable
    pid = ran(OPENED + "plain(fd, 3 << 30 | 48 << 16 | 0x462B, 4096)\n", gpu)

    assert probe.read_statistics().unreadable == before + 1
    assert counters(probe, pid).calls == 1


def test_unified_memory_shows_which_gpu_a_client_uses(
    probe: Probe, gpu: Path, uvm: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: probe.set_majors(Majors()))
    probe.set_majors(Majors(uvm=MEMORY_MAJOR))
    code = """
fd = os.open(sys.argv[2], os.O_RDWR)
raw = bytes.fromhex(sys.argv[3])
plain(fd, 25, bytearray(raw + struct.pack("=IIII", 4, CLIENT, 99, 0)))
plain(fd, 26, bytearray(raw + struct.pack("=I", 0)))
"""
    raw = bytes(each * each for each in range(16))
    pid = ran(code, gpu, uvm, raw.hex())

    registered, unregistered = [event for event in events(probe, pid) if event.kind is RmEventKind.UVM]
    assert (registered.rm_class, unregistered.rm_class) == (25, 26)
    assert (registered.client, registered.handle, registered.device) == (CLIENT, 99, device_of(uvm))
    assert (registered.parent, registered.detail) == folded(GpuUuid(f"GPU-{UUID(bytes=raw)}"))


def test_the_same_numbers_on_a_gpu_are_no_calls_of_unified_memory(probe: Probe, gpu: Path) -> None:
    pid = ran(OPENED + "plain(fd, 25, bytearray(32))\n", gpu)

    assert counters(probe, pid).calls == 0
    assert RmEventKind.UVM not in kinds(probe, pid)


def test_a_gpu_bound_to_a_control_file_is_sent(probe: Probe, gpu: Path) -> None:
    code = """
control, node = os.open(sys.argv[1], os.O_RDWR), os.open(sys.argv[1], os.O_RDWR)
call(node, 201, struct.pack("=I", control))
wait()
os.close(node)
wait()
"""
    with Caller(code, gpu) as caller:
        sent = events(probe, caller.pid)
        control, node = [event.file for event in sent if event.kind is RmEventKind.OPEN]
        (bound,) = [event for event in sent if event.kind is RmEventKind.REGISTER_FD]
        (row,) = objects(probe, caller.pid)

        assert (bound.file, joined(bound.parent, bound.detail)) == (node, control)
        assert (row.file, row.rm_class, joined(row.parent, row.gpu)) == (node, REGISTRATION, control)
        assert joined(row.client, row.handle) == node

        caller.resume()
        assert objects(probe, caller.pid) == []


@pytest.mark.parametrize(("copy", "is_last"), [("", True), ("os.dup(fd)", False)])
def test_the_last_close_of_a_file_is_sent_as_such(
    probe: Probe, gpu: Path, copy: str, *, is_last: bool
) -> None:
    pid = ran(OPENED + f"{copy}\nos.close(fd)\n", gpu)

    (closed,) = [event for event in events(probe, pid) if event.kind is RmEventKind.CLOSE]
    assert (closed.detail == LAST) == is_last


MOVES = """
for _ in range(int(sys.argv[2])):
    os.dup2(fd, 100)
    os.close(os.dup(fd))
"""


def test_events_that_a_scan_resolves_are_sent_once_until_it_starts(probe: Probe, gpu: Path) -> None:
    with Caller(f"{OPENED}wait()\n{MOVES}wait()\n{MOVES}wait()\n", gpu, PRIME) as caller:
        probe.scan()
        events(probe, caller.pid)
        for _ in range(2):
            caller.resume()
            sent = [event.kind for event in events(probe, caller.pid)]
            assert sorted(sent) == [RmEventKind.CLOSE, RmEventKind.RESCAN]
            assert counters(probe, caller.pid).unsent == 0
            probe.scan()


def test_other_devices_cost_no_row(probe: Probe, uvm: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for other in (uvm, file):
        pid = ran(OPENED + "alloc(fd, 7, CONTEXT)\nos.dup2(fd, 9)\nos.close(fd)\n", other)

        assert events(probe, pid) == []
        assert pid not in {row.tgid for row in probe.read_processes()}


def test_a_device_number_counts_once_it_is_known(
    probe: Probe, uvm: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: probe.set_majors(Majors()))
    with Caller(OPENED + "wait()\n" + OPENED + "wait()\n", uvm) as caller:
        probe.set_majors(Majors(uvm=MEMORY_MAJOR))
        caller.resume()

        assert counters(probe, caller.pid).opens == 1


def test_a_child_is_sent_and_a_thread_is_not(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
import threading
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
if os.fork() == 0:
    os._exit(0)
os.wait()
"""
    )
    pid = ran(code, gpu)

    sent = [event for event in events(probe, pid) if event.kind is RmEventKind.FORK]
    assert len(sent) == 1
    assert sent[0].detail not in (0, pid)


@pytest.mark.parametrize(
    "code", ["os.dup2(0, fd)", "os.dup2(0, fd, inheritable=False)", "os.closerange(fd, fd + 1)"]
)
def test_descriptors_that_may_have_moved_request_a_scan(probe: Probe, gpu: Path, code: str) -> None:
    pid = ran(OPENED + code, gpu)

    assert RmEventKind.RESCAN in kinds(probe, pid)


def test_exec_requests_a_scan(probe: Probe, gpu: Path) -> None:
    pid = ran(OPENED + "os.execv('/bin/true', ['true'])", gpu)

    assert kinds(probe, pid)[-2:] == [RmEventKind.RESCAN, RmEventKind.EXIT]


def test_the_exit_of_a_process_is_the_exit_of_its_last_thread(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
import threading
def last():
    wait()
    os._exit(0)
thread = threading.Thread(target=last)
thread.start()
ctypes.CDLL(None).syscall(60, 0)  # exit(2) of the leader alone
"""
    )
    with Caller(code, gpu) as caller:
        assert RmEventKind.EXIT not in kinds(probe, caller.pid)
        assert counters(probe, caller.pid).exited_ns == 0

        caller.end()

    assert kinds(probe, caller.pid) == [RmEventKind.EXIT]
    assert counters(probe, caller.pid).exited_ns > 0


def test_a_process_that_inherited_a_file_is_watched_once_it_was_found(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.readline()
os.close(fd)
"""
    )
    caller = Caller(code, gpu)
    assert caller.process.stdout is not None
    child = int(caller.process.stdout.readline())
    held = [one for one in probe.scan().held if one.tgid == child and one.device == device_of(gpu)]
    assert events(probe, child) == []

    probe.watch(held)
    caller.end()

    assert RmEventKind.CLOSE in kinds(probe, child)
    assert counters(probe, child).opens == 0


def test_deleted_rows_are_gone(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "alloc(fd, 7, CONTEXT)\nwait()\n", gpu) as caller:
        (made,) = objects(probe, caller.pid)
        probe.forget_objects([(CLIENT, 7, made.at_ns)])
        probe.forget_processes([(caller.pid, made.start_ticks)])

        assert objects(probe, caller.pid) == []
        assert [row for row in probe.read_processes() if row.tgid == caller.pid] == []


def test_a_newer_object_under_the_same_handle_is_not_deleted(probe: Probe, gpu: Path) -> None:
    code = OPENED + "alloc(fd, 7, CONTEXT)\nwait()\nfree(fd, 7)\nalloc(fd, 7, CONTEXT)\nwait()\n"
    with Caller(code, gpu) as caller:
        (first,) = objects(probe, caller.pid)
        caller.resume()
        probe.forget_objects([(CLIENT, 7, first.at_ns)])

        (second,) = objects(probe, caller.pid)
        assert second.at_ns > first.at_ns


def test_watching_a_known_process_keeps_its_counts(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "wait()\n", gpu) as caller:
        before = counters(probe, caller.pid)
        probe.watch([HeldFile(caller.pid, 0, 1, device_of(gpu), 1, 1)])

        assert counters(probe, caller.pid) == before
