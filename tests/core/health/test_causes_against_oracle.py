"""Readings, orders, the machine and what follows from them against the naive oracle, in any order."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from agent.core.health.reducer import IDLE_NS, step
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.model.effects import Effect, KeepEvidence, ReleaseDriver, ResumeDriver
from agent.model.facts import (
    NVML,
    AllocationsListed,
    DeviceNodesSeen,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverModuleSeen,
    DriverReleased,
    DriverUnavailable,
    Fact,
    GpuRebound,
    GpuSampled,
    GpusEnumerated,
    HoldRequested,
    KernelXidSeen,
    PolicyChanged,
    RecoverRequested,
    ReleaseRequested,
    ResumeRequested,
    Tick,
    UnholdRequested,
)
from agent.model.gpu import Gpu
from agent.model.health import Reason
from agent.model.ids import ALL, DeviceId, GpuUuid
from agent.model.policy import Injection, Policy
from agent.model.sample import GpuSample
from agent.model.structs import replace
from tests.core.build import (
    MS,
    START_NS,
    U0,
    U1,
    U2,
    S,
    enumerated,
    failed,
    gpu,
    mig_gpu,
    mig_uuid,
    overdue,
    passed,
    ready,
    xid,
)
from tests.core.oracle import Oracle
from tests.core.polls import BAD, HEALTHY, NOTHING, sample

QUIET = 60 * S

ONE = replace(gpu(0), serial="1650921000123")
NAMELESS = mig_gpu(2, (1, 0, "1g.10gb"), (2, 0, "1g.10gb"))
SLICED = replace(
    NAMELESS,
    mig_devices=tuple(
        replace(mig, gi_minor=10 * mig.gi, ci_minor=10 * mig.gi + 1) for mig in NAMELESS.mig_devices
    ),
)
"""With the nodes that open its MIG devices; the driver does not name those of the other."""
ALL_GPUS = (ONE, gpu(1), SLICED)
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"

UUIDS = st.sampled_from([U0, U1, U2])
OLD_XIDS = st.sampled_from([13, 79, 119, 64, 54])
DELAYS = st.sampled_from(
    [0, 1, MS, S, 2 * S, 2 * S + 1, 29 * S, 30 * S, QUIET - 1, QUIET, QUIET + 1, 599 * S, 600 * S, 3600 * S]
)
SELECTORS = st.sampled_from([U0, ONE.serial or "", ONE.pci, U1, gpu(1).pci, gpu(7).pci])
READINGS = st.sampled_from(
    [
        HEALTHY,
        HEALTHY,
        HEALTHY,
        NOTHING,
        *(sample(**readings) for readings in BAD.values()),
        sample(hw_slowed=True),
        sample(hw_slowed=True),
        sample(recovery_action=2, links_down=(3,)),
        sample(recovery_action=None, fabric_state=None),
        sample(links_total=None, hw_slowed=None),
        sample(temperature_celsius=None, pcie_width=None, rows_pending=None, ecc_uncorrected=None),
    ]
)
MISSING = st.sampled_from(
    [
        *((), (), ("/dev/nvidia0",), ("/dev/nvidiactl",), ("/dev/nvidia1", "/dev/nvidia9")),
        ("/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap99"),
    ]
)
INJECTIONS = st.sampled_from(
    [
        Injection(),
        Injection(strategies=("cdi-cri",)),
        Injection(strategies=("envvar", "cdi-annotations"), imex_channels=(0,), imex_required=True),
        Injection(pass_device_specs=True, imex_channels=(0,), imex_required=True),
        Injection(imex_channels=(0,)),
    ]
)
PODS = st.sampled_from([[], [], [U0], [mig_uuid(21)], [U1, "other"]])
SOFT = st.sampled_from(
    [frozenset[Reason](), frozenset({Reason.THERMAL}), frozenset({Reason.NVLINK_DOWN, Reason.THERMAL})]
)
LISTS: st.SearchStrategy[tuple[Gpu, ...]] = st.sampled_from(
    [
        *(ALL_GPUS, ALL_GPUS, (ONE, gpu(1)), (replace(gpu(1), index=0), SLICED), ()),
        (ONE, replace(gpu(1), minor=None), NAMELESS),
    ]
)


class CausesAgainstOracle(RuleBasedStateMachine):
    """Much goes wrong, most of it ends, and the operator has a hand in it."""

    @initialize(
        probes=st.integers(1, 3),
        quiet_ns=st.sampled_from([0, 0, 1, QUIET]),
        sticky=st.sampled_from([1, 2, 3]),
        soft=SOFT,
        mixed=st.booleans(),
    )
    def begin(self, probes: int, quiet_ns: int, sticky: int, soft: frozenset[Reason], *, mixed: bool) -> None:
        policy = Policy(
            mig_strategy="mixed" if mixed else "none",
            recovery_clean_probes=probes,
            recovery_quiet_ns=quiet_ns,
            sticky_after=sticky,
            soft_flips=soft,
            slowdown_window_polls=3,
        )
        self.now_ns = START_NS
        self.state = initial_state(policy, None, now_ns=START_NS)
        self.oracle = Oracle(policy)
        self.wake_at_ns = START_NS
        self.apply(ready(), enumerated(*ALL_GPUS), *(passed(each.uuid) for each in ALL_GPUS))

    # One step of both

    def apply(self, *facts: Fact) -> None:
        for fact in facts:
            self.one_step(fact)

    def one_step(self, fact: Fact) -> None:
        before, had_evidence = self.state, self.oracle.hard_faults()
        was_released = self.oracle.released_until_ns
        self.state, effects, self.wake_at_ns = step(before, fact, self.now_ns)
        self.oracle.apply(fact, self.now_ns)
        self.agree()
        assert self.wake_at_ns == min(self.now_ns + IDLE_NS, self.oracle.next_ns())
        if self.state == before:
            assert self.state is before
        kept = [str(effect.gpu) for effect in effects if isinstance(effect, KeepEvidence)]
        assert sorted(kept) == sorted(self.oracle.hard_faults() - had_evidence)
        assert orders_to_driver(effects) == expected_orders(was_released, self.oracle.released_until_ns)

    def agree(self) -> None:
        advertised = {
            str(name): {str(device.id): device.health.value for device in devices}
            for name, devices in self.state.devices.items()
        }
        assert advertised == self.oracle.health()
        active = {
            (
                str(key.source),
                key.reason.value,
                str(key.placement.gpu),
                key.placement.gi,
                key.placement.ci,
                key.code,
            ): (
                item.recovery.value,
                item.count,
                item.since_ns,
                item.flips,
                item.evidence.value == "hard",
                item.lasts,
                item.reset_seen,
            )
            for key, item in self.state.conditions.items()
        }
        assert active == {
            (fault.source, fault.reason, fault.gpu, fault.gi, fault.ci, fault.code): (
                fault.recovery,
                fault.count,
                fault.since_ns,
                fault.flips,
                fault.hard,
                fault.lasts,
                fault.reset,
            )
            for fault in self.oracle.faults
        }
        counted = {
            (str(uuid), code): count
            for uuid, counts in self.state.xids.items()
            for code, count in counts.items()
        }
        assert counted == self.oracle.xids
        assert dict(self.state.holds) == self.oracle.holds
        assert (self.state.pods is None) == (self.oracle.pods is None)

    # Time

    def until(self, at_ns: int) -> None:
        while self.wake_at_ns < at_ns:
            assert self.wake_at_ns > self.now_ns
            self.now_ns = self.wake_at_ns
            self.apply(Tick())
        self.now_ns = at_ns

    @rule(delay_ns=DELAYS)
    def time_passes(self, delay_ns: int) -> None:
        self.until(self.now_ns + min(delay_ns, 70 * S))
        self.now_ns += max(0, delay_ns - 70 * S)
        self.apply(Tick())

    @rule()
    def until_something_is_due(self) -> None:
        due_ns = self.oracle.next_ns()
        if due_ns < self.now_ns + 3600 * S:
            self.now_ns = max(self.now_ns, due_ns - 1)
            self.apply(Tick())
            self.now_ns = max(self.now_ns, due_ns)
            self.apply(Tick())

    @rule(after_ns=DELAYS)
    def process_is_replaced(self, after_ns: int) -> None:
        self.now_ns += after_ns
        self.state = initial_state(self.state.policy, snapshot_of(self.state).durable, now_ns=self.now_ns)
        self.oracle.restart(self.now_ns)
        self.agree()
        self.wake_at_ns = self.now_ns
        self.apply(Tick())

    # Polls

    @rule(uuid=UUIDS, read=READINGS, times=st.integers(1, 3))
    def polls_pass(self, uuid: GpuUuid, read: GpuSample, times: int) -> None:
        for _ in range(times):
            self.apply(GpuSampled(uuid, read), passed(uuid))

    @rule(read=READINGS)
    def every_poll_passes(self, read: GpuSample) -> None:
        for uuid in (U0, U1, U2):
            self.apply(GpuSampled(uuid, read), passed(uuid))

    @rule(uuid=UUIDS, code=st.sampled_from([15, 16, 999]))
    def call_fails(self, uuid: GpuUuid, code: int) -> None:
        self.apply(failed(uuid, code))

    @rule(uuid=UUIDS)
    def call_hangs(self, uuid: GpuUuid) -> None:
        self.apply(overdue(uuid))

    @rule(hangs=st.booleans())
    def driver_hangs_or_answers(self, *, hangs: bool) -> None:
        self.apply(DriverCallOverdue("wait", S) if hangs else DriverCallAnswered("wait"))

    # XIDs

    @rule(
        uuid=UUIDS,
        code=st.sampled_from([13, 94, 94, 48, 79, 74, 145, 54, 64, 200]),
        gi=st.sampled_from([ALL, 1, 2, 9]),
        first=st.integers(0, 3),
        delay_ns=st.sampled_from([0, S, 2 * S, 2 * S + 1]),
    )
    def xid_is_reported(self, uuid: GpuUuid, code: int, gi: int, first: int, delay_ns: int) -> None:
        pci = self.state.gpus[uuid].pci if uuid in self.state.gpus else "0000:ff:00.0"
        logged = KernelXidSeen(pci, code, gi=gi, ci=ALL if gi == ALL else 0)
        reported = xid(code, uuid, gi=gi, ci=ALL if gi == ALL else 0, source=NVML)
        sequences: list[list[Fact]] = [[reported], [reported, logged], [logged, reported], [logged]]
        for fact in sequences[first]:
            self.apply(fact)
            self.until(self.now_ns + delay_ns)

    @rule(uuid=UUIDS, code=OLD_XIDS, count=st.integers(1, 3), backlog=st.booleans())
    def old_xid_is_reported(self, uuid: GpuUuid, code: int, count: int, *, backlog: bool) -> None:
        pci = self.state.gpus[uuid].pci if uuid in self.state.gpus else "0000:ff:00.0"
        self.apply(KernelXidSeen(pci, code, backlog=backlog, live=False, count=count))

    # The machine

    @rule(listed=LISTS, nodes=st.sampled_from([(), (CHANNEL,), (CHANNEL, "/dev/nvidiactl")]))
    def others_are_listed(self, listed: tuple[Gpu, ...], nodes: tuple[str, ...]) -> None:
        self.apply(GpusEnumerated(listed, control_nodes=nodes))

    @rule(injection=INJECTIONS)
    def containers_are_given_devices_otherwise(self, injection: Injection) -> None:
        self.apply(PolicyChanged(replace(self.state.policy, injection=injection)))

    @rule(inode=st.sampled_from([None, 70, 71]))
    def module_is_seen(self, inode: int | None) -> None:
        self.apply(DriverModuleSeen(inode))

    @rule(number=st.integers(0, 3), bound=st.booleans())
    def gpu_is_bound(self, number: int, *, bound: bool) -> None:
        self.apply(GpuRebound(gpu(number).pci, bound=bound))

    @rule(missing=MISSING)
    def nodes_are_seen(self, missing: tuple[str, ...]) -> None:
        self.apply(DeviceNodesSeen(missing))

    @rule(unloaded=st.booleans(), back=st.booleans())
    def driver_goes(self, *, unloaded: bool, back: bool) -> None:
        reason = Reason.DRIVER_NOT_LOADED if unloaded else Reason.NVML_VERSION_MISMATCH
        self.apply(DriverUnavailable(reason, "gone", unloaded=unloaded))
        if back:
            self.apply(ready(), enumerated(*ALL_GPUS))

    @rule()
    def driver_is_there(self) -> None:
        self.apply(ready(), enumerated(*ALL_GPUS))

    @rule(pods=PODS)
    def allocations_are_listed(self, pods: list[str]) -> None:
        self.apply(AllocationsListed({DeviceId(name): "ns1/job-a" for name in pods}))

    # Orders

    @rule(selector=SELECTORS, why=st.sampled_from(["x", "y"]))
    def gpu_is_held(self, selector: str, why: str) -> None:
        self.apply(HoldRequested(selector, why))

    @rule(selector=SELECTORS)
    def gpu_is_given_back(self, selector: str) -> None:
        self.apply(UnholdRequested(selector))

    @rule(uuid=UUIDS)
    def gpu_is_declared_well(self, uuid: GpuUuid) -> None:
        self.apply(RecoverRequested(uuid))

    @rule(gpus=st.sets(UUIDS, min_size=1), for_ns=st.sampled_from([1, S, QUIET]), is_done=st.booleans())
    def driver_is_released(self, gpus: set[GpuUuid], for_ns: int, *, is_done: bool) -> None:
        self.apply(ReleaseRequested(frozenset(gpus), for_ns))
        if is_done:
            self.apply(DriverReleased())

    @rule()
    def driver_is_taken_back(self) -> None:
        self.apply(ResumeRequested(), ready(), enumerated(*ALL_GPUS))

    @rule(
        soft=SOFT,
        sticky=st.sampled_from([1, 2, 3]),
        catalog=st.booleans(),
        every_ns=st.sampled_from([0, QUIET, 3600 * S]),
    )
    def policy_changes(self, soft: frozenset[Reason], sticky: int, every_ns: int, *, catalog: bool) -> None:
        policy = replace(
            self.state.policy,
            soft_flips=soft,
            sticky_after=sticky,
            soft_flip_every_ns=every_ns,
            xid_policy="catalog" if catalog else "compat",
        )
        self.apply(PolicyChanged(policy))

    # Everything is mended

    @rule()
    def everything_is_mended_and_recovers(self) -> None:
        """Nothing lasts: what ends by itself or by a reset is gone after a reset and clean polls."""
        self.apply(DriverCallAnswered("wait"), ResumeRequested(), DeviceNodesSeen(()))
        self.apply(*(UnholdRequested(name) for name in list(self.state.holds)))
        self.apply(DriverUnavailable(Reason.DRIVER_NOT_LOADED, "reload", unloaded=True), ready())
        self.apply(GpusEnumerated(ALL_GPUS, control_nodes=(CHANNEL,)))
        for _ in range(self.state.policy.recovery_clean_probes):
            self.every_poll_passes(NOTHING)
        self.until(self.now_ns + self.state.policy.recovery_quiet_ns)
        self.apply(Tick())
        assert {item.recovery.value for item in self.state.conditions.values()} <= {"reboot", "by_hand"}
        for uuid in (U0, U1, U2):
            self.apply(RecoverRequested(uuid))
        assert not self.state.conditions


def orders_to_driver(effects: tuple[Effect, ...]) -> list[type]:
    return [type(effect) for effect in effects if isinstance(effect, ReleaseDriver | ResumeDriver)]


def expected_orders(was_until_ns: int, until_ns: int) -> list[type]:
    never = Oracle(Policy()).released_until_ns
    if (was_until_ns == never) == (until_ns == never):
        return []
    return [ReleaseDriver] if was_until_ns == never else [ResumeDriver]


TestCausesAgainstOracle = CausesAgainstOracle.TestCase
