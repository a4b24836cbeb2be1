"""The event log on disk: every event once, in order, within its room, whatever the disk does."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.model.effects import Event, EventKind, RecordEvent
from agent.model.health import Reason
from agent.sinks.eventlog import MAX_QUEUED, EventLog
from agent.threads import in_daemon_thread
from agent.views import event_files
from agent.views.event_files import FILES, append, read
from agent.views.events import Entry, EventRing

BOOT = "11111111-1111"
MIB = 2**20


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "events.jsonl")


def log_at(path: str, *, max_bytes: int = 16 * MIB) -> EventLog:
    return EventLog(path, boot_id=BOOT, max_bytes=max_bytes, clock=lambda: 10_000)


def entry(number: int, **event_fields: object) -> Entry:
    event = Event(EventKind.CONDITION, "A condition was raised", warning=True, fields=event_fields)
    return Entry(number, 9_000 + number, event)


def numbers(path: str) -> list[int]:
    return [event["number"] for event in read(path)]


@asynccontextmanager
async def running(log: EventLog) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(log.run(), name="event log")
        yield
        task.cancel()


async def settled(log: EventLog, count: int) -> None:
    async with asyncio.timeout(30):
        while log.written < count:
            await asyncio.sleep(0.01)


# What is written


async def test_an_event_is_a_line_with_its_times_and_its_boot(path: str) -> None:
    log = log_at(path)
    log.record(entry(7, reason=Reason.XID, gpus=("GPU-1",)))
    await log.flush(30)
    (line,) = Path(path).read_text().splitlines()
    document = json.loads(line)
    assert document.pop("time").endswith("Z")
    assert document == {
        "number": 7,
        "time_monotonic_ns": 9_007,
        "boot": BOOT,
        "kind": "condition",
        "message": "A condition was raised",
        "warning": True,
        "fields": {"reason": "xid", "gpus": ["GPU-1"]},
    }


async def test_events_are_written_as_they_come(path: str) -> None:
    log = log_at(path)
    async with running(log):
        log.record(entry(1))
        await settled(log, 1)
        log.record(entry(2))
        log.record(entry(3))
        await settled(log, 3)
    assert numbers(path) == [1, 2, 3]


async def test_the_log_goes_on_after_a_restart(path: str) -> None:
    for number in (1, 2):
        log = log_at(path)
        log.record(entry(number))
        await log.flush(30)
    assert numbers(path) == [1, 2]


async def test_the_file_is_for_root_only(path: str) -> None:
    log = log_at(path)
    log.record(entry(1))
    await log.flush(30)
    assert Path(path).stat().st_mode & 0o777 == 0o600


async def test_the_ring_gives_the_number_that_is_written(path: str) -> None:
    log, ring = log_at(path), EventRing()
    for _ in range(3):
        log.record(ring.record(RecordEvent(Event(EventKind.XID, "x"), 1)))
    await log.flush(30)
    assert numbers(path) == [1, 2, 3]


async def test_an_event_too_long_for_a_line_is_written_without_its_fields(path: str) -> None:
    log = log_at(path)
    log.record(entry(1, text="x" * event_files.MAX_LINE_BYTES))
    await log.flush(30)
    (event,) = read(path)
    assert list(event["fields"]) == ["cut_bytes"]


# Its room


async def test_files_are_rotated_and_the_oldest_goes(path: str, tmp_path: Path) -> None:
    log = log_at(path, max_bytes=FILES * 1_000)
    for number in range(100):
        log.record(entry(number))
    await log.flush(30)
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"events.jsonl", "events.jsonl.1", "events.jsonl.2", "events.jsonl.3"}
    assert max(each.stat().st_size for each in tmp_path.iterdir()) <= 1_000
    kept = numbers(path)
    assert kept == list(range(kept[0], 100))
    assert log.written == 100


def test_a_line_longer_than_a_file_has_one_of_its_own(path: str) -> None:
    assert append(path, [b"1\n", b"x" * 99 + b"\n", b"2\n"], max_bytes=10) == 1
    assert append(path, [b"x" * 99 + b"\n", b"2\n"], max_bytes=10) == 1
    assert Path(path).stat().st_size == 100
    assert append(path, [b"2\n"], max_bytes=10) == 1
    assert Path(path).read_bytes() == b"2\n"


# What the disk does


async def test_a_line_that_a_crash_cut_off_costs_one_event(path: str) -> None:
    log = log_at(path)
    log.record(entry(1))
    await log.flush(30)
    with Path(path).open("ab") as file:
        file.write(b'{"number":2,"time":"20')
    log.record(entry(3))
    await log.flush(30)
    assert numbers(path) == [1, 3]


@pytest.mark.parametrize(
    "damage", [b"\n\n", b"{}\n", b"[]\n", b"null\n", b"\xff\xfe\n", b"[" * 10_000 + b"\n", b"x" * 99_999]
)
async def test_what_makes_no_sense_is_skipped(path: str, damage: bytes) -> None:
    Path(path).write_bytes(damage)
    log = log_at(path)
    log.record(entry(1))
    await log.flush(30)
    assert numbers(path) == [1]


def test_without_files_nothing_happened(path: str) -> None:
    assert list(read(path)) == []


async def test_a_write_that_fails_is_logged_once_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "missing"
    log = log_at(str(directory / "events.jsonl"))
    with caplog.at_level(logging.INFO):
        log.record(entry(1))
        await log.flush(30)
        log.record(entry(2))
        await log.flush(30)
        assert (log.trouble, log.failures) == ("No such file or directory", 2)
        directory.mkdir()
        await log.flush(30)
    assert (log.trouble, numbers(log.path)) == (None, [1, 2])
    assert [record.msg.partition(":")[0] for record in caplog.records] == [
        "Could not write the event log %(path)s",
        "Wrote the event log again",
    ]


async def test_a_write_that_broke_off_is_not_written_twice(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_at(path)
    log.record(entry(1))
    await log.flush(30)

    def breaks_off(descriptor: int, raw: bytes) -> None:
        os.write(descriptor, raw[:20])
        raise OSError(28, "No space left on device")

    log.record(entry(2))
    with monkeypatch.context() as patched:
        patched.setattr(event_files, "write_all", breaks_off)
        await log.flush(30)
    assert log.trouble == "No space left on device"
    await log.flush(30)
    assert len(Path(path).read_text().splitlines()) == 2
    assert numbers(path) == [1, 2]


async def test_events_without_room_are_counted_and_reported(tmp_path: Path) -> None:
    directory = tmp_path / "missing"
    log = log_at(str(directory / "events.jsonl"))
    for number in range(MAX_QUEUED + 2):
        log.record(entry(number))
    await log.flush(30)
    assert log.lost == 2
    directory.mkdir()
    await log.flush(30)
    loss, *events = read(log.path)
    assert (loss["kind"], loss["fields"]) == ("loss", {"count": 2})
    assert [event["number"] for event in events] == list(range(MAX_QUEUED))
    assert log.written == MAX_QUEUED
    log.record(entry(MAX_QUEUED + 2))
    await log.flush(30)
    assert [event["kind"] for event in read(log.path)].count("loss") == 1


async def test_a_disk_that_hangs_holds_up_neither_recording_nor_the_end(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(path)
    # A pipe is written to until it is full, and then waited for.
    log = log_at(path)
    for number in range(400):
        log.record(entry(number, text="x" * 500))
    await log.flush(0.05)
    assert "Stopped without the newest events in " in caplog.text
    log.record(entry(400))
    assert log.written == 0
    await in_daemon_thread("drain", lambda: _drain(path))
    await log.flush(30)
    assert log.trouble == "Invalid argument"  # a pipe cannot be synced


def _drain(path: str) -> None:
    """Let the thread that hangs go."""
    reader = os.open(path, os.O_RDONLY)
    while os.read(reader, MIB):
        pass
    os.close(reader)
