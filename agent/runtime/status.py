"""The signs of life of one agent."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from agent.core.freshness import Watch
from agent.model.components import ENGINE, LOOP
from agent.model.ids import ComponentId, SourceName
from agent.proofs import Proofs

if TYPE_CHECKING:
    from agent.runtime.bootstrap import DisabledComponent
    from agent.runtime.event_recorder import EventRecorder
    from agent.runtime.state_store import StateStore
    from agent.sinks.plugin.sink import DevicePlugin

LAG_PERIOD_S: Final = 0.5


class Component(msgspec.Struct, frozen=True):
    """A source or sink that is to run, as health checks show it."""

    name: SourceName
    kind: Literal["source", "sink"]
    trouble: Callable[[], str | None]
    """Why it does not do its work although it runs; None: it does."""

    @property
    def check(self) -> str:
        """The name of its check."""
        return f"{self.kind}-{self.name}"


class RuntimeStatus(msgspec.Struct):
    """The signs of life of one agent; the composition root keeps them true."""

    recorder: "EventRecorder"
    state: "StateStore"
    began_ns: int
    stepped_ns: int
    """When the engine completed its last step, or a standing-by agent its last poll."""
    lag_ns: int = 0
    """How late the event loop was when it was last measured."""
    off: tuple["DisabledComponent", ...] = ()
    """Components that are disabled, because the agent was not given what they need."""
    is_standby: bool = True
    is_stopping: bool = False
    reload_trouble: str | None = None
    """Why the last reload was rejected."""
    awaiting_restart: tuple[str, ...] = ()
    """Options that were changed and take effect at the next start."""
    components: list[Component] = msgspec.field(default_factory=list)
    expected: Callable[[], Iterable[ComponentId]] = tuple
    """The components that have to give proofs now."""
    device_plugin: "DevicePlugin | None" = None

    @property
    def phase(self) -> str:
        """Where the agent is in its life, in a word."""
        if self.is_stopping:
            return "stopping"
        return "standby" if self.is_standby else "serving"


async def measure_lag(
    status: RuntimeStatus, proofs: Proofs, restart: Callable[[ComponentId], None], *, clock: Callable[[], int]
) -> None:
    """Measure until cancelled how late the event loop is, and restart the engine if it is stale.

    The engine checks every component but itself; this is one that it checks.
    """
    engine = ComponentId(ENGINE)
    watch: Watch | None = None
    while True:
        before_ns = clock()
        await asyncio.sleep(LAG_PERIOD_S)
        now_ns = clock()
        status.lag_ns = now_ns - before_ns - round(LAG_PERIOD_S * 1e9)
        proofs.prove(ComponentId(LOOP))
        expected = proofs.expected().get(engine)
        if expected is None:
            continue
        before = watch or Watch(expected.proven_ns)
        watch = before.checked(expected, now_ns)
        if watch is not before and watch.wants_restart:
            restart(engine)
