"""The tasks of one agent: each has a name and an owner, and one that ends is an event and is started again.

Guarantees: nothing runs that is not in the group; components that the kubelet does not wait for are made
after the registration. Every end of a component is emitted as a fact and logged once with its reason. A
critical task (the engine, the device plugin) is started again at once; MAX_FAILURES failures within WINDOW_NS
end the process, because a supervisor outside can do more. Any other task is retried without a limit, with
pauses up to PAUSE_CAP_S, and never makes the node's GPUs unavailable. An AgentError is expected, so it is no
failure in that count. A task whose component is stale (core.freshness), or one of whose callbacks or threads
failed, is stopped, which is reported as any other end, and started again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, Literal

from agent import log
from agent.core.freshness import VOUCHERS, Terms, stale_message
from agent.errors import AgentError
from agent.guard import NO_SEAM, Owner, Seam, as_exception, own
from agent.log import about
from agent.model.facts import TaskReported
from agent.model.ids import ComponentId, SourceName
from agent.model.policy import SECOND_NS
from agent.proofs import Proofs
from agent.runtime.assembly import Source
from agent.runtime.lifecycle import EndedError, Shutdown
from agent.runtime.status import Component, RuntimeStatus
from agent.threads import in_daemon_thread

MAX_FAILURES: Final = 5
WINDOW_NS: Final = 60 * SECOND_NS

PAUSE_FIRST_S: Final = 1.0
PAUSE_CAP_S: Final = 300.0
CRITICAL_PAUSE_S: Final = 0.1

SETTLED_NS: Final = 60 * SECOND_NS
"""A task that ran for so long ended for a new reason; its pauses start again from the first."""

CANCEL_AGAIN_S: Final = 0.1
"""A task group whose task fails while it is cancelled swallows the cancellation."""

Run = Callable[[], Awaitable[None]]

_log = logging.getLogger(__name__)


class CriticalTaskError(AgentError):
    """A task the agent cannot do without fails again and again."""


class StaleError(AgentError):
    """A component gave no proof for too long."""


class Supervisor:
    """Runs tasks and starts them again."""

    def __init__(
        self,
        *,
        emit: Callable[[TaskReported], None],
        clock: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        seam: Seam = NO_SEAM,
    ) -> None:
        """``emit`` is called with each fact; ``sleep`` is the pause between two runs.

        ``seam`` replaces what is run; for tests that inject faults.
        """
        self._emit = emit
        self._clock = clock
        self._sleep = sleep
        self._seam = seam
        self._failing: dict[SourceName, asyncio.Future[Exception]] = {}

    async def keep(self, name: SourceName, run: Run) -> None:
        """Run a task until cancelled."""
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
        """Run a task until cancelled; raises CriticalTaskError if it fails too often."""
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
        self._emit(TaskReported(name, running=True))
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
        self._emit(TaskReported(name, running=False, message=_sentence(error)))
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
    """Run a task as an owner; whatever it raises, the loop keeps running."""
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


START_WAIT_NS: Final = 15_000_000_000
"""How long a component may take to be made: registration comes first, imports take seconds on a busy node."""


def no_trouble() -> None:
    """Report that a component is ready while its task runs."""


class Tasks:
    """Starts and stops tasks, by name."""

    def __init__(
        self,
        *,
        shutdown: Shutdown,
        supervisor: Supervisor,
        status: RuntimeStatus,
        after_registration: Callable[[], Awaitable[None]],
        proofs: Proofs,
    ) -> None:
        """``after_registration`` returns when what the kubelet does not wait for may be imported."""
        self.group: Final = asyncio.TaskGroup()
        """To be entered by the owner of all."""
        self._shutdown = shutdown
        self._supervisor = supervisor
        self._status = status
        self._after_registration = after_registration
        self.proofs: Final = proofs
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether such a task was started."""
        return name in self._tasks

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends by itself, or with the agent."""
        task = self.group.create_task(self._shut_down_on_failure(name, work), name=name)
        # One that is cancelled before its first turn never awaits its work.
        task.add_done_callback(lambda _: work.close())
        self._tasks[name] = task
        return task

    def start_forever(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that ends with the agent alone: an earlier end is a bug."""

        async def run() -> None:
            await work
            raise AssertionError("it ended")

        task = self.start(name, run())
        task.add_done_callback(lambda _: work.close())

    def keep(
        self, name: SourceName, run: Run, terms: Terms | None = None, start_ns: int = START_WAIT_NS
    ) -> None:
        """Keep something running; with ``terms`` it has to give proofs, the first after ``start_ns`` more."""
        if terms is not None:
            self.proofs.expect(ComponentId(name), terms, start_ns=start_ns)
        self.start(name, self._supervisor.keep(name, run))

    def restart(self, component: ComponentId) -> None:
        """Restart the task of a component that is stale."""
        self._supervisor.fail(VOUCHERS[component.name].task, StaleError(stale_message(component)))

    def replace(self, name: SourceName, run: Run) -> None:
        """Keep something running in place of what was kept under the name."""
        self._tasks[name].cancel()
        self.keep(name, run)

    def keep_component(
        self,
        name: SourceName,
        kind: Literal["source", "sink"],
        run: Run,
        trouble: Callable[[], str | None] = no_trouble,
        terms: Terms | None = None,
        start_ns: int = START_WAIT_NS,
    ) -> None:
        """Keep a source or sink running, and show in health checks how it is."""
        self._status.components.append(Component(name, kind, trouble))
        self.keep(name, run, terms, start_ns)

    def keep_source(
        self,
        name: SourceName,
        make: Callable[[], Source],
        terms: Terms | None = None,
        trouble: Callable[[], str | None] = no_trouble,
        start_ns: int = START_WAIT_NS,
    ) -> None:
        """Keep a source running that is made, by a thread, when the registration is over."""
        made: list[Source] = []

        async def run() -> None:
            if not made:
                await self._after_registration()
                made.append(await in_daemon_thread(f"{name}-import", make))
            await made[0].run()

        self.keep_component(name, "source", run, trouble, terms, start_ns)

    def keep_critical(self, name: SourceName, run: Run) -> None:
        """Keep something running that the agent cannot do without."""
        self.start(name, self._supervisor.keep_critical(name, run))

    async def cancel(self, *names: str) -> None:
        """Cancel these tasks, where they were started."""
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel_all(self) -> None:
        """Cancel what still runs."""
        await self.cancel(*self._tasks)

    async def _shut_down_on_failure(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do some work; a bug in it shuts the agent down in the same order as a signal."""
        try:
            await work
        except AgentError as error:
            self._shutdown.request(f"{name} failed", error)
        except Exception as bug:  # noqa: BLE001 - whatever it is, the end is orderly
            _log.exception(
                "The task %(task)s of the agent itself failed: %(detail)s",
                log.about(task=name, detail=repr(bug)),
            )
            self._shutdown.request(
                f"{name} failed", EndedError(f"The task {name} failed: {bug!r}; see the log")
            )
