"""Finds the processes that hold the driver's files by reading /proc, without the probe.

It cannot distinguish open files of one device, nor show what a process does with them.

Guarantees:

1. What could not be read is not absent: ``Scan.unseen`` gives the reason, and names processes. A process that
   exited meanwhile is absent.
2. It opens nothing, and examines only files with a name of the driver's, and of those only data that the
   kernel has in memory: any user may give such a name to a file on a file system whose server never answers.
   A file that another machine serves is not examined.
3. The reads of a scan are bounded, and so is the share of each process, because users choose how many
   descriptors, threads and mounts a process has.
"""

import ctypes
import errno
import os
import platform
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, Literal, NamedTuple

from agent.model.rm import HeldFile
from agent.probe import syscalls
from agent.probe.kernel import INITIAL_PID_NAMESPACE, NVIDIA_MAJOR, Majors
from agent.probe.layout import merge_held

CONTROL_MINOR: Final = 255
MAX_SMALL_BYTES: Final = 65_536
"""Of a file of /proc that is small unless a user makes it large."""
MAX_LINE_BYTES: Final = 65_536
"""Of a line of mountinfo, which may hold two paths of 16 KiB each."""
MAX_NAMED: Final = 3
"""Processes that a reason names."""

_NAME: Final = re.compile(
    r"nvidia(?:ctl|-uvm|-uvm-tools|-modeset|-cap\d+|(?P<index>\d{1,3}))(?: \(deleted\))?"
)
_MINORS: Final = {"nvidiactl": CONTROL_MINOR, "nvidia-modeset": 254}
_UVM_MINORS: Final = {"nvidia-uvm": 0, "nvidia-uvm-tools": 1}
_REMOTE: Final = frozenset({b"nfs", b"nfs4", b"9p", b"cifs", b"smb3", b"afs", b"lustre", b"beegfs", b"gpfs"})
"""File systems that may call another machine when a descriptor is followed. Source: Linux fs/namei.c,
complete_walk (d_weak_revalidate), and their getattr."""
_KERNEL_THREAD: Final = 0x00200000
"""PF_KTHREAD in the flags of /proc/PID/stat. Source: linux/sched.h."""
_CAP_SYS_PTRACE: Final = 19
_SYS_KCMP: Final = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1)
_KCMP_FILES: Final = 2
_TABLES_COMPARED: Final = 4

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Bounds(NamedTuple):
    """What one scan reads at most; beyond that it is incomplete."""

    processes: int = 65_536
    descriptors: int = 262_144
    of_process: int = 65_536
    """Descriptors of one process."""
    threads: int = 65_536
    """Threads whose table of descriptors is compared with that of their process."""
    threads_each: int = 16_384
    mount_bytes: int = 32 << 20
    """Of all mountinfo files; a mount namespace may have 100,000 mounts."""
    mount_bytes_each: int = 4 << 20
    """Of one mount namespace."""


class Scan(NamedTuple):
    """The holders of each open file of the driver."""

    held: list[HeldFile]
    unseen: str
    """Why holders may be missing, as a sentence without its full stop; empty: none are."""
    source: Literal["kernel", "procfs"]


def scan(
    *,
    proc_root: str = "/proc",
    cgroup_root: str = "/sys/fs/cgroup",
    majors: Majors,
    filesystem: int = 0,
    bounds: Bounds | None = None,
) -> Scan:
    """Return the holders that /proc shows; takes 50 ms for ten thousand descriptors.

    ``filesystem`` is as in request.Doubles. A device that does not exist, as in a root of a test, is
    identified by its name.
    """
    scanner = _Scanner(proc_root, cgroup_root, majors, filesystem, bounds or Bounds())
    return Scan(merge_held(scanner.found()), scanner.unseen(), "procfs")


_Found = tuple[tuple[int, int, int, int, int], tuple[int, int]]
"""The input of merge_held: process, start, 0, device, cgroup; table of descriptors and number."""


class _Mounts(NamedTuple):
    """The mounts of a namespace."""

    remote: frozenset[bytes]
    """Those that another machine serves."""
    some: "array[int] | None"
    """Those that were read, where there are more; None: all were."""


class _Scanner:
    """One scan: the rest of its bounds, and what it could not read."""

    def __init__(
        self, proc_root: str, cgroup_root: str, majors: Majors, filesystem: int, bounds: Bounds
    ) -> None:
        self._proc: Final = proc_root
        self._cgroup_root: Final = cgroup_root
        self._majors: Final = majors
        self._filesystem: Final = filesystem
        self._bounds: Final = bounds
        self._descriptors = bounds.descriptors
        self._room = bounds.of_process
        self._threads = bounds.threads
        self._mount_bytes = bounds.mount_bytes
        self._mounts: dict[object, _Mounts | None] = {}
        """By namespace."""
        self._problem = ""
        """Why not even all processes could be listed."""
        self._unread: dict[int, str] = {}
        """Processes whose descriptors could not be read, and why."""
        self._cut: dict[int, None] = {}
        """Processes with more than is read of one."""
        self._unplaced: dict[int, None] = {}
        """Processes with a descriptor whose mount was not found within the bounds."""
        # kcmp(2) takes process ids as this process has them.
        self._is_own_proc: Final = _link(f"{proc_root}/self") == str(os.getpid())

    def found(self) -> Iterator[_Found]:
        """Yield every descriptor of the driver."""
        self._problem = _why_hidden(self._proc)
        try:
            with os.scandir(self._proc) as entries:
                names = [entry.name for entry in islice(entries, self._bounds.processes)]
                if next(entries, None) is not None:
                    self._problem = self._problem or "there are more processes than are read"
        except OSError as error:
            self._problem = f"{self._proc} could not be listed: {error.strerror}"
            return
        for pid in sorted(int(name) for name in names if name.isdigit()):
            yield from self._of_process(pid)
            if self._descriptors <= 0:
                break

    def _of_process(self, pid: int) -> Iterator[_Found]:
        folder = f"{self._proc}/{pid}"
        held: list[tuple[int, tuple[int, int]]] = []
        self._room = self._bounds.of_process
        try:
            for table, shown_by in self._tables(pid):
                held.extend(self._of_table(pid, table, shown_by))
        except OSError as error:
            # Some machines protect init even from root; it uses no GPU itself.
            is_init = pid == 1 and not self._problem
            if not is_init and not _has_no_files(folder):
                self._unread[pid] = error.strerror or str(error)
        start = _start_ticks(f"{folder}/stat") if held else None
        if start is None:
            if held and os.path.exists(folder):  # noqa: PTH110
                self._unread[pid] = "its start is unknown"
            return
        cgroup = _cgroup_id(f"{folder}/cgroup", self._cgroup_root)
        for device, descriptor in held:
            yield (pid, start, 0, device, cgroup), descriptor

    def _tables(self, pid: int) -> Iterator[tuple[int, str]]:
        """Yield each table of descriptors of a process and the folder that shows it.

        A thread may have one of its own, and threads continue after the exit of the first thread, whose table
        the process's own folder shows.
        """
        folder = f"{self._proc}/{pid}"
        yield 0, folder
        known = [pid]
        for thread in self._threads_of(pid):
            is_known = self._is_own_proc and any(_share_files(each, thread) for each in known)
            if is_known:
                continue
            if len(known) < _TABLES_COMPARED:
                known.append(thread)
            # Without kcmp(2) a number that several tables have counts once.
            yield (thread if self._is_own_proc else 0), f"{folder}/task/{thread}"

    def _threads_of(self, pid: int) -> Iterator[int]:
        """Yield the threads of a process but the first."""
        folder = f"{self._proc}/{pid}/task"
        room = min(self._threads, self._bounds.threads_each)
        with suppress(FileNotFoundError, ProcessLookupError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.isdigit() or int(entry.name) == pid:
                    continue
                if room <= 0:
                    self._cut[pid] = None
                    return
                room -= 1
                self._threads -= 1
                yield int(entry.name)

    def _of_table(self, pid: int, table: int, folder: str) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the device and the descriptor of each of the driver's in one table."""
        # Its process, or its thread, may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError), os.scandir(f"{folder}/fd") as entries:
            for entry in entries:
                if self._room <= 0 or self._descriptors <= 0:
                    self._cut[pid] = None
                    return
                self._room -= 1
                self._descriptors -= 1
                if entry.name.isdigit() and (device := self._device_of(pid, folder, entry.name)) is not None:
                    yield device, (table, int(entry.name))

    def _device_of(self, pid: int, folder: str, number: str) -> int | None:
        """Return the device that a descriptor is of; None: none of the driver's, or closed meanwhile."""
        link = f"{folder}/fd/{number}"
        try:
            target = os.readlink(link)  # noqa: PTH115
        except FileNotFoundError:
            return None
        name = target.rpartition("/")[2]
        if not name.startswith("nvidia") or _NAME.fullmatch(name) is None:
            return None
        is_remote = self._is_on_remote_mount(folder, number)
        if is_remote is None:
            self._unplaced[pid] = None
        return None if is_remote is not False else _device(link, name, self._majors, self._filesystem)

    # Mounts

    def _is_on_remote_mount(self, folder: str, number: str) -> bool | None:
        """Return whether another machine serves a descriptor's file; None: not found within the bounds.

        Source: proc_pid_fdinfo(5), proc_pid_mountinfo(5).
        """
        mount = _read(f"{folder}/fdinfo/{number}").partition(b"mnt_id:")[2].strip().partition(b"\n")[0]
        if not mount.isdigit():
            # Closed meanwhile, or a test's.
            return None if os.path.lexists(f"{folder}/fdinfo/{number}") else False
        try:
            namespace: object = os.stat(f"{folder}/ns/mnt").st_ino  # noqa: PTH116
        except OSError:
            namespace = folder
        if namespace not in self._mounts:
            self._mounts[namespace] = self._read_mounts(f"{folder}/mountinfo")
        mounts = self._mounts[namespace]
        if mounts is None or mount in mounts.remote:
            return None if mounts is None else True
        # One that is not there was unmounted, or came with a descriptor from another namespace.
        return False if mounts.some is None or int(mount) in mounts.some else None

    def _read_mounts(self, path: str) -> _Mounts | None:
        """Read a mountinfo line by line, as far as there is room; None where it cannot be read."""
        room = min(self._bounds.mount_bytes_each, self._mount_bytes)
        self._mount_bytes -= room
        remote, some = set[bytes](), array("I")
        is_begun = False
        try:
            with open(path, "rb") as file:  # noqa: PTH123
                while room > 0 and (line := file.readline(MAX_LINE_BYTES)):
                    room -= len(line)
                    is_rest, is_begun = is_begun, not line.endswith(b"\n")
                    number = line.partition(b" ")[0]
                    if is_rest or is_begun or not number.isdigit():
                        continue
                    some.append(int(number) & 0xFFFFFFFF)
                    if line.partition(b" - ")[2].partition(b" ")[0] in _REMOTE:
                        remote.add(number)
        except OSError as error:
            # EINVAL: the process has released its mounts and is about to exit.
            return _Mounts(frozenset(), None) if error.errno in {errno.ENOENT, errno.EINVAL} else None
        finally:
            self._mount_bytes += max(0, room)
        return _Mounts(frozenset(remote), some if room <= 0 else None)

    # What could not be read

    def unseen(self) -> str:
        """Return why holders may be missing; empty: none are."""
        reasons = [self._problem] if self._problem else []
        if self._unread:
            why = "CAP_SYS_PTRACE is missing" if _lacks_ptrace() else next(iter(self._unread.values()))
            reasons.append(f"the open files of {_named(self._unread)} could not be read: {why}")
        if self._cut:
            reasons.append(f"more descriptors or threads than are read: {_named(self._cut)}")
        if self._unplaced:
            reasons.append(f"more mounts than are read: {_named(self._unplaced)}")
        return "; ".join(reasons)


def _named(pids: dict[int, str] | dict[int, None]) -> str:
    names = ", ".join(str(pid) for pid in islice(pids, MAX_NAMED))
    more = f" and {len(pids) - MAX_NAMED} more" if len(pids) > MAX_NAMED else ""
    return f"{'process' if len(pids) == 1 else 'processes'} {names}{more}"


def _why_hidden(proc_root: str) -> str:
    """Return why /proc does not show every process of the machine; empty: it does, or it is a test's.

    kthreadd exists only in the machine's PID namespace, and no user can forge it.
    """
    if not _link(f"{proc_root}/self"):
        return ""
    fields = _read(f"{proc_root}/2/stat").rpartition(b")")[2].split()
    if len(fields) > 6 and fields[6].isdigit() and int(fields[6]) & _KERNEL_THREAD:
        return ""
    try:
        is_nested = os.stat("/proc/self/ns/pid").st_ino != INITIAL_PID_NAMESPACE  # noqa: PTH116
    except OSError:
        is_nested = False
    if is_nested:
        return "the agent is in a PID namespace of its own, which hides other processes (set hostPID: true)"
    return f"{proc_root} hides the processes of other users (hidepid, or another PID namespace)"


def _lacks_ptrace() -> bool:
    found = re.search(rb"^CapEff:\s*([0-9a-f]+)", _read("/proc/self/status"), re.MULTILINE)
    return found is not None and not int(found[1], 16) >> _CAP_SYS_PTRACE & 1


def _has_no_files(folder: str) -> bool:
    """Return whether a process with unreadable descriptors has none: a kernel thread, or one that exited."""
    fields = _read(f"{folder}/stat").rpartition(b")")[2].split()
    if len(fields) < 18:
        return not os.path.exists(folder)  # noqa: PTH110
    return bool(int(fields[6]) & _KERNEL_THREAD) or (fields[0] in {b"Z", b"X"} and fields[17] == b"1")


def _share_files(one: int, other: int) -> bool:
    """Return whether two threads have the same table of descriptors; False where that cannot be compared."""
    return bool(_libc.syscall(_SYS_KCMP, one, other, _KCMP_FILES, 0, 0) == 0)


def _device(link: str, name: str, majors: Majors, filesystem: int) -> int | None:
    try:
        numbers = syscalls.file_numbers(link)
    except FileNotFoundError:
        # Any user may give a file such a name, so the name only counts where the file does not exist.
        return _by_name(name.removesuffix(" (deleted)"), majors) if os.path.lexists(link) else None
    if numbers.device:
        major, minor = os.major(numbers.device), os.minor(numbers.device)
        return major << 20 | minor if major in _known(majors) else None
    return numbers.inode if filesystem and numbers.file_system == filesystem else None


def _known(majors: Majors) -> set[int]:
    return {majors.nvidia or NVIDIA_MAJOR, majors.uvm, majors.caps} - {0}


def _by_name(name: str, majors: Majors) -> int | None:
    nvidia = majors.nvidia or NVIDIA_MAJOR
    if name in _UVM_MINORS:
        return majors.uvm << 20 | _UVM_MINORS[name] if majors.uvm else None
    if name in _MINORS:
        return nvidia << 20 | _MINORS[name]
    index = name.removeprefix("nvidia")
    return nvidia << 20 | int(index) if index.isdigit() else None


def _start_ticks(path: str) -> int | None:
    """Return the start of a process; None: it has exited."""
    fields = _read(path).rpartition(b")")[2].split()
    # The 22nd of all, counted from the state.
    return int(fields[19]) if len(fields) > 19 else None


def _cgroup_id(path: str, cgroup_root: str) -> int:
    lines = _read(path).decode(errors="replace").splitlines()
    unified = next((line[3:] for line in lines if line.startswith("0::")), None)
    try:
        return Path(f"{cgroup_root}{unified}").stat().st_ino if unified else 0
    except OSError:
        return 0


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def _read(path: str) -> bytes:
    """Return the beginning of a file; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, MAX_SMALL_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
