"""Reading processes from /proc, whatever their names."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.core.usage.pods import Hierarchy
from agent.model.usage import NoPod, PodRef, PodUid, ProcessKey, ProcessStatus
from agent.sources import processes
from agent.sources.processes import (
    MAX_BYTES,
    MAX_COMM,
    NoReading,
    open_pidfd,
    pod_of_cgroups,
    printable,
    read_process,
)
from tests.harness import ROOT
from tests.hidden_proc import DROP_ROOT, HIDDEN

UID = "6a1b0a34-0b6c-4d6f-8f5e-0123456789ab"
CONTAINER = "c0ffee" + "0" * 58
POD_V2 = (
    f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/"
    f"cri-containerd-{CONTAINER}.scope"
)
POD_V1 = f"/kubepods/besteffort/pod{UID}/{CONTAINER}"
KILLED = "Name:\tx\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n"

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a process into a /proc."""

    def write_one(
        pid: int = 4711,
        *,
        comm: str | bytes = "python",
        state: str = "S",
        start: int = 4242,
        cgroup: str = "0::/user.slice\n",
        status: str = "ShdPnd:\t0000000000000000\n",
    ) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir(exist_ok=True)
        name = comm if isinstance(comm, bytes) else comm.encode()
        numbers = " ".join(str(number) for number in range(4, 22))
        (folder / "stat").write_bytes(
            b"%d (%s) %s %s %d 0 0\n" % (pid, name, state.encode(), numbers.encode(), start)
        )
        (folder / "cgroup").write_text(cgroup)
        (folder / "status").write_text(status)

    return write_one


def test_a_process_is_named_by_its_pid_and_start(tmp_path: Path, write: Write) -> None:
    write(start=99)

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert reading.key == ProcessKey(4711, 99)
    assert (reading.comm, reading.state, reading.cgroup, reading.pod, reading.killed) == (
        "python",
        "S",
        "/user.slice",
        NoPod.HOST,
        False,
    )


@pytest.mark.parametrize(
    ("comm", "shown"),
    [
        ("a) S 1 2 (b", "a) S 1 2 (b"),
        ("(sd-pam)", "(sd-pam)"),
        (") R 1 1 1", ") R 1 1 1"),
        ("two\nlines", "two?lines"),
        ("\x1b[2J\x07", "?[2J?"),
        (b"\xff\xfepython", "��python"),
        ("", ""),
        ("данные", "данные"),
        ("a\u202eb", "a?b"),
    ],
)
def test_a_name_may_hold_anything(tmp_path: Path, write: Write, comm: str | bytes, shown: str) -> None:
    write(comm=comm, start=7)

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert (reading.comm, reading.key.start_ticks, reading.state) == (shown, 7, "S")


def test_a_name_is_bounded() -> None:
    assert len(printable("x" * 1000)) == MAX_COMM


@pytest.mark.parametrize("state", ["R", "S", "D", "Z", "X", "T", "t", "I"])
def test_the_state_is_one_letter(tmp_path: Path, write: Write, state: str) -> None:
    write(state=state)

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert reading.state == state


@pytest.mark.parametrize(
    ("text", "path", "owner"),
    [
        (f"0::{POD_V2}\n", POD_V2, "pod"),
        (f"12:devices:{POD_V1}\n1:name=systemd:/\n", POD_V1, "pod"),
        (f"1:name=systemd:{POD_V1}\n0::/\n", POD_V1, "pod"),
        ("2:cpu:/a\n1:name=systemd:/b\n0::/c\n", "/c", "host"),
        ("1:name=systemd:/../..\n0::/\n", "/../..", "unknown"),
        ("0::/with:a:colon\n", "/with:a:colon", "host"),
        ("", "", "unknown"),
    ],
)
def test_of_several_cgroups_that_of_the_pod_is_returned(text: str, path: str, owner: str) -> None:
    found, pod = pod_of_cgroups(text, Hierarchy())
    assert (found, ProcessStatus(ProcessKey(1, 1), "", "S", found, pod).owner) == (path, owner)


@pytest.mark.parametrize("cgroup", [f"0::{POD_V2}\n", f"5:pids:{POD_V1}\n0::/\n"])
def test_the_pod_of_a_process_is_read(tmp_path: Path, write: Write, cgroup: str) -> None:
    write(cgroup=cgroup)

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert isinstance(reading.pod, PodRef)
    assert (reading.pod.uid, reading.pod.container_id) == (PodUid(UID), CONTAINER)


@pytest.mark.parametrize(
    ("status", "killed"),
    [
        (KILLED, True),
        ("SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n", True),
        ("SigPnd:\t0000000000004000\nShdPnd:\t0000000000004000\n", False),
        ("Name:\tShdPnd: 100\n", False),
        ("", False),
    ],
)
def test_a_pending_kill_is_read(tmp_path: Path, write: Write, status: str, killed: bool) -> None:
    write(state="D", status=status)

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert reading.killed is killed


def test_a_process_that_is_gone_is_none(tmp_path: Path) -> None:
    assert read_process(tmp_path, 4711) is NoReading.GONE


@pytest.mark.parametrize("stat", ["", "4711 (python", "4711 (python) S 1 2 3", "4711 (p) S " + "x " * 30])
def test_a_file_that_makes_no_sense_is_no_process(tmp_path: Path, write: Write, stat: str) -> None:
    write()
    (tmp_path / "4711/stat").write_text(stat)

    assert read_process(tmp_path, 4711) is NoReading.GONE


def test_a_process_without_the_other_files_is_still_one(tmp_path: Path, write: Write) -> None:
    write()
    (tmp_path / "4711/cgroup").unlink()
    (tmp_path / "4711/status").unlink()

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert (reading.cgroup, reading.pod, reading.killed) == ("", NoPod.UNKNOWN, False)


def test_what_is_read_of_a_process_is_bounded(tmp_path: Path, write: Write) -> None:
    write(cgroup="1:a:/x\n" * MAX_BYTES + f"0::{POD_V2}\n")

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert (reading.cgroup, reading.pod) == ("/x", NoPod.UNKNOWN)


ROOT_ALL, ROOT_SETUID = "Uid:\t0\t0\t0\t0\n", "Uid:\t1000\t0\t0\t0\n"
OTHER_ALL = "Uid:\t988\t988\t988\t988\n"
SERVICE = "/system.slice/nvidia-persistenced.service"
LOGIN = "/user.slice/user-0.slice/session-1.scope"


@pytest.mark.parametrize(
    ("cgroup", "status", "mounts", "started_as"),
    [
        (SERVICE, OTHER_ALL, "mnt:[2]", ("nvidia-persistenced",)),
        (f"{SERVICE}/below", ROOT_ALL, "mnt:[2]", ("nvidia-persistenced",)),
        (LOGIN, ROOT_ALL, "mnt:[1]", ("nv-hostengine",)),
        (LOGIN, ROOT_ALL, "mnt:[2]", ()),
        (LOGIN, ROOT_SETUID, "mnt:[1]", ()),
        (
            f"/user.slice/user-1000.slice/user@1000.service{SERVICE}",
            "Uid:\t1000\t1000\t1000\t1000\n",
            "mnt:[1]",
            (),
        ),
        (POD_V2, ROOT_ALL, "mnt:[1]", ()),
        ("/../..", ROOT_ALL, "mnt:[1]", None),
        (f"/../../..{SERVICE}", OTHER_ALL, "mnt:[2]", ("nvidia-persistenced",)),
    ],
)
def test_what_root_started_a_process_as_is_no_name_of_its_own(
    tmp_path: Path, write: Write, cgroup: str, status: str, mounts: str, started_as: tuple[str, ...] | None
) -> None:
    write(comm="dcgm-exporter", cgroup=f"0::{cgroup}\n", status=status)
    for pid, namespace in (("2", "mnt:[1]"), ("4711", mounts)):
        (tmp_path / pid / "ns").mkdir(parents=True)
        (tmp_path / pid / "ns/mnt").symlink_to(namespace)
    (tmp_path / "4711/exe").symlink_to("/usr/bin/nv-hostengine (deleted)")

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert reading.started_as == started_as


IMPORTS = """
from pathlib import Path
from agent.sources.processes import read_process
"""
READ_TWO = """
gone = os.fork()
if not gone:
    os._exit(0)
os.waitpid(gone, 0)
print(read_process(Path("/proc"), os.getppid()).name, read_process(Path("/proc"), gone).name)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_that_is_hidden_is_not_gone() -> None:
    found = subprocess.run(
        [*HIDDEN, sys.executable, "-c", IMPORTS + DROP_ROOT + READ_TWO],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert found.stdout.split() == ["UNREADABLE", "GONE"]


def test_this_process_is_read_as_the_kernel_has_it() -> None:
    reading = read_process(Path("/proc"), os.getpid())

    assert isinstance(reading, ProcessStatus)
    assert reading.comm == printable(Path("/proc/self/comm").read_text().removesuffix("\n"))
    assert reading.state in "RS"


LEFT_TO_A_THREAD = """
import ctypes, threading, time, os
def other():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    print(flush=True)
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=other).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def test_a_process_whose_first_thread_exited_is_alive() -> None:
    with subprocess.Popen(
        [sys.executable, "-ISc", LEFT_TO_A_THREAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()

        reading = read_process(Path("/proc"), process.pid)

        assert isinstance(reading, ProcessStatus)
        assert reading.state in "SR"


def test_a_process_with_only_a_killed_thread_left_has_that_threads_state(
    tmp_path: Path, write: Write
) -> None:
    write(state="Z")
    threads = tmp_path / "4711/task"
    threads.mkdir()
    for number, state in ((4711, "Z"), (4712, "D")):
        folder = threads / str(number)
        folder.mkdir()
        (folder / "stat").write_text(f"{number} (x) {state} 1 2")
        (folder / "status").write_text(KILLED)
        (folder / "cgroup").write_text(f"0::{POD_V2}\n")

    reading = read_process(tmp_path, 4711)

    assert isinstance(reading, ProcessStatus)
    assert (reading.state, reading.killed, reading.cgroup) == ("D", True, POD_V2)


# ---- pidfds ----


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-ISc", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def key_of(pid: int) -> ProcessKey:
    reading = read_process(Path("/proc"), pid)
    assert isinstance(reading, ProcessStatus)
    return reading.key


def test_the_very_process_is_watched(child: subprocess.Popen[bytes]) -> None:
    descriptor = open_pidfd(Path("/proc"), key_of(child.pid))

    assert descriptor is not None
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    assert os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT) is not None
    os.close(descriptor)


def test_a_pid_that_another_process_has_by_now_is_not_watched(child: subprocess.Popen[bytes]) -> None:
    before = descriptors()
    earlier = ProcessKey(child.pid, key_of(child.pid).start_ticks - 1)

    assert open_pidfd(Path("/proc"), earlier) is None
    assert descriptors() == before


def test_a_process_that_went_is_not_watched(child: subprocess.Popen[bytes]) -> None:
    key = key_of(child.pid)
    child.kill()
    child.communicate()

    assert open_pidfd(Path("/proc"), key) is None


def test_a_process_that_exits_between_the_two_readings_is_not_watched(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(child.pid)

    def exit_first(proc_root: Path, pid: int) -> None:
        child.kill()
        child.communicate()
        assert read_process(proc_root, pid) is NoReading.GONE

    monkeypatch.setattr(processes, "read_process", exit_first)

    assert open_pidfd(Path("/proc"), key) is None


def test_a_thread_is_no_process() -> None:
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    assert thread.native_id is not None
    # Linux 6.9 returns another error.
    with pytest.raises(OSError, match=r"Invalid argument|No such file"):
        open_pidfd(Path("/proc"), ProcessKey(thread.native_id, 1))
    go.set()
    thread.join()
