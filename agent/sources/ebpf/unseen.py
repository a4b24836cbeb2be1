"""What the probe's source could not read: why a picture of who uses the driver may be missing something."""

from collections.abc import Iterable, Mapping
from typing import Final

from agent.model.usage import ENDED, ProcessKey, ProcessStatus
from agent.sources.processes import NoReading

MAX_NAMED: Final = 3
"""Processes that a reason names."""


class Unseen:
    """What could not be read last."""

    def __init__(self) -> None:
        self.of_scan = ""
        """Why the last scan may have missed something."""
        self._unreadable: set[ProcessKey] = set()

    def looked(self, looks: Mapping[ProcessKey, ProcessStatus | NoReading]) -> None:
        """Apply what /proc said of processes."""
        self._unreadable.difference_update(looks)
        self._unreadable.update(key for key, look in looks.items() if look is NoReading.UNREADABLE)

    def why(self, unlooked: Iterable[ProcessKey]) -> str:
        """Return why something may be missing; empty: nothing is. ``unlooked``: processes with no reading."""
        self._unreadable.intersection_update(unlooked)
        if not self._unreadable:
            return self.of_scan
        pids = ", ".join(str(key.pid) for key in sorted(self._unreadable)[:MAX_NAMED])
        hidden = f"{len(self._unreadable)} of the processes with open files may not be read, such as {pids}"
        return f"{self.of_scan}; {hidden}" if self.of_scan else hidden


def has_ended(look: ProcessStatus | NoReading) -> bool:
    """Return whether a process is gone, or a zombie: the kernel closes its files before it is one."""
    return look is NoReading.GONE or (isinstance(look, ProcessStatus) and look.state in ENDED)
