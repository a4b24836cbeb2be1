"""``gpu-agent describe``: everything the agent knows of one GPU, on one page."""

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from agent.commands.client import AgentClient, find_agent
from agent.commands.control import GPU_HELP
from agent.commands.events import event_line
from agent.commands.owners import owner_lines
from agent.commands.render import (
    NONE,
    UNKNOWN,
    Output,
    add_agent_flag,
    add_output_flag,
    age,
    for_people,
    local_time,
    reason_of,
    show,
    size,
    table,
)
from agent.core.wording import listed
from agent.errors import UsageError
from agent.model.ids import pci_sysfs_name

MAX_EVENTS: Final = 20
"""Newest events of the GPU on the page; JSON has all."""

_DESCRIPTION: Final = """\
Show everything the agent knows of one GPU: identity, health and its history,
conditions with the next step of each, allocation and use, newest readings and
counters.

Examples:
  gpu-agent describe 3
  gpu-agent describe 0000:3b:00.0
  gpu-agent describe 3 -o json
"""

_IDENTITY: Final = {
    "uuid": "UUID",
    "pci": "PCI address",
    "serial": "Serial",
    "part_number": "Part number",
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "numa_node": "NUMA node",
}
_UNITS: Final = {"celsius": " °C"}
"""What stands behind a reading whose name ends so."""
_TERMS: Final = {"ecc": "ECC", "pcie": "PCIe", "hw": "hardware", "nvlink": "NVLink"}

Json = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "gpu-agent describe GPU [flags]"
    parser.description = _DESCRIPTION
    parser.add_argument("gpu", metavar="GPU", help=GPU_HELP)
    add_output_flag(parser, Output.TABLE, Output.JSON, Output.YAML)
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the page."""
    document = described(find_agent(args.control_socket), args.gpu)
    output = Output(args.output)
    if output is Output.TABLE:
        print("\n".join(page(for_people(document), now_ns=time.monotonic_ns())))
    else:
        show(document, output)
    return 0


def described(agent: AgentClient, name: str) -> Json:
    """Return what the agent knows of a GPU; raises UsageError unless exactly one has the name."""
    state: Json = agent.get("/debug/state")
    gpu = _meant(name, state["gpus"])
    uuid = gpu["uuid"]
    devices: Json = agent.get("/v1/devices")
    conditions: Json = agent.get("/v1/conditions")
    owners: Json = agent.get("/v1/owners")
    events: Json = agent.get("/v1/events?since=0")
    return {
        "apiVersion": "gpu-agent/v1",
        "gpu": gpu,
        "held": {name: why for name, why in state["holds"].items() if name in _names(gpu)},
        "devices": [each for each in devices["devices"] if each["gpu_uuid"] == uuid],
        "conditions": [each for each in conditions["conditions"] if each["gpu_uuid"] == uuid],
        "owners": [each for each in owners["owners"] if each["gpu_uuid"] == uuid],
        "events": [each for each in events["events"] if _is_about(each["fields"], gpu)],
    }


def _meant(name: str, gpus: Iterable[Json]) -> Json:
    known = list(gpus)
    found = [gpu for gpu in known if {name.lower(), pci_sysfs_name(name)} & set(_names(gpu))]
    if len(found) == 1:
        return found[0]
    if found:
        places = listed([f"{gpu['uuid']} at {gpu['pci']}" for gpu in found], "and")
        raise UsageError(f'"{name[:80]}" names several GPUs, {places}; use the UUID of one')
    there = ", ".join(str(gpu["index"]) for gpu in known if gpu["index"] is not None) or "none"
    raise UsageError(f'"{name[:80]}" is no GPU of this node; it has {there}; gpu-agent devices lists them')


def _names(gpu: Json) -> Iterator[str]:
    """Yield every name of a GPU, in lower case."""
    yield gpu["uuid"].lower()
    yield gpu["pci"]
    yield gpu["pci"].removeprefix("0000:")
    if gpu["serial"]:
        yield gpu["serial"].lower()
    if gpu["index"] is not None:
        yield str(gpu["index"])


def _is_about(fields: Mapping[str, Any], gpu: Json) -> bool:
    lists = (fields.get(key) for key in ("gpus", "added", "gone"))
    in_lists = any(gpu["uuid"] in each for each in lists if isinstance(each, list))
    return in_lists or fields.get("uuid") == gpu["uuid"] or fields.get("pci") == gpu["pci"]


# The page


def page(document: Json, *, now_ns: int) -> list[str]:
    """Return the page for people; ``now_ns`` is monotonic, as the document's moments."""
    gpu = document["gpu"]
    name = gpu["pci"] if gpu["index"] is None else gpu["index"]
    lines = [f"GPU {name}: {gpu['model'] or UNKNOWN}", *_pairs(_identity(document))]
    sections = {
        "Devices": _devices(document["devices"]),
        "Conditions": _conditions(document["conditions"], now_ns),
        "Owners": owner_lines({"owners": document["owners"]}, is_wide=False) if document["owners"] else [],
        "Readings": _pairs(_readings(gpu["sample"] or {})),
        "Counters": _pairs({f"XID {xid}": str(count) for xid, count in gpu["xids"].items()}),
        "History": [event_line(each) for each in document["events"][-MAX_EVENTS:]],
    }
    for title, found in sections.items():
        lines += ["", f"{title}:", *(f"  {line}" for line in found or [NONE])]
    return lines


def _pairs(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"{name:{width}}  {text}" for name, text in rows.items()]


def _identity(document: Json) -> dict[str, str]:
    gpu = document["gpu"]
    rows = {"Health": gpu["health"] if gpu["present"] else f"{gpu['health']}, not listed by NVML"}
    rows |= {title: _text(gpu[key]) for key, title in _IDENTITY.items()}
    rows["Memory"] = size(gpu["memory_bytes"])
    rows["MIG"] = f"{len(gpu['mig_devices'])} devices" if gpu["mig_enabled"] else "off"
    if document["held"]:
        rows["Held"] = "; ".join(document["held"].values())
    return rows


def _devices(devices: list[Json]) -> list[str]:
    rows = [
        [each["resource"], each["id"], each["health"], _text(each["pod"]) if each["allocated"] else NONE]
        for each in devices
    ]
    return table(("RESOURCE", "ID", "HEALTH", "POD"), rows) if rows else []


def _conditions(conditions: list[Json], now_ns: int) -> list[str]:
    lines = []
    for each in conditions:
        since_ns = each["since_monotonic_ns"]
        since = (
            f"{local_time(each['since'])}, {age(now_ns - since_ns)} ago" if since_ns else "before the boot"
        )
        instance = "" if each["gi"] is None else f" on GI {each['gi']} CI {each['ci']}"
        effect = "makes devices Unhealthy" if each["flips"] else "makes no device Unhealthy"
        lines += [
            f"{reason_of(each)}{instance}: {each['message']}",
            f"  since {since}; {each['evidence']} evidence of {each['source']}, {effect}",
            f"  recovery: {each['recovery']}",
            f"  next step: {each['advice']}",
        ]
    return lines


def _readings(sample: Json) -> dict[str, str]:
    found = {}
    for name, value in sample.items():
        *words, last = name.split("_")
        unit = _UNITS.get(last)
        label = " ".join(_TERMS.get(word, word) for word in (words if unit else (*words, last)))
        found[label[:1].upper() + label[1:]] = _shown(value) + (unit or "" if value is not None else "")
    return found


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or NONE
    return _text(value)


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
