"""The process itself: its signals, its garbage, its name.

Signals: the first SIGTERM or SIGINT stops the agent in order, the second exits at once. The second signal,
SIGUSR2 and the limit on stopping work although the event loop is stuck, because the handlers run between any
two instructions of the main thread and the limit is kept by a thread of its own.

Garbage: a collection begins on whichever thread allocates when it is due, and closes the sockets and files
it finds. The threads that call the driver have a file descriptor table of their own
(agent.sources.nvml.threads):
there the same numbers are other files, so ours would stay open, and one of the driver's would be closed.

Name: NVIDIA's config-manager signals a process whose first argument is ``nvidia-device-plugin``, and a Python
program's first argument is the interpreter. A second exec under the other name would cost a start, so the
arguments are overwritten where the kernel shows them.

Sources: proc(5), ``arg_start`` in /proc/PID/stat; NVIDIA/k8s-device-plugin:cmd/config-manager/main.go,
findPidToSignal.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from agent.log import about

STOP_WITHIN_S: Final = 4.7
"""A process asked to stop is gone within five seconds, whatever hangs."""

MAX_DUMPED: Final = 256
"""Tasks and threads whose stacks are written in one dump."""

MAX_DEPTH: Final = 64
"""Frames of one task."""

_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)


class Signals:
    """Holds the process's signal handlers from ``install`` to ``restore``."""

    def __init__(
        self, *, stop: Callable[[str], None], reload: Callable[[], None], before_exit: Callable[[], None]
    ) -> None:
        """``stop`` and ``reload`` are called on the loop; ``before_exit`` may take a moment to flush."""
        self._stop = stop
        self._reload = reload
        self._before_exit = before_exit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self._previous: dict[int, object] = {}

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Install the handlers; only in the main thread."""
        self._loop = loop
        for number in _STOPPING:
            self._set_handler(number, self._on_stop)
        self._set_handler(signal.SIGHUP, self._on_reload)
        self._set_handler(signal.SIGUSR2, self._on_dump)
        self._set_handler(signal.SIGPIPE, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the handlers of before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
        self._loop = None

    def limit_stopping(self) -> None:
        """End the process hard if it is not gone in time; called when stopping begins."""
        if self._is_stopping:
            return
        limit = threading.Timer(STOP_WITHIN_S, self._end_hard)
        limit.name, limit.daemon = "stop-limit", True
        limit.start()
        self._is_stopping = True

    def _set_handler(
        self, number: int, handler: Callable[[int, FrameType | None], None] | signal.Handlers
    ) -> None:
        self._previous[number] = signal.signal(number, handler)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            self._before_exit()
            os._exit(128 + number)
        self.limit_stopping()
        self._on_loop(lambda: self._stop(signal.Signals(number).name))

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self._on_loop(self._reload)

    def _on_dump(self, _number: int, _frame: FrameType | None) -> None:
        dump_stacks(self._loop)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _end_hard(self) -> None:
        _log.error("The agent did not stop within %(within_s)s s and is ended", about(within_s=STOP_WITHIN_S))
        dump_stacks(self._loop)
        self._before_exit()
        os._exit(1)


def dump_stacks(loop: asyncio.AbstractEventLoop | None) -> None:
    """Write the stack of each task and thread to the log."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()) if loop is not None else []
    for task in tasks[:MAX_DUMPED]:
        stack = "".join(_stack_of(task))
        _log.info("Stack of the task %(task)s", about(task=task.get_name(), stack=stack))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in list(sys._current_frames().items())[:MAX_DUMPED]:  # noqa: SLF001 - the only way
        stack = "".join(traceback.format_stack(frame))
        _log.info("Stack of the thread %(thread)s", about(thread=names.get(ident, str(ident)), stack=stack))


def _stack_of(task: asyncio.Task[Any]) -> Iterator[str]:
    """Yield where a task is, down to what it waits for; Task.get_stack shows the first frame only."""
    waiting: Any = task.get_coro()
    for _ in range(MAX_DEPTH):
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:
            break
        yield from traceback.format_stack(frame, limit=1)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


GARBAGE_PERIOD_S: Final = 1.0
FULL_EVERY: Final = 60
"""Periods from one collection of everything to the next, which takes some milliseconds."""

YOUNG, ALL = 1, 2


async def collect_forever(period_s: float = GARBAGE_PERIOD_S, full_every: int = FULL_EVERY) -> None:
    """Collect in place of the interpreter, whose collector is off; what is there now is never garbage."""
    gc.disable()
    gc.freeze()
    periods = 0
    while True:
        await asyncio.sleep(period_s)
        periods += 1
        gc.collect(YOUNG if periods % full_every else ALL)


_ARG_START, _ARG_END = 48, 49
"""Numbers of fields in /proc/PID/stat, counted from 1."""
_MAX_COMM: Final = 15
"""A thread's name in bytes, without the NUL."""


def appear_as(name: str, arguments: Sequence[str]) -> bool:
    """Show a name and arguments in /proc/PID/cmdline and comm; returns whether the kernel allowed it."""
    try:
        start, end = _place_of_arguments()
        shown = _shown(name, arguments, end - start)
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(shown)
        Path("/proc/self/comm").write_bytes(os.fsencode(name)[:_MAX_COMM])
    except (OSError, ValueError):
        return False
    return True


def _place_of_arguments() -> tuple[int, int]:
    """Return where the arguments begin and end in this process's memory; ValueError if that is unknown."""
    # The program's name stands in parentheses and may hold anything, also spaces.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))
    if not 0 < start < end:
        raise ValueError("the kernel does not show where the arguments are")
    return start, end


def _shown(name: str, arguments: Sequence[str], room: int) -> bytes:
    """Return the arguments with NULs up to their old length, or the name alone where they do not fit."""
    for words in ((name, *arguments), (name,)):
        shown = b"\0".join(os.fsencode(word) for word in words) + b"\0"
        if len(shown) <= room:
            return shown.ljust(room, b"\0")
    raise ValueError("the old arguments have no room for the name")
