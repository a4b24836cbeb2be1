"""``gpu-agent status``: show the running agent and why the node is not ready."""

import argparse
from typing import Any, Final

from agent.client import find_agent
from agent.render import NONE, UNKNOWN, Output, add_agent_flag, add_output_flag, age, show, table

_DESCRIPTION: Final = """\
Show the running agent, what it offers, and why the node is not ready for GPU
jobs. The exit code says whether the agent answered, not what it said.

Examples:
  gpu-agent status
  gpu-agent status -o json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    add_output_flag(parser)
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the answer."""
    document: dict[str, Any] = find_agent(args.control_socket).get("/debug/state")
    output = Output(args.output)
    match output:
        case Output.JSON | Output.YAML:
            show(document, output)
        case Output.NAME:
            for resource in document["resources"]:
                print(resource["resource"])
        case Output.TABLE | Output.WIDE:
            print("\n".join(status_lines(document, is_wide=output is Output.WIDE)))
    return 0


def status_lines(document: dict[str, Any], *, is_wide: bool = False) -> list[str]:
    """Return the status for people."""
    agent = document["agent"]
    up = age(agent["uptime_s"] * 1_000_000_000)
    lines = [
        f"Agent    {agent['version']}, {agent['phase']} for {up}, process {agent['pid']}",
        f"Driver   {_driver(document['driver'])}",
        f"GPUs     {_gpus(document['gpus'])}",
        f"Ready    {'yes' if document['ready'] else 'no'}",
    ]
    for reason in document["reasons"]:
        lines.append(f"  {reason['code']}: {reason['message']}")
        lines += [f"    on {', '.join(reason['gpus'])}"] if reason["gpus"] else []
        lines.append(f"    {reason['advice']}")
    return [*lines, "", *_resources(document["resources"], is_wide=is_wide)]


def _driver(driver: dict[str, Any]) -> str:
    if driver["ready"]:
        cuda = driver["cuda_version"] or UNKNOWN
        return f"{driver['driver_version']}, NVML {driver['nvml_version']}, CUDA {cuda}"
    return str(driver["message"] or "not initialised yet")


def _gpus(gpus: list[dict[str, Any]]) -> str:
    counts = {
        health: sum(gpu["health"] == health for gpu in gpus) for health in ("healthy", "unhealthy", "unknown")
    }
    told = [f"{number} {health}" for health, number in counts.items() if number]
    return ", ".join(told) if told else NONE


def _resources(resources: list[dict[str, Any]], *, is_wide: bool) -> list[str]:
    rows = [
        [str(resource[name]) for name in ("resource", "capacity", "allocatable", "registration", "message")]
        for resource in resources
    ]
    return table(("RESOURCE", "CAPACITY", "ALLOCATABLE", "REGISTRATION", "MESSAGE"), rows, is_wide=is_wide)
