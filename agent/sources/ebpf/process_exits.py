"""Watches for the exit of processes through pidfds, on the loop.

Invariants: one descriptor for each process, of a bounded number, with a share for each holder (a pod, or a
cgroup of the host), so that one that forks takes no other's. The exit of a process that is not watched shows
in the next scan. The kernel makes a pidfd readable only once the process has closed its files.
"""

import asyncio
import os
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from pathlib import Path

from agent import guard
from agent.core.shares import Shares
from agent.model.usage import ProcessKey
from agent.sources.processes import open_pidfd
from agent.threads import started_in_daemon_thread


class _Watch:
    """A watched process; without a descriptor until that is open."""

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        self.descriptor = -1


class ProcessExits:
    """The pidfds of the watched processes."""

    def __init__(self, proc_root: Path, on_exit: Callable[[ProcessKey], None], max_watched: int) -> None:
        """Call ``on_exit`` on the loop, once for each process that was watched."""
        self._proc_root = proc_root
        self._on_exit = on_exit
        self._watched: Shares[Hashable, ProcessKey, _Watch] = Shares(max_watched, rejects=True)
        self.unwatched = 0
        """Processes that could not be watched, as of the last ``watch``."""

    async def watch(
        self, keys: Iterable[ProcessKey], holder_of: Callable[[ProcessKey], Hashable] = lambda _: None
    ) -> None:
        """Watch these processes and no others; ``holder_of`` returns whose share a process counts to."""
        wanted = dict.fromkeys(keys)
        for entry in tuple(self._watched):
            if entry.key not in wanted:
                self._forget(entry.key)
        unwatched = 0
        new: dict[ProcessKey, _Watch] = {}
        for key in wanted:
            if key in self._watched:
                continue
            new[key] = _Watch()
            for lost in self._watched.put(holder_of(key), key, new[key]):
                unwatched += 1
                new.pop(lost.key, None)
                _close(lost.value)
        unwatched += await self._begin(new) if new else 0
        # Processes beyond a bound or without a descriptor: scans find their exit, later.
        self.unwatched = unwatched

    async def _begin(self, new: dict[ProcessKey, _Watch]) -> int:
        """Open the descriptors of new processes; return how many could not be opened."""
        try:
            opened = await self._opened(list(new))
        except BaseException:
            for key in new:
                self._watched.pop(key)
            raise
        for key, watch in new.items():
            descriptor = opened.get(key)
            if descriptor is None:
                self._watched.pop(key)
            if key in opened and descriptor is None:
                # Not from here: the caller is in the middle of an update.
                asyncio.get_running_loop().call_soon(self._on_exit, key)
            if descriptor is not None:
                watch.descriptor = descriptor
                guard.add_reader("process-end", descriptor, self._readable, key)
        return len(new) - len(opened)

    async def _opened(self, keys: list[ProcessKey]) -> dict[ProcessKey, int | None]:
        opening = started_in_daemon_thread("process-ends", lambda: _open_all(self._proc_root, keys))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_all)
            raise

    def close(self) -> None:
        """Close every descriptor."""
        for entry in tuple(self._watched):
            self._forget(entry.key)

    def _readable(self, key: ProcessKey) -> None:
        self._forget(key)
        self._on_exit(key)

    def _forget(self, key: ProcessKey) -> None:
        entry = self._watched.pop(key)
        if entry is not None:
            _close(entry.value)


def _close(watch: _Watch) -> None:
    if watch.descriptor >= 0:
        asyncio.get_running_loop().remove_reader(watch.descriptor)
        os.close(watch.descriptor)


def _open_all(proc_root: Path, keys: list[ProcessKey]) -> dict[ProcessKey, int | None]:
    """Return a descriptor of each process, None for one that has exited; none where it cannot be opened."""
    opened: dict[ProcessKey, int | None] = {}
    for key in keys:
        with suppress(OSError):
            opened[key] = open_pidfd(proc_root, key)
    return opened


def _close_all(opening: "asyncio.Future[dict[ProcessKey, int | None]]") -> None:
    """Close the descriptors of an abandoned call."""
    for descriptor in () if opening.exception() else opening.result().values():
        if descriptor is not None:
            os.close(descriptor)
