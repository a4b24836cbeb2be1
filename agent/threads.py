"""Runs what may block (a slow disk, a lock) in a daemon thread of its own.

Why not asyncio.to_thread: the loop waits at its end for the threads of the default executor, and
concurrent.futures joins them at exit, so that one call stuck in the kernel keeps the process.
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
    """Return what a function returns, or raise what it raises; if cancelled, it is left to itself.

    Raises RuntimeError if no thread can be had.
    """
    return await started_in_daemon_thread(name, function)


def started_in_daemon_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Start a function and return the future of its outcome, for callers that may wait for it later.

    Raises RuntimeError if no thread can be had.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    run = guard.owner().seam("thread", name, partial(_run, _written(name, function), loop, done))
    threading.Thread(target=_run_whole, args=(name, run, loop, done), name=name, daemon=True).start()
    return done


def _run_whole(
    name: str, run: Callable[[], None], loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any]
) -> None:
    """Run what a thread does; a waiting caller gets its end, also if that is the only outcome."""
    error: BaseException | None = None
    try:
        run()
    except BaseException as raised:  # noqa: BLE001 - it belongs to the caller that waits
        error = raised
    with suppress(RuntimeError):  # the loop is closed: no caller waits any more
        loop.call_soon_threadsafe(_finish, done, None, ThreadEndedError(f"Thread {name} ended: {error!r}"))


def _written(name: str, function: Callable[[], T]) -> Callable[[], T]:
    """Return a function of a thread; those that write files are called so."""
    return guard.owner().seam("write", name, function) if name.endswith("-writer") else function


class ThreadEndedError(RuntimeError):
    """The thread that was to do something ended before it was done."""


class _Work:
    """What a thread shares with its owner; not the owner itself, at whose end it ends."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.jobs: Final[_Jobs] = queue.SimpleQueue()
        self.is_over = False
        """Whether the thread may end."""
        self.waiting: Final[set[asyncio.Future[Any]]] = set()
        """On the loop's thread."""

    def fail_waiting(self, error: BaseException | None) -> None:
        """Fail every waiting caller with the thread's end; on the loop's thread."""
        _log.error("Thread %s ended (%r); the next one is started with its next job", self.name, error)
        for done in tuple(self.waiting):
            _finish(done, None, ThreadEndedError(f"Thread {self.name} ended: {error!r}"))


class DaemonThread:
    """One daemon thread that does one thing after the other, for an owner of many: idle it costs nothing.

    It is started by the first thing that it is to do, again if it ended, and ends when no caller can ask for
    another.
    """

    def __init__(self, name: str) -> None:
        self._work = _Work(name)
        self._thread: threading.Thread | None = None

    def __del__(self) -> None:
        """Have the thread end with its owner."""
        self.end()

    async def do(self, function: Callable[[], T]) -> T:
        """Return what a function returns, or raise what it raises; if cancelled, it is left to itself.

        Raises RuntimeError if no thread can be had, or if it ended.
        """
        return await self.begin(function)

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Have a function done and return the future of its outcome, for callers that may wait for it later.

        Raises RuntimeError if no thread can be had; the future does, if it ended.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        work = _written(self._work.name, function)
        self.post(lambda: _run(work, loop, done))
        self._work.waiting.add(done)
        done.add_done_callback(self._work.waiting.discard)
        return done

    def post(self, function: Callable[[], None]) -> None:
        """Do something for which no caller waits, and which raises nothing. Raises RuntimeError as ``do``."""
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
        """Let the thread end after what it has to do; nothing more may be asked of it."""
        self._work.is_over = True
        self._work.jobs.put(None)


def _step(jobs: _Jobs) -> bool:
    """Do the next thing; False: there are no more."""
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
    except BaseException as error:  # noqa: BLE001 - it belongs to the caller that waits
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
