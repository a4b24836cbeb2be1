"""Fault 13: a crash at every step of writing the state file, bit flips and truncation.

Right: an old or the new state, never a mix; what is damaged is ignored with one error.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.files import write
from agent.model.snapshot import Durable
from agent.sinks import statefile, statefile_format
from tests.sinks.stored_states import BOOT, SICK, U1, gpu

OLD = Durable(gpus=(gpu(U1),))
STEPS = ("open", "write", "fsync", "close")


class CrashError(Exception):
    """Stands for the end of the process: nothing after it is done."""


class CrashingSystem:
    """The system calls of a write, of which the n-th does not happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int, error: Exception) -> None:
        self._left = at
        self._error = error
        for name in STEPS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))
        monkeypatch.setattr(Path, "replace", self._wrap(Path.replace))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self._left == 0:
                raise self._error
            self._left -= 1
            return call(*arguments, **named)

        return wrapped


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "state.json")
    write(path, statefile_format.encoded(OLD, boot_id=BOOT))
    return path


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize("error", [CrashError(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_crash_at_any_step_leaves_the_old_or_the_new_state(
    path: str, step: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = statefile_format.encoded(SICK, boot_id=BOOT)
    with monkeypatch.context() as patched:
        CrashingSystem(patched, at=step, error=error)
        try:
            write(path, raw)
        except (CrashError, OSError):
            expected: tuple[Durable, ...] = (OLD, SICK)
        else:
            expected = (SICK,)
    assert statefile.load(path, boot_id=BOOT) in expected


def test_a_torn_write_leaves_the_old_state(path: str) -> None:
    Path(f"{path}.new").write_bytes(statefile_format.encoded(SICK, boot_id=BOOT)[:100])
    assert statefile.load(path, boot_id=BOOT) == OLD
    write(path, statefile_format.encoded(SICK, boot_id=BOOT))
    assert statefile.load(path, boot_id=BOOT) == SICK


def test_no_truncation_is_taken_for_a_state(path: str) -> None:
    raw = statefile_format.encoded(SICK, boot_id=BOOT)
    for length in range(0, len(raw) - 1, 7):
        Path(path).write_bytes(raw[:length])
        assert statefile.load(path, boot_id=BOOT) is None


def test_no_flipped_bit_is_taken_for_another_state(path: str) -> None:
    state = replace(SICK, gpus=SICK.gpus[:1], xids=())
    raw = statefile_format.encoded(state, boot_id=BOOT)
    for position in range(0, len(raw) * 8, 13):
        flipped = bytearray(raw)
        flipped[position // 8] ^= 1 << (position % 8)
        Path(path).write_bytes(flipped)
        assert statefile.load(path, boot_id=BOOT) in (None, state)
