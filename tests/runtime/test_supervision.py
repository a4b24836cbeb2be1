"""Tasks that end are started again; critical ones may not fail too often."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import pytest

from agent.errors import SourceError
from agent.model.facts import TaskReported
from agent.model.ids import SourceName
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.runtime import supervision
from agent.runtime.supervision import (
    MAX_FAILURES,
    PAUSE_CAP_S,
    WINDOW_NS,
    CriticalTaskError,
    Pulse,
    Supervisor,
)

NAME = SourceName("pods")


class EnoughError(BaseException):
    """Ends a test of something that goes on for ever."""


class Bench:
    """A supervisor whose time passes when it pauses."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.pauses: list[float] = []
        self.told: list[TaskReported] = []
        self.supervisor = Supervisor(tell=self.told.append, clock=lambda: self.now_ns, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_ns += round(seconds * SECOND_NS)

    def failing(
        self, runs: int, error: Exception | None, *, lasting_ns: int = 0
    ) -> Callable[[], Awaitable[None]]:
        """A task that fails (or just returns) so many times, each after a while, then ends the test."""
        left = runs

        async def run() -> None:
            nonlocal left
            if left == 0:
                raise EnoughError
            left -= 1
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


async def test_each_start_and_each_end_is_told(bench: Bench) -> None:
    await bench.keep(bench.failing(1, OSError("no")))
    assert [(fact.task, fact.running, fact.message) for fact in bench.told] == [
        (NAME, True, ""),
        (NAME, False, "OSError: no"),
        (NAME, True, ""),
    ]


async def test_a_task_that_just_returns_is_told_too(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.keep(bench.failing(1, None))
    assert bench.told[1].message == "finished unexpectedly"
    assert [record.message for record in caplog.records] == ["A task has finished unexpectedly"]


async def test_what_is_expected_is_told_in_its_own_words_without_a_traceback(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.keep(bench.failing(1, SourceError("The kubelet is away")))
    assert bench.told[1].message == "The kubelet is away"
    assert [(record.levelno, record.exc_info) for record in caplog.records] == [(logging.WARNING, None)]


async def test_a_bug_is_logged_with_its_traceback(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.keep(bench.failing(1, KeyError("x")))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.records[0].exc_info is not None


async def test_of_a_group_of_errors_the_first_is_told(bench: Bench) -> None:
    group = ExceptionGroup("both", [ExceptionGroup("inner", [OSError("first")]), OSError("second")])
    await bench.keep(bench.failing(1, group))
    assert bench.told[1].message == "OSError: first"


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


async def test_cancelling_ends_a_task_and_is_no_end_that_is_told(bench: Bench) -> None:
    started = asyncio.Event()

    async def run() -> None:
        started.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.supervisor.keep(NAME, run), name="kept")
        await started.wait()
        task.cancel()
    assert [fact.running for fact in bench.told] == [True]


# A pulse


class Watched:
    """A supervisor by the real clock, of a task that gives signs of life for a while and then none."""

    def __init__(self, *, signs: int) -> None:
        self.told: list[TaskReported] = []
        self.supervisor = Supervisor(tell=self.told.append, clock=time.monotonic_ns, sleep=self._sleep)
        self.pulse = Pulse(lambda: self._signed_ns, 5 * MILLISECOND_NS)
        self.runs = 0
        self._signs = signs
        self._signed_ns: int | None = None

    async def _sleep(self, _seconds: float) -> None:
        if self.runs == 2:
            raise EnoughError

    async def run(self) -> None:
        self.runs += 1
        for _ in range(self._signs):
            self._signed_ns = time.monotonic_ns()
            await asyncio.sleep(0.005)
        await asyncio.Event().wait()

    async def keep(self) -> None:
        with pytest.raises(EnoughError):
            await self.supervisor.keep(NAME, self.run, self.pulse)


@pytest.mark.parametrize("signs", [0, 10])
async def test_a_task_without_a_sign_of_life_is_ended_and_started_again(
    signs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LEAST_SILENCE_NS", 20 * MILLISECOND_NS)
    watched = Watched(signs=signs)
    async with asyncio.timeout(30):
        await watched.keep()
    assert watched.runs == 2
    ended = [told.message for told in watched.told if not told.running]
    assert ended == ["stalled: no sign of life for 0 s"] * 2


async def test_a_task_that_shows_life_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "LEAST_SILENCE_NS", 60 * SECOND_NS)
    watched = Watched(signs=3)
    keeping = asyncio.timeout(0.1)
    with pytest.raises(TimeoutError):
        async with keeping:
            await watched.keep()
    assert (watched.runs, [told.running for told in watched.told]) == (1, [True])


async def test_how_a_watched_task_ends_is_told_as_of_any_other(bench: Bench) -> None:
    pulse = Pulse(lambda: None, 3600 * SECOND_NS)
    with pytest.raises(EnoughError):
        await bench.supervisor.keep(NAME, bench.failing(1, SourceError("The bus is gone")), pulse)
    assert [told.message for told in bench.told if not told.running] == ["The bus is gone"]
