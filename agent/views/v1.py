"""The types of the JSON documents of ``gpu-agent/v1``: their keys, in snake_case, are stable.

A null is a value that is unknown or does not apply. A moment has two keys: ``X`` is the time of day (RFC
3339), null for a moment of an earlier boot, and ``X_monotonic_ns`` the same as CLOCK_MONOTONIC has it.
"""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from agent.model.effects import EventKind
from agent.model.health import Details, Evidence, Health, Reason, Recovery
from agent.model.snapshot import RegistrationPhase
from agent.model.topology import PcieDistance
from agent.model.usage import Certainty, Owner, ProbeState, ProcessInfo, UsageSource


class _Document(TypedDict):
    apiVersion: str


class PreflightReason(TypedDict):
    """Why no GPU job can be sent to the node now; it names no pids and no pods."""

    code: str
    """A reason code, or ``standby``."""
    message: str
    advice: str
    gpus: Sequence[str]
    """UUIDs."""
    bytes: NotRequired[int]
    """Of memory: how much; only of findings on memory."""


class Preflight(_Document):
    """``/preflight``: whether a GPU job can be sent to the node now."""

    ready: bool
    reasons: Sequence[PreflightReason]


class Condition(TypedDict):
    """One active condition."""

    code: Reason
    number: int | None
    """XID or NVML return code."""
    message: str
    advice: str
    gpu_uuid: str
    gi: int | None
    """GPU instance; null: the whole GPU."""
    ci: int | None
    """Compute instance; null: the whole GPU instance."""
    source: str
    evidence: Evidence
    recovery: Recovery
    flips: bool
    """Whether devices at this place are Unhealthy while the condition is active."""
    lasts: bool
    """The cause is still present, so that probes that pass do not clear the condition."""
    count: int
    clean_probes: int
    """Probes passed in a row since the last report."""
    details: Details | None
    """Of a finding on the use of a GPU."""
    since: str | None
    since_monotonic_ns: int
    last: str | None
    last_monotonic_ns: int


class Device(TypedDict):
    """One device as the kubelet gets it."""

    id: str
    resource: str
    health: Health
    reasons: Sequence[Condition]
    uuid: str
    """Of the GPU or MIG device."""
    gpu: int | None
    """NVML index of the GPU."""
    gpu_uuid: str
    gi: int | None
    ci: int | None
    replica: int | None
    numa_node: int | None
    model: str | None
    pci: str | None
    memory_bytes: int | None
    allocated: bool | None
    pod: str | None
    """``namespace/name``."""


class Devices(_Document):
    """``/v1/devices``: every device as it is advertised to the kubelet, and the pod that holds it."""

    devices: Sequence[Device]


class Conditions(_Document):
    """``/v1/conditions``: every active condition, including those that flip no device."""

    conditions: Sequence[Condition]


class Resource(TypedDict):
    """One resource as the kubelet counts it, and its registration."""

    resource: str
    capacity: int
    allocatable: int
    registration: RegistrationPhase
    message: str
    since: str | None
    since_monotonic_ns: int


class Allocatable(_Document):
    """``/v1/allocatable``: each resource as the kubelet counts it."""

    resources: Sequence[Resource]


class UnhealthyDevice(TypedDict):
    """A device that a list has as Unhealthy."""

    id: str
    health: Health
    reasons: Sequence[Condition]


class SentList(TypedDict):
    """A list of devices as it was sent to the kubelet."""

    resource: str
    generation: int
    """Number of the registration."""
    capacity: int
    unhealthy: Sequence[UnhealthyDevice]
    sent: str | None
    sent_monotonic_ns: int


class Lists(_Document):
    """``/v1/lists``: of each resource the newest list that the kubelet can have had at ``?at=``."""

    lists: Sequence[SentList]


class GpuLink(TypedDict):
    """The connection to another GPU."""

    uuid: str
    nvlinks: int | None
    pcie: PcieDistance | None
    kind: str | None
    """As in the table of ``nvidia-smi topo -m``."""


class GpuPlace(TypedDict):
    """The connections of one GPU."""

    gpu: int | None
    uuid: str
    pci: str
    numa_node: int | None
    cpu_affinity: str | None
    """A list of CPUs, such as ``0-31``."""
    links: Sequence[GpuLink]


class Topology(_Document):
    """``/v1/topology``: the connection of every two GPUs, and the CPU and NUMA affinity of each."""

    gpus: Sequence[GpuPlace]


class Event(TypedDict):
    """One entry of the event log."""

    number: int
    time: str | None
    time_monotonic_ns: int
    kind: EventKind
    message: str
    warning: bool
    fields: dict[str, Any]


class Events(_Document):
    """``/v1/events``: entries after number ``?since=``; ``?wait=`` seconds for the next one."""

    events: Sequence[Event]
    last: int
    """The number of the newest entry."""
    missed: int
    """Older entries that were evicted."""


class Probe(TypedDict):
    """The status of the eBPF probe."""

    state: ProbeState
    tier: str
    loader: str
    headers: str
    """Release of the kernel headers that it was compiled with; empty: precompiled."""
    attached: Sequence[str]
    missing: dict[str, str]
    """Programs that are not attached, and why."""
    code: str
    """Why it is disabled."""
    message: str
    load_ms: float
    attach_ms: float
    entry_points: Sequence[str]
    """Functions of the driver that are traced (tier driver)."""
    why_not_driver: str
    """Why tier driver is not in use."""
    pinned: str
    """The directory that keeps the probe for the next agent."""
    not_pinned: str
    """Why it is not kept although configured."""


class ProcessIdentity(TypedDict):
    """Which process, and what it belongs to."""

    pid: int
    start_ticks: int
    comm: str
    state: str
    """One letter as in /proc/PID/stat."""
    killable: bool
    """False: no signal reaches it, or it exited already."""
    owner: Owner
    pod: str | None
    """``namespace/name``, or the UID where the name is unknown."""
    pod_uid: str | None
    container_id: str | None
    cgroup: str


class Slice(TypedDict):
    """A MIG device of the process's GPU."""

    gi: int
    ci: int


class GpuUse(TypedDict):
    """What one process holds of one GPU."""

    gpu_uuid: str
    gpu: int | None
    fds: int
    contexts: int | None
    contexts_compute: int | None
    """At least so many are of compute."""
    contexts_allocated: int
    """Contexts created since the process was first seen."""
    contexts_freed: int
    memory_bytes: int | None
    slices: Sequence[Slice]


class Process(ProcessIdentity):
    """A process that has files of the driver open."""

    files: int | None
    fds: int
    partial: bool
    """Its contexts are a lower bound."""
    contexts_unplaced: int
    """Contexts whose GPU is unknown."""
    gpus: Sequence[GpuUse]
    since: str | None
    since_monotonic_ns: int
    exiting_since: str | None
    exiting_since_monotonic_ns: int


class Orphan(TypedDict):
    """What a process that exited left on a GPU."""

    owner: ProcessIdentity
    gpu_uuid: str | None
    gpu: int | None
    clients: int
    contexts: int | None
    holders: Sequence[int]
    """Processes that keep it."""
    more: int
    """Further exited owners whose clients are counted here."""
    ended: str | None
    ended_monotonic_ns: int
    since: str | None
    since_monotonic_ns: int


class GpuTotal(TypedDict):
    """The use of one GPU in all."""

    gpu_uuid: str
    gpu: int | None
    processes: int
    contexts: int | None


class Contexts(_Document):
    """``/v1/contexts``: every process but the agent that has files of the driver open."""

    probe: Probe | None
    complete: bool | None
    """Null until the first reading, and then the keys from ``incomplete_because`` to ``seen`` are absent."""
    incomplete_because: NotRequired[str]
    certainty: NotRequired[Certainty]
    seen_by: NotRequired[UsageSource]
    events_lost: NotRequired[int]
    evicted: NotRequired[int]
    seen: NotRequired[str | None]
    seen_monotonic_ns: NotRequired[int]
    processes: Sequence[Process]
    orphans: Sequence[Orphan]
    gpus: Sequence[GpuTotal]


class DeviceOfPod(TypedDict):
    """A device that the kubelet gave to a pod."""

    device: str
    pod: str


class Holder(TypedDict):
    """A process on a GPU or MIG device."""

    pid: int
    start_ticks: int | None
    comm: str
    owner: Owner
    pod: str | None
    state: str
    contexts: int | None
    memory_bytes: int | None
    service: bool
    """The agent itself, or a process that may use every GPU."""
    partial: bool
    is_agent: bool
    since: str | None
    since_monotonic_ns: int


class GpuOwnership(TypedDict):
    """The pods and processes of one GPU, or of one MIG device."""

    uuid: str
    gpu: int | None
    gpu_uuid: str
    gi: int | None
    ci: int | None
    given_to: Sequence[DeviceOfPod] | None
    holders: Sequence[Holder] | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    memory_unclaimed_bytes: int | None
    """Used by no process that NVML lists."""
    nvml_process_info: ProcessInfo | None


class Owners(_Document):
    """``/v1/owners``: the pods, the holders and the memory users of each GPU or MIG device."""

    owners: Sequence[GpuOwnership]


DOCUMENTS = (*(Preflight, Devices, Conditions, Allocatable, Lists, Topology, Events, Contexts, Owners),)
