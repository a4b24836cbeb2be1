"""The descriptor table of the threads that call the driver, and the files that the driver has open in it.

A table belongs to the calling thread, so everything here runs on one of those threads.
"""

import ctypes
import errno
import os
import resource
from typing import Final

CLONE_FILES: Final = 0x400
"""Source: linux/sched.h."""

DECOY_DESCRIPTORS: Final = 256
"""Descriptors below this are /dev/null in the threads' table, so the driver's own are above it."""

MAX_DESCRIPTORS: Final = 1 << 20
"""The kernel's own limit where the process has none. Source: proc(5), fs.nr_open."""


def unshare_files(keep: tuple[int, ...]) -> str | None:
    """Give the calling thread a descriptor table of its own that holds ``keep`` and /dev/null.

    Returns why that was not possible, or None. Python may free an unreferenced file object of the agent
    on any thread, and would then close its number in this table: so /dev/null occupies all low numbers,
    where that does no harm, and what the driver opens is above them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_FILES) != 0:
        code = ctypes.get_errno()
        return f"unshare(CLONE_FILES) failed: {os.strerror(code)} ({errno.errorcode.get(code, code)})"
    _close_all_but(keep)
    decoys = max(3, min(DECOY_DESCRIPTORS, _descriptor_limit() // 2))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in set(range(decoys)) - {*keep, null}:
        os.dup2(null, descriptor, inheritable=False)
    return None


def _close_all_but(keep: tuple[int, ...]) -> None:
    first = 0
    for kept in sorted(keep):
        os.closerange(first, kept)
        first = kept + 1
    os.closerange(first, _highest_descriptor() + 1)


def _highest_descriptor() -> int:
    """Return the highest number open in the calling thread's table, or one above it."""
    try:
        return max(int(name) for name in os.listdir("/proc/thread-self/fd"))  # noqa: PTH208 - names only
    except OSError:
        # No /proc, or no descriptor left to read it with.
        return _descriptor_limit()


def _descriptor_limit() -> int:
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft_limit if soft_limit > 0 else MAX_DESCRIPTORS


def open_files_below(prefixes: tuple[str, ...]) -> list[str]:
    """Return the paths that begin with a prefix among the files open in the calling thread's table."""
    directory = "/proc/thread-self/fd"
    found: set[str] = set()
    for number in os.listdir(directory):  # noqa: PTH208 - names only
        try:
            found.add(os.readlink(f"{directory}/{number}"))  # noqa: PTH115 - a name, not a Path
        except OSError:
            # The descriptor of the directory itself, closed by now.
            continue
    return sorted(path for path in found if path.startswith(prefixes))
