"""What the emulated kubelet keeps and publishes: frozen records, and the bounds of everything it keeps.

All ``at_ns`` are CLOCK_MONOTONIC nanoseconds, so they compare with those of another process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

MAX_REGISTRATIONS: Final = 4_096
"""Register calls remembered; the oldest go first."""
MAX_LISTS: Final = 4_096
"""ListAndWatch messages remembered; the oldest go first."""
MAX_ALLOCATIONS: Final = 4_096
"""Allocate calls remembered; the oldest go first."""
MAX_CHANGES: Final = 4_096
"""Changes remembered, and changes a subscriber may lag behind before its stream fails."""
MAX_SUBSCRIBERS: Final = 64
"""Open change streams."""
MAX_PODS: Final = 4_096
"""Pods known at once, finished ones included; a real kubelet admits 110."""
MAX_RESOURCES: Final = 256
"""Resources known at once; a MIG node has a dozen."""

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(frozen=True, slots=True)
class AllocatableChange:
    """A resource as the node shows it from now on; sent whenever any of its values changed."""

    at_ns: int
    resource: str
    capacity: int
    allocatable: int
    unhealthy: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Registration:
    """One Register call, recorded when it was answered.

    ``received_at_ns`` is when it arrived. ``error`` is the text of the answer, None if accepted.
    """

    received_at_ns: int
    at_ns: int
    version: str
    endpoint: str
    resource: str
    error: str | None
    peer_pid: int | None
    generation: int | None

    @property
    def accepted(self) -> bool:
        """Whether the kubelet answered without an error."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class DeviceList:
    """One ListAndWatch message; ``generation`` numbers the accepted registrations of this kubelet."""

    at_ns: int
    resource: str
    endpoint: str
    generation: int
    healthy: tuple[str, ...]
    unhealthy: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A ListAndWatch stream that ended, and what ended it."""

    at_ns: int
    resource: str
    endpoint: str
    generation: int
    cause: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """One Allocate call; ids in the order they were sent, ``error`` as the pod's status shows it."""

    at_ns: int
    duration_ns: int
    pod: str
    resource: str
    ids: tuple[str, ...]
    error: str | None


@dataclass(frozen=True, slots=True)
class KubeletStatistics:
    """Counts since the emulation began; unlike the records above they are not bounded."""

    starts: int
    registrations: int
    rejected: int
    lists: int
    stream_ends: int
    allocations: int


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device as the kubelet sees it; ``pod`` is the active pod that has it, ``namespace/name``."""

    healthy: bool
    numa_nodes: tuple[int, ...]
    pod: str | None


@dataclass(frozen=True, slots=True)
class MountView:
    """A mount of an Allocate answer."""

    container_path: str
    host_path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class DeviceSpecView:
    """A device node of an Allocate answer."""

    container_path: str
    host_path: str
    permissions: str


@dataclass(frozen=True, slots=True)
class ContainerOutcome:
    """What a container got: device ids by resource, and the Allocate answers put together.

    ``health`` is each device's health now, by resource and id, as allocatedResourcesStatus shows it.
    """

    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    health: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[MountView, ...] = ()
    device_specs: tuple[DeviceSpecView, ...] = ()
    cdi_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodOutcome:
    """A pod after admission; reason and message are what its status would show.

    Rejected for good: phase ``Failed``, reason ``UnexpectedAdmissionError``. A failed
    PreStartContainer leaves it ``Pending`` with ``CreateContainerConfigError``. Running alone proves
    nothing (facts: kubelet item 15): read ``containers``.
    """

    name: str
    namespace: str
    phase: PodPhase
    reason: str
    message: str
    containers: Mapping[str, ContainerOutcome]

    @property
    def running(self) -> bool:
        """Whether the pod was admitted and its containers start."""
        return self.phase == "Running"
