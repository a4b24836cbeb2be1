"""A consumer of facts in place of the engine: reads them from the inbox and keeps them."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from agent.bus import Inbox
from agent.model.facts import Fact

F = TypeVar("F")

PATIENCE_S = 60.0
"""Longer than anything here takes on a loaded machine; reached only when a test fails."""


class Recorder:
    """Every fact that came, in order."""

    def __init__(self) -> None:
        self.inbox: Inbox[Fact] = Inbox(clock=time.monotonic_ns)
        self.facts: list[Fact] = []
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Read facts until cancelled."""
        while True:
            await self.inbox.wait_nonempty(time.monotonic_ns() + 1_000_000_000)
            batch, _lost = self.inbox.pop_all()
            self.facts += [stamped.fact for stamped in batch]
            self._changed.set()
            self._changed = asyncio.Event()

    def of(self, kind: type[F]) -> list[F]:
        """Return the facts of a kind so far."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition on the facts holds; fails the test if it never does."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"still not so, after {self.facts[-20:]}") from None

    async def at_least(self, count: int, kind: type[F]) -> None:
        """Return once so many facts of a kind came."""
        await self.until(lambda: len(self.of(kind)) >= count)

    async def first(self, kind: type[F], matching: Callable[[F], bool] = lambda _fact: True) -> F:
        """Return the first fact of a kind that matches, once it came."""
        await self.until(lambda: any(matching(fact) for fact in self.of(kind)))
        return next(fact for fact in self.of(kind) if matching(fact))

    def forget(self) -> None:
        """Forget what came so far."""
        self.facts.clear()


async def until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds, by polling it; fails the test if it never does."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError("still not so") from None
