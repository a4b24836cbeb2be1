"""The one place where state changes: pop facts, step the core, publish, hand out effects.

Invariants: only the engine calls the core's step. It leaves the loop to others after each batch. It steps
at ``wake_at_ns`` and at least every MAX_IDLE_NS even if nothing happens; the watchdog is fed from
here, after a completed step, so that a stuck core misses it and a stuck driver does not.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from agent.bus import Inbox, Latest
from agent.core.freshness import Freshness, Terms, check_components, proven_by
from agent.core.health.process import substitute
from agent.core.health.reducer import step
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import State
from agent.model.components import ENGINE, GPU_PROBER
from agent.model.effects import Effect, RestartComponent
from agent.model.facts import ComponentsStale, Fact, Tick
from agent.model.ids import ComponentId, GpuUuid
from agent.model.snapshot import Snapshot
from agent.proofs import Proofs

_log = logging.getLogger(__name__)

MAX_IDLE_NS: Final = 5_000_000_000

GAP_S: Final = 0.001
"""After each batch: what comes meanwhile is one batch, so a storm of facts costs a bounded number of
steps. The first fact after a quiet moment does not wait."""

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
        proofs: Proofs,
        probe_terms: Terms,
        max_idle_ns: int = MAX_IDLE_NS,
    ) -> None:
        """Take the state over.

        ``perform`` hands one effect to its owner and must not block; ``after_step`` is called with the
        time after each completed round and feeds the watchdog, so ``max_idle_ns`` is below its time.
        ``probe_terms`` are those of each GPU's prober.
        """
        self._inbox = inbox
        self._state = state
        self._latest = latest
        self._perform = perform
        self._after_step = after_step
        self._clock = clock
        self._max_idle_ns = max_idle_ns
        self._proofs = proofs
        self._probe_terms = probe_terms
        self._freshness = Freshness()
        self._due_gpus: frozenset[GpuUuid] = frozenset()
        self._wake_at_ns = clock()
        self._pending: deque[Fact] = deque()
        self._effects: list[Effect] = []
        """Those to be performed."""
        self._failed: Fact | None = None
        """The fact on which the core failed last."""

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            now_ns = self._clock()
            due_ns = self._freshness.due_ns or self._wake_at_ns
            await self._inbox.wait_nonempty(min(self._wake_at_ns, due_ns, now_ns + self._max_idle_ns))
            try:
                self._step()
                # The kubelet gets its list before any effect writes a line or wakes a thread.
                for _ in range(TURNS_FOR_PEERS):
                    await asyncio.sleep(0)
            finally:
                self._perform_effects()
            await asyncio.sleep(GAP_S)

    def step_once(self) -> None:
        """Step through what waits, and perform the effects."""
        try:
            self._step()
        finally:
            self._perform_effects()

    def _perform_effects(self) -> None:
        effects, self._effects = self._effects, []
        for effect in effects:
            self._perform(effect)

    def _step(self) -> None:
        """Take what waits and step through it; a Tick stands at the end, for what time brings.

        A fact that makes the core fail is tried again by the next run, before all others. If it fails again,
        the GPU that it is about (or each, if it is about none) is unknown until a new process begins.
        """
        batch, losses = self._inbox.pop_all()
        self._pending.extend(losses)
        self._pending.extend(item.fact for item in batch)
        before = self._state
        try:
            self._step_pending()
            self._effects += self._update_freshness()
            self._pending.append(Tick())
            self._step_pending()
        finally:
            if self._state is not before:
                # Published before the effects are performed: what executes one reads the new state.
                self._latest.publish(snapshot_of(self._state))
        if self._state.due_gpus != self._due_gpus:
            self._due_gpus = self._state.due_gpus
            self._proofs.follow(GPU_PROBER, self._due_gpus, self._probe_terms)
        self._proofs.prove(ComponentId(ENGINE))
        self._after_step(self._clock())

    def _step_pending(self) -> None:
        while self._pending:
            fact = self._pending[0]
            try:
                stepped = step(self._state, fact, self._clock())
            except Exception as error:
                if isinstance(fact, Tick):
                    self._pending.popleft()
                    raise
                if fact is not self._failed:
                    self._failed = fact
                    raise
                _log.exception("Discarded a fact that could not be applied twice: %s", fact)
                stepped = step(self._state, substitute(self._state, fact, error), self._clock())
            self._pending.popleft()
            self._state, new_effects, self._wake_at_ns = stepped
            self._effects += new_effects
            component = proven_by(fact)
            if component is not None:
                self._proofs.prove(component)

    def _update_freshness(self) -> list[Effect]:
        """Note which components are stale and return the restarts that this asks for."""
        self._freshness = check_components(self._freshness, self._proofs.expected(), self._clock())
        stale, covered = self._freshness.stale, self._freshness.covered
        if (stale, covered) != (self._state.stale, self._state.covered):
            self._pending.append(ComponentsStale(stale, covered))
        return [RestartComponent(component) for component in self._freshness.restart]
