"""Reports when something in directories changed, by inotify; where that cannot be had, when time is up.

Invariants: events only cause a read; what counts is what is there then. The kernel's queue of events is
the only one, and it is bounded. Nothing here blocks.

Source: inotify(7).
"""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

from asyncinotify import Inotify, Mask

from agent import guard

MAX_EVENTS_AT_ONCE: Final = 1024
"""Events popped at a time; more wait in the kernel's queue."""

_INTERESTING: Final = (
    Mask.CREATE
    | Mask.MOVED_TO
    | Mask.MOVED_FROM
    | Mask.DELETE
    | Mask.DELETE_SELF
    | Mask.MOVE_SELF
    | Mask.ONLYDIR
)
_NOTHING_ELSE: Final = Mask(0)
_WATCH_LOST: Final = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED


class DirectoryWatch:
    """One inotify on a directory, or on several."""

    def __init__(self, directory: Path, *others: Path, also: Mask = _NOTHING_ELSE) -> None:
        """Begin to watch what comes and goes in them, and ``also``.

        Raises OSError: ENOSPC or EMFILE at a limit, ENOENT without a directory.
        """
        seen = os.stat(directory)  # noqa: PTH116 - one call of the kernel, no more
        self.directory: Final = (seen.st_dev, seen.st_ino)
        """What distinguishes the first one from another of the same name."""
        self._inotify = Inotify(sync_timeout=0)
        try:
            os.set_blocking(self._inotify.fd, False)
            for each in (directory, *others):
                self._inotify.add_watch(each, _INTERESTING | also)
        except BaseException:
            self._inotify.close()
            raise

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

    async def wait_readable(self, timeout_ns: int) -> bool:
        """Return whether there are events, after the timeout at the latest."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_ns / 1e9, _finish, readable, False)  # noqa: FBT003 - the result
        guard.add_reader("inotify", self._inotify.fd, _finish, readable, True)  # noqa: FBT003 - the result
        try:
            return await readable
        finally:
            loop.remove_reader(self._inotify.fd)
            timer.cancel()

    def read_events(self) -> bool:
        """Pop the events that wait; return whether everything is still watched."""
        for _ in range(MAX_EVENTS_AT_ONCE):
            event = self._inotify.sync_get()
            if event is None:
                return True
            if event.mask & _WATCH_LOST:
                return False
        return True

    def is_on(self, seen: os.stat_result) -> bool:
        """Return whether the first directory is the one that was seen, not an earlier one of its name."""
        return self.directory == (seen.st_dev, seen.st_ino)


class ChangeWaiter:
    """Wakes a reader, by a watch that may come and go as its directory does."""

    def __init__(self, *, gap_ns: int = 0) -> None:
        """Begin without a watch; events that follow one another within ``gap_ns`` wake the reader once."""
        self._gap_s = gap_ns / 1e9
        self._begun = asyncio.Event()
        self.watch: DirectoryWatch | None = None
        """None: only time wakes the reader."""

    def use(self, watch: DirectoryWatch | None) -> None:
        """Use this watch from now on, and close the one before."""
        if watch is self.watch:
            return
        self.close()
        if watch is not None:
            self.watch = watch
            self._begun.set()

    def close(self) -> None:
        """Go by no watch."""
        """Use no watch."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    async def wait(self, timeout_ns: int) -> bool:
        """Return when there is a reason to read, after the timeout at the latest: whether something changed.

        A watch that lost its directory is closed. One waits at a time.
        """
        watch = self.watch
        if watch is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_ns / 1e9):
                    await self._begun.wait()
            return False
        loop = asyncio.get_running_loop()
        may_end_s = loop.time() + self._gap_s
        has_changed = await watch.wait_readable(timeout_ns)
        await asyncio.sleep(max(0.0, may_end_s - loop.time()))
        if watch is self.watch and not watch.read_events():
            self.close()
        return has_changed


def _finish(future: asyncio.Future[bool], result: bool) -> None:  # noqa: FBT001 - called by the loop
    if not future.done():
        future.set_result(result)
