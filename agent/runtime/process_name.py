"""Makes the process appear under another program's name, so that whoever signals that one finds this one.

NVIDIA's config-manager looks for a process whose first argument is ``nvidia-device-plugin``, and a Python
program's first argument is the interpreter. Starting anew under the other name would cost a start, so the
arguments are written over where the kernel shows them.

Sources: proc(5), ``arg_start`` in /proc/PID/stat; NVIDIA/k8s-device-plugin:cmd/config-manager/main.go,
findPidToSignal.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_ARG_START, _ARG_END = 48, 49
"""Numbers of fields in /proc/PID/stat, counted from 1."""
_MAX_COMM: Final = 15
"""A thread's name in bytes, without the NUL."""


def appear_as(name: str, arguments: Sequence[str]) -> bool:
    """Show a name and arguments in /proc/PID/cmdline and comm; returns whether the kernel let us."""
    try:
        start, end = _place_of_arguments()
        shown = _shown(name, arguments, end - start)
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(shown)
        Path("/proc/self/comm").write_bytes(os.fsencode(name)[:_MAX_COMM])
    except (OSError, ValueError):
        return False
    return True


def _place_of_arguments() -> tuple[int, int]:
    """Return where the arguments begin and end in this process's memory; ValueError if it is not told."""
    # The program's name stands in parentheses and may hold anything, also spaces.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))
    if not 0 < start < end:
        raise ValueError("the kernel does not tell where the arguments are")
    return start, end


def _shown(name: str, arguments: Sequence[str], room: int) -> bytes:
    """Return the arguments with NULs up to their old length, or the name alone where they do not fit."""
    for words in ((name, *arguments), (name,)):
        shown = b"\0".join(os.fsencode(word) for word in words) + b"\0"
        if len(shown) <= room:
            return shown.ljust(room, b"\0")
    raise ValueError("the old arguments have no room for the name")
