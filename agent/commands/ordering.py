"""What commands that give orders have in common: their flags, and how an answer is shown."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from agent.commands.client import ORDER_TIMEOUT_S, find_agent
from agent.commands.render import Output, add_agent_flag, show
from agent.core.wording import printable

GPU_HELP: Final = "UUID, serial, PCI address or index"


def configure_order(parser: argparse.ArgumentParser, *, usage: str, description: str) -> None:
    """Add what every order has."""
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


def obeyed(
    args: argparse.Namespace, name: str, order: Mapping[str, object], *, timeout_s: float = ORDER_TIMEOUT_S
) -> dict[str, Any]:
    """Give an order and show what came of it; returns the answer."""
    answer: dict[str, Any] = find_agent(args.control_socket).order(name, order, timeout_s=timeout_s)
    output = Output(args.output)
    if output is Output.TABLE:
        print(printable(answer["message"]))
    else:
        show(answer, output)
    return answer
