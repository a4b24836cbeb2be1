"""A second, naive opinion on what the core should say: slow, mutable, and written apart from it.

It shares the vocabulary and nothing else. Where the core may choose (how much jitter a delay has) the
oracle says between which bounds, and takes over what was chosen.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from agent.model.facts import (
    DriverCallAnswered,
    DriverCallOverdue,
    DriverReady,
    DriverUnavailable,
    Fact,
    GpuCallFailed,
    GpuCallOverdue,
    GpuProbePassed,
    GpusEnumerated,
    KubeletSocketSeen,
    OwnSocketLost,
    PolicyChanged,
    Registered,
    RegistrationFailed,
    WatchersChanged,
    XidReported,
)
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import ALL, SocketIdentity
from agent.model.policy import Policy
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
    count: int = 0
    reset: bool = False
    clean: list[int] = field(default_factory=list)
    """When probes passed in a row since it was last seen (and reset, if it needs that)."""

    def seen(self, times: int) -> None:
        self.count += times
        self.reset = False
        self.clean.clear()

    def over_at(self, policy: Policy) -> int:
        curable = self.recovery == "self_clearing" or (self.recovery == "reset" and self.reset)
        if not curable or len(self.clean) < policy.recovery_clean_probes:
            return NEVER
        return self.clean[0] + policy.recovery_quiet_ns


@dataclass
class Link:
    """How one resource stands with the kubelet."""

    phase: str = "waiting"
    generation: int = 0
    tried: SocketIdentity | None = None
    due_ns: int = NEVER
    due_at_most_ns: int = NEVER
    failures: int = 0
    refused_since_ns: int | None = None
    registered_ns: int = 0
    streams: int | None = None

    def begin(self, kubelet: SocketIdentity) -> None:
        if kubelet != self.tried:
            self.failures = 0
            self.refused_since_ns = None
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


class Oracle:
    """Everything is written down as it comes and worked out anew after each fact."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.gpus: dict[str, Gpu] = {}
        self.faults: list[Fault] = []
        self.xids: Counter[tuple[str, int]] = Counter()
        self.names: list[str] = []
        self.begin_process()

    def begin_process(self) -> None:
        self.listed: set[str] = set()
        self.verdict: set[str] = set()
        self.silent: set[str] = set()
        self.driver_silent = False
        self.driver: object = None
        self.driver_unloaded = False
        self.last_xid: dict[tuple[str, int], tuple[str, int]] = {}
        self.kubelet: SocketIdentity | None = None
        self.links: dict[str, Link] = {}
        self.probes_until_ns: int | None = None

    def restart(self, now_ns: int) -> None:
        """Another process begins with what was kept."""
        self.begin_process()
        self.names = []
        if self.gpus:
            self.probes_until_ns = now_ns + self.policy.first_probe_wait_ns
        for fault in self.faults:
            fault.clean.clear()
        self.names = [name for name, _ in self.offered()]

    # Facts

    def tell(self, fact: Fact, now_ns: int) -> None:
        """Write one fact down, then see what follows."""
        was_hung = self.hung
        match fact:
            case XidReported():
                self.xid(fact, now_ns)
            case GpuProbePassed() if fact.gpu in self.gpus:
                self.verdict.add(fact.gpu)
                self.silent.discard(fact.gpu)
                counts = fact.gpu in self.listed and self.driver in {None, "ready"}
                for fault in self.of_gpu(fact.gpu) if counts else []:
                    if fault.reason == "driver_hung" and self.hung:
                        continue
                    if fault.recovery == "self_clearing" or fault.reset:
                        fault.clean.append(now_ns)
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
            case DriverCallOverdue():
                self.driver_silent = True
            case DriverCallAnswered():
                self.driver_silent = False
            case DriverReady():
                self.driver = "ready"
                if self.driver_unloaded:
                    self.was_reset(set(self.gpus))
                self.driver_unloaded = False
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
            case PolicyChanged():
                self.policy = fact.policy
            case KubeletSocketSeen():
                self.kubelet = fact.identity
            case Registered() | RegistrationFailed() | WatchersChanged() | OwnSocketLost():
                self.told_of_link(fact, now_ns)
            case _:
                pass
        if self.hung:
            for gpu in self.gpus:
                known = len(self.faults)
                fault = self.fault("nvml", "driver_hung", gpu, "self_clearing")
                if not was_hung or len(self.faults) > known:
                    fault.seen(1)
        self.time(now_ns)

    def xid(self, fact: XidReported, now_ns: int) -> None:
        if fact.gpu not in self.gpus:
            return
        source, at_ns = self.last_xid.get((fact.gpu, fact.xid), (fact.source, 0))
        if source != fact.source and now_ns - at_ns <= 2 * S:
            return
        self.last_xid[fact.gpu, fact.xid] = (fact.source, now_ns)
        self.xids[fact.gpu, fact.xid] += fact.count
        if fact.xid in IGNORED_BY_NVIDIAS_PLUGIN or fact.xid in self.policy.extra_ignored_xids:
            return
        gi, ci = fact.gi, fact.ci
        devices = self.gpus[fact.gpu].mig_devices
        if not devices:
            gi = ci = ALL
        elif not any(gi in {ALL, mig.gi} and ci in {ALL, mig.ci} for mig in devices):
            return
        fault = self.fault(
            fact.source, "xid", fact.gpu, row_of(fact.xid).recovery, code=fact.xid, gi=gi, ci=ci
        )
        fault.seen(fact.count)

    def enumerated(self, fact: GpusEnumerated, now_ns: int) -> None:
        before = set(self.listed)
        self.listed = {gpu.uuid for gpu in fact.gpus}
        for gpu in fact.gpus:
            self.gpus[gpu.uuid] = gpu
        for uuid in self.gpus:
            missing = [fault for fault in self.of_gpu(uuid) if (fault.reason, fault.code) == ("gpu_lost", 0)]
            if uuid in self.listed and missing and not missing[0].reset:
                self.was_reset({uuid})
            if uuid not in self.listed and (not missing or missing[0].reset):
                self.trouble(uuid)
                self.fault("nvml", "gpu_lost", uuid, "reset").seen(1)
        if self.listed - before - self.verdict:
            self.probes_until_ns = now_ns + self.policy.first_probe_wait_ns

    def told_of_link(
        self, fact: Registered | RegistrationFailed | WatchersChanged | OwnSocketLost, now_ns: int
    ) -> None:
        link = self.links.get(fact.resource)
        if link is None or link.generation != fact.generation:
            return
        if link.phase not in {"registering", "registered"}:
            return
        match fact:
            case Registered():
                if fact.kubelet != link.tried:
                    self.kubelet = fact.kubelet
                link.tried = fact.kubelet
                link.phase = "registered"
                link.registered_ns = now_ns
                link.refused_since_ns = None
                if link.streams == 0:
                    link.end(now_ns)
            case RegistrationFailed() if link.phase == "registered":
                link.end(now_ns)
            case RegistrationFailed():
                if fact.failure not in {"absent", "unreachable"}:
                    link.refused_since_ns = None
                    link.back_off(now_ns)
                    return
                if link.refused_since_ns is None:
                    link.refused_since_ns = now_ns
                link.phase = "backing_off"
                soon = now_ns - link.refused_since_ns < 10 * S
                link.due_ns = link.due_at_most_ns = now_ns + (S // 20 if soon else S)
            case WatchersChanged():
                link.streams = fact.live
                if link.phase == "registered" and fact.live == 0:
                    link.end(now_ns)
            case OwnSocketLost() if link.phase == "registered":
                link.end(now_ns)
            case _:
                pass

    # What follows

    def time(self, now_ns: int) -> None:
        self.faults = [fault for fault in self.faults if fault.over_at(self.policy) > now_ns]
        for name, devices in self.offered():
            if name not in self.names:
                self.names.append(name)
            if devices and name not in self.links:
                self.links[name] = Link()
        for link in self.links.values():
            self.advance(link, now_ns)

    def advance(self, link: Link, now_ns: int) -> None:
        if link.phase == "registering":
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
        """When something happens if nothing is told."""
        times = [fault.over_at(self.policy) for fault in self.faults]
        for link in self.links.values():
            times.append(link.due_ns)
            if link.phase == "registered" and link.streams is None:
                times.append(link.registered_ns + self.policy.watch_timeout_ns)
            if link.phase == "waiting" and self.kubelet is not None and self.probes_until_ns is not None:
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
            if fault.gpu in uuids and fault.recovery == "reset":
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
        self.faults.append(Fault(source, reason, gpu, gi, ci, code, recovery))
        return self.faults[-1]

    def offered(self) -> Iterator[tuple[str, list[tuple[str, Gpu, MigDevice | None]]]]:
        """Each resource with its devices: id, GPU, MIG device."""
        found: dict[str, list[tuple[str, Gpu, MigDevice | None]]] = {name: [] for name in self.names}
        strategy = self.policy.mig_strategy
        in_order = sorted(self.gpus.values(), key=lambda gpu: gpu.pci)
        if strategy == "single" and any(gpu.mig_enabled for gpu in in_order):
            kinds = {mig.profile for gpu in in_order for mig in gpu.mig_devices if gpu.mig_enabled}
            alike = len(kinds) == 1 and all(gpu.mig_enabled and gpu.mig_devices for gpu in in_order)
            in_order = in_order if alike else []
        for gpu in in_order:
            slices = sorted(gpu.mig_devices, key=lambda mig: (mig.gi, mig.ci))
            for part in slices if strategy != "none" and gpu.mig_enabled else [None]:
                name = "nvidia.com/gpu"
                if part is not None and strategy == "mixed":
                    name = "nvidia.com/mig-" + part.profile.replace("+", ".")
                uuid = gpu.uuid if part is None else part.uuid
                devices = found.setdefault(name, [])
                shares = self.policy.replicas.get(name)
                if shares is None:
                    devices.append((uuid, gpu, part))
                else:
                    devices.extend((f"{uuid}::{share}", gpu, part) for share in range(shares))
        yield from found.items()

    def health(self) -> dict[str, dict[str, str]]:
        """Health by resource and device id."""
        return {
            name: {device: self.verdict_on(gpu, part) for device, gpu, part in devices}
            for name, devices in self.offered()
        }

    def verdict_on(self, gpu: Gpu, part: MigDevice | None) -> str:
        for fault in self.of_gpu(gpu.uuid):
            if part is None or (fault.gi in {ALL, part.gi} and fault.ci in {ALL, part.ci}):
                return "unhealthy"
        return "healthy" if gpu.uuid in self.verdict else "unknown"
