"""Events as lines for people."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.cli import main

UUID = "GPU-00000000-0000-4000-8000-000000000003"


def line_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], *flags: str) -> str:
    event = {"number": 1, "time": "2026-01-02T03:04:05.000Z", "time_monotonic_ns": 1, "kind": "device"}
    log = tmp_path / "events.jsonl"
    log.write_text(json.dumps(event | {"message": "Happened", "warning": True, "fields": fields}) + "\n")
    assert main(["events", "--file", str(log), *flags]) == 0
    return capsys.readouterr().out.rstrip("\n")


def test_a_line_is_a_sentence_in_local_time_and_the_wide_one_has_all_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"gpu": 3, "pci": "0000:3b:00.0", "resource": "r", "detail": "a\x1b[2Jb\rc\x9b1m"}
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        line = line_of(tmp_path, capsys, fields)
        wide = line_of(tmp_path, capsys, fields, "-o", "wide")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert line == (
        "2026-01-01 22:04:05-0500 ! device       GPU 3 (0000:3b:00.0): Happened: a\\x1b[2Jb\\rc\\x9b1m"
    )
    assert wide == f"{line}  gpu=3 pci=0000:3b:00.0 resource=r detail=a\\x1b[2Jb\\rc\\x9b1m"


def test_lines_of_programs_have_no_terminal_control_sequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = "\x1b]0;x\x07\x9b31m\u202e"
    for form in ("json", "yaml"):
        text = line_of(tmp_path, capsys, {"detail": detail}, "-o", form)
        assert text.replace("\n", "").isprintable()
        assert yaml.safe_load(text)["events"][0]["fields"]["detail"] == detail


def test_a_file_without_any_event_is_no_event_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(os.urandom(4096) + b"\n{}\n")
    assert main(["events", "--file", str(path)]) == 2
    assert f"{path} holds no event, so it is no event log" in capsys.readouterr().err
    path.write_bytes(b"")
    assert main(["events", "--file", str(path)]) == 0


def test_a_missing_log_is_no_log_without_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--file", str(tmp_path / "none.jsonl")]) == 1
    assert f"There is no event log {tmp_path}/none.jsonl" in capsys.readouterr().err
