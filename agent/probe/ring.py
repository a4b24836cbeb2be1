"""Reads the ring buffer that the programs write lifecycle events to, by mmap, without libbpf.

Guarantees: an invalid record is skipped and counted, never waited for; whatever the receiver does,
the consumer's position advances, so the loop does not spin. At most BATCH events are read at once; the
rest keeps the descriptor readable.
Source: Documentation/bpf/ringbuf.rst. x86-64's loads are ordered, so plain ones suffice.
"""

import asyncio
import logging
import mmap
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from agent import guard
from agent.counts import Count
from agent.log import about
from agent.probe.layout import EVENT, TRACED, decode_event, decode_traced

_log = logging.getLogger(__name__)

_PAGE: Final = mmap.PAGESIZE
_BUSY: Final = 1 << 31
_DISCARDED: Final = 1 << 30
_LENGTH: Final = _DISCARDED - 1
_HEADER_BYTES: Final = 8

E = TypeVar("E")


class RecordFormat(NamedTuple, Generic[E]):
    """The format of a ring: records of one size."""

    size: int
    decode: Callable[[memoryview, int], E | None]
    """Returns the record at an offset; None: it is invalid."""


EVENTS: Final = RecordFormat(EVENT.size, decode_event)
TRACED_CALLS: Final = RecordFormat(TRACED.size, decode_traced)


class Ring(Generic[E]):
    """The consumer's side; one per map."""

    BATCH: Final = 512
    """Events read at once: with their handling by the agent, about 2 ms."""

    received = Count("probe_events_received_total", "events", "Events read from the probe's ring.")
    unknown = Count("probe_events_invalid_total", "events", "Invalid records in the probe's ring.")
    failures = Count("probe_events_failures_total", "failures", "Batches of events whose receiver raised.")

    def __init__(self, descriptor: int, size: int, records: RecordFormat[E]) -> None:
        """Map a ring of ``size`` bytes, a power of two; the caller still owns the descriptor."""
        self._descriptor = descriptor
        self._records = records
        self._mask = size - 1
        self._size = size
        self._consumer_map = mmap.mmap(descriptor, _PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        # The data follow twice, so that a record never wraps.
        self._producer_map = mmap.mmap(
            descriptor, _PAGE + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=_PAGE
        )
        self._consumer = memoryview(self._consumer_map).cast("Q")
        self._producer = memoryview(self._producer_map)[:_PAGE].cast("Q")
        self._data = memoryview(self._producer_map)[_PAGE:]
        self._lengths = self._data.cast("I")
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes not read yet."""
        return self._producer[0] - self._consumer[0]

    def skip(self) -> None:
        """Skip everything not read yet."""
        self._consumer[0] = self._producer[0]

    def fileno(self) -> int:
        """Return the descriptor; it is readable while there is something to read."""
        return self._descriptor

    def read(self) -> list[E]:
        """Return the events that are complete, at most BATCH."""
        events: list[E] = []
        position, end = self._consumer[0], self._producer[0]
        if end - position > self._size:  # an invalid position: continue at the newest
            self.unknown += 1
            self._consumer[0] = end
            return events
        count = 0
        while position < end and count < self.BATCH:
            offset = position & self._mask
            header = self._lengths[offset >> 2]
            if header & _BUSY:
                break
            length = header & _LENGTH
            if not header & _DISCARDED:
                is_whole = length == self._records.size
                event = self._records.decode(self._data, offset + _HEADER_BYTES) if is_whole else None
                if event is None:
                    self.unknown += 1
                else:
                    events.append(event)
            position += (length + _HEADER_BYTES + 7) & ~7
            count += 1
        self._consumer[0] = position
        self.received += len(events)
        return events

    def subscribe(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[E]], None]) -> None:
        """Call ``deliver`` on the loop with every event, batch by batch, from now on."""

        def readable() -> None:
            try:
                if events := self.read():
                    deliver(events)
            except Exception as error:  # noqa: BLE001 - the loop would spin otherwise
                self.failures += 1
                _log.exception("Could not read events of the probe: %(error)s", about(error=str(error)))

        self.unsubscribe()
        self._loop = loop
        guard.add_reader("probe-ring", self._descriptor, readable)

    def unsubscribe(self) -> None:
        """Deliver no more events."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None

    def close(self) -> None:
        """Unmap the ring; nothing may be read afterwards."""
        self.unsubscribe()
        for view in (self._lengths, self._data, self._producer, self._consumer):
            view.release()
        self._producer_map.close()
        self._consumer_map.close()
