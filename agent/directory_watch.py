"""Reports changes in directories, by inotify; without it, after a timeout.

Invariants: events only cause a read, and only the result of the read counts. The kernel's queue of events is
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
"""Events read at a time; more stay in the kernel's queue."""

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
        """Watch the creation and removal of entries, and ``also``.

        Raises OSError: ENOSPC or EMFILE at a limit, ENOENT without a directory.
        """
        seen = os.stat(directory)  # noqa: PTH116 - exactly one system call
        self.directory: Final = (seen.st_dev, seen.st_ino)
        """Device and inode of the first directory, which identify it among others of its name."""
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
        """Read the queued events; return whether every directory is still watched."""
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
    """Wakes a reader, by a watch that exists while its directory does."""

    def __init__(self, *, gap_ns: int = 0) -> None:
        """Start without a watch; events within ``gap_ns`` of one another wake the reader once."""
        self._gap_s = gap_ns / 1e9
        self._begun = asyncio.Event()
        self.watch: DirectoryWatch | None = None
        """None: only the timeout wakes the reader."""

    def use(self, watch: DirectoryWatch | None) -> None:
        """Use this watch from now on, and close the previous one."""
        if watch is self.watch:
            return
        self.close()
        if watch is not None:
            self.watch = watch
            self._begun.set()

    def close(self) -> None:
        """Use no watch."""
        self._begun.clear()
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    async def wait(self, timeout_ns: int) -> bool:
        """Return when there is a reason to read, after the timeout at the latest: whether something changed.

        A watch that lost its directory is closed. Only one caller waits at a time.
        """
        watch = self.watch
        if watch is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_ns / 1e9):
                    await self._begun.wait()
            return False
        loop = asyncio.get_running_loop()
        not_before_s = loop.time() + self._gap_s
        has_changed = await watch.wait_readable(timeout_ns)
        await asyncio.sleep(max(0.0, not_before_s - loop.time()))
        if watch is self.watch and not watch.read_events():
            self.close()
        return has_changed


def _finish(future: asyncio.Future[bool], result: bool) -> None:  # noqa: FBT001 - called by the loop
    if not future.done():
        future.set_result(result)
