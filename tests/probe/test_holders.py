"""Holders of open files: by the iterator in the kernel, and by /proc."""

import array
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.errors import SourceError
from agent.model.rm import HeldFile
from agent.probe import procfs, syscalls
from agent.probe.kernel import Majors
from agent.probe.probe import Probe
from agent.simulation.driver_double import fuse
from agent.simulation.driver_double.fuse import FuseFolder, Ioctl, IoctlAnswer
from tests.harness import ROOT
from tests.hidden_proc import DROP_ROOT, HIDDEN
from tests.probe.caller import Caller
from tests.probe.conftest import MISC_MAJOR

OPENED = "fd = os.open(sys.argv[1], os.O_RDWR)\n"
CONTROL, GPU_4, UVM, CAP = 195 << 20 | 255, 195 << 20 | 4, 509 << 20, 507 << 20 | 21


def held_by(probe: Probe, pid: int) -> list[HeldFile]:
    return of_process(probe.scan(), pid)


def of_process(scan: procfs.Scan, pid: int) -> list[HeldFile]:
    return [one for one in scan.held if one.tgid == pid]


def test_copies_of_a_descriptor_are_one_file(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "os.dup(fd)\nos.dup(fd)\nos.open(sys.argv[1], os.O_RDWR)\nwait()\n", gpu) as caller:
        assert sorted(one.fds for one in held_by(probe, caller.pid)) == [1, 3]


def test_a_child_that_inherits_holds_the_same_file(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
child = os.fork()
if child == 0:
    sys.stdin.readline()
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
"""
    )
    caller = Caller(code, gpu)
    assert caller.process.stdout is not None
    child = int(caller.process.stdout.readline())
    try:
        (parents,) = held_by(probe, caller.pid)
        (childs,) = held_by(probe, child)
        assert parents.file == childs.file
        assert parents.start_ticks <= childs.start_ticks
    finally:
        caller.end()


def test_a_file_received_by_message_is_held(probe: Probe, gpu: Path) -> None:
    ours, theirs = socket.socketpair()
    code = "s = __import__('socket').socket(fileno=int(sys.argv[1]))\nkept = s.recvmsg(1, 100)\nwait()\n"
    with theirs, ours:
        before = {one.file for one in held_by(probe, os.getpid())}
        descriptor = os.open(gpu, os.O_RDWR)
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
        (sent,) = [one for one in held_by(probe, os.getpid()) if one.file not in before]
        os.close(descriptor)
        with Caller(code, theirs.fileno(), keep=(theirs.fileno(),)) as caller:
            assert [one.file for one in held_by(probe, caller.pid)] == [sent.file]


def test_a_thread_with_a_table_of_its_own_holds_what_is_in_it(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
import threading
ready = threading.Event()
def hold():
    ctypes.CDLL(None).unshare(0x400)  # CLONE_FILES
    os.dup(fd)
    ready.set()
    threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
ready.wait()
wait()
os._exit(0)
"""
    )
    with Caller(code, gpu) as caller:
        (held,) = held_by(probe, caller.pid)
        (in_proc,) = of_process(procfs.scan(majors=Majors(nvidia=MISC_MAJOR)), caller.pid)
        assert (held.fds, in_proc.fds) == (3, 3)


def test_a_process_whose_first_thread_exited_still_holds_its_files(probe: Probe, gpu: Path) -> None:
    code = (
        OPENED
        + """
import threading, time
def last():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    wait()
    os._exit(0)
threading.Thread(target=last).start()
ctypes.CDLL(None).syscall(60, 0)  # exit, of this thread alone
"""
    )
    with Caller(code, gpu) as caller:
        (held,) = held_by(probe, caller.pid)
        scan = procfs.scan(majors=Majors(nvidia=MISC_MAJOR))
        assert [
            each._replace(file=held.file, cgroup_id=held.cgroup_id) for each in of_process(scan, caller.pid)
        ] == [held]
        assert scan.unseen == ""


def test_ten_thousand_descriptors_are_found(probe: Probe, gpu: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (11000, 11000))
kept = [os.open(sys.argv[1], os.O_RDWR) for _ in range(10007)]
wait()
"""
    with Caller(code, gpu) as caller:
        scan = probe.scan()

        assert sum(one.fds for one in scan.held if one.tgid == caller.pid) == 10_007
        assert scan.unseen == ""
        assert scan.source == "kernel"


def test_both_ways_agree_but_for_the_file(probe: Probe, gpu: Path) -> None:
    with Caller(OPENED + "os.dup(fd)\nwait()\n", gpu) as caller:
        (by_kernel,) = held_by(probe, caller.pid)
        scan = procfs.scan(majors=Majors(nvidia=MISC_MAJOR))

        assert [one for one in scan.held if one.tgid == caller.pid] == [
            by_kernel._replace(file=0, cgroup_id=_cgroup_of(caller.pid) or by_kernel.cgroup_id)
        ]
        assert scan.source == "procfs"


def _cgroup_of(pid: int) -> int:
    """Return the cgroup that /proc can show: 0 on a machine without cgroup v2 in the usual place."""
    return procfs._cgroup_id(f"/proc/{pid}/cgroup", "/sys/fs/cgroup")


# ---- /proc alone, of another machine ----

Add = Callable[..., None]


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """Add a process to a /proc."""

    def add_one(pid: int, targets: list[str], *, start: int = 4242, comm: str = "python") -> None:
        folder = tmp_path / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        for number, target in enumerate(targets):
            (folder / "fd" / str(number)).symlink_to(target)
        numbers = " ".join(str(n) for n in range(4, 22))
        (folder / "stat").write_text(f"{pid} ({comm}) S {numbers} {start} 0 0\n")
        (folder / "cgroup").write_text("0::/kubepods.slice/pod1\n")

    return add_one


def scan(tmp_path: Path, **options: object) -> procfs.Scan:
    return procfs.scan(
        proc_root=str(tmp_path / "proc"),
        cgroup_root=str(tmp_path / "cgroup"),
        majors=Majors(195, 509, 507),
        **options,  # type: ignore[arg-type]
    )


def test_a_holder_is_found_by_name_where_there_is_no_device(tmp_path: Path, add: Add) -> None:
    add(700, ["/dev/null", "/dev/nvidia0"])

    assert scan(tmp_path).held == [HeldFile(700, 4242, 0, 195 << 20, 1, 0)]


@pytest.mark.parametrize(
    ("target", "device"),
    [
        ("/dev/nvidiactl", CONTROL),
        ("/dev/nvidia4", GPU_4),
        ("/dev/nvidia-uvm", UVM),
        ("/dev/nvidia-uvm-tools", UVM | 1),
        ("/dev/nvidia4 (deleted)", GPU_4),
        ("/run/container/rootfs/dev/nvidia4", GPU_4),
        ("/dev/nvidia-modeset", 195 << 20 | 254),
    ],
)
def test_each_node_has_its_number(tmp_path: Path, add: Add, target: str, device: int) -> None:
    add(1, [target])

    assert [one.device for one in scan(tmp_path).held] == [device]


@pytest.mark.parametrize(
    "target",
    ["/dev/null", "socket:[77]", "/home/nvidia0/file", "/dev/nvidia", "/tmp/nvidia0.log", "/dev/nvidia4567"],
)
def test_other_files_do_not_count(tmp_path: Path, add: Add, target: str) -> None:
    add(1, [target])

    assert scan(tmp_path).held == []


def test_a_name_with_brackets_and_spaces_hides_no_start(tmp_path: Path, add: Add) -> None:
    add(1, ["/dev/nvidia0"], start=99, comm="a) S 1 2 (b")

    assert scan(tmp_path).held[0].start_ticks == 99


def test_the_cgroup_is_identified_by_its_inode(tmp_path: Path, add: Add) -> None:
    add(1, ["/dev/nvidia0"])
    folder = tmp_path / "cgroup/kubepods.slice/pod1"
    folder.mkdir(parents=True)

    assert scan(tmp_path).held[0].cgroup_id == folder.stat().st_ino


def test_several_descriptors_of_one_device_are_one_record(tmp_path: Path, add: Add) -> None:
    add(1, ["/dev/nvidia0", "/dev/nvidia0", "/dev/nvidiactl"])

    assert {(one.device, one.fds) for one in scan(tmp_path).held} == {(195 << 20, 2), (CONTROL, 1)}


def test_an_exited_process_holds_nothing(tmp_path: Path, add: Add) -> None:
    add(1, ["/dev/nvidia0"])
    (tmp_path / "proc/2").mkdir()
    (tmp_path / "proc/self").mkdir()

    assert [one.tgid for one in scan(tmp_path).held] == [1]


def test_a_missing_proc_is_reported(tmp_path: Path) -> None:
    assert scan(tmp_path) == ([], f"{tmp_path}/proc could not be listed: No such file or directory", "procfs")


@pytest.mark.parametrize(
    ("bounds", "read", "unseen"),
    [
        (procfs.Bounds(), 10, ""),
        (procfs.Bounds(descriptors=5), 5, "more descriptors or threads than are read: process 3"),
        (procfs.Bounds(of_process=3), 9, "more descriptors or threads than are read: process 4"),
        (procfs.Bounds(threads=0), 10, "more descriptors or threads than are read: process 1"),
        (procfs.Bounds(threads_each=0), 10, "more descriptors or threads than are read: process 1"),
        # A neighbour's mounts are found all the same.
        (procfs.Bounds(mount_bytes_each=300), 9, "more mounts than are read: process 2"),
        (procfs.Bounds(mount_bytes=300), 9, "more mounts than are read: process 2"),
    ],
)
def test_a_scan_reports_what_it_did_not_read(
    tmp_path: Path, add: Add, bounds: procfs.Bounds, read: int, unseen: str
) -> None:
    for pid in range(1, 5):
        add(pid, ["/dev/nvidia0", "/dev/nvidiactl"] + ["/dev/nvidia0"] * 2 * (pid == 4))
    (tmp_path / "proc/1/task/77").mkdir(parents=True)
    process = tmp_path / "proc/2"
    (process / "fdinfo").mkdir()
    (process / "fdinfo/0").write_text("pos:\t0\nmnt_id:\t312\n")
    line = "31 1 0:5 / /a/directory/of/its/own rw - tmpfs none rw\n"
    (process / "mountinfo").write_text(line * 10 + "312 31 0:6 / /dev rw - devtmpfs none rw\n")

    found = scan(tmp_path, bounds=bounds)

    assert (sum(one.fds for one in found.held), found.unseen) == (read, unseen)


def test_more_processes_than_the_bound_are_reported(tmp_path: Path, add: Add) -> None:
    for pid in range(1, 5):
        add(pid, ["/dev/nvidia0"])

    found = scan(tmp_path, bounds=procfs.Bounds(processes=3))

    assert (len(found.held), found.unseen) == (3, "there are more processes than are read")


IMPORTS = """
from agent.probe import procfs
from agent.probe.kernel import Majors
"""
SCAN = "print(procfs.scan(majors=Majors(nvidia=10)).unseen)\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("launcher", "code", "unseen"),
    [
        (
            ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"),
            IMPORTS + SCAN,
            "CAP_SYS_PTRACE is missing",
        ),
        (("unshare", "--pid", "--fork", "--mount-proc"), IMPORTS + SCAN, "(set hostPID: true)"),
        (
            HIDDEN,
            IMPORTS + DROP_ROOT + SCAN,
            "hides the processes of other users (hidepid, or another PID namespace)",
        ),
    ],
    ids=["no ptrace", "PID namespace", "hidepid"],
)
def test_processes_that_may_not_be_read_are_not_absent(
    gpu: Path, launcher: tuple[str, ...], code: str, unseen: str
) -> None:
    with Caller(OPENED + "wait()\n", gpu):
        command = [*launcher, sys.executable, "-c", code]
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip().endswith(unseen)


def test_a_plain_file_with_a_name_of_the_driver_s_is_none_of_its_devices(tmp_path: Path, add: Add) -> None:
    plain = tmp_path / "nvidia4"
    plain.touch()
    add(1, [str(plain), str(tmp_path / "proc")])

    assert scan(tmp_path).held == []


def test_a_double_on_a_file_system_of_its_own_is_identified_by_its_inode(tmp_path: Path, add: Add) -> None:
    double = tmp_path / "nvidia4"
    double.touch()
    add(1, [str(double)])

    (held,) = scan(tmp_path, filesystem=double.stat().st_dev).held

    assert held.device == double.stat().st_ino


# ---- a file system whose server does not answer ----

UNANSWERED_S = 10.0


class NoFiles:
    """Files that do nothing."""

    def opened(self, inode: int, thread: int) -> int:
        del thread
        return inode

    def ioctl(self, call: Ioctl) -> IoctlAnswer:
        del call
        return IoctlAnswer()

    def sought(self, file: int, thread: int) -> None:
        """Nothing is called."""

    def released(self, file: int) -> None:
        """Nothing is kept."""


@contextmanager
def answering(folder: FuseFolder) -> Iterator[None]:
    """Answer whatever is asked of a folder, and then nothing any more."""
    over, ended = os.pipe()

    def serve() -> None:
        while over not in select.select([folder.device, over], [], [])[0] and folder.serve():
            pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(ended, b".")
        thread.join()
        os.close(over)
        os.close(ended)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[FuseFolder]:
    """A folder with a file of a driver's name, of which the kernel has to ask anew each time."""
    monkeypatch.setattr(fuse, "_VALID_S", 0)
    try:
        made = FuseFolder({"nvidia4": GPU_4}, NoFiles())
    except SourceError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.mark.parametrize("is_double", [False, True])
def test_the_server_of_a_file_is_not_called_for_its_device(folder: FuseFolder, *, is_double: bool) -> None:
    with answering(folder):
        caller = Caller(OPENED + "wait()\n", folder.path("nvidia4"))
        caller.run()
    found: list[HeldFile] = []

    def examine() -> None:
        filesystem = folder.file_system if is_double else 0
        found.extend(procfs.scan(majors=Majors(195, 509, 507), filesystem=filesystem).held)

    examining = threading.Thread(target=examine, daemon=True)
    examining.start()
    examining.join(UNANSWERED_S)
    is_done = not examining.is_alive()
    # The examining thread is released before the result is checked.
    with answering(folder):
        caller.end()
        examining.join()

    assert is_done
    assert [one.device for one in found if one.tgid == caller.pid] == [GPU_4] * is_double


@pytest.mark.parametrize(("kind", "is_examined"), [("nfs4", False), ("devtmpfs", True), ("fuse.nfs", True)])
def test_files_that_another_machine_serves_are_not_examined(
    tmp_path: Path, add: Add, kind: str, *, is_examined: bool
) -> None:
    add(1, ["/dev/nvidia0", "/dev/nvidiactl"])
    process = tmp_path / "proc/1"
    (process / "mountinfo").write_text(
        f"31 1 0:5 / / rw - ext4 /dev/sda rw\n312 31 0:6 / /dev rw shared:7 - {kind} server:/ rw\n"
    )
    (process / "fdinfo").mkdir()
    (process / "fdinfo/0").write_text("pos:\t0\nflags:\t02\nmnt_id:\t312\nino:\t9\n")
    (process / "fdinfo/1").write_text("pos:\t0\nflags:\t02\nmnt_id:\t31\n")

    assert {one.device for one in scan(tmp_path).held} == {CONTROL, *[195 << 20] * is_examined}


@pytest.mark.parametrize("path", ["/dev/null", "/proc/self/exe", __file__, "/"])
def test_a_file_has_the_numbers_of_stat(path: str) -> None:
    status = os.stat(path)  # noqa: PTH116 - what it is compared with

    assert syscalls.file_numbers(path) == (status.st_ino, status.st_dev, status.st_rdev)
