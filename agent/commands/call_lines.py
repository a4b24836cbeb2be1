"""Driver calls as lines: for people as strace shows system calls, for programs as JSON."""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Final

import msgspec

from agent.commands.render import table
from agent.log import rfc3339
from agent.probe.driver_calls import DriverCall

MAX_ROWS: Final = 1_000
"""Different calls with a row of their own; further ones are counted by name alone."""

TITLES: Final = f"{'TIME':12}  {'TOOK':>6}  {'DEVICE':10}  CALL"
SUMMARY_TITLES: Final = ("CALLS", "FAILED", "TOTAL", "LONGEST", "CALL")


def line_of(call: DriverCall, moment: datetime, *, pid: int, now_ns: int) -> str:
    """Return a call for people; the line shows whether it has not returned, or how it failed."""
    took = span(now_ns - call.at_ns if call.took_ns is None else call.took_ns)
    what = [title_of(call)]
    if call.client is not None and call.handle is not None:
        what.append(f"{call.client:x}:{call.handle:x}")
    if call.took_ns is None:
        what.append("has not returned")
    elif call.failed:
        what.append(f"= {call.answer}")
    if call.thread != pid:
        what.append(f"[thread {call.thread}]")
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}  {took:>6}  {call.device:10}  {' '.join(what)}"


def json_of(call: DriverCall, moment: datetime, *, pid: int) -> str:
    """Return a call for programs."""
    return json.dumps(
        {
            "kind": "call" if call.took_ns is not None else "waiting",
            "time": rfc3339(moment),
            "monotonic_ns": call.at_ns,
            "pid": pid,
            "thread": call.thread,
            "device": call.device,
            "call": call.name,
            "about": call.about,
            "client": None if call.client is None else f"{call.client:#x}",
            "handle": None if call.handle is None else f"{call.handle:#x}",
            "took_ns": call.took_ns,
            "result": None if call.took_ns is None else call.result,
            "status": call.status,
            "answer": call.answer,
        }
    )


def title_of(call: DriverCall) -> str:
    """Return a call's name and subject."""
    return call.name if call.about is None else f"{call.name} {call.about}"


def span(duration_ns: int) -> str:
    """Return a time span with three digits: ``350ns``, ``35us``, ``1.20ms``, ``3.04s``."""
    for unit, name in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if duration_ns >= unit:
            value = duration_ns / unit
            return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f}{name}"
    return f"{duration_ns}ns"


class _Row(msgspec.Struct):
    calls: int = 0
    failed: int = 0
    total_ns: int = 0
    longest_ns: int = 0


class Summary(msgspec.Struct):
    """Number, failures and duration of calls, by call."""

    rows: dict[str, _Row] = msgspec.field(default_factory=dict)

    def add(self, call: DriverCall) -> None:
        """Count a call that returned."""
        title = title_of(call)
        if title not in self.rows and len(self.rows) >= MAX_ROWS:
            title = call.name
        row = self.rows.setdefault(title, _Row())
        took_ns = call.took_ns or 0
        row.calls += 1
        row.failed += call.failed
        row.total_ns += took_ns
        row.longest_ns = max(row.longest_ns, took_ns)

    @property
    def calls(self) -> int:
        """Number of calls."""
        return sum(row.calls for row in self.rows.values())

    def lines(self) -> list[str]:
        """Return the table, the largest total first."""
        rows = [
            [str(row.calls), str(row.failed), span(row.total_ns), span(row.longest_ns), title]
            for title, row in self._sorted()
        ]
        return table(SUMMARY_TITLES, rows)

    def document(self) -> list[dict[str, object]]:
        """Return the rows for programs."""
        return [
            {
                "call": title,
                "calls": row.calls,
                "failed": row.failed,
                "total_ns": row.total_ns,
                "longest_ns": row.longest_ns,
            }
            for title, row in self._sorted()
        ]

    def _sorted(self) -> Iterator[tuple[str, _Row]]:
        yield from sorted(self.rows.items(), key=lambda named: (-named[1].total_ns, named[0]))
