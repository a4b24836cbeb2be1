"""Events as lines for people."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.cli import main

UUID = "GPU-00000000-0000-4000-8000-000000000003"


def line_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], *flags: str) -> str:
    event = {"number": 1, "time": "2026-01-02T03:04:05.000Z", "time_monotonic_ns": 1, "kind": "device"}
    log = tmp_path / "events.jsonl"
    log.write_text(json.dumps(event | {"message": "Happened", "warning": True, "fields": fields}) + "\n")
    assert main(["events", "--file", str(log), *flags]) == 0
    return capsys.readouterr().out.rstrip("\n")


def test_what_says_most_comes_first_and_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {
        "resource": "nvidia.com/gpu",
        "gpu": 3,
        "uuid": UUID,
        "health": "unhealthy",
        "reason": "xid",
        "code": 79,
    }
    assert line_of(tmp_path, capsys, fields) == (
        "2026-01-02 03:04:05 ! device       Happened  "
        "gpu=3 health=unhealthy reason=xid code=79 resource=nvidia.com/gpu"
    )
    assert f"gpu=3 uuid={UUID} health" in line_of(tmp_path, capsys, fields, "-o", "wide")


def test_unhealthy_devices_are_told_by_their_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick = [{"id": f"{UUID}::{number}", "gpu": 3, "reason": "xid"} for number in range(2)]
    told = line_of(tmp_path, capsys, {"resource": "r", "capacity": 8, "allocatable": 6, "unhealthy": sick})
    assert told.endswith("allocatable=6 capacity=8 unhealthy=3 resource=r")
    told = line_of(tmp_path, capsys, {"resource": "r", "capacity": 8, "allocatable": 8, "unhealthy": []})
    assert told.endswith("unhealthy=none resource=r")


def test_a_log_that_is_not_there_is_no_log_without_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", "--file", str(tmp_path / "none.jsonl")]) == 1
    assert f"There is no event log {tmp_path}/none.jsonl" in capsys.readouterr().err
