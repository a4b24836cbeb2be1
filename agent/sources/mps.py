"""Watches whether the MPS control daemon serves: the file that it makes when every limit is set.

The daemon lives outside the agent, because its end is the end of everybody who shares a GPU through it.

Guarantees:

1. What counts is what is there; inotify only says when to look. A lost event is made up for within
   ``recheck_ns``, and where a directory cannot be watched it is looked at every ``poll_ns``.
2. A change is told once, the first look at once.

*What it cannot see:* a daemon that was killed leaves its file. NVIDIA's own removes it when it ends in order.

Source: NVIDIA/k8s-device-plugin:cmd/mps-control-daemon/main.go and mps/ready.go (``.ready`` below the MPS
root, which NVIDIA's manifests mount at /mps in every container).
"""

import asyncio
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bus import Inbox
from agent.directory_watch import DirectoryWatch
from agent.model.facts import Fact, MpsSeen
from agent.model.policy import MILLISECOND_NS, SECOND_NS

READY_FILE: Final = ".ready"
CONTAINER_ROOT: Final = Path("/mps")
"""Where the MPS root is in a container of NVIDIA's manifests, whatever it is called on the host."""

MIN_GAP_NS: Final = 5 * MILLISECOND_NS
"""Between two looks that events ask for."""


@dataclass(frozen=True, slots=True)
class MpsSettings:
    """Defaults are the product's; tests set shorter times."""

    recheck_ns: int = 30 * SECOND_NS
    """How often to look although no event came."""
    poll_ns: int = SECOND_NS
    """How often to look where there is no directory to watch."""


class MpsSource:
    """Tells whether the MPS control daemon serves."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        mps_root: Path,
        container_root: Path = CONTAINER_ROOT,
        clock: Callable[[], int],
        settings: MpsSettings | None = None,
    ) -> None:
        """Look below ``mps_root`` and, where this process has no such directory, below ``container_root``."""
        self._inbox = inbox
        self._roots = (mps_root, container_root)
        self._clock = clock
        self._settings = settings if settings is not None else MpsSettings()
        self._watch: DirectoryWatch | None = None
        self._told: MpsSeen | None = None

    async def run(self) -> None:
        """Watch for ever. May be run again after it ended; two at once are not allowed."""
        try:
            while True:
                self._look()
                began_ns = self._clock()
                await self._wait_changed()
                await asyncio.sleep(max(0, began_ns + MIN_GAP_NS - self._clock()) / 1e9)
        finally:
            self._unwatch()

    def _look(self) -> None:
        """Look what is there. The watch comes first: what changes between the two is seen by one of them."""
        root = next((each for each in self._roots if each.is_dir()), None)
        if root is None:
            self._unwatch()
        else:
            self._watch_directory(root)
        self._tell((self._roots[0] if root is None else root) / READY_FILE)

    def _tell(self, path: Path) -> None:
        missing = _missing(path)
        fact = MpsSeen(ready=missing is None, message=missing or "")
        if fact != self._told:
            self._told = fact
            self._inbox.put(fact)

    def _watch_directory(self, root: Path) -> None:
        try:
            seen = root.stat()
            if self._watch is not None and self._watch.directory == (seen.st_dev, seen.st_ino):
                return
            self._unwatch()
            self._watch = DirectoryWatch(root)
        except OSError:
            # It went away just now, or a limit of inotify is reached: the next look comes in poll_ns.
            self._unwatch()

    async def _wait_changed(self) -> None:
        watch = self._watch
        if watch is None:
            await asyncio.sleep(self._settings.poll_ns / 1e9)
            return
        await watch.wait_readable(self._settings.recheck_ns)
        if not watch.take_events():
            self._unwatch()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _missing(path: Path) -> str | None:
    """Return why the daemon does not serve; None if it does."""
    try:
        seen = path.stat()
    except FileNotFoundError:
        return f"The MPS control daemon is not ready: {path} does not exist"
    except OSError as error:
        return f"Whether the MPS control daemon is ready cannot be seen: {path}: {error.strerror}"
    if not stat.S_ISREG(seen.st_mode):
        return f"The MPS control daemon is not ready: {path} is no file"
    return None
