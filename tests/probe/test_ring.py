"""The reader of the ring, on a ring in plain memory, and subscribed on a real one."""

import asyncio
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.model.rm import RmEvent, RmEventKind
from agent.probe.layout import EVENT
from agent.probe.ring import EVENTS, Ring
from tests.probe.caller import ran
from tests.probe.conftest import LoadProbe

SIZE = 4096
PAGE = mmap.PAGESIZE
BUSY, DISCARDED = 1 << 31, 1 << 30
RECORD = EVENT.size + 8


class SimulatedRing:
    """The kernel's side of a ring, in a file."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ring")
        os.ftruncate(self.descriptor, 2 * PAGE + 2 * SIZE)
        self.position = 0

    def write(self, payload: bytes, flags: int = 0) -> int:
        """Write a record and return where it began."""
        began = self.position
        record = struct.pack("=II", len(payload) | flags, 0) + payload
        for offset, byte in enumerate(record + bytes(-len(record) % 8)):
            at = (began + offset) % SIZE
            # The kernel maps the data twice, one after the other.
            for copy in (at, at + SIZE):
                os.pwrite(self.descriptor, bytes([byte]), 2 * PAGE + copy)
        self.set_producer(began + len(record) + -len(record) % 8)
        return began

    def set_producer(self, position: int) -> None:
        self.position = position
        os.pwrite(self.descriptor, struct.pack("=Q", position), PAGE)

    def set_header(self, at: int, value: int) -> None:
        for copy in (at % SIZE, at % SIZE + SIZE):
            os.pwrite(self.descriptor, struct.pack("=I", value), 2 * PAGE + copy)

    @property
    def consumed(self) -> int:
        (position,) = struct.unpack("=Q", os.pread(self.descriptor, 8, 0))
        assert isinstance(position, int)
        return position


@pytest.fixture
def producer() -> Iterator[SimulatedRing]:
    one = SimulatedRing()
    yield one
    os.close(one.descriptor)


@pytest.fixture
def ring(producer: SimulatedRing) -> Iterator[Ring[RmEvent]]:
    one = Ring(producer.descriptor, SIZE, EVENTS)
    yield one
    one.close()


def payload(handle: int, kind: int = RmEventKind.ALLOC) -> bytes:
    return EVENT.pack(1, 2, 3, 4, 5, 6, -1, kind, 7, 8, 9, handle, 10)


def test_events_come_in_order_and_once(producer: SimulatedRing, ring: Ring[RmEvent]) -> None:
    for handle in range(3):
        producer.write(payload(handle))

    assert [event.handle for event in ring.read()] == [0, 1, 2]
    assert ring.read() == []
    assert producer.consumed == producer.position == 3 * RECORD


def test_an_event_has_its_fields(producer: SimulatedRing, ring: Ring[RmEvent]) -> None:
    producer.write(payload(77))

    assert ring.read() == [RmEvent(1, 2, 3, 4, 5, 6, -1, RmEventKind.ALLOC, 7, 8, 9, 77, 10)]


def test_the_ring_goes_round_many_times(producer: SimulatedRing, ring: Ring[RmEvent]) -> None:
    seen = []
    for handle in range(300):
        producer.write(payload(handle))
        if handle % 7 == 6:
            seen += [event.handle for event in ring.read()]
    seen += [event.handle for event in ring.read()]

    assert seen == list(range(300))


def test_a_record_that_is_being_written_is_waited_for(producer: SimulatedRing, ring: Ring[RmEvent]) -> None:
    producer.write(payload(1))
    began = producer.write(payload(2), BUSY)
    producer.write(payload(3))

    assert [event.handle for event in ring.read()] == [1]
    producer.set_header(began, EVENT.size)
    assert [event.handle for event in ring.read()] == [2, 3]


def test_a_discarded_record_is_skipped(producer: SimulatedRing, ring: Ring[RmEvent]) -> None:
    producer.write(payload(1), DISCARDED)
    producer.write(payload(2))

    assert [event.handle for event in ring.read()] == [2]
    assert ring.unknown == 0


@pytest.mark.parametrize("odd", [b"", b"short", payload(1, kind=99), payload(1) + b"more"])
def test_an_invalid_record_is_counted_and_skipped(
    producer: SimulatedRing, ring: Ring[RmEvent], odd: bytes
) -> None:
    producer.write(odd)
    producer.write(payload(2))

    assert [event.handle for event in ring.read()] == [2]
    assert (ring.unknown, ring.received) == (1, 1)


def test_an_invalid_position_continues_at_the_newest_record(
    producer: SimulatedRing, ring: Ring[RmEvent]
) -> None:
    producer.set_producer(10 * SIZE)

    assert ring.read() == []
    assert ring.unknown == 1
    producer.write(payload(5))
    assert [event.handle for event in ring.read()] == [5]


def test_a_batch_is_bounded(
    producer: SimulatedRing, ring: Ring[RmEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ring, "BATCH", 10)
    for handle in range(25):
        producer.write(payload(handle))

    assert [len(ring.read()) for _ in range(4)] == [10, 10, 5, 0]


async def test_a_receiver_that_raises_neither_spins_nor_stops_the_reader(
    load_probe: LoadProbe, core: dict[str, object], gpu: Path
) -> None:
    loop = asyncio.get_running_loop()
    probe = await loop.run_in_executor(None, lambda: load_probe(**core))
    calls: list[list[RmEvent]] = []
    delivered = asyncio.Event()

    def deliver(events: list[RmEvent]) -> None:
        calls.append(events)
        delivered.set()
        raise ValueError("a bug")

    probe.ring.subscribe(loop, deliver)
    pid = 0
    for _ in range(2):
        delivered.clear()
        pid = await loop.run_in_executor(None, ran, "os.open(sys.argv[1], os.O_RDWR)", gpu)
        await asyncio.wait_for(delivered.wait(), 10)
    while not any(event.tgid == pid for batch in calls for event in batch):
        delivered.clear()
        await asyncio.wait_for(delivered.wait(), 10)

    assert probe.ring.failures == len(calls)
    assert probe.ring.pending_bytes < SIZE


async def test_events_reach_the_loop_by_themselves(
    load_probe: LoadProbe, core: dict[str, object], gpu: Path
) -> None:
    loop = asyncio.get_running_loop()
    probe = await loop.run_in_executor(None, lambda: load_probe(**core))
    seen: asyncio.Queue[RmEvent] = asyncio.Queue()

    def deliver(events: list[RmEvent]) -> None:
        for event in events:
            seen.put_nowait(event)

    probe.ring.subscribe(loop, deliver)

    pid = await loop.run_in_executor(None, ran, "os.open(sys.argv[1], os.O_RDWR)", gpu)

    kinds: list[RmEventKind] = []
    while RmEventKind.EXIT not in kinds:
        event = await asyncio.wait_for(seen.get(), 10)
        if event.tgid == pid:
            kinds.append(event.kind)
    assert kinds == [RmEventKind.OPEN, RmEventKind.EXIT]
