"""What watches one GPU: its thread, its task, and what they wait for; probing decides."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, Final

import msgspec

from agent import guard
from agent.errors import NvmlCode, NvmlError, SourceError
from agent.model.ids import GpuUuid, SourceName
from agent.model.structs import replace
from agent.sources.nvml.events import SharedEventSet
from agent.sources.nvml.inventory import DiscoveredGpu, ProbeResult
from agent.sources.nvml.library import Nvml
from agent.sources.nvml.listing import Watched
from agent.sources.nvml.probing import Probing
from agent.sources.nvml.sampling import Sampler
from agent.sources.nvml.threads import WorkerThread

CANCEL_AGAIN_S: Final = 0.1
RESTART_PAUSE_S: Final = 0.5

_log = logging.getLogger(__name__)


class GpuWatcher(msgspec.Struct, eq=False):
    """A GPU, or an index whose GPU was not identified yet, with its thread."""

    worker: WorkerThread
    nvml: Nvml
    sampler: Sampler
    index: int
    probing: Probing = Probing()
    discovered: DiscoveredGpu | None = None
    gone: bool = False
    registered: SharedEventSet | None = None
    topology_key: Hashable = None
    """What the newest topology sample depended on; when that changes, the GPU is sampled again."""
    topology_due_ns: int | None = None
    """Before then the topology is not sampled; None: the GPU was not listed yet."""
    wake: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    probed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    prober: "Restartable | None" = None

    @property
    def uuid(self) -> GpuUuid | None:
        """The GPU that it watches, once that is identified."""
        return self.discovered.gpu.uuid if self.discovered is not None else None

    @property
    def answers(self) -> bool:
        """Whether the newest probe found the GPU at its address."""
        is_found = self.discovered is not None and self.probing.failure is None
        return is_found and not self.gone and not self.worker.overdue

    @property
    def watched(self) -> Watched:
        """What it knows of the GPU, for the decision which watchers there are to be."""
        return Watched(self.index, self.uuid, self.gone, self.answers, self.worker.overdue)

    def with_readings(self, result: ProbeResult, *, reads_slow: bool) -> ProbeResult:
        """Return a probe's result with the GPU's readings. Blocks, on the GPU's own thread."""
        seen = result.discovered
        if result.failure is not None:
            return self._with_recovery_action(result, result.failure)
        sampled = self.sampler.sample(
            seen.handle, celsius=seen.celsius, total_bytes=seen.gpu.memory_bytes, urgent=reads_slow
        )
        return ProbeResult(seen, sampled.failure, sampled.sample, sampled.memory)

    def _with_recovery_action(self, result: ProbeResult, failure: NvmlError) -> ProbeResult:
        if failure.code == NvmlCode.GPU_IS_LOST:
            return result
        try:
            return replace(result, sample=self.sampler.sample_recovery_action(result.discovered.handle))
        except NvmlError as error:
            return replace(result, failure=error)

    def request(self) -> int:
        """Request a probe now; returns its number."""
        self.probing = self.probing.request()
        self.wake.set()
        return self.probing.requested

    async def wait_finished(self, number: int) -> None:
        """Return when the probe of this number is finished, or the GPU does not answer in time."""
        while self.probing.finished < number and not self.worker.overdue:
            await self.probed.wait()

    def notify(self) -> None:
        """Wake the tasks that wait for a probe."""
        self.probed.set()
        self.probed = asyncio.Event()


class Restartable:
    """A part of a session that is restarted alone, after a failure and when it is stale.

    Only a driver that is gone ends the session.
    """

    def __init__(
        self,
        component: SourceName,
        work: Callable[[], Awaitable[None]],
        *,
        worker: WorkerThread,
        called: Callable[[], str],
        on_restart: Callable[[], object] = lambda: None,
    ) -> None:
        """``worker`` is the thread that it uses, and ``called`` what the log calls it."""
        self._component = component
        self._work = work
        self._worker = worker
        self._called = called
        self._on_restart = on_restart
        self._running: asyncio.Task[None] | None = None

    def restart(self) -> None:
        """Restart it, on another thread if its own hangs outside of a driver call."""
        if self._running is not None:
            self._running.cancel()

    async def run(self) -> None:
        """Run it until cancelled; raises DriverGoneError."""
        while True:
            self._running = asyncio.get_running_loop().create_task(
                guard.run_forever(self._component, self._work), name=self._component
            )
            try:
                await asyncio.wait({self._running})
            finally:
                await cancel_and_wait(self._running)
            error = None if self._running.cancelled() else self._running.exception()
            if isinstance(error, DriverGoneError):
                raise error
            _log.error(
                "%s stopped (%s); restarting %s",
                self._called(),
                "stale" if error is None else repr(error),
                self._component,
                exc_info=error,
            )
            self._worker.abandon()
            self._on_restart()
            await asyncio.sleep(RESTART_PAUSE_S)


class DriverGoneError(SourceError):
    """NVML answers nothing useful for the whole node; it has to be initialised again."""

    def __init__(self, error: NvmlError) -> None:
        super().__init__(str(error))
        self.error = error


async def wait_finished(numbers: Mapping[GpuWatcher, int], timeout_ns: int) -> None:
    """Return when each GPU that answers has finished the probe of its number, or after the timeout."""
    try:
        async with asyncio.timeout(timeout_ns / 1e9):
            for watcher, number in numbers.items():
                await watcher.wait_finished(number)
    except TimeoutError:
        return


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and return when they are done.

    More than once where needed: a task group whose task fails while the group is cancelled raises the
    failure alone, and the task that waits for the group goes on.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _done, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
