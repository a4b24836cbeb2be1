"""``gpu-agent contexts``: show the CUDA contexts of each process on each GPU."""

import argparse
from collections.abc import Iterator
from typing import Any, Final

from agent.commands.question import Question, add_question_flags, ask
from agent.commands.render import (
    NONE,
    UNKNOWN,
    age,
    size,
    table,
)

_DESCRIPTION: Final = """\
Show every process but the agent that has the driver's files open, its CUDA
contexts on each GPU, and the contexts that outlive the process that created
them. "2+" means at least 2: the process is older than the probe, or has more
than the agent keeps for one process.

Examples:
  gpu-agent contexts
  gpu-agent contexts -o wide          with files, counts, cgroups
  gpu-agent contexts -w               again after every change
  gpu-agent contexts -o json
"""

TITLES: Final = ("PID", "COMM", "GPU", "CONTEXTS", "MEMORY", "STATE", "SINCE", "POD")
WIDE_TITLES: Final = (*TITLES, "FDS", "ALLOCATED", "FREED", "CGROUP")
ORPHAN_TITLES: Final = ("ENDED-PID", "COMM", "GPU", "CONTEXTS", "ENDED", "HELD-BY", "POD")
WIDE_ORPHAN_TITLES: Final = (*ORPHAN_TITLES, "CGROUP")
LEAST: Final = ("SINCE", "STATE", "MEMORY", "POD")
"""Columns that a narrow terminal omits, the first one first."""
MAX_HOLDERS: Final = 2
"""Holders of orphaned contexts named in the table that fits a terminal."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    add_question_flags(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the answer."""
    return ask(args, _QUESTION)


def context_lines(document: dict[str, Any], *, now_ns: int, is_wide: bool) -> list[str]:
    """Return the tables; ``now_ns`` is monotonic, as the document's moments."""
    rows = [
        row
        for process in document["processes"]
        for row in _rows_of_process(process, now_ns=now_ns, is_wide=is_wide)
    ]
    lines = table(WIDE_TITLES if is_wide else TITLES, rows, is_wide=is_wide, least=LEAST)
    left = [_row_of_orphan(orphan, now_ns=now_ns, is_wide=is_wide) for orphan in document["orphans"]]
    if left:
        titles = WIDE_ORPHAN_TITLES if is_wide else ORPHAN_TITLES
        lines += ["", "Left by processes that exited:", *table(titles, left, is_wide=is_wide)]
    return lines


def notes(document: dict[str, Any]) -> Iterator[str]:
    """Yield the limits of what the table shows."""
    if document["complete"] is None:
        yield "Nothing was read yet, or the probe is off (--probe-tier)"
        return
    if document["seen_by"] == "proc":
        probe = document["probe"] or {}
        why = f": {probe['message']}" if probe.get("message") else ""
        yield f"Contexts are unknown, only open files are known{why}"
    elif document["certainty"] == "unverified":
        yield "Contexts are inferred, of compute or graphics: not verified with CUDA on this driver version"
    if not document["complete"]:
        yield f"Incomplete: {document['incomplete_because']}"


def _rows_of_process(process: dict[str, Any], *, now_ns: int, is_wide: bool) -> Iterator[list[str]]:
    holds: list[dict[str, Any]] = process["gpus"] or [{}]
    for hold in holds:
        contexts = hold.get("contexts")
        count = UNKNOWN if contexts is None and hold else f"{contexts}{'+' if process['partial'] else ''}"
        row = [
            str(process["pid"]),
            process["comm"] or UNKNOWN,
            _gpu(hold.get("gpu")) if hold else NONE,
            count if hold else NONE,
            size(hold.get("memory_bytes")) if hold else NONE,
            process["state"] or UNKNOWN,
            _age(process["since_monotonic_ns"], now_ns),
            _pod(process),
        ]
        if is_wide:
            numbers = (process["fds"], hold.get("contexts_allocated", 0), hold.get("contexts_freed", 0))
            row += [*map(str, numbers), process["cgroup"] or UNKNOWN]
        yield row


def _row_of_orphan(orphan: dict[str, Any], *, now_ns: int, is_wide: bool) -> list[str]:
    owner, holders = orphan["owner"], list(map(str, orphan["holders"]))
    if not is_wide and len(holders) > MAX_HOLDERS:
        holders = [*holders[:MAX_HOLDERS], f"+{len(holders) - MAX_HOLDERS}"]
    row = [
        f"{owner['pid']}",
        f"{owner['comm'] or UNKNOWN} and {orphan['more']:,} more"
        if orphan.get("more")
        else owner["comm"] or UNKNOWN,
        _gpu(orphan["gpu"]),
        UNKNOWN if orphan["contexts"] is None else str(orphan["contexts"]),
        _age(orphan["ended_monotonic_ns"], now_ns),
        ",".join(holders) or NONE,
        _pod(owner),
    ]
    return [*row, owner["cgroup"] or UNKNOWN] if is_wide else row


def _gpu(index: int | None) -> str:
    return UNKNOWN if index is None else str(index)


def _pod(process: dict[str, Any]) -> str:
    return str(process["pod"] or {"host": NONE}.get(process["owner"], UNKNOWN))


def _age(moment_ns: int, now_ns: int) -> str:
    return age(now_ns - moment_ns) if moment_ns else UNKNOWN


_QUESTION: Final = Question(
    "/v1/contexts",
    names=lambda document: (str(process["pid"]) for process in document["processes"]),
    lines=lambda document, now_ns, is_wide: context_lines(document, now_ns=now_ns, is_wide=is_wide),
    notes=notes,
)
