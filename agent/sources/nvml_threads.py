"""Threads for calls that may never return, with a deadline on each, off the loop and off its files.

A thread stuck in the kernel keeps a killed process's files open. So the first thread takes a
descriptor table of its own, without the agent's sockets and locks, and starts the others, which share
it: after a SIGKILL everything the agent serves on is free, even if the driver never lets go.

Invariants: a lane has one job in flight, and no other is queued behind it. Each call of a job is noted
before it is made. The loop looks at a lane's call when its deadline is due, not before. Threads never
log and never touch the loop: an outcome waits in Completions, at most one for each key.
"""

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from agent.errors import SourceError
from agent.sources.nvml_files import take_own_files

_OF_THE_THREAD: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
)
"""Signals that a fault of the thread itself raises; blocking them would hide it."""

T = TypeVar("T")


class Completions:
    """What threads have to tell the loop: callbacks by key, the newest of a key, run on the loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        # The loop's own wake-up descriptor is closed in the threads' table; this one is kept there.
        self.wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, key: Hashable, callback: Callable[[], None]) -> None:
        """Have a callback run on the loop soon; from any thread, without blocking."""
        with self._lock:
            was_empty = not self._waiting
            self._waiting[key] = callback
        if was_empty:
            os.eventfd_write(self.wake_fd, 1)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run callbacks on this loop from now on."""
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self.wake_fd, self._run_waiting, loop)

    def close(self) -> None:
        """Release the descriptor, once no thread is left.

        One without a table of its own could otherwise write into whatever gets the number next.
        """
        if self._loop is not None:
            self._loop.remove_reader(self.wake_fd)
        os.close(self.wake_fd)

    def _run_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for callback in waiting.values():
            loop.call_soon(callback)


@dataclass(frozen=True, slots=True)
class Call:
    """A call under way."""

    name: str
    began_ns: int


class CallLog:
    """The call a thread is in; written by that thread alone, read by the loop."""

    def __init__(self, clock: Callable[[], int], came_back: Callable[[], None]) -> None:
        self._clock = clock
        self._came_back = came_back
        self.current: Call | None = None
        self.awaited: Call | None = None
        """An overdue call whose return the loop wants to be told."""

    def began(self, call: str) -> None:
        """Note a call."""
        self.current = Call(call, self._clock())

    def ended(self) -> None:
        """Note that it came back, and say so if it was overdue."""
        call, self.current = self.current, None
        # Written in the opposite order by the loop, so that one of the two sees the other's write.
        if call is not None and self.awaited is call:
            self._came_back()


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        self._work = work
        self._future = future
        self._outcome: tuple[T] | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Do the work; on the thread."""
        try:
            self._outcome = (self._work(),)
        except Exception as error:  # noqa: BLE001 - it is raised again, on the loop
            self._error = error

    def deliver(self) -> None:
        """Hand the outcome over; on the loop."""
        if self._future.done():
            return
        if self._error is not None:
            self._future.set_exception(self._error)
        elif self._outcome is not None:
            self._future.set_result(self._outcome[0])


class Lane:
    """A daemon thread that does one job at a time, and the watch over the calls it makes.

    ``on_overdue`` is called on the loop once for a call that did not return within its deadline,
    ``on_answered`` when that call came back after all.
    """

    def __init__(
        self,
        name: str,
        *,
        completions: Completions,
        deadline_ns: Callable[[str], int],
        clock: Callable[[], int],
    ) -> None:
        self.name: Final = name
        self.log: Final = CallLog(clock, self._came_back)
        self.on_overdue: Callable[[Call], None] = _ignore
        self.on_answered: Callable[[Call], None] = _ignore
        self.late = False
        """Whether a call of the last job was overdue."""
        self._completions = completions
        self._deadline_ns = deadline_ns
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; its descriptor table is the calling thread's."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise SourceError(
                f"Could not start thread {self.name}: {error}; raise the limit on tasks"
            ) from error

    @property
    def thread_id(self) -> int | None:
        """The kernel's id of the thread."""
        return self._thread.native_id

    @property
    def busy(self) -> bool:
        """Whether a job is in flight."""
        return not self._idle.is_set()

    @property
    def overdue(self) -> bool:
        """Whether the call in flight is past its deadline."""
        return self.log.awaited is not None

    async def call(self, work: Callable[[], T]) -> T:
        """Do a job on the thread and return what it returns, or raise what it raises.

        Waits for the job in flight. If the waiter is cancelled the job goes on, and the lane is busy
        until it ends.
        """
        async with self._turn:
            await self._idle.wait()
            self._idle.clear()
            self.late = False
            future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            self._jobs.put(_Job(work, future))  # type: ignore[arg-type]  # the queue does not look into it
            self._arm()
            return await future

    def ignore_calls(self) -> None:
        """Tell nobody any more when a call is overdue or answered after all."""
        self.on_overdue = self.on_answered = _ignore

    async def wait_idle(self) -> None:
        """Return when no job is in flight."""
        await self._idle.wait()

    async def end(self) -> None:
        """End the thread of an idle lane."""
        self._ended = asyncio.get_running_loop().create_future()
        self._jobs.put(None)
        await self._ended

    def _work(self) -> None:
        # A signal is told to the loop through a descriptor that this thread may not have.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_THE_THREAD)
        while (job := self._jobs.get()) is not None:
            job.run()
            self._completions.post(self, lambda job=job: self._finish(job))  # type: ignore[misc]  # bound now
        self._completions.post(self, self._finish_thread)

    def _finish_thread(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _finish(self, job: _Job[object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._answered()
        self._idle.set()
        job.deliver()

    def _arm(self) -> None:
        """Look again when the call in flight is due, or when one that begins now would be."""
        call = self.log.current
        name, began_ns = ("", self._clock()) if call is None else (call.name, call.began_ns)
        due_ns = began_ns + self._deadline_ns(name)
        delay = max(0, due_ns - self._clock()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay, self._check)

    def _check(self) -> None:
        call = self.log.current
        if call is None or self._clock() < call.began_ns + self._deadline_ns(call.name):
            self._arm()
            return
        self._timer = None
        self.late = True
        self.log.awaited = call
        self.on_overdue(call)
        if self.log.current is not call:
            self._came_back()

    def _came_back(self) -> None:
        self._completions.post((self, "came back"), self._answered_and_arm)

    def _answered_and_arm(self) -> None:
        if self._answered() and self.busy:
            self._arm()

    def _answered(self) -> bool:
        call = self.log.awaited
        if call is None:
            return False
        self.log.awaited = None
        self.on_answered(call)
        return True


def _ignore(_call: Call) -> None:
    return


class ThreadGroup:
    """The first thread, whose table the others share, and every lane started from it."""

    def __init__(
        self,
        *,
        keep: tuple[int, ...],
        deadline_ns: Callable[[str], int],
        clock: Callable[[], int],
        maximum: int,
    ) -> None:
        """``keep`` are the descriptors the threads write to; ``maximum`` bounds the lanes."""
        self.completions: Final = Completions()
        self._keep = (*keep, self.completions.wake_fd)
        self._deadline_ns = deadline_ns
        self._clock = clock
        self._maximum = maximum
        self.first: Final = self._make("nvml")
        self.lanes: Final[list[Lane]] = [self.first]
        self.shared_files: str | None = None
        """Why the threads share the agent's descriptor table; None if they do not."""
        self._started = False
        self._has_own_files = False

    def _make(self, name: str) -> Lane:
        return Lane(name, completions=self.completions, deadline_ns=self._deadline_ns, clock=self._clock)

    async def start(self) -> None:
        """Start the first thread and let it take a table of its own."""
        self.completions.attach(asyncio.get_running_loop())
        if not self._started:
            self.first.start()
            self._started = True
        if not self._has_own_files:
            self.shared_files = await self.first.call(lambda: take_own_files(self._keep))
            self._has_own_files = True

    async def start_lane(self, name: str) -> Lane:
        """Start a lane; raises SourceError if there is no room for a thread."""
        if len(self.lanes) >= self._maximum:
            raise SourceError(f"Could not start thread {name}: there are {self._maximum} already")
        lane = self._make(name)
        await self.first.call(lane.start)
        self.lanes.append(lane)
        return lane

    @property
    def stuck(self) -> bool:
        """Whether a call of some thread is past its deadline."""
        return any(lane.overdue for lane in self.lanes)

    async def wait_idle(self, timeout_ns: int) -> bool:
        """Wait until no lane has a job in flight; False if that took too long."""
        try:
            async with asyncio.timeout(timeout_ns / 1e9):
                for lane in self.lanes:
                    await lane.wait_idle()
        except TimeoutError:
            return False
        return True

    async def end(self) -> None:
        """End every thread, the first one last. All must be idle."""
        if self._started:
            for lane in reversed(self.lanes):
                await lane.end()
        self.completions.close()
