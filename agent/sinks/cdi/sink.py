"""Keeps the CDI specifications of this node's devices where container runtimes read them.

Guarantees:

1. ``missing`` returns whether a runtime resolves each name now: the file is the one that was seen to be
   right last, to the byte's time, and the name is in it.
2. A file that was deleted, replaced or changed is written again at once; a device that appeared, disappeared
   or was partitioned is in the file before an answer can hold its name.
3. Nothing here blocks the loop: reading the driver's files and writing are the work of a thread.
4. While no CDI strategy is configured nothing is read, and nothing is written.

Files of others are left alone, and ours stay when the agent ends, as pods that start then need them.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncinotify import Mask

from agent import guard
from agent.bus import Latest
from agent.config.settings import Cdi
from agent.core.allocation.injection import uses_cdi
from agent.core.reasons import REASON_SPECS
from agent.counts import Count
from agent.directory_watch import ChangeWaiter, DirectoryWatch
from agent.log import About, about
from agent.model.facts import CdiReported, Fact, WatchedDirectoryDeleted
from agent.model.health import Reason
from agent.model.snapshot import Snapshot
from agent.sinks.cdi.records import CdiError, FileIdentity, SpecFile, SpecFiles, Wanted
from agent.threads import in_daemon_thread
from agent.waiting import wait_set

if TYPE_CHECKING:
    from agent.sinks.cdi.files import SpecDirectory

RECHECK_NS: Final = 30_000_000_000
"""How often the driver's files are read although nothing changed: a daemon's socket may have gone, and
a container with a mount that is not there does not start."""

RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 60.0

MIN_GAP_S: Final = 0.05
"""Between two jobs."""
MAX_GAP_S: Final = 6.4
"""The same while another process removes our files again and again."""
STOOD_S: Final = 10.0
"""A file that stood for so long was not removed again and again."""

SETTLE_S: Final = 2.0
"""How long an Allocate waits at most for a file that is being written."""

MAX_NAMED: Final = 4
"""Devices that the sentence about a trouble names."""

_CHANGES: Final = Mask.CLOSE_WRITE | Mask.ATTRIB
"""What may make another file of one that stays where it is."""

_log = logging.getLogger(__name__)


class CdiSink:
    """Writes the spec files, and knows which names they resolve."""

    failures = Count("cdi_failures_total", "jobs", "Reads and writes of CDI files that failed.")

    def __init__(
        self,
        *,
        emit: Callable[[Fact], object],
        latest: Latest[Snapshot],
        settings: Cdi,
        sys_root: str,
        is_in_container: bool,
        clock: Callable[[], int],
        recheck_ns: int = RECHECK_NS,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        self._emit = emit
        self._latest = latest
        self._settings = settings
        self._sys_root = sys_root
        self._is_in_container = is_in_container
        self._clock = clock
        self._prove = prove
        self._recheck_ns = recheck_ns
        self._directory: SpecDirectory | None = None
        self._wanted: Wanted | None = None
        """What the newest job is for."""
        self._written: Wanted | None = None
        """What the files contain."""
        self._files: dict[str, SpecFile] = {}
        self._logged: frozenset[str] = frozenset()
        self._asked = asyncio.Event()
        self._changed = asyncio.Event()
        """The files are to contain something else than what the newest job was for."""
        self._done = asyncio.Event()
        """Of the next job."""
        self._waiter = ChangeWaiter(gap_ns=int(MIN_GAP_S * 1e9))
        self._gap_s = MIN_GAP_S
        self._written_ns = 0
        self.absent: frozenset[str] = frozenset()
        """CDI names that are wanted and that this node has nothing for, such as GDS without its module."""
        self._has_failed = False
        """The newest job did."""
        self.trouble: str | None = None
        """Why names do not resolve that should; None: they do, or none is wanted."""
        self._reported: str | None = None
        """Why no file resolves an advertised device, as the core was sent it last."""

    def missing(self, names: Sequence[str]) -> str | None:
        """Return the first of these CDI names that no spec file resolves now; None: all are resolved."""
        right: dict[str, bool] = {}
        for name in names:
            kind = name.partition("=")[0]
            file = self._files.get(kind)
            if file is not None and kind not in right:
                right[kind] = _is_right(file)
            if file is None or name not in file.names or not right[kind]:
                self._asked.set()
                return name
        return None

    async def settle(self) -> None:
        """Wait until the files are as they should be, or it is known that they will not be soon."""
        if self._wanted_now() is None or self._is_settled():
            return
        self._asked.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._done.wait()
                while not self._has_failed and not self._is_settled():
                    await self._done.wait()

    def _is_settled(self) -> bool:
        return self._wanted_now() == self._written and all(map(_is_right, self._files.values()))

    async def run(self) -> None:
        """Keep the files until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    guard.run_forever("cdi snapshots", self._follow_snapshots), name="cdi snapshots"
                )
                group.create_task(
                    guard.run_forever("cdi directory", self._follow_directory), name="cdi directory"
                )
                group.create_task(guard.run_forever("cdi files", self._keep), name="cdi files")
        finally:
            self._waiter.close()

    # When to work

    async def _follow_snapshots(self) -> None:
        version = self._latest.version
        while True:
            if self._is_wanted(self._latest.value) and self._wanted_now() != self._wanted:
                self._asked.set()
                self._changed.set()
            version = await self._latest.wait_newer_first(version)

    async def _follow_directory(self) -> None:
        while True:
            if await self._waiter.wait(self._recheck_ns):
                # Another program's file may name our devices, so every change is a reason to check.
                self._asked.set()

    async def _keep(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            self._prove()
            self._asked.clear()
            self._changed.clear()
            wanted = self._wanted_now() if self._is_wanted(self._latest.value) else None
            if wanted is None:
                self.trouble = None
                self._report(None)
                await wait_set(self._asked, self._recheck_ns)
                continue
            self._wanted = wanted
            is_done = await self._work(wanted)
            self._done.set()
            self._done = asyncio.Event()
            await asyncio.sleep(MIN_GAP_S)
            with suppress(TimeoutError):
                # A fight over the files is no reason to keep a new device waiting.
                async with asyncio.timeout(self._gap_s - MIN_GAP_S):
                    await self._changed.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._recheck_ns / 1e9 if is_done else retry_s):
                    await self._asked.wait()
            retry_s = RETRY_FIRST_S if is_done else min(2 * retry_s, RETRY_CAP_S)

    def _is_wanted(self, snapshot: Snapshot) -> bool:
        return uses_cdi(snapshot.policy.injection)

    def _wanted_now(self) -> Wanted | None:
        """Return what the files are to contain; while the driver is away, what they contained before."""
        snapshot = self._latest.value
        version = snapshot.driver.driver_version
        if version is None or not snapshot.gpus:
            return self._wanted
        without_node = (
            f"{condition.placement}: {condition.message}"
            for view in snapshot.gpus
            for condition in view.conditions
            if condition.reason is Reason.DEVICE_NODE_MISSING and condition.lasts
        )
        return Wanted(
            gpus=tuple(view.gpu for view in sorted(snapshot.gpus, key=lambda view: not view.present)),
            driver_version=version,
            injection=snapshot.policy.injection,
            mig_strategy=snapshot.policy.mig_strategy,
            present=frozenset(view.gpu.uuid for view in snapshot.gpus if view.present),
            signs=(*snapshot.control_nodes, *without_node),
        )

    # The work

    async def _work(self, wanted: Wanted) -> bool:
        try:
            made = await in_daemon_thread("cdi-writer", lambda: self._update(wanted))
        except (CdiError, OSError, RuntimeError) as error:
            self._note_failure(error)
            return False
        self._written, self._has_failed = wanted, False
        self._apply(made)
        self._ensure_watch()
        return True

    def _update(self, wanted: Wanted) -> SpecFiles:
        if self._directory is None:
            from agent.sinks.cdi.files import SpecDirectory  # noqa: PLC0415 - most nodes need none of it

            self._directory = SpecDirectory(
                self._settings, sys_root=self._sys_root, is_in_container=self._is_in_container
            )
        return self._directory.update(wanted)

    def _apply(self, made: SpecFiles) -> None:
        is_lost = False
        for kind, file in made.files.items():
            had = self._files.get(kind)
            if file.is_new and had is not None and had.content == file.content:
                is_lost = True
                _log.warning(
                    "Wrote the CDI specification %(path)s again, which was gone or changed", _about(file)
                )
            elif file.is_new:
                _log.info("Wrote the CDI specification %(path)s: %(devices)s devices", _about(file))
        self._set_gap(is_lost=is_lost)
        self._files, self.absent = made.files, made.absent
        notes = frozenset((*made.notes, *made.conflicts, *made.left_out))
        for note in sorted(notes - self._logged):
            _log.warning("The CDI specification: %(detail)s", about(detail=note))
        self._logged = notes
        trouble = _trouble_of(made)
        if self.trouble is not None and trouble is None:
            _log.info(
                "The CDI specification in %(path)s resolves every device again",
                about(path=self._settings.spec_dir),
            )
        self.trouble = trouble
        # A device that no file names has no node, and is Unhealthy for that.
        self._report(trouble if made.conflicts else None)

    def _set_gap(self, *, is_lost: bool) -> None:
        """Do not fight at full speed with a process that removes our files."""
        now_ns = self._clock()
        has_stood = now_ns - self._written_ns > STOOD_S * 1e9
        if is_lost and not has_stood:
            self._gap_s = min(2 * self._gap_s, MAX_GAP_S)
        elif has_stood:
            self._gap_s = MIN_GAP_S
        if is_lost:
            self._written_ns = now_ns

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        self._has_failed = True
        detail = str(error)
        if isinstance(error, OSError):
            detail = f"{error.filename or self._settings.spec_dir}: {error.strerror}"
            self._emit_if_deleted(error)
        if self.trouble != detail:
            _log.error("Could not write the CDI specification: %(detail)s", about(detail=detail))
        self.trouble = detail
        # Where the files there contain what they should, nothing is missing.
        self._report(None if self._is_settled() else detail)

    def _report(self, trouble: str | None) -> None:
        if trouble != self._reported:
            self._reported = trouble
            self._emit(CdiReported(trouble))

    def _emit_if_deleted(self, error: OSError) -> None:
        """Emit that the node deleted the directory: a mount keeps it, or a new one is read-only here."""
        if error.errno == errno.EROFS and self._files:
            self._emit(WatchedDirectoryDeleted(path=self._settings.spec_dir))
            return
        with suppress(OSError):
            if os.stat(self._settings.spec_dir).st_nlink == 0:  # noqa: PTH116 - one call of the kernel, no more
                self._emit(WatchedDirectoryDeleted(path=self._settings.spec_dir))

    # Inotify

    def _ensure_watch(self) -> None:
        if self._waiter.watch is None:
            # Without one the files are checked every RECHECK_NS, and by every Allocate.
            with suppress(OSError):
                self._waiter.use(DirectoryWatch(Path(self._settings.spec_dir), also=_CHANGES))
                # What happened since the files were written was not seen.
                self._ask_if_lost()

    def _ask_if_lost(self) -> None:
        if not all(_is_right(file) for file in self._files.values()):
            self._asked.set()


def _trouble_of(made: SpecFiles) -> str | None:
    """Return why names do not resolve although the files were written; None: they do."""
    if made.conflicts:
        return f"{made.conflicts[0]}, so runtimes resolve it by neither; remove that file"
    if not made.left_out:
        return None
    named = "; ".join(made.left_out[:MAX_NAMED]) + ("; ..." if len(made.left_out) > MAX_NAMED else "")
    number = f"{len(made.left_out)} device{'s are' if len(made.left_out) > 1 else ' is'}"
    advice = REASON_SPECS[Reason.DEVICE_NODE_MISSING].advice
    return f"{number} in no CDI specification ({named}); {advice}"


def _is_right(file: SpecFile) -> bool:
    """Return whether a file is the one that was seen to be right last."""
    try:
        seen = os.stat(file.path, follow_symlinks=False)  # noqa: PTH116 - one call of the kernel, no more
    except OSError:
        return False
    return FileIdentity.of(seen) == file.identity


def _about(file: SpecFile) -> About:
    return about(path=file.path, devices=len(file.names))
