"""Which open file of a GPU refers to which open nvidiactl, which the driver keeps open for as long.

Invariants: the registration of a file without a holder, which may be in a message, stays for a time, so that
it holds again if a process receives the file. The table is bounded; the oldest entries are evicted.
Source: open-gpu-kernel-modules, escape.c (NV_ESC_REGISTER_FD), nv.c (nvidia_close).
"""

from collections.abc import Container, Iterator
from typing import Final, NamedTuple

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.rows import Removed

HALF: Final = 0xFFFFFFFF


class Registration(NamedTuple):
    """The nvidiactl that a file was registered to, and when."""

    control: int
    at_ns: int


class Registrations:
    """Registrations by file."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self._bounds: Final = bounds
        self._by_file: dict[int, Registration] = {}
        self._unheld: dict[int, int] = {}
        """Since when the file has no holder."""

    def __len__(self) -> int:
        return len(self._by_file)

    def get(self, file: int) -> Registration | None:
        """Return the registration of a file."""
        return self._by_file.get(file)

    def add(self, file: int, control: int, at_ns: int) -> None:
        """Add the registration of a file; the oldest is evicted where there is no room."""
        self._by_file.pop(file, None)
        self._by_file[file] = Registration(control, at_ns)
        while len(self._by_file) > self._bounds.registrations:
            del self._by_file[next(iter(self._by_file))]

    def remove(self, file: int, before_ns: int | None = None) -> Removed | None:
        """Remove the registration (before that time) of a closed file; return the kernel's stale row."""
        known = self._by_file.get(file)
        if known is None or (before_ns is not None and known.at_ns >= before_ns):
            return None
        del self._by_file[file]
        return Removed(file & HALF, file >> 32, known.at_ns)

    def expired(self, files: Container[int], now_ns: int) -> Iterator[Removed]:
        """Remove registrations of files that are not in ``files`` for too long; yield the stale rows."""
        self._unheld = {file: self._unheld.get(file, now_ns) for file in self._by_file if file not in files}
        for file, since_ns in tuple(self._unheld.items()):
            if now_ns - since_ns >= self._bounds.quarantine_ns and (removed := self.remove(file)) is not None:
                yield removed
