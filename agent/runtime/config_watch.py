"""Watches the configuration file, also where it is a link into a mounted config map.

Guarantees:

1. What counts is what the file holds; inotify only causes a read. So a link that is swapped, as
   the kubelet and NVIDIA's config-manager do it, a file that is replaced and one that is written in
   place are all seen, a touch changes nothing, and several events in a row cost one read.
2. Where a directory cannot be watched, or inotify's limits are reached, the file is read every
   ``recheck_ns``.

Sources: inotify(7); kubernetes:pkg/volume/util/atomic_writer.go (``..data``);
NVIDIA/k8s-device-plugin:cmd/config-manager/main.go, updateSymlink.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from asyncinotify import Mask

from agent.config.yaml_tree import UnreadableError, bytes_of
from agent.counts import Count
from agent.directory_watch import ChangeWaiter, DirectoryWatch
from agent.log import about
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.threads import in_daemon_thread

SETTLE_NS: Final = 200 * MILLISECOND_NS
"""How long nothing may happen before the file is read: an editor writes in several steps."""
MAX_SETTLE_NS: Final = 2 * SECOND_NS
"""How long a directory in which something always happens can delay the read."""
RECHECK_NS: Final = 30 * SECOND_NS
"""How often to read although no event came."""
MAX_LINKS: Final = 16
"""Links that are followed; the kernel follows 40."""

_log = logging.getLogger(__name__)


def fingerprint_of(path: str) -> int | None:
    """Return what distinguishes the file's content from another, None if it cannot be read; blocks."""
    try:
        return hash(bytes_of(path))
    except UnreadableError:
        return None


class ConfigWatch:
    """Calls back when the file holds something else than it did."""

    reads = Count("config_reads_total", "reads", "Reads of the configuration file by its watch.")

    def __init__(
        self,
        path: str,
        *,
        known: Callable[[], int | None],
        on_change: Callable[[], None],
        recheck_ns: int = RECHECK_NS,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """``known`` returns the fingerprint of what was read last."""
        self._path = path
        self._known = known
        self._on_change = on_change
        self._recheck_ns = recheck_ns
        self._prove = prove
        self._watched: frozenset[Path] = frozenset()
        self._waiter = ChangeWaiter()
        self._has_warned = False

    async def run(self) -> None:
        """Watch until cancelled. May be run again after it ended; two at once are not allowed."""
        try:
            while True:
                directories = await in_daemon_thread("config-links", self._directories)
                if directories != self._watched or self._waiter.watch is None:
                    self._watch_directories(directories)
                await self._check()
                self._prove()
                await self._wait_settled()
        finally:
            self._waiter.close()

    async def _check(self) -> None:
        seen = await in_daemon_thread("config-fingerprint", lambda: fingerprint_of(self._path))
        if seen != self._known():
            self._on_change()
        self.reads += 1

    def _directories(self) -> frozenset[Path]:
        found: set[Path] = set()
        with contextlib.suppress(OSError):  # swapped just now, which causes an event of the ones found
            found.update(directories_of(Path(self._path)))
        return frozenset(found)

    async def _wait_settled(self) -> None:
        """Return when something happened and nothing more does, or when it is time to read anyway."""
        timeout_ns = self._recheck_ns
        for _ in range(MAX_SETTLE_NS // SETTLE_NS):
            if not await self._waiter.wait(timeout_ns) or self._waiter.watch is None:
                return
            timeout_ns = SETTLE_NS

    def _watch_directories(self, directories: frozenset[Path]) -> None:
        self._waiter.close()
        if not directories:
            return
        try:
            self._waiter.use(DirectoryWatch(*directories, also=Mask.CLOSE_WRITE))
        except OSError as error:
            self._warn(error)
            return
        self._watched = directories
        self._has_warned = False

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Could not watch the configuration file %(path)s (%(detail)s); reading every %(every_s)s s",
                about(path=self._path, detail=str(error), every_s=self._recheck_ns // SECOND_NS),
            )


def directories_of(path: Path) -> Iterator[Path]:
    """Yield the directories in which the file can be replaced: of each link on the way, and of the file.

    A directory on the way may be a link too, as ``..data`` of a config map is. Blocks.
    """
    here = path.absolute()
    for _ in range(MAX_LINKS):
        link = next((part for part in (*reversed(here.parents), here) if part.is_symlink()), None)
        if link is None:
            break
        yield link.parent
        target = Path(os.path.normpath(link.parent / link.readlink()))
        here = target / here.relative_to(link)
    yield here.parent
