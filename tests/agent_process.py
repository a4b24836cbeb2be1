"""The agent as users run it: a process of its own, on a simulated node."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.simulation.children import send_signal
from agent.simulation.directory import NodeDirectory
from agent.simulation.node import SimulatedNode
from agent.simulation.presets import load_preset
from tests.killed_runs import WITH_US

PATIENCE_S = 60.0
"""Longer than anything takes on a loaded machine; no passing test waits for it."""

GPU = "nvidia.com/gpu"

Line = Mapping[str, Any]


@dataclass
class AgentProcess:
    """A running ``gpu-agent run`` and the lines of its log."""

    process: asyncio.subprocess.Process
    flags: Mapping[str, str]
    lines: list[Line] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    """Lines of standard error that are no log lines: sentences for people."""
    more: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    async def read(self) -> None:
        """Read the log until the process has exited."""
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            text = raw.decode().rstrip("\n")
            if text.startswith("{"):
                self.lines.append(json.loads(text))
            else:
                self.plain.append(text)
            self._wake()
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        self.more.set()
        self.more = asyncio.Event()

    async def wait_line(self, message: str, *, count: int = 1, **fields: object) -> Line:
        """Wait for the n-th log line with this event, or this start of its message, and these fields."""

        def found() -> list[Line]:
            return [
                line
                for line in self.lines
                if is_about(line, message) and all(line.get(name) == fields[name] for name in fields)
            ]

        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(found()) < count:
                    if self.is_over:
                        raise AssertionError(f"ended without {message!r}: {self.lines} {self.plain}")
                    await self.more.wait()
        except TimeoutError:
            raise AssertionError(f"no {message!r} with {fields}: {self.lines} {self.plain}") from None
        return found()[count - 1]

    async def wait_registered(self, count: int = 1) -> None:
        await self.wait_line("Registered with the kubelet", count=count)

    def messages(self) -> list[str]:
        return [line.get("event", line["message"]) for line in self.lines]

    def signal(self, number: signal.Signals) -> None:
        send_signal(self.process, number)

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    async def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.signal(signal.SIGTERM)
        return await self.ended()


def is_about(line: Line, message: str) -> bool:
    """Return whether a log line is of an event, or its message begins so."""
    return bool(line.get("event") == message or line["message"].startswith(message))


@asynccontextmanager
async def running(
    flags: Mapping[str, str], *, environment: Mapping[str, str] | None = None, prelude: str = ""
) -> AsyncIterator[AgentProcess]:
    """Run an agent, and kill it afterwards if it still runs. ``prelude`` is Python to run before it."""
    given = (f"--{name}={value}" for name, value in flags.items())
    process = await asyncio.create_subprocess_exec(
        *(*WITH_US, *interpreter(prelude), "run", *given),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**clean_environment(), **(environment or {})},
        limit=2**20,
    )
    agent = AgentProcess(process, flags)
    async with asyncio.TaskGroup() as group:
        group.create_task(agent.read(), name="agent log")
        try:
            yield agent
        finally:
            with suppress(ProcessLookupError):
                send_signal(process, signal.SIGKILL)
            await process.wait()


def interpreter(prelude: str = "") -> Sequence[str]:
    if not prelude:
        return (sys.executable, "-m", "agent")
    code = f"{prelude}\nimport sys\nfrom agent.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    return (sys.executable, "-c", code)


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables that configure an agent."""
    from agent.config.options import OPTIONS  # noqa: PLC0415

    ours = {name for option in OPTIONS.values() for name in option.variables} | {
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
    }
    return {name: value for name, value in os.environ.items() if name not in ours}


@asynccontextmanager
async def node_directory() -> AsyncIterator[Path]:
    """Yield a directory whose path is short enough for the names of sockets."""
    directory = Path(tempfile.mkdtemp(prefix="gpu-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def simulated_node(preset: object = "4x-t4", *, kubelet: bool = True) -> AsyncIterator[SimulatedNode]:
    async with node_directory() as directory:
        with NodeDirectory.hold(directory / "node") as held:
            async with SimulatedNode(held, load_preset(preset), kubelet_present=kubelet) as node:  # type: ignore[arg-type]
                yield node


def flags_of(node: SimulatedNode, **flags: str) -> dict[str, str]:
    """Return the flags of an agent on a simulated node, with HTTP at a port of its own."""
    given = {name.replace("_", "-"): value for name, value in flags.items()}
    return node.directory.agent_flags() | {"http-listen": "127.0.0.1:0", "log-format": "json"} | given


async def wait_allocatable(node: SimulatedNode, number: int, *, resource: str = GPU) -> None:
    await node.kubelet.wait_for(lambda kubelet: kubelet.allocatable(resource) == number, timeout_s=PATIENCE_S)


async def eventually(is_true: Callable[[], bool]) -> None:
    """Poll until a condition outside of the event loop is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.01)
