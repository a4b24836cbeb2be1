"""What the core wants done, in the imperative. Each effect has an owner; app.py says which."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agent.model.health import Condition
from agent.model.ids import GpuUuid, Part, ResourceName, SocketIdentity


class EventKind(StrEnum):
    """Kinds of entries in the event log; journald gives each its own MESSAGE_ID."""

    ALLOCATABLE = "allocatable"
    DEVICE = "device"
    CONDITION = "condition"
    XID = "xid"
    DRIVER = "driver"
    GPUS = "gpus"
    KUBELET = "kubelet"
    REGISTRATION = "registration"
    TASK = "task"
    ORDER = "order"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the event log: a change, told once."""

    kind: EventKind
    message: str
    """A constant sentence; what varies is in the fields."""
    warning: bool = False
    fields: Mapping[str, object] | None = None
    """JSON-ready values by field name."""


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Write an entry to the event log, as of ``at_ns``."""

    event: Event
    at_ns: int


@dataclass(frozen=True, slots=True)
class RegisterResource:
    """End what is served for a resource, serve it anew and register it with the kubelet.

    The owner answers with Registered or RegistrationFailed of the same generation.
    """

    resource: ResourceName
    generation: int
    kubelet: SocketIdentity | None
    """The kubelet socket that is to be registered with; a call to it that is under way is this one."""


@dataclass(frozen=True, slots=True)
class ReleaseDriver:
    """Let go of every driver handle; the owner answers with DriverReleased."""


@dataclass(frozen=True, slots=True)
class ResumeDriver:
    """Initialise NVML again after a release."""


@dataclass(frozen=True, slots=True)
class ProbeGpu:
    """Probe a GPU soon: NVML, and its PCI configuration space."""

    gpu: GpuUuid
    pci: str
    """Sysfs form."""


@dataclass(frozen=True, slots=True)
class ProbeUvm:
    """Open /dev/nvidia-uvm; the owner answers with UvmProbed."""


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Keep what an RMA needs of a GPU on disk, before anyone resets it."""

    gpu: GpuUuid
    condition: Condition


@dataclass(frozen=True, slots=True)
class EndProcess:
    """Leave with an exit code; the supervisor starts a process that sees the new world."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class RestartPart:
    """Start a part anew that gave no proof for too long."""

    part: Part


@dataclass(frozen=True, slots=True)
class ProbeGpus:
    """Probe every GPU now: something about them could not be applied."""


Effect = (
    ProbeGpus
    | RestartPart
    | RecordEvent
    | RegisterResource
    | ReleaseDriver
    | ResumeDriver
    | ProbeGpu
    | ProbeUvm
    | KeepEvidence
    | EndProcess
)
