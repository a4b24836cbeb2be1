"""``gpu-agent recover``: declare a GPU healthy."""

import argparse
from typing import Final

from agent.commands.control import GPU_HELP, configure_control, send_and_show
from agent.commands.render import Output
from agent.core.wording import printable
from agent.errors import EXIT_FAILED

_DESCRIPTION: Final = """\
Declare a GPU healthy: conditions that wait for a reset, a reboot or a person
are cleared now. Conditions that are still observed stay, and so does a hold;
the answer names them with the cause. The exit code is 1 if the GPU is still
Unhealthy.

With --state, acknowledge instead that the state file is lost (state_lost):
first check the GPUs that were Unhealthy before, and hold those that must stay
so.

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
    """Send the command and show its result."""
    answer = send_and_show(args, "recover", {"state": True} if args.state else {"gpu": args.gpu})
    if Output(args.output) is Output.TABLE:
        for condition in answer["staying"]:
            print(printable(f"  {condition['code']}: {condition['message']}; {condition['stays_because']}"))
    return 0 if answer["well"] else EXIT_FAILED
