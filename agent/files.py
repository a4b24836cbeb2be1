"""Replaces a file so that a crash at any moment leaves the old one or the new one, never a mix."""

import os
from pathlib import Path


def write(path: str, raw: bytes, *, mode: int = 0o600) -> os.stat_result:
    """Replace the file by one that holds these bytes, or raise OSError and leave it as it was.

    ``mode`` is the file's mode, whatever the umask. Returns the new file's status.
    """
    beside = f"{path}.new"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(descriptor, raw)
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    Path(beside).replace(path)
    directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return status


def write_all(descriptor: int, raw: bytes) -> None:
    """Write all of these bytes, or raise OSError after some of them."""
    view = memoryview(raw)
    while view:
        view = view[os.write(descriptor, view) :]
