"""The demo's picture of a simulated node: pure, from what the feed and the agent said.

Guarantees: no line is wider than the screen, and there are no more lines than it has.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

COLUMNS: Final = ("ID", "MODEL", "HEALTH", "REASON", "SINCE", "POD")
_LEAST: Final = {"ID": 8, "MODEL": 6, "HEALTH": 9, "REASON": 6, "SINCE": 8, "POD": 6}
"""How narrow a column may become; HEALTH and SINCE are always whole."""
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
class Picture:
    """Everything that is shown."""

    title: str
    agent: str
    resources: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    events: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


def draw(picture: Picture, *, width: int, height: int, colour: bool) -> list[str]:
    """Return the lines of a screen."""
    head = [_painted(_cut(picture.title, width), _BOLD, colour=colour), _cut(picture.agent, width)]
    head += [_painted(_cut(line, width), _BOLD, colour=colour) for line in picture.resources]
    foot = [_cut(line, width) for line in picture.events]
    # Never cut: a hint is a command to be copied.
    wrapped = [
        line
        for hint in picture.hints
        for line in textwrap.wrap(
            hint, max(width, 1), break_on_hyphens=False, subsequent_indent="  "[: width - 1]
        )
    ]
    if wrapped:
        foot += ["", *(_painted(line, _DIM, colour=colour) for line in wrapped)]
    table = _table(picture.rows, width, colour=colour)
    room = height - len(head) - len(foot) - 2
    if len(table) > room:
        hidden = len(table) - max(room - 1, 0)
        table = [*table[: max(room - 1, 0)], _cut(f"… and {hidden} more", width)]
    return [*head, "", *table, "", *foot][: max(height, 1)]


def _table(rows: Sequence[Row], width: int, *, colour: bool) -> list[str]:
    cells = [
        (
            row.id,
            row.model,
            "Healthy" if row.healthy else "Unhealthy",
            row.reason or NONE,
            row.since,
            row.pod or NONE,
        )
        for row in rows
    ]
    widths = _widths(cells, width)
    lines = [_cut(_line(COLUMNS, widths), width)]
    for row, values in zip(rows, cells, strict=True):
        line = _cut(_line(values, widths), width)
        start = widths[0] + widths[1] + 2 * _GAP
        end = start + widths[2]
        paint = _GREEN if row.healthy else _RED
        lines.append(line[:start] + _painted(line[start:end], paint, colour=colour) + line[end:])
    return lines


def _widths(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the columns' widths: as wide as their content, the widest ones narrowed until all fit."""
    widths = [max(len(values[at]) for values in (COLUMNS, *cells)) for at in range(len(COLUMNS))]
    while sum(widths) + _GAP * (len(COLUMNS) - 1) > width:
        spare = [max(widths[at] - _LEAST[name], 0) for at, name in enumerate(COLUMNS)]
        if not any(spare):
            break
        widest = max(range(len(COLUMNS)), key=lambda at: (widths[at] if spare[at] else 0, -at))
        widths[widest] -= 1
    return widths


def _line(values: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        (_middle_cut if at == 0 else _cut)(value, width).ljust(width)
        for at, (value, width) in enumerate(zip(values, widths, strict=True))
    )
    return (" " * _GAP).join(padded).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def _middle_cut(text: str, width: int) -> str:
    """Shorten an id so that its end, which tells one device from the next, stays."""
    if len(text) <= width:
        return text
    head = text[:4] if width > 10 else ""
    return f"{head}…{text[-(width - len(head) - 1) :]}"


def _painted(text: str, paint: str, *, colour: bool) -> str:
    return f"{paint}{text}{_PLAIN}" if colour and text else text
