"""What a driver may know and do of the process that calls it: its threads, its memory, its open files.

Needs the right to trace the caller. Source: proc(5), pidfd_getfd(2).
"""

import ctypes
import errno
import os
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
    """Return bytes of a caller's memory; raises OSError."""
    descriptor = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, size, address)
    except OverflowError:
        raise OSError(errno.EFAULT, "not an address") from None
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise OSError(errno.EFAULT, "not the caller's memory")
    return data


def write_memory(thread: int, address: int, data: bytes) -> None:
    """Write into a caller's memory; raises OSError."""
    descriptor = os.open(f"/proc/{thread}/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        written = os.pwrite(descriptor, data, address)
    except OverflowError:
        raise OSError(errno.EFAULT, "not an address") from None
    finally:
        os.close(descriptor)
    if written != len(data):
        raise OSError(errno.EFAULT, "not the caller's memory")


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
