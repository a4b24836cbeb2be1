"""Everything the agent knows, as one immutable value."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from agent.core.freshness import unknown_gpus
from agent.core.health.conditions import after_restart
from agent.core.health.inventory import AdvertisedDevice, advertised_devices
from agent.core.health.needs import with_channels, with_daemon
from agent.core.health.registration import Registration
from agent.core.health.samples import Window
from agent.core.health.verdicts import verdicts
from agent.core.health.witnesses import UnconfirmedFault
from agent.core.leaks.findings import Leaks, inherited
from agent.core.reasons import REASON_SPECS
from agent.model.facts import KernelXidSeen
from agent.model.gpu import Gpu
from agent.model.health import Condition, ConditionKey, Evidence
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
from agent.model.snapshot import Device, DriverView, Durable, TaskView
from agent.model.structs import replace
from agent.model.topology import Topology, TopologySample
from agent.model.usage import DeviceCall, GpuMemory, Pods, ProbeView, Usage

MAX_AWAITED: Final = 256
"""Conditions kept of GPUs that were not listed after a reboot; the oldest go when there are more."""

UnconfirmedFaults = Mapping[ConditionKey, UnconfirmedFault]

_EMPTY: Mapping[Any, Any] = MappingProxyType({})


def _nothing() -> Mapping[Any, Any]:
    return _EMPTY


class State(msgspec.Struct, frozen=True):
    """The state; the reducer is its only writer.

    Mappings are never changed in place: a new state shares with the old one what did not change,
    so "is it the same object" answers "did it change".
    """

    policy: Policy
    changed_ns: int = 0
    """When the newest change was made."""

    driver: DriverView = msgspec.field(default_factory=DriverView)
    driver_unloaded: bool = False
    """The kernel module was seen to be gone; when it is back, every GPU was re-initialised."""
    driver_overdue: str | None = None
    """The node-wide driver call that has not answered."""
    driver_released: bool = False
    """NVML was shut down on request."""
    module_inode: int | None = None
    """Which load of the kernel module this is."""
    kernel_log_read: int | None = None
    """Up to which record the XIDs of the kernel log are in here."""
    bus: tuple[str, ...] | None = None
    """PCI addresses of the GPUs that the bus has for the driver; None: not scanned yet."""
    missing_nodes: tuple[str, ...] | None = None
    """Device nodes that should exist and do not; None: not scanned yet."""

    gpus: Mapping[GpuUuid, Gpu] = msgspec.field(default_factory=_nothing)
    """Every GPU known, also those that NVML does not list now."""
    present: frozenset[GpuUuid] = frozenset()
    control_nodes: tuple[str, ...] | None = None
    """Those that exist; None: not scanned yet."""
    channels_were_seen: bool = False
    """The node had each IMEX channel since one is required: as with ``mps_was_ready``."""
    probed: frozenset[GpuUuid] = frozenset()
    """GPUs that had a verdict (a probe passed, failed or overdue) since the process began."""
    stale: frozenset[ComponentId] = frozenset()
    """Parts that gave no proof for too long; what rests on them is unknown."""
    covered: Mapping[ComponentId, int] = msgspec.field(default_factory=_nothing)
    """Those for which a fresh part stands in, and when each gave its newest proof."""
    deaf_since_ns: int | None = None
    """Since when NVML's event wait fails, so that no XID is heard; None: it does not."""
    failed_facts: Mapping[GpuUuid | None, str] = msgspec.field(default_factory=_nothing)
    """Facts on which the core failed, by the GPU they are about; kept until the process ends."""
    overdue: Mapping[GpuUuid, str] = msgspec.field(default_factory=_nothing)
    """GPUs with a call that has not answered, and the call."""
    first_probes_by_ns: int | None = None
    """Registration waits for the first probes until then."""
    first_probes_in: bool = False
    """The first probes are in, or were waited for: from here on each change of a device is reported."""

    conditions: Mapping[ConditionKey, Condition] = msgspec.field(default_factory=_nothing)
    awaited: tuple[Condition, ...] = ()
    """What only a person ends, on GPUs that were not seen since the reboot: hardware may have been changed,
    so nothing is advertised for them; they count as soon as their GPU is listed."""
    xids: Mapping[GpuUuid, Mapping[int, int]] = msgspec.field(default_factory=_nothing)
    xids_before: Mapping[tuple[GpuUuid, int], int] = msgspec.field(default_factory=_nothing)
    """XIDs that an earlier process counted and that the kernel log's backlog may report again."""
    recent_xids: Mapping[tuple[Placement, int], tuple[SourceName, int]] = msgspec.field(
        default_factory=_nothing
    )
    """Which source reported an XID of a place last, and when: two sources within 2 s report one fault."""
    unconfirmed: UnconfirmedFaults = msgspec.field(default_factory=_nothing)
    """Faults that only the kernel log reports, by the key they have once a second witness confirms them."""
    early_xids: tuple[KernelXidSeen, ...] = ()
    """XIDs of the kernel log from before NVML listed the first GPU."""
    uvm_status: str | None = None
    """Why the unified memory driver rejects calls, by the kernel log; None: no such line."""
    samples: Mapping[GpuUuid, GpuSample] = msgspec.field(default_factory=_nothing)
    slowdowns: Mapping[GpuUuid, Window] = msgspec.field(default_factory=_nothing)
    topology_samples: Mapping[GpuUuid, TopologySample] = msgspec.field(default_factory=_nothing)
    topology: Topology = msgspec.field(default_factory=Topology)
    """How the GPUs are connected, by the topology samples."""
    fault_times: Mapping[GpuUuid, tuple[int, ...]] = msgspec.field(default_factory=_nothing)
    """When the newest self-clearing faults of a GPU began; flapping counts them."""
    soft_flip_ns: int | None = None
    """When soft evidence flipped a device last."""

    lost: str = ""
    """Why what an earlier process kept is lost; an operator acknowledges it."""
    unread: str = ""
    """Why what an earlier process kept cannot be read now."""
    holds: Mapping[str, str] = msgspec.field(default_factory=_nothing)
    """Why, by selector."""
    released_gpus: frozenset[GpuUuid] = frozenset()
    released_until_ns: int | None = None
    pods: Mapping[DeviceId, str] | None = None
    pods_ns: int = 0
    """Which pod has which device, and the time of that list."""
    pods_seen: Pods | None = None
    pods_seen_ns: int = 0
    """The living pods of this node, and the time of that list."""
    pods_seen_all: bool = True
    """All of them are among those, not only those with devices."""
    probe: ProbeView | None = None
    """None: there is none, or it was not begun yet."""
    device_calls: Mapping[GpuUuid, DeviceCall] = msgspec.field(default_factory=_nothing)
    usage: Usage | None = None
    usage_ns: int = 0
    """The newest usage snapshot, and its time."""
    memory: Mapping[GpuUuid, GpuMemory] = msgspec.field(default_factory=_nothing)
    """The newest readings, by GPU."""
    leaks: Leaks = msgspec.field(default_factory=Leaks)
    """What is found of the use of GPUs, and what may be."""
    observed_flips: int = 0
    """Devices that would have turned Unhealthy, had the agent not only observed."""

    mps_ready: bool | None = None
    """Whether the MPS control daemon serves; None: not probed yet, or not needed."""
    mps_missing: str = ""
    """What is missing of it, while it does not."""
    mps_was_ready: bool = False
    """It served since it is needed: from here on that it is away is trouble, not a start."""

    advertised: Mapping[ResourceName, tuple[AdvertisedDevice, ...]] = msgspec.field(default_factory=_nothing)
    devices: Mapping[ResourceName, tuple[Device, ...]] = msgspec.field(default_factory=_nothing)
    """The advertised devices with their verdicts."""

    kubelet: SocketIdentity | None = None
    registrations: Mapping[ResourceName, Registration] = msgspec.field(default_factory=_nothing)
    tasks: Mapping[SourceName, TaskView] = msgspec.field(default_factory=_nothing)
    cdi_trouble: str | None = None
    """Why a device that is advertised is resolved by no CDI file; None: each is, or none is wanted."""
    facts_lost: Mapping[SourceName, int] = msgspec.field(default_factory=_nothing)

    @property
    def uncovered(self) -> frozenset[ComponentId]:
        """The stale parts for which nothing stands in."""
        return self.stale - self.covered.keys()

    @property
    def known_gpus(self) -> frozenset[GpuUuid]:
        """GPUs with a verdict that is fresh, about which everything is known that was reported."""
        if not self.stale and not self.failed_facts:
            return self.probed
        if None in self.failed_facts:
            return frozenset()
        return self.probed - self.failed_facts.keys() - unknown_gpus(self.uncovered, self.probed)

    @property
    def due_gpus(self) -> frozenset[GpuUuid]:
        """GPUs whose prober has to give proofs.

        Not those that NVML does not list, or that do not answer: they have conditions of their own. Nor while
        the driver is away or released, when nothing may probe.
        """
        if not self.driver.ready or self.driver_released or self.released_until_ns is not None:
            return frozenset()
        return self.present - self.overdue.keys()

    @property
    def hung(self) -> bool:
        """Whether the driver as a whole does not answer: two calls at once, or its own lock."""
        return self.driver_overdue is not None or len(self.overdue) >= 2


def initial_state(policy: Policy, restored: Durable | None, *, now_ns: int) -> State:
    """Return the state a process begins with.

    What was restored keeps its conditions: an unhealthy GPU stays so over a restart. Its GPUs are known but
    not present and not probed, so their devices are unknown until they are. A condition of a GPU that
    is not among them waits for it.
    """
    state = State(policy=policy, changed_ns=now_ns, leaks=inherited((), now_ns))
    if restored is None:
        return state
    gpus = {gpu.uuid: gpu for gpu in restored.gpus}
    awaited = tuple(each for each in restored.conditions if each.placement.gpu not in gpus)
    state = replace(
        state,
        module_inode=restored.module_inode,
        kernel_log_read=restored.kernel_log_read,
        lost=restored.lost,
        holds=dict(restored.holds),
        released_gpus=frozenset(restored.released_gpus),
        released_until_ns=restored.released_until_ns,
        awaited=awaited[-MAX_AWAITED:],
    )
    if not gpus:
        return state
    advertised = advertised_devices(restored.gpus, policy, {})
    conditions = with_daemon(
        with_channels(after_restart(restored.conditions, gpus), gpus, policy.injection, None, now_ns=now_ns),
        advertised,
        policy.sharing,
        ready=None,
        missing="",
        now_ns=now_ns,
    )
    xids: dict[GpuUuid, dict[int, int]] = {}
    for gpu, xid, count in restored.xids:
        if gpu in gpus:
            xids.setdefault(gpu, {})[xid] = count
    return replace(
        state,
        gpus=gpus,
        conditions=conditions,
        xids=xids,
        xids_before={(gpu, xid): count for gpu, counts in xids.items() for xid, count in counts.items()},
        advertised=advertised,
        devices=verdicts(advertised, conditions, frozenset()),
        first_probes_by_ns=now_ns + policy.first_probe_wait_ns,
        leaks=inherited(conditions.values(), now_ns),
        soft_flip_ns=now_ns if any(_is_soft_flip(each) for each in conditions.values()) else None,
    )


def _is_soft_flip(condition: Condition) -> bool:
    """Whether soft evidence flipped a device; when it did is not kept, so the breaker counts from here."""
    return condition.flips and REASON_SPECS[condition.reason].evidence is Evidence.SOFT
