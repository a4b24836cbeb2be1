"""``-w``: an answer shown again after every change, on a terminal and elsewhere."""

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import pytest

from agent.commands.question import Question, changed, fitting
from agent.commands.render import Output
from agent.simulation.node import SimulatedNode
from tests.harness import (
    PATIENCE_S,
    AgentProcess,
    clean_environment,
    flags_of,
    interpreter,
    running,
    running_command,
    simulated_node,
    wait_allocatable,
)

# What is printed again


def state(value: int = 1, **more: Any) -> dict[str, Any]:
    """Return a document with values that change by time alone."""
    return {
        "uptime_s": value,
        "seen": f"10:00:0{value}",
        "seen_monotonic_ns": value,
        "gpus": [{"sample": {"power": value}, "since": f"10:00:0{value}", "since_monotonic_ns": 7, **more}],
    }


QUESTION = Question(
    "/v1/x",
    names=lambda document: document["gpus"][0].get("names", ()),
    lines=lambda document, now_ns, _: [
        f"up {document['uptime_s']}, {now_ns}, {document['gpus'][0].get('a')}"
    ],
    notes=lambda document: document["gpus"][0].get("notes", ()),
)


def printed(output: Output, *documents: dict[str, Any]) -> list[int]:
    """Return the numbers of the documents that are printed."""
    return [documents.index(each) for each in changed(QUESTION, deepcopy(list(documents)), output)]


@pytest.mark.parametrize("output", list(Output))
def test_a_change_of_time_alone_is_not_printed_again(output: Output) -> None:
    assert printed(output, state(1), state(2), state(3)) == [0]


@pytest.mark.parametrize(
    ("output", "more"),
    [
        (Output.JSON, {"since_monotonic_ns": 8}),
        (Output.YAML, {"b": 1}),
        (Output.NAME, {"names": ["x"]}),
        (Output.TABLE, {"a": 1}),
        (Output.WIDE, {"notes": ["x"]}),
    ],
)
def test_a_change_is_printed_and_so_is_its_reversal(output: Output, more: dict[str, Any]) -> None:
    assert printed(output, state(1), state(2, **more), state(3, **more), state(4)) == [0, 1, 3]


@pytest.mark.parametrize("output", [Output.TABLE, Output.NAME])
def test_a_table_is_not_printed_again_for_a_value_it_does_not_show(output: Output) -> None:
    assert printed(output, state(1), state(2, b=1)) == [0]


def test_a_process_that_alternates_between_running_and_sleeping_prints_nothing() -> None:
    documents = [state(1, state="R"), state(2, state="S"), state(3, state="D")]
    assert printed(Output.JSON, *documents) == [0, 2]


# A screen


@pytest.mark.parametrize(
    ("lines", "rows", "shown"),
    [
        (["a", "b"], 3, ["a", "b"]),
        (["a", "b", "c"], 3, ["a", "… and 2 more"]),
        (["a" * 10, "b"], 4, ["a" * 10, "b"]),
        (["a" * 11, "b", "c"], 4, ["a" * 11, "… and 2 more"]),
        (["\x1b[31m" + "a" * 10 + "\x1b[0m", "b"], 3, ["\x1b[31m" + "a" * 10 + "\x1b[0m", "b"]),
        ([], 3, []),
        (["", ""], 3, ["", ""]),
    ],
)
def test_the_output_is_no_longer_than_the_screen(lines: list[str], rows: int, shown: list[str]) -> None:
    assert fitting(lines, columns=10, rows=rows) == shown


# The command itself


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


@asynccontextmanager
async def watching(agent: AgentProcess, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    await agent.wait_line("Listening", listener="control")
    control = agent.flags["control-socket"]
    async with running_command(*arguments, "-w", "--control-socket", control) as process:
        yield process


async def line_of(process: asyncio.subprocess.Process, matches: Callable[[str], bool]) -> str:
    """Return the first line of the output that matches."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        async for raw in process.stdout:
            if matches(raw.decode()):
                return raw.decode()
    raise AssertionError("the output ended")


def unhealthy_in(line: str) -> list[str]:
    return [each["id"] for each in json.loads(line)["devices"] if each["health"] == "unhealthy"]


@pytest.mark.slow
async def test_each_change_is_a_document_on_a_line_also_after_the_agent_was_restarted(
    node: SimulatedNode,
) -> None:
    async with running(flags_of(node)) as agent, watching(agent, "devices", "-o", "json") as process:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(1, 79)
        await line_of(process, lambda line: unhealthy_in(line) == [node.nvml.uuid(1)])
        agent.signal(signal.SIGKILL)
        await agent.ended()
        assert process.stderr is not None
        away = await asyncio.wait_for(process.stderr.readline(), PATIENCE_S)
        assert away == b"gpu-agent: The agent does not answer; waiting for it\n"
        async with running(flags_of(node)):
            await wait_allocatable(node.kubelet, 3)
            node.nvml.push_xid(2, 79)
            both = [node.nvml.uuid(1), node.nvml.uuid(2)]
            await line_of(process, lambda line: unhealthy_in(line) == both)
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
            assert await process.stderr.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "title"),
    [("status", "Agent "), ("owners", "GPU "), ("contexts", "PID "), ("devices", "GPU ")],
)
async def test_a_table_is_printed_and_an_interrupt_exits_quietly(
    node: SimulatedNode, command: str, title: str
) -> None:
    async with running(flags_of(node)) as agent, watching(agent, command) as process:
        await line_of(process, lambda line: line.startswith(title))
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of 80 columns and 24 lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.mark.slow
async def test_a_terminal_shows_one_screen_that_is_redrawn(
    node: SimulatedNode, terminal: tuple[int, int]
) -> None:
    ours, theirs = terminal
    shown = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(shown), os.fdopen(os.dup(ours), "rb", buffering=0)
    )
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        await agent.wait_line("Listening", listener="control")
        process = await asyncio.create_subprocess_exec(
            *(*interpreter(), "devices", "-w", "--control-socket", agent.flags["control-socket"]),
            env={**clean_environment(), "TERM": "xterm", "NO_COLOR": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=theirs,
        )
        async with asyncio.timeout(PATIENCE_S):
            assert await shown.readuntil(b"\x1b[H\x1b[J") == b"\x1b[H\x1b[J"
            node.nvml.push_xid(1, 79)
            while b"xid 79" not in (screen := await shown.readuntil(b"\x1b[H\x1b[J")):
                assert b"GPU-" in screen
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
