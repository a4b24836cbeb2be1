"""``gpu-agent hold``: take a GPU out until it is given back."""

import argparse
from typing import Final

from agent.commands.control import GPU_HELP, configure_control, send_and_show

_DESCRIPTION: Final = """\
Take a GPU out until 'gpu-agent unhold' gives it back: its devices are
Unhealthy, over restarts of the agent and over reboots. Pods that have it keep
it. A hold by serial follows the board, one by PCI address stays at the slot.

Examples:
  gpu-agent hold 3 --why "fan is loud, ticket 4711"
  gpu-agent hold 0000:3b:00.0 --why "slot under test"
  gpu-agent hold 1324523000003 --why "back from RMA" --even-if-absent
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    configure_control(parser, usage="hold GPU --why TEXT [flags]", description=_DESCRIPTION)
    parser.add_argument("gpu", metavar="GPU", help=GPU_HELP)
    parser.add_argument("--why", metavar="TEXT", required=True, help="The reason, shown wherever the GPU is")
    parser.add_argument("--even-if-absent", action="store_true", help="Also hold what is not there now")


def main(args: argparse.Namespace) -> int:
    """Send the command and show what came of it."""
    body: dict[str, object] = {"selector": args.gpu, "why": args.why}
    send_and_show(args, "hold", body | ({"even_if_absent": True} if args.even_if_absent else {}))
    return 0
