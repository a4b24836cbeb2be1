"""Processes on the driver double under the probe: after each step the usage snapshot matches its books.

The driver numbers its GPUs otherwise than their device files, as it may.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from agent.errors import SourceError
from agent.probe.request import Doubles, Request
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import UVM_MAJOR, Gpu
from agent.simulation.gpu_processes.process import SimulatedProcess
from tests.probe.watcher import Double, Watcher, watching

pytestmark = pytest.mark.slow

GPUS = tuple(
    Gpu(
        minor,
        f"GPU-{minor + 1:08x}-0000-4000-8000-000000000000",
        2 - minor,
        f"0000:{minor:02x}:00.0",
        0x233010DE,
    )
    for minor in range(3)
)
PRIME = 10_007


class Machine:
    """The double, its watcher, and the processes on it."""

    def __init__(
        self, double: Double, watcher: Watcher, stack: AsyncExitStack, version: str = "570.148.08"
    ) -> None:
        self.double = double
        self.watcher = watcher
        self._stack = stack
        self._version = version

    async def process(self, comm: str = "python") -> SimulatedProcess:
        started = await SimulatedProcess.start(
            comm, folder=self.double.folder, version=self._version, gpus=GPUS
        )
        return await self._stack.enter_async_context(started)

    async def fork(self, parent: SimulatedProcess, comm: str) -> SimulatedProcess:
        return await self._stack.enter_async_context(await parent.fork(comm))


@pytest.fixture
async def machine(loader: dict[str, Any]) -> AsyncIterator[Machine]:
    async with AsyncExitStack() as stack:
        try:
            double = await DriverDouble.start(GPUS, version="570.148.08")
        except SourceError as error:
            pytest.skip(str(error))
        await stack.enter_async_context(double)
        doubles = Doubles(filesystem=double.file_system, uvm_major=UVM_MAJOR)
        request = Request(doubles=doubles, **loader)
        watcher = await stack.enter_async_context(watching(double, GPUS, request))
        yield Machine(double, watcher, await stack.enter_async_context(AsyncExitStack()))


async def test_contexts_that_are_created_and_destroyed(machine: Machine) -> None:
    process = await machine.process()
    await process.create(1, 5)
    assert await machine.watcher.agrees() == {process.pid: {GPUS[1].uuid: 5}}
    await process.create(0, 2)
    assert await machine.watcher.agrees() == {process.pid: {GPUS[1].uuid: 5, GPUS[0].uuid: 2}}
    await process.destroy(4, minor=1)
    assert await machine.watcher.agrees() == {process.pid: {GPUS[1].uuid: 1, GPUS[0].uuid: 2}}
    await process.destroy(None)
    assert await machine.watcher.agrees() == {}
    await process.create(1)
    assert await machine.watcher.agrees() == {process.pid: {GPUS[1].uuid: 1}}
    await process.stop()
    assert await machine.watcher.agrees() == {}


async def test_an_exit_that_frees_nothing(machine: Machine) -> None:
    process = await machine.process()
    await process.create(2, 3)
    assert await machine.watcher.agrees() == {process.pid: {GPUS[2].uuid: 3}}
    await process.exit()
    assert await machine.watcher.agrees() == {}


async def test_a_killed_process(machine: Machine) -> None:
    process = await machine.process()
    await process.create(0)
    assert await machine.watcher.agrees() == {process.pid: {GPUS[0].uuid: 1}}
    await process.kill()
    assert await machine.watcher.agrees() == {}


async def test_a_child_that_keeps_the_files(machine: Machine) -> None:
    process = await machine.process()
    await process.create(1)
    child = await machine.fork(process, "worker")
    assert await machine.watcher.agrees() == {process.pid: {GPUS[1].uuid: 1}}
    await process.exit()
    assert await machine.watcher.agrees() == {process.pid: {GPUS[1].uuid: 1}}
    (orphan,) = (await machine.watcher.settled_usage()).orphans
    assert orphan.owner.key.pid == process.pid
    assert orphan.owner.comm == "python"
    assert [holder.pid for holder in orphan.holders] == [child.pid]
    await child.exit()
    assert await machine.watcher.agrees() == {}


async def test_a_copy_of_the_descriptor_that_outlives_the_first(machine: Machine) -> None:
    process = await machine.process()
    await process.create(1)
    copy = (await process.command("dup"))["descriptor"]
    assert await machine.watcher.agrees() == {process.pid: {GPUS[1].uuid: 1}}
    await process.command("close")
    assert copy > 2
    assert await machine.watcher.agrees() == {}


async def test_a_range_of_descriptors_that_is_closed_at_once(machine: Machine) -> None:
    process = await machine.process()
    await process.create(2, 2)
    assert await machine.watcher.agrees() == {process.pid: {GPUS[2].uuid: 2}}
    await process.command("close-range")
    assert await machine.watcher.agrees() == {}


async def test_files_that_are_handed_to_another_process(machine: Machine) -> None:
    process, receiver = await machine.process(), await machine.process("receiver")
    await process.create(0, 2)
    await process.give(receiver)
    # It made the contexts, though it holds nothing of them any more.
    assert await machine.watcher.agrees() == {process.pid: {GPUS[0].uuid: 2}}
    await process.exit()
    assert await machine.watcher.agrees() == {process.pid: {GPUS[0].uuid: 2}}
    (orphan,) = (await machine.watcher.settled_usage()).orphans
    assert [holder.pid for holder in orphan.holders] == [receiver.pid]
    await receiver.exit()
    assert await machine.watcher.agrees() == {}


async def test_another_program_in_the_same_process(machine: Machine) -> None:
    process = await machine.process()
    await process.create(1, 2)
    await process.exec()
    assert await machine.watcher.agrees() == {process.pid: {GPUS[1].uuid: 2}}
    await process.command("close-range")
    assert await machine.watcher.agrees() == {}


async def test_several_processes_on_one_gpu(machine: Machine) -> None:
    processes = [await machine.process() for _ in range(3)]
    for number, process in enumerate(processes, 1):
        await process.create(0, number)
    expected = {process.pid: {GPUS[0].uuid: number} for number, process in enumerate(processes, 1)}
    assert await machine.watcher.agrees() == expected
    await processes[1].kill()
    del expected[processes[1].pid]
    assert await machine.watcher.agrees() == expected


async def test_a_prime_number_of_opens_contexts_and_frees_is_counted_exactly(machine: Machine) -> None:
    process = await machine.process()
    await process.create(0)
    await process.command("count", name="nvidiactl", opens=PRIME, contexts=PRIME)
    counted = await machine.watcher.counters(process.pid)
    books = await machine.double.books()
    known = books.processes[process.pid]
    assert books.counts["contexts_allocated"] == PRIME + 1
    assert books.counts["contexts_freed"] == PRIME
    assert (counted.contexts_allocated, counted.contexts_freed) == (PRIME + 1, PRIME)
    assert (counted.opens, counted.allocs, counted.frees) == (known["opens"], known["allocs"], known["frees"])
    assert counted.closes == PRIME + 1
    assert counted.errors == 0
    assert await machine.watcher.agrees() == {process.pid: {GPUS[0].uuid: 1}}
