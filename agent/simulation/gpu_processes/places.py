"""Where simulated processes are: in cgroups as the kubelet and containerd make them.

They lie below a directory of this node's in the machine's own hierarchy, so the kernel identifies a process
by the cgroup's number, and /proc by its path, as on a node where pods run.

Guarantees: nothing is left behind by ``close``; what a killed process left is removed by the next one.

Sources: cgroups(7); kubernetes pkg/kubelet/cm/cgroup_manager_linux.go; containerd internal/cri/server.
"""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.simulation.directory import CGROUP_NAME

_MOUNTS: Final = Path("/proc/self/mounts")
_CONTROLLERS_OF_V1: Final = frozenset({"pids", "name=systemd"})
"""Those in which a new cgroup needs no settings before a process may enter it."""
_HELD: Final = "held-by-"
"""How the cgroup begins that has the id of a node's process, for others to know whether it lives."""
EMPTY_WITHIN_S: Final = 2.0
_POLL_S: Final = 0.01


class ProcessPlaces:
    """The cgroups of one node, made when the first is asked for."""

    def __init__(self, cgroup_root: str) -> None:
        """``cgroup_root`` is where the simulated kubelet has its cgroups in the hierarchy."""
        self._root = cgroup_root
        self._own: Path | None = None

    def of_pod(self, uid: str, container: str) -> Path | None:
        """Return the cgroup of a container of a pod; None where none can be made."""
        self._own = self._own or _own_directory(self._root)
        if self._own is None:
            return None
        directory = self._own / "kubepods" / "burstable" / f"pod{uid}" / container_id(uid, container)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    async def close(self) -> None:
        """Remove the cgroups; one that still has a process after a while stays."""
        until_ns = time.monotonic_ns() + int(EMPTY_WITHIN_S * 1e9)
        # The kernel releases processes and of cgroups below a moment after they are gone.
        while self._own is not None and not _remove(self._own) and time.monotonic_ns() < until_ns:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


def container_id(uid: str, container: str) -> str:
    """Return the id of a pod's container, which containerd would choose at random."""
    return hashlib.sha256(f"{uid}/{container}".encode()).hexdigest()


def _own_directory(cgroup_root: str) -> Path | None:
    """Return a new directory of cgroups; None where there can be none."""
    for _, mount in sorted(_hierarchies()):
        _remove_stale(Path(mount))
        own = Path(mount, cgroup_root.removeprefix("/"))
        with contextlib.suppress(OSError):
            own.mkdir(exist_ok=True)
            (own / f"{_HELD}{os.getpid()}").mkdir(exist_ok=True)
            return own
    return None


def _remove_stale(mount: Path) -> None:
    """Remove what processes left that are gone; they are named."""
    for path in mount.glob(f"{CGROUP_NAME}*"):
        held = [each.name.removeprefix(_HELD) for each in path.glob(f"{_HELD}*")]
        # One without a holder is just being made.
        if held and not any(Path("/proc", pid).exists() for pid in held):
            _remove(path)


def _hierarchies() -> Iterator[tuple[int, str]]:
    """Return where cgroups can be made, with a number that sorts the better first: 0 is v2."""
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8").splitlines():
            _, place, kind, options, *_ = line.split()
            if kind == "cgroup2":
                yield 0, place
            elif kind == "cgroup" and _CONTROLLERS_OF_V1 & set(options.split(",")):
                yield 1, place


def _remove(directory: Path) -> bool:
    """Remove a directory of cgroups from below; what is in use stays, then False is returned."""
    try:
        for path in directory.iterdir():
            if path.is_dir():
                _remove(path)
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
