"""``gpu-agent resume``: open the driver again after a release."""

import argparse
from typing import Final

from agent.commands.control import configure_control, send_and_show

_DESCRIPTION: Final = """\
Open the driver again before the time of 'gpu-agent release' is over. Devices
are Healthy again after clean probes.

Examples:
  gpu-agent resume
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    configure_control(parser, usage="resume [flags]", description=_DESCRIPTION)


def main(args: argparse.Namespace) -> int:
    """Send the command and show its result."""
    send_and_show(args, "resume", {})
    return 0
