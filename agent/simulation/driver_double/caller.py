"""What a driver may know and do of the process that calls it: its threads, its memory, its open files.

Needs the right to trace the caller. Source: proc(5), pidfd_getfd(2).
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PIDFD_GETFD: Final = 438
"""The system call's number, the same on every architecture."""


def thread_group(thread: int) -> int:
    """Return the process of a thread; the thread's own number where it is gone."""
    try:
        status = Path(f"/proc/{thread}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return thread
    return int(status.partition("\nTgid:")[2].partition("\n")[0])


def read_memory(thread: int, address: int, size: int) -> bytes:
    """Return bytes of a caller's memory; raises OSError with EFAULT."""
    with _memory(thread, os.O_RDONLY) as descriptor:
        data = os.pread(descriptor, size, address)
    if len(data) != size:
        raise OSError(errno.EFAULT, "not the caller's memory")
    return data


def write_memory(thread: int, address: int, data: bytes) -> None:
    """Write into a caller's memory; raises OSError with EFAULT."""
    with _memory(thread, os.O_WRONLY) as descriptor:
        written = os.pwrite(descriptor, data, address)
    if written != len(data):
        raise OSError(errno.EFAULT, "not the caller's memory")


@contextlib.contextmanager
def _memory(thread: int, flags: int) -> Iterator[int]:
    descriptor = -1
    try:
        descriptor = os.open(f"/proc/{thread}/mem", flags | os.O_CLOEXEC)
        yield descriptor
    except (OSError, OverflowError) as error:
        raise OSError(errno.EFAULT, "not the caller's memory") from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def descriptor_of(pid: int, number: int) -> int:
    """Return a descriptor of our own of a process's open file; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        descriptor: int = libc.syscall(_PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor
