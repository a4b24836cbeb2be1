"""Every call of one process, seen in the kernel, with both loaders."""

import asyncio
import json
import os
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.commands.trace import Trace
from agent.errors import SourceError
from agent.model.rm import RmEvent
from agent.probe.layout import TracedCall
from agent.probe.probe import Probe
from agent.probe.programs import of_tier
from agent.probe.request import Doubles
from agent.probe.ring import Ring
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import Gpu
from agent.threads import in_daemon_thread
from tests.probe.caller import CLIENT, CONTEXT, Caller, ran
from tests.probe.conftest import MEMORY_MAJOR, MISC_MAJOR, LoadProbe, device_of

PRIME = 10_007
DOUBLES = Doubles(nvidia_major=MISC_MAJOR, uvm_major=MEMORY_MAJOR, any_return=True)
OPENED = """
fd = os.open(sys.argv[1], os.O_RDWR)
wait()
"""


class Traced:
    """A process that has the device open, and the probe that traces it."""

    def __init__(self, caller: Caller, probe: Probe) -> None:
        self.caller = caller
        self.probe = probe
        self.ring: Ring[TracedCall] = probe.traced_ring()

    def calls(self) -> list[TracedCall]:
        found: list[TracedCall] = []
        while batch := self.ring.read():
            found += batch
        return found


@pytest.fixture
def trace(loader: dict[str, Any], load_probe: LoadProbe) -> Iterator[Any]:
    """Start a process, and then trace it."""
    started: list[Traced] = []

    def start(code: str, *arguments: object, **options: Any) -> Traced:
        caller = Caller(OPENED + code, *arguments)
        caller.run()
        probe = load_probe(doubles=DOUBLES, trace_tgid=caller.pid, **loader, **options)
        started.append(Traced(caller, probe))
        return started[-1]

    yield start
    for each in started:
        each.ring.close()
        each.caller.end()


def test_each_call_is_traced_with_its_parameters(trace: Any, gpu: Path) -> None:
    traced = trace("alloc(fd, 7, CONTEXT, parent=5, status=3)\nfree(fd, 7)\nwait()\n", gpu)
    traced.caller.resume()

    allocated, freed = traced.calls()
    assert (allocated.tgid, allocated.pid) == (traced.caller.pid,) * 2
    assert (allocated.device, allocated.number, allocated.size) == (device_of(gpu), 0x2B, 48)
    assert struct.unpack_from("=IIII", allocated.block) == (CLIENT, 5, 7, CONTEXT)
    assert struct.unpack_from("=I", allocated.block, 40) == (3,)
    assert (freed.number, freed.size, freed.block_bytes) == (0x29, 16, 16)
    assert freed.fd == allocated.fd > 2
    assert allocated.entered_ns + allocated.took_ns < freed.entered_ns
    assert allocated.result < 0


def test_a_prime_number_of_calls_is_traced_exactly(trace: Any, gpu: Path) -> None:
    traced = trace(f"for _ in range({PRIME}): free(fd, 7)\nwait()\n", gpu, ring_bytes=4 << 20)
    traced.caller.resume()

    assert len(traced.calls()) == PRIME
    assert traced.probe.read_statistics().lost == 0


def test_calls_that_find_no_room_are_counted(trace: Any, gpu: Path) -> None:
    traced = trace("for _ in range(1000): free(fd, 7)\nwait()\n", gpu, ring_bytes=4096)
    traced.caller.resume()

    traced_calls = len(traced.calls())
    assert 0 < traced_calls < 1000
    assert traced_calls + traced.probe.read_statistics().lost == 1000


def test_no_other_process_and_no_other_file_is_traced(trace: Any, gpu: Path) -> None:
    code = """
reader, writer = os.pipe()
free(reader, 7)
wait()
"""
    traced = trace(code, gpu)
    ran("fd = os.open(sys.argv[1], os.O_RDWR)\nfree(fd, 7)\n", gpu)
    traced.caller.resume()

    assert traced.calls() == []


def test_calls_that_do_not_reach_the_driver_are_not_traced(trace: Any, gpu: Path) -> None:
    traced = trace("os.set_inheritable(fd, True)\nplain(fd, 0x5421, bytearray(4))\nwait()\n", gpu)
    traced.caller.resume()

    assert traced.calls() == []


def test_a_wrapped_command_is_traced_as_the_inner_one(trace: Any, gpu: Path) -> None:
    code = """
block = bytearray(struct.pack("=IIII", CLIENT, 0, 7, 0))
address = ctypes.addressof((ctypes.c_char * 16).from_buffer(block))
call(fd, 211, struct.pack("=IIQ", 0x29, 16, address))
wait()
"""
    traced = trace(code, gpu)
    traced.caller.resume()

    (one,) = traced.calls()
    assert (one.number, one.size, one.block[:16]) == (0x29, 16, struct.pack("=IIII", CLIENT, 0, 7, 0))


def test_every_command_of_unified_memory_is_traced_in_full(trace: Any, gpu: Path, uvm: Path) -> None:
    code = """
uvm = os.open(sys.argv[2], os.O_RDWR)
for command in (0x30000001, 25, 39): plain(uvm, command, bytearray(range(64)))
wait()
"""
    traced = trace(code, gpu, uvm)
    traced.caller.resume()

    calls = traced.calls()
    assert [(one.number, one.size, one.block_bytes) for one in calls] == [
        (0x30000001, 0, 64),
        (25, 0, 64),
        (39, 0, 64),
    ]
    assert calls[0].block == bytes(range(64))


def test_parameters_that_cannot_be_read_are_none(trace: Any, gpu: Path) -> None:
    code = """
libc = ctypes.CDLL(None)
libc.ioctl(fd, ctypes.c_ulong(3 << 30 | 16 << 16 | 0x46 << 8 | 0x29), ctypes.c_void_p(8))
wait()
"""
    traced = trace(code, gpu)
    traced.caller.resume()

    (one,) = traced.calls()
    assert (one.block_bytes, one.argument) == (0, 8)


def test_threads_are_distinguished(trace: Any, gpu: Path) -> None:
    code = """
import threading
threads = [threading.Thread(target=free, args=(fd, number)) for number in (1, 2)]
for thread in threads: thread.start(); thread.join()
wait()
"""
    traced = trace(code, gpu)
    traced.caller.resume()

    threads = {one.pid for one in traced.calls()}
    assert len(threads) == 2
    assert traced.caller.pid not in threads


def test_only_tracing_programs_are_loaded(trace: Any, gpu: Path) -> None:
    traced = trace("", gpu)

    assert set(traced.probe.attached) == {program.name for program in of_tier("syscalls", traces=True)}
    assert traced.probe.read_objects() == []


def test_the_programs_that_watch_the_node_trace_no_call(probe: Probe, gpu: Path) -> None:
    ran("fd = os.open(sys.argv[1], os.O_RDWR)\ncall(fd, 0x2A, bytes(32))\n", gpu)

    assert all(isinstance(event, RmEvent) for event in probe.ring.read())
    assert probe.ring.unknown == 0
    assert probe.read_traced() == []


# ---- the command ----

GPU_2 = Gpu(2, "GPU-00000001-0000-4000-8000-000000000000", 0, "0000:3b:00.0", 0x233010DE)
NUMA_INFO = 215


@pytest.fixture
async def double() -> AsyncIterator[DriverDouble]:
    try:
        started = await DriverDouble.start((GPU_2,), version="570.148.08")
    except SourceError as error:
        pytest.skip(str(error))
    async with started:
        yield started


async def test_a_call_that_does_not_return_is_shown_meanwhile_and_at_the_end(
    core: dict[str, Any], load_probe: LoadProbe, double: DriverDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    code = OPENED + f"call(fd, {NUMA_INFO}, bytes(560))\n"
    caller = await in_daemon_thread("test-caller", lambda: Caller(code, double.node("nvidia2")))
    await in_daemon_thread("test-caller", caller.run)
    doubles = Doubles(filesystem=double.file_system)
    probe = await in_daemon_thread(
        "test-load", lambda: load_probe(doubles=doubles, trace_tgid=caller.pid, **core)
    )
    await double.hold("nvidia2")
    hanging = asyncio.get_running_loop().create_task(in_daemon_thread("test-caller", caller.resume))
    while not await double.held():
        await asyncio.sleep(0.01)
    (held,) = probe.read_traced()
    assert (held.number, held.took_ns) == (NUMA_INFO, 0)

    pidfd = os.pidfd_open(caller.pid)
    shown = Trace(probe, caller.pid, pidfd, is_json=False)
    await in_daemon_thread("test-trace", lambda: shown.show_until(time.monotonic() + 2.5))
    await in_daemon_thread("test-trace", shown.finish)
    os.close(pidfd)
    out, err = capsys.readouterr()
    assert [line.split()[2:] for line in out.splitlines()[1:2]] == [
        ["nvidia2", "NUMA_INFO", "has", "not", "returned"]
    ]
    assert out.count("has not returned") == 1
    assert "0 calls, 1 not returned, 0 lost: the time is over" in err
    await double.release("nvidia2")
    await hanging
    await in_daemon_thread("test-caller", caller.end)


def test_lines_printed_in_a_second_are_bounded_and_the_rest_counted(
    core: dict[str, Any],
    load_probe: LoadProbe,
    gpu: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Caller(OPENED + "for _ in range(300): free(fd, 7)\nwait()\n", gpu) as caller:
        probe = load_probe(doubles=DOUBLES, trace_tgid=caller.pid, **core)
        pidfd = os.pidfd_open(caller.pid)
        shown = Trace(probe, caller.pid, pidfd, is_json=False, max_lines=10)
        caller.resume()
        shown.show_until(time.monotonic())
        shown.finish()
        os.close(pidfd)

    out, err = capsys.readouterr()
    # The device is none of the driver's, so each call fails.
    assert out.count("RM_FREE c1d00001:7 = ") == 10
    assert "290 calls are only in the table" in err
    assert out.splitlines()[-1].split()[:2] == ["300", "300"]


def test_the_exit_of_the_process_stops_the_trace(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caller = Caller(OPENED + "free(fd, 7)\n", gpu)
    caller.run()
    probe = load_probe(doubles=DOUBLES, trace_tgid=caller.pid, **core)
    pidfd = os.pidfd_open(caller.pid)
    shown = Trace(probe, caller.pid, pidfd, is_json=True)
    caller.end()
    shown.show_until(None)
    shown.finish()
    os.close(pidfd)

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["call", "summary"]
    assert lines[1]["ended"] == "the process exited"


@pytest.mark.parametrize("calls", [0, 1])
def test_without_calls_one_line_explains_the_silence(
    core: dict[str, Any],
    load_probe: LoadProbe,
    gpu: Path,
    capsys: pytest.CaptureFixture[str],
    calls: int,
) -> None:
    with Caller(OPENED + f"for _ in range({calls}): free(fd, 7)\nwait()\n", gpu) as caller:
        probe = load_probe(doubles=DOUBLES, trace_tgid=caller.pid, **core)
        pidfd = os.pidfd_open(caller.pid)
        shown = Trace(probe, caller.pid, pidfd, is_json=False, hint_after_s=0.0)
        caller.resume()
        shown.show_until(time.monotonic())
        shown.finish()
        os.close(pidfd)
    err = capsys.readouterr().err
    assert err.count("No calls of ") == (0 if calls else 1)
