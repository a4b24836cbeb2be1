"""``gpu-agent trace``: show the driver calls of one process as they happen.

Guarantees: the process is not stopped, unlike with ptrace. Calls that the ring lost, and those too many to
print, are counted and reported. However the trace stops, its probe is removed from the kernel.
"""

import argparse
import asyncio
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import msgspec

from agent.commands.client import find_agent
from agent.commands.render import add_agent_flag, table
from agent.config.values import duration_from
from agent.core.wording import counted, printable
from agent.errors import AgentError, AgentUnreachableError, ProbeLoadError, UsageError
from agent.log import rfc3339, wall_time_of
from agent.model.usage import ProcessStatus
from agent.probe import kernel
from agent.probe.driver_calls import DriverCall, named
from agent.probe.kernel import Majors, Roots
from agent.probe.loading import load
from agent.probe.probe import Probe
from agent.probe.request import Doubles, LoaderChoice, Request, TierChoice
from agent.sources.processes import read_process

MAX_LINES: Final = 1_000
"""Calls printed in one second; more are counted."""
STALLED_NS: Final = 1_000_000_000
"""A call that blocks for longer is reported before it returns."""
RING_BYTES: Final = 4 << 20
_SCAN_PERIOD_MS: Final = 1_000
HINT_AFTER_S: Final = 2.0
"""After this time without a call a hint explains that none is needed."""

_DESCRIPTION: Final = """\
Show each call of a process into the NVIDIA driver as it happens: its subject,
its duration, the driver's answer, and calls that do not return. Needs root.
Unlike strace it does not stop the process.

After the time, on Ctrl-C, or when the process exits: a table of all calls.

Examples:
  gpu-agent trace 4711
  gpu-agent trace 4711 --seconds 10   then the table
  gpu-agent trace 4711 --json | jq 'select(.answer != "OK")'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "gpu-agent trace PID [flags]"
    parser.description = _DESCRIPTION
    parser.add_argument("pid", metavar="PID", help="The process, by its pid on this machine")
    parser.add_argument("--seconds", metavar="N", help="Stop after this time (default: never)")
    parser.add_argument("--json", action="store_true", help="Print JSON lines")
    parser.add_argument(
        "--probe-loader", metavar="LOADER", choices=("auto", "bcc", "core"), help="auto, bcc or core"
    )
    parser.add_argument(
        "--probe-tier",
        metavar="TIER",
        choices=("auto", "driver", "syscalls"),
        help="auto, driver or syscalls",
    )
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Trace until stopped, and print the table."""
    pid, seconds = _pid(args.pid), _seconds(args.seconds)
    pidfd = _open_pidfd(pid)
    signal.signal(signal.SIGTERM, _interrupt)
    probe = _load(_request(args, pid))
    try:
        trace = Trace(probe, pid, pidfd, is_json=args.json)
        _note(f"Tracing {_name(pid)}, tier {probe.tier}, loader {probe.loader}; Ctrl-C stops it", args.json)
        trace.show_until(None if seconds is None else time.monotonic() + seconds)
        trace.finish()
    finally:
        probe.close()
        os.close(pidfd)
    return 0


def _pid(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 22:
        raise UsageError(f'PID must be a process id, and is "{text[:80]}"')
    return int(text)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text) if text.replace(".", "", 1).isdecimal() else duration_from(text) / 1e9
    except (ValueError, OverflowError):
        seconds = 0
    if seconds <= 0:
        raise UsageError(f'--seconds must be a time, such as 10 or "2m", and is "{text[:80]}"')
    return seconds


def _open_pidfd(pid: int) -> int:
    """Return a pidfd, which becomes readable when the process exits."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise AgentError(
            f"No process {pid} runs here; gpu-agent contexts lists those that have the driver open"
        ) from None
    except OSError as error:
        raise AgentError(f"Process {pid} cannot be traced: {error.strerror}; is it a thread?") from None


def _name(pid: int) -> str:
    process = read_process(Path("/proc"), pid)
    return f"{printable(process.comm)} ({pid})" if isinstance(process, ProcessStatus) else f"process {pid}"


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _request(args: argparse.Namespace, pid: int) -> Request:
    """Return how to load the probe: as the running agent did, which works on this node."""
    state = _state(args.control_socket)
    options: dict[str, Any] = state.get("agent", {}).get("probe_options", {})
    running: dict[str, Any] = state.get("probe") or {}
    doubles = kernel.filesystem_of_doubles(options.get("doubles"))
    tier = args.probe_tier or running.get("tier") or "auto"
    return Request(
        loader=cast("LoaderChoice", args.probe_loader or running.get("loader") or "auto"),
        tier=cast("TierChoice", tier if tier in {"driver", "syscalls"} else "auto"),
        roots=Roots(node_proc=options.get("proc_root", "/proc")),
        doubles=Doubles(filesystem=doubles) if doubles else None,
        ring_bytes=RING_BYTES,
        trace_tgid=pid,
    )


def _state(control_socket: str | None) -> dict[str, Any]:
    try:
        return find_agent(control_socket).get("/debug/state")
    except AgentUnreachableError:
        if control_socket is not None:
            raise
        return {}


def _load(request: Request) -> Probe:
    try:
        return asyncio.run(load(request))
    except ProbeLoadError as error:
        if error.code == "missing_capability" and os.geteuid():
            raise AgentError("Only root may trace the driver's calls; run this as root") from None
        raise AgentError(f"The calls cannot be traced ({error.code}): {error}") from None


def _note(sentence: str, is_quiet: bool) -> None:  # noqa: FBT001 - no notes for programs
    if not is_quiet:
        print(sentence, file=sys.stderr, flush=True)


class Trace:
    """The output of one traced process."""

    def __init__(
        self,
        probe: Probe,
        pid: int,
        pidfd: int,
        *,
        is_json: bool,
        max_lines: int = MAX_LINES,
        hint_after_s: float = HINT_AFTER_S,
    ) -> None:
        self._probe = probe
        self._pid = pid
        self._pidfd = pidfd
        self._is_json = is_json
        self._ring = probe.traced_ring()
        config = probe.config
        self._majors = Majors(config.nvidia_major, config.uvm_major, config.caps_major)
        self._branch = probe.driver_branch()
        self._summary = Summary()
        self._max_lines = self._lines_left = max_lines
        self._unshown = 0
        self._unshown_reported = 0
        self._lost_reported = 0
        self._reported_stalled: set[tuple[int, int]] = set()
        """Calls already reported as not returned, by thread and start."""
        self._why = "interrupted"
        self._hint_at_s: float | None = time.monotonic() + hint_after_s
        """When to print the hint that there are no calls; None: it was printed, or there were some."""

    def show_until(self, end_s: float | None) -> None:
        """Show calls until the process exits, the time is over, or an interrupt."""
        if not self._is_json:
            print(TITLES, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            self._follow(end_s)

    def finish(self) -> None:
        """Show the remaining calls, and the table."""
        self._show_finished_calls()
        self._show_stalled_calls()
        self._ring.close()
        lost = self._probe.read_statistics().lost
        if self._is_json:
            counts = {"calls": self._summary.document(), "not_shown": self._unshown, "lost": lost}
            print(json.dumps({"kind": "summary", "ended": self._why, **counts}), flush=True)
            return
        print("\n" + "\n".join(self._summary.lines()), flush=True)
        waiting = sum(1 for _ in self._in_flight())
        _note(
            f"{counted(self._summary.calls, 'call')}, {waiting} not returned, {lost} lost: {self._why}",
            is_quiet=False,
        )

    def _follow(self, end_s: float | None) -> None:
        poll = select.poll()
        for descriptor in (self._ring.fileno(), self._pidfd):
            poll.register(descriptor, select.POLLIN)
        next_scan_s = time.monotonic() + _SCAN_PERIOD_MS / 1e3
        while True:
            until_s = min(next_scan_s, end_s or next_scan_s)
            ready = {fd for fd, _ in poll.poll(max(0.0, (until_s - time.monotonic()) * 1e3))}
            self._show_finished_calls()
            now_s = time.monotonic()
            if now_s >= next_scan_s:
                self._show_stalled_calls()
                next_scan_s = now_s + _SCAN_PERIOD_MS / 1e3
            if self._pidfd in ready:
                self._why = "the process exited"
                return
            if end_s is not None and now_s >= end_s:
                self._why = "the time is over"
                return

    def _show_finished_calls(self) -> None:
        """Show the calls that have returned since the last time."""
        while calls := self._ring.read():
            for traced in calls:
                call = named(traced, self._majors, branch=self._branch)
                self._summary.add(call)
                if self._lines_left:
                    self._lines_left -= 1
                    self._show(call)
                else:
                    self._unshown += 1
            sys.stdout.flush()

    def _hint(self) -> None:
        """Print once that a process without calls may be healthy."""
        if self._hint_at_s is None or time.monotonic() < self._hint_at_s:
            return
        self._hint_at_s = None
        if not self._summary.calls:
            _note(
                f"No calls of {_name(self._pid)} so far; a GPU at work needs none. Those to come are shown",
                self._is_json,
            )

    def _show_stalled_calls(self) -> None:
        """Show the calls that have not returned, and the numbers of lost and unprinted ones."""
        self._hint()
        for call in self._in_flight():
            key = (call.thread, call.at_ns)
            if time.monotonic_ns() - call.at_ns >= STALLED_NS and key not in self._reported_stalled:
                self._reported_stalled.add(key)
                self._show(call)
        lost = self._probe.read_statistics().lost
        if lost > self._lost_reported:
            self._report_omitted("lost", lost - self._lost_reported, "were lost: too many at once")
        if self._unshown > self._unshown_reported:
            self._report_omitted("not_shown", self._unshown - self._unshown_reported, "are only in the table")
        self._lost_reported, self._unshown_reported, self._lines_left = lost, self._unshown, self._max_lines
        sys.stdout.flush()

    def _in_flight(self) -> Iterator[DriverCall]:
        for traced in self._probe.read_traced():
            yield named(traced, self._majors, branch=self._branch)

    def _show(self, call: DriverCall) -> None:
        now_ns = time.monotonic_ns()
        moment = wall_time_of(call.at_ns, now_ns=now_ns)
        if self._is_json:
            print(json_of(call, moment, pid=self._pid))
        else:
            print(line_of(call, moment, pid=self._pid, now_ns=now_ns))

    def _report_omitted(self, kind: str, count: int, why: str) -> None:
        if self._is_json:
            print(json.dumps({"kind": kind, "count": count}))
        else:
            _note(f"{counted(count, 'call')} {why}", is_quiet=False)


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
