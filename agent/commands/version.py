"""``gpu-agent version``: show the version."""

import argparse
import platform

from agent import __version__
from agent.commands.render import Output, add_output_flag, show


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = "Show the version.\n\nExamples:\n  gpu-agent version\n  gpu-agent version -o json\n"
    add_output_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Print the version."""
    python = platform.python_version()
    document: dict[str, object] = {"apiVersion": "gpu-agent/v1", "version": __version__, "python": python}
    output = Output(args.output)
    match output:
        case Output.TABLE | Output.WIDE:
            print(f"gpu-agent {__version__} (Python {python}, {platform.machine()})")
        case Output.NAME:
            print(__version__)
        case Output.JSON | Output.YAML:
            show(document, output)
    return 0
