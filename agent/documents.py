"""The node as JSON-ready values: one form for HTTP, the control socket and the commands.

Guarantees: names are stable and in snake_case, as ``gpu-agent/v1`` (what else is added comes
beside them); what is not known is null, never an invented value; every moment is given twice, as
the time of day for people and as monotonic nanoseconds for programs.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from agent.core.reasons import MEANINGS
from agent.events import Entry
from agent.model.gpu import Gpu
from agent.model.health import Condition
from agent.model.ids import ALL, GpuUuid
from agent.model.snapshot import Device, Finding, GpuView, Resource, Snapshot

API_VERSION: Final = "gpu-agent/v1"

Json = dict[str, object]
TimeOf = Callable[[int], str]
"""Returns the time of day of a monotonic moment, as RFC 3339."""


STANDBY: Final[Mapping[str, object]] = {
    "code": "standby",
    "message": "Another agent serves this node; this one takes over when it ends",
    "advice": "ask the agent that serves",
    "gpus": (),
}
"""The only reason that is no finding: the one who stands by knows nothing of the node."""


def preflight_of_standby() -> Json:
    """Return what an agent that stands by can say."""
    return {"apiVersion": API_VERSION, "ready": False, "reasons": [STANDBY]}


def preflight(snapshot: Snapshot) -> Json:
    """Return whether a GPU job can be sent here now, and if not, why: no pids, no pod names."""
    return {
        "apiVersion": API_VERSION,
        "ready": snapshot.ready,
        "reasons": [_finding(finding) for finding in snapshot.findings],
    }


def _finding(finding: Finding) -> Json:
    return {
        "code": finding.reason.value,
        "message": finding.message,
        "advice": MEANINGS[finding.reason].advice,
        "gpus": list(finding.gpus),
    }


def devices(snapshot: Snapshot, time_of: TimeOf) -> Json:
    """Return every device as it is offered to the kubelet, with why it is not well."""
    gpus = {view.gpu.uuid: view for view in snapshot.gpus}
    return {
        "apiVersion": API_VERSION,
        "devices": [
            _device(device, resource, gpus, time_of)
            for resource in snapshot.resources
            for device in resource.devices
        ],
    }


def _device(device: Device, resource: Resource, gpus: Mapping[GpuUuid, GpuView], time_of: TimeOf) -> Json:
    view = gpus.get(device.placement.gpu)
    return {
        "id": device.id,
        "resource": resource.name,
        "health": device.health.value,
        "reasons": [_condition(condition, time_of) for condition in device.reasons],
        "uuid": device.uuid,
        "gpu": device.index,
        "gpu_uuid": device.placement.gpu,
        "gi": _id_or_none(device.placement.gi),
        "ci": _id_or_none(device.placement.ci),
        "replica": device.replica,
        "numa_node": device.numa_node,
        "model": view.gpu.name if view else None,
        "pci": view.gpu.pci if view else None,
        "memory_bytes": _memory_of(device, view.gpu) if view else None,
    }


def _memory_of(device: Device, gpu: Gpu) -> int:
    slices = (mig.memory_bytes for mig in gpu.mig_devices if mig.uuid == device.uuid)
    return next(slices, gpu.memory_bytes)


def conditions(snapshot: Snapshot, time_of: TimeOf) -> Json:
    """Return every active condition, whether it flips a device or not."""
    return {
        "apiVersion": API_VERSION,
        "conditions": [
            _condition(condition, time_of) for view in snapshot.gpus for condition in view.conditions
        ],
    }


def _condition(condition: Condition, time_of: TimeOf) -> Json:
    return {
        "code": condition.reason.value,
        "number": condition.key.code or None,
        "message": condition.message,
        "advice": MEANINGS[condition.reason].advice,
        "gpu_uuid": condition.placement.gpu,
        "gi": _id_or_none(condition.placement.gi),
        "ci": _id_or_none(condition.placement.ci),
        "source": condition.key.source,
        "evidence": condition.evidence.value,
        "recovery": condition.recovery.value,
        "flips": condition.flips,
        "count": condition.count,
        "clean_probes": condition.clean_probes,
        **_moment("since", condition.since_ns, time_of),
        **_moment("last", condition.last_ns, time_of),
    }


def allocatable(snapshot: Snapshot, time_of: TimeOf) -> Json:
    """Return each resource as the kubelet counts it, and how its registration stands."""
    return {
        "apiVersion": API_VERSION,
        "resources": [_resource(resource, time_of) for resource in snapshot.resources],
    }


def _resource(resource: Resource, time_of: TimeOf) -> Json:
    return {
        "resource": resource.name,
        "capacity": resource.capacity,
        "allocatable": resource.allocatable,
        "registration": resource.phase.value,
        "message": resource.message,
        **_moment("since", resource.since_ns, time_of),
    }


def events(entries: Iterable[Entry], *, last: int, missed: int, time_of: TimeOf) -> Json:
    """Return entries of the event log, and how many older ones the reader can no longer get."""
    return {
        "apiVersion": API_VERSION,
        "events": [
            {
                "number": entry.number,
                **_moment("time", entry.at_ns, time_of),
                "kind": entry.event.kind.value,
                "message": entry.event.message,
                "warning": entry.event.warning,
                "fields": dict(entry.event.fields or {}),
            }
            for entry in entries
        ],
        "last": last,
        "missed": missed,
    }


def state(snapshot: Snapshot, time_of: TimeOf) -> Json:
    """Return the whole picture, for people who look for a fault."""
    driver = snapshot.driver
    return {
        "apiVersion": API_VERSION,
        **_moment("changed", snapshot.at_ns, time_of),
        "driver": {
            "ready": driver.ready,
            "driver_version": driver.driver_version,
            "nvml_version": driver.nvml_version,
            "cuda_version": ".".join(map(str, driver.cuda_version)) if driver.cuda_version else None,
            "code": driver.reason.value if driver.reason else None,
            "message": driver.message,
        },
        "kubelet_socket": None if snapshot.kubelet is None else {"inode": snapshot.kubelet.inode},
        "gpus": [_gpu(view) for view in snapshot.gpus],
        "resources": [_resource(resource, time_of) for resource in snapshot.resources],
        "conditions": conditions(snapshot, time_of)["conditions"],
        "tasks": {
            name: {"running": task.running, "failures": task.failures, "message": task.message}
            for name, task in snapshot.tasks.items()
        },
        "facts_lost": dict(snapshot.facts_lost),
        "ready": snapshot.ready,
        "reasons": [_finding(finding) for finding in snapshot.findings],
    }


def _gpu(view: GpuView) -> Json:
    gpu = view.gpu
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "model": gpu.name,
        "pci": gpu.pci,
        "memory_bytes": gpu.memory_bytes,
        "numa_node": gpu.numa_node,
        "serial": gpu.serial,
        "mig_enabled": gpu.mig_enabled,
        "mig_devices": [mig.uuid for mig in gpu.mig_devices],
        "health": view.health.value,
        "present": view.present,
        "xids": {str(xid): count for xid, count in view.xids.items()},
    }


def _moment(name: str, at_ns: int, time_of: TimeOf) -> Json:
    """Zero is a moment of another boot, of which only that it was before this one is known."""
    return {name: time_of(at_ns) if at_ns else None, f"{name}_monotonic_ns": at_ns}


def _id_or_none(instance: int) -> int | None:
    return None if instance == ALL else instance
