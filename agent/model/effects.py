"""Effects: work that the core requests, in the imperative. Each effect has an owner, which app.py names."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from agent.model.health import Condition
from agent.model.ids import ComponentId, GpuUuid, ResourceName, SocketIdentity


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
    COMMAND = "order"
    LOSS = "loss"


class Event(msgspec.Struct, frozen=True):
    """One entry of the event log: a change, recorded once."""

    kind: EventKind
    message: str
    """A constant sentence; what varies is in the fields."""
    warning: bool = False
    fields: Mapping[str, object] | None = None
    """JSON-ready values by field name."""


class RecordEvent(msgspec.Struct, frozen=True):
    """Write an entry to the event log, as of ``at_ns``."""

    event: Event
    at_ns: int


class RegisterResource(msgspec.Struct, frozen=True):
    """Stop the server of a resource, start it again and register it with the kubelet.

    The owner answers with Registered or RegistrationFailed of the same generation.
    """

    resource: ResourceName
    generation: int
    kubelet: SocketIdentity | None
    """The kubelet socket that is to be registered with; a call to it that is under way is this one."""


class ReleaseDriver(msgspec.Struct, frozen=True):
    """Close every driver handle; the owner answers with DriverReleased."""


class ResumeDriver(msgspec.Struct, frozen=True):
    """Initialise NVML again after a release."""


class ProbeGpu(msgspec.Struct, frozen=True):
    """Probe a GPU soon: NVML, and its PCI configuration space."""

    gpu: GpuUuid
    pci: str
    """Sysfs form."""


class ProbeUvm(msgspec.Struct, frozen=True):
    """Open /dev/nvidia-uvm; the owner answers with UvmProbed."""


class KeepEvidence(msgspec.Struct, frozen=True):
    """Write the evidence for an RMA of a GPU to disk, before an operator resets it."""

    gpu: GpuUuid
    condition: Condition


class ExitProcess(msgspec.Struct, frozen=True):
    """Exit with a code; the supervisor starts a new process, which can read the new state of the node."""

    exit_code: int
    message: str


class RestartComponent(msgspec.Struct, frozen=True):
    """Restart a component that gave no proof for too long."""

    component: ComponentId


class ProbeGpus(msgspec.Struct, frozen=True):
    """Probe every GPU now: something about them could not be applied."""


Effect = (
    ProbeGpus
    | RestartComponent
    | RecordEvent
    | RegisterResource
    | ReleaseDriver
    | ResumeDriver
    | ProbeGpu
    | ProbeUvm
    | KeepEvidence
    | ExitProcess
)
