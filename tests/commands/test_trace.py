"""``gpu-agent trace``: the lines of calls, and the errors where it cannot trace."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from agent import cli
from agent.commands import trace
from agent.commands.trace import Summary, json_of, line_of, span
from agent.probe.driver_calls import DriverCall

MOMENT = datetime(2026, 11, 30, 9, 14, 2, 345_678, tzinfo=UTC)
CALL = DriverCall(
    at_ns=1_000,
    thread=4711,
    device="nvidiactl",
    name="RM_ALLOC",
    about="FERMI_CONTEXT_SHARE_A",
    client=0xC1D00001,
    handle=0x5C000013,
    took_ns=35_000,
    result=0,
    status=0,
)
CARD_INFO = replace(CALL, name="CARD_INFO", about=None, client=None, handle=None, status=None)


def line(call: DriverCall) -> str:
    return line_of(call, MOMENT, pid=4711, now_ns=3_000_001_000)


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (CALL, "  35.0us  nvidiactl   RM_ALLOC FERMI_CONTEXT_SHARE_A c1d00001:5c000013"),
        (CARD_INFO, "  35.0us  nvidiactl   CARD_INFO"),
        (
            replace(CALL, status=0x23),
            "  35.0us  nvidiactl   RM_ALLOC FERMI_CONTEXT_SHARE_A c1d00001:5c000013 = INVALID_CLIENT",
        ),
        (replace(CARD_INFO, result=-22), "  35.0us  nvidiactl   CARD_INFO = EINVAL"),
        (replace(CARD_INFO, took_ns=None), "   3.00s  nvidiactl   CARD_INFO has not returned"),
        (replace(CARD_INFO, thread=4712), "  35.0us  nvidiactl   CARD_INFO [thread 4712]"),
    ],
)
def test_a_call_is_a_line(call: DriverCall, shown: str) -> None:
    assert line(call) == f"09:14:02.345{shown}"


def test_titles_stand_above_their_columns() -> None:
    shown = line(CALL)

    for title, text in (("TOOK", "35.0us"), ("DEVICE", "nvidiactl"), ("CALL", "RM_ALLOC")):
        at = trace.TITLES.index(title)
        assert text in shown[max(0, at - 2) : at + len(text) + 2]


def test_a_call_is_a_json_line() -> None:
    assert json.loads(json_of(replace(CALL, status=0x51), MOMENT, pid=4711)) == {
        "kind": "call",
        "time": "2026-11-30T09:14:02.345Z",
        "monotonic_ns": 1_000,
        "pid": 4711,
        "thread": 4711,
        "device": "nvidiactl",
        "call": "RM_ALLOC",
        "about": "FERMI_CONTEXT_SHARE_A",
        "client": "0xc1d00001",
        "handle": "0x5c000013",
        "took_ns": 35_000,
        "result": 0,
        "status": 0x51,
        "answer": "NO_MEMORY",
    }


def test_what_is_not_known_is_null() -> None:
    document = json.loads(json_of(replace(CARD_INFO, took_ns=None), MOMENT, pid=4711))

    assert document["kind"] == "waiting"
    unknown = ("about", "client", "handle", "took_ns", "result", "status", "answer")
    assert [document[name] for name in unknown] == [None] * len(unknown)


@pytest.mark.parametrize(
    ("duration_ns", "shown"),
    [
        (0, "0ns"),
        (999, "999ns"),
        (1_000, "1.00us"),
        (35_040, "35.0us"),
        (420_000, "420us"),
        (1_234_000, "1.23ms"),
        (3_000_000_000, "3.00s"),
        (3_600_000_000_000, "3600s"),
    ],
)
def test_spans_have_three_digits(duration_ns: int, shown: str) -> None:
    assert span(duration_ns) == shown


def test_the_summary_lists_the_largest_total_first() -> None:
    summary = Summary()
    for call in (CALL, replace(CALL, took_ns=5_000, status=0x51), replace(CARD_INFO, took_ns=90_000)):
        summary.add(call)

    assert summary.calls == 3
    assert summary.lines() == [
        "CALLS  FAILED  TOTAL   LONGEST  CALL",
        "1      0       90.0us  90.0us   CARD_INFO",
        "2      1       40.0us  35.0us   RM_ALLOC FERMI_CONTEXT_SHARE_A",
    ]
    assert summary.document()[1] == {
        "call": "RM_ALLOC FERMI_CONTEXT_SHARE_A",
        "calls": 2,
        "failed": 1,
        "total_ns": 40_000,
        "longest_ns": 35_000,
    }


def test_the_rows_of_a_summary_are_bounded_and_every_call_is_counted() -> None:
    summary = Summary()
    for number in range(trace.MAX_ROWS + 7):
        summary.add(replace(CALL, name="RM_CONTROL", about=f"{number:#010x}"))

    assert len(summary.rows) == trace.MAX_ROWS + 1
    assert summary.rows["RM_CONTROL"].calls == 7
    assert summary.calls == trace.MAX_ROWS + 7


def gone() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["abc"], 'PID must be a process id, and is "abc"'),
        (["0"], 'PID must be a process id, and is "0"'),
        (["-5"], 'PID must be a process id, and is "-5"'),
        ([], "The following arguments are required: PID"),
        (["1", "--seconds", "soon"], '--seconds must be a time, such as 10 or "2m", and is "soon"'),
        (["1", "--seconds", "0"], '--seconds must be a time, such as 10 or "2m", and is "0"'),
    ],
)
def test_an_invalid_argument_is_rejected(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_missing_process_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    pid = gone()

    assert cli.main(["trace", str(pid)]) == 1
    assert capsys.readouterr().err == (
        f"gpu-agent: No process {pid} runs here; gpu-agent contexts lists those that have the driver open\n"
    )
