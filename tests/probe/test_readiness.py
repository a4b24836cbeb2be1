"""What the kernel saw of the agent's own readiness checks."""

import asyncio
import fcntl
import os
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent.errors import SourceError
from agent.probe.probe import Probe, Readiness
from agent.probe.request import Doubles
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import Gpu
from tests.probe.caller import Caller, ran
from tests.probe.conftest import DOUBLES, LoadProbe

T = TypeVar("T")

CHECK_VERSION_STR, NUMA_INFO, SYS_PARAMS = 210, 215, 214


def check(node: Path, number: int = NUMA_INFO) -> None:
    descriptor = os.open(node, os.O_RDWR)
    try:
        fcntl.ioctl(descriptor, 3 << 30 | 16 << 16 | 0x46 << 8 | number, bytearray(16))
    except OSError:
        pass
    finally:
        os.close(descriptor)


def minor(node: Path) -> int:
    return os.minor(node.stat().st_rdev)


def test_a_call_that_returned_in_time_makes_its_device_ready(probe: Probe, gpu: Path) -> None:
    check(gpu)
    first = probe.read_readiness()[minor(gpu)]
    check(gpu)
    second = probe.read_readiness()[minor(gpu)]

    assert first.ready
    assert second.ready
    assert second.check.calls == first.check.calls + 1
    assert second.check.entered_ns > first.check.returned_ns >= first.check.entered_ns
    assert second.check.took_ns is not None
    assert second.check.took_ns < 10**9


def test_no_device_was_called_yet(core: dict[str, Any], load_probe: LoadProbe) -> None:
    assert load_probe(**core).read_readiness() == {}


def test_the_result_of_the_call_is_read(probe: Probe, gpu: Path) -> None:
    check(gpu)

    assert probe.read_readiness()[minor(gpu)].check.result < 0


def test_an_answer_that_is_an_error_is_an_answer(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(doubles=Doubles(nvidia_major=DOUBLES.nvidia_major), **core)

    check(gpu)

    answer = probe.read_readiness()[minor(gpu)]
    assert answer.ready
    assert answer.check.result < 0


def test_an_answer_that_came_late_is_not_ready(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(answer_within_ns=0, **core)

    check(gpu)

    assert not probe.read_readiness()[minor(gpu)].ready


def test_the_agent_sets_a_device_not_ready_and_the_next_answer_makes_it_ready(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(**core)
    check(gpu)
    probe.set_ready(minor(gpu), ready=False)
    after: list[Readiness] = [probe.read_readiness()[minor(gpu)]]
    check(gpu)
    after.append(probe.read_readiness()[minor(gpu)])

    assert [one.ready for one in after] == [False, True]


def test_calls_of_other_processes_do_not_count_for_readiness(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path
) -> None:
    probe = load_probe(**core)
    ran(f"fd = os.open(sys.argv[1], os.O_RDWR)\ncall(fd, {NUMA_INFO}, bytes(16))\n", gpu)

    assert probe.read_readiness() == {}


@pytest.mark.parametrize("number", [CHECK_VERSION_STR, SYS_PARAMS])
def test_other_calls_on_a_gpu_do_not_count_for_readiness(
    core: dict[str, Any], load_probe: LoadProbe, gpu: Path, number: int
) -> None:
    probe = load_probe(**core)
    check(gpu, number)

    assert probe.read_readiness() == {}


VERSION = "570.148.08"
GPU_2 = Gpu(2, "GPU-00000001-0000-4000-8000-000000000000", 0, "0000:3b:00.0", 0x233010DE)
CALL = """
wait()
fd = os.open(sys.argv[1], os.O_RDWR)
wait()
call(fd, int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
"""


@pytest.fixture
async def double() -> AsyncIterator[DriverDouble]:
    try:
        started = await DriverDouble.start((GPU_2,), version=VERSION)
    except SourceError as error:
        pytest.skip(str(error))
    async with started:
        yield started


async def test_a_call_that_does_not_return_is_seen_in_flight(
    core: dict[str, Any], load_probe: LoadProbe, double: DriverDouble
) -> None:
    agent = await in_thread(lambda: Caller(CALL, double.node("nvidia2"), NUMA_INFO, bytes(16).hex()))
    await in_thread(agent.run)
    probe = await in_thread(
        lambda: load_probe(agent_tgid=agent.pid, doubles=Doubles(filesystem=double.file_system), **core)
    )
    await in_thread(agent.resume)
    await double.hold("nvidia2")
    ended = asyncio.ensure_future(in_thread(agent.resume))  # noqa: TID251 - a test's own
    while not await double.held():
        await asyncio.sleep(0.01)

    (minor, held), *others = probe.read_readiness().items()
    assert (minor, others) == (GPU_2.minor, [])
    assert held.check.in_flight
    assert held.check.took_ns is None
    assert not held.ready

    await double.release("nvidia2")
    await ended
    await in_thread(agent.end)
    assert not probe.read_readiness()[GPU_2.minor].check.in_flight


async def test_the_control_device_is_called_by_another_command(
    core: dict[str, Any], load_probe: LoadProbe, double: DriverDouble
) -> None:
    query = struct.pack("=II64s", ord("2"), 0, VERSION.encode())
    agent = await in_thread(lambda: Caller(CALL, double.node("nvidiactl"), CHECK_VERSION_STR, query.hex()))
    await in_thread(agent.run)
    probe = await in_thread(
        lambda: load_probe(agent_tgid=agent.pid, doubles=Doubles(filesystem=double.file_system), **core)
    )
    await in_thread(agent.resume)
    await in_thread(agent.end)

    ((minor, answer),) = probe.read_readiness().items()
    assert minor == 255
    assert answer.ready
    assert answer.check.result == 0


async def in_thread(function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, function)
