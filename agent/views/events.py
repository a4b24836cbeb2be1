"""The recent entries of the event log, numbered, for those who ask what happened.

Invariants: holds the newest MAX_EVENTS entries; numbers go up by one for ever, so a reader who
was away too long can tell that it missed some. To be used on the loop's thread only.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agent.model.effects import Event, RecordEvent

MAX_EVENTS: Final = 1024
"""Entries kept; some 300 bytes each."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event with its number and its moment."""

    number: int
    at_ns: int
    event: Event


class EventRing:
    """The newest entries."""

    def __init__(self, capacity: int = MAX_EVENTS) -> None:
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._last = 0
        self._appended = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the newest entry, 0 before the first."""
        return self._last

    def record(self, effect: RecordEvent) -> Entry:
        """Append and return an entry; the oldest one goes when there is no room."""
        self._last += 1
        entry = Entry(self._last, effect.at_ns, effect.event)
        self._entries.append(entry)
        self._appended.set()
        self._appended = asyncio.Event()
        return entry

    def since(self, number: int) -> tuple[Entry, ...]:
        """Return the entries after a number, oldest first; the first one tells if some were missed."""
        return tuple(entry for entry in self._entries if entry.number > number)

    def newest_first(self) -> Iterator[Entry]:
        """Return the entries, the newest one first."""
        return reversed(self._entries)

    async def wait_newer(self, number: int) -> None:
        """Return once there is an entry after a number."""
        while self._last <= number:
            await self._appended.wait()
