"""``gpu-agent simulate``: the simulated parts alone, for an agent started by hand or by ``demo``."""

import argparse
import asyncio
from pathlib import Path
from typing import Final

from agent.config import settings as config

DEFAULT_PRESET: Final = "dgx-h100"

EXAMPLES: Final = """\
Examples:
  gpu-agent simulate                            a DGX H100 until Ctrl-C
  gpu-agent simulate --preset 4x-t4 --json      what the kubelet shows, as JSON
  gpu-agent simulate --scenario ./my-node.yaml  a node to which things happen

exit codes: 0 ended as expected, 1 the scenario failed, 2 usage, bad scenario"""


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that simulate and demo share."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--preset",
        metavar="NAME",
        help=f"The node's hardware: {', '.join(shipped('presets'))} ({DEFAULT_PRESET})",
    )
    which.add_argument("--scenario", metavar="NAME|FILE", help="Play a scenario and end with it")
    add_node_dir(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON lines of what the kubelet shows")


def shipped(folder: str) -> list[str]:
    """Return the names of the presets or scenarios that come with the program, without reading them."""
    return sorted(path.stem for path in (Path(__file__).parent / folder).glob("*.yaml"))


def add_node_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option for the node's directory."""
    default = config.default_node_dir()
    parser.add_argument(
        "--node-dir",
        metavar="DIR",
        default=default,
        help=f"The simulated node's directory ({default})".replace("%", "%%"),
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    sentence = "Run a simulated GPU node: the driver's library, its files and a kubelet."
    parser.description = f"{sentence}\n\n{EXAMPLES}"
    add_node_options(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command; raises AgentError with what is wrong in one sentence."""
    from agent.simulation.host import host  # noqa: PLC0415 - help must be there at once
    from agent.simulation.plan import plan_of  # noqa: PLC0415

    plan = plan_of(args.scenario, args.preset or DEFAULT_PRESET)
    asyncio.run(host(plan, Path(args.node_dir), is_json=args.json))
    return 0
