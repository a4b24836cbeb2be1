"""Contexts without unified memory, in a process with several GPUs: device instances place them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent.errors import SourceError
from agent.probe.request import Doubles, Request
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import UVM_MAJOR
from tests.harness import ROOT
from tests.probe.test_workloads import GPUS
from tests.probe.watcher import watching

VERSION = "570.148.08"
GRAPHICS = """
import sys
from agent.simulation.driver_double import abi
from agent.simulation.gpu_processes.calls import Caller
caller = Caller(sys.argv[1], sys.argv[2])
control, *_ = [caller.open(name) for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia2")]
client = caller.allocate_client(control)
for instance in (2, 0, 0):
    device = caller.allocate_device(control, client, 0, instance)
    group = caller.allocate(control, client, device, 0, abi.CHANNEL_GROUP)
    caller.allocate(control, client, group, 0, abi.CONTEXT_SHARE)
print(flush=True)
sys.stdin.read()
"""
"""What a graphics program does: nothing of it names a GPU but the instance."""


@pytest.fixture
async def double() -> AsyncIterator[DriverDouble]:
    try:
        started = await DriverDouble.start(GPUS, version=VERSION)
    except SourceError as error:
        pytest.skip(str(error))
    async with started:
        yield started


@asynccontextmanager
async def graphics(double: DriverDouble) -> AsyncIterator[int]:
    """Yield the pid of such a program, once it has its contexts."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GRAPHICS, double.folder, VERSION, stdin=pipe, stdout=pipe, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"\n"
        yield process.pid
    finally:
        process.stdin.close()
        await process.wait()


def request_of(double: DriverDouble, core: dict[str, Any]) -> Request:
    return Request(doubles=Doubles(filesystem=double.file_system, uvm_major=UVM_MAJOR), **core)


async def test_the_drivers_instances_place_them(double: DriverDouble, core: dict[str, Any]) -> None:
    async with watching(double, GPUS, request_of(double, core), has_instances=True) as watcher:
        async with graphics(double) as pid:
            assert await watcher.agrees() == {pid: {GPUS[0].uuid: 1, GPUS[2].uuid: 2}}
            (use,) = (await watcher.settled_usage()).processes
            assert (use.partial, use.unplaced) == (False, 0)
        assert await watcher.agrees() == {}


async def test_without_instances_they_are_counted_for_no_gpu(
    double: DriverDouble, core: dict[str, Any]
) -> None:
    async with watching(double, GPUS, request_of(double, core)) as watcher, graphics(double):
        (use,) = (await watcher.settled_usage()).processes
        assert (use.partial, use.unplaced) == (True, 3)
        assert [hold.contexts for hold in use.holds] == [0, 0, 0]
