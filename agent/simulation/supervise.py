"""The process behind ``gpu-agent demo``: it starts the simulated node and the agent, shows both, stops both.

Guarantees: when it returns or is killed, no process of it is left; when it returns, no file either.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.config.options import OPTIONS
from agent.config.our_options import LOOPBACK_PORT
from agent.errors import EXIT_USAGE, AgentError, ConfigError, UsageError
from agent.simulation import control
from agent.simulation.children import Child, environment_of_children
from agent.simulation.directory import NodeDirectory, agent_flags
from agent.simulation.feed import Line
from agent.simulation.plan import Plan
from agent.simulation.reasons import AgentClient
from agent.simulation.stop_signals import StopSignals, first_of
from agent.simulation.view import JsonLines, Output, Tables, View

ANY_PORT: Final = "127.0.0.1:0"
AGENT_PATIENCE_S: Final = 6.0
"""The agent promises to be gone within five seconds of SIGTERM."""
SIMULATE_PATIENCE_S: Final = 8.0
_LISTENER_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Demo:
    """What was asked for; ``node_arguments`` are those of ``simulate``."""

    plan: Plan
    node_dir: Path
    node_arguments: tuple[str, ...]
    is_json: bool
    hints: tuple[str, ...]


async def demo(wanted: Demo) -> None:
    """Show the simulated node until its scenario or a signal ends it; raises AgentError."""
    environment = environment_of_children(
        os.environ, ["GPU_AGENT_SIM_STATE", *(option.environment for option in OPTIONS.values())]
    )
    with StopSignals() as stop:
        argv = [
            sys.executable,
            "-m",
            "agent",
            "simulate",
            f"--node-dir={wanted.node_dir}",
            *wanted.node_arguments,
        ]
        simulate = await Child.start("simulate", argv, environment=environment)
        try:
            if await first_of(ready=simulate.first_line(), stop=stop.wait()) == "ready":
                await _raise_unless_ready(simulate)
                await _with_agent(wanted, simulate, environment, stop)
            else:
                _raise_interrupted(wanted)
        finally:
            asked = await simulate.stop(SIMULATE_PATIENCE_S, impatient=stop.second)
            if not asked or wanted.node_dir.exists():
                _remove_leftovers(wanted.node_dir)


async def _raise_unless_ready(simulate: Child) -> None:
    if await simulate.first_line():
        return
    code = await simulate.exited()
    words = simulate.last_words() or f"The simulated node exited with status {code} before it was ready"
    problems = tuple(line.removeprefix("gpu-agent: ") for line in words.splitlines())
    raise ConfigError(problems) if code == EXIT_USAGE else AgentError("\n".join(problems))


class _Agent:
    """The agent's process, started anew as often as the scenario kills it and no more."""

    def __init__(self, wanted: Demo, environment: dict[str, str]) -> None:
        self._command = _agent_command(wanted)
        self._environment = environment
        self._log = wanted.node_dir / "agent.log"
        self._kills = 0 if wanted.plan.scenario is None else wanted.plan.scenario.kills
        self._changed = asyncio.Event()
        self.child: Child | None = None

    async def start(self) -> None:
        """Start a process."""
        self.child = await Child.start("agent", self._command, environment=self._environment, log=self._log)
        self._changed.set()

    async def exited(self) -> None:
        """Return when it has exited otherwise than by a kill of the scenario."""
        while self.child is not None and await self.child.exited() == -signal.SIGKILL and self._kills:
            self._kills -= 1
            await self.child.stop(0, impatient=asyncio.Event())
            await self.start()

    async def stop(self, *, impatient: asyncio.Event) -> None:
        """End the process."""
        if self.child is not None:
            await self.child.stop(AGENT_PATIENCE_S, impatient=impatient)

    async def show(self, client: AgentClient, tables: Tables | None) -> None:
        """Show where the agent answers, once it does, until cancelled."""
        while True:
            self._changed.clear()
            if tables is not None and self.child is not None:
                await self._show_one(self.child, client, tables)
            await self._changed.wait()

    async def _show_one(self, child: Child, client: AgentClient, tables: Tables) -> None:
        tables.set_agent(f"agent: process {child.pid}")
        while child is self.child:
            address = await client.http_address()
            if address is not None:
                tables.set_agent(f"agent: process {child.pid}, http://{address}/preflight")
                return
            await asyncio.sleep(_LISTENER_POLL_S)


async def _with_agent(wanted: Demo, simulate: Child, environment: dict[str, str], stop: StopSignals) -> None:
    agent = _Agent(wanted, environment)
    await agent.start()
    client = AgentClient(wanted.node_dir / "agent" / "control.sock")
    output, tables = _output(wanted, client)
    end: list[Line] = []
    try:
        which = await first_of(
            stop=stop.wait(),
            feed=_follow(wanted.node_dir, output, end),
            agent=agent.exited(),
            simulate=simulate.exited(),
            listener=agent.show(client, tables),
        )
        ended = agent.child if which == "agent" else simulate
        await _raise_unless_expected(which, ended or simulate, wanted, end)
    finally:
        if tables is not None:
            tables.close()
        await agent.stop(impatient=stop.second)


def _output(wanted: Demo, client: AgentClient) -> tuple[Output, Tables | None]:
    if wanted.is_json:
        return JsonLines(client), None
    view = View(node_dir=str(wanted.node_dir), hints=wanted.hints)
    tables = Tables(view, client, is_terminal=sys.stdout.isatty())
    tables.watch_size()
    return tables, tables


def _agent_command(wanted: Demo) -> list[str]:
    flags = agent_flags(wanted.node_dir) | {"log-format": "text", "if-running": "fail"}
    if wanted.plan.scenario is not None:
        flags |= {"http-listen": ANY_PORT} | wanted.plan.scenario.agent_flags(wanted.node_dir)
    elif not _is_free(LOOPBACK_PORT):
        flags["http-listen"] = ANY_PORT
    return [sys.executable, "-m", "agent", "run", *(f"--{name}={value}" for name, value in flags.items())]


def _is_free(port: int) -> bool:
    """Return whether the port is free; another demo, or the agent of this machine, may listen there."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def _follow(node_dir: Path, output: Output, end: list[Line]) -> None:
    """Show the feed until it ends or the output is closed; the result of a scenario is kept."""
    async for line in control.watch(node_dir):
        if line["kind"] == "error":
            raise AgentError(line["text"])
        if line["kind"] == "end":
            end.append(line)
        if not await output.show_line(line) or end:
            return
    # The node's process has exited, and its exit status has the reason.
    await asyncio.Event().wait()


async def _raise_unless_expected(which: str, child: Child, wanted: Demo, end: list[Line]) -> None:
    """Raise AgentError unless the demo ended as expected."""
    if which in ("agent", "simulate"):
        name = "agent" if which == "agent" else "simulated node"
        code = await child.exited()
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        words = child.last_words()
        raise AgentError(
            f"The {name} exited unexpectedly {how}" + (f"; its last output:\n{words}" if words else "")
        )
    if end and not end[0]["ok"]:
        raise UsageError(end[0]["text"]) if end[0]["exit"] == EXIT_USAGE else AgentError(end[0]["text"])
    if not end:
        _raise_interrupted(wanted)


def _raise_interrupted(wanted: Demo) -> None:
    """Raise AgentError for a scenario, which should have been played to its end; a demo may be stopped."""
    if wanted.plan.scenario is not None:
        raise AgentError(f"Scenario {wanted.plan.scenario.name} was interrupted")


def _remove_leftovers(node_dir: Path) -> None:
    """Remove what a killed node left behind."""
    # Another node may hold the directory, or it was never ours.
    with contextlib.suppress(AgentError):
        NodeDirectory.hold(node_dir).release()
