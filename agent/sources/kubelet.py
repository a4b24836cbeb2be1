"""Watches the device-plugins directory: the kubelet's socket, and the sockets the agent serves there.

Guarantees:

1. The result of lstat decides; inotify only triggers a poll. So a second event for the same file emits
   nothing, a lost event is made up for within ``recheck_ns``, and a storm of events costs one
   poll in MIN_GAP_NS. The kernel's event queue is the only one, and it is bounded.
2. Where the limits of inotify are reached the source polls the directory every ``poll_ns`` instead, and
   retries inotify.
3. Each change is emitted once; the source waits quietly for a directory or socket that does not exist yet.

Sources: facts on registration, kubernetes:pkg/kubelet/cm/devicemanager; inotify(7).
"""

import asyncio
import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from agent import guard
from agent.bus import Inbox, Latest
from agent.directory_watch import ChangeWaiter, DirectoryWatch
from agent.log import about
from agent.model.facts import Fact, KubeletSocketSeen, OwnSocketLost, WatchedDirectoryDeleted
from agent.model.ids import ResourceName, SocketIdentity, socket_name
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.model.snapshot import Resource, Snapshot

MIN_GAP_NS: Final = 5 * MILLISECOND_NS
"""Between two polls that events trigger."""

_LIMITS: Final = frozenset({errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM})

_log = logging.getLogger(__name__)


class KubeletSettings(msgspec.Struct, frozen=True):
    """Defaults are the product's; tests set shorter times."""

    recheck_ns: int = 30 * SECOND_NS
    """How often to poll without an event."""
    poll_ns: int = SECOND_NS
    """How often to poll without inotify, or while the directory or the kubelet's socket is missing."""
    watch_retry_ns: int = 30 * SECOND_NS
    """How often to retry inotify after its limits were reached."""
    deletion_grace_ns: int = SECOND_NS
    """How long a deleted directory may be missing before its deletion is emitted."""


class KubeletSource:
    """Emits changes of the kubelet's socket and the loss of the agent's own sockets."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        latest: Latest[Snapshot],
        kubelet_socket: Path,
        clock: Callable[[], int],
        settings: KubeletSettings | None = None,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        self._inbox = inbox
        self._latest = latest
        self._socket = kubelet_socket
        self._directory = kubelet_socket.parent
        self._clock = clock
        self._prove = prove
        self._settings = settings if settings is not None else KubeletSettings()
        self._waiter = ChangeWaiter(gap_ns=MIN_GAP_NS)
        self._watch_retry_at_ns = 0
        self._emitted: KubeletSocketSeen | None = None
        self._lost: dict[ResourceName, int] = {}
        self._gone_since_ns: int | None = None
        self._was_there = False
        self._deletion_emitted = False
        self._warned: set[str] = set()

    async def run(self) -> None:
        """Watch until cancelled. May be run again afterwards; two at once are not allowed."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    guard.run_forever("kubelet directory", self._watch_directory), name="kubelet directory"
                )
                group.create_task(
                    guard.run_forever("kubelet own sockets", self._watch_own_registrations),
                    name="kubelet own sockets",
                )
        finally:
            self._waiter.close()

    # When to poll

    async def _watch_directory(self) -> None:
        while True:
            self._poll()
            self._prove()
            is_calm = self._emitted is not None and self._emitted.identity is not None
            has_watch = self._waiter.watch is not None
            await self._waiter.wait(
                self._settings.recheck_ns if is_calm and has_watch else self._settings.poll_ns
            )

    async def _watch_own_registrations(self) -> None:
        """Poll the own sockets after each registration: its socket may be lost already."""
        version = self._latest.version
        known: list[tuple[ResourceName, int, SocketIdentity | None]] = []
        while True:
            sockets = [(each.name, each.generation, each.socket) for each in self._latest.value.resources]
            if sockets != known:
                known = sockets
                self._poll_own_sockets()
            version = await self._latest.wait_newer(version)

    # Polls

    def _poll(self) -> None:
        # The watch comes first: so either it or the poll sees a change in between.
        if self._poll_directory():
            self._ensure_watch()
        self._poll_kubelet_socket()
        self._poll_own_sockets()

    def _poll_directory(self) -> bool:
        """Return whether the directory can be watched; emit its deletion."""
        try:
            seen = os.stat(self._directory)  # noqa: PTH116 - one call of the kernel, no more
        except OSError as error:
            self._directory_missing(error)
            return False
        watch = self._waiter.watch
        is_new = watch is None or not watch.is_on(seen)
        if seen.st_nlink == 0 or (self._was_there and is_new and _is_read_only(self._directory)):
            # The mount keeps a deleted directory alive, or was made for the one before the present directory,
            # which only a new process may write.
            self._emit_deleted()
            return False
        self._was_there = True
        self._gone_since_ns = None
        self._warned.discard("directory")
        if is_new:
            self._waiter.close()
        return True

    def _directory_missing(self, error: OSError) -> None:
        self._waiter.close()
        if not self._was_there:
            self._log_once("directory", logging.INFO, "Waiting for the kubelet's directory", error)
            return
        now_ns = self._clock()
        if self._gone_since_ns is None:
            self._gone_since_ns = now_ns
        if now_ns - self._gone_since_ns >= self._settings.deletion_grace_ns:
            self._emit_deleted()

    def _emit_deleted(self) -> None:
        self._waiter.close()
        if not self._deletion_emitted:
            self._deletion_emitted = True
            self._inbox.put(WatchedDirectoryDeleted(path=str(self._directory)))

    def _poll_kubelet_socket(self) -> None:
        identity: SocketIdentity | None = None
        try:
            seen = self._socket.lstat()
        except FileNotFoundError:
            self._warned.discard("socket")
        except OSError as error:
            self._log_once("socket", logging.WARNING, "Reading the kubelet's socket failed", error)
        else:
            if stat.S_ISSOCK(seen.st_mode):
                identity = identity_of(seen)
                self._warned.discard("socket")
            else:
                self._log_once("socket", logging.WARNING, "The kubelet's socket path is not a socket")
        fact = KubeletSocketSeen(identity=identity)
        if fact != self._emitted:
            self._emitted = fact
            self._inbox.put(fact)

    def _poll_own_sockets(self) -> None:
        for resource in self._latest.value.resources:
            if resource.socket is None or self._lost.get(resource.name) == resource.generation:
                continue
            if not self._is_there(resource, resource.socket):
                self._lost[resource.name] = resource.generation
                self._inbox.put(OwnSocketLost(resource=resource.name, generation=resource.generation))

    def _is_there(self, resource: Resource, identity: SocketIdentity) -> bool:
        try:
            return identity_of((self._directory / socket_name(resource.name)).lstat()) == identity
        except FileNotFoundError:
            return False
        except OSError as error:
            # Unreadable does not mean lost.
            self._log_once("own", logging.WARNING, "Reading the agent's socket failed", error)
            return True

    # Inotify

    def _ensure_watch(self) -> None:
        if self._waiter.watch is not None or self._clock() < self._watch_retry_at_ns:
            return
        try:
            self._waiter.use(DirectoryWatch(self._directory))
        except OSError as error:
            if error.errno not in _LIMITS:
                # The directory was deleted just now; the next poll handles that.
                return
            self._watch_retry_at_ns = self._clock() + self._settings.watch_retry_ns
            self._log_once(
                "inotify",
                logging.WARNING,
                "Watching the kubelet's directory failed, so it is only polled; "
                "raise fs.inotify.max_user_instances or max_user_watches",
                error,
            )
            return
        if "inotify" in self._warned:
            self._warned.discard("inotify")
            _log.info("The kubelet's directory %(path)s is watched again", about(path=str(self._directory)))

    def _log_once(self, subject: str, level: int, message: str, error: OSError | None = None) -> None:
        """Log once until the subject recovers; the subjects are a closed set."""
        if subject not in self._warned:
            self._warned.add(subject)
            detail = str(self._socket) if error is None else str(error)
            path = str(self._socket)
            _log.log(level, "%(what)s: %(detail)s", about(what=message, path=path, detail=detail))


def _is_read_only(directory: Path) -> bool:
    """Return whether the mount that a directory is on is read-only for this process."""
    try:
        return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def identity_of(seen: os.stat_result) -> SocketIdentity:
    """Return what distinguishes a socket file from another at the same path."""
    return SocketIdentity(device=seen.st_dev, inode=seen.st_ino, mtime_ns=seen.st_mtime_ns)
