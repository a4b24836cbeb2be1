"""The tasks of one agent: what a bug in one does, and what is made when."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from agent.errors import AgentError
from agent.model.facts import SYSFS, Fact
from agent.proofs import Proofs
from agent.runtime.event_recorder import EventRecorder
from agent.runtime.lifecycle import Shutdown
from agent.runtime.state_store import StateStore
from agent.runtime.status import RuntimeStatus
from agent.runtime.tasks import Supervisor, Tasks

PATIENCE_S = 30.0


class Bench:
    """Tasks whose registration is over when the test sets it."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.shutdown = Shutdown()
        self.registered = asyncio.Event()
        self.status = RuntimeStatus(
            cast("EventRecorder", None), cast("StateStore", None), began_ns=0, stepped_ns=0
        )
        self.tasks = Tasks(
            shutdown=self.shutdown,
            supervisor=Supervisor(emit=self.facts.append, clock=time.monotonic_ns, sleep=self._no_pause),
            status=self.status,
            after_registration=self._after_registration,
            proofs=Proofs(clock=time.monotonic_ns),
        )

    async def _after_registration(self) -> None:
        await self.registered.wait()

    async def _no_pause(self, _seconds: float) -> None:
        await asyncio.sleep(0)


class Source:
    """A source that ends as often as it is run."""

    def __init__(self) -> None:
        self.runs = 0
        self.ran_twice = asyncio.Event()

    async def run(self) -> None:
        self.runs += 1
        if self.runs == 2:
            self.ran_twice.set()
            await asyncio.Event().wait()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    async with asyncio.timeout(PATIENCE_S), made.tasks.group:
        yield made
        await made.tasks.cancel_all()


async def fails(error: Exception) -> None:
    raise error


async def run_forever() -> None:
    await asyncio.Event().wait()


async def test_a_task_that_returns_ends_nothing(bench: Bench) -> None:
    await bench.tasks.start("short", asyncio.sleep(0))
    assert not bench.shutdown.requested.is_set()


async def test_a_bug_ends_the_agent_with_one_sentence(bench: Bench) -> None:
    await bench.tasks.start("checker", fails(ValueError("odd")))
    assert bench.shutdown.why == "checker failed"
    assert str(bench.shutdown.error) == "The task checker failed: ValueError('odd'); see the log"


async def test_an_error_that_was_foreseen_ends_the_agent_with_its_own_sentence(bench: Bench) -> None:
    error = AgentError("The lock of the node could not be waited for")
    await bench.tasks.start("life", fails(error))
    assert bench.shutdown.error is error


async def test_a_task_that_never_was_can_be_cancelled(bench: Bench) -> None:
    bench.tasks.start("one", run_forever())
    await bench.tasks.cancel("one", "never")
    assert "one" in bench.tasks
    assert "never" not in bench.tasks


async def test_a_source_is_made_once_when_the_registration_is_over(bench: Bench) -> None:
    made: list[Source] = []

    def make() -> Source:
        made.append(Source())
        return made[-1]

    bench.tasks.keep_source(SYSFS, make)
    while not bench.facts:
        await asyncio.sleep(0)
    assert made == []
    bench.registered.set()
    while not made:
        await asyncio.sleep(0.001)
    await made[0].ran_twice.wait()
    assert len(made) == 1


async def test_a_part_is_shown_in_health_checks(bench: Bench) -> None:
    bench.tasks.keep_component(SYSFS, "source", run_forever, lambda: "no bus")
    (part,) = bench.status.components
    assert (part.check, part.trouble()) == ("source-sysfs", "no bus")


async def test_what_is_kept_in_place_of_another_ends_the_other(bench: Bench) -> None:
    ended = asyncio.Event()

    async def before() -> None:
        try:
            await run_forever()
        finally:
            ended.set()

    after = asyncio.Event()

    async def instead() -> None:
        after.set()
        await run_forever()

    bench.tasks.keep_component(SYSFS, "source", before)
    await asyncio.sleep(0)
    bench.tasks.replace(SYSFS, instead)
    await ended.wait()
    await after.wait()
    assert len(bench.status.components) == 1
