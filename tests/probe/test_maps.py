"""The share of one process in the maps, and that it cannot change the rows of another."""

from pathlib import Path
from typing import Any

import pytest

from agent.model.rm import RmEventKind
from agent.probe import syscalls
from agent.probe.kernel import Majors
from agent.probe.layout import FORGOTTEN_KEY, MAX_OBJECTS_EACH, OBJECT, OBJECT_KEY, PROCESS, PROCESS_KEY
from agent.probe.probe import Probe
from tests.probe.caller import CLIENT, Caller, ran
from tests.probe.conftest import MEMORY_MAJOR, LoadProbe
from tests.probe.readings import counters, kinds, objects

BEYOND = 13
OPENED = "fd = os.open(sys.argv[1], os.O_RDWR)\n"
GREEDY = (
    OPENED
    + """
for handle in range(int(sys.argv[2])): alloc(fd, handle + 3, CONTEXT)
wait()
alloc(fd, 1 << 20, CONTEXT)
wait()
"""
)


@pytest.fixture
def own(load_probe: LoadProbe, core: dict[str, Any]) -> Probe:
    """A probe of this test alone."""
    return load_probe(**core)


# ---- room ----


def test_no_process_has_more_objects_than_its_share(
    load_probe: LoadProbe, loader: dict[str, Any], gpu: Path
) -> None:
    probe = load_probe(**loader)
    with Caller(GREEDY, gpu, MAX_OBJECTS_EACH + BEYOND) as caller:
        of_it = counters(probe, caller.pid)

        assert len(objects(probe, caller.pid)) == MAX_OBJECTS_EACH
        assert of_it.rejected == probe.read_statistics().rejected == BEYOND
        # How often it called is still counted exactly.
        assert of_it.contexts_allocated == MAX_OBJECTS_EACH + BEYOND
        with Caller(OPENED + "alloc(fd, 7, CONTEXT, client=CLIENT + 1)\nwait()\n", gpu) as other:
            assert len(objects(probe, other.pid)) == 1
            assert counters(probe, other.pid).rejected == 0


def test_what_a_process_frees_makes_room_for_it(own: Probe, gpu: Path) -> None:
    code = OPENED + (
        "for _ in range(int(sys.argv[2])):\n    alloc(fd, 7, CONTEXT)\n    free(fd, 7)\n"
        "for _ in range(int(sys.argv[2])): alloc(fd, 8, CONTEXT)\n"
        "wait()\n"
    )
    with Caller(code, gpu, MAX_OBJECTS_EACH) as caller:
        assert counters(own, caller.pid).rejected == 0
        assert [one.handle for one in objects(own, caller.pid)] == [8]


def test_deleted_objects_of_a_process_make_room_for_it(own: Probe, gpu: Path) -> None:
    with Caller(GREEDY, gpu, MAX_OBJECTS_EACH) as caller:
        made = objects(own, caller.pid)
        own.forget_objects((one.client, one.handle, one.at_ns) for one in made[: BEYOND - 1])
        own.forget_objects((one.client, one.handle, one.at_ns) for one in made[BEYOND - 1 : BEYOND])

        caller.resume()

        assert counters(own, caller.pid).rejected == 0
        assert len(objects(own, caller.pid)) == MAX_OBJECTS_EACH - BEYOND + 1


def test_objects_that_another_frees_make_room_for_their_process(own: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
for handle in range(int(sys.argv[2])): alloc(fd, handle + 3, CONTEXT)
if os.fork() == 0:
    free(fd, 3)
    os._exit(0)
os.wait()
wait()
alloc(fd, 1 << 20, CONTEXT)
wait()
"""
    )
    with Caller(code, gpu, MAX_OBJECTS_EACH) as caller:
        caller.resume()

        assert counters(own, caller.pid).rejected == 0
        assert len(objects(own, caller.pid)) == MAX_OBJECTS_EACH


def test_a_reused_pid_has_all_of_its_share(own: Probe, gpu: Path) -> None:
    with Caller(OPENED + "wait()\nalloc(fd, 7, CONTEXT)\nwait()\n", gpu) as caller:
        # An earlier process of this number, and what was taken out for it.
        key = PROCESS_KEY.pack(caller.pid)
        earlier = PROCESS.pack(1, 7, 8, 8, 9, *[0] * 15, MAX_OBJECTS_EACH)
        syscalls.map_update(own.maps["processes"], key, earlier)

        caller.resume()

        assert counters(own, caller.pid).rejected == 0
        assert len(objects(own, caller.pid)) == 1


def test_deleted_processes_leave_no_row(own: Probe, gpu: Path) -> None:
    with Caller(OPENED + "alloc(fd, 7, CONTEXT)\nwait()\n", gpu) as caller:
        (made,) = objects(own, caller.pid)
        own.forget_objects([(made.client, made.handle, made.at_ns)])
        assert syscalls.map_rows(own.maps["forgotten"], FORGOTTEN_KEY.size, 16).total == 1

        own.forget_processes([(caller.pid, made.start_ticks)])

        assert syscalls.map_rows(own.maps["forgotten"], FORGOTTEN_KEY.size, 16).total == 0


def test_deleted_objects_of_an_exited_process_leave_no_row(own: Probe, gpu: Path) -> None:
    with Caller(OPENED + "alloc(fd, 7, CONTEXT)\nalloc(fd, 8, CONTEXT)\nwait()\n", gpu) as caller:
        first, second = objects(own, caller.pid)
        own.forget_objects([(first.client, first.handle, first.at_ns)])
    assert counters(own, caller.pid).exited_ns

    own.forget_objects([(second.client, second.handle, second.at_ns)])

    assert objects(own, caller.pid) == []
    assert syscalls.map_rows(own.maps["forgotten"], FORGOTTEN_KEY.size, 16).total == 0


def test_an_object_that_finds_no_room_sends_no_event(own: Probe, gpu: Path) -> None:
    room = syscalls.map_info(own.maps["objects"]).max_entries
    for handle in range(room):
        syscalls.map_update(own.maps["objects"], OBJECT_KEY.pack(1, handle), OBJECT.pack(*[0] * 9))

    pid = ran(OPENED + "alloc(fd, 7, CONTEXT)", gpu)

    assert own.read_statistics().objects_full == 1
    assert RmEventKind.ALLOC not in kinds(own, pid)


# ---- forged statuses ----


def test_no_process_takes_over_the_client_of_a_living_one(probe: Probe, gpu: Path) -> None:
    client = CLIENT + 21
    made = OPENED + "alloc(fd, int(sys.argv[2]), ROOT, client=0, parent=0)\nwait()\n"
    with Caller(made, gpu, client) as caller, Caller(made, gpu, client) as forger:
        assert [one.handle for one in objects(probe, caller.pid)] == [client]
        assert objects(probe, forger.pid) == []
        assert (counters(probe, forger.pid).errors, counters(probe, forger.pid).rejected) == (1, 1)
        assert RmEventKind.ALLOC not in kinds(probe, forger.pid)


@pytest.mark.parametrize(
    "forging",
    ["alloc(fd, 7, CONTEXT, client=CLIENT + 24)", "alloc(fd, 5, CONTEXT)\ndup(fd, 7, 5, client=CLIENT + 24)"],
    ids=["made", "copied"],
)
def test_no_process_takes_over_an_object_of_a_client_older_than_the_probe(
    probe: Probe, gpu: Path, forging: str
) -> None:
    with Caller(OPENED + "alloc(fd, 7, CONTEXT, client=CLIENT + 24)\nwait()\n", gpu) as caller:
        (before,) = objects(probe, caller.pid)
        forger = ran(OPENED + forging, gpu)

        assert objects(probe, caller.pid) == [before]
        assert (counters(probe, forger).errors, counters(probe, forger).rejected) == (1, 1)


def test_the_number_of_a_freed_client_may_be_reused(probe: Probe, gpu: Path) -> None:
    client = CLIENT + 22
    made = OPENED + "alloc(fd, int(sys.argv[2]), ROOT, client=0, parent=0)\nwait()\n"
    ran(made, gpu, client)

    with Caller(made, gpu, client) as caller:
        assert [one.handle for one in objects(probe, caller.pid)] == [client]


def test_no_process_registers_the_gpu_of_another_ones_client(
    probe: Probe, gpu: Path, uvm: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: probe.set_majors(Majors()))
    probe.set_majors(Majors(uvm=MEMORY_MAJOR))
    client = CLIENT + 23
    registering = """
uvm = os.open(sys.argv[3], os.O_RDWR)
plain(uvm, 25, bytearray(bytes(16) + struct.pack("=iIII", fd, int(sys.argv[2]), 99, 0)))
"""
    with Caller(
        OPENED + "alloc(fd, int(sys.argv[2]), ROOT, client=0, parent=0)\n" + registering + "wait()\n",
        gpu,
        client,
        uvm,
    ) as caller:
        assert RmEventKind.UVM in kinds(probe, caller.pid)
        forger = ran(OPENED + registering, gpu, client, uvm)

        assert RmEventKind.UVM not in kinds(probe, forger)
        assert counters(probe, forger).errors == 1


@pytest.mark.parametrize(
    "code",
    [
        "alloc(fd, 7, DEVICE, params=4096)",
        'call(fd, 211, struct.pack("=IIQ", 0x2B, 48, 4096))',
        "plain(fd, 3 << 30 | 16 << 16 | 0x46D3, 4096)",
    ],
    ids=["parameters", "wrapped call", "wrapping call"],
)
def test_unreadable_parameters_are_counted(probe: Probe, gpu: Path, code: str) -> None:
    before = probe.read_statistics().unreadable

    ran(OPENED + code, gpu)

    assert probe.read_statistics().unreadable == before + 1
