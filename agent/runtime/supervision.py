"""Keeps sources and sinks running: a task that ends is an event, and is started again.

Guarantees: every end is told as a fact and logged once with its reason. A critical task (the
engine, the device plugin) is started again at once; MAX_FAILURES failures within WINDOW_NS end the
process, because a supervisor outside can do more. Any other task is tried again for ever, with
pauses up to PAUSE_CAP_S, and never takes the node's GPUs away. An AgentError is something expected,
so it is no failure in that count. A task whose part is stale (core.freshness), or one of whose callbacks or
threads failed, is ended, which is told as any other end, and started again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from agent.errors import AgentError
from agent.guard import NO_SEAM, Owner, Seam, as_exception, own
from agent.log import about
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

CANCEL_AGAIN_S: Final = 0.1
"""A task group whose task fails while it is cancelled swallows the cancellation."""

Run = Callable[[], Awaitable[None]]

_log = logging.getLogger(__name__)


class CriticalTaskError(AgentError):
    """A task the agent cannot do without fails again and again."""


class StaleError(AgentError):
    """A part gave no proof for too long."""


class Supervisor:
    """Runs tasks and starts them again."""

    def __init__(
        self,
        *,
        tell: Callable[[TaskReported], None],
        clock: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        seam: Seam = NO_SEAM,
    ) -> None:
        """``tell`` is handed each fact; ``sleep`` is the pause between two runs.

        ``seam`` replaces what is run; for tests that inject faults.
        """
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._seam = seam
        self._failing: dict[SourceName, asyncio.Future[Exception]] = {}

    async def keep(self, name: SourceName, run: Run) -> None:
        """Run a task for ever."""
        pause_s = PAUSE_FIRST_S
        while True:
            began_ns = self._clock()
            await self._run_once(name, run)
            if self._clock() - began_ns >= SETTLED_NS:
                pause_s = PAUSE_FIRST_S
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_CAP_S)

    def fail(self, name: SourceName, error: Exception) -> None:
        """Fail the run of a task, which is started again; nothing between two runs."""
        failing = self._failing.get(name)
        if failing is not None and not failing.done():
            failing.set_result(error)

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

    async def _run_once(self, name: SourceName, run: Run) -> Exception | None:
        """Run a task to its end and return why it ended; None if it just returned."""
        self._tell(TaskReported(name, running=True))
        error: Exception | None = None
        try:
            await self._run_until_failed(name, run)
        except AgentError as expected:
            error = expected
            _log.warning(
                "The task %(task)s could not go on: %(detail)s", about(task=name, detail=str(expected))
            )
        except Exception as bug:  # noqa: BLE001 - whatever it is, the task is started again
            error = bug
            _log.error(
                "The task %(task)s failed: %(detail)s", about(task=name, detail=repr(bug)), exc_info=bug
            )
        else:
            _log.warning("The task %(task)s has finished unexpectedly", about(task=name))
        self._tell(TaskReported(name, running=False, message=_sentence(error)))
        return error

    async def _run_until_failed(self, name: SourceName, run: Run) -> None:
        """Run a task until it ends, or until something that belongs to it failed."""
        failing = self._failing[name] = asyncio.get_running_loop().create_future()
        owner = Owner(name, partial(self.fail, name), self._seam)
        running = asyncio.get_running_loop().create_task(
            _contained(owner, owner.seam("task", name, run)), name=f"{name} run"
        )
        try:
            await asyncio.wait({running, failing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._failing[name]
            while not running.done():
                running.cancel()
                await asyncio.wait({running}, timeout=CANCEL_AGAIN_S)
        if failing.done():
            raise failing.result()
        running.result()


async def _contained(owner: Owner, run: Run) -> None:
    """Run a task as an owner; whatever it raises, the loop goes on."""
    own(owner)
    try:
        await run()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        raise as_exception(error) from error


def _sentence(error: Exception | None) -> str:
    if error is None:
        return "finished unexpectedly"
    if isinstance(error, AgentError):
        return str(error)
    while isinstance(error, ExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
