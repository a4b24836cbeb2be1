"""Tells which parts of the agent are off where it was given less than it can use, and what switches them on.

NVIDIA's manifests give their plugin one directory and no right at all; put in its place, the agent offers
GPUs and watches them by NVML, and what needs more is off and said so. Nothing here is an error.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.config.options import OPTIONS
from agent.config.settings import DEFAULT, Settings
from agent.errors import MissingRightsError
from agent.model.structs import replace
from agent.runtime.startup import check_state_dir

_DENIED: Final = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENODEV})

_WHOLE_RANGE: Final = ["0", "0", "4294967295"]
"""The map of user ids outside of any user namespace. Source: user_namespaces(7)."""

FALLBACK_STATE_DIRS: Final = (
    *("/run/gpu-agent/state", "/tmp/gpu-agent"),  # noqa: S108 - only such a container's own
    # NVIDIA's chart mounts at /dev/shm what all that share a GPU by MPS can write, and this beside it.
    *("/mps/gpu-agent", "/dev/shm/gpu-agent"),  # noqa: S108
)
"""Where state is kept in a container whose file system is read-only; nobody else may write there."""


class PartOff(NamedTuple):
    """A part that is off."""

    name: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}; {self.remedy}"


def with_usable_state_dir(
    settings: Settings, *, is_in_container: bool, fallbacks: Sequence[str] = FALLBACK_STATE_DIRS
) -> Settings:
    """Return the settings with a state directory that can be written, or raise MissingRightsError.

    Another one than asked for is taken only in a container, and only if none was asked for.
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
    """Return the settings without a kernel log that may not be read, unless somebody asked for this one."""
    if settings.origins.get("kernel-log", DEFAULT) == DEFAULT and _unreadable(settings.kernel_log):
        return replace(settings, kernel_log="")
    return settings


def parts_off(settings: Settings, *, is_in_container: bool) -> tuple[PartOff, ...]:
    """Return what is off; blocks for as long as a few looks at files take."""
    return tuple(_parts_off(settings, is_in_container=is_in_container))


def _parts_off(settings: Settings, *, is_in_container: bool) -> Iterator[PartOff]:
    if settings.kernel_log and (why := _unreadable(settings.kernel_log)):
        yield PartOff(
            "kernel log",
            f"XIDs that NVML does not tell are not seen, because {settings.kernel_log} {why}",
            f"mount the node's {OPTIONS['kernel-log'].default} and give the capability SYSLOG",
        )
    directory = Path(settings.pod_resources_socket).parent
    if settings.pod_resources_socket and not os.path.isdir(directory):  # noqa: PTH112 - Path's raises
        yield PartOff(
            "pods",
            f"it is not known which pod holds which GPU, because {directory} is not there",
            "mount it from the node",
        )
    if settings.uevents and _is_in_user_namespace(settings.proc_root):
        yield PartOff(
            "uevents",
            "GPUs that come and go are seen by polls only, because the kernel tells no user namespace",
            "run without one (hostUsers)",
        )
    if not _can_make(Path(settings.control_socket).parent):
        directory = Path(settings.control_socket).parent
        yield PartOff(
            "control socket",
            f"commands cannot ask this agent, because {directory} cannot be written",
            "give --control-socket another directory",
        )
    if is_in_container and _is_lost_with_the_container(settings):
        yield PartOff(
            "state over restarts",
            f"a new container starts without what this one knew, because {settings.state_dir} is its own",
            f"mount a directory of the node at {OPTIONS['state-dir'].default}",
        )


def _unreadable(path: str) -> str:
    """Return why a file cannot be read, or nothing."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        # Anything else is a matter of the moment, which the part itself tells.
        return f"cannot be read ({error.strerror})" if error.errno in _DENIED else ""
    return ""


def _is_in_user_namespace(proc_root: str) -> bool:
    try:
        return Path(proc_root, "self/uid_map").read_text(encoding="ascii").split() != _WHOLE_RANGE
    except (OSError, ValueError):
        return False


def _can_make(directory: Path) -> bool:
    """Tell whether a directory, or what is missing of it, can be made and written."""
    nearest = next(each for each in (directory, *directory.parents) if os.path.exists(each))  # noqa: PTH110
    return os.access(nearest, os.W_OK | os.X_OK)


def _is_lost_with_the_container(settings: Settings) -> bool:
    """Tell whether nobody outside has the state; an operator who names a directory knows what it is."""
    asked = settings.given["state-dir"]
    if settings.state_dir != asked.value:
        return True
    if asked.origin != DEFAULT:
        return False
    return Path(settings.state_dir).stat().st_dev == Path("/").stat().st_dev
