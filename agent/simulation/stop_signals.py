"""The signals that stop the simulation's processes, and waiting for the first of several things."""

import asyncio
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Self

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP is a closed terminal."""


class StopSignals:
    """Takes the stop signals while the context lasts."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    def _note(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    @property
    def is_set(self) -> bool:
        """Whether a signal has come."""
        return self._first.is_set()

    async def wait(self) -> None:
        """Wait for a signal."""
        await self._first.wait()

    @property
    def second(self) -> asyncio.Event:
        """Set by a further signal: the operator no longer waits."""
        return self._second


async def first_of(**works: Coroutine[Any, Any, object]) -> str:
    """Run works side by side until one ends, cancel the others, and return the name of that one.

    What the first one raised is raised; of several that ended at once, the one that is named first counts.
    """
    loop = asyncio.get_running_loop()
    tasks = {loop.create_task(work, name=f"simulation-{name}"): name for name, work in works.items()}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first = next(task for task in tasks if task in done)
    first.result()
    return tasks[first]
