"""``gpu-agent topology``: show how the GPUs are connected."""

import argparse
from collections.abc import Sequence
from typing import Any, Final, cast

from agent.commands.client import find_agent
from agent.commands.render import UNKNOWN, Output, add_agent_flag, add_output_flag, for_people, show, table

_DESCRIPTION: Final = """\
Show how the GPUs of this node are connected, and their CPU and NUMA affinity,
as nvidia-smi topo -m does. The agent prefers GPUs for a container by these
connections.

Examples:
  gpu-agent topology
  gpu-agent topology -o json
"""

LEGEND: Final = """\
X     the GPU itself
NV#   # NVLinks, directly or through NVSwitches
PIX   at most one PCIe switch
PXB   several PCIe switches, without a PCIe host bridge
PHB   a PCIe host bridge, which is usually the CPU
NODE  PCIe and the way between the host bridges of one NUMA node
SYS   PCIe and the way between NUMA nodes
?     unknown: not read yet, not reported by the driver, or the GPU is lost"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    add_output_flag(parser, Output.TABLE, Output.JSON, Output.YAML)
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the answer."""
    document = find_agent(args.control_socket).get("/v1/topology")
    output = Output(args.output)
    if output is Output.TABLE:
        print("\n".join(topology_lines(cast("list[dict[str, Any]]", for_people(document["gpus"])))))
    else:
        show(document, output)
    return 0


def topology_lines(gpus: Sequence[dict[str, Any]]) -> list[str]:
    """Return the matrix of connections for people, with its legend."""
    names = [_name(gpu) for gpu in gpus]
    rows = []
    for name, gpu in zip(names, gpus, strict=True):
        kinds = {link["uuid"]: link["kind"] or "?" for link in gpu["links"]}
        cells = [kinds.get(other["uuid"], "X" if other is gpu else "?") for other in gpus]
        rows.append([name, *cells, _text(gpu["cpu_affinity"]), _text(gpu["numa_node"])])
    lines = table(("GPU", *names, "CPU-AFFINITY", "NUMA-AFFINITY"), rows, is_wide=True)
    return [*lines, "", *LEGEND.splitlines()]


def _name(gpu: dict[str, Any]) -> str:
    """Return the name of a GPU: its index, or its PCI address if NVML does not list it."""
    return f"GPU{gpu['gpu']}" if gpu["gpu"] is not None else str(gpu["pci"])


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
