"""What operators ask for through the control socket."""

from collections.abc import Hashable

from agent.model.facts.message import OPERATOR, GpuState, State
from agent.model.ids import GpuUuid, SourceName


class HoldRequested(State, frozen=True):
    """An operator takes a GPU out until it is given back, over restarts and reboots."""

    selector: str
    """UUID, serial or PCI address; a GPU that is not there now is held when it comes."""
    why: str
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each selector."""
        return (HoldRequested, self.selector)


class UnholdRequested(State, frozen=True):
    """An operator gives a held GPU back."""

    selector: str
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each selector."""
        return (UnholdRequested, self.selector)


class RecoverRequested(GpuState, frozen=True):
    """An operator declares a GPU well: every condition of it but a hold ends now."""

    source: SourceName = OPERATOR


class StateLossAcknowledged(State, frozen=True):
    """An operator knows that what was kept before the start is lost."""

    source: SourceName = OPERATOR


class ReleaseRequested(State, frozen=True):
    """An operator wants the driver let go of, for a reset, a MIG change or an unload."""

    gpus: frozenset[GpuUuid]
    """These are Unhealthy meanwhile; the driver is let go of as a whole."""
    for_ns: int
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each set."""
        return (ReleaseRequested, self.gpus)


class ResumeRequested(State, frozen=True):
    """An operator gives the driver back before the time is over."""

    source: SourceName = OPERATOR


CommandFact = (
    HoldRequested
    | UnholdRequested
    | RecoverRequested
    | StateLossAcknowledged
    | ReleaseRequested
    | ResumeRequested
)
