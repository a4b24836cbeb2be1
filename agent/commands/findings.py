"""Says for people where a reason is found, and which processes it is of.

Guarantees: names of processes are only told here, to who may ask the agent over its root-only socket or on
loopback; the reasons themselves have none.
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
    """Yield a line for each process that a finding of the use of GPUs is of, and whether it is over."""
    found = [
        each
        for each in conditions
        if each["code"] == reason["code"] and each.get("details") and each["message"] in reason["message"]
    ]
    if found and not any(each["lasts"] for each in found):
        yield "not seen any more; ends after clean probes and a quiet time"
        return
    told = [_process(each) for one in found if one["lasts"] for each in one["details"]["culprits"]]
    yield from told[:MAX_PROCESSES]
    more = len(told[MAX_PROCESSES:]) + sum(one["details"]["more"] for one in found)
    if more:
        yield f"and {more} more"


def _process(each: Json) -> str:
    parts = [f"pid {each['pid']} ({each['comm'] or UNKNOWN})", str(each["pod"] or each["owner"])]
    if each["role"] == "owner":
        parts.append("ended")
    if each["contexts"] != 0 or each["role"] == "owner":
        number = each["contexts"]
        parts.append(f"contexts: {UNKNOWN if number is None else number}")
    if each["used_bytes"] is not None:
        parts.append(size(each["used_bytes"]))
    if each["role"] != "owner" and not each["killable"]:
        parts.append(f"cannot be killed now (state {each['state'] or UNKNOWN})")
    return ", ".join(parts)
