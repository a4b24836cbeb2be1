"""Processes with more events than the kernel sends, and when to read the effect of these from its tables.

Invariants: the tables are read once such a process stopped, and once in a period while it continues; it is
named until no event of it is missing any more. A process that requests more scans than it gets is logged.
"""

import logging
from collections.abc import Iterable, Mapping

from agent.core.usage.tracker import Tracker
from agent.log import fields
from agent.model.rm import ProcessCounters
from agent.model.usage import ProcessKey
from agent.sources.ebpf.rounds import EbpfSettings

_log = logging.getLogger(__name__)


class Unsent:
    """Counts of events that the kernel did not send, since their process had used its share of the ring."""

    def __init__(self, settings: EbpfSettings, total: int) -> None:
        """``total``: the count before."""
        self._period_ns = settings.rescan_ns
        self._log_period_ns = settings.logged_ns
        self._total = total
        self._counts: dict[ProcessKey, int] = {}
        self._read_ns = 0
        self._due_ns: int | None = None
        self._logged_ns: int | None = None

    def has_more(self, total: int) -> bool:
        """Set the total; return whether it grew."""
        before, self._total = self._total, total
        return total > before

    def of_processes(self, rows: Iterable[ProcessCounters], now_ns: int) -> Mapping[ProcessKey, int]:
        """Return the count of each process whose count grew since the last call."""
        before = self._counts
        self._counts = {ProcessKey(row.tgid, row.start_ticks): row.unsent for row in rows if row.unsent}
        more = {key: count for key, count in self._counts.items() if count > before.get(key, 0)}
        if self._due_ns is None:
            self._due_ns = self._read_ns + self._period_ns
        if more:
            self._log(more, now_ns)
        return more

    @property
    def is_read(self) -> bool:
        """Whether no read is due any more."""
        return self._due_ns is None

    def is_due(self, now_ns: int) -> bool:
        """Return whether a read is due, which then counts as done."""
        if self._due_ns is None or now_ns < self._due_ns:
            return False
        self._read_ns, self._due_ns = now_ns, None
        return True

    def _log(self, more: Mapping[ProcessKey, int], now_ns: int) -> None:
        if self._logged_ns is not None and now_ns - self._logged_ns < self._log_period_ns:
            return
        self._logged_ns = now_ns
        key = max(more, key=lambda each: more[each])
        _log.warning(
            f"Process {key.pid} has more events than its share of the ring: {more[key]} were not sent; "
            "reading their effect from the kernel's tables",
            extra=fields(pid=key.pid, events=more[key], processes=len(more)),
        )


class PostponedScans:
    """Logs the process with most postponed requests for a scan, such as one that calls dup2 in a loop."""

    def __init__(self, settings: EbpfSettings) -> None:
        self._log_period_ns = settings.logged_ns
        self._many = settings.many_scans
        self._logged_ns: int | None = None

    def follow(self, tracker: Tracker, now_ns: int) -> None:
        """Log the process with most postponed requests, once a period."""
        if self._logged_ns is not None and now_ns - self._logged_ns < self._log_period_ns:
            return
        self._logged_ns = now_ns
        counts = tracker.pop_postponed_scans()
        pid = max(counts, key=lambda each: counts[each], default=0)
        if counts.get(pid, 0) < self._many:
            return
        _log.warning(
            f"Process {pid} changes its descriptors in a loop (dup2, close_range, fork or exec): "
            f"{counts[pid]} of its requests for a scan of open files were postponed",
            extra=fields(pid=pid, postponed=counts[pid], processes=len(counts)),
        )
