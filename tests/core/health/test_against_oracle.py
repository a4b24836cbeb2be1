"""The whole reducer against a naive oracle: any history, compared after every step."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from agent.core.health.reducer import IDLE_NS, step
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.model.effects import Effect, EventKind, RecordEvent, RegisterResource
from agent.model.facts import (
    NVML,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverUnavailable,
    Fact,
    KubeletSocketSeen,
    MpsSeen,
    OwnSocketLost,
    PolicyChanged,
    Registered,
    RegisterSent,
    RegistrationFailed,
    RegistrationFailure,
    Tick,
    WatchersChanged,
)
from agent.model.gpu import Gpu
from agent.model.health import Reason
from agent.model.ids import ALL, GpuUuid, ResourceName, SocketIdentity, SourceName
from agent.model.policy import MigStrategy, Policy, XidOverride
from agent.model.sharing import Share, Sharing
from agent.model.structs import replace
from tests.core.build import (
    GPU,
    K1,
    K2,
    K3,
    KMSG,
    MS,
    PLUGIN,
    START_NS,
    U0,
    U1,
    U2,
    S,
    answered,
    enumerated,
    events_of,
    failed,
    fields_of,
    gpu,
    mig_gpu,
    overdue,
    passed,
    ready,
    xid,
)
from tests.core.oracle import Oracle

SMALL = ResourceName("nvidia.com/mig-1g.10gb")
QUIET = 60 * S

SLICED = mig_gpu(2, (1, 0, "1g.10gb"), (2, 0, "1g.10gb"), (2, 1, "1g.10gb"))
SLICED_ANEW = mig_gpu(2, (2, 0, "3g.40gb"), (5, 0, "1g.10gb+me"))
PARTLY_ANEW = mig_gpu(2, (1, 0, "1g.10gb"), (2, 0, "1c.2g.20gb"), (2, 1, "1c.2g.20gb"))
OLD = replace(gpu(0), name="Tesla V100-PCIE-16GB", compute_capability=(7, 0))
LISTS: tuple[tuple[Gpu, ...], ...] = (
    (gpu(0), gpu(1), SLICED),
    (gpu(0), gpu(1), SLICED_ANEW),
    (OLD, gpu(1), PARTLY_ANEW),
    (gpu(0), gpu(1), mig_gpu(2)),
    (gpu(0), gpu(1), gpu(2)),
    (gpu(0), gpu(1)),
    (gpu(1, index=0),),
    (SLICED,),
    (),
)

UUIDS = st.sampled_from([U0, U1, U2])
DELAYS = st.sampled_from(
    [
        0,
        1,
        MS,
        50 * MS,
        100 * MS,
        150 * MS,
        S,
        2 * S,
        2 * S + 1,
        10 * S,
        QUIET - 1,
        QUIET,
        QUIET + 1,
        3600 * S,
    ]
)
PLACES = st.sampled_from([(ALL, ALL), (1, 0), (2, 0), (2, 1), (2, ALL), (9, 0)])
XIDS = st.sampled_from([13, 43, 94, 48, 79, 74, 54, 64, 200])
IDENTITIES = st.sampled_from([None, K1, K2, K3])
FAILURES: st.SearchStrategy[RegistrationFailure] = st.sampled_from(
    ["absent", "unreachable", "rejected", "socket_in_use", "not_served"]
)
PER_MODEL = Sharing(
    shares=(
        Share(GPU, 2, models=("Tesla*", "*A100*")),
        Share(GPU, 3, gpus=("1",)),
        Share(SMALL, 2, gpus=(U2,)),
    )
)
SHARINGS = st.sampled_from(
    [
        Sharing(),
        Sharing.of({GPU: 2}),
        Sharing.of({SMALL: 2, GPU: 3}),
        PER_MODEL,
        replace(PER_MODEL, rename_by_default=True),
        Sharing("mps", (Share(GPU, 2), Share(SMALL, 2))),
        Sharing("mps", (Share(GPU, 20),), rename_by_default=True),
    ]
)
STRATEGIES: st.SearchStrategy[MigStrategy] = st.sampled_from(["none", "mixed", "single"])


class AgainstOracle(RuleBasedStateMachine):
    """Facts are drawn so that much goes wrong and most of it is put right again."""

    @initialize(
        strategy=STRATEGIES,
        sharing=SHARINGS,
        probes=st.integers(1, 3),
        quiet_ns=st.sampled_from([0, 1, QUIET]),
        seed=st.integers(0, 100),
        listed=st.sampled_from([None, LISTS[0], LISTS[0], LISTS[4]]),
    )
    def begin(
        self,
        strategy: MigStrategy,
        sharing: Sharing,
        probes: int,
        quiet_ns: int,
        seed: int,
        listed: tuple[Gpu, ...] | None,
    ) -> None:
        policy = Policy(
            mig_strategy=strategy,
            sharing=sharing,
            recovery_clean_probes=probes,
            recovery_quiet_ns=quiet_ns,
            jitter_seed=seed,
        )
        self.now_ns = START_NS
        self.state = initial_state(policy, None, now_ns=START_NS)
        self.oracle = Oracle(policy)
        self.wake_at_ns = START_NS
        self.apply(Tick())
        if listed is not None:
            self.apply(ready(), enumerated(*listed), KubeletSocketSeen(K1))
            self.every_probe_passes(1)

    # One step of both

    def apply(self, *facts: Fact) -> None:
        for fact in facts:
            self.one_step(fact)

    def one_step(self, fact: Fact) -> None:
        before, wire = self.state, self.oracle.health() if self.oracle.devices_published else {}
        self.state, effects, self.wake_at_ns = step(before, fact, self.now_ns)
        assert step(before, fact, self.now_ns) == (self.state, effects, self.wake_at_ns)
        generations = {name: link.generation for name, link in self.oracle.links.items()}
        self.oracle.apply(fact, self.now_ns)
        self.agree_on_devices()
        self.agree_on_conditions()
        self.agree_on_registrations(generations, effects)
        self.agree_on_published_changes(wire, effects)
        assert self.wake_at_ns == min(self.now_ns + IDLE_NS, self.oracle.next_ns())
        if self.state == before:
            assert self.state is before

    def agree_on_devices(self) -> None:
        advertised = {
            str(name): {str(device.id): device.health.value for device in devices}
            for name, devices in self.state.devices.items()
        }
        assert advertised == self.oracle.health()
        assert [list(devices) for devices in advertised.values()] == [
            list(devices) for devices in (self.oracle.health()[name] for name in advertised)
        ]

    def agree_on_conditions(self) -> None:
        active = {
            (
                str(key.source),
                key.reason.value,
                str(key.placement.gpu),
                key.placement.gi,
                key.placement.ci,
                key.code,
            ): (condition.count, condition.recovery.value)
            for key, condition in self.state.conditions.items()
        }
        assert active == {
            (fault.source, fault.reason, fault.gpu, fault.gi, fault.ci, fault.code): (
                fault.count,
                fault.recovery,
            )
            for fault in self.oracle.faults
        }
        counted = {
            (str(uuid), code): count
            for uuid, counts in self.state.xids.items()
            for code, count in counts.items()
        }
        assert counted == self.oracle.xids

    def agree_on_registrations(self, generations: dict[str, int], effects: tuple[Effect, ...]) -> None:
        for name, standing in self.state.registrations.items():
            link = self.oracle.links[str(name)]
            assert (standing.phase.value, standing.generation) == (link.phase, link.generation)
            if link.phase == "backing_off":
                assert standing.retry_at_ns is not None
                assert link.due_ns <= standing.retry_at_ns <= link.due_at_most_ns
                link.due_ns = link.due_at_most_ns = standing.retry_at_ns
        assert len(self.state.registrations) == len(self.oracle.links)
        assert self.state.kubelet == self.oracle.kubelet
        begun = {
            (name, link.generation)
            for name, link in self.oracle.links.items()
            if link.generation > generations.get(name, 0)
        }
        asked = [
            (str(effect.resource), effect.generation)
            for effect in effects
            if isinstance(effect, RegisterResource)
        ]
        assert sorted(asked) == sorted(begun)

    def agree_on_published_changes(
        self, wire: dict[str, dict[str, str]], effects: tuple[Effect, ...]
    ) -> None:
        published = {
            str(fields_of(event)["resource"]): fields_of(event)
            for event in events_of(effects, EventKind.ALLOCATABLE)
        }
        now = self.oracle.health()
        changed = {name for name in now if on_wire(now[name]) != on_wire(wire.get(name, {}))}
        assert published.keys() == (changed if self.oracle.devices_published else set())
        for name, fields in published.items():
            counts = Counter(now[name].values())
            assert fields["capacity"] == len(now[name])
            assert fields["allocatable"] == counts["healthy"]
        assert len(published) == len(events_of(effects, EventKind.ALLOCATABLE))
        assert all(effect.at_ns == self.now_ns for effect in effects if isinstance(effect, RecordEvent))
        snapshot = snapshot_of(self.state)
        assert {item.name: item.allocatable for item in snapshot.resources} == {
            name: list(devices.values()).count("healthy") for name, devices in now.items()
        }
        registered = all(link.phase == "registered" for link in self.oracle.links.values())
        well = all(view.health == "healthy" for view in snapshot.gpus)
        if snapshot.ready:
            assert registered
            assert well
            assert self.oracle.driver == "ready"

    # Time

    def until(self, at_ns: int) -> None:
        while self.wake_at_ns < at_ns:
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
        self.until(max(self.now_ns, min(self.oracle.next_ns(), self.now_ns + 70 * S)))
        self.apply(Tick())

    # What goes wrong

    @rule(uuid=UUIDS, code=XIDS, place=PLACES, source=st.sampled_from([NVML, KMSG]), count=st.integers(1, 3))
    def xid(self, uuid: GpuUuid, code: int, place: tuple[int, int], source: SourceName, count: int) -> None:
        self.apply(xid(code, uuid, gi=place[0], ci=place[1], source=source, count=count))

    @rule(uuid=UUIDS, code=st.sampled_from([15, 16, 999]))
    def call_fails(self, uuid: GpuUuid, code: int) -> None:
        self.apply(failed(uuid, code))

    @rule(uuid=UUIDS)
    def call_hangs(self, uuid: GpuUuid) -> None:
        self.apply(overdue(uuid))

    @rule()
    def driver_hangs(self) -> None:
        self.apply(DriverCallOverdue("nvmlInit_v2", 120 * S))

    @rule(unloaded=st.booleans())
    def driver_goes(self, *, unloaded: bool) -> None:
        reason = Reason.DRIVER_NOT_LOADED if unloaded else Reason.NVML_VERSION_MISMATCH
        self.apply(DriverUnavailable(reason, "gone", unloaded=unloaded))

    @rule(listed=st.sampled_from(LISTS))
    def others_are_listed(self, listed: tuple[Gpu, ...]) -> None:
        self.apply(enumerated(*listed))

    @rule(quiet_ns=st.sampled_from([0, QUIET]), overrides=st.sampled_from([{}, {94: "ignore", 31: "flip"}]))
    def policy_changes(self, quiet_ns: int, overrides: dict[int, XidOverride]) -> None:
        old = self.state.policy
        self.apply(
            PolicyChanged(
                Policy(
                    mig_strategy=old.mig_strategy,
                    sharing=old.sharing,
                    recovery_clean_probes=old.recovery_clean_probes,
                    recovery_quiet_ns=quiet_ns,
                    xid_overrides=overrides,
                )
            )
        )

    @rule(strategy=STRATEGIES, sharing=SHARINGS)
    def other_devices_are_wanted(self, strategy: MigStrategy, sharing: Sharing) -> None:
        self.apply(PolicyChanged(replace(self.state.policy, mig_strategy=strategy, sharing=sharing)))

    @rule(ready=st.booleans())
    def mps_daemon_is_seen(self, *, ready: bool) -> None:
        self.apply(MpsSeen(ready=ready, message="" if ready else "no file"))

    @rule(after_ns=DELAYS)
    def process_is_replaced(self, after_ns: int) -> None:
        self.now_ns += after_ns
        expected = {key for key, item in self.state.conditions.items() if item.flips}
        self.state = initial_state(self.state.policy, snapshot_of(self.state).durable, now_ns=self.now_ns)
        flipped = {key for key, item in self.state.conditions.items() if item.flips}
        # The MPS daemon was not probed yet.
        assert {key for key in flipped - expected if key.reason is not Reason.MPS_NOT_READY} == set()
        assert expected <= flipped
        self.oracle.restart(self.now_ns)
        self.agree_on_devices()
        self.wake_at_ns = self.now_ns
        self.apply(Tick())

    # What is put right

    @rule(times=st.integers(1, 3))
    def every_probe_passes(self, times: int) -> None:
        for _ in range(times):
            self.apply(*(passed(uuid) for uuid in list(self.state.gpus)))

    @rule(uuid=UUIDS, times=st.integers(1, 4))
    def one_probe_passes(self, uuid: GpuUuid, times: int) -> None:
        self.apply(*[passed(uuid)] * times)

    @rule(uuid=UUIDS)
    def one_call_answers(self, uuid: GpuUuid) -> None:
        self.apply(answered(uuid))

    @rule()
    def driver_answers(self) -> None:
        self.apply(DriverCallAnswered("nvmlInit_v2"))

    @rule()
    def driver_is_there(self) -> None:
        self.apply(ready(), enumerated(*LISTS[0]))

    @rule(reload=st.booleans())
    def everything_is_reset(self, *, reload: bool) -> None:
        if reload:
            self.apply(DriverUnavailable(Reason.DRIVER_NOT_LOADED, "reload", unloaded=True), ready())
        else:
            self.apply(enumerated())
        self.apply(enumerated(*LISTS[0]))

    @rule(quiet_ns=st.sampled_from([QUIET - 1, QUIET, QUIET + 1]))
    def everything_is_mended(self, quiet_ns: int) -> None:
        self.apply(DriverCallAnswered("nvmlInit_v2"))
        self.everything_is_reset(reload=True)
        self.every_probe_passes(3)
        self.time_passes(quiet_ns)

    # The kubelet

    @precondition(lambda self: self.state.registrations)
    @rule(times=st.integers(1, 8), failure=FAILURES)
    def registrations_fail_for_a_while(self, times: int, failure: RegistrationFailure) -> None:
        for _ in range(times):
            for name, standing in list(self.state.registrations.items()):
                self.apply(RegistrationFailed(name, standing.generation, failure, "no"))
            self.until_something_is_due()

    @precondition(lambda self: self.state.registrations)
    @rule(delay_ns=DELAYS)
    def kubelet_is_there_and_accepts(self, delay_ns: int) -> None:
        self.apply(KubeletSocketSeen(K1))
        self.until_something_is_due()
        self.registrations_are_accepted(None, 1, opens_first=True)
        self.time_passes(delay_ns)

    @rule(identity=IDENTITIES)
    def kubelet_is_seen(self, identity: SocketIdentity | None) -> None:
        self.apply(KubeletSocketSeen(identity))

    @precondition(lambda self: self.state.registrations)
    @rule(identity=IDENTITIES, live=st.integers(0, 2), opens_first=st.booleans())
    def registrations_are_accepted(
        self, identity: SocketIdentity | None, live: int, *, opens_first: bool
    ) -> None:
        for name, standing in list(self.state.registrations.items()):
            accepted = Registered(name, standing.generation, identity or standing.kubelet or K1, PLUGIN)
            opened = WatchersChanged(name, standing.generation, live)
            first, second = (opened, accepted) if opens_first else (accepted, opened)
            self.apply(first, second)

    @precondition(lambda self: self.state.registrations)
    @rule(identity=IDENTITIES, choose=st.integers(0, 2))
    def register_is_sent(self, identity: SocketIdentity | None, choose: int) -> None:
        name, standing = list(self.state.registrations.items())[choose % len(self.state.registrations)]
        self.apply(RegisterSent(name, standing.generation, identity or standing.kubelet or K1, PLUGIN))

    @precondition(lambda self: self.state.registrations)
    @rule(failure=FAILURES, behind=st.integers(0, 1), choose=st.integers(0, 2))
    def registration_fails(self, failure: RegistrationFailure, behind: int, choose: int) -> None:
        name, standing = list(self.state.registrations.items())[choose % len(self.state.registrations)]
        self.apply(RegistrationFailed(name, standing.generation - behind, failure, "no"))

    @precondition(lambda self: self.state.registrations)
    @rule(behind=st.integers(0, 1), by_file=st.booleans(), choose=st.integers(0, 2))
    def registration_ends(self, behind: int, choose: int, *, by_file: bool) -> None:
        name, standing = list(self.state.registrations.items())[choose % len(self.state.registrations)]
        generation = standing.generation - behind
        self.apply(OwnSocketLost(name, generation) if by_file else WatchersChanged(name, generation, 0))


def on_wire(devices: dict[str, str]) -> list[tuple[str, bool]]:
    return [(device, health == "healthy") for device, health in devices.items()]


TestAgainstOracle = AgainstOracle.TestCase
