"""Runs what may block (a slow disk, a lock) in a daemon thread of its own.

Why not asyncio.to_thread: the loop waits at its end for the threads of the default executor, and
concurrent.futures joins them at exit, so that one call stuck in the kernel keeps the process.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

_Jobs = queue.SimpleQueue[Callable[[], None] | None]
"""None: there are no more."""


async def in_daemon_thread(name: str, function: Callable[[], T]) -> T:
    """Return what a function returns, or raise what it raises; if cancelled, it is left to itself.

    Raises RuntimeError if no thread can be had.
    """
    return await started_in_daemon_thread(name, function)


def started_in_daemon_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Start a function and return the future of its outcome, for who may stop to wait and come back.

    Raises RuntimeError if no thread can be had.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        _run(function, loop, done)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class DaemonThread:
    """One daemon thread that does one thing after the other, for who has many: it costs nothing meanwhile.

    It is started by the first thing that it is to do, and ends when nobody can ask for another.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._jobs: Final[_Jobs] = queue.SimpleQueue()
        self._is_started = False

    def __del__(self) -> None:
        """Have the thread end with its owner."""
        self.end()

    async def do(self, function: Callable[[], T]) -> T:
        """Return what a function returns, or raise what it raises; if cancelled, it is left to itself.

        Raises RuntimeError if no thread can be had.
        """
        return await self.begin(function)

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Have a function done and return the future of its outcome, for who may stop to wait and come back.

        Raises RuntimeError if no thread can be had.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self.post(lambda: _run(function, loop, done))
        return done

    def post(self, function: Callable[[], None]) -> None:
        """Do something for which nobody waits, and which raises nothing. Raises RuntimeError as ``do``."""
        if not self._is_started:
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
            self._is_started = True
        self._jobs.put(function)

    def end(self) -> None:
        """Let the thread end after what it has to do; nothing more may be asked of it."""
        self._jobs.put(None)


def _work(jobs: _Jobs) -> None:
    while (function := jobs.get()) is not None:
        function()


def _run(function: Callable[[], T], loop: asyncio.AbstractEventLoop, done: asyncio.Future[T]) -> None:
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
        failure = error
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_finish, done, result, failure)


def _finish(done: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(result)
    else:
        done.set_exception(failure)
