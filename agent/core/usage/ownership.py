"""The pods that have each GPU or MIG device allocated, its holders, and the users of its memory.

Invariants: a process belongs to the pod that its cgroup names, and to the host if it names none. A figure
that no source has stays unknown: a holder without a figure of memory has None, not zero.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Final

import msgspec

from agent.model.gpu import Gpu
from agent.model.ids import ALL, DeviceId, GpuUuid, Placement
from agent.model.snapshot import GpuView, Snapshot
from agent.model.usage import (
    ENDED,
    GONE,
    UNINTERRUPTIBLE,
    GpuHold,
    GpuMemory,
    MemoryUser,
    Owner,
    PodRef,
    Pods,
    ProcessInfo,
    ProcessStatus,
    ProcessUse,
    Usage,
)

# From a process to the devices of its pod

Allocated = Mapping[Placement, tuple[tuple[DeviceId, tuple[str, ...]], ...]]
"""The allocated devices of each place, each with its pod, or the pods of which one has it."""

_SEVERAL: Final = " or "
"""Between the names where it is not known which pod has a device (agent/sources/pods/holders.py)."""


def allocated_by_place(
    places: Iterable[tuple[DeviceId, Placement]], pods: Mapping[DeviceId, str]
) -> Allocated:
    """Return what is allocated to pods, by place; the places are those of all advertised devices."""
    found: dict[Placement, tuple[tuple[DeviceId, tuple[str, ...]], ...]] = {}
    for device, place in places:
        if device in pods:
            found[place] = (*found.get(place, ()), (device, tuple(pods[device].split(_SEVERAL))))
    return found


def is_allocated(allocated_to: Allocated, places: Iterable[Placement], pod: str) -> bool:
    """Return whether a pod may have a device at one of the places allocated."""
    for place in places:
        for other, devices in allocated_to.items():
            if other.gpu == place.gpu and place.overlaps(other) and any(pod in names for _, names in devices):
                return True
    return False


def is_service(
    process: ProcessUse, names: frozenset[str], namespaces: AbstractSet[str], pods: Pods | None
) -> bool:
    """Return whether a process is the agent, or one that root or a cluster's administrator named so.

    The name that a process gives itself counts only in a pod of one of these namespaces, and where the other
    names could not be read.
    """
    status = process.status
    if process.is_agent:
        return True
    is_named = status.comm in comms_of(names)
    if isinstance(status.pod, PodRef):
        seen = None if pods is None else pods.get(status.pod.uid)
        return is_named and (pods is None or (seen is not None and seen.namespace in namespaces))
    return is_named if status.started_as is None else not names.isdisjoint(status.started_as)


@lru_cache(maxsize=8)
def comms_of(names: frozenset[str]) -> frozenset[str]:
    """Return names of programs as the kernel keeps them."""
    return frozenset(name[:COMM_LENGTH] for name in names)


COMM_LENGTH: Final = 15
"""Bytes of a process's name that the kernel keeps (TASK_COMM_LEN - 1)."""


def places_of(hold: GpuHold, user: MemoryUser | None) -> tuple[Placement, ...]:
    """Return a process's places on a GPU: the slices that it is known to use, else the whole GPU."""
    if hold.slices:
        return hold.slices
    if user is not None and user.gi != ALL:
        return (Placement(hold.gpu, user.gi, user.ci),)
    return (Placement(hold.gpu),)


def holding(usage: Usage, gpu: GpuUuid) -> Iterator[tuple[ProcessUse, GpuHold]]:
    """Yield each process that holds a GPU, with its hold."""
    for process in usage.processes:
        for hold in process.holds:
            if hold.gpu == gpu:
                yield process, hold


def is_in_use(process: ProcessUse, hold: GpuHold, memory: GpuMemory | None) -> bool | None:
    """Return whether a process uses a GPU and not only has it open; None: unknown.

    A monitor opens every GPU and uses none. NVML lists those that have a context.
    """
    if hold.contexts or user_of(memory, process.key.pid) is not None:
        return True
    is_counted = hold.contexts is not None and not process.partial
    is_listed = memory is not None and memory.process_info == "ok"
    return False if is_counted or is_listed else None


def user_of(memory: GpuMemory | None, pid: int) -> MemoryUser | None:
    """Return the entry of a pid in NVML's list of a GPU, which is in the order of pids."""
    if memory is None:
        return None
    at = bisect_left(memory.users, (pid,))
    return memory.users[at] if at < len(memory.users) and memory.users[at].pid == pid else None


def pod_name(status: ProcessStatus, pods: Pods | None) -> str | None:
    """Return the name of a process's pod; None: it has none, or it is unknown."""
    return name_of(status.pod, pods) if isinstance(status.pod, PodRef) else None


def name_of(pod: PodRef, pods: Pods | None) -> str:
    """Return ``namespace/name`` of a pod, or its UID where the name is unknown."""
    seen = None if pods is None else pods.get(pod.uid)
    return pod.uid if seen is None else seen.full_name


def is_killable(status: ProcessStatus) -> bool:
    """Return whether a signal could end a process; nothing is ever killed by the agent itself."""
    return status.state not in {UNINTERRUPTIBLE, GONE, *ENDED}


# For the owners document


class Holder(msgspec.Struct, frozen=True):
    """A process on a GPU or MIG device."""

    pid: int
    start_ticks: int | None
    """None of a process that only NVML lists."""
    comm: str
    owner: Owner
    pod: str | None
    """``namespace/name``, or the UID where the name is unknown."""
    state: str
    contexts: int | None
    used_bytes: int | None
    since_ns: int | None
    service: bool
    """The agent itself, or a service that is allowed on every GPU."""
    partial: bool = False
    is_agent: bool = False


class Ownership(msgspec.Struct, frozen=True):
    """One GPU, or one MIG device of a partitioned GPU."""

    placement: Placement
    uuid: str
    index: int | None
    """None: NVML does not list its GPU."""
    allocated_to: tuple[tuple[DeviceId, str], ...] | None
    """Devices that are allocated to pods, with the pod; None: unknown now."""
    holders: tuple[Holder, ...] | None
    """By pid; None: unknown now."""
    used_bytes: int | None
    total_bytes: int | None
    unclaimed_bytes: int | None
    """Used by no process that NVML lists; None where a figure is missing, and of MIG devices."""
    process_info: ProcessInfo | None
    """None: not read from NVML yet."""


def owners(snapshot: Snapshot) -> tuple[Ownership, ...]:
    """Return the ownership of each GPU, or of each of its MIG devices, in the order of the GPUs."""
    return tuple(
        _ownership(snapshot, view, uuid, place) for view in snapshot.gpus for uuid, place in _places(view.gpu)
    )


def _places(gpu: Gpu) -> Iterator[tuple[str, Placement]]:
    if not gpu.mig_devices:
        yield gpu.uuid, gpu.placement
    for mig in gpu.mig_devices:
        yield mig.uuid, Placement(gpu.uuid, mig.gi, mig.ci)


def _ownership(snapshot: Snapshot, view: GpuView, uuid: str, place: Placement) -> Ownership:
    gpu = view.gpu
    pods = snapshot.pods
    advertised = [device for resource in snapshot.resources for device in resource.devices]
    memory = snapshot.memory.get(gpu.uuid)
    whole = memory if place == gpu.placement else None
    return Ownership(
        placement=place,
        uuid=uuid,
        index=view.index,
        allocated_to=None
        if pods is None
        else tuple(
            (device.id, pods[device.id])
            for device in advertised
            if device.id in pods and device.placement.overlaps(place)
        ),
        holders=_holders(snapshot, gpu.uuid, place),
        used_bytes=None if whole is None else whole.used_bytes,
        total_bytes=None if whole is None else whole.total_bytes,
        unclaimed_bytes=None if whole is None else unclaimed_bytes(whole),
        process_info=None if memory is None else memory.process_info,
    )


def unclaimed_bytes(memory: GpuMemory) -> int | None:
    """Return how much used memory belongs to no process that NVML lists; None: that is unknown.

    NVML lists processes of other PID namespaces and of virtual machines too, which /proc does not show.
    """
    if memory.used_bytes is None or memory.process_info != "ok":
        return None
    claimed = [user.used_bytes for user in memory.users if user.used_bytes is not None]
    return max(0, memory.used_bytes - sum(claimed)) if len(claimed) == len(memory.users) else None


def _holders(snapshot: Snapshot, gpu: GpuUuid, place: Placement) -> tuple[Holder, ...] | None:
    memory = snapshot.memory.get(gpu)
    users = {user.pid: user for user in (() if memory is None else memory.users)}
    usage = snapshot.usage or Usage(at_ns=0)
    found = []
    for process, hold in holding(usage, gpu):
        user = users.pop(process.key.pid, None)
        if any(place.overlaps(each) for each in places_of(hold, user)):
            found.append(_holder(snapshot, process, hold, user))
    found += [
        _only_listed(user) for user in users.values() if Placement(gpu, user.gi, user.ci).overlaps(place)
    ]
    is_whole = snapshot.usage is not None and snapshot.usage.is_whole(gpu)
    if not is_whole and all(holder.is_agent for holder in found):
        # NVML alone misses processes, such as one that keeps the files of another that ended.
        return None
    return tuple(sorted(found, key=lambda holder: holder.pid))


def _holder(snapshot: Snapshot, process: ProcessUse, hold: GpuHold, user: MemoryUser | None) -> Holder:
    status, policy = process.status, snapshot.policy.leaks
    return Holder(
        pid=status.key.pid,
        start_ticks=status.key.start_ticks,
        comm=status.comm,
        owner=status.owner,
        pod=pod_name(status, snapshot.pods_seen),
        state=status.state,
        contexts=hold.contexts,
        used_bytes=None if user is None else user.used_bytes,
        since_ns=process.since_ns,
        service=is_service(process, policy.allowed, policy.namespaces, snapshot.pods_seen),
        partial=process.partial,
        is_agent=process.is_agent,
    )


def _only_listed(user: MemoryUser) -> Holder:
    """Return a process that only NVML lists; it may be in another PID namespace, or gone already."""
    return Holder(
        pid=user.pid,
        start_ticks=None,
        comm="",
        owner="unknown",
        pod=None,
        state="",
        contexts=None,
        used_bytes=user.used_bytes,
        since_ns=None,
        service=False,
    )
