"""Which open file of a GPU keeps which open nvidiactl: the driver refers to the one until the other ends.

Invariants: what is known of a file that nobody is seen to hold, which may be in a message, is kept for a
time, so that it is as before if somebody receives it. There is room for so many; of more the oldest go.
Source: open-gpu-kernel-modules, escape.c (NV_ESC_REGISTER_FD), nv.c (nvidia_close).
"""

from collections.abc import Container, Iterator
from typing import Final, NamedTuple

from agent.core.usage.quarantine import QUARANTINE_NS
from agent.core.usage.rows import Removed

MAX_REGISTRATIONS: Final = 65_536
HALF: Final = 0xFFFFFFFF


class Registration(NamedTuple):
    """That a file was registered."""

    control: int
    at_ns: int


class Registrations:
    """By file."""

    def __init__(self, room: int = MAX_REGISTRATIONS) -> None:
        self._room = room
        self._by_file: dict[int, Registration] = {}
        self._unheld: dict[int, int] = {}
        """Since when nobody is seen to hold the file."""

    def __len__(self) -> int:
        return len(self._by_file)

    def get(self, file: int) -> Registration | None:
        """Return what a file was registered to."""
        return self._by_file.get(file)

    def add(self, file: int, control: int, at_ns: int) -> None:
        """Take that a file was registered."""
        self._by_file.pop(file, None)
        self._by_file[file] = Registration(control, at_ns)
        while len(self._by_file) > self._room:
            del self._by_file[next(iter(self._by_file))]

    def remove(self, file: int, before_ns: int | None = None) -> Removed | None:
        """Take that a file is gone; return the kernel's row, which is stale (if it is older than that)."""
        known = self._by_file.get(file)
        if known is None or (before_ns is not None and known.at_ns >= before_ns):
            return None
        del self._by_file[file]
        return Removed(file & HALF, file >> 32, known.at_ns)

    def expired(self, files: Container[int], now_ns: int) -> Iterator[Removed]:
        """Take which files there are; yield the rows of those that nobody was seen to hold for long."""
        self._unheld = {file: self._unheld.get(file, now_ns) for file in self._by_file if file not in files}
        for file, since_ns in tuple(self._unheld.items()):
            if now_ns - since_ns >= QUARANTINE_NS and (removed := self.remove(file)) is not None:
                yield removed
