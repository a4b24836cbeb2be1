"""Effects and events, derived from the difference between two states.

Invariants: equal states give nothing. Each change is one event, so an event is never a poll. Devices are
reported from the first probes on, with the health they have by then: not how one GPU after the other got it.
Lists in events are bounded: a node can have 800 devices, a log line cannot.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from agent.core.freshness import stale_message
from agent.core.health.inventory import unadvertised_devices
from agent.core.health.registration import Registration
from agent.core.health.stability import soft_candidates
from agent.core.health.state import State
from agent.core.health.verdicts import Devices
from agent.core.reasons import REASON_SPECS, advice_of
from agent.model.effects import (
    Effect,
    Event,
    EventKind,
    KeepEvidence,
    ProbeGpus,
    RecordEvent,
    RegisterResource,
    ReleaseDriver,
    ResumeDriver,
)
from agent.model.health import Condition, Details, Evidence, Health
from agent.model.ids import ALL, GpuUuid
from agent.model.snapshot import Device, RegistrationPhase
from agent.model.usage import ProcessInfo

MAX_LISTED: Final = 16
"""Devices named in one event; further ones are only counted."""


def changes(old: State, new: State, now_ns: int) -> tuple[Effect, ...]:
    """Return the effects of going from one state to the next: causes first, then what they changed."""
    events = (
        *_driver_events(old, new),
        *_gpu_events(old, new),
        *_unadvertised_events(old, new),
        *_condition_events(old, new),
        *_device_events(old, new),
        *_allocatable_events(old, new),
        *_kubelet_events(old, new),
        *_registration_events(old, new),
        *_task_events(old, new),
        *_stale_events(old, new),
        *_failed_fact_events(old, new),
        *_breaker_events(old, new),
        *_process_list_events(old, new),
    )
    return (
        *(RecordEvent(event, now_ns) for event in events),
        *_evidence(old, new),
        *_release(old, new),
        *(() if new.failed_facts.keys() == old.failed_facts.keys() else (ProbeGpus(),)),
        *_registrations(old, new),
    )


def _evidence(old: State, new: State) -> Iterator[Effect]:
    """Yield the first hard fault of each GPU: what is known of it now is gone after a reset."""
    if new.conditions is old.conditions:
        return
    had_fault = {key.placement.gpu for key, condition in old.conditions.items() if _is_hard_fault(condition)}
    for key, condition in new.conditions.items():
        if key.placement.gpu not in had_fault and _is_hard_fault(condition):
            had_fault.add(key.placement.gpu)
            yield KeepEvidence(key.placement.gpu, condition)


def _is_hard_fault(condition: Condition) -> bool:
    if condition.since_ns == 0:
        # From before the boot: what was known of the GPU then was kept then.
        return False
    is_fault = condition.flips and REASON_SPECS[condition.reason].counts_for_flapping
    return is_fault and condition.evidence is Evidence.HARD


def _release(old: State, new: State) -> Iterator[Effect]:
    was, is_now = old.released_until_ns is not None, new.released_until_ns is not None
    if is_now and not was:
        yield ReleaseDriver()
    elif was and not is_now:
        yield ResumeDriver()


def _registrations(old: State, new: State) -> Iterator[Effect]:
    for name, standing in new.registrations.items():
        before = old.registrations.get(name)
        if standing.generation != (0 if before is None else before.generation):
            yield RegisterResource(name, standing.generation, standing.kubelet)


def _driver_events(old: State, new: State) -> Iterator[Event]:
    if new.driver == old.driver:
        return
    if new.driver.ready:
        yield Event(
            EventKind.DRIVER,
            "NVML was initialised",
            fields={"driver_version": new.driver.driver_version, "nvml_version": new.driver.nvml_version},
        )
    else:
        yield Event(
            EventKind.DRIVER,
            "NVML is not available",
            warning=True,
            fields={"reason": new.driver.reason, "detail": new.driver.message},
        )


def _gpu_events(old: State, new: State) -> Iterator[Event]:
    forgotten = [] if new.gpus is old.gpus else [gpu for gpu in old.gpus if gpu not in new.gpus]
    if forgotten:
        yield Event(
            EventKind.GPUS,
            "GPUs that NVML has not listed for longest were forgotten, since too many are known",
            warning=True,
            fields={"count": len(forgotten), "gone": _uuids(old, forgotten)},
        )
    if new.present == old.present:
        return
    added, gone = new.present - old.present, old.present - new.present
    yield Event(
        EventKind.GPUS,
        "NVML lists other GPUs",
        warning=bool(gone),
        fields={
            "count": len(new.present),
            "added": _uuids(new, added),
            "gone": _uuids(old, gone),
        },
    )


def _unadvertised_events(old: State, new: State) -> Iterator[Event]:
    if new.gpus is old.gpus and new.policy is old.policy:
        return
    known = frozenset(unadvertised_devices(old.gpus.values(), old.policy))
    for device in unadvertised_devices(new.gpus.values(), new.policy):
        if device not in known:
            fields: dict[str, object] = {
                "gpu": new.gpus[device.gpu].index,
                "uuid": device.gpu,
                "pci": new.gpus[device.gpu].pci,
            }
            if device.detail:
                fields["detail"] = device.detail
            yield Event(EventKind.GPUS, str(device.why), warning=True, fields=fields)


def _uuids(state: State, gpus: Iterable[GpuUuid]) -> list[str]:
    known = sorted(gpus, key=lambda gpu: (state.gpus[gpu].pci, gpu))
    return [str(gpu) for gpu in known[:MAX_LISTED]]


def _condition_events(old: State, new: State) -> Iterator[Event]:
    if new.conditions is old.conditions:
        return
    for key, condition in new.conditions.items():
        if key not in old.conditions:
            yield Event(
                EventKind.CONDITION,
                "A condition was raised",
                warning=True,
                fields={
                    **_condition_fields(new, condition),
                    "message": condition.message,
                    "advice": advice_of(condition),
                },
            )
    for key, condition in old.conditions.items():
        if key not in new.conditions and key.placement.gpu in new.gpus:
            yield Event(
                EventKind.CONDITION, "A condition was cleared", fields=_condition_fields(new, condition)
            )


def _condition_fields(state: State, condition: Condition) -> dict[str, object]:
    gpu = state.gpus[condition.placement.gpu]
    fields: dict[str, object] = {
        "gpu": gpu.index,
        "uuid": gpu.uuid,
        "pci": gpu.pci,
        "reason": condition.reason,
        "evidence": condition.evidence,
        "source": condition.key.source,
    }
    if condition.key.code:
        fields["code"] = condition.key.code
    if condition.placement.gi != ALL:
        fields |= {"gi": condition.placement.gi, "ci": condition.placement.ci}
    if condition.details is not None:
        fields |= _details_fields(condition.details)
    return fields


def _details_fields(details: Details) -> dict[str, object]:
    """Name the processes: the event log is for the node's operator alone."""
    return {
        "finding": details.kind,
        "contexts": details.contexts,
        "used_bytes": details.used_bytes,
        "processes": [
            {
                "pid": each.pid,
                "comm": each.comm,
                "role": each.role,
                "owner": each.owner,
                "pod": each.pod,
                "state": each.state,
                "contexts": each.contexts,
                "used_bytes": each.used_bytes,
            }
            for each in details.involved[:MAX_LISTED]
        ],
    }


def _reported_devices(state: State) -> Devices | None:
    """Return the devices whose changes are reported; None: none before the first probes."""
    return state.devices if state.first_probes_in else None


def _device_events(old: State, new: State) -> Iterator[Event]:
    was, now = _reported_devices(old), _reported_devices(new)
    if now is None or now is was:
        return
    for name, devices in now.items():
        changed: dict[tuple[GpuUuid, Health], list[Device]] = {}
        for before, device in _others((was or {}).get(name, ()), devices):
            if was is None and device.health is Health.HEALTHY:
                continue  # what all the others are, as the line on the resource has it
            if (Health.UNKNOWN if before is None else before.health) is not device.health:
                changed.setdefault((device.placement.gpu, device.health), []).append(device)
        for (gpu, health), listed in changed.items():
            yield Event(
                EventKind.DEVICE,
                "Health would have changed" if new.policy.observe else "Health changed",
                warning=health is not Health.HEALTHY,
                fields={
                    "resource": name,
                    "gpu": new.gpus[gpu].index,
                    "uuid": gpu,
                    "pci": new.gpus[gpu].pci,
                    "health": health,
                    "count": len(listed),
                    "devices": [str(device.id) for device in listed[:MAX_LISTED]],
                    **_why(listed[0]),
                },
            )


def _others(old: Sequence[Device], new: Sequence[Device]) -> Iterator[tuple[Device | None, Device]]:
    """Yield each device that is not the same object as before, with what it was; None: it was not there."""
    if len(old) == len(new):
        # Most of a long list is the same; what it was stands at the same place, unless others are advertised.
        pairs = [pair for pair in zip(old, new, strict=True) if pair[0] is not pair[1]]
        if all(before.id == device.id for before, device in pairs):
            yield from pairs
            return
    known = {device.id: device for device in old}
    yield from ((known.get(device.id), device) for device in new)


def _why(device: Device) -> dict[str, object]:
    if not device.reasons or device.health is Health.HEALTHY:
        return {}
    first = device.reasons[0]
    return {"reason": first.reason, "evidence": first.evidence, "detail": first.message}


def _allocatable_events(old: State, new: State) -> Iterator[Event]:
    was, now = _reported_devices(old), _reported_devices(new)
    if now is None or now is was:
        return
    for name, devices in now.items():
        if _is_same_on_the_wire((was or {}).get(name, ()), devices):
            continue
        unhealthy = [device for device in devices if device.health is not Health.HEALTHY]
        yield Event(
            EventKind.ALLOCATABLE,
            "Allocatable changed",
            fields={
                "resource": name,
                "capacity": len(devices),
                "allocatable": len(devices) - len(unhealthy),
                "unhealthy": [
                    {"id": device.id, "gpu": device.index, **_why(device)}
                    for device in unhealthy[:MAX_LISTED]
                ],
            },
        )


def _is_same_on_the_wire(old: Sequence[Device], new: Sequence[Device]) -> bool:
    return len(old) == len(new) and all(
        before.id == device.id and (before.health is Health.HEALTHY) == (device.health is Health.HEALTHY)
        for before, device in zip(old, new, strict=True)
        if before is not device
    )


def _kubelet_events(old: State, new: State) -> Iterator[Event]:
    if new.kubelet == old.kubelet:
        return
    if new.kubelet is None:
        yield Event(EventKind.KUBELET, "The kubelet's socket is gone", warning=True)
    elif old.kubelet is None:
        yield Event(EventKind.KUBELET, "The kubelet's socket appeared")
    else:
        yield Event(EventKind.KUBELET, "The kubelet made a new socket")


def _registration_events(old: State, new: State) -> Iterator[Event]:
    for name, standing in new.registrations.items():
        before = old.registrations.get(name)
        was_registered = before is not None and before.registered
        if standing.registered and not was_registered:
            yield Event(
                EventKind.REGISTRATION,
                "Registered with the kubelet",
                fields={"resource": name, "generation": standing.generation},
            )
        elif _is_new_trouble(before, standing):
            yield Event(
                EventKind.REGISTRATION,
                "Not registered with the kubelet",
                warning=True,
                fields={"resource": name, "generation": standing.generation, "detail": standing.message},
            )


def _is_new_trouble(before: Registration | None, standing: Registration) -> bool:
    """Whether backing off has another message than before."""
    return standing.phase is RegistrationPhase.BACKING_OFF and (
        before is None or before.message != standing.message
    )


def _task_events(old: State, new: State) -> Iterator[Event]:
    for name, task in new.tasks.items():
        before = old.tasks.get(name)
        was_running = before is None or before.running
        if task.running and not was_running:
            yield Event(EventKind.TASK, "A task runs again", fields={"task": name})
        elif was_running and not task.running:
            yield Event(
                EventKind.TASK,
                "A task ended and will be started again",
                warning=True,
                fields={"task": name, "failures": task.failures, "detail": task.message},
            )


def _stale_events(old: State, new: State) -> Iterator[Event]:
    for component in sorted(new.stale - old.stale):
        fields = {"part": str(component)}
        yield Event(
            EventKind.TASK, f"{stale_message(component)}; it is restarted", warning=True, fields=fields
        )
    for component in sorted(old.stale - new.stale):
        yield Event(EventKind.TASK, f"{component} gives proofs again", fields={"part": str(component)})


def _failed_fact_events(old: State, new: State) -> Iterator[Event]:
    for gpu in new.failed_facts.keys() - old.failed_facts.keys():
        fields = {"uuid": gpu, "detail": new.failed_facts[gpu]}
        message = f"A fact about {gpu or 'the node'} could not be applied, so every GPU is probed again"
        yield Event(EventKind.LOSS, message, warning=True, fields=fields)


def _breaker_events(old: State, new: State) -> Iterator[Event]:
    before, now = soft_candidates(old), soft_candidates(new)
    if len(now) > 1 and now != before:
        yield Event(
            EventKind.CONDITION,
            "Soft evidence on several GPUs at once flips none of them",
            warning=True,
            fields={"gpus": _uuids(new, now)},
        )


_NOT_BELIEVED: Final[Mapping[ProcessInfo, str]] = {
    "unreliable": "NVML lists processes that cannot be, so none of them is believed",
    "unsupported": "The driver does not list processes, so only open files show which processes hold a GPU",
}


def _process_list_events(old: State, new: State) -> Iterator[Event]:
    """Yield a warning when the first GPU has a list of processes that is not believed: others will follow."""
    if new.memory is old.memory:
        return
    for info, message in _NOT_BELIEVED.items():
        was_reported = any(memory.process_info == info for memory in old.memory.values())
        gpus = [gpu for gpu, memory in new.memory.items() if memory.process_info == info and gpu in new.gpus]
        if gpus and not was_reported:
            yield Event(EventKind.GPUS, message, warning=True, fields={"gpus": _uuids(new, gpus)})
