"""The events of the core in the log."""

import logging
import re

import pytest

from agent import log
from agent.model.effects import Event, EventKind, RecordEvent
from agent.sinks.journal import MESSAGE_IDS, JournalSink

XID = Event(
    EventKind.XID,
    "An XID was ignored by policy",
    fields={"uuid": "GPU-1", "gpu": 1, "xid": 31, "message": "why"},
)


def test_every_kind_of_event_has_a_message_id_of_its_own() -> None:
    assert set(MESSAGE_IDS) == set(EventKind)
    assert len(set(MESSAGE_IDS.values())) == len(EventKind)
    assert all(re.fullmatch("[0-9a-f]{32}", message_id) for message_id in MESSAGE_IDS.values())


def test_an_event_is_one_line_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        JournalSink().record(RecordEvent(XID, at_ns=0))
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("INFO", "An XID was ignored by policy")
    assert record.fields == {  # type: ignore[attr-defined]
        "gpu_uuid": "GPU-1",
        "gpu_index": 1,
        "xid": 31,
        "detail": "why",
        "kind": "xid",
        "message_id": MESSAGE_IDS[EventKind.XID],
    }


def test_a_storm_of_one_event_does_not_silence_another(caplog: pytest.LogCaptureFixture) -> None:
    limit = log.RateLimit()
    with caplog.at_level(logging.INFO), caplog.filtering(limit):
        for _ in range(log.OWN_LINES_PER_PERIOD + 1):
            JournalSink().record(RecordEvent(XID, at_ns=0))
        assert limit.suppressed == 1
        JournalSink().record(RecordEvent(Event(EventKind.DEVICE, "Health changed"), at_ns=0))
    assert caplog.messages[-1] == "Health changed"


def test_what_is_unexpected_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    JournalSink().record(RecordEvent(Event(EventKind.KUBELET, "Gone", warning=True), at_ns=0))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_journal_can_be_asked_by_gpu_and_kind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        JournalSink().record(RecordEvent(XID, at_ns=0))
    entry = log.journal_entry(caplog.records[0]).decode()
    assert "GPU_UUID=GPU-1\n" in entry
    assert "XID=31\n" in entry
    assert f"MESSAGE_ID={MESSAGE_IDS[EventKind.XID]}\n" in entry
    assert "PRIORITY=6\n" in entry
    assert "SYSLOG_IDENTIFIER=gpu-agent\n" in entry
