"""What operators ask for through the control socket."""

from collections.abc import Hashable
from dataclasses import dataclass

from agent.model.facts.message import OPERATOR, GpuState, State
from agent.model.ids import GpuUuid, SourceName


@dataclass(frozen=True, slots=True)
class HoldRequested(State):
    """An operator takes a GPU out until it is given back, over restarts and reboots."""

    selector: str
    """UUID, serial or PCI address; a GPU that is not there now is held when it comes."""
    why: str
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each selector."""
        return (HoldRequested, self.selector)


@dataclass(frozen=True, slots=True)
class UnholdRequested(State):
    """An operator gives a held GPU back."""

    selector: str
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each selector."""
        return (UnholdRequested, self.selector)


@dataclass(frozen=True, slots=True)
class RecoverRequested(GpuState):
    """An operator declares a GPU well: every condition of it but a hold ends now."""

    source: SourceName = OPERATOR


@dataclass(frozen=True, slots=True)
class StateLossAcknowledged(State):
    """An operator knows that what was kept before the start is lost."""

    source: SourceName = OPERATOR


@dataclass(frozen=True, slots=True)
class ReleaseRequested(State):
    """An operator wants the driver let go of, for a reset, a MIG change or an unload."""

    gpus: frozenset[GpuUuid]
    """These are Unhealthy meanwhile; the driver is let go of as a whole."""
    for_ns: int
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each set."""
        return (ReleaseRequested, self.gpus)


@dataclass(frozen=True, slots=True)
class ResumeRequested(State):
    """An operator gives the driver back before the time is over."""

    source: SourceName = OPERATOR


OrderFact = (
    HoldRequested
    | UnholdRequested
    | RecoverRequested
    | StateLossAcknowledged
    | ReleaseRequested
    | ResumeRequested
)
