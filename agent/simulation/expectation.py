"""What a scenario waits for: what the kubelet must show, and what the agent must report."""

from dataclasses import dataclass

from agent.model.health import LeakKind, Reason


@dataclass(frozen=True, slots=True)
class ConditionExpectation:
    """A condition that the agent must report, or no longer report; None is any."""

    code: Reason
    kind: LeakKind | None = None
    gpu: int | None = None
    """Its position."""
    active: bool = True

    def __str__(self) -> str:
        where = "" if self.gpu is None else f" on GPU {self.gpu}"
        kind = "" if self.kind is None else f" ({self.kind})"
        return f"{'' if self.active else 'no '}{self.code}{kind}{where}"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must hold at the same time; None is anything."""

    resource: str
    capacity: int | None = None
    allocatable: int | None = None
    registrations: int | None = None
    """Register calls the kubelet has accepted since the start, at least."""
    condition: ConditionExpectation | None = None
    probe: bool = False
    """The agent's probe is in the kernel."""

    def __str__(self) -> str:
        parts = [*self._of_kubelet(), *self._of_agent()]
        return " and ".join(parts) if parts else f"{self.resource}, whatever it shows"

    def _of_kubelet(self) -> list[str]:
        if (self.capacity, self.allocatable, self.registrations) == (None, None, None):
            return []
        capacity = "any" if self.capacity is None else self.capacity
        allocatable = "any" if self.allocatable is None else self.allocatable
        often = "" if self.registrations is None else f" after {self.registrations} registrations"
        return [f"{self.resource} capacity {capacity}, allocatable {allocatable}{often}"]

    def _of_agent(self) -> list[str]:
        parts = ["the agent's probe in the kernel"] if self.probe else []
        return parts if self.condition is None else [*parts, f"{self.condition} reported by the agent"]

    @property
    def is_of_agent(self) -> bool:
        """Whether the agent has to be asked."""
        return self.probe or self.condition is not None
