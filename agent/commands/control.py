"""Common parts of the commands that change the agent's state: their flags, and how an answer is shown."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from agent.commands.client import COMMAND_TIMEOUT_S, find_agent
from agent.commands.render import Output, add_agent_flag, show
from agent.core.wording import printable

GPU_HELP: Final = "UUID, serial, PCI address or index"


def configure_control(parser: argparse.ArgumentParser, *, usage: str, description: str) -> None:
    """Add the common flags."""
    parser.usage = f"gpu-agent {usage}"
    parser.description = description
    parser.add_argument(
        "-o",
        "--output",
        choices=[Output.TABLE.value, Output.JSON.value, Output.YAML.value],
        default=Output.TABLE.value,
        metavar="FORM",
        help="Form of the output: table (a sentence), json or yaml (default: table)",
    )
    add_agent_flag(parser)


def send_and_show(
    args: argparse.Namespace, name: str, body: Mapping[str, object], *, timeout_s: float = COMMAND_TIMEOUT_S
) -> dict[str, Any]:
    """Send a command, show its result and return the answer."""
    answer: dict[str, Any] = find_agent(args.control_socket).send_command(name, body, timeout_s=timeout_s)
    output = Output(args.output)
    if output is Output.TABLE:
        print(printable(answer["message"]))
    else:
        show(answer, output)
    return answer
