"""What the agent reports of itself in /readyz and in the status."""

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from agent.bus import Inbox, Latest
from agent.config.load import load
from agent.log import Log, RateLimit
from agent.log_sinks import LineWriter
from agent.model.components import HTTP
from agent.model.facts import PODS, Fact
from agent.model.ids import SourceName
from agent.model.snapshot import Snapshot, TaskView
from agent.model.structs import replace
from agent.proofs import Proofs
from agent.runtime.event_recorder import EventRecorder
from agent.runtime.http_service import SelfReport
from agent.runtime.state_store import StateStore
from agent.runtime.status import Component, RuntimeStatus
from agent.views import checks
from tests.sinks.snapshots import node


class Bench:
    """A report on an agent whose log goes into a pipe."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        self.log = LineWriter(self._writer)
        self.latest: Latest[Snapshot] = Latest(node())
        self.records = EventRecorder(
            load({}, {}),
            latest=self.latest,
            kernel_log=lambda: (),
            boot_id="11111111",
            clock=time.monotonic_ns,
            after_registration=self._at_once,
            proofs=Proofs(clock=lambda: 0),
        )
        now_ns = time.monotonic_ns()
        state = StateStore(
            "/nonexistent/state.json",
            self.latest,
            boot_id="11111111",
            period_ns=1,
            prove=lambda: None,
            emit=lambda _: None,
        )
        self.status = RuntimeStatus(self.records, state, began_ns=now_ns, stepped_ns=now_ns, is_standby=False)
        self.inbox: Inbox[Fact] = Inbox(clock=time.monotonic_ns)
        self.report = SelfReport(
            self.status,
            boot_id="11111111",
            latest=self.latest,
            inbox=self.inbox,
            lines=Log(self.log, RateLimit(), "json"),
            clock=time.monotonic_ns,
        )

    async def _at_once(self) -> None:
        return

    def answer(self, name: str) -> str | None:
        """What one check returns; KeyError if it does not apply."""
        run = {check.name: check.run for check in self.report.checks()}[name]

        async def result() -> str | None:
            return await run()

        return asyncio.run(result())

    def names(self) -> set[str]:
        return {check.name for check in self.report.checks()}

    def close(self) -> None:
        os.set_blocking(self.reader, False)
        deadline_s = time.monotonic() + 30
        while self.log.statistics().blocked_s and time.monotonic() < deadline_s:
            try:
                os.read(self.reader, 2**20)
            except BlockingIOError:
                time.sleep(0.001)
        self.inbox.close()
        os.close(self.reader)
        os.close(self._writer)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_a_log_that_no_reader_drains_is_not_ready_after_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 22."""
    monkeypatch.setattr(checks, "MAX_LOG_BLOCKED_S", 0.05)
    assert bench.answer("log") is None
    for _ in range(200):
        bench.log.write(b"x" * 999 + b"\n")
    while bench.log.statistics().blocked_s < 0.1:
        time.sleep(0.001)
    before_s = bench.log.statistics().blocked_s
    answer = bench.answer("log")
    after_s = bench.log.statistics().blocked_s
    assert answer in {f"blocked for {seconds} s" for seconds in range(round(before_s), round(after_s) + 1)}


def test_a_source_is_checked_by_its_task_and_by_itself(bench: Bench) -> None:
    trouble: list[str] = []
    bench.status.components.append(Component(PODS, "source", lambda: trouble[0] if trouble else None))
    assert bench.answer("source-pods") is None
    trouble.append("the disk is full")
    assert bench.answer("source-pods") == "the disk is full"
    stalled = TaskView(running=False, failures=1, message="stalled: no sign of life for 30 s")
    bench.latest.publish(replace(node(), tasks={PODS: stalled}))
    assert bench.answer("source-pods") == "stalled: no sign of life for 30 s"
    assert bench.report.describe()["parts"] == {"source-pods": "stalled: no sign of life for 30 s"}


def test_a_sink_is_named_as_one(bench: Bench) -> None:
    bench.status.components.append(Component(HTTP, "sink", lambda: None))
    assert "sink-http" in bench.names()


def test_what_is_turned_off_has_no_check(bench: Bench) -> None:
    assert not {name for name in bench.names() if name.startswith(("source-", "sink-"))}


def test_a_standby_is_checked_by_itself_alone(bench: Bench) -> None:
    bench.status.components.append(Component(SourceName("pods"), "source", lambda: "not yet"))
    bench.status.is_standby = True
    assert bench.names() == {"ping", "event-loop", "log", "config", "standby"}


def test_a_stopping_agent_is_not_ready(bench: Bench) -> None:
    bench.status.is_stopping = True
    assert bench.answer("shutdown") == "the agent is stopping"
    assert bench.report.describe()["phase"] == "stopping"


def test_a_reload_that_was_rejected_is_not_ready(bench: Bench) -> None:
    bench.status.reload_trouble = "agent.pol is unknown"
    assert bench.answer("config") == "agent.pol is unknown"
