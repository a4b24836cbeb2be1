"""``gpu-agent recover``: declare a GPU well."""

import argparse
from typing import Final

from agent.commands.control import GPU_HELP, configure_control, send_and_show
from agent.commands.render import Output
from agent.core.wording import printable
from agent.errors import EXIT_FAILED

_DESCRIPTION: Final = """\
Declare a GPU well: what was reported of it and waits for a reset, a reboot or
a person ends now. What is still seen stays, and so does a hold; the answer
says which and why. The exit code is 1 if the GPU is still Unhealthy.

With --state, acknowledge instead that the state file is lost (state_lost):
check the GPUs that were out before, and hold those that must stay out, first.

Examples:
  gpu-agent recover 3
  gpu-agent recover 0000:3b:00.0 -o json
  gpu-agent recover --state
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    configure_control(parser, usage="recover (GPU | --state) [flags]", description=_DESCRIPTION)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("gpu", metavar="GPU", nargs="?", help=GPU_HELP)
    what.add_argument("--state", action="store_true", help="Acknowledge that the state file is lost")


def main(args: argparse.Namespace) -> int:
    """Give the order and show what came of it."""
    answer = send_and_show(args, "recover", {"state": True} if args.state else {"gpu": args.gpu})
    if Output(args.output) is Output.TABLE:
        for condition in answer["staying"]:
            print(printable(f"  {condition['code']}: {condition['message']}; {condition['stays_because']}"))
    return 0 if answer["well"] else EXIT_FAILED
