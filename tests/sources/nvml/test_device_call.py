"""The harmless call on a GPU's own device file."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.errors import SourceError
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import Gpu
from agent.sources.nvml.device_call import CALL, call_device
from agent.sources.nvml.library import Nvml
from agent.threads import in_daemon_thread

GPU = Gpu(4, "GPU-00000001-0000-4000-8000-000000000000", 0, "0000:3b:00.0", 0x233010DE)


class Observer:
    """Notes which calls started and returned, as a thread's own log does."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def began(self, call: str) -> None:
        self.notes.append(call)

    def ended(self) -> None:
        self.notes.append("ended")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("node", ["none", "device", "folder"])
def test_whatever_the_device_file_is_nothing_is_raised_and_nothing_stays_open(
    tmp_path: Path, node: str
) -> None:
    observer, before = Observer(), descriptors()
    if node == "device":
        (tmp_path / "nvidia4").symlink_to("/dev/null")
    elif node == "folder":
        (tmp_path / "nvidia4").mkdir()

    call_device(Nvml(observer), tmp_path, 4)

    assert observer.notes == [CALL, "ended"]
    assert descriptors() == before


@asynccontextmanager
async def running_double(version: str = "570.148.08") -> AsyncIterator[DriverDouble]:
    try:
        double = await DriverDouble.start((GPU,), version=version)
    except SourceError as error:
        pytest.skip(str(error))
    async with double:
        yield double


@pytest.mark.parametrize(("version", "calls"), [("570.148.08", 1), ("525.60.13", 2)])
async def test_the_driver_is_called_on_the_gpus_own_file_until_it_knows_the_size(
    version: str, calls: int
) -> None:
    async with running_double(version) as double:
        await in_daemon_thread("test-call", lambda: call_device(Nvml(Observer()), double.folder, GPU.minor))
        books = await double.books()

    assert {name: number for name, number in books.opened.items() if number} == {"nvidia4": 1}
    assert books.released["nvidia4"] == 1
    assert books.processes[os.getpid()]["calls"] == calls


async def test_a_call_that_does_not_return_stays_under_way_for_the_observer() -> None:
    async with running_double() as double:
        await _hangs_and_returns(double)


async def _hangs_and_returns(double: DriverDouble) -> None:
    observer = Observer()
    await double.hold("nvidia4")
    calling = asyncio.get_running_loop().create_task(
        in_daemon_thread("test-call", lambda: call_device(Nvml(observer), double.folder, GPU.minor))
    )
    while not await double.held():
        await asyncio.sleep(0.01)
    assert observer.notes == [CALL]

    await double.release("nvidia4")
    await calling
    assert observer.notes == [CALL, "ended"]
