"""The demo's screen of a simulated node: pure, from the feed and the agent's answers.

Guarantees: no line is wider than the screen, and there are no more lines than it has.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.core.wording import printable

COLUMNS: Final = ("ID", "MODEL", "HEALTH", "REASON", "SINCE", "POD")
_LEAST: Final = {"ID": 8, "MODEL": 6, "HEALTH": 9, "REASON": 6, "SINCE": 8, "POD": 6}
"""How narrow a column may become; HEALTH and SINCE are always whole."""
_OMITTED_FIRST: Final = ("MODEL", "POD", "SINCE")
"""Columns that a narrow screen goes without, in this order."""
_GAP: Final = 2
NONE: Final = "<none>"

_RED: Final = "\x1b[31m"
_GREEN: Final = "\x1b[32m"
_BOLD: Final = "\x1b[1m"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Row:
    """A device; ``since`` is the time of day of its last change."""

    id: str
    model: str
    healthy: bool
    reason: str
    since: str
    pod: str


@dataclass(frozen=True, slots=True)
class Screen:
    """Everything that is shown."""

    title: str
    agent: str
    resources: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    events: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


def draw(screen: Screen, *, width: int, height: int, colour: bool) -> list[str]:
    """Return the lines of a screen."""
    head = [_painted(_cut(screen.title, width), _BOLD, colour=colour), _cut(screen.agent, width)]
    head += [_painted(_cut(line, width), _BOLD, colour=colour) for line in screen.resources]
    foot = [_cut(line, width) for line in screen.events]
    # Never cut: a hint is a command to be copied.
    wrapped = [
        line
        for hint in screen.hints
        for line in textwrap.wrap(
            hint, max(width, 1), break_on_hyphens=False, subsequent_indent="  "[: width - 1]
        )
    ]
    hints = ["", *(_painted(line, _DIM, colour=colour) for line in wrapped)] if wrapped else []
    table = _table(screen.rows, width, colour=colour)
    # The table is what the screen is for: hints give way to it, then what happened, then all but the title.
    room = height - len(table) - 2
    if len(head) + len(foot) + len(hints) > room:
        hints = []
    foot = foot[max(0, len(head) + len(foot) - max(room, len(head))) :]
    if len(head) > room:
        head, foot = head[:1], []
    lines = [*head, "", *table, "", *foot, *hints] if foot or hints else [*head, *table]
    if len(lines) <= height:
        return lines
    return [*_unhealthy_first(screen, head, width, height, colour=colour)][: max(height, 1)]


def _unhealthy_first(
    screen: Screen, head: Sequence[str], width: int, height: int, *, colour: bool
) -> list[str]:
    """Return a screen that has no room for all devices: those that are Unhealthy come first."""
    rows = sorted(screen.rows, key=lambda row: row.healthy)
    room = max(height - len(head) - 2, 0)
    table = _table(rows[:room], width, colour=colour)
    return [*head, *table, _cut(f"… and {len(rows) - room} more", width)]


def _table(rows: Sequence[Row], width: int, *, colour: bool) -> list[str]:
    columns = _columns(width)
    cells = [[_cells(row)[name] for name in columns] for row in rows]
    widths = _widths(columns, cells, width)
    lines = [_cut(_line(columns, widths), width)]
    for row, values in zip(rows, cells, strict=True):
        line = _cut(_line(values, widths), width)
        place = columns.index("HEALTH")
        start = sum(widths[:place]) + place * _GAP
        end = start + widths[place]
        paint = _GREEN if row.healthy else _RED
        lines.append(line[:start] + _painted(line[start:end], paint, colour=colour) + line[end:])
    return lines


def _columns(width: int) -> list[str]:
    """Return the columns that a screen has room for at their narrowest."""
    columns = list(COLUMNS)
    for name in _OMITTED_FIRST:
        if sum(_LEAST[each] for each in columns) + _GAP * (len(columns) - 1) > width:
            columns.remove(name)
    return columns


def _cells(row: Row) -> dict[str, str]:
    return {
        "ID": row.id,
        "MODEL": row.model,
        "HEALTH": "Healthy" if row.healthy else "Unhealthy",
        "REASON": row.reason or NONE,
        "SINCE": row.since,
        "POD": row.pod or NONE,
    }


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the columns' widths: as wide as their content, the widest ones narrowed until all fit."""
    widths = [max(len(values[at]) for values in (columns, *cells)) for at in range(len(columns))]
    while sum(widths) + _GAP * (len(columns) - 1) > width:
        spare = [max(widths[at] - _LEAST[name], 0) for at, name in enumerate(columns)]
        if not any(spare):
            break
        widest = max(range(len(columns)), key=lambda at: (widths[at] if spare[at] else 0, -at))
        widths[widest] -= 1
    return widths


def _line(values: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        (_middle_cut if at == 0 else _cut)(value, width).ljust(width)
        for at, (value, width) in enumerate(zip(values, widths, strict=True))
    )
    return (" " * _GAP).join(padded).rstrip()


def _cut(text: str, width: int) -> str:
    text = printable(text)
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def _middle_cut(text: str, width: int) -> str:
    """Shorten an id so that its end, which distinguishes the devices, stays."""
    if len(text) <= width:
        return text
    head = text[:4] if width > 10 else ""
    return f"{head}…{text[-(width - len(head) - 1) :]}"


def _painted(text: str, paint: str, *, colour: bool) -> str:
    return f"{paint}{text}{_PLAIN}" if colour and text else text
