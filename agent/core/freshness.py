"""What each component vouches for, and which components have given no proof of life for too long.

"The task has not ended" proves nothing. Each component gives proofs that a dead one could not: a completed
probe, a wait that returned, a write that is on the disk. A component whose newest proof is older than three
periods plus its deadline is stale: what rests on it is unknown, and the component is restarted.

Invariants: a restart is no proof. No component becomes stale by time alone: three checks, a period apart,
have to find no newer proof, and a check that is a period late does not count. So however long the process or
its loop stood still, each component has a period of a running loop before it is stale: an agent that was
stopped for an hour advertises the same devices as before. A component with a fresh alternative makes no
device unknown: a GPU is unknown only when no component is left that would notice its fault.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from agent.model import components, facts
from agent.model.ids import ComponentId, GpuUuid, SourceName
from agent.model.policy import SECOND_NS

STALE_PERIODS: Final = 3
LEAST_PERIOD_NS: Final = SECOND_NS
"""Also for a component that gives proofs more often: a loaded machine is no stall."""


class Rests(Enum):
    """What becomes unknown with a component."""

    ITS_GPU = auto()
    """The health of the GPU that the component is named after."""
    EVERY_GPU = auto()
    NODE = auto()
    """No device, but what the agent reports of the node: /preflight names the component too."""
    AGENT = auto()
    """Nothing about GPUs: /readyz alone names the component."""


class Voucher(msgspec.Struct, frozen=True):
    """One row of the table."""

    vouches_for: str
    proof: str
    """What counts as a proof."""
    rests: Rests
    task: SourceName
    """The supervised task that is restarted when the component is stale."""
    alternative: SourceName | None = None
    """The component that covers this one: while it is expected and fresh, nothing becomes unknown."""


VOUCHERS: Final[Mapping[SourceName, Voucher]] = {
    components.GPU_PROBER: Voucher("the health of its GPU", "a completed probe", Rests.ITS_GPU, facts.NVML),
    components.NVML_EVENTS: Voucher(
        "the XIDs that NVML reports",
        "an event wait that returned",
        Rests.EVERY_GPU,
        facts.NVML,
        alternative=facts.KERNEL_LOG,
    ),
    components.NVML_NODE: Voucher(
        "which GPUs there are", "a count from NVML, or a completed init", Rests.NODE, facts.NVML
    ),
    components.LIST_AND_WATCH: Voucher(
        "that the kubelet was sent the newest list",
        "a comparison of the newest list with the one sent",
        Rests.NODE,
        facts.DEVICE_PLUGIN,
    ),
    components.KUBELET_COUNT: Voucher(
        "that the kubelet has the devices it was sent",
        "an answer of the kubelet",
        Rests.AGENT,
        facts.KUBELET_COUNT,
    ),
    facts.KUBELET: Voucher("the kubelet's socket", "a completed poll", Rests.NODE, facts.KUBELET),
    facts.KERNEL_LOG: Voucher(
        "the XIDs in the kernel log", "a completed read", Rests.AGENT, facts.KERNEL_LOG
    ),
    facts.SYSFS: Voucher(
        "the bus, the driver's module, device nodes", "a completed poll", Rests.AGENT, facts.SYSFS
    ),
    facts.PODS: Voucher("which pod holds which device", "a completed request", Rests.AGENT, facts.PODS),
    facts.PROBE: Voucher("which processes use which GPU", "a completed round", Rests.AGENT, facts.PROBE),
    facts.MPS: Voucher("that the MPS daemon serves", "a completed poll", Rests.AGENT, facts.MPS),
    components.STATE_FILE: Voucher(
        "that an unhealthy GPU stays so over a restart",
        "a state that is on the disk",
        Rests.AGENT,
        components.STATE_FILE,
    ),
    components.EVENT_LOG: Voucher(
        "the event log", "events that are on the disk", Rests.AGENT, components.EVENT_LOG
    ),
    components.EVIDENCE: Voucher(
        "evidence of faults", "a bundle that is on the disk", Rests.AGENT, components.EVIDENCE
    ),
    components.CDI: Voucher("the CDI specification", "a completed poll", Rests.AGENT, components.CDI),
    components.HTTP: Voucher("every answer over HTTP", "an answer to itself", Rests.AGENT, components.HTTP),
    components.CONFIG_WATCH: Voucher(
        "that a changed configuration is read", "a completed poll", Rests.AGENT, components.CONFIG_WATCH
    ),
    components.LOOP: Voucher(
        "that a stuck engine is restarted",
        "a completed measurement of the loop",
        Rests.AGENT,
        components.LOOP,
    ),
    components.ENGINE: Voucher("every answer", "a completed step", Rests.EVERY_GPU, components.ENGINE),
}
"""The table of components. Without uevents: they only start polls of sysfs, which happen anyway."""


class Terms(NamedTuple):
    """How often a component gives proofs, and how long the work for one may take."""

    period_ns: int
    deadline_ns: int

    @property
    def least_period_ns(self) -> int:
        """The time between two checks."""
        return max(self.period_ns, LEAST_PERIOD_NS)

    @property
    def limit_ns(self) -> int:
        """The age at which the newest proof is stale."""
        return STALE_PERIODS * self.least_period_ns + self.deadline_ns


class Expected(NamedTuple):
    """A component that has to give proofs now."""

    terms: Terms
    proven_ns: int
    """When it gave the newest; before the first, since when one is expected."""


class Watch(msgspec.Struct, frozen=True):
    """The result of a component's checks."""

    proven_ns: int
    misses: int = 0
    """Checks in a row that found no newer proof though one was due."""
    checked_ns: int = 0

    def due_ns(self, terms: Terms) -> int:
        """Return when the next check is due."""
        return max(self.checked_ns, self.proven_ns + terms.deadline_ns) + terms.least_period_ns

    def checked(self, expected: Expected, now_ns: int) -> "Watch":
        """Return the watch after a check; the same object if none was due."""
        if expected.proven_ns != self.proven_ns:
            return Watch(expected.proven_ns)
        late_ns = now_ns - self.due_ns(expected.terms)
        if late_ns < 0:
            return self
        # The loop itself stood still, and nothing could be proven meanwhile.
        counts = late_ns < expected.terms.least_period_ns
        return Watch(self.proven_ns, self.misses + counts, now_ns)

    @property
    def is_stale(self) -> bool:
        """Whether what rests on the component is unknown."""
        return self.misses >= STALE_PERIODS

    @property
    def wants_restart(self) -> bool:
        """Whether the newest check asks for a restart: at three misses, then at twice as many each time."""
        runs, rest = divmod(self.misses, STALE_PERIODS)
        return rest == 0 and runs > 0 and runs & (runs - 1) == 0


class Freshness(msgspec.Struct, frozen=True):
    """The watches over all components."""

    watches: Mapping[ComponentId, Watch] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    stale: frozenset[ComponentId] = frozenset()
    covered: Mapping[ComponentId, int] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    """The stale components with a fresh alternative, and when each gave its newest proof."""
    restart: frozenset[ComponentId] = frozenset()
    """The components to restart after the newest check."""
    due_ns: int | None = None
    """When the next check is due; None: no proof is expected."""


def check_components(before: Freshness, expected: Mapping[ComponentId, Expected], now_ns: int) -> Freshness:
    """Check every component that has to give proofs; one that no longer has to is not stale."""
    watches: dict[ComponentId, Watch] = {}
    restart: set[ComponentId] = set()
    due_ns: int | None = None
    for component, each in expected.items():
        old = before.watches.get(component, Watch(each.proven_ns))
        watch = watches[component] = old.checked(each, now_ns)
        if watch is not old and watch.wants_restart:
            restart.add(component)
        part_due_ns = watch.due_ns(each.terms)
        due_ns = part_due_ns if due_ns is None else min(due_ns, part_due_ns)
    stale = frozenset(component for component, watch in watches.items() if watch.is_stale)
    fresh = {component.name for component in watches.keys() - stale}
    covered = {
        component: expected[component].proven_ns
        for component in stale
        if VOUCHERS[component.name].alternative in fresh
    }
    return Freshness(watches, stale, covered, frozenset(restart), due_ns)


def proven_by(fact: facts.Fact) -> ComponentId | None:
    """Return the component that a fact is the proof of: the result of a probe proves its GPU's prober."""
    match fact:
        case (
            facts.GpuProbePassed() | facts.GpuCallFailed() | facts.GpuCallOverdue() | facts.GpuCallAnswered()
        ):
            return ComponentId(components.GPU_PROBER, fact.gpu)
        case _:
            return None


def unknown_gpus(stale: Iterable[ComponentId], gpus: Iterable[GpuUuid]) -> frozenset[GpuUuid]:
    """Return the GPUs whose health rests on a stale component."""
    names = {component.of for component in stale if VOUCHERS[component.name].rests is Rests.ITS_GPU}
    if any(VOUCHERS[component.name].rests is Rests.EVERY_GPU for component in stale):
        return frozenset(gpus)
    return frozenset(gpu for gpu in gpus if gpu in names)


def stale_message(component: ComponentId) -> str:
    """Return a sentence about a stale component."""
    voucher = VOUCHERS[component.name]
    return f"{component} is stale: {voucher.proof} is overdue, so {voucher.vouches_for} cannot be relied on"
