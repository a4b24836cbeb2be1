"""The tasks of one agent: each has a name and an owner, and a bug in one ends the agent in order.

Guarantees: nothing runs that is not in the group; a source or sink that ends is started again; what the
kubelet does not wait for is made after the registration.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Literal

from agent import log
from agent.core.freshness import VOUCHERS, Terms, stale_message
from agent.errors import AgentError
from agent.model.ids import Part, SourceName
from agent.proofs import Proofs
from agent.runtime.assembly import Source
from agent.runtime.ending import EndedError, Ending
from agent.runtime.supervision import Run, StaleError, Supervisor
from agent.runtime.vitals import Component, Vitals
from agent.threads import in_daemon_thread

START_WAIT_NS: Final = 15_000_000_000
"""How long a part may take to be made: registration comes first, imports take seconds on a busy node."""

_log = logging.getLogger(__name__)


def no_trouble() -> None:
    """Say that a part is well while its task runs."""


class Tasks:
    """Starts and ends what runs, by name."""

    def __init__(
        self,
        *,
        ending: Ending,
        supervisor: Supervisor,
        vitals: Vitals,
        after_registration: Callable[[], Awaitable[None]],
        proofs: Proofs,
    ) -> None:
        """``after_registration`` returns when what the kubelet does not wait for may be imported."""
        self.group: Final = asyncio.TaskGroup()
        """To be entered by the owner of all."""
        self._ending = ending
        self._supervisor = supervisor
        self._vitals = vitals
        self._after_registration = after_registration
        self.proofs: Final = proofs
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        """Tell whether such a task was started."""
        return name in self._tasks

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start what ends by itself, or with the agent."""
        task = self.group.create_task(self._ending_with(name, work), name=name)
        # One that is cancelled before its first turn never comes to its work.
        task.add_done_callback(lambda _: work.close())
        self._tasks[name] = task
        return task

    def start_for_ever(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start what ends with the agent alone: its end is a bug."""

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
            self.proofs.expect(Part(name), terms, start_ns=start_ns)
        self.start(name, self._supervisor.keep(name, run))

    def restart(self, part: Part) -> None:
        """Restart the task of a part that is stale."""
        self._supervisor.fail(VOUCHERS[part.name].task, StaleError(stale_message(part)))

    def replace(self, name: SourceName, run: Run) -> None:
        """Keep something running in place of what was kept under the name."""
        self._tasks[name].cancel()
        self.keep(name, run)

    def keep_part(
        self,
        name: SourceName,
        kind: Literal["source", "sink"],
        run: Run,
        trouble: Callable[[], str | None] = no_trouble,
        terms: Terms | None = None,
        start_ns: int = START_WAIT_NS,
    ) -> None:
        """Keep a source or sink running, and show in health checks how it is."""
        self._vitals.components.append(Component(name, kind, trouble))
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

        self.keep_part(name, "source", run, trouble, terms, start_ns)

    def keep_critical(self, name: SourceName, run: Run) -> None:
        """Keep something running that the agent cannot do without."""
        self.start(name, self._supervisor.keep_critical(name, run))

    async def cancel(self, *names: str) -> None:
        """End these tasks, where they were started."""
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel_all(self) -> None:
        """End what still runs."""
        await self.cancel(*self._tasks)

    async def _ending_with(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do some work; a bug in it ends the agent in the same order as a signal does."""
        try:
            await work
        except AgentError as error:
            self._ending.ask(f"{name} failed", error)
        except Exception as bug:  # noqa: BLE001 - whatever it is, the end is orderly
            _log.exception(
                "The task %(task)s of the agent itself failed: %(detail)s",
                log.about(task=name, detail=repr(bug)),
            )
            self._ending.ask(f"{name} failed", EndedError(f"The task {name} failed: {bug!r}; see the log"))
