"""``gpu-agent release``: release the driver for a time."""

import argparse
from typing import Final

from agent.commands.client import COMMAND_TIMEOUT_S
from agent.commands.control import GPU_HELP, configure_control, send_and_show
from agent.errors import EXIT_FAILED, UsageError

WAIT_S: Final = 30

_DESCRIPTION: Final = """\
Release the driver, so that a GPU can be reset, MIG changed or the driver
unloaded while the agent runs. The named GPUs are Unhealthy meanwhile; the
driver is released as a whole. The agent opens it again after the time, or with
'gpu-agent resume'. The command returns when the agent has closed every file of
the driver; the exit code is 1 if that takes over 30 s.

Examples:
  gpu-agent release 3 --for 2m && nvidia-smi --gpu-reset -i 3
  gpu-agent release --all --for 10m && modprobe -r nvidia_uvm nvidia
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    configure_control(parser, usage="release GPU...|--all [--for TIME] [flags]", description=_DESCRIPTION)
    parser.add_argument("gpus", metavar="GPU", nargs="*", help=GPU_HELP)
    parser.add_argument("--all", action="store_true", help="Every GPU of the node")
    parser.add_argument("--for", dest="time", metavar="TIME", default="10m", help="1s to 24h (default: 10m)")


def main(args: argparse.Namespace) -> int:
    """Send the command and show its result."""
    if args.all == bool(args.gpus):
        raise UsageError("Name the GPUs to release, or --all; see gpu-agent release --help")
    body = {"gpus": "all" if args.all else args.gpus, "for": args.time, "wait_s": WAIT_S}
    answer = send_and_show(args, "release", body, timeout_s=COMMAND_TIMEOUT_S + WAIT_S)
    return 0 if answer["driver_released"] else EXIT_FAILED
