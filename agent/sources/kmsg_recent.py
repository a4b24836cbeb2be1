"""The driver's newest lines of the kernel log, for evidence: a repeated XID evicts no other XID's line."""

import re
from collections.abc import Iterable
from typing import Final

from agent.core.shares import Shares

RECENT_LINES: Final = 200

_XID: Final = re.compile(r"Xid \(PCI:([^)]{1,32})\): ([0-9]{1,10})")


class RecentLines:
    """Lines in the order of the log, with a share for each device and XID."""

    def __init__(self, capacity: int = RECENT_LINES) -> None:
        self._lines: Shares[tuple[str, ...], int, str] = Shares(capacity)
        self._count = 0

    def add(self, lines: Iterable[str]) -> None:
        """Append lines; at capacity, evict the oldest line of the largest share."""
        for line in lines:
            found = _XID.search(line)
            self._count += 1
            self._lines.put(() if found is None else found.groups(), self._count, line)

    def add_before(self, lines: Iterable[str]) -> None:
        """Insert lines of an earlier time before the present ones."""
        later = self.all()
        self._lines = Shares(self._lines.total)
        self.add(lines)
        self.add(later)

    def all(self) -> tuple[str, ...]:
        """Return the lines, the oldest first."""
        return tuple(entry.value for entry in self._lines)
