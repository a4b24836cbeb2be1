"""Commands of operators through the control socket."""

from collections.abc import Hashable

from agent.model.facts.message import OPERATOR, GpuState, State
from agent.model.ids import GpuUuid, SourceName


class HoldRequested(State, frozen=True):
    """An operator holds a GPU until it is unheld, over restarts and reboots."""

    selector: str
    """UUID, serial or PCI address; an absent GPU is held when it appears."""
    why: str
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each selector."""
        return (HoldRequested, self.selector)


class UnholdRequested(State, frozen=True):
    """An operator ends the hold of a GPU."""

    selector: str
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each selector."""
        return (UnholdRequested, self.selector)


class RecoverRequested(GpuState, frozen=True):
    """An operator declares a GPU healthy: every condition of it but a hold is cleared."""

    source: SourceName = OPERATOR


class StateLossAcknowledged(State, frozen=True):
    """An operator acknowledges the loss of the earlier state."""

    source: SourceName = OPERATOR


class ReleaseRequested(State, frozen=True):
    """An operator releases the driver, for a reset, a MIG change or an unload."""

    gpus: frozenset[GpuUuid]
    """These are Unhealthy meanwhile; the driver is released as a whole."""
    for_ns: int
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each set."""
        return (ReleaseRequested, self.gpus)


class ResumeRequested(State, frozen=True):
    """An operator resumes the driver before the time is over."""

    source: SourceName = OPERATOR


CommandFact = (
    HoldRequested
    | UnholdRequested
    | RecoverRequested
    | StateLossAcknowledged
    | ReleaseRequested
    | ResumeRequested
)
