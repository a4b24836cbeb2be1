"""Keeps what is known of a GPU on disk at its first hard fault, before a reset.

Guarantees:

1. A bundle is written at once and again after SETTLE_S, when the kernel log and the next health poll
   have shown what else the driver knows.
2. Keeping never blocks. What the disk rejects waits and is retried with growing pauses.
3. The room is bounded: MAX_FILES bundles of MAX_BYTES, of each kind: those that an operator asked for never
   push out those that were kept for a fault.

A bundle is ``<uuid>-<boot>-<n>.json``; one that was asked for is ``asked-<uuid>-<boot>-<n>.json``. The
highest number is the newest.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from agent import files
from agent.bus import Latest
from agent.counts import Count
from agent.log import about
from agent.model.effects import KeepEvidence
from agent.model.health import Condition
from agent.model.ids import GpuUuid
from agent.model.snapshot import Snapshot
from agent.threads import in_daemon_thread
from agent.views import documents
from agent.views.documents import Json, TimeOf
from agent.views.events import EventRing
from agent.waiting import PERIOD_NS, sleep_proving, wait_set

MAX_FILES: Final = 16
MAX_BYTES: Final = 1024 * 1024
MAX_EVENTS: Final = 256
"""Events of the GPU in one bundle."""
MAX_WAITING: Final = 64
"""Faults that wait to be written; each GPU has one until it recovers."""

SETTLE_S: Final = 2.0
RETRY_CAP_S: Final = 60.0

_ASKED: Final = "asked-"
_NAME: Final = re.compile(r"(asked-)?[A-Za-z0-9_-]{1,120}-([0-9]{1,9})\.json")

_log = logging.getLogger(__name__)


class Bundle(NamedTuple):
    """A bundle that was asked for."""

    document: Json
    path: str | None
    """Where it is; None if the disk rejected it."""
    trouble: str | None


class EvidenceSink:
    """Writes bundles."""

    lost = Count("evidence_lost_total", "bundles", "Bundles not kept because too many waited to be written.")
    failures = Count("evidence_failures_total", "writes", "Writes of evidence that failed.")

    def __init__(
        self,
        directory: str,
        *,
        latest: Latest[Snapshot],
        events: EventRing,
        kernel_log: Callable[[], Iterable[str]],
        boot_id: str,
        time_of: TimeOf,
        period_ns: int = PERIOD_NS,
        settle_s: float = SETTLE_S,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """``kernel_log`` returns the driver's newest lines in the kernel log."""
        self.path = directory
        """The directory."""
        self._settle_s = settle_s
        self._latest = latest
        self._events = events
        self._kernel_log = kernel_log
        self._boot = _file_word(boot_id)[:8] or "unknown"
        self._time_of = time_of
        self._period_ns = period_ns
        self._prove = prove
        self._waiting: deque[KeepEvidence] = deque()
        self._asked = asyncio.Event()
        self.trouble: str | None = None
        """Why the bundle of a fault is not on disk; None while none waits."""

    def keep(self, effect: KeepEvidence) -> None:
        """Have a bundle kept for a fault; never blocks."""
        if len(self._waiting) >= MAX_WAITING:
            self.lost += 1
            return
        self._waiting.append(effect)
        self._asked.set()

    async def run(self) -> None:
        """Write what was asked for until cancelled."""
        pause_s = self._settle_s
        while True:
            await wait_set(self._asked, self._period_ns)
            self._prove()
            if not self._asked.is_set():
                continue
            written = await self._write_waiting()
            await sleep_proving(pause_s, self._period_ns, self._prove)
            for effect, path in written:
                if not await self._rewrite(effect, path):
                    self.keep(effect)
            pause_s = self._settle_s if self.trouble is None else min(2 * pause_s, RETRY_CAP_S)

    async def flush(self, timeout_s: float) -> None:
        """Write what waits, but wait no longer than the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._write_waiting()

    async def make(self, gpu: GpuUuid) -> Bundle | None:
        """Make a bundle now; None if there is no such GPU."""
        document = self._document(gpu, None)
        if document is None:
            return None
        try:
            return Bundle(document, await self._write(_ASKED + self._stem(gpu), document), None)
        except (OSError, RuntimeError) as error:
            return Bundle(document, None, _detail_of(error))

    async def _write_waiting(self) -> list[tuple[KeepEvidence, str]]:
        """Write what waits, up to what the disk rejects; return what was written and where."""
        written = []
        while self._waiting:
            effect = self._waiting[0]
            document = self._document(effect.gpu, effect.condition)
            try:
                if document is not None:
                    written.append((effect, await self._write(self._stem(effect.gpu), document)))
            except (OSError, RuntimeError) as error:
                self._note_failure(error)
                return written
            self._waiting.popleft()
        self._asked.clear()
        if self.trouble is not None:
            _log.info(f"Kept evidence again in {self.path}")
            self.trouble = None
        return written

    async def _rewrite(self, effect: KeepEvidence, path: str) -> bool:
        document = self._document(effect.gpu, effect.condition)
        try:
            if document is not None:
                await self._write(self._stem(effect.gpu), document, path)
        except (OSError, RuntimeError) as error:
            self._note_failure(error)
            return False
        return True

    def _stem(self, gpu: GpuUuid) -> str:
        return f"{_file_word(gpu)}-{self._boot}"

    def _document(self, gpu: GpuUuid, why: Condition | None) -> Json | None:
        snapshot = self._latest.value
        view = next((view for view in snapshot.gpus if view.gpu.uuid == gpu), None)
        if view is None:
            return None
        of_gpu = (
            entry for entry in self._events.newest_first() if (entry.event.fields or {}).get("uuid") == gpu
        )
        return documents.bundle(
            view,
            snapshot,
            why=why,
            entries=reversed(list(islice(of_gpu, MAX_EVENTS))),
            kernel_log=self._kernel_log(),
            time_of=self._time_of,
        )

    async def _write(self, stem: str, document: Json, path: str | None = None) -> str:
        directory = self.path
        written = await in_daemon_thread(
            "evidence-writer", lambda: _write_bundle(directory, stem, document, path)
        )
        if path is None:
            _log.info("Kept evidence of a GPU in %(path)s", about(path=written))
        return written

    def _note_failure(self, error: OSError | RuntimeError) -> None:
        detail = _detail_of(error)
        self.failures += 1
        if self.trouble != detail:
            _log.error(
                "Could not keep evidence in %(path)s: %(detail)s", about(path=self.path, detail=detail)
            )
        self.trouble = detail


def _detail_of(error: OSError | RuntimeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _file_word(text: str) -> str:
    """Return text as part of a file's name: names of GPUs come from the driver, not from us."""
    return re.sub(r"[^A-Za-z0-9-]", "_", text)[:64]


def _write_bundle(directory: str, stem: str, document: Json, path: str | None) -> str:
    """Write a bundle, over the one at ``path`` if given, and drop the oldest; blocks."""
    Path(directory).mkdir(mode=0o700, exist_ok=True)
    numbers = _numbers(directory)
    if path is None:
        path = str(Path(directory, f"{stem}-{1 + max(numbers.values(), default=0)}.json"))
        numbers[path] = 1 + max(numbers.values(), default=0)
    files.write(path, _encoded(document))
    is_asked = Path(path).name.startswith(_ASKED)
    alike = [each for each in numbers if Path(each).name.startswith(_ASKED) is is_asked]
    for old in sorted(alike, key=lambda each: numbers[each])[:-MAX_FILES]:
        Path(old).unlink(missing_ok=True)
    return path


def _numbers(directory: str) -> dict[str, int]:
    """Return the bundles there are, by path, each with its number."""
    found = {str(each): _NAME.fullmatch(each.name) for each in Path(directory).iterdir()}
    return {path: int(match[2]) for path, match in found.items() if match}


def _encoded(document: Json) -> bytes:
    """Return the bytes of a bundle; where they are too many, the older half of each list goes."""
    while True:
        text = json.dumps(document, ensure_ascii=False, indent=1, default=str)
        raw = text.encode("utf-8", "backslashreplace") + b"\n"
        lists = {name: value for name, value in document.items() if isinstance(value, list) and value}
        if len(raw) <= MAX_BYTES or not lists:
            return raw
        document = document | {name: value[(len(value) + 1) // 2 :] for name, value in lists.items()}
