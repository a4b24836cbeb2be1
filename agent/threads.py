"""Runs calls that may block (a slow disk, a lock) in a daemon thread of their own.

Why not asyncio.to_thread: the loop waits at shutdown for the threads of the default executor, and
concurrent.futures joins them at exit, so that one call blocked in the kernel would keep the process alive.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from agent import guard

_log = logging.getLogger(__name__)

T = TypeVar("T")

_Jobs = queue.SimpleQueue[Callable[[], None] | None]
"""None: there are no more."""


async def in_daemon_thread(name: str, function: Callable[[], T]) -> T:
    """Return the result of a function, or raise its error; if cancelled, the function still completes.

    Raises RuntimeError if no thread can be started.
    """
    return await started_in_daemon_thread(name, function)


def started_in_daemon_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Start a function and return the future of its outcome, for callers that wait for it later.

    Raises RuntimeError if no thread can be started.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    run = guard.owner().seam("thread", name, partial(_run, _written(name, function), loop, done))
    threading.Thread(target=_run_whole, args=(name, run, loop, done), name=name, daemon=True).start()
    return done


def _run_whole(
    name: str, run: Callable[[], None], loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any]
) -> None:
    """Run the thread's function; a waiting caller is notified of the thread's exit in any case."""
    error: BaseException | None = None
    try:
        run()
    except BaseException as raised:  # noqa: BLE001 - it belongs to the waiting caller
        error = raised
    with suppress(RuntimeError):  # the loop is closed: no caller waits any more
        loop.call_soon_threadsafe(_finish, done, None, ThreadEndedError(f"Thread {name} exited: {error!r}"))


def _written(name: str, function: Callable[[], T]) -> Callable[[], T]:
    """Return a thread's function, through the seam ``write`` if the thread's name marks it as a writer."""
    return guard.owner().seam("write", name, function) if name.endswith("-writer") else function


class ThreadEndedError(RuntimeError):
    """The thread exited before it completed the call."""


class _Work:
    """State shared by a thread and its owner; not the owner itself, with which the thread stops."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.jobs: Final[_Jobs] = queue.SimpleQueue()
        self.is_over = False
        """Whether the thread may exit."""
        self.waiting: Final[set[asyncio.Future[Any]]] = set()
        """On the loop's thread."""

    def fail_waiting(self, error: BaseException | None) -> None:
        """Fail every waiting caller because the thread exited; on the loop's thread."""
        _log.error("Thread %s exited (%r); its next job starts a new one", self.name, error)
        for done in tuple(self.waiting):
            _finish(done, None, ThreadEndedError(f"Thread {self.name} exited: {error!r}"))


class DaemonThread:
    """One daemon thread that executes one call after the other; without calls there is no thread.

    The first call starts it, a later one restarts it if it exited, and it stops with its owner.
    """

    def __init__(self, name: str) -> None:
        self._work = _Work(name)
        self._thread: threading.Thread | None = None

    def __del__(self) -> None:
        """Stop the thread with its owner."""
        self.end()

    async def do(self, function: Callable[[], T]) -> T:
        """Return the result of a function, or raise its error; if cancelled, the function still completes.

        Raises RuntimeError if no thread can be started, or if it exited.
        """
        return await self.begin(function)

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a function and return the future of its outcome, for callers that wait for it later.

        Raises RuntimeError if no thread can be started; the future raises it if the thread exited.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        work = _written(self._work.name, function)
        self.post(lambda: _run(work, loop, done))
        self._work.waiting.add(done)
        done.add_done_callback(self._work.waiting.discard)
        return done

    def post(self, function: Callable[[], None]) -> None:
        """Queue a function that raises nothing and returns to no caller. Raises RuntimeError as ``do``."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = self._started()
        self._work.jobs.put(function)

    def _started(self) -> threading.Thread:
        work = self._work
        step = guard.owner().seam("thread", work.name, partial(_step, work.jobs))
        arguments = (work, step, asyncio.get_running_loop())
        thread = threading.Thread(target=_do_all, args=arguments, name=work.name, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """Stop the thread after its queued calls; no more may be queued."""
        self._work.is_over = True
        self._work.jobs.put(None)


def _step(jobs: _Jobs) -> bool:
    """Execute the next call; False: there are no more."""
    function = jobs.get()
    if function is not None:
        function()
    return function is not None


def _do_all(work: _Work, step: Callable[[], bool], loop: asyncio.AbstractEventLoop) -> None:
    error: BaseException | None = None
    try:
        while step():
            pass
    except BaseException as raised:  # noqa: BLE001 - the loop logs it
        error = raised
    if error is not None or not work.is_over:
        with suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(work.fail_waiting, error)


def _run(function: Callable[[], T], loop: asyncio.AbstractEventLoop, done: asyncio.Future[T]) -> None:
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - it belongs to the waiting caller
        failure = error
    with suppress(RuntimeError):  # the loop is closed: no caller waits any more
        loop.call_soon_threadsafe(_finish, done, result, failure)


def _finish(done: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(result)
    else:
        done.set_exception(failure)
