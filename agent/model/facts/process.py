"""Facts about the agent's own process: its components, its settings, losses, time."""

from collections.abc import Hashable, Mapping
from types import MappingProxyType

import msgspec

from agent.model.facts.message import AGENT, Counted, State
from agent.model.ids import ComponentId, GpuUuid, SourceName
from agent.model.policy import Policy
from agent.model.snapshot import Durable


class TaskReported(State, frozen=True):
    """Whether a supervised source or sink runs, or stopped and is to be restarted."""

    task: SourceName
    running: bool
    message: str = ""
    source: SourceName = AGENT

    @property
    def key(self) -> Hashable:
        """One for each task."""
        return (TaskReported, self.task)


class CdiReported(State, frozen=True):
    """Whether a CDI file resolves every advertised device, or why not."""

    trouble: str | None
    source: SourceName = AGENT


class PolicyChanged(State, frozen=True):
    """The operator changed the configuration."""

    policy: Policy
    source: SourceName = AGENT


class ComponentsStale(State, frozen=True):
    """The components without a proof for too long."""

    stale: frozenset[ComponentId]
    covered: Mapping[ComponentId, int] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    """Those with a fresh alternative, and when each gave its newest proof."""
    source: SourceName = AGENT


class FactRejected(State, frozen=True):
    """The core failed on a fact, twice: its content is not in the state."""

    gpu: GpuUuid | None
    """The GPU that it is about; None: any."""
    message: str
    source: SourceName = AGENT

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (FactRejected, self.gpu)


class StateUnread(State, frozen=True):
    """The state of an earlier process exists and cannot be read now; reading is retried."""

    why: str
    source: SourceName = AGENT


class StateRestored(State, frozen=True):
    """The state of an earlier process was read, after the start."""

    durable: Durable | None
    """None: there was none."""
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
