"""The events of the core in the log."""

import logging
import re

import pytest

from agent import log
from agent.model.effects import Event, EventKind, RecordEvent
from agent.model.structs import replace
from agent.sinks.journal import MESSAGE_IDS, JournalSink
from agent.views.sentences import sentence_of
from tests.core.build import U3, enumerated, failed, gpu, registered_node, xid

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
    assert (record.levelname, record.message) == (
        "INFO",
        "GPU 1 (GPU-1): An XID was ignored by policy: XID 31: why",
    )
    assert record.fields == {  # type: ignore[attr-defined]
        "gpu_uuid": "GPU-1",
        "gpu_index": 1,
        "xid": 31,
        "detail": "why",
        "kind": "xid",
        "event": "An XID was ignored by policy",
        "message_id": MESSAGE_IDS[EventKind.XID],
    }


def test_a_storm_of_one_event_does_not_silence_another(caplog: pytest.LogCaptureFixture) -> None:
    limit = log.RateLimit()
    with caplog.at_level(logging.INFO), caplog.filtering(limit):
        for number in range(log.OWN_LINES_PER_PERIOD + 1):
            differing = {**(XID.fields or {}), "message": f"for the {number}. time"}
            JournalSink().record(RecordEvent(replace(XID, fields=differing), at_ns=0))
        assert limit.suppressed == 1
        JournalSink().record(RecordEvent(Event(EventKind.KUBELET, "The kubelet made a new socket"), at_ns=0))
    assert caplog.messages[-1] == "The kubelet made a new socket"


def test_conditions_that_a_program_causes_do_not_silence_those_of_a_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raised = Event(EventKind.CONDITION, "A condition was raised", fields={"reason": "foreign_process"})
    with caplog.at_level(logging.INFO), caplog.filtering(log.RateLimit()):
        for _ in range(2 * log.OWN_LINES_PER_PERIOD):
            JournalSink().record(RecordEvent(raised, at_ns=0))
        before = len(caplog.messages)
        JournalSink().record(RecordEvent(replace(raised, fields={"reason": "xid", "code": 79}), at_ns=0))
    assert (before, len(caplog.messages)) == (log.OWN_LINES_PER_PERIOD, log.OWN_LINES_PER_PERIOD + 1)


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


GPU_3 = {"gpu": 3, "uuid": "GPU-3", "pci": "0000:3b:00.0"}
FALLEN = "XID 79: GPU has fallen off the bus"


@pytest.mark.parametrize(
    ("message", "fields", "sentence"),
    [
        (
            "Health changed",
            {
                **GPU_3,
                "health": "Unhealthy",
                "count": 1,
                "resource": "nvidia.com/gpu",
                "reason": "xid",
                "detail": FALLEN,
            },
            f"GPU 3 (0000:3b:00.0) is unhealthy: {FALLEN} (1 device of nvidia.com/gpu)",
        ),
        (
            "Health would have changed",
            {
                **GPU_3,
                "health": "Unhealthy",
                "count": 2,
                "resource": "r",
                "reason": "thermal",
                "detail": "hot",
            },
            "GPU 3 (0000:3b:00.0) would be unhealthy: thermal, hot (2 devices of r)",
        ),
        (
            "A condition was raised",
            {
                **GPU_3,
                "gi": 1,
                "ci": 0,
                "reason": "xid",
                "code": 94,
                "message": "XID 94: x",
                "advice": "reset it",
            },
            "GPU 3 (0000:3b:00.0) GI 1 CI 0 has the condition XID 94: x; reset it",
        ),
        (
            "A condition was cleared",
            {**GPU_3, "gpu": None, "reason": "gpu_lost"},
            "The GPU 0000:3b:00.0 has gpu_lost no more",
        ),
        (
            "Allocatable changed",
            {
                "resource": "r",
                "capacity": 8,
                "allocatable": 7,
                "unhealthy": [{"id": "x", "gpu": 3, "reason": "xid"}],
            },
            "r: 7 of 8 devices allocatable; unhealthy: GPU 3 xid",
        ),
        (
            "Not registered with the kubelet",
            {"resource": "r", "detail": "rejected"},
            "r is not registered with the kubelet: rejected",
        ),
        ("Health changed", {}, "Health changed"),
        (
            "Of another version",
            {**GPU_3, "detail": "why", "gpus": 3},
            "GPU 3 (0000:3b:00.0): Of another version: why",
        ),
    ],
)
def test_a_sentence_names_the_object_and_the_reason(
    message: str, fields: dict[str, object], sentence: str
) -> None:
    assert sentence_of(message, fields) == sentence


async def test_every_event_of_a_gpu_names_it_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    node = registered_node(gpu(0), gpu(3))
    node.forget_effects()
    effects = node.apply(xid(79, U3), failed(U3, 15), enumerated(gpu(0)))
    with caplog.at_level(logging.INFO):
        for effect in effects:
            if isinstance(effect, RecordEvent):
                JournalSink().record(effect)
    assert len(caplog.messages) > 1
    unnamed = [line for line in caplog.messages if not {U3, "GPU 3", gpu(3).pci} & set(_names_in(line))]
    assert unnamed == []


def _names_in(line: str) -> list[str]:
    return [name for name in (U3, "GPU 3", gpu(3).pci) if name in line]
