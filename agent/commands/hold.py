"""``gpu-agent hold``: keep a GPU Unhealthy until unhold."""

import argparse
from typing import Final

from agent.commands.control import GPU_HELP, configure_control, send_and_show

_DESCRIPTION: Final = """\
Keep a GPU Unhealthy until 'gpu-agent unhold', over restarts of the agent and
over reboots. Pods that have it keep it. A hold by serial follows the board,
one by PCI address stays at the slot.

Examples:
  gpu-agent hold 3 --why "fan is loud, ticket 4711"
  gpu-agent hold 0000:3b:00.0 --why "slot under test"
  gpu-agent hold 1324523000003 --why "back from RMA" --even-if-absent
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    configure_control(parser, usage="hold GPU --why TEXT [flags]", description=_DESCRIPTION)
    parser.add_argument("gpu", metavar="GPU", help=GPU_HELP)
    parser.add_argument("--why", metavar="TEXT", required=True, help="The reason, shown with the GPU")
    parser.add_argument("--even-if-absent", action="store_true", help="Also hold a GPU that is absent now")


def main(args: argparse.Namespace) -> int:
    """Send the command and show its result."""
    body: dict[str, object] = {"selector": args.gpu, "why": args.why}
    send_and_show(args, "hold", body | ({"even_if_absent": True} if args.even_if_absent else {}))
    return 0
