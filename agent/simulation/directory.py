"""The directory of a simulated node: its holder, what lies where, and its removal.

Guarantees:

1. One process holds it at a time; the kernel releases a killed one's lock.
2. What a killed run left behind is removed at the next start, and only where it is recognisably ours: a
   directory that is not empty and has no lock file of ours is never touched.
3. ``release`` removes the directory with all it holds, and what ``hold`` made above it. Symbolic links are
   removed, never followed.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from agent.errors import AlreadyRunningError, UsageError

LOCK_NAME: Final = "lock"
_SIGN: Final = "gpu-agent simulated node, held by process "
"""How the lock file begins: a directory with such a file is ours."""
_MAX_LOCK_BYTES: Final = 200

CGROUP_NAME: Final = "gpu-agent-simulation-"
"""How the cgroup begins below which the processes of a simulated node are."""

MAX_PATH_BYTES: Final = 60
"""Leaves room for the longest socket name below it in the 107 bytes of a unix socket's path."""


CONTROL_SOCKET: Final = "control.sock"
AGENT_CONFIG: Final = "agent.yaml"


class _Below:
    """A path below the directory of the node."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, node: "NodeDirectory", _: type) -> Path:
        return node.path / self._path


class NodeDirectory:
    """A simulated node's directory, held since ``hold``; see the guarantees above."""

    def __init__(self, path: Path, lock: int, made: Sequence[Path] = ()) -> None:
        self.path = path
        self._lock = lock
        self._made = made
        """Directories above it that were not there before, the innermost first."""

    @classmethod
    def hold(cls, path: str | Path) -> Self:
        """Lock, create where missing, and empty the directory.

        Raises UsageError where it cannot be used, AlreadyRunningError where another process holds it.
        """
        place = Path(path).absolute()
        _check_length(place)
        try:
            made = [each for each in place.parents if not each.exists()]
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_parent(place.parent)
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
            _check(place)
            held = cls(place, _lock(place), made)
            held._create()
        except OSError as error:
            raise UsageError(
                f"Could not set up the node directory {place}: {error.strerror}; "
                "choose another one with --node-dir"
            ) from error
        return held

    def _create(self) -> None:
        try:
            self._empty()
            for each in (self.device_plugins, self.pod_resources, self.agent, self.library.parent, self.mps):
                each.mkdir(mode=0o700)
        except BaseException:
            os.close(self._lock)
            raise

    def release(self) -> None:
        """Remove the directory and release it; a second call does nothing.

        What cannot be removed, as a process that is not gone yet may still write, is left to the next start.
        """
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            self._empty()
            (self.path / LOCK_NAME).unlink()
            self._remove()
        os.close(self._lock)
        self._lock = -1

    def _remove(self) -> None:
        try:
            self.path.rmdir()
        except OSError:
            # Something was written after all; without a lock file the directory would have no holder.
            with contextlib.suppress(OSError), (self.path / LOCK_NAME).open("x", encoding="ascii") as file:
                file.write(_sign())
            raise
        for each in self._made:
            each.rmdir()

    def _empty(self) -> None:
        """Remove everything but the lock file; it goes last, so that what is left stays ours."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name == LOCK_NAME:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    Path(entry.path).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    device_plugins = _Below("device-plugins")
    """The kubelet's device-plugins folder."""
    kubelet_socket = _Below("device-plugins/kubelet.sock")
    """The kubelet's registration socket."""
    pod_resources = _Below("pod-resources")
    """The kubelet's pod-resources folder."""
    pod_logs = _Below("pod-logs")
    """Where the kubelet keeps the logs of pods."""
    dev = _Below("dev")
    """The double of /dev."""
    proc = _Below("proc")
    """The double of /proc."""
    sys = _Below("sys")
    """The double of /sys."""
    kernel_log = _Below("dev/kmsg")
    """The double of /dev/kmsg, a unix stream socket."""
    driver = _Below("driver")
    """The double of the driver's installation."""
    cdi = _Below("cdi")
    """The double of /var/run/cdi."""
    library = _Below("lib/libnvidia-ml.so.1")
    """The simulated NVML library."""
    nvml_state = _Below("nvml.state")
    """The simulated node's NVML state; the library opens it beside its own folder."""
    control_socket = _Below(CONTROL_SOCKET)
    """Where ``gpu-agent inject`` asks for faults."""
    agent = _Below("agent")
    """The agent's own folder: its state and its control socket."""
    agent_config = _Below(AGENT_CONFIG)
    """The agent's configuration file, where a scenario gives it one."""
    mps = _Below("mps")
    """The MPS root."""

    def agent_flags(self) -> dict[str, str]:
        """Return the options that make ``gpu-agent run`` the agent of this node, by name."""
        return agent_flags(self.path)


def control_socket(node_dir: Path) -> Path:
    """Return the control socket of the simulated node in a directory."""
    return node_dir / CONTROL_SOCKET


def agent_config(node_dir: Path) -> Path:
    """Return where the agent's configuration file is on the node in a directory, if it has one."""
    return node_dir / AGENT_CONFIG


def cgroup_root(node_dir: Path) -> str:
    """Return where the simulated kubelet of the node in a directory has its cgroups."""
    return f"/{CGROUP_NAME}{zlib.crc32(os.fsencode(node_dir.absolute())):08x}"


def agent_flags(node_dir: Path) -> dict[str, str]:
    """Return the options that make ``gpu-agent run`` the agent of the node in a directory, by name."""
    return {
        "kubelet-socket": f"{node_dir}/device-plugins/kubelet.sock",
        "pod-resources-socket": f"{node_dir}/pod-resources/kubelet.sock",
        "pod-logs-dir": f"{node_dir}/pod-logs",
        "kubelet-cgroup-root": cgroup_root(node_dir),
        "probe-doubles": f"{node_dir}/dev",
        "nvml-library": f"{node_dir}/lib/libnvidia-ml.so.1",
        "driver-root": f"{node_dir}/driver",
        "driver-root-ctr-path": f"{node_dir}/driver",
        "dev-root": f"{node_dir}",
        "proc-root": f"{node_dir}/proc",
        "sys-root": f"{node_dir}/sys",
        "state-dir": f"{node_dir}/agent",
        "control-socket": f"{node_dir}/agent/control.sock",
        "kernel-log": f"{node_dir}/dev/kmsg",
        "mps-root": f"{node_dir}/mps",
        "nvidia-cdi-hook-path": f"{node_dir}/driver/usr/bin/nvidia-ctk",
        "cdi-spec-dir": f"{node_dir}/cdi",
        # The machine's own uevents are none of the node's.
        "uevents": "false",
    }


def holder_of(node_dir: Path) -> int | None:
    """Return the id of the process that last signed the lock file; None where none did."""
    try:
        with (node_dir / LOCK_NAME).open("r", encoding="ascii", errors="replace") as file:
            text = file.read(_MAX_LOCK_BYTES)
    except OSError:
        return None
    number = text.removeprefix(_SIGN).strip()
    return int(number) if text.startswith(_SIGN) and number.isdecimal() else None


def _check_length(place: Path) -> None:
    length = len(os.fsencode(place))
    if length > MAX_PATH_BYTES:
        raise UsageError(
            f"The node directory {place} has a path of {length} bytes, over {MAX_PATH_BYTES}: too long for "
            "the sockets in it; choose a shorter one with --node-dir"
        )


def _check_parent(parent: Path) -> None:
    """Raise UsageError where another user could put another directory in the node's place."""
    status = parent.stat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or others_write:
        raise UsageError(
            f"The directory {parent} is another user's to change; choose a safer place with --node-dir"
        )


def _check(place: Path) -> None:
    """Raise UsageError unless the directory is ours to empty."""
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{place} is not a directory; choose another one with --node-dir")
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"The node directory {place} belongs to user {status.st_uid}; choose another one with --node-dir"
        )
    if not _is_ours(place):
        raise UsageError(
            f"The directory {place} is not empty and no simulated node of ours; "
            "empty it, or choose another one with --node-dir"
        )


def _is_ours(place: Path) -> bool:
    """Return whether a directory is empty, was a node of ours, or was abandoned before it became one."""
    names = [each.name for each in place.iterdir()]
    return (
        not names
        or holder_of(place) is not None
        or (names == [LOCK_NAME] and (place / LOCK_NAME).lstat().st_size == 0)
    )


def _lock(place: Path) -> int:
    """Return the descriptor that holds the lock; the lock file names its holder."""
    path = place / LOCK_NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            holder = holder_of(place)
            raise AlreadyRunningError(
                f"A simulated node already runs in {place}"
                + (f" (process {holder})" if holder else "")
                + "; stop it, or choose another directory with --node-dir"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        # The one before us may have removed the file between our open and our lock.
        if _is_still_there(path, descriptor):
            # At no moment without a sign: a process that is killed here leaves a directory that is ours.
            os.pwrite(descriptor, _sign().encode(), 0)
            os.ftruncate(descriptor, len(_sign()))
            return descriptor
        os.close(descriptor)


def _sign() -> str:
    return f"{_SIGN}{os.getpid()}\n"


def _is_still_there(path: Path, descriptor: int) -> bool:
    held = os.fstat(descriptor)
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
