"""``gpu-agent devices``: show each device, its health and the reason."""

import argparse
import time
from collections.abc import Sequence
from typing import Any, Final

from agent.commands.question import Question, add_question_flags, ask
from agent.commands.render import (
    DEVICE_TITLES,
    LEAST_OF_DEVICES,
    WIDE_DEVICE_TITLES,
    colour_health,
    device_rows,
    table,
    uses_colour,
)

_DESCRIPTION: Final = """\
Show each device that the running agent advertises, its health and the reason.

Examples:
  gpu-agent devices
  gpu-agent devices -o wide
  gpu-agent devices -w                again after every change
  gpu-agent devices -o json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    add_question_flags(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the answer."""
    return ask(args, _QUESTION)


def device_lines(
    devices: Sequence[dict[str, Any]], *, now_ns: int | None = None, is_wide: bool = False
) -> list[str]:
    """Return the table of devices, coloured where a terminal shows it; ``now_ns`` is monotonic."""
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    rows = device_rows(devices, now_ns=now_ns, is_wide=is_wide)
    all_titles = WIDE_DEVICE_TITLES if is_wide else DEVICE_TITLES
    titles, *lines = table(all_titles, rows, is_wide=is_wide, least=LEAST_OF_DEVICES)
    is_coloured = uses_colour()
    place = DEVICE_TITLES.index("HEALTH")
    coloured = [
        colour_health(line, row[place], is_coloured=is_coloured)
        for line, row in zip(lines, rows, strict=True)
    ]
    return [titles, *coloured]


_QUESTION: Final = Question(
    "/v1/devices",
    names=lambda document: (device["id"] for device in document["devices"]),
    lines=lambda document, now_ns, is_wide: device_lines(document["devices"], now_ns=now_ns, is_wide=is_wide),
)
