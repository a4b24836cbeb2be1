"""The internal event bus: one bounded inbox of facts, and cells that hold the latest state.

Guarantees:

1. A fact with a key is never lost. While it waits, a newer one of the same key is merged into it,
   so the room for such facts is the number of keys.
2. A fact without a key may be dropped when CAPACITY facts wait. Each drop is counted by source and
   the loss is itself delivered, as a FactsLost, with the next batch: ``seen + lost == sent``.
3. Putting never blocks and may be done from any thread, also one with a file descriptor table of
   its own, as long as that table holds ``wake_fd``. The loop is woken once for each batch.
4. Latest never queues: a slow reader skips versions, but always gets the last one.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

import msgspec

from agent.counts import Count
from agent.model.facts import FactsLost, Message
from agent.model.ids import SourceName

CAPACITY: Final = 65_536
"""Facts without a key that may wait."""

MAX_LOST_SOURCES: Final = 64
"""Sources whose losses are counted apart; more would be a bug, and are counted as the last one."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class Stamped(msgspec.Struct, Generic[M], frozen=True):
    """A fact and when it (or the first one merged into it) was put, monotonic nanoseconds."""

    fact: M
    at_ns: int


class InboxStatistics(msgspec.Struct, frozen=True):
    """Counts since the start; ``put == popped + merged + lost + waiting``."""

    put: int
    popped: int
    merged: int
    lost: int
    waiting: int
    wakeups: int


class Inbox(Generic[M]):
    """The bounded queue of facts; see the guarantees above."""

    facts = Count("facts_total", "facts", "Facts that sources put into the inbox.")
    merged = Count("facts_merged_total", "facts", "Facts that were merged into one that waited.")
    dropped = Count("facts_lost_total", "facts", "Facts without a key dropped because too many waited.")
    wakeups = Count("inbox_wakeups_total", "wakeups", "How often facts woke the engine.")

    def __init__(self, *, clock: Callable[[], int], capacity: int = CAPACITY) -> None:
        self._clock = clock
        self._capacity = capacity
        self._lock = threading.Lock()
        # One dictionary keeps one order. A fact without a key waits under an object of its own.
        self._waiting: dict[Hashable, Stamped[M]] = {}
        self._keyless = 0
        self._lost: dict[SourceName, int] = {}
        self._popped = 0
        self.wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Written to wake the loop; a thread with its own descriptor table must keep it."""

    def close(self) -> None:
        """Release the wake descriptor; the inbox may not be used afterwards."""
        os.close(self.wake_fd)

    def put(self, fact: M) -> None:
        """Append or merge a fact, from any thread, without blocking."""
        now_ns = self._clock()
        key = fact.key
        with self._lock:
            was_empty = not (self._waiting or self._lost)
            self.facts += 1
            if key is None:
                self._put_keyless(Stamped(fact, now_ns))
            else:
                waiting = self._waiting.pop(key, None)
                if waiting is None:
                    self._waiting[key] = Stamped(fact, now_ns)
                else:
                    self.merged += 1
                    self._waiting[key] = Stamped(waiting.fact.merged_with(fact), waiting.at_ns)
            if was_empty:
                self.wakeups += 1
        if was_empty:
            os.eventfd_write(self.wake_fd, 1)

    def _put_keyless(self, item: Stamped[M]) -> None:
        if self._keyless < self._capacity:
            self._keyless += 1
            self._waiting[object()] = item
            return
        self.dropped += 1
        source = item.fact.source
        if source not in self._lost and len(self._lost) >= MAX_LOST_SOURCES:
            source = next(reversed(self._lost))
        self._lost[source] = self._lost.get(source, 0) + 1

    def pop_all(self) -> tuple[list[Stamped[M]], list[FactsLost]]:
        """Return everything that waits, in the order it was put, and what was lost before it."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            lost, self._lost = self._lost, {}
            self._keyless = 0
            self._popped += len(waiting)
        losses = [FactsLost(lost_from=source, count=count) for source, count in lost.items()]
        return list(waiting.values()), losses

    async def wait_nonempty(self, until_ns: int) -> None:
        """Return when something waits, or at ``until_ns`` of the inbox's clock."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(max(0, until_ns - self._clock()) / 1e9, _finish, woken)
        loop.add_reader(self.wake_fd, _finish, woken)
        try:
            if not self._has_waiting():
                await woken
        finally:
            loop.remove_reader(self.wake_fd)
            timer.cancel()
            self._drain_wake_fd()

    def _has_waiting(self) -> bool:
        with self._lock:
            return bool(self._waiting or self._lost)

    def _drain_wake_fd(self) -> None:
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return

    def statistics(self) -> InboxStatistics:
        """Return the counts at this moment."""
        with self._lock:
            return InboxStatistics(
                put=self.facts,
                popped=self._popped,
                merged=self.merged,
                lost=self.dropped,
                waiting=len(self._waiting),
                wakeups=self.wakeups,
            )


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Latest(Generic[T]):
    """A cell that holds the newest version of a value. To be used on the loop's thread only.

    Readers are woken in two classes: those that serve a waiting peer, and one turn later all others,
    so that writing a file or a status line never comes before the answer.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._changed: asyncio.Event | None = None
        self._changed_for_first: asyncio.Event | None = None

    @property
    def value(self) -> T:
        """The newest value."""
        return self._value

    @property
    def version(self) -> int:
        """Number of publications so far."""
        return self._version

    def publish(self, value: T) -> None:
        """Replace the value and wake every reader that waits for a newer one."""
        self._value = value
        self._version += 1
        if self._changed_for_first is not None:
            self._changed_for_first.set()
            self._changed_for_first = None
        if self._changed is not None:
            asyncio.get_running_loop().call_soon(self._changed.set)
            self._changed = None

    async def wait_newer(self, version: int) -> int:
        """Return the newest version once it is above ``version``; then read ``value``."""
        while self._version <= version:
            if self._changed is None:
                self._changed = asyncio.Event()
            await self._changed.wait()
        return self._version

    async def wait_for(self, is_shown: Callable[[T], bool], within_s: float) -> bool:
        """Wait until a value shows what is wanted; return whether one did in time."""
        version = self._version
        try:
            async with asyncio.timeout(within_s):
                while not is_shown(self._value):
                    version = await self.wait_newer(version)
        except TimeoutError:
            return is_shown(self._value)
        return True

    async def wait_newer_first(self, version: int) -> int:
        """As ``wait_newer``, but woken before its callers: for what a peer waits for."""
        while self._version <= version:
            if self._changed_for_first is None:
                self._changed_for_first = asyncio.Event()
            await self._changed_for_first.wait()
        return self._version
