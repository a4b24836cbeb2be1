"""A cgroup of a measurement's own, and the most memory that was ever in it.

What is counted there is what the limits of units and containers are compared with: the memory of every
process in it, the kernel's for them (such as the probe's maps), and pages of files not read before.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

MOUNT: Final = Path("/sys/fs/cgroup")
_NAME: Final = f"gpu-agent-bench-{os.getpid()}"
_PEAKS: Final = ("memory.peak", "memory.max_usage_in_bytes")
"""Of cgroup v2 (since Linux 5.19) and v1."""


class MemoryCgroup(NamedTuple):
    """Where a process joins, and what is read."""

    folder: Path
    peak: str

    @property
    def processes(self) -> Path:
        """The file that a process writes its number to, to join."""
        return self.folder / "cgroup.procs"

    def highest_bytes(self) -> int:
        """Return the most that was in it at one moment."""
        return int((self.folder / self.peak).read_text())


@contextlib.contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup | None]:
    """Have a cgroup, or None where none can be had; every process in it has to have ended at the end."""
    for folder in _places():
        with contextlib.suppress(OSError):
            folder.mkdir()
        found = next((name for name in _PEAKS if (folder / name).exists()), None)
        if found is not None and os.access(folder / "cgroup.procs", os.W_OK):
            try:
                yield MemoryCgroup(folder, found)
            finally:
                folder.rmdir()
            return
        with contextlib.suppress(OSError):
            folder.rmdir()
    yield None


def _places() -> Iterator[Path]:
    """Return where one may be made: below our own in v1; beside it in v2, where only leaves count."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield (MOUNT / path.lstrip("/")).parent / _NAME if path != "/" else MOUNT / _NAME
        elif "memory" in controllers.split(","):
            yield MOUNT / "memory" / path.lstrip("/") / _NAME
