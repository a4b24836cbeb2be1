"""What is checked before anything is started: paths, rights, the lock, disabled components.

Guarantees: an error is one sentence with the object and the next step. Only a mistake of the operator ends
the process here; the agent waits for what can still appear (the kubelet, the driver).

NVIDIA's manifests give their plugin one directory and no right at all; in its place the agent advertises
GPUs and watches them by NVML, and each component that needs more is disabled and named. That is no error.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent import log
from agent.config.options import OPTIONS
from agent.config.settings import DEFAULT, Settings
from agent.errors import AlreadyRunningError, MissingRightsError, UsageError
from agent.model.structs import replace
from agent.runtime.lifecycle import is_in_container

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
    if os.path.isdir(directory):  # noqa: PTH112 - Path's raises where it may not read
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
        """Acquire the lock if it is free."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._write_pid()
        return True

    def acquire(self) -> None:
        """Wait for the lock and acquire it; blocks, so it is for a thread of its own."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._write_pid()

    def _write_pid(self) -> None:
        self.is_held = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock and close its file."""
        os.close(self._descriptor)

    def holder(self) -> str:
        """Return the process that holds the lock, as the lock file names it."""
        with contextlib.suppress(OSError):
            text = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            if text.isdigit():
                return f"process {text}"
        return "an unknown process"


_DENIED: Final = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENODEV})

_WHOLE_RANGE: Final = ["0", "0", "4294967295"]
"""The map of user ids outside of any user namespace. Source: user_namespaces(7)."""

FALLBACK_STATE_DIRS: Final = (
    *("/run/gpu-agent/state", "/tmp/gpu-agent"),  # noqa: S108 - only such a container's own
    # NVIDIA's chart mounts at /dev/shm what all that share a GPU by MPS can write, and this beside it.
    *("/mps/gpu-agent", "/dev/shm/gpu-agent"),  # noqa: S108
)
"""Where state is kept in a container whose file system is read-only; no other user may write there."""


class DisabledComponent(NamedTuple):
    """A component that is disabled."""

    name: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}; {self.remedy}"


def with_usable_state_dir(
    settings: Settings, *, is_in_container: bool, fallbacks: Sequence[str] = FALLBACK_STATE_DIRS
) -> Settings:
    """Return the settings with a state directory that can be written, or raise MissingRightsError.

    Another one than asked for is used only in a container, and only if none was asked for.
    """
    try:
        check_state_dir(settings.state_dir)
    except MissingRightsError:
        if not is_in_container or settings.origins.get("state-dir", DEFAULT) != DEFAULT:
            raise
        for candidate in fallbacks:
            if _can_use(candidate):
                return replace(settings, state_dir=candidate)
        raise
    return settings


def _can_use(directory: str) -> bool:
    """Return whether state may be kept there: what others put there would be believed as ours."""
    try:
        check_state_dir(directory)
        seen = os.lstat(directory)
    except (MissingRightsError, OSError):
        return False
    is_private = seen.st_uid == os.geteuid() and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(seen.st_mode) and is_private


def without_unreadable_log(settings: Settings) -> Settings:
    """Return the settings without a kernel log that may not be read, unless an operator asked for it."""
    if settings.origins.get("kernel-log", DEFAULT) == DEFAULT and _unreadable(settings.kernel_log):
        return replace(settings, kernel_log="")
    return settings


def disabled_components(settings: Settings, *, is_in_container: bool) -> tuple[DisabledComponent, ...]:
    """Return what is disabled; blocks for as long as a few reads of files take."""
    return tuple(_disabled_components(settings, is_in_container=is_in_container))


def _disabled_components(settings: Settings, *, is_in_container: bool) -> Iterator[DisabledComponent]:
    if settings.kernel_log and (why := _unreadable(settings.kernel_log)):
        yield DisabledComponent(
            "kernel log",
            f"XIDs that NVML does not report are not seen, because {settings.kernel_log} {why}",
            f"mount the node's {OPTIONS['kernel-log'].default} and give the capability SYSLOG",
        )
    directory = Path(settings.pod_resources_socket).parent
    if settings.pod_resources_socket and not os.path.isdir(directory):  # noqa: PTH112 - Path's raises
        yield DisabledComponent(
            "pods",
            f"it is not known which pod holds which GPU, because {directory} is not there",
            "mount it from the node",
        )
    if settings.uevents and _is_in_user_namespace(settings.proc_root):
        yield DisabledComponent(
            "uevents",
            "GPUs that come and go are seen by polls only: the kernel sends no uevents to a user namespace",
            "run without one (hostUsers)",
        )
    if not _can_make(Path(settings.control_socket).parent):
        directory = Path(settings.control_socket).parent
        yield DisabledComponent(
            "control socket",
            f"commands cannot ask this agent, because {directory} cannot be written",
            "give --control-socket another directory",
        )
    if is_in_container and _is_lost_with_the_container(settings):
        yield DisabledComponent(
            "state over restarts",
            f"a new container starts without what this one knew, because {settings.state_dir} is its own",
            f"mount a directory of the node at {OPTIONS['state-dir'].default}",
        )


def _unreadable(path: str) -> str:
    """Return why a file cannot be read, or nothing."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        # Anything else is a matter of the moment, which the component itself reports.
        return f"cannot be read ({error.strerror})" if error.errno in _DENIED else ""
    return ""


def _is_in_user_namespace(proc_root: str) -> bool:
    try:
        return Path(proc_root, "self/uid_map").read_text(encoding="ascii").split() != _WHOLE_RANGE
    except (OSError, ValueError):
        return False


def _can_make(directory: Path) -> bool:
    """Return whether a directory, or what is missing of it, can be made and written."""
    nearest = next(each for each in (directory, *directory.parents) if os.path.exists(each))  # noqa: PTH110
    return os.access(nearest, os.W_OK | os.X_OK)


def _is_lost_with_the_container(settings: Settings) -> bool:
    """Return whether the state is only in this container; an operator that names a directory knows it."""
    asked = settings.given["state-dir"]
    if settings.state_dir != asked.value:
        return True
    if asked.origin != DEFAULT:
        return False
    return Path(settings.state_dir).stat().st_dev == Path("/").stat().st_dev


_log = logging.getLogger(__name__)


class Bootstrap(NamedTuple):
    """All that was found before anything runs."""

    settings: Settings
    lock: NodeLock
    """Where another agent holds it, this one is to stand by."""
    boot_id: str
    is_in_container: bool = False
    off: tuple[DisabledComponent, ...] = ()


def bootstrap(settings: Settings, environment: Mapping[str, str]) -> Bootstrap:
    """Check the settings and try to lock the node.

    Raises AgentError, one sentence, where the agent cannot start.
    """
    for warning in settings.warnings:
        _log.warning("A setting was ignored: %(detail)s", log.about(detail=warning))
    check_paths(settings)
    in_container = is_in_container(environment)
    settings = with_usable_state_dir(settings, is_in_container=in_container)
    check_rights(settings)
    off = disabled_components(settings, is_in_container=in_container)
    if off:
        _log.warning(
            "Some components are disabled: %(components)s", log.about(components=[str(each) for each in off])
        )
    lock = NodeLock(settings.lock_path)
    if not lock.try_acquire() and (settings.if_running or _default_if_running()) == "fail":
        raise AlreadyRunningError(
            f"Another agent ({lock.holder()}) runs on this node and holds {settings.lock_path}; "
            "stop it, or wait for its end with --if-running=standby"
        )
    # A disabled component is reported as that; it is no source that fails without an end.
    settings = without_unreadable_log(settings)
    return Bootstrap(settings, lock, boot_id_of(settings.proc_root), in_container, off)


def _default_if_running() -> str:
    return "fail" if sys.stderr.isatty() else "standby"
