"""Watches whether the MPS control daemon is ready: the file that it creates when every limit is set.

The daemon lives outside the agent, because every process that shares a GPU through it dies with it.

Guarantees:

1. The file itself decides; inotify only triggers a poll. A lost event is made up for within
   ``recheck_ns``, and a directory that cannot be watched is polled every ``poll_ns``.
2. A change is emitted once, the result of the first poll at once.
3. The loop waits for no file: a poll runs in a thread, one at a time, and one that does not return
   within ``deadline_ns`` stops the source with an error.

*What it cannot see:* a daemon that was killed leaves its file. NVIDIA's own removes it when it exits cleanly.

Source: NVIDIA/k8s-device-plugin:cmd/mps-control-daemon/main.go and mps/ready.go (``.ready`` below the MPS
root, which NVIDIA's manifests mount at /mps in every container).
"""

import asyncio
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent.bus import Inbox
from agent.directory_watch import ChangeWaiter, DirectoryWatch
from agent.errors import SourceError
from agent.model.facts import Fact, MpsSeen
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.threads import started_in_daemon_thread

READY_FILE: Final = ".ready"
CONTAINER_ROOT: Final = Path("/mps")
"""Where the MPS root is in a container of NVIDIA's manifests, whatever its path on the host."""

MIN_GAP_NS: Final = 5 * MILLISECOND_NS
"""Between two polls that events trigger."""


class MpsSettings(msgspec.Struct, frozen=True):
    """The defaults are the product's; tests set shorter times."""

    recheck_ns: int = 30 * SECOND_NS
    """How often to poll without an event."""
    poll_ns: int = SECOND_NS
    """How often to poll where there is no directory to watch."""
    deadline_ns: int = 5 * SECOND_NS
    """How long a poll may take."""


class _State(NamedTuple):
    """The result of one poll."""

    watch: DirectoryWatch | None
    """On the present directory; None: there is none, or it cannot be watched."""
    missing: str | None
    """Why the daemon is not ready; None: it is."""


class MpsSource:
    """Emits whether the MPS control daemon is ready."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        mps_root: Path,
        container_root: Path = CONTAINER_ROOT,
        settings: MpsSettings | None = None,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """Poll below ``mps_root`` and, where this process has no such directory, below ``container_root``."""
        self._inbox = inbox
        self._roots = (mps_root, container_root)
        self._settings = settings if settings is not None else MpsSettings()
        self._prove = prove
        self._waiter = ChangeWaiter(gap_ns=MIN_GAP_NS)
        self._emitted: MpsSeen | None = None
        self._reading: asyncio.Future[_State] | None = None

    async def run(self) -> None:
        """Watch until cancelled; raises SourceError if the directory does not answer.

        May be run again afterwards; two at once are not allowed.
        """
        try:
            while True:
                await self._poll()
                self._prove()
                has_watch = self._waiter.watch is not None
                await self._waiter.wait(self._settings.recheck_ns if has_watch else self._settings.poll_ns)
        finally:
            self._waiter.close()

    async def _poll(self) -> None:
        """Read the state in a thread, as the root may be a mount that does not answer."""
        if self._reading is not None:
            await self._finished(self._reading)  # of a run that was cancelled meanwhile
        watch = self._waiter.watch
        self._reading = started_in_daemon_thread("mps-read", lambda: _read_state(self._roots, watch))
        try:
            await self._finished(self._reading)
        except (asyncio.CancelledError, SourceError):
            self._reading.add_done_callback(lambda late: _close_new(late, watch))
            raise
        seen = self._reading.result()
        self._waiter.use(seen.watch)
        fact = MpsSeen(ready=seen.missing is None, message=seen.missing or "")
        if fact != self._emitted:
            self._emitted = fact
            self._inbox.put(fact)

    async def _finished(self, reading: "asyncio.Future[_State]") -> None:
        await asyncio.wait((reading,), timeout=self._settings.deadline_ns / 1e9)
        if not reading.done():
            raise SourceError(
                f"{self._roots[0]} cannot be read within {self._settings.deadline_ns / SECOND_NS:g} s;"
                " see the kernel log for blocked tasks"
            )


def _close_new(late: "asyncio.Future[_State]", watch: DirectoryWatch | None) -> None:
    """Close the watch that an abandoned poll opened."""
    if late.cancelled() or late.exception() is not None:
        return
    made = late.result().watch
    if made is not None and made is not watch:
        made.close()


def _read_state(roots: Sequence[Path], watch: DirectoryWatch | None) -> _State:
    """Read the state once. The watch comes first: so either it or the read sees a change in between."""
    root = next((each for each in roots if _is_directory(each)), None)
    watch = None if root is None else _watch_of(root, watch)
    return _State(watch, _missing((roots[0] if root is None else root) / READY_FILE))


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        # A root that may not be read is not the agent's; the other one may be.
        return False


def _watch_of(root: Path, watch: DirectoryWatch | None) -> DirectoryWatch | None:
    """Return a watch on the directory: the present one if it is that directory's."""
    try:
        seen = root.stat()
        return watch if watch is not None and watch.is_on(seen) else DirectoryWatch(root)
    except OSError:
        # It was removed just now, or a limit of inotify is reached: the next poll comes in poll_ns.
        return None


def _missing(path: Path) -> str | None:
    """Return why the daemon is not ready; None if it is."""
    try:
        seen = path.stat()
    except FileNotFoundError:
        return f"The MPS control daemon is not ready: {path} does not exist"
    except OSError as error:
        return f"Whether the MPS control daemon is ready is unknown: {path}: {error.strerror}"
    if not stat.S_ISREG(seen.st_mode):
        return f"The MPS control daemon is not ready: {path} is no regular file"
    return None
