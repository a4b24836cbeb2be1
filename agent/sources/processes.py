"""Looks at processes in /proc: name, state, cgroup, and whether they are still the ones that were meant.

Invariants: everything here blocks for microseconds on a /proc that answers. A process that went meanwhile is
None. Nothing that a process says of itself is longer than its bound.
"""

import os
import re
import signal
from pathlib import Path
from typing import Final

from agent.core.pods import pod_of_cgroup
from agent.model.usage import ENDED, ProcessKey, ProcessLook

MAX_BYTES: Final = 4_096
"""Of one file of a process."""
MAX_COMM: Final = 64
"""Characters; the kernel keeps 15 of a program's name, more of a thread's of its own."""
MAX_THREADS: Final = 16
"""Looked at of a process whose first thread ended; of the others only those that live are there."""

_CONTROLLER: Final = re.compile(r"^(\d+):([^:]*):(.*)$", re.MULTILINE)
_PENDING: Final = re.compile(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", re.MULTILINE)
_KILL: Final = 1 << (signal.SIGKILL - 1)


def look_at(proc_root: Path, pid: int) -> ProcessLook | None:
    """Return what /proc says of a process now; None: there is none of this pid."""
    folder = proc_root / str(pid)
    name, fields = _stat(folder)
    if len(fields) < 20 or not fields[19].isdigit():
        return None
    state = fields[0][:1]
    if state in ENDED and fields[17] != "1":
        folder, state = _living_thread(folder) or (folder, state)
    cgroup = cgroup_of(_text(folder / "cgroup"))
    return ProcessLook(
        key=ProcessKey(pid, int(fields[19])),
        comm=printable(name),
        state=state,
        cgroup=cgroup,
        pod=pod_of_cgroup(cgroup),
        killed=any(int(mask, 16) & _KILL for mask in _PENDING.findall(_text(folder / "status"))),
    )


def _stat(folder: Path) -> tuple[str, list[str]]:
    """Return name and other fields; the name is in parentheses and may hold any of them itself."""
    name, _, rest = _text(folder / "stat").partition("(")[2].rpartition(")")
    return name, rest.split()


def _living_thread(process: Path) -> tuple[Path, str] | None:
    """Return a thread that lives, and its state: a process goes on when its first thread has ended."""
    try:
        names = os.listdir(process / "task")[:MAX_THREADS]  # noqa: PTH208
    except OSError:
        return None
    for name in names:
        _, fields = _stat(process / "task" / name)
        if fields and fields[0][:1] not in ENDED:
            return process / "task" / name, fields[0][:1]
    return None


def printable(name: str) -> str:
    """Return a process's name so that it can be shown: it may hold anything, control characters too."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:MAX_COMM])


def cgroup_of(text: str) -> str:
    """Return the path that says most: of cgroup v1, where each controller has one, a pod's if any is."""
    paths: list[str] = [path for _number, _controllers, path in _CONTROLLER.findall(text)]
    for path in paths:
        if pod_of_cgroup(path) is not None:
            return path
    return paths[-1] if paths else ""


def open_pidfd(proc_root: Path, key: ProcessKey) -> int | None:
    """Return a descriptor that turns readable when this very process has ended; None: it has.

    Raises OSError where the kernel gives none, also of a /proc of another PID namespace than ours.
    """
    try:
        descriptor = os.pidfd_open(key.pid)
    except ProcessLookupError:
        look = look_at(proc_root, key.pid)
        if look is not None and look.key == key:
            raise
        return None
    # Only now is it certain that the pid is not handed on between the look and the watch.
    look = look_at(proc_root, key.pid)
    if look is not None and look.key == key:
        return descriptor
    os.close(descriptor)
    return None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
