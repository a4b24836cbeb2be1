"""Hears of the end of processes through pidfds, on the loop.

Invariants: one descriptor for each process, at most MAX_WATCHED; the end of one that is not watched shows in
the next scan. The kernel says that a pidfd is readable only once the process has let go of its files.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from agent.model.usage import ProcessKey
from agent.sources.processes import open_pidfd

MAX_WATCHED: Final = 1_024
"""Of the 4,096 descriptors that the unit allows the agent."""


class ProcessEnds:
    """The pidfds of the processes that matter now."""

    def __init__(self, proc_root: Path, ended: Callable[[ProcessKey], None]) -> None:
        """Call ``ended`` on the loop, once for each process that was watched."""
        self._proc_root = proc_root
        self._ended = ended
        self._descriptors: dict[ProcessKey, int] = {}
        self.unwatched = 0
        """Processes that there was no room for, as of the last ``watch``."""

    def watch(self, keys: Iterable[ProcessKey]) -> None:
        """Watch these processes and no others."""
        wanted = dict.fromkeys(keys)
        for key in tuple(self._descriptors):
            if key not in wanted:
                self._forget(key)
        self.unwatched = 0
        for key in wanted:
            if key not in self._descriptors:
                self._add(key)

    def close(self) -> None:
        """Watch nothing any more."""
        for key in tuple(self._descriptors):
            self._forget(key)

    def _add(self, key: ProcessKey) -> None:
        if len(self._descriptors) >= MAX_WATCHED:
            self.unwatched += 1
            return
        try:
            descriptor = open_pidfd(self._proc_root, key)
        except OSError:
            # No descriptors left, or no pidfds in this kernel: scans tell, later.
            self.unwatched += 1
            return
        if descriptor is None:
            # Not from here: who asked is in the middle of something.
            asyncio.get_running_loop().call_soon(self._ended, key)
            return
        self._descriptors[key] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._readable, key)

    def _readable(self, key: ProcessKey) -> None:
        self._forget(key)
        self._ended(key)

    def _forget(self, key: ProcessKey) -> None:
        descriptor = self._descriptors.pop(key)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
