"""The driver and the machine: which GPUs there are, and whether the driver serves them.

Invariants: a GPU that was known stays known until the node is rebooted, or there are too many. Reset
evidence is what is seen of the machine: a GPU that was gone and is back, bound to its driver anew, a kernel
module loaded anew.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from agent.core.allocation.cdi import unnameable
from agent.core.allocation.injection import gives_capabilities, missing_channels, names_nodes, uses_cdi
from agent.core.allocation.nodes import is_of_driver, owners, without_path
from agent.core.health import conditions
from agent.core.health.commands import with_holds, with_maintenance
from agent.core.health.handlers import handles
from agent.core.health.inventory import advertised_devices
from agent.core.health.needs import with_channels, with_daemon, without_need
from agent.core.health.state import MAX_AWAITED, State
from agent.model import facts
from agent.model.gpu import Gpu
from agent.model.health import Condition, ConditionKey, Reason, Recovery
from agent.model.ids import GpuUuid, Placement, SourceName
from agent.model.snapshot import DriverView
from agent.model.structs import replace

T = TypeVar("T")

MAX_GPUS: Final = 64
"""GPUs known, listed or not; a node has 16. Those listed are never evicted."""


def enumerated(state: State, fact: facts.GpusEnumerated, now_ns: int, *, max_gpus: int = MAX_GPUS) -> State:
    """Take the list of GPUs that NVML has now."""
    present = frozenset(gpu.uuid for gpu in fact.gpus)
    known = {**state.gpus, **{gpu.uuid: gpu for gpu in fact.gpus}}
    first_probes_by_ns = state.first_probes_by_ns
    if present - state.present - state.probed:
        first_probes_by_ns = now_ns + state.policy.first_probe_wait_ns
    state = with_awaited(state, present)
    listed = replace(
        state,
        gpus=known,
        present=present,
        control_nodes=fact.control_nodes,
        # A call on a GPU that fell off the bus is that GPU's trouble, not a sign that the driver hangs.
        overdue={gpu: call for gpu, call in state.overdue.items() if gpu in present},
        conditions=_with_missing_gpus(_after_new_layouts(state, fact.gpus), known, present, now_ns),
        first_probes_by_ns=first_probes_by_ns,
    )
    listed = _without_ghosts(listed, max_gpus)
    return with_nodes(with_devices(listed, now_ns), now_ns)


def with_devices(state: State, now_ns: int) -> State:
    """Return the state with the devices of its GPUs, and what operators asked for them."""
    return with_maintenance(with_holds(with_advertised(state, now_ns), now_ns), now_ns)


def _without_ghosts(state: State, max_gpus: int) -> State:
    """Return the state without the GPUs of which there is no room: not listed, and known for longest.

    Those of which a person has to end something come last, and that waits for them.
    """
    by_hand: dict[GpuUuid, list[Condition]] = {}
    for condition in state.conditions.values():
        if condition.recovery is Recovery.BY_HAND and condition.reason is not Reason.HELD:
            by_hand.setdefault(condition.placement.gpu, []).append(condition)
    ghosts = sorted((gpu for gpu in state.gpus if gpu not in state.present), key=by_hand.__contains__)
    doomed = frozenset(ghosts[: max(0, len(state.gpus) - max_gpus)])
    if not doomed:
        return state
    awaited = (*state.awaited, *(each for gpu in ghosts if gpu in doomed for each in by_hand.get(gpu, ())))

    def left(table: Mapping[GpuUuid, T]) -> Mapping[GpuUuid, T]:
        return {gpu: value for gpu, value in table.items() if gpu not in doomed}

    return replace(
        state,
        gpus=left(state.gpus),
        probed=state.probed - doomed,
        conditions={key: each for key, each in state.conditions.items() if key.placement.gpu not in doomed},
        awaited=awaited[-MAX_AWAITED:],
        xids=left(state.xids),
        samples=left(state.samples),
        slowdowns=left(state.slowdowns),
        topology_samples=left(state.topology_samples),
        fault_times=left(state.fault_times),
        memory=left(state.memory),
        device_calls=left(state.device_calls),
        released_gpus=state.released_gpus - doomed,
    )


def with_awaited(state: State, present: frozenset[GpuUuid]) -> State:
    """Return the state in which what was kept over a reboot counts for the GPUs that are listed."""
    arrived = {each.key: each for each in state.awaited if each.placement.gpu in present}
    if not arrived:
        return state
    awaited = tuple(each for each in state.awaited if each.key not in arrived)
    return replace(state, awaited=awaited, conditions={**arrived, **state.conditions})


def _with_missing_gpus(
    active: conditions.Conditions, known: Iterable[GpuUuid], present: frozenset[GpuUuid], now_ns: int
) -> conditions.Conditions:
    """Note each GPU that is not listed; one that was noted and is listed again was re-bound."""
    for gpu in known:
        note = active.get(ConditionKey(facts.NVML, Reason.GPU_LOST, Placement(gpu), 0))
        is_noted = note is not None and note.lasts
        if is_noted and gpu in present:
            active = conditions.after_reset(conditions.eased(active, Reason.GPU_LOST, gpu), (gpu,))
        elif not is_noted and gpu not in present:
            active = conditions.raised(
                conditions.after_bad_probe(active, gpu),
                source=facts.NVML,
                reason=Reason.GPU_LOST,
                placement=Placement(gpu),
                message="NVML does not list the GPU any more",
                lasts=True,
                now_ns=now_ns,
            )
    return active


def _after_new_layouts(state: State, listed: Iterable[Gpu]) -> conditions.Conditions:
    """Return the conditions after the MIG instances of some GPUs were destroyed and others made."""
    active = state.conditions
    for gpu in listed:
        before = state.gpus.get(gpu.uuid)
        if before is not None and (there := _instances(before)) != (now := _instances(gpu)):
            staying = [Placement(gpu.uuid, gi, ci) for _, gi, ci, _ in there & now]
            active = conditions.after_new_layout(active, gpu.uuid, staying)
    return active


def _instances(gpu: Gpu) -> frozenset[tuple[str, int, int, str]]:
    """Return what makes each MIG device of a GPU the same one: a new one may have the ids of an old one."""
    return frozenset((mig.uuid, mig.gi, mig.ci, mig.profile) for mig in gpu.mig_devices)


def with_advertised(state: State, now_ns: int) -> State:
    """Return the state with the devices that its GPUs and policy make."""
    advertised = advertised_devices(state.gpus.values(), state.policy, state.advertised)
    return _with_imex(_with_mps(replace(state, advertised=advertised), now_ns), now_ns)


@handles(facts.MpsSeen)
def apply_mps_seen(state: State, fact: facts.MpsSeen, now_ns: int) -> State:
    """Take whether the MPS control daemon serves.

    That it serves for the first time is a start and counts at once; after that its absence is trouble, and
    recovers as other trouble does.
    """
    is_needed = state.policy.sharing.strategy == "mps"
    served = replace(
        state,
        mps_ready=fact.ready,
        mps_missing=fact.message,
        mps_was_ready=state.mps_was_ready or (fact.ready and is_needed),
    )
    if served.mps_was_ready and not state.mps_was_ready:
        served = replace(served, conditions=without_need(served.conditions, Reason.MPS_NOT_READY))
    return _with_mps(served, now_ns)


def _with_mps(state: State, now_ns: int) -> State:
    if state.policy.sharing.strategy != "mps":
        state = replace(state, mps_was_ready=False)
    active = with_daemon(
        state.conditions,
        state.advertised,
        state.policy.sharing,
        ready=state.mps_ready,
        missing=state.mps_missing,
        now_ns=now_ns,
    )
    return state if active is state.conditions else replace(state, conditions=active)


def _with_imex(state: State, now_ns: int) -> State:
    """Mark every GPU while an IMEX channel is missing that is required; the first sight counts at once."""
    injection, nodes = state.policy.injection, state.control_nodes
    active = state.conditions
    is_seen = injection.imex_required and nodes is not None and not missing_channels(injection, nodes)
    if is_seen and not state.channels_were_seen:
        active = without_need(active, Reason.IMEX_CHANNEL_MISSING)
    return replace(
        state,
        conditions=with_channels(active, state.gpus, injection, nodes, now_ns=now_ns),
        channels_were_seen=is_seen or (state.channels_were_seen and injection.imex_required),
    )


@handles(facts.DriverReady)
def apply_driver_ready(state: State, fact: facts.DriverReady, _now_ns: int) -> State:
    """Take that NVML was initialised; its event set is new."""
    view = DriverView(
        ready=True,
        driver_version=fact.driver_version,
        nvml_version=fact.nvml_version,
        cuda_version=fact.cuda_version,
    )
    active = state.conditions
    if state.driver_unloaded:
        active = conditions.after_reset(active, state.gpus)
    return replace(
        state,
        driver=view,
        driver_unloaded=False,
        conditions=active,
        driver_released=False,
        deaf_since_ns=None,
    )


@handles(facts.DriverUnavailable)
def apply_driver_unavailable(state: State, fact: facts.DriverUnavailable, now_ns: int) -> State:
    """Mark every GPU while NVML cannot be used."""
    view = DriverView(ready=False, reason=fact.reason, message=fact.message)
    unloaded = state.driver_unloaded or fact.unloaded
    if view == state.driver:
        return replace(state, driver_unloaded=unloaded)
    return replace(
        state,
        driver=view,
        driver_unloaded=unloaded,
        conditions=_without_driver(state, state.gpus, fact.source, fact.reason, fact.message, now_ns),
        overdue={},
        driver_overdue=None,
    )


def _without_driver(
    state: State, gpus: Iterable[GpuUuid], source: SourceName, reason: Reason, message: str, now_ns: int
) -> conditions.Conditions:
    """Return the conditions with one on each of the GPUs because the driver cannot be used."""
    active = state.conditions
    for gpu in gpus:
        active = conditions.raised(
            conditions.after_bad_probe(active, gpu),
            source=source,
            reason=reason,
            placement=Placement(gpu),
            message=message,
            now_ns=now_ns,
        )
    return active


@handles(facts.DriverReleased)
def apply_driver_released(state: State, _fact: facts.DriverReleased, now_ns: int) -> State:
    """Keep that NVML was shut down on request: no call is overdue or made any more."""
    let_go = replace(state, driver_released=True, overdue={}, driver_overdue=None)
    return _with_module_gone(state, let_go, now_ns)


@handles(facts.DriverCallOverdue)
def apply_driver_call_overdue(state: State, fact: facts.DriverCallOverdue, _now_ns: int) -> State:
    """Note a call that belongs to no single GPU and does not return."""
    return replace(state, driver_overdue=fact.call)


@handles(facts.DriverCallAnswered)
def apply_driver_call_answered(state: State, _fact: facts.DriverCallAnswered, _now_ns: int) -> State:
    """Note that no call of the driver as a whole is overdue any more."""
    return replace(state, driver_overdue=None)


@handles(facts.PciGpusSeen)
def apply_pci_gpus_seen(state: State, fact: facts.PciGpusSeen, _now_ns: int) -> State:
    """Keep the PCI addresses of GPUs."""
    return replace(state, bus=fact.addresses)


def _with_module_gone(old: State, state: State, now_ns: int) -> State:
    """Mark the GPUs that were to stay in use if the module is unloaded during a release.

    Otherwise NVML reports it; here NVML is not called. Released GPUs are unhealthy already.
    """
    is_new = not (old.driver_released and old.driver_unloaded)
    if not is_new or not (state.driver_released and state.driver_unloaded):
        return state
    message = "The driver's module was unloaded while the driver was released"
    staying = [gpu for gpu in state.gpus if gpu not in state.released_gpus]
    return replace(
        state,
        conditions=_without_driver(state, staying, facts.SYSFS, Reason.DRIVER_NOT_LOADED, message, now_ns),
    )


@handles(facts.DriverModuleSeen)
def apply_driver_module_seen(state: State, fact: facts.DriverModuleSeen, now_ns: int) -> State:
    """Take which load of the kernel module this is; another one initialised every GPU anew."""
    if fact.inode is None:
        return _with_module_gone(state, replace(state, driver_unloaded=True), now_ns)
    active = state.conditions
    if state.module_inode not in {None, fact.inode}:
        active = conditions.after_reset(active, state.gpus)
    # A reading that arrives after NVML was initialised again must not count for the next release.
    is_late = state.driver.ready and not state.driver_released
    unloaded = state.driver_unloaded and not is_late
    return replace(state, module_inode=fact.inode, conditions=active, driver_unloaded=unloaded)


def gpu_at(state: State, pci: str) -> Gpu | None:
    """Return the GPU at a PCI address; one that is listed now, if several were there in turn."""
    there = [gpu for gpu in state.gpus.values() if gpu.pci == pci]
    return next((gpu for gpu in there if gpu.uuid in state.present), there[0] if there else None)


@handles(facts.GpuRebound)
def apply_gpu_rebound(state: State, fact: facts.GpuRebound, _now_ns: int) -> State:
    """Take that a GPU was bound to its driver (again): the driver initialised it anew."""
    gpu = gpu_at(state, fact.pci)
    if gpu is None or not fact.bound:
        return state
    return replace(state, conditions=conditions.after_reset(state.conditions, (gpu.uuid,)))


@handles(facts.DeviceNodesSeen)
def apply_device_nodes_seen(state: State, fact: facts.DeviceNodesSeen, now_ns: int) -> State:
    """Take which device nodes are missing."""
    return with_nodes(replace(state, missing_nodes=fact.missing), now_ns)


def with_nodes(state: State, now_ns: int) -> State:
    """Mark the devices whose node is missing; a control node is every GPU's. Nothing before the first scan.

    Device specs and a CDI specification name the nodes, so with them one without a known path is missing too.
    """
    if state.missing_nodes is None:
        return state
    of_device = owners(state.gpus.values())
    every = [Placement(gpu) for gpu in state.gpus]
    missing: dict[Placement, list[str]] = {}
    for path in state.missing_nodes:
        for place in of_device.get(path, every if is_of_driver(path) else ()):
            missing.setdefault(place, []).append(path)
    absent = {place: f"{', '.join(paths)} does not exist" for place, paths in missing.items()}
    injection = state.policy.injection
    if names_nodes(injection):
        is_split = gives_capabilities(state.policy, sees_new_nodes=True)
        absent = without_path(state.gpus.values(), with_capabilities=is_split) | absent
    unnamed: dict[Placement, str] = {}
    if uses_cdi(injection):
        unnamed = unnameable(state.gpus.values(), ids=injection.ids, mig_strategy=state.policy.mig_strategy)
    active = _marked(state, state.conditions, Reason.DEVICE_NODE_MISSING, absent, now_ns)
    active = _marked(state, active, Reason.CDI_UNRESOLVABLE, unnamed, now_ns)
    return state if active is state.conditions else replace(state, conditions=active)


def _marked(
    state: State,
    active: conditions.Conditions,
    reason: Reason,
    messages: Mapping[Placement, str],
    now_ns: int,
) -> conditions.Conditions:
    """Return the conditions with a reason on exactly these devices, each while there is a message."""
    for gpu in state.gpus:
        active = conditions.eased(active, reason, gpu, but=messages)
    for place, message in sorted(messages.items()):
        active = conditions.raised(
            active,
            source=facts.SYSFS,
            reason=reason,
            placement=place,
            message=message,
            lasts=True,
            now_ns=now_ns,
        )
    return active


def hang_conditions(state: State, now_ns: int) -> conditions.Conditions:
    """Return the conditions with one on every GPU for as long as the driver as a whole hangs."""
    active = state.conditions
    if not state.hung:
        hung = [key.placement.gpu for key in active if key.reason is Reason.DRIVER_HUNG]
        for gpu in hung:
            active = conditions.eased(active, Reason.DRIVER_HUNG, gpu)
        return active
    if state.driver_overdue is not None:
        message = f"The driver does not answer {state.driver_overdue}"
    else:
        message = f"{len(state.overdue)} GPUs do not answer at once, so a new pod would hang too"
    for gpu in state.gpus:
        active = conditions.raised(
            active,
            source=facts.NVML,
            reason=Reason.DRIVER_HUNG,
            placement=Placement(gpu),
            message=message,
            lasts=True,
            now_ns=now_ns,
        )
    return active


@handles(facts.TopologySeen)
def apply_topology_seen(state: State, fact: facts.TopologySeen, _now_ns: int) -> State:
    """Store the topology sample of a GPU."""
    if fact.gpu not in state.gpus or state.topology_samples.get(fact.gpu) == fact.sample:
        return state
    return replace(state, topology_samples={**state.topology_samples, fact.gpu: fact.sample})
