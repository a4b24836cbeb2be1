"""``gpu-agent resume``: take the driver back after a release."""

import argparse
from typing import Final

from agent.commands.control import configure_control, send_and_show

_DESCRIPTION: Final = """\
Take the driver back that 'gpu-agent release' let go of, before its time is
over. Devices are Healthy again after clean probes.

Examples:
  gpu-agent resume
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    configure_control(parser, usage="resume [flags]", description=_DESCRIPTION)


def main(args: argparse.Namespace) -> int:
    """Give the order and show what came of it."""
    send_and_show(args, "resume", {})
    return 0
