"""Fixtures of the sources' tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agent.sources.nvml.source import NvmlSettings, NvmlSource
from tests.sources.recorder import Recorder
from tests.sources.simulated import QUICK, Node, running_source

MakeNode = Callable[..., Node]
StartSource = Callable[..., Awaitable[NvmlSource]]


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(recorder.run(), name="recorder")
        yield recorder
        task.cancel()
    recorder.inbox.close()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(hardware: str | Mapping[str, object], *, library: bool = True) -> Node:
        nodes.append(Node.make(tmp_path, hardware, library=library))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
async def start_source(recorder: Recorder) -> AsyncIterator[StartSource]:
    async with AsyncExitStack() as stack:

        async def start(node: Node, settings: NvmlSettings = QUICK, *, released: bool = False) -> NvmlSource:
            running = running_source(node, recorder.inbox, settings, released=released)
            return await stack.enter_async_context(running)

        yield start
