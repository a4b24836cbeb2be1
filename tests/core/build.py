"""Records for tests of the core, and a node whose core is stepped by hand."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

import pytest
from _pytest.mark import ParameterSet

from agent.core.health.reducer import step
from agent.core.health.registration import Registration
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import State, initial_state
from agent.model.effects import Effect, Event, EventKind, RecordEvent, RegisterResource
from agent.model.facts import (
    NVML,
    DriverReady,
    DriverUnavailable,
    Fact,
    GpuCallAnswered,
    GpuCallFailed,
    GpuCallOverdue,
    GpuProbePassed,
    GpusEnumerated,
    KubeletSocketSeen,
    Registered,
    RegistrationFailed,
    RegistrationFailure,
    Tick,
    WatchersChanged,
    XidReported,
)
from agent.model.gpu import Gpu, MigDevice
from agent.model.health import Condition, Health, Reason
from agent.model.ids import ALL, GpuUuid, Placement, ResourceName, SocketIdentity, SourceName
from agent.model.policy import MILLISECOND_NS, SECOND_NS, Policy
from agent.model.snapshot import Device, Durable, Snapshot
from agent.model.structs import replace

MS = MILLISECOND_NS
S = SECOND_NS

START_NS = 90 * S
"""Tests begin here: a clock that starts at zero hides what forgets to subtract."""

GPU = ResourceName("nvidia.com/gpu")
KMSG = SourceName("kmsg")

K1 = SocketIdentity(device=5, inode=100, mtime_ns=1_000)
K2 = SocketIdentity(device=5, inode=101, mtime_ns=2_000)
K3 = SocketIdentity(device=5, inode=102, mtime_ns=3_000)
PLUGIN = SocketIdentity(device=5, inode=900, mtime_ns=1_500)

DEFAULT = Policy(recovery_clean_probes=3, recovery_quiet_ns=60 * S)


def uuid(number: int) -> GpuUuid:
    """``U0..U7`` of the acceptance cases."""
    return GpuUuid(f"GPU-00000000-0000-4000-8000-{number:012d}")


def mig_uuid(number: int) -> str:
    """``M0..`` of the acceptance cases."""
    return f"MIG-00000000-0000-5000-8000-{number:012d}"


U0, U1, U2, U3, U4, U5, U6, U7 = (uuid(number) for number in range(8))


def gpu(number: int, *, index: int | None = None, numa: int | None = None, minor: int | None = None) -> Gpu:
    """A whole GPU; its PCI address follows its number, whatever its index is."""
    return Gpu(
        uuid=uuid(number),
        index=number if index is None else index,
        minor=number if minor is None else minor,
        name="NVIDIA H100 80GB HBM3",
        pci=f"0000:{0x10 + number:02x}:00.0",
        memory_bytes=80 * 2**30,
        compute_capability=(9, 0),
        numa_node=numa,
    )


def mig_gpu(number: int, *slices: tuple[int, int, str]) -> Gpu:
    """A GPU in MIG mode with the given (gi, ci, profile)."""
    return replace(
        gpu(number),
        mig_enabled=True,
        mig_devices=tuple(
            MigDevice(
                uuid=mig_uuid(10 * number + place), gi=gi, ci=ci, profile=profile, memory_bytes=5 * 2**30
            )
            for place, (gi, ci, profile) in enumerate(slices)
        ),
    )


C1B = mig_gpu(0, (1, 0, "1g.10gb"), (2, 0, "1g.10gb"), (3, 0, "1g.10gb"))
"""Setup b of case C1: M0 (gi 1), M1 (gi 2), M2 (gi 3) on U0."""


def xid(
    code: int,
    on: GpuUuid | None = U0,
    *,
    gi: int = ALL,
    ci: int = ALL,
    source: SourceName = NVML,
    count: int = 1,
) -> XidReported:
    """An XID as a source reports it."""
    return XidReported(gpu=on, xid=code, gi=gi, ci=ci, count=count, source=source)


def passed(on: GpuUuid = U0) -> GpuProbePassed:
    """A clean health poll."""
    return GpuProbePassed(on)


def failed(on: GpuUuid = U0, code: int = 999) -> GpuCallFailed:
    """A call that returned an error."""
    return GpuCallFailed(on, code=code, call="nvmlDeviceGetMemoryInfo", message=f"NVML error {code}")


def answered(on: GpuUuid = U0) -> GpuCallAnswered:
    """Return that the overdue call of a GPU returned."""
    return GpuCallAnswered(on)


def overdue(on: GpuUuid = U0) -> GpuCallOverdue:
    """A call that did not answer in time."""
    return GpuCallOverdue(on, call="nvmlDeviceGetMemoryInfo", deadline_ns=5 * S)


def ready() -> DriverReady:
    """NVML was initialised."""
    return DriverReady(driver_version="570.86.15", nvml_version="12.570.86.15", cuda_version=(12, 8))


def enumerated(*gpus: Gpu) -> GpusEnumerated:
    """What NVML lists."""
    return GpusEnumerated(gpus)


UNLOADED = DriverUnavailable(Reason.DRIVER_NOT_LOADED, "The NVIDIA driver is not loaded", unloaded=True)
MISMATCH = DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "Driver/library version mismatch")

QUIET = DEFAULT.recovery_quiet_ns
CLEAN = [passed()] * DEFAULT.recovery_clean_probes
CLEAN_1, CLEAN_2 = ([passed(on)] * DEFAULT.recovery_clean_probes for on in (U1, U2))

AT_ONCE = Policy(recovery_clean_probes=1, recovery_quiet_ns=0)
"""One clean probe brings a GPU back, so that each fault is one of its own."""

Step = Fact | int | AbstractSet[str] | Literal["restart"]
"""What an example is made of; see :meth:`Node.follow`."""


def example(sentence: str, gpus: int, then: Sequence[Step], *, policy: Policy = DEFAULT) -> ParameterSet:
    """One line of a table: a node of so many healthy GPUs, and its history; see ``follow_example``."""
    return pytest.param(gpus, policy, then, id=sentence)


def follow_example(gpus: int, policy: Policy, then: Iterable[Step]) -> None:
    """Play an example, which fails where a GPU is not as the example wants it."""
    healthy_node(*(gpu(number) for number in range(gpus)), policy=policy).follow(*then)


class Node:
    """The core of one node, stepped by hand; remembers every effect."""

    def __init__(
        self, policy: Policy = DEFAULT, restored: Durable | None = None, *, at_ns: int = START_NS
    ) -> None:
        self.now_ns = at_ns
        self.state: State = initial_state(policy, restored, now_ns=at_ns)
        self.effects: list[tuple[int, Effect]] = []
        self.wake_at_ns = at_ns

    def apply(self, *facts: Fact) -> tuple[Effect, ...]:
        """Step through facts at this moment; returns what the last one gave."""
        effects: tuple[Effect, ...] = ()
        for fact in facts:
            self.state, effects, self.wake_at_ns = step(self.state, fact, self.now_ns)
            self.effects += ((self.now_ns, effect) for effect in effects)
        return effects

    def after(self, delay_ns: int, *facts: Fact) -> tuple[Effect, ...]:
        """Let time pass, stepping whenever the core asked for it, then apply the facts."""
        self.until(self.now_ns + delay_ns)
        return self.apply(*facts or (Tick(),))

    def until(self, at_ns: int) -> None:
        """Let time pass until then, stepping only when the core asked for it."""
        while self.wake_at_ns < at_ns:
            assert self.wake_at_ns >= self.now_ns
            self.now_ns = max(self.wake_at_ns, self.now_ns)
            before = self.wake_at_ns
            self.apply(Tick())
            assert self.wake_at_ns > before, "the core asked to be woken again at once"
        self.now_ns = at_ns

    def follow(self, *steps: "Step") -> None:
        """Apply facts; an integer lets so many nanoseconds pass, a set is what has to be unhealthy by now."""
        for number, each in enumerate(steps):
            if isinstance(each, int):
                self.after(each)
            elif isinstance(each, str):
                self.state = initial_state(self.state.policy, self.snapshot().durable, now_ns=self.now_ns)
                self.wake_at_ns = self.now_ns
            elif isinstance(each, AbstractSet):
                assert self.unhealthy() == each, f"after {steps[:number]}"
            else:
                self.apply(each)

    def snapshot(self) -> Snapshot:
        """What sinks would see."""
        return snapshot_of(self.state)

    def restarted(self, *, after_ns: int = 0) -> "Node":
        """The node after the agent's process was replaced."""
        return Node(self.state.policy, self.snapshot().durable, at_ns=self.now_ns + after_ns)

    def devices(self, name: ResourceName = GPU) -> tuple[Device, ...]:
        """The advertised devices."""
        return self.state.devices.get(name, ())

    def health(self, name: ResourceName = GPU) -> dict[str, Health]:
        """Health by device id."""
        return {str(device.id): device.health for device in self.devices(name)}

    def unhealthy(self, name: ResourceName = GPU) -> set[str]:
        """Ids of the devices that are not healthy."""
        return {str(device.id) for device in self.devices(name) if device.health is not Health.HEALTHY}

    def conditions(self, reason: Reason | None = None) -> list[Condition]:
        """The active conditions."""
        return [item for item in self.state.conditions.values() if reason in {None, item.reason}]

    def standing(self, name: ResourceName = GPU) -> Registration:
        """How registration stands."""
        return self.state.registrations[name]

    def registrations(self, name: ResourceName = GPU) -> list[int]:
        """Times of the registrations that were asked for."""
        return [
            at_ns
            for at_ns, effect in self.effects
            if isinstance(effect, RegisterResource) and effect.resource == name
        ]

    def events(self, kind: EventKind | None = None) -> list[Event]:
        """Events emitted so far."""
        return events_of((effect for _, effect in self.effects), kind)

    def forget_effects(self) -> None:
        """Forget the effects so far."""
        self.effects.clear()

    def accept(self, name: ResourceName = GPU, *, kubelet: SocketIdentity | None = None) -> None:
        """The kubelet accepts the registration that is under way and opens its stream."""
        self.apply(
            Registered(name, self.standing(name).generation, kubelet or self.state.kubelet or K1, PLUGIN),
            WatchersChanged(name, self.standing(name).generation, 1),
        )

    def fail_registration(
        self, failure: RegistrationFailure = "rejected", message: str = "version", name: ResourceName = GPU
    ) -> None:
        """The registration that is under way fails."""
        self.apply(RegistrationFailed(name, self.standing(name).generation, failure, message))

    def end_stream(self, name: ResourceName = GPU) -> None:
        """The last ListAndWatch stream ends."""
        self.apply(WatchersChanged(name, self.standing(name).generation, 0))


def events_of(effects: Iterable[Effect], kind: EventKind | None = None) -> list[Event]:
    """The events among effects."""
    return [
        effect.event
        for effect in effects
        if isinstance(effect, RecordEvent) and kind in {None, effect.event.kind}
    ]


def fields_of(event: Event) -> Mapping[str, object]:
    """An event's fields."""
    return event.fields or {}


def healthy_node(*gpus: Gpu, policy: Policy = DEFAULT) -> Node:
    """A node whose GPUs were all found and probed; no kubelet yet."""
    node = Node(policy)
    node.apply(ready(), enumerated(*gpus), *(passed(item.uuid) for item in gpus))
    node.forget_effects()
    return node


def registered_node(*gpus: Gpu, policy: Policy = DEFAULT) -> Node:
    """A node with healthy GPUs, whose resources are registered and watched."""
    node = healthy_node(*gpus, policy=policy)
    node.apply(KubeletSocketSeen(K1))
    for name in list(node.state.registrations):
        node.accept(name)
    node.forget_effects()
    return node


BACK: list[Step] = [*CLEAN, QUIET - 1, {U0}, 1, set()]
"""Three clean probes and 60 s since the first of them, both to the last unit."""

STAYS: list[Step] = [*CLEAN, QUIET, {U0}]
"""Clean probes and quiet time do not bring the GPU back."""


def place(on: GpuUuid = U0, gi: int = ALL, ci: int = ALL) -> Placement:
    """A placement."""
    return Placement(on, gi, ci)
