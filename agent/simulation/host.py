"""The process behind ``gpu-agent simulate``: a simulated node with its control socket and its output.

Guarantees: the first line of text is written when the control socket accepts; of the kubelet's view nothing
is written any more once the node is being taken down.
"""

import asyncio
import contextlib
import fcntl
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from agent.core.wording import counted
from agent.errors import AgentError
from agent.simulation.command_name import this_command
from agent.simulation.control import ControlServer
from agent.simulation.directory import NodeDirectory, agent_flags
from agent.simulation.feed import Feed, Line
from agent.simulation.node import SimulatedNode
from agent.simulation.plan import Plan
from agent.simulation.play import play, set_up
from agent.simulation.scenario import Scenario
from agent.simulation.stop_signals import StopSignals, first_of

LINGER_S: Final = 10.0
"""How long a scenario's node stays for its watchers: they stop the agent first."""
AGENT_GOES_WITHIN_S: Final = 2.0
"""How long the directory stays for an agent that exits together with the node."""
_POLL_S: Final = 0.02

SHOWN_AS_JSON: Final = frozenset({"allocatable", "condition"})
"""Kinds of lines."""

Show = Callable[[Line], str]
"""Returns the text of a line of the feed, empty for one that is not shown."""


async def host(plan: Plan, node_dir: Path, *, is_json: bool) -> None:
    """Run a node until its scenario, a signal or the reader of the output ends it; raises AgentError."""
    with StopSignals() as stop, NodeDirectory.hold(node_dir) as directory:
        try:
            async with SimulatedNode(
                directory, plan.spec, label=plan.label, driver=plan.driver_wanted
            ) as node:
                if plan.scenario is not None:
                    await set_up(node, plan.scenario)
                async with ControlServer(directory.control_socket, node.do, node.feed) as control:
                    if not is_json:
                        _write(_introduction(plan, directory.path))
                    end = await _live(node, plan.scenario, json_of if is_json else _text_of, stop)
                    if end is not None:
                        await first_of(
                            stop=stop.wait(), unwatched=control.wait_unwatched(), late=asyncio.sleep(LINGER_S)
                        )
        finally:
            await _wait_for_agent_exit(directory)
    if end is not None and not end["ok"]:
        raise ScenarioEndedError(str(end["text"]), int(end["exit"]))
    if end is None and plan.scenario is not None:
        raise AgentError(f"Scenario {plan.scenario.name} was interrupted")


NOT_SHOWN: Final = frozenset({"connected", "at_ns"})
"""Of a change of the kubelet's view: what the demo needs to ask the agent why."""


class ScenarioEndedError(AgentError):
    """A scenario did not end as expected."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


async def _live(node: SimulatedNode, scenario: Scenario | None, show: Show, stop: StopSignals) -> Line | None:
    """Show what happens; returns how the scenario ended, None where something else ended it."""
    shown: list[Line] = []
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(_play(node, scenario), name="simulation-play")
        await first_of(show=_show(node.feed, show, shown), stop=stop.wait())
        playing.cancel()
    return shown[0] if shown else None


async def _play(node: SimulatedNode, scenario: Scenario | None) -> None:
    """Play a scenario and put how it ended as the last line into the feed; without one there is no end."""
    if scenario is None:
        return
    try:
        end = {"ok": True, "exit": 0, "text": await play(node, scenario)}
    except AgentError as error:
        end = {"ok": False, "exit": error.exit_code, "text": str(error)}
    await node.caught_up()
    node.feed.put({"kind": "end", "at_ms": node.at_ms(), **end})
    node.feed.close()


async def _show(feed: Feed, show: Show, end: list[Line]) -> None:
    """Write the feed until it ends or its reader leaves; the result of a scenario is kept."""
    async with contextlib.aclosing(feed.follow()) as lines:
        async for line in lines:
            if line["kind"] == "end":
                end.append(line)
            if not _write(show(line)):
                return


def _write(text: str) -> bool:
    """Write a text to standard output; false where its reader has closed it."""
    if not text:
        return True
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except (OSError, ValueError):
        return False
    return True


def json_of(line: Line) -> str:
    """Return the JSON of a change of the kubelet's view and of a condition, nothing for other lines."""
    if line["kind"] not in SHOWN_AS_JSON:
        return ""
    shown = {name: value for name, value in line.items() if name not in NOT_SHOWN}
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def _text_of(line: Line) -> str:
    seconds = f"{line.get('at_ms', 0) / 1000:9.3f} s  "
    match line["kind"]:
        case "allocatable":
            return seconds + describe(line)
        case "condition":
            return seconds + describe_condition(line)
        case "event" | "end":
            return f"{seconds}{line['text']}"
        case _:
            return ""


def describe(line: Mapping[str, Any]) -> str:
    """Return a change of the kubelet's view in words."""
    text = f"{line['resource']}: capacity {line['capacity']}, allocatable {line['allocatable']}"
    gpus = sorted({device["gpu"] for device in line["unhealthy"] if device["gpu"] is not None})
    return f"{text}, unhealthy on GPU {', '.join(map(str, gpus))}" if gpus else text


def describe_condition(line: Mapping[str, Any]) -> str:
    """Return a condition that was waited for in words."""
    where = "" if line["gpu"] is None else f" on GPU {line['gpu']}"
    if not line["active"]:
        return f"The agent no longer reports {line['reason']}{where}"
    kind = line["detail"]["kind"] if line["detail"] else line["reason"]
    what = line["reason"] if kind == line["reason"] else f"{line['reason']} ({kind})"
    return f"The agent reports {what}{where}: {line['message']}"


def _introduction(plan: Plan, path: Path) -> str:
    models = sorted({gpu.name for gpu in plan.spec.gpus})
    gpus = counted(len(plan.spec.gpus), "GPU")
    return "\n".join(
        [
            f"Simulated node {plan.label} in {path}: {gpus} ({', '.join(models)})",
            "Run the agent on it:",
            f"  {this_command()} run {_flags(plan, path)}",
            "Make something happen:",
            f"  {this_command()} inject xid 79 --gpu 3 --node-dir {shlex.quote(str(path))}",
            "",
        ]
    )


def _flags(plan: Plan, path: Path) -> str:
    flags = agent_flags(path) | (plan.scenario.agent_flags(path) if plan.scenario else {})
    return " \\\n    ".join(shlex.quote(f"--{name}={value}") for name, value in flags.items())


async def _wait_for_agent_exit(directory: NodeDirectory) -> None:
    """Give an agent that exits with the node a moment, so that it does not write into what is removed."""
    until_ns = time.monotonic_ns() + int(AGENT_GOES_WITHIN_S * 1e9)
    # Another process's lock cannot be awaited without a thread that might stay blocked in it.
    while _is_locked(directory.agent / "lock") and time.monotonic_ns() < until_ns:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
