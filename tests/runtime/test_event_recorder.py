"""What happens before the event log and evidence are imported waits for them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agent.bus import Latest
from agent.config.load import load
from agent.model.effects import Event, EventKind, KeepEvidence, RecordEvent
from agent.model.ids import GpuUuid
from agent.model.snapshot import Snapshot
from agent.proofs import Proofs
from agent.runtime.event_recorder import MAX_EARLY, EventRecorder
from agent.threads import in_daemon_thread
from agent.views import event_files
from tests.sinks.snapshots import node, uuid
from tests.sinks.stored_states import condition

UNHEALTHY = GpuUuid(uuid(3))


class Bench:
    """An event recorder, whose registration is over when the test sets it."""

    def __init__(self, state_dir: Path, **flags: str) -> None:
        self.registered = asyncio.Event()
        self.latest: Latest[Snapshot] = Latest(node())
        self.settings = load({"state-dir": str(state_dir), **flags}, {})
        self.recorder = EventRecorder(
            self.settings,
            latest=self.latest,
            kernel_log=lambda: (),
            boot_id="1",
            clock=time.monotonic_ns,
            after_registration=self._registered,
            proofs=Proofs(clock=lambda: 0),
        )

    async def _registered(self) -> None:
        await self.registered.wait()

    def record(self, message: str) -> None:
        self.recorder.record(RecordEvent(Event(EventKind.XID, message), time.monotonic_ns()))

    def evidence(self) -> list[str]:
        directory = Path(self.settings.evidence_dir)
        return sorted(each.name for each in directory.iterdir()) if directory.exists() else []

    async def on_disk(self) -> list[str]:
        path = self.settings.event_log_path
        return await in_daemon_thread("reader", lambda: [each["message"] for each in event_files.read(path)])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.recorder.run_event_log(), name="event log"),
                group.create_task(self.recorder.run_evidence(), name="evidence"),
            ]
            yield
            for task in tasks:
                task.cancel()


async def test_what_happens_early_is_written_after_the_registration(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.running():
        bench.record("early")
        bench.recorder.keep(KeepEvidence(UNHEALTHY, condition(UNHEALTHY)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert (bench.evidence(), await bench.on_disk()) == ([], [])
        bench.registered.set()
        async with asyncio.timeout(30):
            while not (bench.evidence() and await bench.on_disk()):
                await asyncio.sleep(0.01)
        bench.record("later")
        async with asyncio.timeout(30):
            while await bench.on_disk() != ["early", "later"]:
                await asyncio.sleep(0.01)
    assert [entry.event.message for entry in bench.recorder.recent.since(0)] == ["early", "later"]


async def test_a_bundle_can_be_asked_for_before_anything_is_imported(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    made = await bench.recorder.make_bundle(UNHEALTHY)
    assert made is not None
    assert made.path is not None


async def test_what_waits_is_bounded(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(MAX_EARLY + 6):
        bench.record(str(number))
    for _ in range(5):
        await asyncio.sleep(0)
    bench.registered.set()
    async with bench.running(), asyncio.timeout(30):
        while await bench.on_disk() != [str(number) for number in range(6, MAX_EARLY + 6)]:
            await asyncio.sleep(0.01)


async def test_without_an_event_log_nothing_waits_for_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, **{"event-log-size": "0"})
    bench.record("x")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not bench.recorder._early_events
    await bench.recorder.flush(1)
    assert not await bench.on_disk()
