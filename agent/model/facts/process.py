"""What the agent's own process says of itself: its parts, its settings, losses, time."""

from collections.abc import Hashable, Mapping
from types import MappingProxyType

import msgspec

from agent.model.facts.message import AGENT, Counted, State
from agent.model.ids import ComponentId, GpuUuid, SourceName
from agent.model.policy import Policy
from agent.model.snapshot import Durable


class TaskReported(State, frozen=True):
    """How a supervised source or sink is: running, or ended and to be started again."""

    task: SourceName
    running: bool
    message: str = ""
    source: SourceName = AGENT

    @property
    def key(self) -> Hashable:
        """One for each task."""
        return (TaskReported, self.task)


class CdiReported(State, frozen=True):
    """Whether every device that is offered is resolved by a CDI file, or why not."""

    trouble: str | None
    source: SourceName = AGENT


class PolicyChanged(State, frozen=True):
    """The operator changed the configuration."""

    policy: Policy
    source: SourceName = AGENT


class ComponentsStale(State, frozen=True):
    """Which parts gave no proof for too long."""

    stale: frozenset[ComponentId]
    covered: Mapping[ComponentId, int] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    """Those for which a fresh part stands in, and when each gave its newest proof."""
    source: SourceName = AGENT


class FactRejected(State, frozen=True):
    """The core failed on a fact, twice: what it says is not in the state."""

    gpu: GpuUuid | None
    """The GPU that it is about; None: any."""
    message: str
    source: SourceName = AGENT

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (FactRejected, self.gpu)


class StateUnread(State, frozen=True):
    """What an earlier process kept is there and cannot be read now; reading is retried."""

    why: str
    source: SourceName = AGENT


class StateRestored(State, frozen=True):
    """What an earlier process kept was read, after the start."""

    durable: Durable | None
    """None: nothing was kept."""
    source: SourceName = AGENT


class FactsLost(Counted, frozen=True):
    """The inbox was full: so many high-rate facts of a source were dropped."""

    lost_from: SourceName
    source: SourceName = AGENT

    @property
    def key(self) -> Hashable:
        """One for each source."""
        return (FactsLost, self.lost_from)


class Tick(State, frozen=True):
    """Time passed."""

    source: SourceName = AGENT


ProcessFact = (
    TaskReported
    | CdiReported
    | PolicyChanged
    | ComponentsStale
    | FactRejected
    | StateUnread
    | StateRestored
    | FactsLost
    | Tick
)
