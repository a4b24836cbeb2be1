"""Finds who holds the driver's files by walking /proc/*/fd, without the probe.

It does not tell open files apart, nor what is done with them.
Invariants: nothing is opened, only files that look like the driver's are looked at, and of those what the
kernel knows already: anyone may name a file so on a file system that is served by a process of theirs, which
never answers. Where the kernel asks all the same, over the network, no file is looked at; a process that has
left its mounts behind cannot be told to have such files. Processes that end meanwhile are left out.
"""

import os
import re
from pathlib import Path
from typing import Final, Literal, NamedTuple

from agent.model.rm import HeldFile
from agent.probe import syscalls
from agent.probe.kernel import NVIDIA_MAJOR, Majors
from agent.probe.layout import merge_held

CONTROL_MINOR: Final = 255
MAX_DESCRIPTORS: Final = 262_144
"""Descriptors looked at; beyond, the answer is incomplete."""

_NAME: Final = re.compile(
    r"nvidia(?:ctl|-uvm|-uvm-tools|-modeset|-cap\d+|(?P<index>\d{1,3}))(?: \(deleted\))?"
)
_MINORS: Final = {"nvidiactl": CONTROL_MINOR, "nvidia-modeset": 254}
_UVM_MINORS: Final = {"nvidia-uvm": 0, "nvidia-uvm-tools": 1}
_ASKED: Final = frozenset({"nfs", "nfs4", "9p", "cifs", "smb3", "afs", "lustre", "beegfs", "gpfs"})
"""File systems of which another machine may be asked when a descriptor is followed. Source: Linux fs/namei.c,
complete_walk (d_weak_revalidate), and their getattr."""


class Scan(NamedTuple):
    """Who holds which open file of the driver."""

    held: list[HeldFile]
    complete: bool
    """False if there was more than is looked at."""
    source: Literal["kernel", "procfs"]


def scan(
    *,
    proc_root: str = "/proc",
    cgroup_root: str = "/sys/fs/cgroup",
    majors: Majors,
    filesystem: int = 0,
) -> Scan:
    """Return the holders that /proc shows; takes 50 ms for ten thousand descriptors.

    ``filesystem`` is as in request.Doubles. What is not there, as in a fake root, is told by name.
    """
    found: list[tuple[tuple[int, int, int, int, int], tuple[int, int]]] = []
    room = MAX_DESCRIPTORS
    for pid in _processes(proc_root):
        held, looked_at = _descriptors(f"{proc_root}/{pid}", majors, filesystem, room)
        room -= looked_at
        if held:
            start = _start_ticks(f"{proc_root}/{pid}/stat")
            cgroup = _cgroup_id(f"{proc_root}/{pid}/cgroup", cgroup_root)
            found += [((pid, start, 0, device, cgroup), (0, number)) for number, device in held]
        if room <= 0:
            break
    return Scan(merge_held(found), room > 0, "procfs")


def _processes(proc_root: str) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(proc_root) if name.isdigit())  # noqa: PTH208
    except OSError:
        return []


def _descriptors(
    process: str, majors: Majors, filesystem: int, room: int
) -> tuple[list[tuple[int, int]], int]:
    """Return number and device of a process's descriptors that are the driver's, and how many there are."""
    try:
        names = os.listdir(f"{process}/fd")[:room]  # noqa: PTH208
    except OSError:
        return [], 0
    held = []
    asked: set[bytes] | None = None
    for number in filter(str.isdigit, names):
        link = f"{process}/fd/{number}"
        name = _name(link)
        if name is None:
            continue
        if asked is None:
            asked = _asked_mounts(process)
        if asked and _mount_of(process, number) in asked:
            continue
        device = _device(link, name, majors, filesystem)
        if device is not None:
            held.append((int(number), device))
    return held, len(names)


def _name(link: str) -> str | None:
    """Return the name of a descriptor's file, if it is one of the driver's."""
    try:
        target = os.readlink(link)  # noqa: PTH115
    except OSError:
        return None
    if "nvidia" not in target:
        return None
    name = target.rpartition("/")[2]
    return name if _NAME.fullmatch(name) else None


def _asked_mounts(process: str) -> set[bytes]:
    """Return the numbers of a process's mounts whose files are not looked at.

    Source: proc_pid_mountinfo(5).
    """
    try:
        lines = Path(process, "mountinfo").read_bytes().splitlines()
    except OSError:
        return set()
    kinds = ((line.partition(b" ")[0], line.partition(b" - ")[2].partition(b" ")[0]) for line in lines)
    return {number for number, kind in kinds if kind.decode(errors="replace") in _ASKED}


def _mount_of(process: str, number: str) -> bytes:
    """Return the number of the mount that a descriptor's file was opened on; empty: not known."""
    try:
        about = Path(process, "fdinfo", number).read_bytes()
    except OSError:
        return b""
    return about.partition(b"mnt_id:")[2].strip().partition(b"\n")[0]


def _device(link: str, name: str, majors: Majors, filesystem: int) -> int | None:
    try:
        numbers = syscalls.file_numbers(link)
    except FileNotFoundError:
        # Anyone may give a file of their own such a name, so it only counts where there are no files.
        return _by_name(name.removesuffix(" (deleted)"), majors)
    except OSError:
        return None
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


def _start_ticks(path: str) -> int:
    try:
        fields = Path(path).read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19])  # the 22nd of all, counted from the state
    except (OSError, IndexError, ValueError):
        return 0


def _cgroup_id(path: str, cgroup_root: str) -> int:
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
        unified = next((line[3:] for line in lines if line.startswith("0::")), None)
        return Path(f"{cgroup_root}{unified}").stat().st_ino if unified else 0
    except OSError:
        return 0
