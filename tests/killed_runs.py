"""A run of tests that is killed leaves no process, and no directory beyond the next run.

Guarantees: what is started with WITH_US ends with the process that started it. The directory of a run that
goes on is never removed, since that run holds its lock; nor is one that is not marked as ours, or in which
something is mounted.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

WITH_US: Final = ("setpriv", "--pdeathsig=KILL")
"""Put before a command: the kernel kills it when this process ends, however that happens."""

LOCK: Final = ".run-of-tests"


@contextmanager
def held(base: Path, prefix: str) -> Iterator[Path]:
    """Make a directory with a name that begins so, hold it, and remove it at the end."""
    remove_stale(base, prefix)
    place = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    # Tests that become another user reach what they share with that user.
    place.chmod(0o711)
    draft = place / "draft"
    with draft.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # From here on another run could remove it, if the lock were free.
            draft.rename(place / LOCK)
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def remove_stale(base: Path, prefix: str) -> None:
    """Remove what killed runs left."""
    for mark in base.glob(f"{prefix}*/{LOCK}"):
        place = mark.parent
        with suppress(OSError):
            if place.is_symlink() or place.stat().st_uid != os.geteuid() or has_mounts(place):
                continue
            with mark.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)


def has_mounts(place: Path) -> bool:
    """Whether something is mounted in a directory, which would be emptied with it."""
    below = f"{place.resolve()}/"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(f"{line.split()[4]}/".startswith(below) for line in lines)
