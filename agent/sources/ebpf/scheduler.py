"""Tells the tracker one thing at a time, although what takes long is taken in steps.

Invariants: between two steps the loop is free; what is told meanwhile waits, and is told in order when the
last step was taken. What waits is bounded; what has no room is counted.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

MAX_WAITING: Final = 65_536
"""Events that wait for the end of what takes long: two thirds of a second of the highest rate."""
AT_ONCE: Final = 2
"""Batches of them that are told without a pause: about 4 ms. The ring gives one in each turn of the loop."""


class Turns:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._room = MAX_WAITING
        self._unheard = 0

    def tell(self, tell: Callable[[], None], size: int) -> None:
        """Tell something of so many events, now or when its turn comes."""
        if not self._is_busy:
            tell()
        elif size > self._room:
            self._unheard += size
        else:
            self._room -= size
            self._waiting.append((tell, size))

    async def take(self, steps: Iterator[None]) -> int:
        """Take steps, then what has waited; return how many events had no room and were not told.

        Cancelled between two steps, what was taken in part is good for nothing.
        """
        self._is_busy = True
        for _ in steps:
            await asyncio.sleep(0)
        while self._waiting:
            # More than can come in one turn of the loop, or a storm of events would keep this for ever.
            for _ in range(min(AT_ONCE, len(self._waiting))):
                tell, size = self._waiting.popleft()
                self._room += size
                tell()
            if self._waiting:
                await asyncio.sleep(0)
        self._is_busy = False
        unheard, self._unheard = self._unheard, 0
        return unheard
