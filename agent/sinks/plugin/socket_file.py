"""The socket file of a served resource: to make it, to recognise it, to remove it.

Guarantees: a file that is not ours is never removed. Ours are sockets that belong to our user and
that no process answers on, or the very file we made (device, inode and modification time agree). The
file has mode 0600 from the moment it exists, and no peer can connect before that.

Every call here reads one local directory once or gets an answer from the kernel, so they are made
on the loop.
"""

import errno
import itertools
import os
import re
import socket
import stat
from pathlib import Path
from typing import Final

from agent.errors import KubeletError
from agent.model.facts import RegistrationFailure
from agent.model.ids import ResourceName, SocketIdentity, socket_name

MAX_PATH_BYTES: Final = 107
"""A path in struct sockaddr_un has 108 bytes, the last is zero. Source: unix(7)."""

RESOURCE_NAME: Final = re.compile(
    r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
"""Source: kubernetes, IsExtendedResourceName and IsQualifiedName."""


OWN_NAME: Final = re.compile(r"nvidia-(gpu|mig-[0-9][0-9A-Za-z.+-]*)(\.shared)?\.sock")
"""Sockets that only a plugin for GPUs makes; other device plugins have the directory in common."""

MAX_ENTRIES: Final = 1024
"""Entries of the directory that are searched for leftovers."""


class NotRegisteredError(KubeletError):
    """A resource could not be served or registered; ``failure`` names the kind, for the core."""

    def __init__(self, failure: RegistrationFailure, message: str) -> None:
        super().__init__(message)
        self.failure: Final = failure


def identity_of(path: Path) -> SocketIdentity | None:
    """Return which file is at a path now; None: there is none, or it cannot be seen."""
    try:
        return _identity(os.lstat(path))
    except OSError:
        return None


def _identity(status: os.stat_result) -> SocketIdentity:
    return SocketIdentity(status.st_dev, status.st_ino, status.st_mtime_ns)


def socket_path(directory: Path, resource: ResourceName) -> Path:
    """Return where a resource is served; NotRegisteredError if there can be no such socket."""
    if not RESOURCE_NAME.fullmatch(resource):
        raise NotRegisteredError(
            "not_served", f"{resource!r} is not a valid resource name; rename it in the configuration"
        )
    path = directory / socket_name(resource)
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise NotRegisteredError(
            "not_served",
            f"{path} has {length} bytes, a socket's path has at most {MAX_PATH_BYTES};"
            " choose a shorter directory or resource name",
        )
    return path


def listen(path: Path, *, backlog: int) -> socket.socket:
    """Make the socket at ``path`` and listen there; NotRegisteredError if another file must stay there."""
    clear_leftover(path)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise _not_served(path, error) from None
    try:
        # The mode of the descriptor becomes that of the file: it is never open to others.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(path))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise _not_served(path, error) from None
    return listener


def _not_served(path: Path, error: OSError) -> NotRegisteredError:
    if error.errno == errno.ENOENT:
        return NotRegisteredError(
            "absent", f"The directory {path.parent} does not exist; it appears when the kubelet starts"
        )
    if error.errno == errno.EADDRINUSE:
        return NotRegisteredError(
            "socket_in_use", f"Another process has just bound {path}; stop the other device plugin"
        )
    return NotRegisteredError(
        "not_served",
        f"Could not listen on {path}: {error.strerror}; check the directory's rights and free room"
        " and the agent's limit of open files",
    )


def clear_leftover(path: Path) -> bool:
    """Remove a socket that an earlier run of ours left; return whether there was one.

    NotRegisteredError(socket_in_use) if something else is there: it stays.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _not_served(path, error) from None
    _insist_on_own_socket(path, status)
    try:
        is_in_use = _answers(path)
        if not is_in_use and identity_of(path) == _identity(status):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise _not_served(path, error) from None
    if is_in_use:
        raise NotRegisteredError(
            "socket_in_use", f"Another process serves {path}; stop the other device plugin on this node"
        )
    return True


def clear_leftovers(directory: Path) -> tuple[str, ...]:
    """Remove the sockets of GPU resources on which no process answers any more; return their names.

    After a kill under one MIG layout and a start under another nothing else would ever remove them. What
    is in use, or not a socket of ours, stays.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_ENTRIES)]
    except OSError:
        return ()
    return tuple(name for name in sorted(names) if OWN_NAME.fullmatch(name) and _is_cleared(directory / name))


def _is_cleared(path: Path) -> bool:
    try:
        return clear_leftover(path)
    except NotRegisteredError:
        return False


def _insist_on_own_socket(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISSOCK(status.st_mode):
        raise NotRegisteredError(
            "socket_in_use", f"{path} is {_kind(status.st_mode)}, not a socket; move it out of the way"
        )
    if status.st_uid != os.geteuid():
        raise NotRegisteredError(
            "socket_in_use",
            f"{path} belongs to user {status.st_uid}; stop that device plugin or remove the socket",
        )


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a file"


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        # Only ECONNREFUSED proves that no process listens; a full backlog, for one, does not.
        return probe.connect_ex(os.fspath(path)) not in {errno.ECONNREFUSED, errno.ENOENT}


def remove(path: Path, identity: SocketIdentity | None) -> None:
    """Remove the socket file if it is still the one we made."""
    if identity is None or identity_of(path) != identity:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # A directory that became read-only keeps it; the next start finds a leftover of its own.
        return
