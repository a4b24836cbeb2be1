"""Evidence: what an RMA needs is on disk before anyone resets the GPU."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.bus import Latest
from agent.model.effects import Event, EventKind, KeepEvidence, RecordEvent
from agent.model.health import Condition
from agent.model.ids import GpuUuid
from agent.model.sample import GpuSample
from agent.model.snapshot import Snapshot
from agent.model.structs import replace
from agent.sinks import evidence
from agent.sinks.evidence import EvidenceSink
from agent.views.events import EventRing
from tests.sinks.snapshots import node, uuid
from tests.sinks.stored_states import condition

BOOT = "11111111-2222-3333"
UNHEALTHY = GpuUuid(uuid(3))
FAULT = condition(UNHEALTHY)


@dataclass
class Kept:
    directory: Path
    latest: Latest[Snapshot]
    events: EventRing = field(default_factory=EventRing)
    kernel_log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sink = EvidenceSink(
            str(self.directory),
            latest=self.latest,
            events=self.events,
            kernel_log=lambda: self.kernel_log,
            boot_id=BOOT,
            time_of=lambda at_ns: f"t+{at_ns}",
            settle_s=0.01,
        )

    def happened(self, message: str, gpu: str) -> None:
        self.events.record(RecordEvent(Event(EventKind.CONDITION, message, fields={"uuid": gpu}), 1))

    def names(self) -> list[str]:
        return sorted(each.name for each in self.directory.iterdir())

    def bundle(self, name: str) -> Any:
        return json.loads((self.directory / name).read_bytes())

    async def until(self, name: str) -> None:
        async with asyncio.timeout(30):
            while not (self.directory / name).exists():
                await asyncio.sleep(0.01)


def unhealthy_node(*conditions: Condition) -> Snapshot:
    made = node()
    views = list(made.gpus)
    gpu = replace(views[3].gpu, serial="1324", part_number="900-1", vbios="96.00", inforom="G520")
    sample = GpuSample(recovery_action=1, ecc_uncorrected=2)
    views[3] = replace(views[3], gpu=gpu, conditions=conditions, xids={79: 4}, sample=sample)
    return replace(made, gpus=tuple(views))


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "evidence", Latest(unhealthy_node(FAULT)))


@asynccontextmanager
async def running(kept: Kept) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kept.sink.run(), name="evidence")
        yield
        task.cancel()


FIRST = f"{UNHEALTHY}-11111111-1.json"


async def test_a_bundle_holds_what_an_rma_asks_for(kept: Kept) -> None:
    kept.happened("A condition was raised", UNHEALTHY)
    kept.happened("A condition was raised", uuid(1))
    kept.kernel_log = ["[    1.0] NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus."]
    kept.sink.keep(KeepEvidence(UNHEALTHY, FAULT))
    await kept.sink.flush(30)
    bundle = kept.bundle(FIRST)
    wanted = {
        "serial": "1324",
        "part_number": "900-1",
        "vbios": "96.00",
        "inforom": "G520",
        "pci": "0000:03:00.0",
    }
    assert bundle["gpu"].items() >= wanted.items()
    assert (bundle["gpu"]["xids"], bundle["gpu"]["sample"]["ecc_uncorrected"]) == ({"79": 4}, 2)
    assert (bundle["why"]["number"], bundle["why"]["since"]) == (79, "t+7000")
    assert [event["fields"]["uuid"] for event in bundle["events"]] == [UNHEALTHY]
    assert bundle["kernel_log"] == kept.kernel_log
    assert bundle["driver"]["ready"] is None


async def test_bundles_are_for_root_only(kept: Kept) -> None:
    kept.sink.keep(KeepEvidence(UNHEALTHY, FAULT))
    await kept.sink.flush(30)
    assert kept.directory.stat().st_mode & 0o777 == 0o700
    assert (kept.directory / FIRST).stat().st_mode & 0o777 == 0o600


async def test_it_is_written_at_once_and_again_when_more_is_known(kept: Kept) -> None:
    async with running(kept):
        kept.sink.keep(KeepEvidence(UNHEALTHY, FAULT))
        await kept.until(FIRST)
        kept.kernel_log = ["later"]
        async with asyncio.timeout(30):
            while kept.bundle(FIRST)["kernel_log"] != ["later"]:
                await asyncio.sleep(0.01)
    assert kept.names() == [FIRST]


async def test_the_newest_bundles_are_kept(kept: Kept) -> None:
    for _ in range(evidence.MAX_FILES + 3):
        kept.sink.keep(KeepEvidence(UNHEALTHY, FAULT))
    await kept.sink.flush(30)
    numbers = sorted(int(name.removesuffix(".json").rpartition("-")[2]) for name in kept.names())
    assert numbers == list(range(4, evidence.MAX_FILES + 4))


async def test_what_an_operator_asked_for_pushes_no_evidence_out(kept: Kept) -> None:
    kept.sink.keep(KeepEvidence(UNHEALTHY, FAULT))
    await kept.sink.flush(30)
    for _ in range(evidence.MAX_FILES + 1):
        made = await kept.sink.make(UNHEALTHY)
        assert made is not None
        assert made.trouble is None
        assert made.document["why"] is None
    assert FIRST in kept.names()
    assert len(kept.names()) == 1 + evidence.MAX_FILES


async def test_of_a_gpu_that_is_not_known_there_is_none(kept: Kept) -> None:
    assert await kept.sink.make(GpuUuid("GPU-9")) is None
    kept.sink.keep(KeepEvidence(GpuUuid("GPU-9"), FAULT))
    await kept.sink.flush(30)
    assert not kept.directory.exists()


async def test_a_bundle_that_is_too_long_loses_what_is_oldest(kept: Kept) -> None:
    kept.kernel_log = [f"{number}: {'x' * 9_000}" for number in range(200)]
    kept.sink.keep(KeepEvidence(UNHEALTHY, FAULT))
    await kept.sink.flush(30)
    assert (kept.directory / FIRST).stat().st_size <= evidence.MAX_BYTES
    lines = kept.bundle(FIRST)["kernel_log"]
    assert lines == kept.kernel_log[-len(lines) :] != []


async def test_faults_that_wait_are_bounded_and_counted(kept: Kept) -> None:
    for _ in range(evidence.MAX_WAITING + 3):
        kept.sink.keep(KeepEvidence(UNHEALTHY, FAULT))
    await kept.sink.flush(30)
    assert kept.sink.lost == 3
    numbers = {int(name.removesuffix(".json").rpartition("-")[2]) for name in kept.names()}
    assert max(numbers) == evidence.MAX_WAITING


async def test_a_name_from_the_driver_leads_nowhere_else(kept: Kept, tmp_path: Path) -> None:
    odd = GpuUuid("../../etc/x\n")
    view = kept.latest.value.gpus[0]
    kept.latest.publish(replace(kept.latest.value, gpus=(replace(view, gpu=replace(view.gpu, uuid=odd)),)))
    assert await kept.sink.make(odd) is not None
    assert kept.names() == ["asked-______etc_x_-11111111-1.json"]


def troubled(kept: Kept) -> bool:
    return kept.sink.trouble is not None


async def test_a_bundle_that_was_asked_for_and_rejected_is_answered_and_changes_nothing_else(
    kept: Kept,
) -> None:
    kept.directory.write_text("in the way")
    made = await kept.sink.make(UNHEALTHY)
    assert made is not None
    assert (made.path, made.trouble, kept.sink.trouble) == (None, "File exists", None)


async def test_what_the_disk_rejects_is_written_once_there_is_room(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.directory.write_text("in the way")
    with caplog.at_level(logging.INFO):
        async with running(kept):
            kept.sink.keep(KeepEvidence(UNHEALTHY, FAULT))
            kept.sink.keep(KeepEvidence(GpuUuid("GPU-9"), FAULT))
            async with asyncio.timeout(30):
                while kept.sink.failures < 2:
                    await asyncio.sleep(0.01)
                assert kept.sink.trouble == "File exists"
                kept.directory.unlink()
                while troubled(kept):
                    await asyncio.sleep(0.01)
    assert kept.names() == [FIRST]
    messages = [record.message for record in caplog.records]
    assert sum(line.startswith("Could not keep evidence in ") for line in messages) == 1
    assert f"Kept evidence again in {kept.directory}" in messages
