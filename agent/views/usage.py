"""The use of the GPUs as JSON-ready values: processes, contexts, owners, status of the probe.

Guarantees: as agent.views.documents. These documents name processes and pods, so they are served to this
machine only.
"""

from collections.abc import Iterable

from agent.core.usage.ownership import Holder, Ownership, is_killable, owners, pod_name, user_of
from agent.model.ids import ALL, GpuUuid
from agent.model.snapshot import Snapshot
from agent.model.usage import GpuHold, Orphan, PodRef, ProcessStatus, ProcessUse
from agent.views import v1
from agent.views.documents import API_VERSION, TimeOf, day, probe


def contexts(snapshot: Snapshot, time_of: TimeOf) -> v1.Contexts:
    """Return every process but the agent that has files of the driver open, with its contexts on each GPU.

    The agent has every GPU open and uses none.
    ``complete`` is null while nothing was seen yet.
    """
    usage = snapshot.usage
    if usage is None:
        return {
            "apiVersion": API_VERSION,
            "probe": probe(snapshot.probe),
            "complete": None,
            "processes": [],
            "orphans": [],
            "gpus": [],
        }
    return {
        "apiVersion": API_VERSION,
        "probe": probe(snapshot.probe),
        "complete": usage.complete,
        "incomplete_because": usage.incomplete_because,
        "certainty": usage.certainty,
        "seen_by": usage.source,
        "events_lost": usage.events_lost,
        "evicted": usage.evicted,
        "seen": day(usage.at_ns, time_of),
        "seen_monotonic_ns": usage.at_ns,
        "processes": [
            _process(process, snapshot, time_of) for process in usage.processes if not process.is_agent
        ],
        "orphans": [_orphan(orphan, snapshot, time_of) for orphan in usage.orphans],
        "gpus": [
            {
                "gpu_uuid": total.gpu,
                "gpu": _index(snapshot, total.gpu),
                "processes": total.processes,
                "contexts": total.contexts,
            }
            for total in usage.totals
        ],
    }


def ownership(snapshot: Snapshot, time_of: TimeOf) -> v1.Owners:
    """Return the pods, the holders and the memory users of each GPU or MIG device."""
    return {
        "apiVersion": API_VERSION,
        "owners": [_ownership(owned, time_of) for owned in owners(snapshot)],
    }


def _process(process: ProcessUse, snapshot: Snapshot, time_of: TimeOf) -> v1.Process:
    return {
        **_identity(process.status, snapshot),
        "files": process.files,
        "fds": process.fds,
        "partial": process.partial,
        "contexts_unplaced": process.unplaced,
        "gpus": [_hold(hold, process, snapshot) for hold in process.holds],
        "since": day(process.since_ns, time_of),
        "since_monotonic_ns": process.since_ns,
        "exiting_since": day(process.exiting_since_ns or 0, time_of),
        "exiting_since_monotonic_ns": process.exiting_since_ns or 0,
    }


def _identity(status: ProcessStatus, snapshot: Snapshot) -> v1.ProcessIdentity:
    pod = status.pod if isinstance(status.pod, PodRef) else None
    return {
        "pid": status.key.pid,
        "start_ticks": status.key.start_ticks,
        "comm": status.comm,
        "state": status.state,
        "killable": is_killable(status),
        "owner": status.owner,
        "pod": pod_name(status, snapshot.pods_seen),
        "pod_uid": None if pod is None else pod.uid,
        "container_id": None if pod is None else pod.container_id,
        "cgroup": status.cgroup,
    }


def _hold(hold: GpuHold, process: ProcessUse, snapshot: Snapshot) -> v1.GpuUse:
    user = user_of(snapshot.memory.get(hold.gpu), process.key.pid)
    return {
        "gpu_uuid": hold.gpu,
        "gpu": _index(snapshot, hold.gpu),
        "fds": hold.fds,
        "contexts": hold.contexts,
        "contexts_compute": hold.compute,
        "contexts_allocated": hold.allocated,
        "contexts_freed": hold.freed,
        "memory_bytes": None if user is None else user.used_bytes,
        "slices": [{"gi": place.gi, "ci": place.ci} for place in hold.slices],
    }


def _orphan(orphan: Orphan, snapshot: Snapshot, time_of: TimeOf) -> v1.Orphan:
    return {
        "owner": _identity(orphan.owner, snapshot),
        "gpu_uuid": orphan.gpu,
        "gpu": None if orphan.gpu is None else _index(snapshot, orphan.gpu),
        "clients": orphan.clients,
        "contexts": orphan.contexts,
        "holders": [holder.pid for holder in orphan.holders],
        "more": orphan.more,
        "ended": day(orphan.ended_ns, time_of),
        "ended_monotonic_ns": orphan.ended_ns,
        "since": day(orphan.since_ns, time_of),
        "since_monotonic_ns": orphan.since_ns,
    }


def _ownership(owned: Ownership, time_of: TimeOf) -> v1.GpuOwnership:
    place = owned.placement
    return {
        "uuid": owned.uuid,
        "gpu": owned.index,
        "gpu_uuid": place.gpu,
        "gi": None if place.gi == ALL else place.gi,
        "ci": None if place.ci == ALL else place.ci,
        "given_to": None
        if owned.allocated_to is None
        else [{"device": device, "pod": pod} for device, pod in owned.allocated_to],
        "holders": None if owned.holders is None else list(_holders(owned.holders, time_of)),
        "memory_used_bytes": owned.used_bytes,
        "memory_total_bytes": owned.total_bytes,
        "memory_unclaimed_bytes": owned.unclaimed_bytes,
        "nvml_process_info": owned.process_info,
    }


def _holders(holders: Iterable[Holder], time_of: TimeOf) -> Iterable[v1.Holder]:
    for holder in holders:
        yield {
            "pid": holder.pid,
            "start_ticks": holder.start_ticks,
            "comm": holder.comm,
            "owner": holder.owner,
            "pod": holder.pod,
            "state": holder.state,
            "contexts": holder.contexts,
            "memory_bytes": holder.used_bytes,
            "service": holder.service,
            "partial": holder.partial,
            "is_agent": holder.is_agent,
            "since": day(holder.since_ns or 0, time_of),
            "since_monotonic_ns": holder.since_ns or 0,
        }


def _index(snapshot: Snapshot, gpu: GpuUuid) -> int | None:
    view = snapshot.view_of(gpu)
    return None if view is None else view.index
