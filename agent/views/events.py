"""The recent entries of the event log, numbered.

Invariants: holds MAX_EVENTS entries, with a share for each GPU and kind of event, so that events that a
program repeats evict no fault and no command; numbers increase by one without a gap, so a reader can detect
the entries that it missed. For the loop's thread only.
"""

import asyncio
from collections.abc import Hashable, Iterator
from typing import Final

import msgspec

from agent.core.shares import Shares
from agent.model.effects import Event, EventKind, RecordEvent
from agent.model.health import Evidence

MAX_EVENTS: Final = 1024
"""Entries kept; some 300 bytes each."""


class Entry(msgspec.Struct, frozen=True):
    """One event with its number and its moment."""

    number: int
    at_ns: int
    event: Event


def is_of_node(event: Event) -> bool:
    """Return whether an event is the node's: a fault, a command; False: a program can cause it at will."""
    if event.kind in {EventKind.XID, EventKind.LOSS}:
        return False
    return (event.fields or {}).get("evidence") != Evidence.SOFT


def _client_of(event: Event) -> Hashable:
    fields = event.fields or {}
    return (event.kind, fields.get("uuid"), fields.get("xid", fields.get("reason")))


class EventRing:
    """The newest entries, the oldest first."""

    def __init__(self, capacity: int = MAX_EVENTS) -> None:
        self._entries: Shares[Hashable, int, Entry] = Shares(capacity)
        self._last = 0
        self._appended = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the newest entry, 0 before the first."""
        return self._last

    def record(self, effect: RecordEvent) -> Entry:
        """Append and return an entry; a full ring evicts one of the most frequent events."""
        self._last += 1
        entry = Entry(self._last, effect.at_ns, effect.event)
        self._entries.put(_client_of(effect.event), entry.number, entry)
        self._appended.set()
        self._appended = asyncio.Event()
        return entry

    def since(self, number: int) -> tuple[Entry, ...]:
        """Return the entries after a number, oldest first."""
        return tuple(each.value for each in self._entries if each.key > number)

    def newest_first(self) -> Iterator[Entry]:
        """Return the entries, the newest one first."""
        return (each.value for each in reversed(self._entries))

    async def wait_newer(self, number: int) -> None:
        """Wait until there is an entry after a number."""
        while self._last <= number:
            await self._appended.wait()
