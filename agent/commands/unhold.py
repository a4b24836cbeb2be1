"""``gpu-agent unhold``: return a held GPU to service."""

import argparse
from typing import Final

from agent.commands.control import GPU_HELP, configure_control, send_and_show

_DESCRIPTION: Final = """\
Return a GPU to service that 'gpu-agent hold' keeps Unhealthy. Any of its names
will do, whichever it was held by.

Examples:
  gpu-agent unhold 3
  gpu-agent unhold GPU-8f6d3c2e-5a1b-4c0d-9e7f-00112233aabb
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    configure_control(parser, usage="unhold GPU [flags]", description=_DESCRIPTION)
    parser.add_argument("gpu", metavar="GPU", help=GPU_HELP)


def main(args: argparse.Namespace) -> int:
    """Send the command and show its result."""
    send_and_show(args, "unhold", {"selector": args.gpu})
    return 0
