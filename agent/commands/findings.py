"""Shows people the GPUs and the processes of a reason.

Guarantees: only these lines name processes, and only callers of the root-only socket or of loopback get
them; the reasons themselves name none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agent.commands.render import UNKNOWN, size

MAX_PROCESSES: Final = 4
"""Processes named with one reason; ``gpu-agent owners`` has all."""

Json = Mapping[str, Any]


def places(uuids: Sequence[str], gpus: Sequence[Json]) -> Iterator[str]:
    """Yield a line for each GPU of a reason; one for all of them."""
    known = {gpu["uuid"]: gpu for gpu in gpus}
    if len(uuids) > 1 and set(uuids) == known.keys():
        yield f"on all {len(uuids)} GPUs"
        return
    for uuid in uuids:
        yield f"on {_place(uuid, known.get(uuid))}"


def _place(uuid: str, gpu: Json | None) -> str:
    if gpu is None:
        return uuid
    name = gpu["pci"] if gpu["index"] is None else f"GPU {gpu['index']} at {gpu['pci']}"
    return f"{name} ({uuid})"


def involved_processes(reason: Json, conditions: Iterable[Json]) -> Iterator[str]:
    """Yield a line for each process of a usage finding, or one that the finding is clearing."""
    found = [
        each
        for each in conditions
        if each["code"] == reason["code"] and each.get("details") and each["message"] in reason["message"]
    ]
    if found and not any(each["lasts"] for each in found):
        yield "no longer observed; clears after clean probes and a quiet time"
        return
    lines = [_process(each) for one in found if one["lasts"] for each in one["details"]["culprits"]]
    yield from lines[:MAX_PROCESSES]
    more = len(lines[MAX_PROCESSES:]) + sum(one["details"]["more"] for one in found)
    if more:
        yield f"and {more} more"


def _process(each: Json) -> str:
    parts = [f"pid {each['pid']} ({each['comm'] or UNKNOWN})", str(each["pod"] or each["owner"])]
    if each["role"] == "owner":
        parts.append("exited")
    if each["contexts"] != 0 or each["role"] == "owner":
        number = each["contexts"]
        parts.append(f"contexts: {UNKNOWN if number is None else number}")
    if each["used_bytes"] is not None:
        parts.append(size(each["used_bytes"]))
    if each["role"] != "owner" and not each["killable"]:
        parts.append(f"cannot be killed now (state {each['state'] or UNKNOWN})")
    return ", ".join(parts)
