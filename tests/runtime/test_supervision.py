"""Tasks that end are started again; critical ones may not fail too often."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from agent.errors import SourceError
from agent.guard import guarded, handle_escaped
from agent.model.facts import TaskReported
from agent.model.ids import SourceName
from agent.model.policy import SECOND_NS
from agent.runtime.tasks import MAX_FAILURES, PAUSE_CAP_S, WINDOW_NS, CriticalTaskError, Supervisor

NAME = SourceName("pods")


class EnoughError(BaseException):
    """Ends a test of something that goes on without an end."""


class Bench:
    """A supervisor whose time passes when it pauses."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.is_over = False
        """Whether the task has done what the test needs; the next pause ends the test."""
        self.pauses: list[float] = []
        self.facts: list[TaskReported] = []
        self.supervisor = Supervisor(emit=self.facts.append, clock=lambda: self.now_ns, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if self.is_over:
            raise EnoughError
        self.now_ns += round(seconds * SECOND_NS)

    def failing(
        self, runs: int, error: Exception | None, *, lasting_ns: int = 0
    ) -> Callable[[], Awaitable[None]]:
        """A task that fails (or just returns) so many times, each after a while, then ends the test."""
        left = runs

        async def run() -> None:
            nonlocal left
            left -= 1
            self.is_over = left == 0
            self.now_ns += lasting_ns
            if error is not None:
                raise error

        return run

    async def keep(self, run: Callable[[], Awaitable[None]]) -> None:
        with pytest.raises(EnoughError):
            await self.supervisor.keep(NAME, run)

    async def keep_critical(self, run: Callable[[], Awaitable[None]]) -> None:
        with pytest.raises(EnoughError):
            await self.supervisor.keep_critical(NAME, run)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_task_that_fails_is_started_again_for_ever_with_growing_pauses(bench: Bench) -> None:
    await bench.keep(bench.failing(12, OSError("no")))
    assert bench.pauses[:4] == [1, 2, 4, 8]
    assert bench.pauses[-1] == PAUSE_CAP_S


async def test_a_task_that_ran_well_for_a_while_starts_with_a_short_pause_again(bench: Bench) -> None:
    await bench.keep(bench.failing(4, OSError("no"), lasting_ns=60 * SECOND_NS))
    assert bench.pauses == [1, 1, 1, 1]


async def test_each_start_and_each_end_is_reported(bench: Bench) -> None:
    await bench.keep(bench.failing(2, OSError("no")))
    assert [(fact.task, fact.running, fact.message) for fact in bench.facts] == [
        (NAME, True, ""),
        (NAME, False, "OSError: no"),
    ] * 2


async def test_a_task_that_just_returns_is_reported_too(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.keep(bench.failing(1, None))
    assert bench.facts[1].message == "finished unexpectedly"
    assert [record.msg for record in caplog.records] == ["The task %(task)s has finished unexpectedly"]


async def test_what_is_expected_is_reported_in_its_own_words_without_a_traceback(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.keep(bench.failing(1, SourceError("The kubelet is away")))
    assert bench.facts[1].message == "The kubelet is away"
    assert [(record.levelno, record.exc_info) for record in caplog.records] == [(logging.WARNING, None)]


async def test_a_bug_is_logged_with_its_traceback(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.keep(bench.failing(1, KeyError("x")))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.records[0].exc_info is not None


async def test_of_a_group_of_errors_the_first_is_reported(bench: Bench) -> None:
    group = ExceptionGroup("both", [ExceptionGroup("inner", [OSError("first")]), OSError("second")])
    await bench.keep(bench.failing(1, group))
    assert bench.facts[1].message == "OSError: first"


async def test_five_failures_of_a_critical_task_within_a_minute_end_the_process(bench: Bench) -> None:
    run = bench.failing(MAX_FAILURES, OSError("no"), lasting_ns=WINDOW_NS // MAX_FAILURES)
    with pytest.raises(CriticalTaskError, match="pods failed 5 times within 60 s, last with: OSError: no"):
        await bench.supervisor.keep_critical(NAME, run)


async def test_failures_of_a_critical_task_far_apart_are_survived(bench: Bench) -> None:
    await bench.keep_critical(bench.failing(50, OSError("no"), lasting_ns=WINDOW_NS // (MAX_FAILURES - 1)))


async def test_a_critical_task_is_started_again_at_once(bench: Bench) -> None:
    await bench.keep_critical(bench.failing(MAX_FAILURES - 1, OSError("no")))
    assert max(bench.pauses) <= 0.1


async def test_what_is_expected_does_not_count_as_a_failure_of_a_critical_task(bench: Bench) -> None:
    await bench.keep_critical(bench.failing(50, SourceError("busy")))


async def test_cancelling_ends_a_task_and_is_no_end_that_is_reported(bench: Bench) -> None:
    started = asyncio.Event()

    async def run() -> None:
        started.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.supervisor.keep(NAME, run), name="kept")
        await started.wait()
        task.cancel()
    assert [fact.running for fact in bench.facts] == [True]


# Failures found from outside


def fails(error: BaseException) -> None:
    raise error


async def test_a_run_that_is_failed_from_outside_is_ended_and_started_again(bench: Bench) -> None:
    """A stale part, a callback or a thread fails the task it belongs to, which itself only waits."""
    ended = 0

    async def run() -> None:
        nonlocal ended
        bench.is_over = ended == 1
        asyncio.get_running_loop().call_soon(guarded("odd", fails), KeyError("x"))
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1

    await bench.keep(run)
    messages = [fact.message for fact in bench.facts if not fact.running]
    assert messages == ["KeyError: 'x'"] * 2
    assert ended == 2


async def test_what_would_end_the_loop_is_a_failure_of_the_task_alone(bench: Bench) -> None:
    """asyncio lets SystemExit and KeyboardInterrupt out of a task and of a callback, and ends with them."""

    async def run() -> None:
        if not bench.pauses:
            raise SystemExit(3)
        bench.is_over = True
        asyncio.get_running_loop().call_soon(guarded("odd", fails), KeyboardInterrupt())
        await asyncio.Event().wait()

    await bench.keep(run)
    messages = [fact.message for fact in bench.facts if not fact.running]
    assert messages == ["EscapedError: SystemExit: 3", "EscapedError: KeyboardInterrupt: "]


async def test_a_callback_past_the_guard_is_attributed_by_the_loop(bench: Bench) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(handle_escaped)

    async def unnamed() -> None:
        loop.call_later(0, fails, ValueError("y"))
        await asyncio.Event().wait()

    async def run() -> None:
        bench.is_over = True
        await asyncio.gather(unnamed())

    await bench.keep(run)
    assert next(fact.message for fact in bench.facts if not fact.running) == "ValueError: y"
