"""Log lines: one for each record whatever it holds, without ever blocking the caller."""

import array
import json
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import log
from agent.log import MAX_VALUE_CHARS, RateLimit, about, fields
from agent.log_sinks import MAX_LINE_BYTES, Journal, LineWriter


def record(text: str = "Device changed", /, **values: object) -> logging.LogRecord:
    made = logging.LogRecord("agent.test", logging.INFO, "/src/x.py", 7, text, (), None, "f")
    made.fields = values
    return made


# Lines


def test_a_json_line_holds_the_message_and_the_fields() -> None:
    line = json.loads(log.json_line(record(gpu="GPU-1", count=3)))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "agent.test",
        "message": "Device changed",
        "gpu": "GPU-1",
        "count": 3,
    }


def test_a_field_never_hides_a_part_of_the_line() -> None:
    line = json.loads(log.json_line(record(message="other", level="x")))
    assert (line["message"], line["level"]) == ("Device changed", "info")
    assert (line["field_message"], line["field_level"]) == ("other", "x")


@given(st.text(), st.text() | st.binary() | st.none() | st.lists(st.text()))
def test_whatever_a_record_holds_it_is_one_line(message: str, value: object) -> None:
    for render in (log.json_line, log.text_line):
        line = render(record(message, value=value))
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert b"\r" not in line
        assert b"\x1b" not in line


HOSTILE = "a\x1b]0;x\x07\r\nb\x9b31m\u202ec"
ESCAPED = r"a\x1b]0;x\x07\r\nb\x9b31m\u202ec"


def test_untrusted_text_is_escaped_and_cut_in_the_message_and_whole_in_the_field() -> None:
    made = record("Pod %(pod)s has %(count)d files")
    made.args = about(pod=HOSTILE * 100, count=3)
    made.fields = None
    assert made.getMessage().startswith(f"Pod {ESCAPED}")
    assert len(made.getMessage()) < MAX_VALUE_CHARS + 30
    assert json.loads(log.json_line(made))["pod"] == HOSTILE * 100
    for line in (log.json_line(made), log.text_line(made)):
        assert line.decode()[:-1].isprintable()


def test_a_field_of_the_journal_never_replaces_what_the_journal_shows() -> None:
    entry = log.journal_entry(
        record("Pod\x1b[2J", message="other", priority=0, code_file="x", gpu="y")
    ).decode()
    assert "MESSAGE=Pod\\x1b[2J\n" in entry
    assert {"PRIORITY=6", "CODE_FILE=/src/x.py", "FIELD_MESSAGE=other", "FIELD_PRIORITY=0", "GPU=y"} <= set(
        entry.splitlines()
    )
    assert entry.count("\nMESSAGE=") + entry.startswith("MESSAGE=") == 1


def test_a_line_for_a_person_has_the_zone_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        assert re.match(r"\d\d:\d\d:\d\d\.\d{3}\+0530 INFO ", log.text_line(record()).decode())
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_long_line_is_cut() -> None:
    assert len(log.text_line(record(value="x" * 10**6))) <= MAX_LINE_BYTES


def test_a_bug_keeps_its_traceback_in_one_line() -> None:
    made = record()
    try:
        int("boom")
    except ValueError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    assert "boom" in json.loads(log.json_line(made))["traceback"]


@given(st.dictionaries(st.text(max_size=80), st.text(max_size=80), max_size=4))
def test_journal_fields_are_well_formed_whatever_they_are_called(values: dict[str, str]) -> None:
    raw = log.journal_entry(record(**values))
    while raw:
        head, _, rest = raw.partition(b"\n")
        name, has_value, _ = head.partition(b"=")
        if not has_value:
            (length,) = struct.unpack_from("<Q", rest)
            assert rest[8 + length : 9 + length] == b"\n"
            rest = rest[9 + length :]
        assert name.decode().replace("_", "A").isalnum()
        assert name.isupper()
        assert name[:1] not in b"_0123456789"
        raw = rest


# Rates


def test_a_message_that_repeats_is_limited_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    limit = RateLimit()
    passed = sum(limit.filter(record()) for _ in range(log.OWN_LINES_PER_PERIOD + 50))
    assert passed == log.OWN_LINES_PER_PERIOD
    now_s += log.OWN_PERIOD_S
    late = record()
    assert limit.filter(late)
    assert json.loads(log.json_line(late))["lines_suppressed"] == 50


def test_a_library_gets_one_line_a_second_whatever_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    limit = RateLimit()
    foreign = [record(f"peer {number} sent nonsense") for number in range(20)]
    for each in foreign:
        each.name = "grpclib.server"
    assert sum(map(limit.filter, foreign)) == 1


def test_other_messages_are_not_held_back_by_one_that_repeats() -> None:
    limit = RateLimit()
    for _ in range(1_000):
        limit.filter(record("noise"))
    assert limit.filter(record("signal"))


def test_the_memory_of_messages_is_bounded() -> None:
    limit = RateLimit()
    for number in range(10 * log.MAX_LIMITED_MESSAGES):
        limit.filter(record(f"message {number}"))
    assert len(limit._seen) == log.MAX_LIMITED_MESSAGES


# Set-up


@pytest.fixture
def set_up() -> Iterator[Callable[..., log.Log]]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.raiseExceptions)
    made: list[log.Log] = []

    def set_up(*arguments: object, **named: object) -> log.Log:
        made.append(log.set_up(*arguments, **named))  # type: ignore[arg-type]
        return made[-1]

    yield set_up
    for each in made:
        each.close()
    root.handlers[:], logging.raiseExceptions = before[0], before[2]
    root.setLevel(before[1])


def test_lines_go_to_the_descriptor(set_up: Callable[..., log.Log]) -> None:
    reader, writer = os.pipe()
    lines = set_up("auto", "info", descriptor=writer)
    logging.getLogger("agent.test").info("Hello", extra=fields(n=1))
    logging.getLogger("agent.test").debug("Not this")
    lines.flush(30)
    assert json.loads(os.read(reader, 4096))["n"] == 1
    assert lines.format == "json"
    assert lines.statistics().written == 1


def test_a_value_that_cannot_be_rendered_raises_nothing(set_up: Callable[..., log.Log]) -> None:
    reader, writer = os.pipe()
    lines = set_up("json", "info", descriptor=writer)
    logging.getLogger("agent.test").info("bad %d", "text")
    lines.flush(30)
    assert json.loads(os.read(reader, 4096))["message"] == "Could not render a log line"


def test_the_journal_is_used_only_where_the_descriptor_is_its_stream(
    tmp_path: Path, set_up: Callable[..., log.Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = os.open(tmp_path / "stream", os.O_CREAT | os.O_WRONLY)
    status = os.fstat(descriptor)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    assert set_up("auto", "info", descriptor=descriptor).format == "journal"
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
    assert set_up("auto", "info", descriptor=descriptor).format == "json"
    monkeypatch.setenv("JOURNAL_STREAM", "nonsense")
    assert set_up("auto", "info", descriptor=descriptor).format == "json"


# The journal's socket


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "journal"))
        bound.setblocking(False)
        yield bound


def test_an_entry_is_one_datagram(journald: socket.socket) -> None:
    journal = Journal(journald.getsockname())
    journal.write(b"MESSAGE=hello\n")
    assert journald.recv(100) == b"MESSAGE=hello\n"
    journal.close()


def test_an_entry_too_large_for_a_datagram_comes_in_a_sealed_memory_file(journald: socket.socket) -> None:
    journal = Journal(journald.getsockname())
    entry = b"MESSAGE=" + b"x" * 2**20 + b"\n"
    journal.write(entry)
    _, ancillary, _, _ = journald.recvmsg(10, socket.CMSG_LEN(4))
    ((_, _, raw),) = ancillary
    descriptor = array.array("i", raw)[0]
    assert os.pread(descriptor, 2**21, 0) == entry
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"y", 0)
    os.close(descriptor)
    journal.close()


def test_a_restarted_journald_is_used_again(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"))
    journal.write(b"MESSAGE=lost\n")
    assert (journal.statistics().written, journal.statistics().dropped) == (0, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "journal"))
        journal.write(b"MESSAGE=found\n")
        assert bound.recv(100) == b"MESSAGE=found\n"
    assert journal.statistics().blocked_s == 0
    journal.close()


def test_a_closed_descriptor_loses_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lines = LineWriter(writer)
    lines.write(b"x\n")
    lines.flush(30)
    assert lines.statistics().dropped == 1
