"""What can grow has a bound that is reached here: the ring, the table of processes, descriptors, memory."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.probe import syscalls
from agent.probe.layout import MAX_OBJECTS_EACH, OBJECT, OBJECT_KEY, PROCESS_KEY, encode_process
from agent.probe.probe import Probe
from agent.probe.request import PROCESSES, Request
from tests.probe.caller import Caller, ran
from tests.probe.conftest import DOUBLES, LoadProbe, loaded

PRIME = 10_007
TINY_RING = 4096
RECORD = 72

CONTEXTS = """
fd = os.open(sys.argv[1], os.O_RDWR)
for handle in range(int(sys.argv[2])): alloc(fd, handle + 3, CONTEXT)
wait()
"""


def test_a_ring_that_overflows_loses_events_and_counts_each(
    loader: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(ring_bytes=TINY_RING, **loader)

    with Caller(CONTEXTS, gpu, PRIME) as caller:
        statistics = probe.read_statistics()
        of_caller = [one for one in probe.read_objects() if one.tgid == caller.pid]

        assert statistics.events <= TINY_RING // RECORD
        assert statistics.events + statistics.lost + statistics.unsent >= PRIME + 1
        assert statistics.reserve_failures[0] > 0
        # What is in the maps is whole.
        assert len({one.handle for one in of_caller}) == PRIME


def test_the_ring_works_again_once_it_was_read(
    loader: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(ring_bytes=TINY_RING, **loader)
    ran("for _ in range(1000): os.close(os.open(sys.argv[1], os.O_RDWR))", gpu)
    assert probe.read_statistics().lost > 0

    while probe.ring.read():
        pass
    pid = ran("os.open(sys.argv[1], os.O_RDWR)", gpu)

    assert pid in {event.tgid for event in probe.ring.read()}


def test_the_table_of_processes_has_room_for_65536() -> None:
    assert Request().processes == PROCESSES == 65_536


def test_processes_beyond_the_room_evict_others_and_are_counted(
    loader: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    room = 256
    probe = load_probe(processes=room, **loader)
    code = """
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        os.open(sys.argv[1], os.O_RDWR)
        os._exit(0)
    os.waitpid(pid, 0)
"""

    ran(code, gpu, 4 * room)
    rows = probe.read_processes()

    assert len(rows) <= room
    added = probe.read_statistics().processes_added
    assert added >= 4 * room
    assert probe.evictions == added - len(rows)


def test_rows_deleted_by_the_agent_are_no_evictions(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(**core)
    pids = [ran("os.open(sys.argv[1], os.O_RDWR)", gpu) for _ in range(3)]

    of_them = [(row.tgid, row.start_ticks) for row in probe.read_processes() if row.tgid in pids]
    assert len(of_them) == 3
    probe.forget_processes(of_them)

    assert {row.tgid for row in probe.read_processes()}.isdisjoint(pids)
    assert probe.evictions == 0


def test_another_process_with_a_deleted_pid_stays(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(**core)
    with Caller("os.open(sys.argv[1], os.O_RDWR)\nwait()", gpu) as caller:
        (row,) = [row for row in probe.read_processes() if row.tgid == caller.pid]

        probe.forget_processes([(caller.pid, row.start_ticks - 1)])

        assert row in probe.read_processes()


def test_exited_processes_are_distinguished_from_living_ones(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(**core)
    began_ns = time.monotonic_ns()
    with Caller("os.open(sys.argv[1], os.O_RDWR)\nwait()", gpu) as caller:
        pid = ran("os.open(sys.argv[1], os.O_RDWR)", gpu)
        ended = [one for one, _ in probe.read_ended(time.monotonic_ns())]

        assert pid in ended
        assert caller.pid not in ended
        assert pid not in [one for one, _ in probe.read_ended(began_ns)]


GREEDY = """
fd = os.open(sys.argv[1], os.O_RDWR)
for handle in range(int(sys.argv[2])): alloc(fd, handle + 3, CONTEXT)
wait()
for handle in range(2): alloc(fd, (1 << 20) + handle, CONTEXT)
wait()
"""


def test_a_process_whose_row_was_evicted_has_no_second_share(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(**core)
    with Caller(GREEDY, gpu, MAX_OBJECTS_EACH) as caller:
        made = [one for one in probe.read_objects() if one.tgid == caller.pid]
        probe.forget_objects([(made[0].client, made[0].handle, made[0].at_ns)])
        assert syscalls.map_delete(probe.maps["processes"], PROCESS_KEY.pack(caller.pid))

        probe.watch(one for one in probe.scan().held if one.tgid == caller.pid)
        caller.resume()

        # One was taken out, so that of two more one has room.
        (row,) = [row for row in probe.read_processes() if row.tgid == caller.pid]
        assert row.rejected == 1
        assert len([one for one in probe.read_objects() if one.tgid == caller.pid]) == MAX_OBJECTS_EACH


def test_a_reused_pid_starts_a_new_row(core: dict[str, Any], load_probe: LoadProbe, gpu: Path) -> None:
    probe = load_probe(**core)
    with Caller(
        "os.open(sys.argv[1], os.O_RDWR)\nwait()\nos.open(sys.argv[1], os.O_RDWR)\nwait()", gpu
    ) as caller:
        # As if an earlier process of this number had ended.
        row = bytearray(encode_process(1, 7, 8))
        struct.pack_into("=Q", row, 32, 99)
        struct.pack_into("=Q", row, 48, 1000)
        syscalls.map_update(probe.maps["processes"], PROCESS_KEY.pack(caller.pid), bytes(row))

        caller.resume()
        (now,) = [one for one in probe.read_processes() if one.tgid == caller.pid]

        assert (now.opens, now.exited_ns) == (1, 0)
        assert now.start_ticks != 7


def test_objects_beyond_the_room_are_counted(core: dict[str, Any], load_probe: LoadProbe, gpu: Path) -> None:
    probe = load_probe(**core)
    room = syscalls.map_info(probe.maps["objects"]).max_entries
    assert room == 65_536
    for handle in range(room):
        syscalls.map_update(probe.maps["objects"], OBJECT_KEY.pack(1, handle), OBJECT.pack(*[0] * 9))

    with Caller(CONTEXTS, gpu, 11) as caller:
        assert probe.read_statistics().objects_full == 11
        assert len(probe.read_objects()) == room
        (row,) = [one for one in probe.read_processes() if one.tgid == caller.pid]
        assert row.contexts_allocated == 11


def test_a_large_map_is_read_whole(core: dict[str, Any], load_probe: LoadProbe) -> None:
    probe = load_probe(**core)
    keys = {(client, handle) for client in range(100) for handle in range(100)}
    for key in keys:
        syscalls.map_update(probe.maps["objects"], OBJECT_KEY.pack(*key), OBJECT.pack(*[0] * 9))

    assert sorted((one.client, one.handle) for one in probe.read_objects()) == sorted(keys)


@pytest.mark.slow
def test_a_thousand_polls_leave_nothing_open_and_no_memory(probe: Probe, gpu: Path) -> None:
    def poll(number: int) -> None:
        probe.ring.read()
        probe.read_objects()
        probe.read_processes()
        probe.read_statistics()
        probe.read_readiness()
        probe.refresh()
        probe.reattach()
        if number % 10 == 0:
            probe.scan()

    for number in range(100):
        poll(number)
    before = open_descriptors(), resident_bytes()
    for number in range(900):
        poll(number)

    # Fewer are those of an earlier probe, which is taken out of the kernel on a thread.
    assert open_descriptors() - before[0] <= 2
    assert resident_bytes() - before[1] < 5 << 20


def test_loading_leaves_no_memory_behind(loader: dict[str, Any], load_probe: LoadProbe) -> None:
    load_probe(**loader)
    before = resident_bytes()

    load_probe(**loader)

    # Each ring is mapped; what a compiler needs would be a hundred MiB.
    assert resident_bytes() - before < 5 << 20


def test_a_probe_that_is_closed_twice_closes_once(core: dict[str, Any]) -> None:
    probe = loaded(Request(tier="syscalls", doubles=DOUBLES, **core))
    probe.close()
    reused = os.open("/dev/null", os.O_RDONLY)
    probe.close()

    assert os.fstat(reused).st_rdev
    os.close(reused)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


POD = """
import pathlib
pathlib.Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
fd = os.open(sys.argv[1], os.O_RDWR)
for number in range(5):
    if os.fork() == 0:
        for handle in range(int(sys.argv[3])): alloc(fd, handle + 3, CONTEXT, client=CLIENT + 1 + number)
        os._exit(0)
    os.wait()
wait()
"""


@pytest.fixture
def pod() -> Iterator[Path]:
    """A cgroup of version 2."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    found = [Path(words[1]) for words in mounts if words[2] == "cgroup2"]
    if not found:
        pytest.skip("cgroup v2 is not mounted")
    made = found[0] / f"gpu-agent-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")
    yield made
    made.rmdir()


def test_a_pod_that_forks_has_the_share_of_one_process(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path, pod: Path
) -> None:
    probe = load_probe(**core)
    each = MAX_OBJECTS_EACH // 3
    with Caller(POD, gpu, pod, each) as caller:
        cgroup = pod.stat().st_ino
        of_pod = [one for one in probe.read_objects() if one.cgroup_id == cgroup]
        assert len(of_pod) == MAX_OBJECTS_EACH
        assert probe.read_statistics().rejected == 5 * each - MAX_OBJECTS_EACH
        assert probe.read_statistics().objects_full == 0

        # What ended makes room again, for the pod as well.
        probe.forget_objects([(one.client, one.handle, one.at_ns) for one in of_pod])
        with Caller(POD, gpu, pod, 10) as again:
            assert len([one for one in probe.read_objects() if one.cgroup_id == cgroup]) == 50
            again.end()
        caller.end()
