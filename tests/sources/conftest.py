"""A simulated node's NVML and the source that watches it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.model.ids import GpuUuid
from agent.simulation.nvml import NvmlState, install_library
from agent.simulation.presets import load_preset
from agent.sources.nvml import LibraryLocation, NvmlSettings, NvmlSource
from tests.sources.recorder import PATIENCE_S, Recorder

MS = 1_000_000

QUICK = NvmlSettings(
    init_deadline_ns=5_000 * MS,
    first_handle_deadline_ns=5_000 * MS,
    call_deadline_ns=5_000 * MS,
    poll_ns=50 * MS,
    init_retry_ns=20 * MS,
    event_slice_ms=20,
    event_retry_ns=20 * MS,
    first_look_wait_ns=5_000 * MS,
    close_wait_ns=5_000 * MS,
)
"""Short periods, long deadlines: nothing is overdue that does not hang."""


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(recorder.run(), name="recorder")
        yield recorder
        task.cancel()


@dataclass
class Node:
    """A node directory: a driver library with its state, and what stands for /dev and /sys."""

    directory: Path
    state: NvmlState
    inits_forgotten: int = 0
    """Inits that the library denied to have seen when they were to be undone."""

    @property
    def library(self) -> Path:
        return self.directory / "lib" / "libnvidia-ml.so.1"

    def uuid(self, gpu: int) -> GpuUuid:
        return GpuUuid(self.state.uuid(gpu))

    def uuids(self) -> list[GpuUuid]:
        return [self.uuid(gpu) for gpu in range(self.state.gpus)]


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    states: list[NvmlState] = []

    def make(node: object = "8x-a100", *, library: bool = True) -> Node:
        assert isinstance(node, str | dict)
        state = NvmlState.create(tmp_path / "nvml.state", load_preset(node))
        states.append(state)
        (tmp_path / "dev").mkdir()
        (tmp_path / "sys").mkdir()
        if library:
            install_library(tmp_path)
        return Node(tmp_path, state)

    yield make
    for state in states:
        # A test that failed may have left calls hanging.
        state.clear_faults()
        state.close()


StartSource = Callable[..., Awaitable[NvmlSource]]


@pytest.fixture
async def start_source(recorder: Recorder) -> AsyncIterator[StartSource]:
    running: list[tuple[NvmlSource, asyncio.Task[None], Node]] = []

    async def start(node: Node, settings: NvmlSettings = QUICK) -> NvmlSource:
        source = NvmlSource(
            inbox=recorder.inbox,
            library=LibraryLocation(path=node.library),
            dev_root=node.directory / "dev",
            sys_root=node.directory / "sys",
            clock=time.monotonic_ns,
            settings=settings,
        )
        task = asyncio.get_running_loop().create_task(source.run(), name="nvml")
        running.append((source, task, node))
        return source

    yield start
    for source, task, node in running:
        node.state.clear_faults()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        async with asyncio.timeout(PATIENCE_S):
            # A call that hung until now may not be back yet.
            while not await source.close():
                await asyncio.sleep(0.002)
        assert node.state.inits == node.state.shutdowns + node.inits_forgotten
