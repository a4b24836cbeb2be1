"""``gpu-agent owners``: show the pods each GPU is allocated to, its holders and the memory they use."""

import argparse
from typing import Any, Final

from agent.commands.question import Question, add_question_flags, ask
from agent.commands.render import (
    NONE,
    UNKNOWN,
    cut,
    share,
    size,
    table,
)

_DESCRIPTION: Final = """\
Show for each GPU or MIG device the pod that the kubelet gave it to, the
processes that hold it, and how much of its memory each uses. "host" is a
process in no pod.

Examples:
  gpu-agent owners
  gpu-agent owners -o wide            with the agent, UUIDs, unclaimed memory
  gpu-agent owners -w                 again after every change
  gpu-agent owners -o json
"""

TITLES: Final = ("GPU", "GIVEN-TO", "HELD-BY", "PID", "CONTEXTS", "MEMORY")
WIDE_TITLES: Final = (*TITLES, "COMM", "STATE", "UUID", "USED", "UNCLAIMED")
LEAST: Final = ("MEMORY", "CONTEXTS", "GIVEN-TO")
"""Columns that a narrow terminal omits, the first one first."""
MAX_PODS: Final = 4
"""Pods of a shared device in the wide table; JSON has all."""
POD_WIDTH: Final = 18
"""Columns of a pod's name in a table of 80."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    add_question_flags(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the answer."""
    return ask(args, _QUESTION)


def owner_lines(document: dict[str, Any], *, is_wide: bool) -> list[str]:
    """Return the table: a line for each holder, one for a device without holders."""
    rows = [
        _row(owned, holder, is_wide=is_wide)
        for owned in document["owners"]
        for holder in _shown(owned["holders"], is_wide=is_wide) or (None,)
    ]
    return table(WIDE_TITLES if is_wide else TITLES, rows, is_wide=is_wide, least=LEAST)


def _shown(holders: list[dict[str, Any]] | None, *, is_wide: bool) -> list[dict[str, Any]]:
    # The agent has every GPU open and uses none.
    return [holder for holder in holders or () if is_wide or not holder["is_agent"]]


def _row(owned: dict[str, Any], holder: dict[str, Any] | None, *, is_wide: bool) -> list[str]:
    absent = UNKNOWN if owned["holders"] is None else NONE
    holds = absent if holder is None else _owner(holder)
    row = [
        _gpu(owned),
        _given_to(owned, is_wide=is_wide),
        holds if is_wide else cut(holds, share(POD_WIDTH)),
        absent if holder is None else str(holder["pid"]),
        absent if holder is None else _contexts(holder),
        absent if holder is None else size(holder["memory_bytes"]),
    ]
    if is_wide:
        row += [
            absent if holder is None else holder["comm"] or UNKNOWN,
            absent if holder is None else holder["state"] or UNKNOWN,
            owned["uuid"],
            size(owned["memory_used_bytes"]),
            size(owned["memory_unclaimed_bytes"]),
        ]
    return row


def _gpu(owned: dict[str, Any]) -> str:
    index = UNKNOWN if owned["gpu"] is None else owned["gpu"]
    return str(index) if owned["gi"] is None else f"{index}/gi{owned['gi']}/ci{owned['ci']}"


def _given_to(owned: dict[str, Any], *, is_wide: bool) -> str:
    given = owned["given_to"]
    if given is None:
        return UNKNOWN
    pods = list(dict.fromkeys(each["pod"] for each in given)) or [NONE]
    shown = pods[: MAX_PODS if is_wide else 1]
    more = f",+{len(pods) - len(shown)}" if len(pods) > len(shown) else ""
    names = ",".join(shown)
    return (names if is_wide else cut(names, share(POD_WIDTH) - len(more))) + more


def _owner(holder: dict[str, Any]) -> str:
    name = holder["pod"] if holder["owner"] == "pod" else holder["owner"]
    return f"{name} (service)" if holder["service"] else str(name)


def _contexts(holder: dict[str, Any]) -> str:
    if holder["contexts"] is None:
        return UNKNOWN
    return f"{holder['contexts']}{'+' if holder['partial'] else ''}"


_QUESTION: Final = Question(
    "/v1/owners",
    names=lambda document: (owned["uuid"] for owned in document["owners"]),
    lines=lambda document, _, is_wide: owner_lines(document, is_wide=is_wide),
)
