"""Histories of a node for properties: facts weighted towards recovery, times at the boundaries."""

from hypothesis import strategies as st

from agent.model.components import GPU_PROBER, NVML_EVENTS, NVML_NODE
from agent.model.facts import (
    DEVICE_PLUGIN,
    NVML,
    SYSFS,
    AllocationsListed,
    CdiReported,
    ComponentsStale,
    DeviceCallsSeen,
    DeviceNodesSeen,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverModuleSeen,
    DriverReleased,
    Fact,
    FactRejected,
    FactsLost,
    GpuMemorySeen,
    GpuRebound,
    GpuSampled,
    GpuUseSeen,
    HealthEventsUnsupported,
    HoldRequested,
    KernelLogRead,
    KernelXidSeen,
    KubeletCounted,
    KubeletSocketSeen,
    ListWritten,
    MpsSeen,
    OwnSocketLost,
    PciConfigRead,
    PciGpusSeen,
    PodsSeen,
    PolicyChanged,
    ProbeSeen,
    RecoverRequested,
    Registered,
    RegisterSent,
    RegistrationFailed,
    ReleaseRequested,
    ResumeRequested,
    SocketFreed,
    StateLossAcknowledged,
    StateRestored,
    StateUnread,
    SwitchErrorSeen,
    TaskReported,
    Tick,
    TopologySeen,
    UnholdRequested,
    UvmErrorSeen,
    UvmProbed,
    WatchedDirectoryDeleted,
    WatchersChanged,
    XidEventsHeard,
)
from agent.model.ids import ALL, ComponentId, DeviceId
from agent.model.policy import Policy
from agent.model.sample import GpuSample
from agent.model.snapshot import Durable
from agent.model.topology import NvLinks, TopologySample
from agent.model.usage import DeviceCall, GpuMemory, PodSeen, PodUid, ProbeView, Usage
from tests.core.build import (
    GPU,
    K1,
    K2,
    KMSG,
    MISMATCH,
    MS,
    PLUGIN,
    U0,
    U1,
    UNLOADED,
    S,
    answered,
    enumerated,
    failed,
    gpu,
    overdue,
    passed,
    ready,
    uuid,
    xid,
)

QUIET = 60 * S

GAPS = st.sampled_from([0, 0, 0, 1, MS, 100 * MS, 150 * MS, S, 10 * S, QUIET - 1, QUIET, QUIET + 1, 3600 * S])

ON = st.sampled_from([U0, U1])
GENERATIONS = st.integers(1, 4)


GOOD: list[st.SearchStrategy[Fact]] = [
    st.builds(passed, ON),
    st.builds(passed, ON),
    st.builds(passed, ON),
    st.just(enumerated(gpu(0), gpu(1))),
    st.just(ready()),
    st.builds(answered, ON),
    st.just(DriverCallAnswered("init")),
    st.just(KubeletSocketSeen(K1)),
    st.builds(Registered, st.just(GPU), GENERATIONS, st.sampled_from([K1, K2]), st.just(PLUGIN)),
    st.builds(WatchersChanged, st.just(GPU), GENERATIONS, st.integers(0, 2)),
    st.just(Tick()),
]

BAD: list[st.SearchStrategy[Fact]] = [
    st.builds(
        xid,
        st.sampled_from([13, 94, 48, 79, 54, 64, 200]),
        ON,
        gi=st.sampled_from([ALL, 1, 2]),
        ci=st.sampled_from([ALL, 0]),
        source=st.sampled_from([NVML, KMSG]),
        count=st.integers(1, 3),
    ),
    st.builds(failed, ON, st.sampled_from([15, 16, 999])),
    st.builds(overdue, ON),
    st.just(UNLOADED),
    st.just(MISMATCH),
    st.just(DriverCallOverdue("init", 120 * S)),
    st.sampled_from([enumerated(), enumerated(gpu(1, index=0)), enumerated(gpu(0))]),
]

PARTS = (ComponentId(GPU_PROBER, U0), ComponentId(NVML_EVENTS), ComponentId(SYSFS))

OTHER: list[st.SearchStrategy[Fact]] = [
    st.sampled_from([KubeletSocketSeen(None), KubeletSocketSeen(K2)]),
    st.builds(
        RegistrationFailed,
        st.just(GPU),
        GENERATIONS,
        st.sampled_from(["absent", "unreachable", "rejected"]),
        st.just("no"),
    ),
    st.builds(OwnSocketLost, st.just(GPU), GENERATIONS),
    st.builds(CdiReported, st.sampled_from([None, "read-only"])),
    st.builds(TaskReported, st.sampled_from([NVML, DEVICE_PLUGIN]), running=st.booleans()),
    st.just(FactsLost(KMSG, count=3)),
    st.just(HealthEventsUnsupported(U0, "no")),
    st.just(WatchedDirectoryDeleted("/x")),
    st.builds(
        ComponentsStale,
        st.frozensets(st.sampled_from(PARTS)),
        st.dictionaries(st.sampled_from(PARTS), st.integers(0, 10**9), max_size=2),
    ),
    st.builds(XidEventsHeard, st.integers(0, 10**12), st.booleans()),
    st.sampled_from([StateUnread("EIO"), StateLossAcknowledged(), StateRestored(None)]),
    st.builds(PolicyChanged, st.builds(Policy, recovery_quiet_ns=st.sampled_from([0, QUIET]))),
]

FACTS: st.SearchStrategy[Fact] = st.one_of(*GOOD, *GOOD, *BAD, *OTHER)
HEALTH_FACTS: st.SearchStrategy[Fact] = st.one_of(*GOOD[:6], *BAD)

HISTORIES = st.lists(st.tuples(GAPS, FACTS), max_size=25)
HEALTH_HISTORIES = st.lists(st.tuples(GAPS, HEALTH_FACTS), max_size=25)

ONE_OF_EACH: list[Fact] = [
    ready(),
    UNLOADED,
    enumerated(gpu(0), gpu(1)),
    xid(79),
    passed(),
    failed(),
    overdue(),
    answered(),
    DriverCallOverdue("init", S),
    DriverCallAnswered("init"),
    HealthEventsUnsupported(U0, "no"),
    PciConfigRead(gpu(0).pci, answers=True),
    UvmErrorSeen("NV_ERR_INVALID_STATE"),
    UvmProbed(None),
    SwitchErrorSeen("0000:04:00.0", 12028, fatal=True),
    KubeletSocketSeen(K2),
    OwnSocketLost(GPU, 1),
    WatchedDirectoryDeleted("/x"),
    RegisterSent(GPU, 1, K1, PLUGIN),
    Registered(GPU, 1, K1, PLUGIN),
    RegistrationFailed(GPU, 1, "rejected", "no"),
    WatchersChanged(GPU, 1, 0),
    ListWritten(GPU, 1, frozenset()),
    SocketFreed(GPU, 1),
    KubeletCounted({}, 0),
    GpuSampled(U0, GpuSample(recovery_action=1, hw_slowed=True, links_total=18, links_down=(3,))),
    TopologySeen(U0, TopologySample(NvLinks({"0000:11:00.0": 4}))),
    DriverReleased(),
    KernelXidSeen("0000:10:00.0", 79),
    KernelLogRead(7),
    PciGpusSeen(("0000:10:00.0",)),
    DriverModuleSeen(7),
    DeviceNodesSeen(("/dev/nvidia0", "/dev/nvidiactl")),
    GpuRebound("0000:10:00.0", bound=True),
    AllocationsListed({DeviceId(U0): "ns1/job-a"}),
    GpuUseSeen(Usage(at_ns=1)),
    ProbeSeen(ProbeView("loading")),
    DeviceCallsSeen({U0: DeviceCall(ready=True, entered_ns=1, took_ns=1)}),
    GpuMemorySeen(U0, GpuMemory(used_bytes=1, total_bytes=2)),
    PodsSeen({PodUid("1"): PodSeen("ns1", "job-a")}),
    MpsSeen(ready=False, message="no file"),
    HoldRequested(U0, "because"),
    UnholdRequested(U0),
    RecoverRequested(U0),
    ReleaseRequested(frozenset({U0}), 600 * S),
    ResumeRequested(),
    TaskReported(NVML, running=False),
    CdiReported("read-only"),
    FactsLost(DEVICE_PLUGIN, count=2),
    PolicyChanged(Policy(mig_strategy="mixed")),
    FactRejected(U0, "XidReported(79): KeyError()"),
    ComponentsStale(frozenset({ComponentId(GPU_PROBER, U0), ComponentId(NVML_NODE)})),
    XidEventsHeard(S, is_heard=False),
    StateUnread("Input/output error"),
    StateRestored(Durable(gpus=(gpu(2),), holds=((uuid(2), "fan"),), lost="is damaged")),
    StateLossAcknowledged(),
    Tick(),
]
