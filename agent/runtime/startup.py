"""What is judged before anything is started: paths, rights, and who else runs on this node.

Guarantees: what is wrong is one sentence that names the thing and the next step. Only what an
operator got wrong ends the process here; what can still come (the kubelet, the driver) is waited for.
"""

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from agent.config.settings import Settings
from agent.errors import MissingRightsError, UsageError

MAX_SOCKET_PATH_BYTES: Final = 107
"""A unix socket's path in bytes, without the NUL. Source: unix(7)."""


def check_paths(settings: Settings) -> None:
    """Raise UsageError if a socket's path cannot be one."""
    _check_socket_path("kubelet-socket", settings.kubelet_socket)
    _check_socket_path("control-socket", settings.control_socket)
    if settings.kubelet_socket:
        with contextlib.suppress(OSError):
            mode = Path(settings.kubelet_socket).stat().st_mode
            if not stat.S_ISSOCK(mode):
                raise UsageError(
                    f"--kubelet-socket {settings.kubelet_socket} is not a socket; "
                    "name the kubelet's kubelet.sock, or nothing to serve without registering"
                )


def _check_socket_path(option: str, path: str) -> None:
    if not path:
        return
    if not path.startswith("/"):
        raise UsageError(f"--{option} {path} is relative; give an absolute path")
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"--{option} is {length} bytes long, and a socket's path holds {MAX_SOCKET_PATH_BYTES}; "
            "give a shorter path"
        )


def check_rights(settings: Settings) -> None:
    """Raise MissingRightsError if a right is missing that nothing can be done without."""
    check_state_dir(settings.state_dir)
    directory = Path(settings.kubelet_socket_or_default).parent
    if os.path.isdir(directory):  # noqa: PTH112 - Path's raises where it may not look
        _check_writable(directory, "make the plugin's sockets", "--kubelet-socket")


def check_state_dir(path: str) -> None:
    """Make the state directory, or raise MissingRightsError."""
    state_dir = Path(path)
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MissingRightsError(
            f"Could not make the state directory {state_dir}: {error.strerror}; "
            "run as root, or give --state-dir a directory that this user may write"
        ) from None
    _check_writable(state_dir, "keep state and lock", "--state-dir")


def _check_writable(directory: Path, purpose: str, option: str) -> None:
    if not os.access(directory, os.W_OK | os.X_OK):
        raise MissingRightsError(
            f"Missing the right to write in {directory}, which is needed to {purpose}; "
            f"run as root, or give {option} a directory that this user may write"
        )


def boot_id_of(proc_root: str) -> str:
    """Return the kernel's id of this boot; empty where it cannot be read, which equals no other."""
    try:
        path = Path(proc_root, "sys/kernel/random/boot_id")
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


class NodeLock:
    """The lock that makes one agent the agent of this node; the kernel frees it with the process."""

    def __init__(self, path: str) -> None:
        """Open the lock's file, or raise MissingRightsError."""
        self.is_held = False
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise MissingRightsError(
                f"Could not open the lock {path}: {error.strerror}; run as root, or give another --state-dir"
            ) from None

    def try_acquire(self) -> bool:
        """Take the lock if it is free."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._sign()
        return True

    def acquire(self) -> None:
        """Wait for the lock and take it; blocks, so it is for a thread of its own."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._sign()

    def _sign(self) -> None:
        self.is_held = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the lock go, and its file too."""
        os.close(self._descriptor)

    def holder(self) -> str:
        """Return the process that holds the lock, as it signed itself."""
        with contextlib.suppress(OSError):
            text = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            if text.isdigit():
                return f"process {text}"
        return "an unknown process"
