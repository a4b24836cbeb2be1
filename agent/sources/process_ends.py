"""Hears of the end of processes through pidfds, on the loop.

Invariants: one descriptor for each process, at most MAX_WATCHED; the end of one that is not watched shows in
the next scan. The kernel says that a pidfd is readable only once the process has let go of its files.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent import guard
from agent.model.usage import ProcessKey
from agent.sources.processes import open_pidfd
from agent.threads import started_in_daemon_thread

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

    async def watch(self, keys: Iterable[ProcessKey]) -> None:
        """Watch these processes and no others."""
        wanted = dict.fromkeys(keys)
        for key in tuple(self._descriptors):
            if key not in wanted:
                self._forget(key)
        new = [key for key in wanted if key not in self._descriptors]
        room = MAX_WATCHED - len(self._descriptors)
        opened = await self._opened(new[:room]) if new[:room] else {}
        # Those without room, and those that no descriptor could be had for: scans tell, later.
        self.unwatched = len(new) - len(opened)
        for key, descriptor in opened.items():
            if descriptor is None:
                # Not from here: who asked is in the middle of something.
                asyncio.get_running_loop().call_soon(self._ended, key)
            else:
                self._descriptors[key] = descriptor
                guard.add_reader("process-end", descriptor, self._readable, key)

    async def _opened(self, keys: list[ProcessKey]) -> dict[ProcessKey, int | None]:
        opening = started_in_daemon_thread("process-ends", lambda: _open_all(self._proc_root, keys))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_all)
            raise

    def close(self) -> None:
        """Watch nothing any more."""
        for key in tuple(self._descriptors):
            self._forget(key)

    def _readable(self, key: ProcessKey) -> None:
        self._forget(key)
        self._ended(key)

    def _forget(self, key: ProcessKey) -> None:
        descriptor = self._descriptors.pop(key)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def _open_all(proc_root: Path, keys: list[ProcessKey]) -> dict[ProcessKey, int | None]:
    """Return a descriptor of each process, None for one that has ended; without one where none can be had."""
    opened: dict[ProcessKey, int | None] = {}
    for key in keys:
        with suppress(OSError):
            opened[key] = open_pidfd(proc_root, key)
    return opened


def _close_all(opening: "asyncio.Future[dict[ProcessKey, int | None]]") -> None:
    """Let go of what nobody waits for any more."""
    for descriptor in () if opening.exception() else opening.result().values():
        if descriptor is not None:
            os.close(descriptor)
