"""``gpu-agent demo``: a whole simulated node in one terminal, with the real agent on it."""

import argparse
import asyncio
import shlex
import textwrap
from pathlib import Path
from typing import Final

from agent.config import settings as config
from agent.simulation.command_name import this_command
from agent.simulation.simulate import DEFAULT_PRESET, add_node_options, shipped

EXAMPLES: Final = """\
Examples:
  gpu-agent demo                            a live table of a DGX H100
  gpu-agent inject xid 79 --gpu 3           in a second terminal: a GPU breaks
  gpu-agent demo --scenario xid-79 --json   the same by itself, as JSON lines"""
EXIT_CODES: Final = "exit codes: 0 ended as expected, 1 failed, 2 usage or bad scenario"


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    sentence = "Show a simulated GPU node with the agent on it: no GPU and no cluster needed."
    names = ", ".join(shipped("scenarios"))
    scenarios = textwrap.fill(f"scenarios: {names}, or a file of your own", 78, break_on_hyphens=False)
    parser.description = f"{sentence}\n\n{EXAMPLES}\n\n{scenarios}\n{EXIT_CODES}"
    add_node_options(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command; raises AgentError with what is wrong in one sentence."""
    from agent.simulation.plan import plan_of  # noqa: PLC0415 - help must be there at once
    from agent.simulation.supervise import Demo, demo  # noqa: PLC0415

    preset = args.preset or DEFAULT_PRESET
    plan = plan_of(args.scenario, preset)
    node_dir = Path(args.node_dir).absolute()
    wanted = Demo(
        plan=plan,
        node_dir=node_dir,
        node_arguments=(f"--scenario={args.scenario}",)
        if args.scenario is not None
        else (f"--preset={preset}",),
        is_json=args.json,
        hints=_hints(node_dir, is_scripted=plan.scenario is not None),
    )
    asyncio.run(demo(wanted))
    return 0


def _hints(node_dir: Path, *, is_scripted: bool) -> tuple[str, ...]:
    if is_scripted:
        return ()
    elsewhere = str(node_dir) != str(Path(config.default_node_dir()).absolute())
    where = f" --node-dir {shlex.quote(str(node_dir))}" if elsewhere else ""
    return (f"In a second terminal: {this_command()} inject xid 79 --gpu 3{where}", "Ctrl-C ends the demo")
