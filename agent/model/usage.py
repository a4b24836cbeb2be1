"""The use of each GPU: processes, their files and contexts, their memory, and the living pods.

Invariants: a process is named by its pid and its start, since pids are reused. An unknown value is None
and never 0. Tuples are ordered, so two snapshots of the same state are equal.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final, Literal, NamedTuple, NewType

import msgspec

from agent.model.ids import ALL, GpuUuid, Placement

PodUid = NewType("PodUid", str)
"""UID of a pod as the kubelet names its directories: lower case, with dashes; of a static pod a hash."""

Qos = Literal["guaranteed", "burstable", "besteffort"]

UNINTERRUPTIBLE: Final = "D"
"""State of a process that no signal reaches."""

ENDED: Final = frozenset("ZX")
"""States of a process that ended and is not gone yet."""

GONE: Final = "gone"
"""In place of the state of a process that is no more."""


class ProcessKey(NamedTuple):
    """One process, for as long as the machine is up."""

    pid: int
    start_ticks: int
    """Start in clock ticks since boot, as in /proc/PID/stat."""


class PodRef(msgspec.Struct, frozen=True):
    """The pod of a process, by the path of its cgroup."""

    uid: PodUid
    container_id: str | None
    """None in the pod's own cgroup, outside of any container."""
    qos: Qos | None
    """None where the path is read inside a cgroup namespace that hides it."""


class NoPod(Enum):
    """Instead of the pod of a process."""

    HOST = "host"
    """It runs outside of every pod."""
    UNKNOWN = "unknown"
    """Its cgroup could not be read, or lies outside of the agent's cgroup namespace."""


PodOf = PodRef | NoPod

Owner = Literal["pod", "host", "unknown"]


class ProcessStatus(msgspec.Struct, frozen=True):
    """A process as /proc shows it."""

    key: ProcessKey
    comm: str
    state: str
    """One letter as in /proc/PID/stat: R, S, D, Z, …, or GONE."""
    cgroup: str
    """Path of its cgroup, without the mount point; of cgroup v1 that of the controller with the pod in it."""
    pod: PodOf
    killed: bool = False
    """SIGKILL waits to be delivered, so it only lives because the kernel cannot end it."""
    started_as: tuple[str, ...] | None = ()
    """What root started it as: the system service and, where it runs with root's rights outside of pods, the
    executable; None: could not be read. The name that a process gives itself is ``comm``."""

    @property
    def owner(self) -> Owner:
        """What it belongs to."""
        return "pod" if isinstance(self.pod, PodRef) else self.pod.value


class GpuHold(msgspec.Struct, frozen=True):
    """What one process has of one GPU."""

    gpu: GpuUuid
    fds: int
    """Descriptors on files of this GPU; where the process holds no other GPU, those on shared files too."""
    contexts: int | None
    """Live contexts, of compute or graphics; None where only /proc could be read."""
    allocated: int = 0
    """Contexts it made since it was first seen; only grows."""
    freed: int = 0
    compute: int | None = None
    """At least so many of the contexts are of compute: their clients use unified memory, as CUDA does and
    graphics do not; None where only /proc could be read."""
    slices: tuple[Placement, ...] = ()
    """The MIG devices that it has opened; empty: none seen, it may use the GPU as a whole."""


class ProcessUse(msgspec.Struct, frozen=True):
    """A process that has files of the driver open."""

    status: ProcessStatus
    since_ns: int
    """When it was first seen with a file of the driver."""
    holds: tuple[GpuHold, ...]
    """By GPU; a process may have opened the driver and no GPU."""
    files: int | None
    """Different open files; None where only /proc could be read, which does not distinguish them."""
    fds: int
    exiting_since_ns: int | None = None
    """When its exit was first seen; a process that stays is stuck in the kernel."""
    partial: bool = False
    """Its contexts are a lower bound: it held files before the probe was attached, it has too many, or the
    GPU of some is not known."""
    unplaced: int = 0
    """Contexts on a GPU that could not be found out."""
    is_agent: bool = False

    @property
    def key(self) -> ProcessKey:
        """Which process."""
        return self.status.key


class Orphan(msgspec.Struct, frozen=True):
    """What a process that ended left on a GPU, because the file it was made with lives on."""

    owner: ProcessStatus
    """Its last status, but for its state."""
    ended_ns: int
    """When it was seen to be gone."""
    gpu: GpuUuid | None
    """None: could not be found out."""
    clients: int
    contexts: int | None
    """None: made before the probe was attached."""
    holders: tuple[ProcessKey, ...]
    """At most MAX_HOLDERS processes that keep it alive; empty: the file is in a message, or only mapped."""
    since_ns: int
    """When the owner was first seen with a file of the driver."""
    more: int = 0
    """Further owners of which the same holder keeps something, whose clients and contexts are in these."""


MAX_HOLDERS: Final = 16


class GpuTotal(msgspec.Struct, frozen=True):
    """The sum of all processes on one GPU."""

    gpu: GpuUuid
    processes: int
    """Processes that hold it, with services, without the agent, which has every GPU open and uses none."""
    contexts: int | None
    """Live contexts, those of orphans included; None where only /proc could be read."""


UsageSource = Literal["probe", "proc"]
Certainty = Literal["verified", "unverified"]


class Usage(msgspec.Struct, frozen=True):
    """One usage snapshot: the processes that use the driver.

    Its source emits it when it changed, and at least every 30 s; an older one is stale.
    """

    at_ns: int
    processes: tuple[ProcessUse, ...] = ()
    """By pid."""
    orphans: tuple[Orphan, ...] = ()
    """By pid of the owner, then GPU."""
    totals: tuple[GpuTotal, ...] = ()
    """By GPU; only those that a process other than the agent holds."""
    source: UsageSource = "probe"
    """proc: only /proc could be read, which shows the holders of files and no contexts."""
    complete: bool = True
    """False: events were lost or processes could not be seen, and nothing was rebuilt since."""
    incomplete_because: str = ""
    doubted: frozenset[GpuUuid] = frozenset()
    """Where it is not complete, the only GPUs of which something may be missing; none: any."""
    certainty: Certainty = "verified"
    """unverified: on this driver version the counts were never compared with the real contexts."""
    events_lost: int = 0
    evicted: int = 0
    """Entries evicted because a table was full."""

    def is_whole(self, gpu: GpuUuid) -> bool:
        """Return whether nothing of a GPU is missing."""
        return self.complete or (bool(self.doubted) and gpu not in self.doubted)

    @property
    def is_blind(self) -> bool:
        """Whether something may be missing of every GPU."""
        return not self.complete and not self.doubted


class MemoryUser(NamedTuple):
    """A process that NVML lists on a GPU."""

    pid: int
    used_bytes: int | None
    """None: NVML does not report it."""
    gi: int = ALL
    ci: int = ALL


ProcessInfo = Literal["ok", "unreliable", "unsupported"]
"""Whether NVML's list of processes is reliable. unreliable: it has more records than are read, or some
that cannot be, so the library and the binding differ on the layout; unsupported: the driver has no such
call."""


class GpuMemory(msgspec.Struct, frozen=True):
    """Memory of one GPU, and its users by NVML's list."""

    used_bytes: int | None
    """NVML's memory information v2 ``used``, without the driver's own reservation."""
    total_bytes: int | None
    users: tuple[MemoryUser, ...] = ()
    """By pid; empty where the list is unreliable."""
    process_info: ProcessInfo = "ok"


class PodSeen(msgspec.Struct, frozen=True):
    """A pod of this node."""

    namespace: str
    name: str
    alive: bool = True
    """False: it finished, or it is being deleted past its grace period."""

    @property
    def full_name(self) -> str:
        """``namespace/name``, as allocations name it."""
        return f"{self.namespace}/{self.name}"


Pods = Mapping[PodUid, PodSeen]


class DeviceCall(NamedTuple):
    """What the kernel saw of the newest harmless call that the agent made on a GPU's device file."""

    ready: bool
    """It returned in time."""
    entered_ns: int
    took_ns: int | None
    """None while it has not returned."""


ProbeState = Literal["loading", "running", "disabled"]


class ProbeView(msgspec.Struct, frozen=True):
    """How the probe is."""

    state: ProbeState
    tier: str = ""
    """driver or syscalls while it runs, procfs where only /proc is read."""
    loader: str = ""
    headers: str = ""
    """Release of the kernel headers it was compiled with; empty: it was not."""
    attached: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    """Programs that are not attached, and why."""
    code: str = ""
    """Why it is disabled: ``kernel_headers_missing``, ``missing_capability``, …"""
    message: str = ""
    load_ms: float = 0.0
    attach_ms: float = 0.0
    entry_points: tuple[str, ...] = ()
    """Functions of the driver that are traced (tier driver)."""
    why_not_driver: str = ""
    """Why tier driver, which costs less, is not in use."""
    pinned: str = ""
    """Where the probe is kept for the next agent; empty: it ends with this one."""
    not_pinned: str = ""
    """Why it ends with this one although it was to be kept."""
