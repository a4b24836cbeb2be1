"""Limits repeated events to one record a minute, with their count.

Invariants: the first of its kind is recorded at once, those of the minute after it as one with the sum of
their counts, so that no event is lost or delayed for longer. Pending events are bounded, with a share for
each GPU; a full table records the evicted one at once.
"""

from collections.abc import Hashable
from typing import Final

import msgspec

from agent.core.shares import Shares
from agent.model.effects import EventKind, RecordEvent
from agent.model.structs import replace

PERIOD_NS: Final = 60_000_000_000
MAX_KINDS: Final = 1024
"""Kinds of events with a minute of their own; a GPU has some hundred XIDs."""
MAX_OF_GPU: Final = 256

_REPEATING: Final = frozenset({EventKind.XID, EventKind.LOSS})
"""Kinds that repeat; every other kind is a change of state, and two changes are no repetition."""
_VARYING: Final = frozenset({"count", "total"})


class _Minute(msgspec.Struct):
    """The events of one kind since its last record."""

    since_ns: int
    last: RecordEvent | None = None
    count: int = 0


class Repeats:
    """Decides which events are recorded now."""

    def __init__(
        self, *, period_ns: int = PERIOD_NS, max_kinds: int = MAX_KINDS, max_of_gpu: int = MAX_OF_GPU
    ) -> None:
        self._period_ns = period_ns
        # Ordered by start: a minute is inserted when it begins and not moved when it counts.
        self._minutes: Shares[Hashable, Hashable, _Minute] = Shares(max_kinds, max_of_gpu)

    def admitted(self, effect: RecordEvent) -> list[RecordEvent]:
        """Return the events to record now that this one happened: it, none, or older ones too."""
        if effect.event.kind not in _REPEATING:
            return [effect]
        found = self.due(effect.at_ns)
        fields = effect.event.fields or {}
        name = (
            effect.event.kind,
            effect.event.message,
            tuple(sorted((key, str(value)) for key, value in fields.items() if key not in _VARYING)),
        )
        known = self._minutes.get(name)
        if known is not None:
            minute = known.value
            minute.last = effect
            minute.count += _count_of(effect)
            return found
        client = fields.get("uuid") or fields.get("pci") or fields.get("source")
        for lost in self._minutes.put(client, name, _Minute(effect.at_ns)):
            found += _summed(lost.value, effect.at_ns)
        return [*found, effect]

    def due(self, now_ns: int) -> list[RecordEvent]:
        """Return the events whose minute is over."""
        found: list[RecordEvent] = []
        while (entry := next(iter(self._minutes), None)) is not None:
            if entry.value.since_ns + self._period_ns > now_ns:
                break
            self._minutes.pop(entry.key)
            if entry.value.last is not None:
                # The record begins another minute.
                self._minutes.put(entry.client, entry.key, _Minute(now_ns))
                found += _summed(entry.value, now_ns)
        return found

    def rest(self, now_ns: int) -> list[RecordEvent]:
        """Return all pending events, for the shutdown."""
        found = [event for entry in self._minutes for event in _summed(entry.value, now_ns)]
        self._minutes = Shares(self._minutes.total, self._minutes.share)
        return found

    @property
    def due_ns(self) -> int | None:
        """When the next pending event is due; None: none is pending."""
        waiting = [each.value.since_ns for each in self._minutes if each.value.last is not None]
        return waiting[0] + self._period_ns if waiting else None


def _count_of(effect: RecordEvent) -> int:
    count = (effect.event.fields or {}).get("count", 1)
    return count if isinstance(count, int) else 1


def _summed(minute: _Minute, now_ns: int) -> list[RecordEvent]:
    """Return one event with the present time for all since the last record."""
    if minute.last is None:
        return []
    event = minute.last.event
    return [RecordEvent(replace(event, fields={**(event.fields or {}), "count": minute.count}), now_ns)]
