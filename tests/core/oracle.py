"""A second, naive opinion on what the core should decide: slow, mutable, and written apart from it.

It shares the vocabulary and nothing else. Where the core may choose (how much jitter a delay has) the
oracle names the bounds, and takes over what was chosen.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.model.facts import (
    AllocationsListed,
    DeviceNodesSeen,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverModuleSeen,
    DriverReady,
    DriverReleased,
    DriverUnavailable,
    Fact,
    GpuCallAnswered,
    GpuCallFailed,
    GpuCallOverdue,
    GpuProbePassed,
    GpuRebound,
    GpuSampled,
    GpusEnumerated,
    HoldRequested,
    KernelXidSeen,
    KubeletSocketSeen,
    MpsSeen,
    OwnSocketLost,
    PolicyChanged,
    RecoverRequested,
    Registered,
    RegisterSent,
    RegistrationFailed,
    ReleaseRequested,
    ResumeRequested,
    UnholdRequested,
    WatchersChanged,
    XidReported,
)
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import ALL, SocketIdentity
from agent.model.policy import Policy
from agent.model.sample import GpuSample
from tests.core.xid_table import IGNORED_BY_NVIDIAS_PLUGIN, row_of

S = 10**9
NEVER = 10**30


@dataclass
class Fault:
    """One thing that is wrong at one place."""

    source: str
    reason: str
    gpu: str
    gi: int
    ci: int
    code: int
    recovery: str
    since_ns: int
    flips: bool = True
    hard: bool = True
    count: int = 0
    lasts: bool = False
    """Its cause is seen all the time, not reported now and then."""
    reset: bool = False
    clean: list[int] = field(default_factory=list)
    """When probes passed in a row since it was last seen (and reset, if it needs that)."""

    def seen(self, times: int, *, lasts: bool = False) -> None:
        if lasts and self.lasts:
            return
        self.lasts = lasts
        self.count += times
        self.reset = False
        self.clean.clear()

    def ended(self) -> None:
        """Its cause is not seen any more."""
        self.lasts = False
        self.clean.clear()

    def over_at(self, policy: Policy) -> int:
        if self.lasts:
            return NEVER
        curable = self.recovery == "self_clearing" or (self.recovery == "reset" and self.reset)
        if not curable or len(self.clean) < policy.recovery_clean_probes:
            return NEVER
        return self.clean[0] + policy.recovery_quiet_ns


class ReportedXid(NamedTuple):
    """The latest report of an XID."""

    gpu: str
    gi: int
    ci: int
    xid: int
    source: str
    at_ns: int


@dataclass
class Unconfirmed:
    """What the kernel log alone reports so far."""

    gpu: str
    gi: int
    ci: int
    xid: int
    count: int
    live: bool
    since_ns: int


CONFIRMING_READINGS = {"reset": {"ecc_uncorrected", "nvlink_down"}, "link": {"nvlink_down", "fabric_failed"}}
CONFIRMING_READINGS["rma"] = {"row_remap_failed"}
CONFIRMING_ANSWERS = {"gpu_lost", "reset_required", "recovery_action", "nvml_error", "nvml_timeout"}


@dataclass
class Link:
    """How one resource stands with the kubelet."""

    phase: str = "waiting"
    generation: int = 0
    tried: SocketIdentity | None = None
    due_ns: int = NEVER
    due_at_most_ns: int = NEVER
    failures: int = 0
    unreachable_since_ns: int | None = None
    registered_ns: int = 0
    streams: int | None = None

    def begin(self, kubelet: SocketIdentity) -> None:
        if kubelet != self.tried:
            self.failures = 0
            self.unreachable_since_ns = None
        self.phase = "registering"
        self.generation += 1
        self.tried = kubelet
        self.due_ns = NEVER
        self.streams = None

    def back_off(self, now_ns: int) -> None:
        self.failures += 1
        wait_ns = S // 10
        for _ in range(self.failures - 1):
            wait_ns = min(2 * wait_ns, 10 * S)
        self.phase = "backing_off"
        self.due_ns = now_ns + wait_ns
        self.due_at_most_ns = now_ns + wait_ns * 12 // 10

    def end(self, now_ns: int) -> None:
        if now_ns - self.registered_ns >= 10 * S:
            self.failures = 0
        self.back_off(now_ns)


class Kind(NamedTuple):
    """What a reading that is bad means."""

    recovery: str
    flips: bool
    hard: bool


READINGS = {
    "recovery_action": Kind("reset", flips=True, hard=True),
    "imex_domain_down": Kind("self_clearing", flips=False, hard=True),
    "row_remap_failed": Kind("by_hand", flips=True, hard=True),
    "fabric_failed": Kind("self_clearing", flips=True, hard=True),
    "fabric_not_ready": Kind("self_clearing", flips=True, hard=True),
    "ecc_uncorrected": Kind("reset", flips=False, hard=True),
    "nvlink_down": Kind("self_clearing", flips=False, hard=False),
    "thermal": Kind("self_clearing", flips=False, hard=False),
    "row_remap_pending": Kind("self_clearing", flips=False, hard=True),
    "pcie_degraded": Kind("self_clearing", flips=False, hard=True),
}

OF_THE_NODE = {
    "maintenance",
    "held",
    "driver_hung",
    "driver_not_loaded",
    "nvml_version_mismatch",
    "device_node_missing",
    "fabric_not_ready",
    "mps_not_ready",
    "imex_channel_missing",
}
"""What takes a GPU out and is not its own fault."""

SOFT = {"thermal", "nvlink_down"}


def is_bad(reason: str, sample: GpuSample, slow: list[bool], policy: Policy) -> bool | None:
    """Whether a reading shows that something is wrong; None: it cannot be evaluated."""
    match reason:
        case "recovery_action":
            return None if sample.recovery_action in {None, 5} else sample.recovery_action != 0
        case "imex_domain_down":
            return None if sample.recovery_action is None else sample.recovery_action == 5
        case "row_remap_failed":
            return sample.rows_failed
        case "row_remap_pending":
            both = (sample.rows_pending, sample.pages_pending)
            return None if both == (None, None) else True in both
        case "ecc_uncorrected":
            return None if sample.ecc_uncorrected is None else sample.ecc_uncorrected > 0
        case "nvlink_down":
            return None if sample.links_total is None else len(sample.links_down) > 0
        case "pcie_degraded":
            width, most = sample.pcie_width, sample.pcie_width_max
            return None if width is None or most is None else width < most
        case "fabric_not_ready":
            return None if sample.fabric_state is None else sample.fabric_state not in {0, 3}
        case "fabric_failed":
            state, status = sample.fabric_state, sample.fabric_status
            return None if state is None or status is None else state == 3 and status != 0
        case _:
            return is_hot(sample, slow, policy)


def is_hot(sample: GpuSample, slow: list[bool], policy: Policy) -> bool | None:
    celsius, limit = sample.temperature_celsius, sample.temperature_limit_celsius
    is_known = celsius is not None and limit is not None
    if celsius is not None and limit is not None and celsius >= limit:
        return True
    if sample.hw_slowed is None:
        return False if is_known else None
    if 100 * slow.count(True) < policy.slowdown_share_percent * len(slow):
        return False
    return True if len(slow) == policy.slowdown_window_polls else None


class Oracle:
    """Everything is written down as it comes and worked out anew after each fact."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.now_ns = 0
        self.gpus: dict[str, Gpu] = {}
        self.faults: list[Fault] = []
        self.xids: Counter[tuple[str, int]] = Counter()
        self.names: list[str] = []
        self.holds: dict[str, str] = {}
        self.released: set[str] = set()
        self.released_until_ns = NEVER
        self.module: int | None = None
        self.soft_flip_ns: int | None = None
        self.begin_process()

    def begin_process(self) -> None:
        self.listed: set[str] = set()
        self.verdict: set[str] = set()
        self.silent: set[str] = set()
        self.driver_silent = False
        self.driver: object = None
        self.driver_unloaded = False
        self.driver_released = False
        self.reported_xids: list[ReportedXid] = []
        self.unconfirmed_faults: list[Unconfirmed] = []
        self.early: list[KernelXidSeen] = []
        self.xids_before = Counter(self.xids)
        self.missing: tuple[str, ...] | None = None
        self.samples: dict[str, GpuSample] = {}
        self.slow: dict[str, list[bool]] = {}
        self.fault_times: dict[str, list[int]] = {}
        self.mps: bool | None = None
        self.mps_served = False
        self.nodes_there: tuple[str, ...] | None = None
        self.channels_seen = False
        self.pods: set[str] | None = None
        self.pods_ns = 0
        self.kubelet: SocketIdentity | None = None
        self.links: dict[str, Link] = {}
        self.probes_until_ns: int | None = None
        self.devices_published = False

    def restart(self, now_ns: int) -> None:
        """Another process begins with what was kept."""
        self.begin_process()
        self.names = []
        if self.gpus:
            self.probes_until_ns = now_ns + self.policy.first_probe_wait_ns
        for fault in self.faults:
            fault.clean.clear()
        self.soft_flip_ns = now_ns if any(f.flips and f.reason in SOFT for f in self.faults) else None
        self.names = [name for name, _ in self.advertised()]
        self.now_ns = now_ns
        self.mps_causes()
        self.imex_causes()

    # Facts

    def apply(self, fact: Fact, now_ns: int) -> None:
        """Write one fact down, then see what follows."""
        was_hung, were_out = self.hung, self.out_by_themselves()
        was_gone = self.driver_released and self.driver_unloaded
        self.now_ns = now_ns
        match fact:
            case XidReported():
                self.xid(fact, now_ns)
            case KernelXidSeen():
                self.kernel_xid(fact, now_ns)
            case GpuProbePassed() if fact.gpu in self.gpus:
                self.verdict.add(fact.gpu)
                self.silent.discard(fact.gpu)
                self.causes()
                if fact.gpu in self.listed and self.driver in {None, "ready"}:
                    self.probe_passed(fact.gpu)
            case GpuSampled() if fact.gpu in self.gpus and self.driver in {None, "ready"}:
                self.sampled(fact.gpu, fact.sample)
            case GpuCallFailed() if fact.gpu in self.gpus:
                self.verdict.add(fact.gpu)
                self.silent.discard(fact.gpu)
                self.trouble(fact.gpu)
                reason, recovery = {15: ("gpu_lost", "reset"), 16: ("reset_required", "reset")}.get(
                    fact.code, ("nvml_error", "self_clearing")
                )
                self.fault("nvml", reason, fact.gpu, recovery, code=fact.code).seen(1)
            case GpuCallOverdue() if fact.gpu in self.gpus:
                self.verdict.add(fact.gpu)
                self.silent.add(fact.gpu)
                self.trouble(fact.gpu)
                self.fault("nvml", "nvml_timeout", fact.gpu, "self_clearing").seen(1)
            case GpuCallAnswered():
                self.silent.discard(fact.gpu)
            case DriverCallOverdue():
                self.driver_silent = True
            case DriverCallAnswered():
                self.driver_silent = False
            case DriverReady():
                self.driver = "ready"
                if self.driver_unloaded:
                    self.was_reset(set(self.gpus))
                self.driver_unloaded = False
                self.driver_released = False
            case DriverUnavailable():
                self.driver_unloaded = self.driver_unloaded or fact.unloaded
                if self.driver != (fact.reason, fact.message):
                    self.driver = (fact.reason, fact.message)
                    self.silent.clear()
                    self.driver_silent = False
                    for gpu in self.gpus:
                        self.trouble(gpu)
                        self.fault("nvml", fact.reason, gpu, "self_clearing").seen(1)
            case GpusEnumerated():
                self.enumerated(fact, now_ns)
                early, self.early = self.early, []
                for each in early:
                    self.kernel_xid(each, now_ns)
            case DriverReleased():
                self.silent.clear()
                self.driver_silent = False
                self.driver_released = True
            case DriverModuleSeen():
                self.module_seen(fact.inode)
            case GpuRebound():
                self.was_reset({gpu.uuid for gpu in self.gpus.values() if gpu.pci == fact.pci and fact.bound})
            case DeviceNodesSeen():
                self.missing = fact.missing
            case AllocationsListed():
                self.pods = {str(device) for device in fact.pods}
                self.pods_ns = now_ns
            case HoldRequested():
                self.holds[fact.selector] = fact.why
            case UnholdRequested():
                self.unheld(fact.selector)
            case RecoverRequested():
                self.recovered(fact.gpu)
            case ReleaseRequested():
                self.driver_released = self.driver_released and self.released_until_ns != NEVER
                self.released |= fact.gpus
                self.released_until_ns = now_ns + fact.for_ns
            case ResumeRequested():
                self.released.clear()
                self.released_until_ns = NEVER
            case PolicyChanged():
                self.policy = fact.policy
                for fault in self.faults:
                    if fault.reason in SOFT and fault.reason not in fact.policy.soft_flips:
                        fault.flips = False
            case MpsSeen():
                self.mps = fact.ready
                if fact.ready and not self.mps_served and self.policy.sharing.strategy == "mps":
                    self.mps_served = True
                    self.faults = [fault for fault in self.faults if fault.reason != "mps_not_ready"]
            case KubeletSocketSeen():
                self.kubelet = fact.identity
            case RegisterSent() | Registered() | RegistrationFailed() | WatchersChanged() | OwnSocketLost():
                self.handle_link_fact(fact, now_ns)
            case _:
                pass
        is_gone = self.driver_released and self.driver_unloaded
        if isinstance(fact, DriverModuleSeen | DriverReleased) and is_gone and not was_gone:
            for gpu in self.gpus.keys() - self.released:
                self.trouble(gpu)
                self.fault("sysfs", "driver_not_loaded", gpu, "self_clearing").seen(1)
        if now_ns >= self.released_until_ns:
            self.released.clear()
            self.released_until_ns = NEVER
        self.causes()
        self.faults = [fault for fault in self.faults if fault.over_at(self.policy) > now_ns]
        self.hear_witnesses()
        self.flapping(were_out, was_hung=was_hung)
        self.breaker()
        self.time(now_ns)

    def probe_passed(self, gpu: str) -> None:
        links_are_down = any(fault.reason == "nvlink_down" and fault.lasts for fault in self.of_gpu(gpu))
        for fault in self.of_gpu(gpu):
            if fault.lasts or (links_are_down and of_links(fault)):
                continue
            if fault.recovery == "self_clearing" or fault.reset:
                fault.clean.append(self.now_ns)

    def sampled(self, gpu: str, sample: GpuSample) -> None:
        slow = self.slow.setdefault(gpu, [])
        if sample.hw_slowed is not None:
            slow.append(sample.hw_slowed)
            del slow[: -self.policy.slowdown_window_polls]
        self.samples[gpu] = sample
        for reason, kind in READINGS.items():
            bad = is_bad(reason, sample, slow, self.policy)
            known = [fault for fault in self.of_gpu(gpu) if fault.reason == reason]
            if bad and reason == "nvlink_down":
                for fault in self.of_gpu(gpu):
                    if of_links(fault):
                        fault.clean.clear()
            if bad:
                self.fault("nvml", reason, gpu, kind.recovery, flips=kind.flips, hard=kind.hard).seen(
                    1, lasts=True
                )
            elif bad is False and known and known[0].lasts:
                known[0].ended()
                known[0].reset = known[0].reset or reason == "ecc_uncorrected"
                if reason == "recovery_action":
                    self.was_reset({gpu})

    def kernel_xid(self, fact: KernelXidSeen, now_ns: int) -> None:
        there = [gpu.uuid for gpu in self.gpus.values() if gpu.pci == fact.pci]
        if not there:
            self.early = [*self.early, fact][-256:] if not self.gpus else []
            return
        gpu, row = there[0], row_of(fact.xid)
        again = min(self.xids_before[gpu, fact.xid], fact.count) if fact.backlog else 0
        self.xids_before[gpu, fact.xid] -= again
        report = XidReported(gpu, fact.xid, fact.gi, fact.ci, fact.source, count=fact.count - again)
        place = self.place(report)
        if (
            fact.live and place is not None and self.was_reported(report, place, now_ns)
        ) or again == fact.count:
            return
        self.xids[gpu, fact.xid] += report.count
        if place is None:
            return
        if fact.live:
            self.note_report(report, place, now_ns)
        if not self.flips(fact.xid) or (not fact.live and row.recovery == "self_clearing"):
            return
        gi, ci = place
        is_deniable = row.xid_class == "lost" or self.names_recovery_action(gpu)
        shown = self.fault(
            "kernel-log",
            "unconfirmed",
            gpu,
            "self_clearing" if is_deniable else row.recovery,
            code=fact.xid,
            gi=gi,
            ci=ci,
            flips=False,
            hard=False,
        )
        shown.seen(report.count)
        known = [
            each
            for each in self.unconfirmed_faults
            if (each.gpu, each.gi, each.ci, each.xid) == (gpu, gi, ci, fact.xid)
        ]
        for each in known:
            self.unconfirmed_faults.remove(each)
        count = report.count + sum(each.count for each in known)
        since_ns = known[0].since_ns if known else now_ns
        self.unconfirmed_faults.append(Unconfirmed(gpu, gi, ci, fact.xid, count, fact.live, since_ns))

    def names_recovery_action(self, gpu: str) -> bool:
        return gpu in self.samples and self.samples[gpu].recovery_action not in {None, 5}

    def hear_witnesses(self) -> None:
        """Believe the kernel log if something else confirms it, and forget what is denied."""
        for unconfirmed in list(self.unconfirmed_faults):
            row = row_of(unconfirmed.xid)
            if not self.shown(unconfirmed):
                self.unconfirmed_faults.remove(unconfirmed)
            elif any(self.is_witness(unconfirmed, fault) for fault in self.of_gpu(unconfirmed.gpu)):
                self.believe(unconfirmed)
            elif not unconfirmed.live and (
                unconfirmed.gpu in self.verdict or unconfirmed.gpu in self.samples
            ):
                if row.recovery == "by_hand" or not self.names_recovery_action(unconfirmed.gpu):
                    self.believe(unconfirmed)
                else:
                    self.unconfirmed_faults.remove(unconfirmed)
                    self.faults.remove(self.shown(unconfirmed)[0])

    def shown(self, unconfirmed: Unconfirmed) -> list[Fault]:
        place = (unconfirmed.gi, unconfirmed.ci, unconfirmed.xid)
        return [
            fault
            for fault in self.of_gpu(unconfirmed.gpu)
            if (fault.gi, fault.ci, fault.code) == place and fault.reason == "unconfirmed"
        ]

    def is_witness(self, unconfirmed: Unconfirmed, fault: Fault) -> bool:
        if fault.source == "kernel-log":
            return False
        if fault.reason == "xid":
            gi_fits = fault.gi == unconfirmed.gi or ALL in {fault.gi, unconfirmed.gi}
            ci_fits = fault.ci == unconfirmed.ci or ALL in {fault.ci, unconfirmed.ci}
            return fault.flips and fault.code == unconfirmed.xid and gi_fits and ci_fits
        row = row_of(unconfirmed.xid)
        if row.recovery == "self_clearing":
            return False
        readings = CONFIRMING_READINGS.get(row.xid_class, set())
        return (fault.flips and fault.reason in CONFIRMING_ANSWERS) or (
            fault.lasts and fault.reason in readings
        )

    def believe(self, unconfirmed: Unconfirmed) -> None:
        row = row_of(unconfirmed.xid)
        self.unconfirmed_faults.remove(unconfirmed)
        for fault in self.shown(unconfirmed):
            self.faults.remove(fault)
        fault = self.fault(
            "kernel-log",
            "xid",
            unconfirmed.gpu,
            row.recovery,
            code=unconfirmed.xid,
            gi=unconfirmed.gi,
            ci=unconfirmed.ci,
            hard=row.evidence == "hard",
        )
        if not fault.count:
            fault.since_ns = unconfirmed.since_ns
        fault.seen(unconfirmed.count)

    def module_seen(self, inode: int | None) -> None:
        if inode is None:
            self.driver_unloaded = True
            return
        if self.module is not None and self.module != inode:
            self.was_reset(set(self.gpus))
        self.module = inode
        if self.driver == "ready" and not self.driver_released:
            self.driver_unloaded = False

    def unheld(self, selector: str) -> None:
        ended = {selector}
        for gpu in self.gpus.values():
            if selector in names_of(gpu):
                ended |= names_of(gpu)
        self.holds = {name: why for name, why in self.holds.items() if name not in ended}

    def recovered(self, gpu: str) -> None:
        self.fault_times.pop(gpu, None)
        self.faults = [fault for fault in self.faults if fault.gpu != gpu or self.is_seen_now(fault)]

    def is_seen_now(self, fault: Fault) -> bool:
        """Whether an operator's recover command is wrong."""
        if fault.reason == "nvml_timeout":
            return fault.gpu in self.silent
        if isinstance(self.driver, tuple) and self.driver[0] == fault.reason:
            return True
        if fault.reason == "device_node_missing" and self.missing is None:
            return False
        if fault.reason in READINGS and fault.gpu in self.samples:
            sample, slow = self.samples[fault.gpu], self.slow[fault.gpu]
            if is_bad(fault.reason, sample, slow, self.policy) is None:
                return False
        return fault.lasts

    # Causes that are there or not there

    def causes(self) -> None:
        """Mark what is wrong now and lasts; end what is not wrong any more."""
        self.mps_causes()
        self.imex_causes()
        for uuid, gpu in self.gpus.items():
            self.cause(uuid, "nvml", "driver_hung", is_there=self.hung)
            self.cause(uuid, "operator", "maintenance", is_there=uuid in self.released)
            self.cause(uuid, "operator", "held", is_there=bool(names_of(gpu) & self.holds.keys()))
            if self.missing is not None:
                places = set(self.without_node(gpu, self.missing))
                for fault in self.of_gpu(uuid):
                    if (
                        fault.reason == "device_node_missing"
                        and fault.lasts
                        and (fault.gi, fault.ci) not in places
                    ):
                        fault.ended()
                for gi, ci in places:
                    fault = self.fault("sysfs", "device_node_missing", uuid, "self_clearing", gi=gi, ci=ci)
                    fault.seen(1, lasts=True)

    def without_node(self, gpu: Gpu, missing: tuple[str, ...]) -> Iterator[tuple[int, int]]:
        """What of a GPU cannot be used because a node of its is missing, or because its node is unknown."""
        numbered = {path for path in missing if path.removeprefix("/dev/nvidia").isdigit()}
        of_mig = {path for path in missing if "nvidia-caps/" in path}
        injection = self.policy.injection
        by_path = injection.pass_device_specs or bool(
            {"cdi-cri", "cdi-annotations"} & set(injection.strategies)
        )
        missing = tuple(path for path in missing if path != "/dev/nvidia-uvm")
        if f"/dev/nvidia{gpu.minor}" in numbered or set(missing) - numbered - of_mig:
            yield ALL, ALL
        if by_path and gpu.minor is None:
            yield ALL, ALL
        for mig in gpu.mig_devices:
            minors = (mig.gi_minor, mig.ci_minor)
            if any(f"/dev/nvidia-caps/nvidia-cap{minor}" in of_mig for minor in minors):
                yield mig.gi, mig.ci
            is_allocated = by_path and self.policy.mig_strategy != "none"
            if is_allocated and gpu.minor is not None and None in minors:
                yield mig.gi, mig.ci

    def imex_causes(self) -> None:
        """Every GPU needs a channel that is required; that it is there for the first time counts at once."""
        injection = self.policy.injection
        if not injection.imex_required:
            self.channels_seen = False
            self.faults = [fault for fault in self.faults if fault.reason != "imex_channel_missing"]
            return
        if self.nodes_there is None:
            return
        wanted = {f"/dev/nvidia-caps-imex-channels/channel{channel}" for channel in injection.imex_channels}
        is_missing = not wanted <= set(self.nodes_there)
        if not is_missing and not self.channels_seen:
            self.channels_seen = True
            self.faults = [fault for fault in self.faults if fault.reason != "imex_channel_missing"]
        for gpu in self.gpus:
            self.cause(gpu, "nvml", "imex_channel_missing", is_there=is_missing)

    def mps_causes(self) -> None:
        """What MPS shares cannot be used while its daemon does not serve; nothing else needs it."""
        if self.policy.sharing.strategy != "mps":
            self.mps_served = False
        shared = {gpu.uuid for _, devices in self.advertised() for id_, gpu, _ in devices if "::" in id_}
        needs = shared if self.policy.sharing.strategy == "mps" else set()
        self.faults = [f for f in self.faults if f.reason != "mps_not_ready" or f.gpu in needs]
        for gpu in needs:
            self.cause(gpu, "mps", "mps_not_ready", is_there=self.mps is not True)

    def cause(self, gpu: str, source: str, reason: str, *, is_there: bool) -> None:
        if is_there:
            recovery = "by_hand" if reason == "held" else "self_clearing"
            self.fault(source, reason, gpu, recovery).seen(1, lasts=True)
            return
        for fault in [fault for fault in self.of_gpu(gpu) if fault.reason == reason and fault.lasts]:
            fault.ended()
            if reason == "held":
                self.faults.remove(fault)

    # Stability

    def out_by_themselves(self) -> set[str]:
        return {
            fault.gpu
            for fault in self.faults
            if fault.flips and fault.recovery == "self_clearing" and fault.reason not in {*OF_THE_NODE, "xid"}
        }

    def flapping(self, were_out: set[str], *, was_hung: bool) -> None:
        if self.hung:
            for fault in self.faults if not was_hung else ():
                if fault.reason == "nvml_timeout" and fault.gpu in self.silent:
                    times = self.fault_times.get(fault.gpu, [])
                    self.fault_times[fault.gpu] = [at_ns for at_ns in times if at_ns != fault.since_ns]
            return
        for gpu in self.out_by_themselves() - were_out:
            window_ns = self.policy.sticky_window_ns
            times = [at_ns for at_ns in self.fault_times.get(gpu, []) if self.now_ns - at_ns < window_ns]
            self.fault_times[gpu] = [*times, self.now_ns]
            if len(times) + 1 >= self.policy.sticky_after:
                self.fault("agent", "flapping", gpu, "reboot").seen(1)

    def breaker(self) -> None:
        if self.pods is not None and self.now_ns >= self.pods_ns + 30 * S:
            self.pods = None
        wanted = self.wanted_out()
        if len({fault.gpu for fault in wanted}) != 1 or self.now_ns < self.breaker_ns() or self.pods is None:
            return
        for _, devices in self.advertised():
            if any(device in self.pods and gpu.uuid == wanted[0].gpu for device, gpu, _ in devices):
                return
        for fault in wanted:
            fault.flips = True
        self.soft_flip_ns = self.now_ns

    def wanted_out(self) -> list[Fault]:
        return [
            fault
            for fault in self.faults
            if fault.reason in SOFT and fault.reason in self.policy.soft_flips and not fault.flips
        ]

    def breaker_ns(self) -> int:
        return 0 if self.soft_flip_ns is None else self.soft_flip_ns + self.policy.soft_flip_every_ns

    def xid(self, fact: XidReported, now_ns: int) -> None:
        if fact.gpu not in self.gpus:
            return
        place = self.place(fact)
        if place is not None and self.was_reported(fact, place, now_ns):
            for unconfirmed in [
                each for each in self.unconfirmed_faults if (each.gpu, each.xid) == (fact.gpu, fact.xid)
            ]:
                if ALL in {unconfirmed.gi, place[0]} or unconfirmed.gi == place[0]:
                    self.believe(unconfirmed)
            return
        self.xids[fact.gpu, fact.xid] += fact.count
        if place is None:
            return
        self.note_report(fact, place, now_ns)
        if not self.flips(fact.xid):
            return
        gi, ci = place
        fault = self.fault(
            fact.source,
            "xid",
            fact.gpu,
            row_of(fact.xid).recovery,
            code=fact.xid,
            gi=gi,
            ci=ci,
            hard=row_of(fact.xid).evidence == "hard",
        )
        fault.seen(fact.count)

    def place(self, fact: XidReported) -> tuple[int, int] | None:
        """Where it is: the whole GPU where it has no instances, nowhere if it has not this one."""
        devices = self.gpus[str(fact.gpu)].mig_devices
        if not devices:
            return ALL, ALL
        is_there = any(fact.gi in {ALL, mig.gi} and fact.ci in {ALL, mig.ci} for mig in devices)
        return (fact.gi, fact.ci) if is_there else None

    def was_reported(self, fact: XidReported, place: tuple[int, int], now_ns: int) -> bool:
        gi, ci = place
        for report in self.reported_xids:
            same_place = (report.gi == gi or ALL in {report.gi, gi}) and (
                report.ci == ci or ALL in {report.ci, ci}
            )
            same = (report.gpu, report.xid) == (fact.gpu, fact.xid) and same_place
            if same and report.source != fact.source and now_ns - report.at_ns <= 2 * S:
                return True
        return False

    def note_report(self, fact: XidReported, place: tuple[int, int], now_ns: int) -> None:
        report = ReportedXid(str(fact.gpu), *place, fact.xid, fact.source, now_ns)
        self.reported_xids = [*(each for each in self.reported_xids if each[:4] != report[:4]), report]

    def flips(self, xid: int) -> bool:
        if xid in self.policy.xid_overrides:
            return self.policy.xid_overrides[xid] == "flip"
        if self.policy.xid_policy == "catalog":
            return row_of(xid).recovery != "self_clearing"
        return xid not in IGNORED_BY_NVIDIAS_PLUGIN

    def enumerated(self, fact: GpusEnumerated, now_ns: int) -> None:
        before = set(self.listed)
        self.listed = {gpu.uuid for gpu in fact.gpus}
        self.nodes_there = fact.control_nodes
        self.silent &= self.listed
        for gpu in fact.gpus:
            if gpu.uuid in self.gpus:
                self.layout(self.gpus[gpu.uuid], gpu)
            self.gpus[gpu.uuid] = gpu
        for uuid in self.gpus:
            missing = [fault for fault in self.of_gpu(uuid) if (fault.reason, fault.code) == ("gpu_lost", 0)]
            if uuid in self.listed and missing and missing[0].lasts:
                missing[0].ended()
                self.was_reset({uuid})
            if uuid not in self.listed and not (missing and missing[0].lasts):
                self.trouble(uuid)
                self.fault("nvml", "gpu_lost", uuid, "reset").seen(1, lasts=True)
        if self.listed - before - self.verdict:
            self.probes_until_ns = now_ns + self.policy.first_probe_wait_ns

    def layout(self, old: Gpu, new: Gpu) -> None:
        """Instances were destroyed and made: what was wrong with a destroyed one is over or the card's."""
        lived = [
            mig
            for mig in old.mig_devices
            for other in new.mig_devices
            if (mig.uuid, mig.gi, mig.ci, mig.profile) == (other.uuid, other.gi, other.ci, other.profile)
        ]
        if len(lived) == len(old.mig_devices) == len(new.mig_devices):
            return
        for fault in self.of_gpu(old.uuid):
            if fault.gi == ALL or any(fault.gi == m.gi and fault.ci in {ALL, m.ci} for m in lived):
                continue
            self.faults.remove(fault)
            if fault.recovery in {"reboot", "by_hand"}:
                fault.gi = fault.ci = ALL
                if not any(same_kind(fault, other) for other in self.of_gpu(old.uuid)):
                    self.faults.append(fault)

    def handle_link_fact(
        self,
        fact: RegisterSent | Registered | RegistrationFailed | WatchersChanged | OwnSocketLost,
        now_ns: int,
    ) -> None:
        link = self.links.get(fact.resource)
        if link is None or link.generation != fact.generation:
            return
        if link.phase not in {"registering", "registered"}:
            return
        match fact:
            case RegisterSent():
                if fact.kubelet != link.tried:
                    self.kubelet = fact.kubelet
                link.tried = fact.kubelet
            case Registered():
                if fact.kubelet != link.tried:
                    self.kubelet = fact.kubelet
                link.tried = fact.kubelet
                link.phase = "registered"
                link.registered_ns = now_ns
                link.unreachable_since_ns = None
                if link.streams == 0:
                    link.end(now_ns)
            case RegistrationFailed() if link.phase == "registered":
                link.end(now_ns)
            case RegistrationFailed():
                if fact.failure not in {"absent", "unreachable"}:
                    link.unreachable_since_ns = None
                    link.back_off(now_ns)
                    return
                if link.unreachable_since_ns is None:
                    link.unreachable_since_ns = now_ns
                link.phase = "backing_off"
                soon = now_ns - link.unreachable_since_ns < 10 * S
                link.due_ns = link.due_at_most_ns = now_ns + (S // 20 if soon else S)
            case WatchersChanged():
                link.streams = fact.live
                if link.phase == "registered" and fact.live == 0:
                    link.end(now_ns)
            case OwnSocketLost() if link.phase == "registered":
                link.end(now_ns)
            case OwnSocketLost():
                link.back_off(now_ns)

    # What follows

    def time(self, now_ns: int) -> None:
        known, self.names = self.names, []
        # Also what the policy names and the GPUs cannot fill, but not what is only remembered.
        for name, _ in self.advertised():
            self.links.setdefault(name, Link())
            if name not in known:
                known.append(name)
        self.names = known
        self.devices_published = self.devices_published or self.probes_are_in(now_ns)
        for link in self.links.values():
            self.advance(link, now_ns)

    def advance(self, link: Link, now_ns: int) -> None:
        if link.phase == "registering":
            if self.kubelet is not None and self.kubelet != link.tried:
                link.begin(self.kubelet)
            return
        if link.phase == "registered":
            if self.kubelet is not None and self.kubelet != link.tried:
                link.begin(self.kubelet)
            elif link.streams is None and now_ns >= link.registered_ns + self.policy.watch_timeout_ns:
                link.end(now_ns)
        elif self.kubelet is None:
            link.phase = "waiting"
            link.due_ns = NEVER
        elif link.phase == "backing_off":
            if self.kubelet != link.tried or now_ns >= link.due_ns:
                link.begin(self.kubelet)
        elif self.probes_are_in(now_ns):
            link.begin(self.kubelet)

    def probes_are_in(self, now_ns: int) -> bool:
        waited = self.probes_until_ns is not None and now_ns >= self.probes_until_ns
        return waited or (bool(self.listed) and self.listed <= self.verdict)

    def next_ns(self) -> int:
        """When something happens if no fact arrives."""
        times = [fault.over_at(self.policy) for fault in self.faults]
        times.append(self.released_until_ns)
        if self.pods is not None:
            times.append(self.pods_ns + 30 * S)
        if self.wanted_out() and self.now_ns < self.breaker_ns():
            times.append(self.breaker_ns())
        for link in self.links.values():
            times.append(link.due_ns)
            if link.phase == "registered" and link.streams is None:
                times.append(link.registered_ns + self.policy.watch_timeout_ns)
            if link.phase == "waiting" and self.kubelet is not None and self.probes_until_ns is not None:
                times.append(self.probes_until_ns)
        if not self.devices_published and self.probes_until_ns is not None:
            times.append(self.probes_until_ns)
        return min(times, default=NEVER)

    # What is to be seen

    @property
    def hung(self) -> bool:
        return self.driver_silent or len(self.silent) > 1

    def of_gpu(self, uuid: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.gpu == uuid]

    def trouble(self, uuid: str) -> None:
        for fault in self.of_gpu(uuid):
            fault.clean.clear()

    def was_reset(self, uuids: set[str]) -> None:
        for fault in self.faults:
            if fault.gpu not in uuids:
                continue
            if fault.lasts and fault.reason in READINGS:
                fault.ended()
            if fault.recovery == "reset":
                fault.reset = True
                fault.clean.clear()

    def fault(
        self,
        source: str,
        reason: str,
        gpu: str,
        recovery: str,
        *,
        code: int = 0,
        gi: int = ALL,
        ci: int = ALL,
        flips: bool = True,
        hard: bool = True,
    ) -> Fault:
        for fault in self.faults:
            if (fault.source, fault.reason, fault.gpu, fault.gi, fault.ci, fault.code) == (
                source,
                reason,
                gpu,
                gi,
                ci,
                code,
            ):
                return fault
        fault = Fault(source, reason, gpu, gi, ci, code, recovery, self.now_ns, flips=flips, hard=hard)
        self.faults.append(fault)
        return self.faults[-1]

    def advertised(self) -> Iterator[tuple[str, list[tuple[str, Gpu, MigDevice | None]]]]:
        """Each resource with its devices: id, GPU, MIG device."""
        found: dict[str, list[tuple[str, Gpu, MigDevice | None]]] = {name: [] for name in self.names}
        strategy = self.policy.mig_strategy
        in_order = sorted(self.gpus.values(), key=lambda gpu: gpu.pci)
        numbers = {gpu.uuid: str(number) for number, gpu in enumerate(in_order)}
        if strategy == "single" and any(gpu.mig_enabled for gpu in in_order):
            kinds = {mig.profile for gpu in in_order for mig in gpu.mig_devices if gpu.mig_enabled}
            if len(kinds) != 1 or not all(gpu.mig_enabled and gpu.mig_devices for gpu in in_order):
                found.setdefault("nvidia.com/gpu", [])
                in_order = []
        for gpu in in_order:
            slices = sorted(gpu.mig_devices, key=lambda mig: (mig.gi, mig.ci))
            for part in slices if strategy != "none" and gpu.mig_enabled else [None]:
                name = "nvidia.com/gpu"
                if part is not None and strategy == "mixed":
                    if "c." in part.profile:
                        continue
                    name = "nvidia.com/mig-" + part.profile.replace("+", ".")
                self.advertise(found, name, gpu, part, numbers[gpu.uuid])
        yield from found.items()

    def advertise(
        self,
        found: dict[str, list[tuple[str, Gpu, MigDevice | None]]],
        name: str,
        gpu: Gpu,
        part: MigDevice | None,
        number: str,
    ) -> None:
        sharing = self.policy.sharing
        uuid = gpu.uuid if part is None else part.uuid
        count = None
        for share in reversed(sharing.shares):
            models = not share.models or any(is_like(model, gpu.name) for model in share.models)
            cards = not share.gpus or bool({number, gpu.uuid} & set(share.gpus))
            if share.resource == name and models and cards:
                count = share.replicas
        if count is None or (sharing.strategy == "mps" and part is not None):
            found.setdefault(name, []).append((uuid, gpu, part))
            return
        devices = found.setdefault(name + (".shared" if sharing.rename_by_default else ""), [])
        capability = gpu.compute_capability or (0, 0)
        if sharing.strategy != "mps" or count <= (48 if capability >= (7, 5) else 16):
            devices.extend((f"{uuid}::{replica}", gpu, part) for replica in range(count))

    def health(self) -> dict[str, dict[str, str]]:
        """Health by resource and device id."""
        return {
            name: {device: self.verdict_on(gpu, part) for device, gpu, part in devices}
            for name, devices in self.advertised()
        }

    def verdict_on(self, gpu: Gpu, part: MigDevice | None) -> str:
        for fault in self.of_gpu(gpu.uuid):
            touches = part is None or (fault.gi in {ALL, part.gi} and fault.ci in {ALL, part.ci})
            if fault.flips and touches:
                return "unhealthy"
        return "healthy" if gpu.uuid in self.verdict else "unknown"

    def hard_faults(self) -> set[str]:
        """The GPUs of which an RMA may ask something."""
        return {
            fault.gpu
            for fault in self.faults
            if fault.flips and fault.hard and fault.reason not in OF_THE_NODE
        }


def same_kind(one: Fault, other: Fault) -> bool:
    return (one.source, one.reason, one.code, one.gi, one.ci) == (
        other.source,
        other.reason,
        other.code,
        other.gi,
        other.ci,
    )


def is_like(pattern: str, name: str) -> bool:
    """Whether a name is like a pattern in which a star stands for anything, letter by letter."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(is_like(pattern[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and pattern[0] == name[0] and is_like(pattern[1:], name[1:])


def names_of(gpu: Gpu) -> set[str]:
    return {gpu.uuid, gpu.pci} | ({gpu.serial} if gpu.serial else set())


def of_links(fault: Fault) -> bool:
    return fault.reason == "xid" and row_of(fault.code).xid_class == "link"
