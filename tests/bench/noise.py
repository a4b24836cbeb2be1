"""S13: what resembles a fault and is none, for as many GPU-hours as there is time for, on a virtual clock.

Nodes of 16 GPUs live some thousand hours each under one of the XID policies and see what a healthy node
sees: XIDs of applications from NVML and the kernel log, alone and in storms; a monitor beside us, so that
readings wander, are unavailable now and then, and clocks are held down for less than the share that counts;
uevents, and GPUs listed in another order; a kubelet and an agent that are started anew; an agent that is not
scheduled for a while; and behind ``release`` a driver reload, a GPU reset and a MIG change.

A false flip is a device that turns Unhealthy by anything but a release, or that is not Healthy again after
what follows a release. Polls that repeat the last one are not stepped: tests/core shows that they change
nothing. The clock of the wall, which may jump, does not reach the core: that is a contract of imports.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.core.health.conditions import recovered_at
from agent.core.health.reducer import step
from agent.core.health.snapshot import snapshot_of
from agent.core.health.stability import breaker_at, pods_known_until
from agent.core.health.state import State, initial_state
from agent.core.xids import CLASSES, XidClass
from agent.model.facts import (
    NVML,
    AllocationsListed,
    DeviceNodesSeen,
    DriverModuleSeen,
    DriverReady,
    DriverReleased,
    DriverUnavailable,
    Fact,
    GpuProbePassed,
    GpuRebound,
    GpuSampled,
    GpusEnumerated,
    HealthEventsUnsupported,
    KernelXidSeen,
    KubeletSocketSeen,
    PciGpusSeen,
    Registered,
    ReleaseRequested,
    ResumeRequested,
    TaskReported,
    Tick,
    WatchersChanged,
    XidReported,
)
from agent.model.gpu import Gpu, MigDevice
from agent.model.health import Health, Reason
from agent.model.ids import ALL, DeviceId, GpuUuid, ResourceName, SocketIdentity
from agent.model.policy import SECOND_NS, Policy
from agent.model.sample import GpuSample
from agent.model.snapshot import Device
from agent.model.structs import replace
from tests.core.polls import HEALTHY

GPUS: Final = 16
LIFE_HOURS: Final = 2_000
"""Of one node; then another one begins, so that no state grows old and none is always young."""

HOUR_NS: Final = 3600 * SECOND_NS
POLL_NS: Final = 10 * SECOND_NS
START_NS: Final = 90 * SECOND_NS

APPLICATION_XIDS: Final = (13, 31, 43, 45)
CATALOG_XIDS: Final = tuple(
    code
    for code, kind in CLASSES.items()
    if kind in {XidClass.APPLICATION, XidClass.INFORMATION, XidClass.FOLLOW_UP}
)
"""What NVIDIA's catalog calls the application's business or mere information."""


@dataclass(frozen=True, slots=True)
class Result:
    """What was lived through, and what went wrong."""

    gpu_hours: int
    flips: int
    """Devices that turned Unhealthy, or stayed so, for no reason."""
    facts: int
    """Steps of the core."""
    noise: Mapping[str, int]
    """How often each kind of noise was made."""


def false_flips(gpu_hours: int, seed: int) -> Result:
    """Let nodes live for at least so many GPU-hours in all; equal arguments give equal results."""
    lived, flips, facts = 0, 0, 0
    noise: Counter[str] = Counter()
    number = 0
    while lived < gpu_hours:
        hours = min(LIFE_HOURS, -(-(gpu_hours - lived) // GPUS))
        node = NoisyNode(random.Random(f"{seed}/{number}"), _policy(number))
        node.live(hours)
        number += 1
        lived += hours * GPUS
        flips += node.flips
        facts += node.facts
        noise += node.noise
    return Result(lived, flips, facts, dict(noise))


def _policy(number: int) -> Policy:
    return Policy(
        xid_policy=("compat", "catalog")[number % 2],
        mig_strategy=("none", "mixed")[number // 2 % 2],
        soft_flips=(frozenset[Reason](), frozenset({Reason.THERMAL, Reason.NVLINK_DOWN}))[number // 4 % 2],
    )


def _gpu(number: int) -> Gpu:
    return Gpu(
        uuid=GpuUuid(f"GPU-00000000-0000-4000-8000-{number:012d}"),
        index=number,
        minor=number,
        name="NVIDIA H100 80GB HBM3",
        pci=f"0000:{0x10 + number:02x}:00.0",
        memory_bytes=80 * 2**30,
        compute_capability=(9, 0),
        numa_node=number // 8,
        serial=f"16509210{number:05d}",
    )


class NoisyNode:
    """One node, its sources and its operator."""

    def __init__(self, dice: random.Random, policy: Policy) -> None:
        self._dice = dice
        self.gpus = [_gpu(number) for number in range(GPUS)]
        self._policy = policy
        self._state: State = initial_state(policy, None, now_ns=START_NS)
        self._now_ns = START_NS
        self._kubelets = 0
        self._module = 70
        self._reported_xids: Counter[tuple[str, int]] = Counter()
        self.flips = 0
        self.facts = 0
        self.noise: Counter[str] = Counter()
        kinds = self.kinds()
        self._makers: Sequence[Callable[[], None]] = [maker for maker, _ in kinds]
        self._weights = [weight for _, weight in kinds]

    def kinds(self) -> tuple[tuple[Callable[[], None], float], ...]:
        """What happens, and how often in a thousand hours."""
        return (
            (self.application_dies, 150),
            (self.application_storms, 10),
            (self.readings_wander, 80),
            (self.clocks_are_held_down, 10),
            (self.readings_are_unavailable, 30),
            (self.pods_are_listed, 30),
            (self.gpus_are_listed_in_another_order, 10),
            (self.uevents_are_replayed, 10),
            (self.kubelet_is_replaced, 5),
            (self.agent_is_replaced, 5),
            (self.agent_is_not_scheduled, 10),
            (self.events_are_unsupported, 3),
            (self.driver_is_reloaded, 3),
            (self.gpu_is_reset, 3),
            (self.mig_is_changed, 3),
        )

    def live(self, hours: int) -> None:
        """See noise for so many hours."""
        self.begin()
        end_ns = self._now_ns + hours * HOUR_NS
        mean_hours = 1000 / sum(self._weights)
        while True:
            self._pass(int(self._dice.expovariate(1 / mean_hours) * HOUR_NS))
            if self._now_ns >= end_ns:
                break
            (make,) = self._dice.choices(self._makers, self._weights)
            self.noise[make.__name__] += 1
            make()

    def begin(self) -> None:
        """Be found, be probed, be registered."""
        self.apply(TaskReported(NVML, running=True), self._ready(), self._enumerated())
        self._all_polls_pass(1)
        self.kubelet_is_replaced()

    # Stepping

    def apply(self, *facts: Fact) -> None:
        for fact in facts:
            before = self._state.devices
            self._state, _, _ = step(self._state, fact, self._now_ns)
            self.facts += 1
            if self._state.devices is not before:
                self.flips += _flips(before, self._state.devices)

    def _expect_all_healthy(self) -> None:
        advertised = [device for devices in self._state.devices.values() for device in devices]
        self.flips += sum(device.health is not Health.HEALTHY for device in advertised)

    def _pass(self, delay_ns: int) -> None:
        """Let time pass; where nothing is due, a tick changes nothing and is not applied."""
        at_ns = self._now_ns + delay_ns
        while (due_ns := self._due_ns()) is not None and due_ns < at_ns:
            self._now_ns = max(self._now_ns, due_ns)
            self.apply(Tick())
        self._now_ns = at_ns

    def _due_ns(self) -> int | None:
        """When something follows from time alone: the core would be woken then at the latest."""
        state = self._state
        times = [recovered_at(condition, state.policy) for condition in state.conditions.values()]
        times += [state.released_until_ns, pods_known_until(state), breaker_at(state, self._now_ns)]
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    # Facts

    def _ready(self) -> DriverReady:
        return DriverReady(driver_version="570.86.15", nvml_version="12.570.86.15", cuda_version=(12, 8))

    def _enumerated(self) -> GpusEnumerated:
        return GpusEnumerated(tuple(self.gpus), control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm"))

    def _polled(self, gpu: Gpu, **readings: object) -> Iterator[Fact]:
        yield GpuSampled(gpu.uuid, replace(HEALTHY, **readings))  # type: ignore[arg-type]
        yield GpuProbePassed(gpu.uuid)

    def _polls_pass(self, gpu: Gpu) -> None:
        for _ in range(self._policy.recovery_clean_probes):
            self._pass(POLL_NS)
            self.apply(*self._polled(gpu))

    def _all_polls_pass(self, times: int) -> None:
        for number in range(times):
            for gpu in self.gpus:
                self.apply(*self._polled(gpu))
            if number < times - 1:
                self._pass(POLL_NS)

    def _any_gpu(self) -> Gpu:
        return self._dice.choice(self.gpus)

    # Applications

    def application_dies(self) -> None:
        self._xid_is_reported(self._any_gpu(), self._any_xid())

    def application_storms(self) -> None:
        """One job on all GPUs dies, each process with several XIDs, several times."""
        codes = [self._any_xid() for _ in range(3)]
        for gpu in self.gpus:
            for code in codes:
                self._xid_is_reported(gpu, code)

    def _any_xid(self) -> int:
        codes = APPLICATION_XIDS if self._policy.xid_policy == "compat" else CATALOG_XIDS
        return self._dice.choice(codes)

    def _xid_is_reported(self, gpu: Gpu, code: int) -> None:
        """By NVML, the kernel log or both, in either order, merged or not."""
        slices = [(ALL, ALL), *((mig.gi, mig.ci) for mig in gpu.mig_devices)]
        gi, ci = self._dice.choice(slices)
        count = self._dice.choice((1, 1, 1, 50))
        reported = XidReported(gpu.uuid, code, gi, ci, count=count)
        logged = KernelXidSeen(gpu.pci, code, gi=gi, ci=ci, count=count)
        self._reported_xids[gpu.pci, code] += count
        sequences: tuple[tuple[Fact, ...], ...] = (
            (reported,),
            (logged,),
            (reported, logged),
            (logged, reported),
        )
        for fact in self._dice.choice(sequences):
            self.apply(fact)
            self._pass(self._dice.choice((0, SECOND_NS, 3 * SECOND_NS)))

    # A monitor beside us

    def readings_wander(self) -> None:
        dice, gpu = self._dice, self._any_gpu()
        self.apply(
            *self._polled(
                gpu,
                temperature_celsius=dice.randrange(30, 90),
                pcie_width=dice.choice((16, 16, 8, 1)),
                pcie_replays=dice.randrange(1000),
                ecc_uncorrected=dice.choice((0, 0, 0, 1)),
                rows_pending=dice.choice((False, False, True)),
                hw_slowed=dice.choice((False, True)),
            )
        )
        # What is no more than a warning goes by itself.
        self._polls_pass(gpu)

    def clocks_are_held_down(self) -> None:
        """For less than the share of a window that counts."""
        gpu = self._any_gpu()
        polls = self._policy.slowdown_window_polls
        slow = self._dice.randrange(polls * self._policy.slowdown_share_percent // 100)
        for slowed in self._dice.sample([True] * slow + [False] * (polls - slow), polls):
            self.apply(GpuSampled(gpu.uuid, replace(HEALTHY, hw_slowed=slowed)))
        for _ in range(polls):
            self.apply(GpuSampled(gpu.uuid, HEALTHY))

    def readings_are_unavailable(self) -> None:
        """A call of another one is in the way, or the driver does not answer it this time."""
        gpu = self._any_gpu()
        names = [name for name in GpuSample.__struct_fields__ if name != "links_down"]
        unavailable = self._dice.sample(names, self._dice.randrange(1, len(names)))
        self.apply(*self._polled(gpu, **dict.fromkeys(unavailable)), *self._polled(gpu))

    # The node

    def pods_are_listed(self) -> None:
        advertised = [device.id for devices in self._state.devices.values() for device in devices]
        held = self._dice.sample(advertised, self._dice.randrange(len(advertised) + 1))
        self.apply(AllocationsListed({DeviceId(name): "ns1/job-a" for name in held}))
        self._pass(31 * SECOND_NS)

    def gpus_are_listed_in_another_order(self) -> None:
        order = self._dice.sample(range(GPUS), GPUS)
        self.gpus = [replace(gpu, index=index) for gpu, index in zip(self.gpus, order, strict=True)]
        self.apply(self._enumerated())

    def uevents_are_replayed(self) -> None:
        """``udevadm trigger``, or a GPU that was bound anew while nothing used it."""
        for gpu in self._dice.sample(self.gpus, self._dice.randrange(1, GPUS)):
            self.apply(GpuRebound(gpu.pci, bound=False), GpuRebound(gpu.pci, bound=True))
        self.apply(PciGpusSeen(tuple(gpu.pci for gpu in self.gpus)), DeviceNodesSeen(()))

    def kubelet_is_replaced(self) -> None:
        self._kubelets += 1
        kubelet = SocketIdentity(5, 100 + self._kubelets, self._kubelets)
        self.apply(KubeletSocketSeen(kubelet))
        for name, standing in list(self._state.registrations.items()):
            self.apply(
                Registered(name, standing.generation, kubelet, SocketIdentity(5, 900, self._kubelets)),
                WatchersChanged(name, standing.generation, 1),
            )

    def agent_is_replaced(self) -> None:
        """The next process reads the kernel log's backlog and the module anew."""
        kept = snapshot_of(self._state).durable
        self._pass(self._dice.randrange(10 * SECOND_NS))
        self._state = initial_state(self._policy, kept, now_ns=self._now_ns)
        self.apply(self._ready(), self._enumerated(), DriverModuleSeen(self._module), DeviceNodesSeen(()))
        for (pci, code), count in self._reported_xids.items():
            self.apply(KernelXidSeen(pci, code, backlog=True, count=count))
        self._reported_xids.clear()
        self._all_polls_pass(1)
        self._expect_all_healthy()
        self.kubelet_is_replaced()

    def agent_is_not_scheduled(self) -> None:
        self._now_ns += self._dice.randrange(HOUR_NS)
        self.apply(Tick())

    def events_are_unsupported(self) -> None:
        self.apply(HealthEventsUnsupported(self._any_gpu().uuid, "Not Supported"))

    # Behind a release

    def driver_is_reloaded(self) -> None:
        self._release(self.gpus)
        addresses = [gpu.pci for gpu in self.gpus]
        self._module += 1
        self.apply(*(GpuRebound(pci, bound=False) for pci in addresses), PciGpusSeen(()))
        if self._dice.random() < 0.5:
            self.apply(DriverModuleSeen(None))
        self._pass(self._dice.randrange(60 * SECOND_NS))
        self.apply(*(GpuRebound(pci, bound=True) for pci in addresses), PciGpusSeen(tuple(addresses)))
        self.apply(DriverModuleSeen(self._module))
        if self._dice.random() < 0.5:
            # The operator gave it back before the module was loaded.
            self.apply(ResumeRequested(), _NOT_LOADED)
            self._pass(5 * SECOND_NS)
        self._resume()

    def gpu_is_reset(self) -> None:
        self._release([self._any_gpu()])
        self._pass(self._dice.randrange(60 * SECOND_NS))
        self._resume()

    def mig_is_changed(self) -> None:
        gpu = self._any_gpu()
        self._release([gpu])
        instances = self._dice.sample(range(1, 14), self._dice.randrange(8))
        changed = replace(
            gpu,
            mig_enabled=bool(instances),
            mig_devices=tuple(
                MigDevice(f"MIG-{gpu.index}-{instance}", instance, 0, "1g.10gb", 2**33)
                for instance in instances
            ),
        )
        self.gpus = [changed if each is gpu else each for each in self.gpus]
        self._resume()

    def _release(self, gpus: Sequence[Gpu]) -> None:
        minutes = self._dice.choice((1, 10))
        self.apply(ReleaseRequested(frozenset(gpu.uuid for gpu in gpus), minutes * 60 * SECOND_NS))
        self._pass(SECOND_NS)
        self.apply(DriverReleased())

    def _resume(self) -> None:
        """Give the driver back, or let the time run out; then every device has to recover."""
        if self._dice.random() < 0.5:
            self.apply(ResumeRequested())
        elif self._state.released_until_ns is not None:
            self._pass(self._state.released_until_ns - self._now_ns + 1)
        self.apply(self._ready(), self._enumerated(), DeviceNodesSeen(()))
        self._all_polls_pass(self._policy.recovery_clean_probes)
        self._pass(self._policy.recovery_quiet_ns)
        self.apply(Tick())
        self._expect_all_healthy()


_Devices = Mapping[ResourceName, tuple[Device, ...]]


def _flips(before: _Devices, now: _Devices) -> int:
    """Return how many well devices turned Unhealthy by anything but a release."""
    were_healthy = {
        device.id for devices in before.values() for device in devices if device.health is Health.HEALTHY
    }
    return sum(
        device.id in were_healthy
        and all(reason.reason is not Reason.MAINTENANCE for reason in device.reasons)
        for devices in now.values()
        for device in devices
        if device.health is Health.UNHEALTHY
    )


_NOT_LOADED: Final = DriverUnavailable(
    Reason.DRIVER_NOT_LOADED, "The NVIDIA driver is not loaded", unloaded=True
)
