"""Reads processes in /proc: name, state, cgroup, and whether a pid is still the same process.

Invariants: everything here blocks for microseconds on a /proc that answers. A process that exited is GONE,
one that may not be read is UNREADABLE, whether it is alive or not. Every text that a process chooses for
itself is bounded.
"""

import errno
import os
import re
import signal
from enum import Enum, auto
from itertools import islice
from pathlib import Path
from typing import Final

from agent.core.usage.pods import MACHINE, Hierarchy, pod_of_cgroup, unit_of_cgroup
from agent.model.usage import ENDED, NoPod, PodOf, PodRef, ProcessKey, ProcessStatus

MAX_BYTES: Final = 65_536
"""Of one file of a process: a dozen cgroups of the longest path."""
MAX_COMM: Final = 64
"""Characters; the kernel keeps 15 of a program's name, more of a kernel thread's."""
MAX_THREADS: Final = 16
"""Threads read of a process whose first thread exited; /proc lists only living ones beside it."""

_CONTROLLER: Final = re.compile(r"^(\d+):([^:]*):(.*)$", re.MULTILINE)
_PENDING: Final = re.compile(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", re.MULTILINE)
_ROOTS_IDS: Final = re.compile(r"^Uid:(?:\s+0){4}$", re.MULTILINE)
_KILL: Final = 1 << (signal.SIGKILL - 1)
_KERNEL_THREAD: Final = 2
"""Pid of kthreadd, which stays in the mount namespace that the machine booted with."""
_CGROUP_NAMESPACE: Final = 0xEFFFFFFB
"""Inode of the machine's own cgroup namespace. Source: linux/nsfs.h, CGROUP_NS_INIT_INO."""


class NoReading(Enum):
    """Why there is no reading of a process."""

    GONE = auto()
    """There is no process of this pid."""
    UNREADABLE = auto()
    """Whether there is one, and its state, could not be read."""


def hierarchy(kubelet_root: str) -> Hierarchy:
    """Return where this process sees the kubelet's cgroups."""
    try:
        is_private = os.stat("/proc/self/ns/cgroup").st_ino != _CGROUP_NAMESPACE  # noqa: PTH116
    except OSError:
        is_private = False
    return Hierarchy(kubelet_root, is_private)


def read_process(proc_root: Path, pid: int, where: Hierarchy = MACHINE) -> ProcessStatus | NoReading:
    """Read a process from /proc."""
    folder = proc_root / str(pid)
    name, fields = _stat(folder)
    if len(fields) < 20 or not fields[19].isdigit():
        return _why_none(proc_root, pid)
    state = fields[0][:1]
    if state in ENDED and fields[17] != "1":
        folder, state = _living_thread(folder) or (folder, state)
    cgroup, pod = pod_of_cgroups(_text(folder / "cgroup"), where)
    status = _text(folder / "status")
    return ProcessStatus(
        key=ProcessKey(pid, int(fields[19])),
        comm=printable(name),
        state=state,
        cgroup=cgroup,
        pod=pod,
        killed=any(int(mask, 16) & _KILL for mask in _PENDING.findall(status)),
        started_as=_started_as(proc_root, folder, cgroup, pod, status),
    )


def _why_none(proc_root: Path, pid: int) -> NoReading:
    """Return whether a process that /proc does not show has exited, or is hidden."""
    if _link(proc_root / "self") != str(os.getpid()):
        # A /proc of another machine, whose processes cannot be signalled.
        return NoReading.GONE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return NoReading.GONE
    except PermissionError:
        pass
    # It may also have started this very moment.
    return NoReading.GONE if _stat(proc_root / str(pid))[1] else NoReading.UNREADABLE


def _started_as(
    proc_root: Path, folder: Path, cgroup: str, pod: PodOf, status: str
) -> tuple[str, ...] | None:
    """Return the unit and executable of a process outside of pods; None: could not be read."""
    if pod is not NoPod.HOST:
        return () if isinstance(pod, PodRef) else None
    unit = unit_of_cgroup(cgroup)
    names = (unit,) if unit else ()
    if not _ROOTS_IDS.search(status):
        return names
    try:
        if os.readlink(folder / "ns/mnt") != os.readlink(proc_root / f"{_KERNEL_THREAD}/ns/mnt"):  # noqa: PTH115
            # The path of its executable is not a path of the host there.
            return names
        executable = os.readlink(folder / "exe")  # noqa: PTH115
    except (FileNotFoundError, ProcessLookupError):
        return names
    except OSError:
        return names or None
    return (*names, executable.removesuffix(" (deleted)").rpartition("/")[2])


def _stat(folder: Path) -> tuple[str, list[str]]:
    """Return name and other fields; the name stands in parentheses and may contain some itself."""
    name, _, rest = _text(folder / "stat").partition("(")[2].rpartition(")")
    return name, rest.split()


def _living_thread(process: Path) -> tuple[Path, str] | None:
    """Return a living thread and its state: a process continues after the exit of its first thread."""
    try:
        with os.scandir(process / "task") as entries:
            names = [entry.name for entry in islice(entries, MAX_THREADS)]
    except OSError:
        return None
    for name in names:
        _, fields = _stat(process / "task" / name)
        if fields and fields[0][:1] not in ENDED:
            return process / "task" / name, fields[0][:1]
    return None


def printable(name: str) -> str:
    """Return a process's name without control characters, which it may contain."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:MAX_COMM])


def pod_of_cgroups(text: str, where: Hierarchy) -> tuple[str, PodOf]:
    """Return the most specific path, and the pod: of cgroup v1, with one path for each controller, any pod's.

    Where one path is unknown, or there are more than are read, the pod is unknown.
    """
    found: list[tuple[str, PodOf]] = []
    for _number, _controllers, path in _CONTROLLER.findall(text):
        found.append((path, pod_of_cgroup(path, where)))
        if isinstance(found[-1][1], PodRef):
            return found[-1]
    path, pod = next(
        (each for each in found if each[1] is NoPod.UNKNOWN), found[-1] if found else ("", NoPod.UNKNOWN)
    )
    return path, NoPod.UNKNOWN if len(text) >= MAX_BYTES else pod


def open_pidfd(proc_root: Path, key: ProcessKey) -> int | None:
    """Return a descriptor that becomes readable when this very process exits; None: it has exited.

    Raises OSError where the kernel opens none, also for a /proc of another PID namespace than the agent's.
    """
    try:
        descriptor = os.pidfd_open(key.pid)
    except ProcessLookupError:
        if _is_there(proc_root, key):
            raise
        return None
    # Only now is it certain that the pid was not reused between the reading and the watch.
    is_there = False
    try:
        is_there = _is_there(proc_root, key)
    finally:
        if not is_there:
            os.close(descriptor)
    return descriptor if is_there else None


def _is_there(proc_root: Path, key: ProcessKey) -> bool:
    """Return whether a pid is still that process's; raises PermissionError where that cannot be read."""
    reading = read_process(proc_root, key.pid)
    if reading is NoReading.UNREADABLE:
        raise PermissionError(errno.EACCES, f"Process {key.pid} may not be read")
    return isinstance(reading, ProcessStatus) and reading.key == key


def _link(path: Path) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
