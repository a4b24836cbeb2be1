"""The snapshot: one immutable state of the node for sinks, made by the core after each change."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from agent.model.gpu import Gpu
from agent.model.health import Condition, Health, Reason
from agent.model.ids import (
    ComponentId,
    DeviceId,
    GpuUuid,
    Placement,
    ResourceName,
    SocketIdentity,
    SourceName,
)
from agent.model.policy import Policy
from agent.model.sample import GpuSample
from agent.model.sharing import SharingStrategy
from agent.model.topology import Topology
from agent.model.usage import DeviceCall, GpuMemory, Pods, ProbeView, Usage


class Device(msgspec.Struct, frozen=True):
    """One device as it is advertised to the kubelet."""

    id: DeviceId
    uuid: str
    """NVML UUID of the GPU or MIG device, without the replica."""
    placement: Placement
    index: int
    """NVML index that its GPU has, or had until it was lost, for order; people read ``GpuView.index``."""
    replica: int | None
    numa_node: int | None
    health: Health
    reasons: tuple[Condition, ...] = ()
    """The active conditions that touch it, those that flip it first, oldest first."""
    mig_index: int | None = None
    """NVML's index of the MIG device on its GPU; None: a whole GPU."""


class ListSent(msgspec.Struct, frozen=True):
    """One ListAndWatch message that was written to one watcher."""

    resource: ResourceName
    generation: int
    devices: int
    unhealthy: tuple[Device, ...]
    """Those that are Unhealthy in it, with the conditions that made them so."""
    bytes: int
    changed_at_ns: int
    """When the state it shows was made (Snapshot.at_ns)."""
    began_ns: int
    """No watcher had it before."""
    sent_at_ns: int


class RegistrationPhase(StrEnum):
    """Where a resource stands with the kubelet."""

    WAITING = "waiting"
    """For the kubelet's socket or for the first probes."""
    REGISTERING = "registering"
    REGISTERED = "registered"
    BACKING_OFF = "backing_off"


class Resource(msgspec.Struct, frozen=True):
    """One extended resource: its advertised devices and the state of its registration."""

    name: ResourceName
    devices: tuple[Device, ...]
    """Stable order: GPU index, gi, ci, replica."""
    phase: RegistrationPhase
    generation: int
    message: str
    """Why it is not registered; empty when it is."""
    since_ns: int
    """When the phase began (registering and backing off are one spell)."""
    socket: SocketIdentity | None
    """Our socket file, from the moment Register was sent."""
    sharing: SharingStrategy | None = None
    """How its devices are shared; None: they are not."""
    counted: bool | None = None
    """Whether the kubelet had the healthy devices it was sent at its newest count; None: not asked since."""
    miscount: str = ""
    """What it had instead, where that lasted; empty once it has them again."""

    @property
    def capacity(self) -> int:
        """All devices, as the kubelet counts them."""
        return len(self.devices)

    @property
    def allocatable(self) -> int:
        """Healthy devices."""
        return sum(device.health is Health.HEALTHY for device in self.devices)


class GpuView(msgspec.Struct, frozen=True):
    """A GPU with its verdict."""

    gpu: Gpu
    health: Health
    present: bool
    """Whether NVML lists it now."""
    conditions: tuple[Condition, ...]
    xids: Mapping[int, int]
    """XIDs seen and how often, since the agent's state began."""
    sample: GpuSample | None = None
    """The newest readings."""

    @property
    def index(self) -> int | None:
        """NVML's index, while it lists the GPU; an index from before may be another GPU's."""
        return self.gpu.index if self.present else None


class DriverView(msgspec.Struct, frozen=True):
    """How NVML is: versions when ready, else why not. All None: not known yet."""

    ready: bool | None = None
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: tuple[int, int] | None = None
    reason: Reason | None = None
    message: str = ""


class TaskView(msgspec.Struct, frozen=True):
    """A supervised source or sink."""

    running: bool
    failures: int
    message: str


class Finding(msgspec.Struct, frozen=True):
    """Why the node is not ready for GPU work: the answer of /preflight, without pids or pod names."""

    reason: Reason
    message: str
    gpus: tuple[GpuUuid, ...] = ()
    used_bytes: int | None = None
    """Of findings on memory: how much."""


class Durable(msgspec.Struct, frozen=True):
    """What must outlive the process: the GPUs known, their conditions and XID counts."""

    gpus: tuple[Gpu, ...] = ()
    conditions: tuple[Condition, ...] = ()
    """Also those that a person must end on GPUs that were not seen since the reboot."""
    xids: tuple[tuple[GpuUuid, int, int], ...] = ()
    """(gpu, xid, count)"""
    holds: tuple[tuple[str, str], ...] = ()
    """(selector, why); kept over reboots."""
    released_gpus: tuple[GpuUuid, ...] = ()
    released_until_ns: int | None = None
    module_inode: int | None = None
    """Which load of the kernel module the conditions were seen under."""
    kernel_log_read: int | None = None
    """Up to which record the XIDs of the kernel log are in here."""
    lost: str = ""
    """Why what an earlier process kept is lost; empty: it is not, or an operator acknowledged it."""


class Snapshot(msgspec.Struct, frozen=True):
    """The node at one moment."""

    at_ns: int
    """When the newest change in it was made."""
    policy: Policy
    driver: DriverView
    kubelet: SocketIdentity | None
    gpus: tuple[GpuView, ...]
    resources: tuple[Resource, ...]
    control_nodes: tuple[str, ...]
    tasks: Mapping[SourceName, TaskView]
    facts_lost: Mapping[SourceName, int]
    findings: tuple[Finding, ...]
    durable: Durable
    unread: str = ""
    """Why what an earlier process kept cannot be read now; reading is retried."""
    stale: frozenset[ComponentId] = frozenset()
    """Parts of the agent that gave no proof for too long."""
    failed_facts: tuple[str, ...] = ()
    """Facts on which the core failed."""
    topology: Topology = msgspec.field(default_factory=Topology)
    pods: Mapping[DeviceId, str] | None = None
    """The pod of each device by the kubelet's list; None: unknown or stale."""
    pods_seen: Pods | None = None
    """The pods that live on this node; None: not known, or not known recently."""
    probe: ProbeView | None = None
    """None: it is off, or not begun yet."""
    device_calls: Mapping[GpuUuid, DeviceCall] = msgspec.field(default_factory=dict)
    """Whether the driver answers on each GPU, as seen in the kernel; a GPU that was not called is missing."""
    usage: Usage | None = None
    """The processes that use the driver; None: unknown or stale."""
    memory: Mapping[GpuUuid, GpuMemory] = msgspec.field(default_factory=dict)
    """Used memory and the processes that NVML lists; core.ownership joins it with the rest."""
    released_until_ns: int | None = None
    """The driver stays released until then."""
    driver_released: bool = False
    """It is: no file of the driver is open."""
    holds: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why, by selector; also of GPUs that are not there."""
    observed_flips: int = 0
    """Devices that would have turned Unhealthy, had the agent not only observed."""

    @property
    def ready(self) -> bool:
        """Whether a GPU job can be sent here now."""
        return not self.findings

    def view_of(self, gpu: GpuUuid) -> GpuView | None:
        """Return a GPU with its verdict; None: it is not known."""
        return next((view for view in self.gpus if view.gpu.uuid == gpu), None)
