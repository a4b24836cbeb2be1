"""The demo's view of its node, from the feed and the agent, and the three ways to show it.

Guarantees: something is written only when something changed; the screen also when its size did.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from agent.log import wall_clock
from agent.simulation.feed import Line
from agent.simulation.host import describe, describe_condition, json_of
from agent.simulation.reasons import AgentClient, Reason
from agent.simulation.table import Row, Screen, draw

MAX_EVENTS: Final = 5
PLAIN_WIDTH: Final = 120
"""Columns of a table that is not for a screen."""
_UP: Final = "\x1b[{}F\x1b[J"
_CLEAR: Final = "\x1b[2J\x1b[H"


class Output(Protocol):
    """Where a demo shows what happens."""

    async def show_line(self, line: Line) -> bool:
        """Show a line of the feed; false when standard output is closed."""


class JsonLines:
    """The kubelet's view as JSON lines, with the agent's reasons beside each unhealthy device."""

    def __init__(self, agent: AgentClient) -> None:
        self._agent = agent

    async def show_line(self, line: Line) -> bool:
        """Print a change of the kubelet's view, or a condition that the scenario waited for."""
        if line["kind"] != "allocatable":
            text = json_of(line)
            return write(f"{text}\n") if text else True
        reasons = await reasons_of(self._agent, line)
        unhealthy = [device | _spelled(reasons[device["id"]]) for device in line["unhealthy"]]
        return write(json_of({**line, "unhealthy": unhealthy}) + "\n")


async def reasons_of(agent: AgentClient, line: Line) -> Mapping[str, Reason]:
    """Return why devices are unhealthy in a change of the kubelet's view."""
    ids = [device["id"] for device in line["unhealthy"]]
    return await agent.reasons(line["resource"], ids, at_ns=line["at_ns"], connected=line["connected"])


def _spelled(reason: Reason) -> dict[str, Any]:
    spelled = {
        "reason": reason.code,
        "evidence": reason.evidence,
        "number": reason.number,
        "message": reason.message,
    }
    return spelled if reason.detail is None else spelled | {"detail": reason.detail}


def write(text: str) -> bool:
    """Write to standard output; false where its reader has closed it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        # What Python has still buffered would fail once more at the exit, with a traceback.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    return True


@dataclass(slots=True)
class _Seen:
    healthy: bool
    since: str


@dataclass(slots=True)
class View:
    """The node as last heard of."""

    node_dir: str
    hints: tuple[str, ...] = ()
    label: str = ""
    """Empty until the node was heard of."""
    models: dict[int, str] = field(default_factory=dict)
    allocatable: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    devices: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    reasons: dict[str, Mapping[str, Reason]] = field(default_factory=dict)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    agent: str = "agent: starting"
    seen: dict[str, _Seen] = field(default_factory=dict)

    def apply_line(self, line: Line) -> None:
        """Apply a line of the feed."""
        match line["kind"]:
            case "node":
                self.label = line["label"]
                self.models = {gpu["gpu"]: gpu["model"] for gpu in line["gpus"]}
            case "allocatable":
                self.allocatable[line["resource"]] = line
                self.note(describe(line))
            case "devices":
                self._apply_devices(line)
            case "condition":
                self.note(describe_condition(line))
            case "event" | "end" | "error":
                self.note(line["text"])
            case _:
                pass

    def _apply_devices(self, line: Line) -> None:
        self.devices[line["resource"]] = line["devices"]
        for device in line["devices"]:
            seen = self.seen.get(device["id"])
            if seen is None or seen.healthy != device["healthy"]:
                self.seen[device["id"]] = _Seen(device["healthy"], _now())
        known = {device["id"] for devices in self.devices.values() for device in devices}
        for id_ in self.seen.keys() - known:
            del self.seen[id_]

    def note(self, text: str) -> None:
        """Remember something that happened."""
        self.events.append(f"{_now()}  {text}")

    def screen(self) -> Screen:
        """Return what is to be drawn."""
        rows = [
            self._row(device, self.reasons.get(resource, {}))
            for resource, devices in sorted(self.devices.items())
            for device in sorted(devices, key=lambda each: (each["gpu"] is None, each["gpu"], each["id"]))
        ]
        counts = [
            f"{name}: capacity {line['capacity']}, allocatable {line['allocatable']} (kubelet's view)"
            for name, line in sorted(self.allocatable.items())
        ]
        return Screen(
            title=f"Simulated node {self.label} in {self.node_dir}",
            agent=self.agent,
            resources=tuple(counts) or ("The kubelet knows no GPU yet",),
            rows=tuple(rows),
            events=tuple(self.events),
            hints=self.hints,
        )

    def _row(self, device: Mapping[str, Any], reasons: Mapping[str, Reason]) -> Row:
        id_ = device["id"]
        return Row(
            id=id_,
            model=self.models.get(device["gpu"], "<unknown>").removeprefix("NVIDIA "),
            healthy=device["healthy"],
            reason="" if device["healthy"] else str(reasons.get(id_, Reason())),
            since=self.seen[id_].since,
            pod=device["pod"] or "",
        )


def _now() -> str:
    return wall_clock().astimezone().strftime("%H:%M:%S")


class Tables:
    """A table on each change: on a terminal in place, else one below the other."""

    def __init__(self, view: View, agent: AgentClient, *, is_terminal: bool) -> None:
        self._view = view
        self._agent = agent
        self._is_terminal = is_terminal and os.environ.get("TERM") != "dumb"
        self._colour = self._is_terminal and not os.environ.get("NO_COLOR")
        self._lines: list[str] = []
        self._writable = True

    async def show_line(self, line: Line) -> bool:
        """Show a line of the feed; devices come after each change of what is allocatable."""
        if line["kind"] == "allocatable":
            reasons = await reasons_of(self._agent, line)
            self._view.reasons[line["resource"]] = reasons
        self._view.apply_line(line)
        if line["kind"] != "allocatable":
            self.show()
        return self._writable

    def show(self) -> None:
        """Draw the node once it is known; nothing is written if nothing changed."""
        if not self._view.label:
            return
        size = shutil.get_terminal_size((PLAIN_WIDTH, 1_000)) if self._is_terminal else None
        width, height = (size.columns, size.lines) if size else (PLAIN_WIDTH, 10_000)
        lines = draw(self._view.screen(), width=width, height=height - 1, colour=self._colour)
        if lines == self._lines:
            return
        up = _UP.format(len(self._lines)) if self._is_terminal and self._lines else ""
        self._lines = lines
        end = "\n" if self._is_terminal else "\n\n"
        self._writable = write(up + "\n".join(lines) + end) and self._writable

    def anew(self) -> None:
        """Draw everything anew, because the screen has another size and its lines may have moved."""
        self._lines = []
        if write(_CLEAR):
            self.show()

    def set_agent(self, text: str) -> None:
        """Show another line about the agent."""
        self._view.agent = text
        self.show()

    def watch_size(self) -> None:
        """Draw anew whenever the terminal's size changes."""
        if self._is_terminal:
            asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, self.anew)

    def close(self) -> None:
        """Draw no more."""
        if self._is_terminal:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGWINCH)
