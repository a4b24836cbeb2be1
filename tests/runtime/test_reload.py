"""What a reload does with good settings, with bad ones, and with those that wait for the next start."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from agent.config.load import load
from agent.config.settings import Settings
from agent.runtime.event_recorder import EventRecorder
from agent.runtime.reload import Reload
from agent.runtime.state_store import StateStore
from agent.runtime.status import RuntimeStatus
from agent.sinks.notify import Notifier
from agent.threads import in_daemon_thread

PATIENCE_S = 60.0


class Reloading:
    """A reload, and what came of it."""

    def __init__(self, reread: Callable[[], Settings]) -> None:
        self.applied: list[Settings] = []
        self.problems: tuple[str, ...] = ()
        self.in_effect = asyncio.Event()
        self.in_effect.set()
        self.notifier = Notifier({})
        self.status = RuntimeStatus(
            cast("EventRecorder", None), cast("StateStore", None), began_ns=0, stepped_ns=0
        )
        self.reload = Reload(
            load({}, {}),
            reread=reread,
            validate=lambda _: self.problems,
            prove_watch=lambda: None,
            recheck_ns=30_000_000_000,
            apply=self.apply,
            status=self.status,
            notifier=self.notifier,
        )

    async def apply(self, settings: Settings) -> None:
        self.applied.append(settings)
        await self.in_effect.wait()

    @property
    def trouble(self) -> str | None:
        return self.status.reload_trouble

    @property
    def waiting(self) -> tuple[str, ...]:
        return self.status.awaiting_restart

    async def once(self, caplog: pytest.LogCaptureFixture, message: str) -> None:
        """Ask, and wait until the log shows the outcome."""
        caplog.clear()
        self.reload.ask()
        async with asyncio.timeout(PATIENCE_S):
            while not any(line.startswith(message) for line in caplog.messages):
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def reloading(reread: Callable[[], Settings]) -> AsyncIterator[Reloading]:
    made = Reloading(reread)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(made.reload.run())
        yield made
        task.cancel()
    made.notifier.close()


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


async def test_what_waits_for_the_next_start_is_named_by_its_option(caplog: pytest.LogCaptureFixture) -> None:
    flags = {"poll": "7s", "http-listen": ":1", "mig-strategy": "mixed"}
    async with reloading(lambda: load(flags, {})) as made:
        await made.once(caplog, "Read the configuration again")
        assert made.waiting == ("http-listen", "poll")
        assert made.applied[0].policy.mig_strategy == "mixed"
        del flags["poll"], flags["http-listen"]
        await made.once(caplog, "Read the configuration again")
        assert not made.waiting


async def test_bad_settings_are_not_applied_and_stay_reported_until_good_ones_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flags = {"poll": "soon"}
    async with reloading(lambda: load(flags, {})) as made:
        await made.once(caplog, "Kept the old configuration")
        assert (made.trouble or "").startswith("--poll must be a number with a unit")
        flags.clear()
        await made.once(caplog, "Read the configuration again")
        assert (made.trouble, len(made.applied)) == (None, 1)


async def test_settings_that_do_not_fit_the_node_are_rejected(caplog: pytest.LogCaptureFixture) -> None:
    async with reloading(lambda: load({}, {})) as made:
        made.problems = ("nvidia.com/gpu has too many devices",)
        await made.once(caplog, "Kept the old configuration")
        assert (made.trouble, made.applied) == ("nvidia.com/gpu has too many devices", [])


async def test_a_warning_is_logged_once_and_again_when_it_is_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = {"GPU_AGENT_POL": "1s"}
    async with reloading(lambda: load({}, environment)) as made:
        await made.once(caplog, "Read the configuration again")
        assert sum(line.startswith("A setting was ignored: ") for line in caplog.messages) == 1
        await made.once(caplog, "Read the configuration again")
        assert "A setting was ignored" not in caplog.text


async def test_a_thread_that_cannot_be_had_is_a_rejection_and_no_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_thread() -> Settings:
        raise RuntimeError("can't start new thread")

    async with reloading(no_thread) as made:
        await made.once(caplog, "Kept the old configuration")
        assert made.trouble == "No thread could be started to read it: can't start new thread"


async def test_asked_for_while_one_is_under_way_one_more_follows(caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    loop, reads = asyncio.get_running_loop(), []

    def reread() -> Settings:
        reads.append(1)
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(PATIENCE_S)
        return load({}, {})

    async with reloading(reread) as made:
        made.reload.ask()
        await begun.wait()
        for _ in range(50):
            made.reload.ask()
        go_on.set()
        async with asyncio.timeout(PATIENCE_S):
            while len(made.applied) < 2:
                await asyncio.sleep(0.005)
        await in_daemon_thread("pause", lambda: None)
        assert len(reads) == 2


async def test_a_reload_ends_when_the_settings_are_in_effect(caplog: pytest.LogCaptureFixture) -> None:
    """``systemctl reload`` returns at READY=1: an XID of after it is evaluated by the new policy."""
    async with reloading(lambda: load({}, {})) as made:
        made.in_effect.clear()
        made.reload.ask()
        async with asyncio.timeout(PATIENCE_S):
            while not made.applied:
                await asyncio.sleep(0.005)
        assert "Read the configuration again" not in caplog.text
        made.in_effect.set()
        await made.once(caplog, "Read the configuration again")
