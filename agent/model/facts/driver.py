"""What NVML reported of the driver and of each GPU."""

from collections.abc import Hashable
from typing import Self

from agent.model.facts.message import NVML, Counted, GpuState, State
from agent.model.gpu import Gpu
from agent.model.health import Reason
from agent.model.ids import ALL, GpuUuid, SourceName
from agent.model.sample import GpuSample
from agent.model.structs import replace
from agent.model.topology import TopologySample
from agent.model.usage import GpuMemory


class DriverReady(State, frozen=True):
    """NVML was initialised (again)."""

    driver_version: str
    nvml_version: str
    cuda_version: tuple[int, int]
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One state with DriverUnavailable, yet each kept: gone and back is reset evidence."""
        return ("driver", True)


class DriverUnavailable(State, frozen=True):
    """NVML could not be initialised, or stopped answering for the whole node."""

    reason: Reason
    message: str
    unloaded: bool = False
    """The kernel module itself is not there (code 9): when it is back, every GPU was re-initialised."""
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """See DriverReady."""
        return ("driver", False)

    def merged_with(self, newer: Self) -> Self:
        """Keep that the module was seen to be gone: it is reset evidence."""
        return replace(newer, unloaded=self.unloaded or newer.unloaded)


class DriverReleased(State, frozen=True):
    """NVML was shut down on request: no file of the driver is open any more."""

    source: SourceName = NVML


class DriverCallOverdue(State, frozen=True):
    """A call on no single GPU (init, enumeration, event wait) did not answer within its deadline."""

    call: str
    deadline_ns: int
    source: SourceName = NVML


class DriverCallAnswered(State, frozen=True):
    """The overdue node-wide call answered after all."""

    call: str
    source: SourceName = NVML


class GpusEnumerated(State, frozen=True):
    """The complete list of GPUs that NVML has now, in index order."""

    gpus: tuple[Gpu, ...]
    control_nodes: tuple[str, ...] = ()
    """Device nodes that exist and belong to no GPU: /dev/nvidiactl, /dev/nvidia-uvm, …; IMEX channels."""
    source: SourceName = NVML


class XidReported(Counted, frozen=True):
    """An XID was reported for a GPU, a GPU instance or a compute instance."""

    gpu: GpuUuid | None
    """None if the device could not be identified."""
    xid: int
    gi: int = ALL
    ci: int = ALL
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """The same XID at the same place is counted, not queued twice."""
        return (XidReported, self.source, self.gpu, self.gi, self.ci, self.xid)


class HealthEventsUnsupported(GpuState, frozen=True):
    """The driver supports no XID events for a GPU; it is probed all the same."""

    message: str
    source: SourceName = NVML


class XidEventsHeard(State, frozen=True):
    """NVML's event wait failed, or returned for the first time after that; it keeps no XID meanwhile."""

    lost_since_ns: int
    """When a wait returned last before it failed, monotonic."""
    is_heard: bool
    source: SourceName = NVML


class GpuProbePassed(GpuState, frozen=True):
    """Every call of one health poll of a GPU answered well."""

    source: SourceName = NVML


class GpuCallFailed(State, frozen=True):
    """An NVML call on a GPU returned an error that is a finding (not NOT_SUPPORTED)."""

    gpu: GpuUuid
    code: int
    """NVML return code: 15 GPU_IS_LOST, 16 RESET_REQUIRED, 999 UNKNOWN, …"""
    call: str
    message: str
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One for each GPU and return code."""
        return (GpuCallFailed, self.gpu, self.code)


class GpuCallOverdue(GpuState, frozen=True):
    """An NVML call on a GPU did not answer within its deadline."""

    call: str
    deadline_ns: int
    source: SourceName = NVML


class GpuCallAnswered(GpuState, frozen=True):
    """The overdue call on a GPU answered after all; only a probe shows whether the GPU is healthy."""

    source: SourceName = NVML


class GpuSampled(GpuState, frozen=True):
    """The readings of one health poll of a GPU; put before the GpuProbePassed of the same poll."""

    sample: GpuSample
    source: SourceName = NVML


class GpuMemorySeen(GpuState, frozen=True):
    """The used memory of a GPU, and its users; one health poll."""

    memory: GpuMemory
    source: SourceName = NVML


class TopologySeen(GpuState, frozen=True):
    """Where a GPU stands among the others: what a sample of it found."""

    sample: TopologySample
    source: SourceName = NVML


DriverFact = (
    DriverReady
    | DriverUnavailable
    | DriverReleased
    | DriverCallOverdue
    | DriverCallAnswered
    | GpusEnumerated
    | XidReported
    | HealthEventsUnsupported
    | XidEventsHeard
    | GpuProbePassed
    | GpuCallFailed
    | GpuCallOverdue
    | GpuCallAnswered
    | GpuSampled
    | GpuMemorySeen
    | TopologySeen
)
