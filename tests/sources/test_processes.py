"""Looking at processes, and hearing of their end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.model.usage import ProcessKey
from agent.sources.processes import look_at, open_pidfd

NOBODY = 4_194_303
"""A pid that no process has: the kernel hands out smaller ones."""


def show(proc: Path, key: ProcessKey) -> None:
    """Show a process in a /proc that is not this machine's."""
    directory = proc / str(key.pid)
    directory.mkdir(parents=True)
    numbers = " ".join("0" for _ in range(18))
    (directory / "stat").write_text(f"{key.pid} (train) S {numbers} {key.start_ticks} 0\n")


def test_the_end_of_a_process_can_be_heard_of() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        look = look_at(Path("/proc"), process.pid)
        assert look is not None
        descriptor = open_pidfd(Path("/proc"), look.key)
        assert descriptor is not None
        os.close(descriptor)
    assert open_pidfd(Path("/proc"), look.key) is None


def test_a_process_that_another_has_the_pid_of_has_ended() -> None:
    assert open_pidfd(Path("/proc"), ProcessKey(os.getpid(), 1)) is None


def test_a_process_of_a_proc_that_is_not_ours_has_not_ended_because_we_cannot_find_it(tmp_path: Path) -> None:
    key = ProcessKey(NOBODY, 77)
    show(tmp_path, key)

    with pytest.raises(ProcessLookupError):
        open_pidfd(tmp_path, key)


def test_a_process_that_is_nowhere_has_ended(tmp_path: Path) -> None:
    assert open_pidfd(tmp_path, ProcessKey(NOBODY, 77)) is None
