"""Runs updates of the tracker one after the other, and long ones in steps.

Invariants: between two steps the loop is free; updates that arrive meanwhile wait, and run in order after the
last step. The queue is bounded; updates beyond the bound are dropped and counted.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

MAX_WAITING: Final = 65_536
"""Events that wait for the end of a long update: two thirds of a second of the highest rate."""
AT_ONCE: Final = 2
"""Batches of them that run without a pause: about 4 ms. The ring delivers one in each turn of the loop."""


class StepScheduler:
    """The queue of updates, and whether a long one is running."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._is_busy = False
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._room = max_waiting
        self._dropped = 0

    def submit(self, update: Callable[[], None], size: int) -> None:
        """Run an update of so many events, now or after the long one and those queued before it."""
        if not self._is_busy:
            update()
        elif size > self._room:
            self._dropped += size
        else:
            self._room -= size
            self._waiting.append((update, size))

    async def run(self, steps: Iterator[None]) -> int:
        """Run the steps, then the queued updates; return how many events were dropped for want of room.

        After a cancellation between two steps the partial update is unusable.
        """
        self._is_busy = True
        for _ in steps:
            await asyncio.sleep(0)
        while self._waiting:
            # More than can arrive in one turn of the loop, or a storm of events would never let this return.
            for _ in range(min(AT_ONCE, len(self._waiting))):
                update, size = self._waiting.popleft()
                self._room += size
                update()
            if self._waiting:
                await asyncio.sleep(0)
        self._is_busy = False
        dropped, self._dropped = self._dropped, 0
        return dropped
