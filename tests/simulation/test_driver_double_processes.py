"""Processes that use simulated GPUs: their calls are a CUDA program's, and so is what they leave behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.errors import AgentError
from agent.simulation.driver_double.double import Books, DriverDouble
from agent.simulation.gpu_processes import cuda
from agent.simulation.gpu_processes.process import SimulatedProcess
from agent.threads import in_daemon_thread
from tests.harness import ROOT
from tests.simulation.driver_double_rig import VERSION, running_double, start_process

PATIENCE_S = 60.0


@pytest.fixture
async def double() -> AsyncIterator[DriverDouble]:
    async with running_double() as made:
        yield made


@pytest.fixture
async def process(double: DriverDouble) -> AsyncIterator[SimulatedProcess]:
    async with await start_process(double) as started:
        yield started


def opens(books: Books) -> dict[str, int]:
    return dict(books.opened)


async def test_the_kernel_calls_it_by_its_name(process: SimulatedProcess) -> None:
    assert Path(f"/proc/{process.pid}/comm").read_text(encoding="ascii") == "python\n"


async def test_the_first_context_makes_the_calls_of_an_initialisation_too(
    double: DriverDouble, process: SimulatedProcess
) -> None:
    """Seen of libcuda: 10 and 106 allocations, 1 free; 5 and 13 opens of a GPU, 2 and 7 of nvidiactl."""
    await process.create(1)
    first = await double.books()
    assert first.counts["allocated"] == 10 + 106
    assert first.counts["frees"] == 1
    assert opens(first) == {"nvidiactl": 2 + 7, "nvidia1": 5 + 13, "nvidia-uvm": 2}
    assert len(first.spaces) == 1
    await process.create(1)
    second = await double.books()
    assert second.counts["allocated"] - first.counts["allocated"] == 106
    assert second.processes[process.pid]["calls"] - first.processes[process.pid]["calls"] == (
        106 + cuda.CREATE_CONTROLS + cuda.HEAP_CALLS + cuda.MEMORY_CALLS + cuda.CHANNELS + cuda.GPU_OPENS
    )
    assert len(second.spaces) == 1
    assert second.live(process.pid) == 2


async def test_a_destroyed_context_leaves_nothing_of_it(
    double: DriverDouble, process: SimulatedProcess
) -> None:
    await process.create(0)
    (client,) = (await double.books()).clients
    assert await process.destroy(1) == 1
    books = await double.books()
    assert books.contexts == ()
    assert books.clients[0].objects == client.objects - 106
    assert books.counts["contexts_freed"] == 1
    with pytest.raises(AgentError, match="could not destroy: LookupError: it has 0 contexts"):
        await process.destroy(1)


async def test_a_child_keeps_the_contexts_of_a_parent_that_ended(
    double: DriverDouble, process: SimulatedProcess
) -> None:
    await process.create(1)
    async with await process.fork("worker") as child:
        assert Path(f"/proc/{child.pid}/comm").read_text(encoding="ascii") == "worker\n"
        await process.exit()
        assert (await double.books()).live(process.pid) == 1
        await child.exit()
    assert (await double.books()).contexts == ()


async def test_a_child_that_is_another_program_keeps_the_control_file_only(
    double: DriverDouble, process: SimulatedProcess
) -> None:
    await process.create(1)
    async with await process.fork("worker") as child:
        await child.exec()
        await process.exit()
        books = await double.books()
        assert books.live(process.pid) == 1
        assert books.opened["nvidia1"] == books.released["nvidia1"]
        files = [path.readlink().name for path in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert [name for name in files if "nvidia" in name] == ["nvidiactl"]


async def test_a_process_ends_with_its_parent() -> None:
    code = f"""
import asyncio, os
from tests.simulation.driver_double_rig import running_double, start_process
async def main():
    async with running_double() as double:
        process = await start_process(double)
        await process.create(0)
        child = await process.fork("child")
        print(process.pid, child.pid, flush=True)
        os.kill(os.getpid(), {int(signal.SIGKILL)})
asyncio.run(main())
"""
    starter = await in_daemon_thread(
        "starter",
        lambda: subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=False),
    )
    if not starter.stdout:
        pytest.skip("no driver double can be had here")
    async with asyncio.timeout(PATIENCE_S):
        for pid in starter.stdout.split():
            while is_alive(int(pid)):
                await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False


async def test_a_process_that_is_held_in_the_kernel_cannot_be_killed_until_it_is_released(
    double: DriverDouble, process: SimulatedProcess
) -> None:
    await process.create(0)
    await double.hold("nvidia0")
    creating = asyncio.get_running_loop().create_task(process.create(0))
    async with asyncio.timeout(PATIENCE_S):
        while await double.held() < 1:
            await asyncio.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.sleep(0)
    assert not process.has_exited.is_set()
    assert (await double.books()).live(process.pid) == 1
    await double.release("nvidia0")
    with pytest.raises(AgentError, match="exited before it could create"):
        await creating
    await process.exited()
    assert (await double.books()).contexts == ()


async def test_an_older_driver_is_called_in_its_own_form() -> None:
    async with (
        running_double("525.60.11") as double,
        await start_process(double, version="525.60.11") as process,
    ):
        await process.create(1, 2)
        assert (await double.books()).live(process.pid) == 2
    async with running_double(VERSION) as double, await start_process(double, version="525.60.11") as process:
        with pytest.raises(AgentError, match="Invalid argument"):
            await process.create(1)
