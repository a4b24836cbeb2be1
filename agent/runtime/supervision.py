"""Keeps sources and sinks running: a task that ends is an event, and is started again.

Guarantees: every end is told as a fact and logged once with its reason. A critical task (the
engine, the device plugin) is started again at once; MAX_FAILURES failures within WINDOW_NS end the
process, because a supervisor outside can do more. Any other task is tried again for ever, with
pauses up to PAUSE_CAP_S, and never takes the node's GPUs away. An AgentError is something expected,
so it is no failure in that count. A task that gives no sign of life for STALLED_PERIODS of its periods
is ended, which is told as any other end, and started again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple

from agent.errors import AgentError
from agent.log import fields
from agent.model.facts import TaskReported
from agent.model.ids import SourceName
from agent.model.policy import SECOND_NS

MAX_FAILURES: Final = 5
WINDOW_NS: Final = 60 * SECOND_NS

PAUSE_FIRST_S: Final = 1.0
PAUSE_CAP_S: Final = 300.0
CRITICAL_PAUSE_S: Final = 0.1

SETTLED_NS: Final = 60 * SECOND_NS
"""A task that ran for so long ended for a new reason; its pauses begin anew."""

STALLED_PERIODS: Final = 3
LEAST_SILENCE_NS: Final = 10 * SECOND_NS
"""However short the period is: a loaded machine is no stall."""

Run = Callable[[], Awaitable[None]]

_log = logging.getLogger(__name__)


class CriticalTaskError(AgentError):
    """A task the agent cannot do without fails again and again."""


class Pulse(NamedTuple):
    """How it is seen that a task lives."""

    last_sign_ns: Callable[[], int | None]
    """When it did something last; None: nothing yet."""
    period_ns: int
    """How often it does something."""


class StalledError(AgentError):
    """A task gives no sign of life."""


class Supervisor:
    """Runs tasks and starts them again."""

    def __init__(
        self,
        *,
        tell: Callable[[TaskReported], None],
        clock: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``tell`` is handed each fact; ``sleep`` is the pause between two runs."""
        self._tell = tell
        self._clock = clock
        self._sleep = sleep

    async def keep(self, name: SourceName, run: Run, pulse: Pulse | None = None) -> None:
        """Run a task for ever."""
        pause_s = PAUSE_FIRST_S
        while True:
            began_ns = self._clock()
            await self._run_once(name, run if pulse is None else partial(self._run_watched, run, pulse))
            if self._clock() - began_ns >= SETTLED_NS:
                pause_s = PAUSE_FIRST_S
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_CAP_S)

    async def keep_critical(self, name: SourceName, run: Run) -> None:
        """Run a task for ever; raises CriticalTaskError if it fails too often."""
        failures: deque[int] = deque(maxlen=MAX_FAILURES)
        while True:
            error = await self._run_once(name, run)
            if isinstance(error, AgentError):
                await self._sleep(PAUSE_FIRST_S)
                continue
            failures.append(self._clock())
            if len(failures) == MAX_FAILURES and failures[-1] - failures[0] <= WINDOW_NS:
                raise CriticalTaskError(
                    f"The task {name} failed {MAX_FAILURES} times within {WINDOW_NS // SECOND_NS} s, "
                    f"last with: {_sentence(error)}"
                )
            await self._sleep(CRITICAL_PAUSE_S)

    async def _run_watched(self, run: Run, pulse: Pulse) -> None:
        """Run a task until it ends or stalls."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(pulse), name="pulse")
                await run()
                watching.cancel()
        except BaseExceptionGroup as ended:
            raise ended.exceptions[0] from None

    async def _watch(self, pulse: Pulse) -> None:
        # Looks are counted, not time: after a machine slept, everybody gets the time to go on.
        gap_ns = max(pulse.period_ns, LEAST_SILENCE_NS // STALLED_PERIODS)
        last_ns, silent = pulse.last_sign_ns(), 0
        while True:
            await asyncio.sleep(gap_ns / 1e9)
            newest_ns = pulse.last_sign_ns()
            silent = silent + 1 if newest_ns == last_ns else 0
            last_ns = newest_ns
            if silent == STALLED_PERIODS:
                raise StalledError(f"stalled: no sign of life for {silent * gap_ns / 1e9:.0f} s")

    async def _run_once(self, name: SourceName, run: Run) -> Exception | None:
        """Run a task to its end and return why it ended; None if it just returned."""
        self._tell(TaskReported(name, running=True))
        error: Exception | None = None
        try:
            await run()
        except AgentError as expected:
            error = expected
            _log.warning("A task could not go on", extra=fields(task=name, detail=str(expected)))
        except Exception as bug:  # noqa: BLE001 - whatever it is, the task is started again
            error = bug
            _log.error("A task failed", exc_info=bug, extra=fields(task=name))
        else:
            _log.warning("A task has finished unexpectedly", extra=fields(task=name))
        self._tell(TaskReported(name, running=False, message=_sentence(error)))
        return error


def _sentence(error: Exception | None) -> str:
    if error is None:
        return "finished unexpectedly"
    if isinstance(error, AgentError):
        return str(error)
    while isinstance(error, ExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
