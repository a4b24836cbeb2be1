"""Follows the returns of a function with many concurrent calls, by an event of the trace file system.

A kretprobe of perf_event_open(2) follows twice as many calls at once as there are CPUs,
at least ten, and misses the returns of the others. An event has a configurable number.

Invariants: an event that is in use cannot be removed. It outlives the process that defined it, unused and at
no cost but its memory; the next process that attaches removes it.
Source: Documentation/trace/kprobetrace.rst; KRETPROBE_MAXACTIVE_MAX of kernel/trace/trace_kprobe.c is 4096.
"""

import itertools
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

MAX_ACTIVE: Final = 1024
"""Calls that are followed at once; recent kernels need 8 bytes for each on every CPU."""
GROUP: Final = "gpu_agent"

_DEFINITIONS: Final = "kprobe_events"
_OURS: Final = re.compile(rf"^r\d*:({GROUP}/\w+_(\d+)_\d+) ", re.MULTILINE)
_numbers = itertools.count()


def define(function: str, tracefs: str) -> int:
    """Define an event for each return of a function and return its id; raises OSError."""
    name = f"{function.replace('.', '_')}_{os.getpid()}_{next(_numbers)}"
    followed = max(MAX_ACTIVE, 2 * (os.cpu_count() or 1))
    _write(tracefs, f"r{followed}:{GROUP}/{name} {function}\n")
    return int(Path(tracefs, "events", GROUP, name, "id").read_text())


def remove_left_behind(tracefs: str) -> None:
    """Remove unused events; those of another living process may be about to be used."""
    with suppress(OSError):
        for name, pid in _OURS.findall(Path(tracefs, _DEFINITIONS).read_text()):
            if int(pid) == os.getpid() or not Path("/proc", pid).exists():
                with suppress(OSError):
                    _write(tracefs, f"-:{name}\n")


def _write(tracefs: str, command: str) -> None:
    """Write one command, in one write(2), whose errno is the command's error."""
    descriptor = os.open(os.path.join(tracefs, _DEFINITIONS), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)  # noqa: PTH118
    try:
        os.write(descriptor, command.encode())
    finally:
        os.close(descriptor)
