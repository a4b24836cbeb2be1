"""Writes documents for people and programs: tables, JSON, YAML, names.

Invariants: a table has no spaces in its titles. On a terminal it is no wider than that, unless it is the wide
one: the least important columns are omitted first, then lines are cut. Elsewhere nothing is cut.
``<unknown>`` is a value that was not read, ``<none>`` one that does not exist.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, TextIO

from agent.core.wording import printable
from agent.log import printable_json, wall_clock

NONE: Final = "<none>"
UNKNOWN: Final = "<unknown>"

_COLOURS: Final = {"healthy": "32", "unhealthy": "31", "unknown": "33"}
_GAP: Final = "  "

Json = Mapping[str, object]


class Output(StrEnum):
    """Forms of output."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def add_output_flag(parser: argparse.ArgumentParser, *forms: Output) -> None:
    """Add ``-o`` with these forms, or all; the first is the default."""
    names = [form.value for form in forms or Output]
    parser.add_argument(
        "-o",
        "--output",
        choices=names,
        default=names[0],
        metavar="FORM",
        help=f"Form of the output: {', '.join(names[:-1])} or {names[-1]} (default: {names[0]})",
    )


def add_agent_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--control-socket``."""
    parser.add_argument(
        "--control-socket",
        metavar="PATH",
        help="Socket of the agent (default: /run/gpu-agent/control.sock, else that of the simulated "
        "node; GPU_AGENT_CONTROL_SOCKET)",
    )


def for_people(document: Any) -> Any:
    """Return a document whose texts hold no terminal control sequence of a driver, pod or process."""
    if isinstance(document, str):
        return printable(document)
    if isinstance(document, list):
        return [for_people(each) for each in document]
    if isinstance(document, dict):
        return {key: for_people(value) for key, value in document.items()}
    return document


def show(document: object, output: Output) -> None:
    """Print a document as JSON or YAML."""
    if output is Output.YAML:
        import yaml  # noqa: PLC0415 - only for -o yaml

        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        if not text.replace("\n", "").isprintable():
            text = yaml.safe_dump(document, sort_keys=False)
        print(text, end="")
    else:
        print(printable_json(document, indent=2))


def width() -> int:
    """Return the columns of standard output; unlimited where it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    is_wide: bool = False,
    least: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a table; on a terminal without the ``least`` columns that do not fit."""
    columns = [tuple(map(printable, column)) for column in zip(titles, *rows, strict=True)]
    widths = [max(len(cell) for cell in column) for column in columns]
    room = sys.maxsize if is_wide else width()
    for title in least:
        if sum(widths) + len(_GAP) * (len(widths) - 1) > room:
            place = [column[0] for column in columns].index(title)
            del columns[place], widths[place]
    lines = []
    for row in zip(*columns, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(fitted(_GAP.join(cells).rstrip(), is_wide=is_wide))
    return lines


def cut(text: str, columns: int) -> str:
    """Return a text without its middle if it is too long: names of pods differ at their ends."""
    if len(text) <= columns:
        return text
    end = columns // 3
    return f"{text[: columns - end - 1]}…{text[-end:]}"


def fitted(text: str, columns: int | None = None, *, is_wide: bool = False) -> str:
    """Return a text cut to the terminal's width; whole elsewhere and in wide output."""
    room = width() if columns is None else columns
    if is_wide or len(text) <= room or not sys.stdout.isatty():
        return text
    return text[: room - 1] + "…"


def share(columns: int) -> int:
    """Return the width of a cell, in proportion to its share of a terminal of 80 columns."""
    return columns * max(width(), 80) // 80 if sys.stdout.isatty() else columns


def local_time(text: str) -> str:
    """Return a moment of a document in this machine's zone, with the day where it is not today."""
    try:
        moment = datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        return text
    is_today = moment.date() == wall_clock().astimezone().date()
    return moment.strftime("%H:%M:%S%z" if is_today else "%Y-%m-%d %H:%M:%S%z")


def device_rows(devices: Sequence[Json], *, now_ns: int, is_wide: bool) -> list[list[str]]:
    """Return the rows of the table of devices; ``now_ns`` is monotonic, as the document's moments."""
    ids = [str(device["id"]) for device in devices]
    shown = ids if is_wide or ROOM <= width() < sys.maxsize else short_ids(ids)
    return [
        _device_row(device, name, now_ns, is_wide=is_wide)
        for device, name in zip(devices, shown, strict=True)
    ]


DEVICE_TITLES: Final = ("GPU", "ID", "MODEL", "HEALTH", "REASON", "SINCE", "POD")
WIDE_DEVICE_TITLES: Final = (*DEVICE_TITLES, "NUMA", "RESOURCE", "PCI", "MESSAGE")
LEAST_OF_DEVICES: Final = ("MODEL", "SINCE", "POD", "ID")
"""Columns that a narrow terminal omits, the first one first; commands accept the index."""
ROOM: Final = 120
"""Width from which ids and models are shown whole."""


def _device_row(device: Json, name: str, now_ns: int, *, is_wide: bool) -> list[str]:
    reasons = device.get("reasons")
    first = reasons[0] if isinstance(reasons, list) and reasons else None
    row = [
        _index(device),
        name,
        _model(device.get("model"), is_wide=is_wide),
        str(device["health"]),
        reason_of(first),
        age_of(first, now_ns),
        pod_of(device),
    ]
    if is_wide:
        row += [_text(device.get(name)) for name in ("numa_node", "resource", "pci")]
        row.append(_text(first.get("message")) if isinstance(first, dict) else NONE)
    return row


def _index(device: Json) -> str:
    """Return NVML's index, as commands accept it, with the instances of a MIG device."""
    index = _text(device.get("gpu"))
    return index if device.get("gi") is None else f"{index}/gi{device['gi']}/ci{device['ci']}"


def short_ids(ids: Sequence[str]) -> list[str]:
    """Return ids cut as far as they stay unique: ``GPU-8f6d3c2e::1``, else ``GPU-…00ab12cd``, else whole."""
    for cut in (_head, _tail):
        shown = [cut(*device_id.partition("::")) for device_id in ids]
        if len(set(shown)) == len(set(ids)):
            return shown
    return list(ids)


def _head(uuid: str, separator: str, replica: str) -> str:
    return uuid[:12] + separator + replica


def _tail(uuid: str, separator: str, replica: str) -> str:
    return f"{uuid[:4]}…{uuid[-8:]}{separator}{replica}"


def reason_of(condition: object) -> str:
    """Return a reason in short: ``xid 79``, ``gpu_lost``."""
    if not isinstance(condition, Mapping):
        return NONE
    number = condition.get("number")
    return (
        f"{condition['code']} {number}" if condition["code"] == "xid" and number else str(condition["code"])
    )


def pod_of(device: Json) -> str:
    """Return the pod that holds a device, as ``namespace/name``."""
    if device.get("allocated") is None:
        return UNKNOWN
    return _text(device.get("pod")) if device["allocated"] else NONE


def age_of(condition: object, now_ns: int) -> str:
    """Return how long a condition has lasted."""
    if not isinstance(condition, Mapping):
        return NONE
    since_ns = condition.get("since_monotonic_ns")
    return age(now_ns - since_ns) if isinstance(since_ns, int) and since_ns else UNKNOWN


def age(duration_ns: int) -> str:
    """Return a time span as kubectl does: ``42s``, ``3m12s``, ``5h3m``, ``2d4h``."""
    seconds = max(0, duration_ns // 1_000_000_000)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86_400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60}m"
    return f"{minutes}m{seconds % 60}s" if minutes else f"{seconds}s"


def size(count: object) -> str:
    """Return a number of bytes in MiB, as NVIDIA's tools show memory."""
    return f"{count // 2**20}MiB" if isinstance(count, int) else UNKNOWN


def colour_health(line: str, health: str, *, is_coloured: bool) -> str:
    """Return a line of a table with the health in colour."""
    if not is_coloured or health not in _COLOURS:
        return line
    return line.replace(f" {health} ", f" \x1b[{_COLOURS[health]}m{health}\x1b[0m ", 1)


def uses_colour(stream: TextIO = sys.stdout) -> bool:
    """Return whether to colour: on a terminal, unless NO_COLOR is set."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that supports control sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _model(name: object, *, is_wide: bool) -> str:
    if not name:
        return UNKNOWN
    return fitted(str(name).removeprefix("NVIDIA "), 18 if width() < ROOM else width(), is_wide=is_wide)


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
