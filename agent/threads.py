"""Runs what may block (a slow disk, a lock) in a daemon thread of its own.

Why not asyncio.to_thread: the loop waits at its end for the threads of the default executor, and
concurrent.futures joins them at exit, so that one call stuck in the kernel keeps the process.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


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
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_finish, done, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def _finish(done: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(result)
    else:
        done.set_exception(failure)
