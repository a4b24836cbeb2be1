"""The one place where state changes: take facts, step the core, publish, hand out effects.

Invariants: only the engine calls the core's step. It leaves the loop to others after each batch. It steps
at ``wake_at_ns`` and at least every MAX_IDLE_NS even if nothing happens; the watchdog is fed from
here, after a completed step, so that a stuck core misses it and a stuck driver does not.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from agent.bus import Inbox, Latest
from agent.core.reducer import step
from agent.core.state import State
from agent.core.view import snapshot_of
from agent.model.effects import Effect
from agent.model.facts import Fact, Tick
from agent.model.snapshot import Snapshot

MAX_IDLE_NS: Final = 5_000_000_000

TURNS_FOR_PEERS: Final = 2
"""Turns of the loop after each batch: one to make the kubelet's message, one to write it."""


class Engine:
    """Owns the state."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        state: State,
        latest: Latest[Snapshot],
        perform: Callable[[Effect], None],
        after_step: Callable[[int], None],
        clock: Callable[[], int],
        max_idle_ns: int = MAX_IDLE_NS,
    ) -> None:
        """Take the state over.

        ``perform`` hands one effect to its owner and must not block; ``after_step`` is told the
        time after each completed round and feeds the watchdog, so ``max_idle_ns`` is below its time.
        """
        self._inbox = inbox
        self._state = state
        self._latest = latest
        self._perform = perform
        self._after_step = after_step
        self._clock = clock
        self._max_idle_ns = max_idle_ns
        self._wake_at_ns = clock()
        self._pending: deque[Fact] = deque()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            now_ns = self._clock()
            await self._inbox.wait_nonempty(min(self._wake_at_ns, now_ns + self._max_idle_ns))
            self.step_once()
            for _ in range(TURNS_FOR_PEERS):
                await asyncio.sleep(0)

    def step_once(self) -> None:
        """Take what waits and step through it; a Tick stands at the end, for what time brings.

        A fact that makes the core fail is gone when that is raised; the others wait for the next run.
        """
        batch, losses = self._inbox.take_nowait()
        self._pending.extend(losses)
        self._pending.extend(item.fact for item in batch)
        self._pending.append(Tick())
        before = self._state
        effects: list[Effect] = []
        try:
            while self._pending:
                fact = self._pending.popleft()
                self._state, new_effects, self._wake_at_ns = step(self._state, fact, self._clock())
                effects += new_effects
        finally:
            if self._state is not before:
                # Published before the effects are handed out: who acts on one reads the new state.
                self._latest.publish(snapshot_of(self._state))
            for effect in effects:
                self._perform(effect)
        self._after_step(self._clock())
