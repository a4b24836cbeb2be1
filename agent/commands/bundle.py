"""``gpu-agent bundle``: save the evidence of a GPU, for an RMA."""

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from agent.commands.client import AgentClient, find_agent
from agent.commands.control import GPU_HELP
from agent.commands.render import add_agent_flag
from agent.core.wording import printable
from agent.errors import EXIT_FAILED, AgentError
from agent.log import printable_json

_DESCRIPTION: Final = """\
Save the evidence of a GPU: serial, part number, VBIOS and InfoROM, driver,
conditions, readings, XID counts, its events and the driver's lines in the
kernel log. The agent does so by itself at the first hard fault of a GPU; it
keeps the newest 16 bundles of each kind in the folder evidence of its state
directory. Without a GPU the command saves one bundle for each.

Examples:
  gpu-agent bundle 3                  prints the path of the bundle
  gpu-agent bundle 3 -o gpu3.json     writes it there too, prints both paths
  gpu-agent bundle -o - | jq .
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "gpu-agent bundle [GPU] [-o FILE] [flags]"
    parser.description = _DESCRIPTION
    parser.add_argument("gpu", metavar="GPU", nargs="?", help=GPU_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", help='Also write it here; "-" is standard output')
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Send the command and show where the bundles are."""
    agent = find_agent(args.control_socket)
    answers = [agent.send_command("bundle", {"gpu": gpu}) for gpu in _gpus(agent, args.gpu)]
    if args.output:
        _write(args.output, [answer["bundle"] for answer in answers])
        if args.output != "-":
            print(args.output)
    is_kept = True
    for answer in answers:
        is_kept = is_kept and answer["path"] is not None
        stream = sys.stdout if answer["path"] and args.output != "-" else sys.stderr
        print(printable(str(answer["message"])), file=stream)
    return 0 if is_kept or args.output else EXIT_FAILED


def _gpus(agent: AgentClient, wanted: str | None) -> list[str]:
    if wanted is not None:
        return [wanted]
    state: dict[str, Any] = agent.get("/debug/state")
    gpus = [str(gpu["uuid"]) for gpu in state["gpus"]]
    if not gpus:
        raise AgentError("The agent knows no GPU yet, so there is nothing to save")
    return gpus


def _write(path: str, bundles: list[object]) -> None:
    document = bundles[0] if len(bundles) == 1 else {"apiVersion": "gpu-agent/v1", "bundles": bundles}
    text = printable_json(document, indent=1) + "\n"
    if path == "-":
        print(text, end="")
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise AgentError(f"Could not write {path}: {error.strerror}") from None
