"""Worker threads for calls that may never return, each with a deadline, with a descriptor table of their own.

A thread stuck in the kernel keeps a killed process's files open. So the first thread unshares its
descriptor table, without the agent's sockets and locks, and starts the others, which share it: after a
SIGKILL everything the agent serves on is free, even if a call into the driver never returns.

Invariants: a worker has one job in flight, and no other is queued behind it. A worker notes each call of a
job before it makes it. The loop checks a worker's call when its deadline is due, not before. Threads never
log and never touch the loop: an outcome waits in Completions, at most one for each key. A thread that died
is replaced at the worker's next job; one that hangs outside of a driver call is abandoned on request, and
can make no call any more.
"""

import asyncio
import logging
import os
import queue
import signal
import threading
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

import msgspec

from agent import guard
from agent.errors import SourceError
from agent.sources.nvml.fd_table import unshare_files

_OF_THE_THREAD: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
)
"""Signals that a fault of the thread itself raises; blocking them would hide it."""

T = TypeVar("T")

NO_THREAD: Final = 0
"""No thread has this identity."""

_log = logging.getLogger(__name__)


class Completions:
    """Callbacks that threads hand to the loop: by key, the newest of a key, run on the loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        # The loop's own wake-up descriptor is closed in the threads' table; this one is kept there.
        self.wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, key: Hashable, callback: Callable[[], None]) -> None:
        """Schedule a callback on the loop; from any thread, without blocking."""
        with self._lock:
            was_empty = not self._waiting
            self._waiting[key] = callback
        if was_empty:
            os.eventfd_write(self.wake_fd, 1)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run callbacks on this loop from now on, also after a callback failed."""
        self._loop = loop
        guard.add_reader("nvml-completions", self.wake_fd, self._run_waiting, loop)

    def close(self) -> None:
        """Close the descriptor, once no thread is left.

        A thread that shares the agent's table could otherwise write into whatever gets the number next.
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
            loop.call_soon(guard.guarded("nvml-completion", callback))


class Call(msgspec.Struct, frozen=True):
    """A call under way."""

    name: str
    began_ns: int


class CallLog:
    """The call a thread is in; written by that thread alone, read by the loop."""

    def __init__(self, clock: Callable[[], int], on_late_return: Callable[[], None]) -> None:
        self._clock = clock
        self._on_late_return = on_late_return
        self.thread: int | None = None
        """The thread that may make calls; any other one was abandoned."""
        self.current: Call | None = None
        self.awaited: Call | None = None
        """An overdue call whose return the loop waits for."""

    def began(self, call: str) -> None:
        """Note a call that starts; raises AbandonedError on a thread that was abandoned."""
        if self.thread not in (None, threading.get_ident()):
            raise AbandonedError
        self.current = Call(call, self._clock())

    def ended(self) -> None:
        """Note that the call returned, and notify the loop if it was overdue."""
        call, self.current = self.current, None
        # Written in the opposite order by the loop, so that one of the two sees the other's write.
        if call is not None and self.awaited is call:
            self._on_late_return()


class AbandonedError(BaseException):
    """The thread was abandoned because it hung; it must not touch the driver beside its successor."""


class ThreadEndedError(SourceError):
    """The thread that ran a job died or was abandoned before the job was done."""


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
        except BaseException as error:  # noqa: BLE001 - it is raised again, on the loop
            self._error = guard.as_exception(error)

    def fail(self, error: Exception) -> None:
        """Fail the job, which will not be done; on the loop."""
        self._error = error
        self.deliver()

    def deliver(self) -> None:
        """Set the outcome on the future; on the loop."""
        if self._future.done():
            return
        if self._error is not None:
            self._future.set_exception(self._error)
        elif self._outcome is not None:
            self._future.set_result(self._outcome[0])


class WorkerThread:
    """A daemon thread that does one job at a time, and the deadlines of the calls it makes.

    ``on_overdue`` is called on the loop once for a call that did not return within its deadline,
    ``on_answered`` when that call returned after all.
    """

    def __init__(
        self,
        name: str,
        *,
        completions: Completions,
        deadline_ns: Callable[[str], int],
        clock: Callable[[], int],
        start: Callable[["WorkerThread"], Awaitable[None]],
    ) -> None:
        """``start`` starts the worker's thread, from a thread whose descriptor table it is to share."""
        self.name: Final = name
        self.log: Final = CallLog(clock, self._on_late_return)
        self.on_overdue: Callable[[Call], None] = _ignore
        self.on_answered: Callable[[Call], None] = _ignore
        self.late = False
        """Whether a call of the last job was overdue."""
        self._completions = completions
        self._deadline_ns = deadline_ns
        self._clock = clock
        self._start = start
        self._jobs = _Jobs()
        self._job: _Job[object] | None = None
        """The job in flight."""
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._step = _step

    def start(self) -> None:
        """Start a thread; its descriptor table is the calling thread's."""
        jobs = self._jobs = _Jobs()
        thread = threading.Thread(target=self._work, args=(jobs,), name=self.name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise SourceError(
                f"Could not start thread {self.name}: {error}; raise the limit on tasks"
            ) from error
        self._thread = thread

    @property
    def alive(self) -> bool:
        """Whether there is a thread that does jobs."""
        return self._thread is not None and self._thread.is_alive()

    def abandon(self) -> None:
        """Abandon the thread if it hangs outside of a driver call; the next job has another.

        One that is in a call is left to the call's deadline: the kernel may block it without a limit.
        """
        if not self.busy or self.log.current is not None:
            return
        _log.error("Thread %s hangs outside of the driver; replacing it", self.name)
        self._abandon_thread("it hung")

    def _abandon_thread(self, why: str) -> None:
        """Fail the job in flight; whatever the old thread still does is ignored."""
        job, self._job = self._job, None
        self._jobs.put(None)
        self._thread, self.log.thread, self.log.current = None, NO_THREAD, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._clear_overdue()
        self._idle.set()
        if job is not None:
            job.fail(ThreadEndedError(f"Thread {self.name} was replaced: {why}"))

    @property
    def thread_id(self) -> int | None:
        """The kernel's id of the thread."""
        return None if self._thread is None else self._thread.native_id

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

        Waits for the job in flight. If the waiter is cancelled the job goes on, and the worker is busy
        until it is done.
        """
        async with self._turn:
            await self._idle.wait()
            if not self.alive:
                if self._thread is not None:
                    _log.error("Thread %s died; replacing it", self.name)
                self._step = guard.owner().seam("thread", self.name, _step)
                await self._start(self)
            return await self.do(work)

    async def do(self, work: Callable[[], T]) -> T:
        """Do a job on the thread of an idle worker, which must be alive."""
        self._idle.clear()
        self.late = False
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(work, future)
        self._job = job  # type: ignore[assignment]  # its type parameter is not used
        self._jobs.put(job)  # type: ignore[arg-type]
        self._arm()
        return await future

    def ignore_calls(self) -> None:
        """Report no more calls as overdue or answered after all."""
        self.on_overdue = self.on_answered = _ignore

    async def wait_idle(self) -> None:
        """Return when no job is in flight."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Stop the thread of an idle worker."""
        if not self.alive:
            return
        self._stopped = asyncio.get_running_loop().create_future()
        self._jobs.put(None)
        await self._stopped

    def _work(self, jobs: "_Jobs") -> None:
        self.log.thread = threading.get_ident()
        # Python notifies the loop of a signal through a descriptor that this thread may not have.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_THE_THREAD)
        why: BaseException | None = None
        try:
            while (job := self._step(jobs)) is not None:
                self._completions.post(self, lambda job=job: self._finish(job))  # type: ignore[misc]  # bound now
        except BaseException as error:  # noqa: BLE001 - the loop logs it, and replaces the thread
            why = error
        self._completions.post((self, "exited"), lambda: self._handle_thread_exit(jobs, why))

    def _handle_thread_exit(self, jobs: "_Jobs", why: BaseException | None) -> None:
        if self._stopped is not None:
            if not self._stopped.done():
                self._stopped.set_result(None)
            return
        if jobs is self._jobs:
            _log.error("Thread %s died (%r); replacing it", self.name, why, exc_info=why)
            self._abandon_thread("it died")

    def _finish(self, job: _Job[object]) -> None:
        if job is not self._job:
            # Of a thread that was abandoned.
            return
        self._job = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._clear_overdue()
        self._idle.set()
        job.deliver()

    def _arm(self) -> None:
        """Check again when the call in flight is due, or when one that starts now would be."""
        call = self.log.current
        name, began_ns = ("", self._clock()) if call is None else (call.name, call.began_ns)
        due_ns = began_ns + self._deadline_ns(name)
        delay = max(0, due_ns - self._clock()) / 1e9
        self._timer = guard.call_later("nvml-deadline", delay, self._check)

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
            self._on_late_return()

    def _on_late_return(self) -> None:
        self._completions.post((self, "late return"), self._handle_late_return)

    def _handle_late_return(self) -> None:
        if self._clear_overdue() and self.busy:
            self._arm()

    def _clear_overdue(self) -> bool:
        call = self.log.awaited
        if call is None:
            return False
        self.log.awaited = None
        self.on_answered(call)
        return True


_Jobs = queue.SimpleQueue[_Job[object] | None]


def _step(jobs: _Jobs) -> _Job[object] | None:
    """Do the next job and return it; None: the thread is to stop. On the thread."""
    job = jobs.get()
    if job is not None:
        job.run()
    return job


def _ignore(_call: Call) -> None:
    return


class ThreadGroup:
    """The first worker, whose descriptor table the others share, and every worker started from it."""

    def __init__(
        self,
        *,
        keep: tuple[int, ...],
        deadline_ns: Callable[[str], int],
        clock: Callable[[], int],
        maximum: int,
    ) -> None:
        """``keep`` are the descriptors the threads write to; ``maximum`` bounds the workers."""
        self.completions: Final = Completions()
        self._keep = (*keep, self.completions.wake_fd)
        self._deadline_ns = deadline_ns
        self._clock = clock
        self._maximum = maximum
        self.first: Final = self._make("nvml")
        self.workers: Final[list[WorkerThread]] = [self.first]
        self.shared_files: str | None = None
        """Why the threads share the agent's descriptor table; None if they do not."""

    def _make(self, name: str) -> WorkerThread:
        return WorkerThread(
            name,
            completions=self.completions,
            deadline_ns=self._deadline_ns,
            clock=self._clock,
            start=self._start_thread,
        )

    async def _start_thread(self, worker: WorkerThread) -> None:
        if worker is not self.first:
            await self.first.call(worker.start)
            return
        worker.start()
        self.shared_files = await worker.do(lambda: unshare_files(self._keep))

    async def start(self) -> None:
        """Start the first thread, which unshares its descriptor table."""
        self.completions.attach(asyncio.get_running_loop())
        await self.first.call(lambda: None)

    async def start_worker(self, name: str) -> WorkerThread:
        """Start a worker; raises SourceError if the maximum is reached or the thread cannot start."""
        if len(self.workers) >= self._maximum:
            raise SourceError(f"Could not start thread {name}: there are {self._maximum} already")
        worker = self._make(name)
        await worker.call(lambda: None)
        self.workers.append(worker)
        return worker

    def abandon_hung(self) -> None:
        """Abandon every thread that hangs outside of a driver call."""
        for worker in self.workers:
            worker.abandon()

    @property
    def stuck(self) -> bool:
        """Whether a call of some thread is past its deadline."""
        return any(worker.overdue for worker in self.workers)

    async def wait_idle(self, timeout_ns: int) -> bool:
        """Wait until no worker has a job in flight; False if that took too long."""
        try:
            async with asyncio.timeout(timeout_ns / 1e9):
                for worker in self.workers:
                    await worker.wait_idle()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Stop every thread, the first one last. All must be idle."""
        for worker in reversed(self.workers):
            await worker.stop()
        self.completions.close()
