"""Where simulated processes are: cgroups as pods have them, and what the node's /proc and /sys show.

A process of a pod enters a cgroup as the kubelet and containerd make it, below a directory of this node's in
the machine's cgroup v2 hierarchy, so the kernel tells it by the cgroup's number. Where that hierarchy cannot
be written, plain directories stand in its place, and the kernel knows the process by its real cgroup.

Guarantees: in the node's /proc a process has what it has in the machine's, but the cgroup's path begins at
the node's directory; nothing is left behind by ``close``, and what a killed node left is removed by the next.

Sources: cgroups(7); kubernetes pkg/kubelet/cm/cgroup_manager_linux.go; containerd internal/cri/server.
"""

import contextlib
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_MOUNTS: Final = Path("/proc/self/mounts")
_SHOWN: Final = (
    *("cmdline", "comm", "environ", "exe", "fd", "fdinfo", "io", "limits", "maps", "ns", "root", "stat"),
    *("statm", "status", "task"),
)
"""Entries of /proc/PID that are those of the machine."""


class Place(NamedTuple):
    """A cgroup."""

    path: str
    """Below the node's own directory, as in /proc/PID/cgroup."""
    directory: Path | None
    """What the process enters; None where cgroups cannot be made."""


class ProcessPlaces:
    """The places of one node, whose /proc and /sys are doubles in a directory."""

    def __init__(self, node: Path) -> None:
        self._proc = node / "proc"
        shown = node / "sys" / "fs" / "cgroup"
        self._own = _own_directory(node)
        shown.parent.mkdir(parents=True, exist_ok=True)
        if self._own is None:
            shown.mkdir(exist_ok=True)
        else:
            shown.symlink_to(self._own)
        self._root = shown

    def of_host(self) -> Place:
        """Return the place of a process in no pod."""
        return self._place("/system.slice/simulated.service")

    def of_pod(self, uid: str, container: str) -> Place:
        """Return the place of a container of a pod."""
        pod = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        scope = f"cri-containerd-{container_id(uid, container)}.scope"
        return self._place(f"/kubepods.slice/kubepods-burstable.slice/{pod}/{scope}")

    def show(self, pid: int, place: Place) -> None:
        """Show a process in the node's /proc."""
        shown = self._proc / str(pid)
        # A number may be used again before its end was seen.
        self.hide(pid)
        shown.mkdir()
        for name in _SHOWN:
            (shown / name).symlink_to(f"/proc/{pid}/{name}")
        (shown / "cgroup").write_text(f"0::{place.path}\n", encoding="ascii")

    def hide(self, pid: int) -> None:
        """Take a process out of the node's /proc."""
        shutil.rmtree(self._proc / str(pid), ignore_errors=True)

    def close(self) -> None:
        """Remove the cgroups; one that still has a process stays."""
        if self._own is not None:
            _remove(self._own)

    def _place(self, path: str) -> Place:
        directory = self._root / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        return Place(path, None if self._own is None else directory)


def container_id(uid: str, container: str) -> str:
    """Return the id of a pod's container, which containerd would choose at random."""
    return hashlib.sha256(f"{uid}/{container}".encode()).hexdigest()


def _own_directory(node: Path) -> Path | None:
    """Return a new directory of cgroups for a node; None where there can be none."""
    name = f"gpu-agent-simulation-{zlib.crc32(os.fsencode(node)):08x}"
    for mount in _cgroup_mounts():
        own = mount / name
        _remove(own)
        with contextlib.suppress(OSError):
            own.mkdir(exist_ok=True)
            return own
    return None


def _cgroup_mounts() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8").splitlines():
            _, place, kind, *_ = line.split()
            if kind == "cgroup2":
                yield Path(place)


def _remove(directory: Path) -> None:
    """Remove a directory of cgroups from below; what is in use stays."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir():
                _remove(path)
        directory.rmdir()
