"""When a scan is due that a process asks for: at once, unless its pod asks for too many.

Invariants: the first scans that a pod, or a process outside of any, asks for are due at once, and after these
one in each period. Nothing waits longer than a period, nor at all for what others do. What is kept is
bounded, and costs each pod one entry.
"""

from typing import Final

from agent.core.shares import Shares

PERIOD_NS: Final = 1_000_000_000
BURST: Final = 4
MAX_ASKING: Final = 4_096
ROOT_CGROUP: Final = 1
"""Where there are no cgroups of version 2 everybody is in it."""

_Requester = tuple[int, int]
"""Cgroup and 0, or 0 and a pid."""


class ScanPace:
    """Who asked for scans lately."""

    def __init__(
        self, period_ns: int = PERIOD_NS, *, burst: int = BURST, max_asking: int = MAX_ASKING
    ) -> None:
        self._period_ns = period_ns
        self._burst_ns = (burst - 1) * period_ns
        self._charged: Shares[_Requester, _Requester, int] = Shares(max_asking)
        """Until when each has had its share."""
        self._due: dict[_Requester, int] = {}
        """Of those who asked since the last scan began."""

    def due_ns(self, cgroup_id: int, pid: int, at_ns: int) -> int:
        """Return when the scan is due that something gave a reason for."""
        asks = (cgroup_id, 0) if cgroup_id > ROOT_CGROUP else (0, pid)
        due = self._due.get(asks)
        if due is None:
            charged = self._charged.get(asks)
            until_ns = at_ns if charged is None else max(at_ns, charged.value)
            due = max(at_ns, until_ns - self._burst_ns)
            # Scans that others asked for are no debt.
            owed_ns = min(until_ns, at_ns + self._burst_ns) + self._period_ns
            self._charged.put(asks, asks, owed_ns)
            if len(self._due) < self._charged.total:
                self._due[asks] = due
        return due

    def begin_scan(self) -> None:
        """Take that what was asked for is done."""
        self._due.clear()
