"""Fault 22: the log's pipe is full, or journald has stopped.

Right: logging never blocks, drops are counted, readiness reports it after two minutes.
"""

import os
import socket
import threading
from pathlib import Path

from agent.log_sinks import MAX_QUEUED_LINES, Journal, LineWriter

LINE = b"x" * 999 + b"\n"


def test_a_full_pipe_blocks_no_caller_and_drops_are_counted() -> None:
    reader, writer = os.pipe()
    lines = LineWriter(writer)
    # More than the pipe and the queue together hold: without the queue this would never return.
    sent = MAX_QUEUED_LINES + 2_000
    for _ in range(sent):
        lines.write(LINE)
    statistics = lines.statistics()
    assert statistics.dropped > 0
    assert len(lines._lines) <= MAX_QUEUED_LINES
    drained = threading.Thread(target=_drain, args=(reader,), name="reader", daemon=True)
    drained.start()
    lines.flush(60)
    statistics = lines.statistics()
    assert statistics.written + statistics.dropped == sent
    assert statistics.blocked_s == 0
    os.close(writer)
    drained.join()


def test_a_blocked_writer_is_seen_as_blocked() -> None:
    reader, writer = os.pipe()
    lines = LineWriter(writer)
    for _ in range(200):
        lines.write(LINE)
    while lines.statistics().blocked_s < 0.05:
        pass
    _drain_some(reader, 200 * len(LINE))
    lines.flush(60)
    assert lines.statistics().blocked_s == 0


def test_lines_are_written_again_when_the_reader_is_back() -> None:
    reader, writer = os.pipe()
    lines = LineWriter(writer)
    for number in range(500):
        lines.write(b"%999d\n" % number)
    read = _drain_some(reader, 500 * 1000)
    assert read.split(b"\n")[-2].strip() == b"499"


def test_a_stopped_journald_blocks_no_caller(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stopped:
        stopped.bind(str(tmp_path / "journal"))
        journal = Journal(str(tmp_path / "journal"))
        for _ in range(5_000):
            journal.write(b"MESSAGE=x\n")
        statistics = journal.statistics()
        assert statistics.written + statistics.dropped == 5_000
        assert statistics.dropped > 0
        assert statistics.blocked_s > 0
        journal.close()


def _drain(reader: int) -> None:
    while os.read(reader, 65_536):
        pass


def _drain_some(reader: int, wanted: int) -> bytes:
    read = b""
    while len(read) < wanted:
        read += os.read(reader, wanted - len(read))
    return read
