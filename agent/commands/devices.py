"""``gpu-agent devices``: show each device, its health and the reason."""

import argparse
import time
from collections.abc import Sequence
from typing import Any, Final, cast

from agent.commands.client import find_agent
from agent.commands.render import (
    DEVICE_TITLES,
    WIDE_DEVICE_TITLES,
    Output,
    add_agent_flag,
    add_output_flag,
    colour_health,
    device_rows,
    show,
    table,
    uses_colour,
)

_DESCRIPTION: Final = """\
Show each device that the running agent offers, its health and the reason.

Examples:
  gpu-agent devices
  gpu-agent devices -o wide
  gpu-agent devices -o json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    add_output_flag(parser)
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the answer."""
    document = find_agent(args.control_socket).get("/v1/devices")
    devices = cast("list[dict[str, Any]]", document["devices"])
    output = Output(args.output)
    match output:
        case Output.JSON | Output.YAML:
            show(document, output)
        case Output.NAME:
            for device in devices:
                print(device["id"])
        case Output.TABLE | Output.WIDE:
            print("\n".join(device_lines(devices, is_wide=output is Output.WIDE)))
    return 0


def device_lines(devices: Sequence[dict[str, Any]], *, is_wide: bool = False) -> list[str]:
    """Return the table of devices, coloured where a terminal shows it."""
    rows = device_rows(devices, now_ns=time.monotonic_ns(), is_wide=is_wide)
    titles, *lines = table(WIDE_DEVICE_TITLES if is_wide else DEVICE_TITLES, rows, is_wide=is_wide)
    is_coloured = uses_colour()
    coloured = [
        colour_health(line, row[2], is_coloured=is_coloured) for line, row in zip(lines, rows, strict=True)
    ]
    return [titles, *coloured]
