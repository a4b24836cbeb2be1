"""Device doubles whose calls never return, as a driver that hangs in the kernel."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.errors import SourceError
from agent.simulation.driver_double.fuse import MAX_HELD, _Request
from agent.simulation.hanging_nodes import HangingNodes

PATIENCE_S = 60.0
NAMES = ("nvidiactl", "nvidia0")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[HangingNodes]:
    try:
        made = HangingNodes(NAMES)
    except SourceError as error:
        pytest.skip(str(error))
    with made:
        for name in NAMES:
            (tmp_path / name).touch()
            made.replace(tmp_path / name)
        yield made


def reader(path: Path) -> "subprocess.Popen[bytes]":
    """A process that reads a file and ends."""
    return subprocess.Popen([sys.executable, "-c", f"open({str(path)!r}, 'rb').read(1)"])


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_the_files_can_be_used_while_they_do_not_hang(nodes: HangingNodes, tmp_path: Path) -> None:
    for name in NAMES:
        descriptor = os.open(tmp_path / name, os.O_RDWR)
        assert os.pread(descriptor, 1, 0) == b""
        os.close(descriptor)
    assert not (tmp_path / "nvidia0").with_name("nvidia1").exists()


def test_nothing_is_mounted_in_any_directory(nodes: HangingNodes) -> None:
    assert "gpu-agent-nodes" not in Path("/proc/self/mounts").read_text(encoding="utf-8")


def test_a_read_is_held_until_the_file_is_released(nodes: HangingNodes, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "nvidia0", os.O_RDWR)
    nodes.hang("nvidia0")
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(os.pread(descriptor, 1, 0)))
    thread.start()
    assert nodes.wait_held(1, PATIENCE_S)
    assert (answers, (tmp_path / "nvidia0").stat().st_size) == ([], 0)
    nodes.release("nvidia0")
    thread.join(PATIENCE_S)
    assert answers == [b""]
    os.close(descriptor)


def test_the_other_files_answer_while_one_hangs(nodes: HangingNodes, tmp_path: Path) -> None:
    nodes.hang("nvidia0")
    descriptor = os.open(tmp_path / "nvidiactl", os.O_RDWR)
    assert os.pread(descriptor, 1, 0) == b""
    os.close(descriptor)


def test_a_caller_that_is_killed_stays_in_the_kernel_until_the_end(
    nodes: HangingNodes, tmp_path: Path
) -> None:
    nodes.hang("nvidia0")
    process = reader(tmp_path / "nvidia0")
    assert nodes.wait_held(1, PATIENCE_S)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert state_of(process.pid) == "D"
    nodes.release("nvidia0")
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_the_end_of_the_file_system_lets_everybody_go(tmp_path: Path) -> None:
    try:
        nodes = HangingNodes(NAMES)
    except SourceError as error:
        pytest.skip(str(error))
    (tmp_path / "nvidia0").touch()
    nodes.replace(tmp_path / "nvidia0")
    nodes.hang("nvidia0")
    process = reader(tmp_path / "nvidia0")
    assert nodes.wait_held(1, PATIENCE_S)
    nodes.close()
    assert process.wait(PATIENCE_S) == 1


def test_a_machine_without_the_device_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.simulation.driver_double.fuse.FUSE_DEVICE", "/nonexistent/fuse")
    with pytest.raises(SourceError, match="Could not open /nonexistent/fuse: No such file"):
        HangingNodes(NAMES)


def test_calls_that_wait_are_bounded(nodes: HangingNodes) -> None:
    nodes.hang("nvidia0")
    folder = nodes._folder
    request = _Request(1, 14, 3, 1, b"")
    for _ in range(MAX_HELD):
        assert folder._holds(request)
    assert folder.held == MAX_HELD
    # One more is answered, as if its file did not hang.
    assert not folder._holds(request)
