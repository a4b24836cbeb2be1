"""What the probe's source could not read: why a usage snapshot may be incomplete."""

from collections.abc import Iterable, Mapping
from typing import Final

from agent.model.usage import ENDED, ProcessKey, ProcessStatus
from agent.sources.processes import NoReading

MAX_NAMED: Final = 3
"""Processes that a reason names."""


class Unseen:
    """Reads that failed in the last scan and the last readings."""

    def __init__(self) -> None:
        self.of_scan = ""
        """Why the last scan may have missed holders."""
        self._unreadable: set[ProcessKey] = set()

    def apply_readings(self, readings: Mapping[ProcessKey, ProcessStatus | NoReading]) -> None:
        """Apply readings of processes from /proc."""
        self._unreadable.difference_update(readings)
        self._unreadable.update(key for key, reading in readings.items() if reading is NoReading.UNREADABLE)

    def reason(self, unlooked: Iterable[ProcessKey]) -> str:
        """Return why holders may be missing; empty: none are. ``unlooked``: processes with no reading."""
        self._unreadable.intersection_update(unlooked)
        if not self._unreadable:
            return self.of_scan
        pids = ", ".join(str(key.pid) for key in sorted(self._unreadable)[:MAX_NAMED])
        hidden = f"{len(self._unreadable)} of the processes with open files may not be read, such as {pids}"
        return f"{self.of_scan}; {hidden}" if self.of_scan else hidden


def has_exited(reading: ProcessStatus | NoReading) -> bool:
    """Return whether a process is gone, or a zombie: the kernel closes its files before it is one."""
    return reading is NoReading.GONE or (isinstance(reading, ProcessStatus) and reading.state in ENDED)
