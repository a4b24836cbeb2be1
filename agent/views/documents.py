"""The node as JSON-ready values: one form for HTTP, the control socket and the commands.

Guarantees: keys are stable and in snake_case, as ``gpu-agent/v1`` (new ones are added beside them); an
unknown value is null, never an invented one; every moment is given twice, as the time of day for people and
as monotonic nanoseconds for programs; the index of a GPU that NVML does not list is null.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from agent import __version__
from agent.core.allocation.topology import short_name
from agent.core.health.inventory import unadvertised_devices
from agent.core.reasons import REASON_SPECS, advice_of
from agent.model.gpu import Gpu
from agent.model.health import Condition, Reason
from agent.model.ids import ALL, DeviceId, GpuUuid
from agent.model.sample import GpuSample
from agent.model.snapshot import Device, DriverView, Finding, GpuView, ListSent, Resource, Snapshot
from agent.model.usage import DeviceCall, ProbeView, Usage
from agent.views import v1
from agent.views.events import Entry

API_VERSION: Final = "gpu-agent/v1"

Json = dict[str, object]
TimeOf = Callable[[int], str]
"""Returns the time of day of a monotonic moment, as RFC 3339."""


STANDBY: Final[v1.PreflightReason] = {
    "code": "standby",
    "message": "Another agent serves this node; this one takes over when that one exits",
    "advice": "ask the agent that serves",
    "gpus": (),
}
"""The only reason that is no finding: an agent that stands by knows nothing of the node."""


def preflight_of_standby() -> v1.Preflight:
    """Return the preflight document of an agent that stands by."""
    return {"apiVersion": API_VERSION, "ready": False, "reasons": [STANDBY]}


def preflight(snapshot: Snapshot) -> v1.Preflight:
    """Return whether a GPU job can be sent here now, and if not, the reasons: no pids, no pod names."""
    return {
        "apiVersion": API_VERSION,
        "ready": snapshot.ready,
        "reasons": [_finding(finding) for finding in snapshot.findings],
    }


def _finding(finding: Finding) -> v1.PreflightReason:
    reason: v1.PreflightReason = {
        "code": finding.reason.value,
        "message": finding.message,
        "advice": REASON_SPECS[finding.reason].advice,
        "gpus": finding.gpus,
    }
    if finding.used_bytes is not None:
        reason["bytes"] = finding.used_bytes
    return reason


def devices(snapshot: Snapshot, time_of: TimeOf) -> v1.Devices:
    """Return every device as it is advertised to the kubelet, with its reasons and the pod that holds it.

    ``allocated`` is null while the pods of devices are unknown.
    """
    gpus = {view.gpu.uuid: view for view in snapshot.gpus}
    return {
        "apiVersion": API_VERSION,
        "devices": [
            _device(device, resource, gpus, snapshot.pods, time_of)
            for resource in snapshot.resources
            for device in resource.devices
        ],
    }


def _device(
    device: Device,
    resource: Resource,
    gpus: Mapping[GpuUuid, GpuView],
    pods: Mapping[DeviceId, str] | None,
    time_of: TimeOf,
) -> v1.Device:
    view = gpus.get(device.placement.gpu)
    pod = None if pods is None else pods.get(device.id)
    return {
        "id": device.id,
        "resource": resource.name,
        "health": device.health,
        "reasons": [condition(reason, time_of) for reason in device.reasons],
        "uuid": device.uuid,
        "gpu": view.index if view else None,
        "gpu_uuid": device.placement.gpu,
        "gi": _id_or_none(device.placement.gi),
        "ci": _id_or_none(device.placement.ci),
        "replica": device.replica,
        "numa_node": device.numa_node,
        "model": view.gpu.name if view else None,
        "pci": view.gpu.pci if view else None,
        "memory_bytes": _memory_of(device, view.gpu) if view else None,
        "allocated": None if pods is None else pod is not None,
        "pod": pod,
    }


def _memory_of(device: Device, gpu: Gpu) -> int | None:
    slices = (mig.memory_bytes for mig in gpu.mig_devices if mig.uuid == device.uuid)
    return next(slices, gpu.memory_bytes)


def conditions(snapshot: Snapshot, time_of: TimeOf) -> v1.Conditions:
    """Return every active condition, including those that flip no device."""
    return {
        "apiVersion": API_VERSION,
        "conditions": [condition(active, time_of) for view in snapshot.gpus for active in view.conditions],
    }


def condition(active: Condition, time_of: TimeOf) -> v1.Condition:
    """Return one active condition."""
    return {
        "code": active.reason,
        # The number of a leak's kind is internal: it only separates the findings.
        "number": None if active.reason is Reason.CONTEXT_LEAK else active.key.code or None,
        "message": active.message,
        "advice": advice_of(active),
        "gpu_uuid": active.placement.gpu,
        "gi": _id_or_none(active.placement.gi),
        "ci": _id_or_none(active.placement.ci),
        "source": active.key.source,
        "evidence": active.evidence,
        "recovery": active.recovery,
        "flips": active.flips,
        "lasts": active.lasts,
        "count": active.count,
        "clean_probes": active.clean_probes,
        "details": None if active.details is None else msgspec.to_builtins(active.details),
        "since": day(active.since_ns, time_of),
        "since_monotonic_ns": active.since_ns,
        "last": day(active.last_ns, time_of),
        "last_monotonic_ns": active.last_ns,
    }


def allocatable(snapshot: Snapshot, time_of: TimeOf) -> v1.Allocatable:
    """Return each resource as the kubelet counts it, and its registration."""
    return {
        "apiVersion": API_VERSION,
        "resources": [_resource(resource, time_of) for resource in snapshot.resources],
    }


def lists(sent: Iterable[ListSent], time_of: TimeOf) -> v1.Lists:
    """Return lists that the kubelet was sent, with the reasons of the devices Unhealthy in each."""
    return {
        "apiVersion": API_VERSION,
        "lists": [
            {
                "resource": each.resource,
                "generation": each.generation,
                "capacity": each.devices,
                "unhealthy": [
                    {
                        "id": device.id,
                        "health": device.health,
                        "reasons": [condition(reason, time_of) for reason in device.reasons],
                    }
                    for device in each.unhealthy
                ],
                "sent": day(each.began_ns, time_of),
                "sent_monotonic_ns": each.began_ns,
            }
            for each in sent
        ],
    }


def _resource(resource: Resource, time_of: TimeOf) -> v1.Resource:
    return {
        "resource": resource.name,
        "capacity": resource.capacity,
        "allocatable": resource.allocatable,
        "registration": resource.phase,
        "message": resource.message,
        "since": day(resource.since_ns, time_of),
        "since_monotonic_ns": resource.since_ns,
    }


def topology(snapshot: Snapshot, _time_of: TimeOf) -> v1.Topology:
    """Return the connection of every two GPUs, and the CPU and NUMA affinity of each."""
    return {"apiVersion": API_VERSION, "gpus": [_place(view, snapshot) for view in snapshot.gpus]}


def _place(view: GpuView, snapshot: Snapshot) -> v1.GpuPlace:
    gpu = view.gpu
    links = ((other.gpu, snapshot.topology.between(gpu.uuid, other.gpu.uuid)) for other in snapshot.gpus)
    return {
        "gpu": view.index,
        "uuid": gpu.uuid,
        "pci": gpu.pci,
        "numa_node": gpu.numa_node,
        "cpu_affinity": snapshot.topology.cpu_affinity.get(gpu.uuid),
        "links": [
            {"uuid": other.uuid, "nvlinks": link.nvlinks, "pcie": link.pcie, "kind": short_name(link)}
            for other, link in links
            if other.uuid != gpu.uuid
        ],
    }


def events(entries: Iterable[Entry], *, last: int, missed: int, time_of: TimeOf) -> v1.Events:
    """Return entries of the event log, and the number of older ones that were evicted."""
    return {
        "apiVersion": API_VERSION,
        "events": [_event(entry, time_of) for entry in entries],
        "last": last,
        "missed": missed,
    }


def _event(entry: Entry, time_of: TimeOf) -> v1.Event:
    return {
        "number": entry.number,
        "time": day(entry.at_ns, time_of),
        "time_monotonic_ns": entry.at_ns,
        "kind": entry.event.kind,
        "message": entry.event.message,
        "warning": entry.event.warning,
        "fields": dict(entry.event.fields or {}),
    }


def state(snapshot: Snapshot, time_of: TimeOf) -> Json:
    """Return the whole state, for debugging."""
    return {
        "apiVersion": API_VERSION,
        "changed": day(snapshot.at_ns, time_of),
        "changed_monotonic_ns": snapshot.at_ns,
        "driver": _driver(snapshot.driver),
        "kubelet_socket": None if snapshot.kubelet is None else {"inode": snapshot.kubelet.inode},
        "gpus": [_gpu(view, snapshot.device_calls.get(view.gpu.uuid)) for view in snapshot.gpus],
        "resources": [_resource(resource, time_of) for resource in snapshot.resources],
        "unoffered": [
            {"gpu_uuid": each.gpu, "message": each.why.value, "detail": each.detail}
            for each in unadvertised_devices(
                (view.gpu for view in snapshot.gpus if view.present), snapshot.policy
            )
        ],
        "conditions": conditions(snapshot, time_of)["conditions"],
        "holds": dict(snapshot.holds),
        "released_until": None if snapshot.released_until_ns is None else time_of(snapshot.released_until_ns),
        "released_until_monotonic_ns": snapshot.released_until_ns,
        "driver_released": snapshot.driver_released,
        "probe": probe(snapshot.probe),
        "usage": usage_summary(snapshot.usage),
        "observe": snapshot.policy.observe,
        "observed_flips": snapshot.observed_flips,
        "tasks": {
            name: {"running": task.running, "failures": task.failures, "message": task.message}
            for name, task in snapshot.tasks.items()
        },
        "facts_lost": dict(snapshot.facts_lost),
        "ready": snapshot.ready,
        "reasons": [_finding(finding) for finding in snapshot.findings],
    }


def probe(view: ProbeView | None) -> v1.Probe | None:
    """Return the status of the probe; null: it is off, or not loaded yet."""
    if view is None:
        return None
    return msgspec.convert(msgspec.structs.asdict(view) | {"missing": dict(view.missing)}, v1.Probe)


def usage_summary(usage: Usage | None) -> Json | None:
    """Return the quality of the usage snapshot, without its content; null: there is none."""
    if usage is None:
        return None
    return {
        "complete": usage.complete,
        "incomplete_because": usage.incomplete_because,
        "seen_by": usage.source,
        "processes": len(usage.processes),
        "events_lost": usage.events_lost,
        "evicted": usage.evicted,
    }


def _driver(driver: DriverView) -> Json:
    return {
        "ready": driver.ready,
        "driver_version": driver.driver_version,
        "nvml_version": driver.nvml_version,
        "cuda_version": ".".join(map(str, driver.cuda_version)) if driver.cuda_version else None,
        "code": driver.reason.value if driver.reason else None,
        "message": driver.message,
    }


def _gpu(view: GpuView, call: DeviceCall | None) -> Json:
    gpu = view.gpu
    return {
        "uuid": gpu.uuid,
        "index": view.index,
        "model": gpu.name,
        "pci": gpu.pci,
        "memory_bytes": gpu.memory_bytes,
        "numa_node": gpu.numa_node,
        "serial": gpu.serial,
        "part_number": gpu.part_number,
        "vbios": gpu.vbios,
        "inforom": gpu.inforom,
        "mig_enabled": gpu.mig_enabled,
        "mig_devices": [mig.uuid for mig in gpu.mig_devices],
        "health": view.health.value,
        "present": view.present,
        "device_call": None if call is None else {"ready": call.ready, "took_ns": call.took_ns},
        "xids": {str(xid): count for xid, count in view.xids.items()},
        "sample": None if view.sample is None else _sample(view.sample),
    }


def _sample(sample: GpuSample) -> Json:
    """Return the newest readings; null is one that the GPU does not have, or that failed."""
    return msgspec.structs.asdict(sample)


def bundle(
    view: GpuView,
    snapshot: Snapshot,
    *,
    why: Condition | None,
    entries: Iterable[Entry],
    kernel_log: Iterable[str],
    time_of: TimeOf,
) -> Json:
    """Return what the agent knows of one GPU: the evidence that an RMA needs and that a reset destroys.

    ``why`` is the fault it is saved for, None where an operator requested it.
    """
    return {
        "apiVersion": API_VERSION,
        "version": __version__,
        "changed": day(snapshot.at_ns, time_of),
        "changed_monotonic_ns": snapshot.at_ns,
        "why": None if why is None else condition(why, time_of),
        "driver": _driver(snapshot.driver),
        "gpu": _gpu(view, snapshot.device_calls.get(view.gpu.uuid)),
        "conditions": [condition(active, time_of) for active in view.conditions],
        "events": [_event(entry, time_of) for entry in entries],
        "kernel_log": list(kernel_log),
    }


def day(at_ns: int, time_of: TimeOf) -> str | None:
    """Return the time of day of a moment; zero is a moment of an earlier boot."""
    return time_of(at_ns) if at_ns else None


def _id_or_none(instance: int) -> int | None:
    return None if instance == ALL else instance
