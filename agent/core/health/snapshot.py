"""The snapshot of a state, as sinks read it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agent.core.allocation.nodes import UVM_NODE
from agent.core.freshness import VOUCHERS, Rests, stale_message, unknown_gpus
from agent.core.health.inventory import Unadvertised, mixed_profiles, oversized, unadvertised_devices
from agent.core.health.registration import LIST_OVERDUE, MISCOUNTED, NO_SOCKET, Registration
from agent.core.health.state import State
from agent.core.health.verdicts import health_of
from agent.core.leaks.findings import BLOCKING, REASONS, details_of, message_of
from agent.core.leaks.rules import total
from agent.core.wording import counted
from agent.model.facts import DEVICE_PLUGIN, KUBELET, NVML
from agent.model.health import Condition, Health, Reason
from agent.model.ids import GpuUuid, ResourceName
from agent.model.sharing import SharingStrategy
from agent.model.snapshot import (
    DriverView,
    Durable,
    Finding,
    GpuView,
    Resource,
    Snapshot,
)

_FAILURE_REASONS: Final[Mapping[str | None, Reason]] = {
    "rejected": Reason.REGISTRATION_REFUSED,
    "socket_in_use": Reason.SOCKET_IN_USE,
}

STALE_PROBE: Final = "Not probed for too long"

MAX_MESSAGES: Final = 4
"""Messages of one reason in the findings; a node with 56 MIG devices may have as many."""

NEEDED_TASKS: Final = (NVML, KUBELET, DEVICE_PLUGIN)
"""Without these no statement about the node's GPUs can be trusted."""


def snapshot_of(state: State) -> Snapshot:
    """Return the snapshot of a state."""
    gpus = _gpu_views(state, state.known_gpus)
    return Snapshot(
        at_ns=state.changed_ns,
        policy=state.policy,
        driver=state.driver,
        kubelet=state.kubelet,
        gpus=gpus,
        resources=tuple(_resource(state, name) for name in state.devices),
        control_nodes=state.control_nodes or (),
        tasks=state.tasks,
        stale=state.stale,
        failed_facts=tuple(state.failed_facts.values()),
        facts_lost=state.facts_lost,
        findings=tuple(_findings(state, gpus)),
        durable=_durable(state),
        unread=state.unread,
        topology=state.topology,
        pods=state.pods,
        pods_seen=state.pods_seen,
        probe=state.probe,
        device_calls=state.device_calls,
        usage=state.usage,
        memory=state.memory,
        released_until_ns=state.released_until_ns,
        driver_released=state.driver_released,
        holds=state.holds,
        observed_flips=state.observed_flips,
    )


def _gpu_views(state: State, known: frozenset[GpuUuid]) -> tuple[GpuView, ...]:
    by_gpu: dict[GpuUuid, list[Condition]] = {}
    for condition in state.conditions.values():
        by_gpu.setdefault(condition.placement.gpu, []).append(condition)
    return tuple(
        GpuView(
            gpu=gpu,
            health=health_of(by_gpu.get(gpu.uuid, ()), probed=gpu.uuid in known),
            present=gpu.uuid in state.present,
            conditions=tuple(by_gpu.get(gpu.uuid, ())),
            xids=state.xids.get(gpu.uuid, {}),
            sample=state.samples.get(gpu.uuid),
        )
        for gpu in sorted(state.gpus.values(), key=lambda gpu: (gpu.pci, gpu.index))
    )


def _resource(state: State, name: ResourceName) -> Resource:
    unregistered = Registration(since_ns=state.changed_ns, message=_unregistered_message(state))
    standing = state.registrations.get(name, unregistered)
    return Resource(
        name=name,
        devices=state.devices[name],
        phase=standing.phase,
        generation=standing.generation,
        message=standing.message,
        since_ns=standing.since_ns,
        socket=standing.socket,
        sharing=_sharing_of(state, name),
        counted=standing.counted,
        miscount=standing.miscount,
    )


def _sharing_of(state: State, name: ResourceName) -> SharingStrategy | None:
    is_shared = any(device.replica is not None for device in state.devices[name])
    return state.policy.sharing.strategy if is_shared else None


def _unregistered_message(state: State) -> str:
    return "Observing only" if state.policy.observe else NO_SOCKET


def _durable(state: State) -> Durable:
    return Durable(
        gpus=tuple(state.gpus.values()),
        conditions=(*state.awaited, *state.conditions.values()),
        xids=tuple((gpu, xid, count) for gpu, counts in state.xids.items() for xid, count in counts.items()),
        holds=tuple(state.holds.items()),
        released_gpus=tuple(sorted(state.released_gpus)),
        released_until_ns=state.released_until_ns,
        module_inode=state.module_inode,
        kernel_log_read=state.kernel_log_read,
        lost=state.lost,
    )


def _findings(state: State, gpus: tuple[GpuView, ...]) -> Iterator[Finding]:
    """Yield why the node is not ready, the root cause first, one message of several GPUs once."""
    driver = _driver_finding(state.driver)
    if driver is not None:
        yield driver
    elif not state.gpus:
        yield Finding(Reason.NOT_ENOUGH_GPUS, "NVML lists no GPU")
    if state.lost or state.unread:
        what = f"is lost: {state.lost}" if state.lost else f"cannot be read and is retried: {state.unread}"
        yield Finding(Reason.STATE_LOST, f"What was known of the GPUs before the start {what}")
    unlike = mixed_profiles(state.gpus.values(), state.policy)
    if unlike:
        profiles = ", ".join(unlike)
        yield Finding(Reason.MIG_SINGLE_NOT_UNIFORM, f"Strategy single needs one profile, found [{profiles}]")
    yield from _sharing_findings(state)
    for each in oversized(state.gpus.values(), state.policy):
        yield Finding(Reason.LIST_TOO_LONG, each.message)
    if state.cdi_trouble is not None:
        yield Finding(Reason.CDI_UNRESOLVABLE, f"A container would not start: {state.cdi_trouble}")
    if state.driver.ready and UVM_NODE in (state.missing_nodes or ()):
        yield Finding(Reason.DEVICE_NODE_MISSING, f"{UVM_NODE} does not exist, so no CUDA program can start")
    yield from _bus_findings(state)
    yield from _gpu_findings(
        gpus, unknown_gpus(state.uncovered, state.gpus), without=driver.reason if driver else None
    )
    yield from _use_findings(state)
    yield from _kubelet_findings(state)
    yield from _task_findings(state)


def _task_findings(state: State) -> Iterator[Finding]:
    for gpu, message in state.failed_facts.items():
        gpus = () if gpu is None else (gpu,)
        yield Finding(Reason.SOURCE_FAILED, f"A bug in the agent: it could not apply {message[:200]}", gpus)
    for name in NEEDED_TASKS:
        task = state.tasks.get(name)
        if task is not None and not task.running:
            yield Finding(Reason.SOURCE_FAILED, f"{name} does not run: {task.message}")
    for component in sorted(state.uncovered):
        if VOUCHERS[component.name].rests not in (Rests.ITS_GPU, Rests.AGENT):
            yield Finding(Reason.SOURCE_FAILED, stale_message(component))


def _driver_finding(driver: DriverView) -> Finding | None:
    if driver.ready:
        return None
    if driver.reason is None:
        return Finding(Reason.DRIVER_NOT_LOADED, "NVML is not initialised yet")
    return Finding(driver.reason, driver.message)


def _sharing_findings(state: State) -> Iterator[Finding]:
    # A snapshot is made at each change, and only MPS has limits.
    unadvertised = (
        unadvertised_devices(state.gpus.values(), state.policy)
        if state.policy.sharing.strategy == "mps"
        else ()
    )
    over = [each for each in unadvertised if each.why is Unadvertised.TOO_MANY_REPLICAS]
    if over:
        message = "; ".join(dict.fromkeys(each.detail for each in over))
        yield Finding(Reason.MPS_REPLICAS_OVER_LIMIT, message, tuple(each.gpu for each in over))


def _bus_findings(state: State) -> Iterator[Finding]:
    if state.bus is None or not state.driver.ready or state.driver_released:
        return
    listed = {state.gpus[gpu].pci for gpu in state.present}
    missing = [address for address in state.bus if address not in listed]
    if missing:
        yield Finding(
            Reason.GPU_COUNT_MISMATCH,
            f"The bus has {counted(len(state.bus), 'GPU')} for the driver, NVML lists {len(listed)}: not"
            f" {', '.join(missing)}",
        )


def _gpu_findings(
    gpus: tuple[GpuView, ...], stale: frozenset[GpuUuid], *, without: Reason | None
) -> Iterator[Finding]:
    by_reason: dict[Reason, dict[str, dict[GpuUuid, None]]] = {}
    for view in gpus:
        messages = [(each.reason, each.message) for each in view.conditions if each.flips]
        if view.health is Health.UNKNOWN:
            is_stale = view.gpu.uuid in stale
            messages.append((Reason.NOT_PROBED, STALE_PROBE if is_stale else "Not probed yet"))
        for reason, _ in messages:
            by_reason.setdefault(reason, {})
        # Of very many messages the newest are shown.
        for reason, message in reversed(messages):
            by_reason[reason].setdefault(message, {})[view.gpu.uuid] = None
    for reason, gpus_by_message in by_reason.items():
        if reason is not without:
            yield from _bounded(reason, gpus_by_message)


def _bounded(reason: Reason, messages: Mapping[str, Mapping[GpuUuid, None]]) -> Iterator[Finding]:
    """Yield a finding for each message, the last of very many for all that are left."""
    for message in list(messages)[:MAX_MESSAGES]:
        yield Finding(reason, message, tuple(messages[message]))
    rest = list(messages)[MAX_MESSAGES:]
    if rest:
        uuids = dict.fromkeys(uuid for message in rest for uuid in messages[message])
        yield Finding(reason, f"{len(rest)} more, such as: {rest[0]}", tuple(uuids))


def _use_findings(state: State) -> Iterator[Finding]:
    """Yield the findings on usage that block preflight though they flip no device."""
    found: dict[Reason, list[Condition]] = {}
    for condition in state.conditions.values():
        if condition.details is not None and condition.details.kind in BLOCKING and not condition.flips:
            found.setdefault(condition.reason, []).append(condition)
    for reason, active in found.items():
        figures = (each.details.used_bytes for each in active if each.details is not None)
        gpus = dict.fromkeys(each.placement.gpu for each in active)
        yield Finding(reason, _joined(active), tuple(gpus), used_bytes=total(figures))
    unplaced = [each for each in state.leaks.reported() if each.place is None and each.key.kind in BLOCKING]
    if unplaced:
        details = details_of(unplaced[0].key.kind, unplaced[:1], state.usage, state.policy.leaks)
        yield Finding(REASONS[details.kind], message_of(details, state.policy.leaks))


def _joined(active: Sequence[Condition]) -> str:
    messages = list(dict.fromkeys(each.message for each in active))
    more = f"; and {len(messages) - MAX_MESSAGES} more" if len(messages) > MAX_MESSAGES else ""
    return "; ".join(messages[:MAX_MESSAGES]) + more


def _kubelet_findings(state: State) -> Iterator[Finding]:
    if state.kubelet is None:
        yield Finding(Reason.KUBELET_UNAVAILABLE, "The kubelet's socket does not exist")
        return
    for name, standing in state.registrations.items():
        if not standing.registered and standing.message != MISCOUNTED:
            reason = _FAILURE_REASONS.get(standing.failure, Reason.KUBELET_UNAVAILABLE)
            if standing.message == LIST_OVERDUE:
                reason = Reason.SOURCE_FAILED
            yield Finding(reason, f"{name} is not registered: {standing.message or 'registering'}")
        if standing.miscount:
            message = f"{name}: {standing.miscount}; it was registered anew"
            yield Finding(Reason.KUBELET_COUNT_MISMATCH, message)
