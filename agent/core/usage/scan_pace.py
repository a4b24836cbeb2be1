"""When a scan is due for a process's event: at once, unless its pod asks for too many.

Invariants: the first scans that a pod, or a process outside of any, asks for are due at once, and after these
one in each period. No scan waits longer than a period, nor for another pod. The table is bounded, with one
entry for each pod.
"""

from collections.abc import Mapping
from typing import Final

from agent.core.shares import Shares

PERIOD_NS: Final = 1_000_000_000
BURST: Final = 4
MAX_ASKING: Final = 4_096
ROOT_CGROUP: Final = 1
"""Without cgroups of version 2 every process is in it."""

_Requester = tuple[int, int]
"""Cgroup and 0, or 0 and a pid."""


class ScanPace:
    """Rate limiter for scans, by pod."""

    def __init__(
        self, period_ns: int = PERIOD_NS, *, burst: int = BURST, max_asking: int = MAX_ASKING
    ) -> None:
        self._period_ns = period_ns
        self._burst_ns = (burst - 1) * period_ns
        self._charged: Shares[_Requester, _Requester, int] = Shares(max_asking)
        """Until when each requester has used its share."""
        self._due: dict[_Requester, int] = {}
        """Due times of the requesters since the last scan began."""
        self._postponed: dict[int, int] = {}
        """Requests that did not get their scan at once, by pid."""

    def due_ns(self, cgroup_id: int, pid: int, at_ns: int) -> int:
        """Return when the scan is due that an event asks for."""
        requester = (cgroup_id, 0) if cgroup_id > ROOT_CGROUP else (0, pid)
        due = self._due.get(requester)
        if due is None:
            charged = self._charged.get(requester)
            until_ns = at_ns if charged is None else max(at_ns, charged.value)
            due = max(at_ns, until_ns - self._burst_ns)
            # Scans that others asked for are not charged.
            owed_ns = min(until_ns, at_ns + self._burst_ns) + self._period_ns
            self._charged.put(requester, requester, owed_ns)
            if len(self._due) < self._charged.total:
                self._due[requester] = due
        if due > at_ns and (pid in self._postponed or len(self._postponed) < self._charged.total):
            self._postponed[pid] = self._postponed.get(pid, 0) + 1
        return due

    def pop_postponed(self) -> Mapping[int, int]:
        """Return how many requests of each process were postponed since the last call, by pid."""
        postponed, self._postponed = self._postponed, {}
        return postponed

    def begin_scan(self) -> None:
        """Clear the requests, which this scan serves."""
        self._due.clear()
