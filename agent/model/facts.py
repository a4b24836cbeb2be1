"""What sources and sinks saw, in the past tense.

Invariants: a fact with a key is never dropped. Facts of one key are merged while they wait, the
newer one at its own place in the order, so the room they need is the number of keys. A fact whose
key is None is high-rate: it may be dropped when the inbox is full, and each drop is counted.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from agent.model.gpu import Gpu
from agent.model.health import Reason
from agent.model.ids import ALL, DeviceId, GpuUuid, ResourceName, SocketIdentity, SourceName
from agent.model.policy import Policy
from agent.model.sample import GpuSample
from agent.model.topology import Survey
from agent.model.usage import DeviceCall, GpuMemory, Pods, ProbeView, Usage


class Message(Protocol):
    """What the inbox needs to know of a fact."""

    @property
    def source(self) -> SourceName:
        """Who saw it; losses are counted by source."""

    @property
    def key(self) -> Hashable | None:
        """Facts of one key are merged; None may be dropped."""

    def merged_with(self, newer: Self) -> Self:
        """Return one fact that stands for both."""


NVML = SourceName("nvml")
KUBELET = SourceName("kubelet")
DEVICE_PLUGIN = SourceName("device-plugin")
AGENT = SourceName("agent")
KERNEL_LOG = SourceName("kernel-log")
SYSFS = SourceName("sysfs")
UEVENTS = SourceName("uevents")
PODS = SourceName("pods")
PROBE = SourceName("probe")
MPS = SourceName("mps")
OPERATOR = SourceName("operator")


@dataclass(frozen=True, slots=True)
class _State:
    """A fact that tells how things are now: of two, the newer one is the truth."""

    @property
    def key(self) -> Hashable | None:
        return (type(self),)

    def merged_with(self, newer: Self) -> Self:
        return newer


@dataclass(frozen=True, slots=True)
class DriverReady(_State):
    """NVML was initialised (again)."""

    driver_version: str
    nvml_version: str
    cuda_version: tuple[int, int]
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One state with DriverUnavailable, yet each kept: gone and back is reset evidence."""
        return ("driver", True)


@dataclass(frozen=True, slots=True)
class DriverUnavailable(_State):
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


@dataclass(frozen=True, slots=True)
class GpusEnumerated(_State):
    """The complete list of GPUs that NVML has now, in index order."""

    gpus: tuple[Gpu, ...]
    control_nodes: tuple[str, ...] = ()
    """Device nodes that exist and belong to no GPU: /dev/nvidiactl, /dev/nvidia-uvm, …; IMEX channels."""
    source: SourceName = NVML


@dataclass(frozen=True, slots=True)
class XidReported:
    """An XID was reported for a GPU, a GPU instance or a compute instance."""

    gpu: GpuUuid | None
    """None if the device could not be identified."""
    xid: int
    gi: int = ALL
    ci: int = ALL
    count: int = 1
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """The same XID at the same place is counted, not queued twice."""
        return (XidReported, self.source, self.gpu, self.gi, self.ci, self.xid)

    def merged_with(self, newer: Self) -> Self:
        """Add the counts."""
        return replace(newer, count=self.count + newer.count)


@dataclass(frozen=True, slots=True)
class GpuProbePassed(_State):
    """Every call of one health poll of a GPU answered well."""

    gpu: GpuUuid
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (GpuProbePassed, self.gpu)


@dataclass(frozen=True, slots=True)
class GpuCallFailed(_State):
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


@dataclass(frozen=True, slots=True)
class GpuCallOverdue(_State):
    """An NVML call on a GPU did not answer within its deadline."""

    gpu: GpuUuid
    call: str
    deadline_ns: int
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (GpuCallOverdue, self.gpu)


@dataclass(frozen=True, slots=True)
class GpuCallAnswered(_State):
    """The overdue call on a GPU answered after all; whether the GPU is well only a probe can say."""

    gpu: GpuUuid
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (GpuCallAnswered, self.gpu)


@dataclass(frozen=True, slots=True)
class DriverCallOverdue(_State):
    """A call on no single GPU (init, enumeration, event wait) did not answer within its deadline."""

    call: str
    deadline_ns: int
    source: SourceName = NVML


@dataclass(frozen=True, slots=True)
class DriverCallAnswered(_State):
    """The overdue node-wide call answered after all."""

    call: str
    source: SourceName = NVML


@dataclass(frozen=True, slots=True)
class HealthEventsUnsupported(_State):
    """The driver offers no XID events for a GPU; it is probed all the same."""

    gpu: GpuUuid
    message: str
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (HealthEventsUnsupported, self.gpu)


@dataclass(frozen=True, slots=True)
class KubeletSocketSeen(_State):
    """The kubelet's socket as it is now; None: there is none."""

    identity: SocketIdentity | None
    source: SourceName = KUBELET


@dataclass(frozen=True, slots=True)
class OwnSocketLost(_State):
    """The file of a plugin socket that we serve was deleted or replaced."""

    resource: ResourceName
    generation: int
    source: SourceName = KUBELET

    @property
    def key(self) -> Hashable:
        """One for each resource."""
        return (OwnSocketLost, self.resource)


@dataclass(frozen=True, slots=True)
class WatchedDirectoryDeleted(_State):
    """The device-plugins directory was deleted under its mount; only a new mount shows the new one."""

    path: str
    source: SourceName = KUBELET


@dataclass(frozen=True, slots=True)
class Registered(_State):
    """The kubelet accepted a registration."""

    resource: ResourceName
    generation: int
    kubelet: SocketIdentity
    """The kubelet socket just before the call."""
    socket: SocketIdentity
    """Our own socket file, for those who watch it."""
    source: SourceName = DEVICE_PLUGIN

    @property
    def key(self) -> Hashable:
        """One for each resource."""
        return (Registered, self.resource)


RegistrationFailure = Literal["absent", "unreachable", "rejected", "socket_in_use", "not_served"]
"""absent: no kubelet.sock; unreachable: it refuses connections or does not answer; rejected: Register
answered an error; socket_in_use: something that is not ours has our socket's path; not_served: our
own server could not start (no file descriptors, no room, no rights)."""


@dataclass(frozen=True, slots=True)
class RegistrationFailed(_State):
    """A registration was not made."""

    resource: ResourceName
    generation: int
    failure: RegistrationFailure
    message: str
    source: SourceName = DEVICE_PLUGIN

    @property
    def key(self) -> Hashable:
        """One for each resource."""
        return (RegistrationFailed, self.resource)


@dataclass(frozen=True, slots=True)
class WatchersChanged(_State):
    """So many ListAndWatch streams of a resource are open now; told at each start and end."""

    resource: ResourceName
    generation: int
    live: int
    source: SourceName = DEVICE_PLUGIN

    @property
    def key(self) -> Hashable:
        """One for each resource."""
        return (WatchersChanged, self.resource)


@dataclass(frozen=True, slots=True)
class GpuSampled(_State):
    """The readings of one health poll of a GPU; put before the GpuProbePassed of the same poll."""

    gpu: GpuUuid
    sample: GpuSample
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (GpuSampled, self.gpu)


@dataclass(frozen=True, slots=True)
class TopologySeen(_State):
    """Where a GPU stands among the others: what a survey of it found."""

    gpu: GpuUuid
    survey: Survey
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (TopologySeen, self.gpu)


@dataclass(frozen=True, slots=True)
class DriverReleased(_State):
    """NVML was shut down on request: no file of the driver is open any more."""

    source: SourceName = NVML


@dataclass(frozen=True, slots=True)
class KernelXidSeen:
    """The kernel log has an XID of a PCI address."""

    pci: str
    """Sysfs form."""
    xid: int
    detail: str = ""
    """What the line says after the number, shortened; unit and sub code of NVLink errors."""
    backlog: bool = False
    """From before any agent of this boot began to read: counted, but no reason to flip now."""
    gi: int = ALL
    ci: int = ALL
    count: int = 1
    source: SourceName = KERNEL_LOG

    @property
    def key(self) -> Hashable:
        """The same XID at the same place is counted, not queued twice."""
        return (KernelXidSeen, self.pci, self.gi, self.ci, self.xid, self.backlog)

    def merged_with(self, newer: Self) -> Self:
        """Add the counts."""
        return replace(newer, count=self.count + newer.count)


@dataclass(frozen=True, slots=True)
class KernelLogRead(_State):
    """Every XID of the kernel log up to a record was told; put after them."""

    until: int
    """Sequence number of the record; the kernel counts anew with each boot."""
    source: SourceName = KERNEL_LOG


@dataclass(frozen=True, slots=True)
class PciGpusSeen(_State):
    """The PCI addresses of the GPUs that are bound to NVIDIA's driver, as sysfs has them now.

    Functions on vfio-pci or nouveau, and those bound to no driver, are not among them.
    """

    addresses: tuple[str, ...]
    source: SourceName = SYSFS


@dataclass(frozen=True, slots=True)
class DriverModuleSeen(_State):
    """Which load of the kernel module this is: the inode of /sys/module/nvidia; None: not loaded."""

    inode: int | None
    source: SourceName = SYSFS


@dataclass(frozen=True, slots=True)
class DeviceNodesSeen(_State):
    """The device nodes that should exist and do not: ``/dev/nvidia3``, ``/dev/nvidiactl``."""

    missing: tuple[str, ...]
    source: SourceName = SYSFS


@dataclass(frozen=True, slots=True)
class GpuRebound(_State):
    """A GPU was unbound from its driver, or bound to it: what was wrong with it may be gone."""

    pci: str
    bound: bool
    source: SourceName = UEVENTS

    @property
    def key(self) -> Hashable:
        """One for each address and direction."""
        return (GpuRebound, self.pci, self.bound)


@dataclass(frozen=True, slots=True)
class AllocationsListed(_State):
    """Which pods hold which of our devices, without finished pods; kubelet's PodResources List."""

    pods: Mapping[DeviceId, str]
    """``namespace/name`` by device id."""
    source: SourceName = PODS


@dataclass(frozen=True, slots=True)
class GpuUseSeen(_State):
    """Who uses the driver now; told when it changed and at least every 30 s."""

    usage: Usage
    source: SourceName = PROBE


@dataclass(frozen=True, slots=True)
class ProbeSeen(_State):
    """How the probe is: loaded, or why not."""

    probe: ProbeView
    source: SourceName = PROBE


@dataclass(frozen=True, slots=True)
class DeviceCallsSeen(_State):
    """What the kernel saw of the calls that show whether devices answer; those that were made so far."""

    calls: Mapping[GpuUuid, DeviceCall]
    source: SourceName = PROBE


@dataclass(frozen=True, slots=True)
class GpuMemorySeen(_State):
    """How much memory of a GPU is used, and by whom; one health poll."""

    gpu: GpuUuid
    memory: GpuMemory
    source: SourceName = NVML

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (GpuMemorySeen, self.gpu)


@dataclass(frozen=True, slots=True)
class PodsSeen(_State):
    """The pods that this node's kubelet knows, by UID; what is not among them is gone."""

    pods: Pods
    complete: bool = True
    """False: only pods with devices are among them, so that another may live all the same."""
    source: SourceName = PODS


@dataclass(frozen=True, slots=True)
class MpsSeen(_State):
    """Whether the MPS control daemon says that it serves."""

    ready: bool
    message: str = ""
    """What is missing, if it does not."""
    source: SourceName = MPS


@dataclass(frozen=True, slots=True)
class HoldRequested(_State):
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
class UnholdRequested(_State):
    """An operator gives a held GPU back."""

    selector: str
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each selector."""
        return (UnholdRequested, self.selector)


@dataclass(frozen=True, slots=True)
class RecoverRequested(_State):
    """An operator declares a GPU well: every condition of it but a hold ends now."""

    gpu: GpuUuid
    source: SourceName = OPERATOR

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (RecoverRequested, self.gpu)


@dataclass(frozen=True, slots=True)
class ReleaseRequested(_State):
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
class ResumeRequested(_State):
    """An operator gives the driver back before the time is over."""

    source: SourceName = OPERATOR


@dataclass(frozen=True, slots=True)
class TaskReported(_State):
    """How a supervised source or sink is: running, or ended and to be started again."""

    task: SourceName
    running: bool
    message: str = ""
    source: SourceName = AGENT

    @property
    def key(self) -> Hashable:
        """One for each task."""
        return (TaskReported, self.task)


@dataclass(frozen=True, slots=True)
class FactsLost:
    """The inbox was full: so many high-rate facts of a source were dropped."""

    lost_from: SourceName
    count: int
    source: SourceName = AGENT

    @property
    def key(self) -> Hashable:
        """One for each source."""
        return (FactsLost, self.lost_from)

    def merged_with(self, newer: Self) -> Self:
        """Add the counts."""
        return replace(newer, count=self.count + newer.count)


@dataclass(frozen=True, slots=True)
class PolicyChanged(_State):
    """The operator changed the configuration."""

    policy: Policy
    source: SourceName = AGENT


@dataclass(frozen=True, slots=True)
class Tick(_State):
    """Time passed."""

    source: SourceName = AGENT


Fact = (
    DriverReady
    | DriverUnavailable
    | GpusEnumerated
    | XidReported
    | GpuProbePassed
    | GpuCallFailed
    | GpuCallOverdue
    | GpuCallAnswered
    | DriverCallOverdue
    | DriverCallAnswered
    | HealthEventsUnsupported
    | KubeletSocketSeen
    | OwnSocketLost
    | WatchedDirectoryDeleted
    | Registered
    | RegistrationFailed
    | WatchersChanged
    | GpuSampled
    | TopologySeen
    | DriverReleased
    | KernelXidSeen
    | KernelLogRead
    | PciGpusSeen
    | DriverModuleSeen
    | DeviceNodesSeen
    | GpuRebound
    | AllocationsListed
    | GpuUseSeen
    | ProbeSeen
    | DeviceCallsSeen
    | GpuMemorySeen
    | PodsSeen
    | MpsSeen
    | HoldRequested
    | UnholdRequested
    | RecoverRequested
    | ReleaseRequested
    | ResumeRequested
    | TaskReported
    | FactsLost
    | PolicyChanged
    | Tick
)
