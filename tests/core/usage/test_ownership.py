"""The allocation of each GPU or MIG device, its holders, and the users of its memory."""

import pytest

from agent.core.usage.ownership import (
    Holder,
    Ownership,
    allocated_by_place,
    is_allocated,
    is_in_use,
    is_killable,
    is_service,
    name_of,
    owners,
    places_of,
    unclaimed_bytes,
)
from agent.model.facts import GpuUseSeen
from agent.model.ids import DeviceId, Placement
from agent.model.policy import LeakPolicy
from agent.model.structs import replace
from agent.model.usage import GpuMemory, PodRef, Pods, PodSeen, ProcessUse
from tests.core.build import C1B, DEFAULT, U0, U1, Node, S, gpu, healthy_node, mig_uuid
from tests.core.use import (
    BOTH,
    MIB,
    POD_A,
    POD_B,
    allocated,
    hold,
    memory,
    node,
    pods,
    process,
    process_status,
    seen,
    user,
)

M1, M2, M3 = Placement(U0, 1, 0), Placement(U0, 2, 0), Placement(U0, 3, 0)


def owned(on: Node) -> list[Ownership]:
    return list(owners(on.snapshot()))


def names(ownership: Ownership) -> list[tuple[int, str, str | None, int | None]]:
    return [(each.pid, each.owner, each.pod, each.used_bytes) for each in ownership.holders or ()]


def test_a_gpu_has_its_pods_its_holders_and_its_used_memory() -> None:
    on = node()
    on.apply(
        allocated((U0, "ns1/job-a")),
        seen(process(7, hold(U0, 2), pod=POD_A), process(8, hold(U0, 1))),
        memory(user(7, 300), user(9, 50), used=400),
    )
    first, second = owned(on)
    assert (first.uuid, first.index, first.allocated_to) == (U0, 0, ((DeviceId(U0), "ns1/job-a"),))
    assert names(first) == [
        (7, "pod", "ns1/job-a", 300 * MIB),
        (8, "host", None, None),
        (9, "unknown", None, 50 * MIB),
    ]
    assert [each.contexts for each in first.holders or ()] == [2, 1, None]
    assert (first.used_bytes, first.unclaimed_bytes) == (400 * MIB, 50 * MIB)
    assert (second.uuid, second.allocated_to, second.holders) == (U1, (), ())
    assert (second.used_bytes, second.process_info) == (None, None)


def test_a_holder_has_every_field() -> None:
    on = node()
    use = process(
        7, hold(U0, 2), pod=POD_A, comm="nv-hostengine", state="D", start=70, since_ns=5, partial=True
    )
    on.apply(seen(replace(use, is_agent=True)), memory(user(7, 300), user(9, 50)))
    known, listed = owned(on)[0].holders or ()
    assert known == Holder(
        pid=7,
        start_ticks=70,
        comm="nv-hostengine",
        owner="pod",
        pod="ns1/job-a",
        state="D",
        contexts=2,
        used_bytes=300 * MIB,
        since_ns=5,
        service=True,
        partial=True,
        is_agent=True,
    )
    assert listed == Holder(
        pid=9,
        start_ticks=None,
        comm="",
        owner="unknown",
        pod=None,
        state="",
        contexts=None,
        used_bytes=50 * MIB,
        since_ns=None,
        service=False,
    )


def test_a_gpu_has_every_field() -> None:
    on = node()
    on.apply(memory(used=400, total=1000, on=U1))
    assert owned(on)[1] == Ownership(
        placement=Placement(U1),
        uuid=U1,
        index=1,
        allocated_to=(),
        holders=None,  # /proc was not scanned, and NVML misses some
        used_bytes=400 * MIB,
        total_bytes=1000 * MIB,
        unclaimed_bytes=400 * MIB,
        process_info="ok",
    )


def test_unknown_figures_are_none_and_not_zero() -> None:
    on = healthy_node(gpu(0))
    (only,) = owned(on)
    assert (only.allocated_to, only.holders) == (None, None)
    on.apply(memory(info="unreliable", used=5))
    assert owned(on)[0].holders is None
    assert owned(on)[0].unclaimed_bytes is None
    on.apply(memory(user(7, None), used=5))
    assert names(owned(on)[0]) == [(7, "unknown", None, None)]
    assert owned(on)[0].unclaimed_bytes is None


def test_stale_readings_are_none() -> None:
    on = node()
    on.apply(seen(process(7)), allocated((U0, "ns1/job-a")))
    on.after(30 * S - 1)
    assert owned(on)[0].allocated_to
    on.after(1)
    assert owned(on)[0].allocated_to is None
    on.after(60 * S - 1)
    assert owned(on)[0].holders
    on.after(1)
    assert owned(on)[0].holders is None


def test_a_pod_of_unknown_name_is_shown_by_its_uid() -> None:
    on = node()
    on.apply(seen(process(7, pod=POD_A)))
    on.after(31 * S)
    assert names(owned(on)[0]) == [(7, "pod", str(POD_A), None)]


def test_a_pod_that_is_gone_keeps_its_name_while_a_process_of_it_is_there() -> None:
    on = node()
    on.apply(seen(process(7, pod=POD_A)))
    on.apply(replace(pods(), pods={POD_B: BOTH[POD_B]}))
    assert names(owned(on)[0]) == [(7, "pod", "ns1/job-a", None)]
    on.apply(seen(), replace(pods(), pods={POD_B: BOTH[POD_B]}))
    assert on.snapshot().pods_seen == {POD_B: BOTH[POD_B]}


def test_a_partitioned_gpu_is_shown_by_mig_device() -> None:
    on = healthy_node(C1B, policy=replace(DEFAULT, mig_strategy="mixed"))
    on.apply(
        allocated((mig_uuid(1), "ns1/job-a")),
        pods(),
        seen(process(7, hold(slices=(M1,)), pod=POD_A), process(8), process(9, hold(slices=(M3,)))),
        memory(user(8, 70, 2, 0), user(9, 5, 3, 0), user(10, 6, 1, 0), used=90),
    )
    reported = owned(on)
    assert [each.uuid for each in reported] == [mig_uuid(0), mig_uuid(1), mig_uuid(2)]
    assert [[holder.pid for holder in each.holders or ()] for each in reported] == [[7, 10], [8], [9]]
    assert [each.allocated_to for each in reported] == [(), ((DeviceId(mig_uuid(1)), "ns1/job-a"),), ()]
    assert [each.placement for each in reported] == [M1, M2, M3]
    assert {(each.used_bytes, each.total_bytes, each.unclaimed_bytes) for each in reported} == {
        (None, None, None)
    }
    assert {each.process_info for each in reported} == {"ok"}


def test_a_holder_of_the_whole_gpu_holds_each_of_its_mig_devices() -> None:
    on = healthy_node(C1B, policy=replace(DEFAULT, mig_strategy="mixed"))
    on.apply(seen(process(7)))
    assert [[holder.pid for holder in each.holders or ()] for each in owned(on)] == [[7], [7], [7]]


@pytest.mark.parametrize(
    ("fact", "pids"),
    [
        (seen(), []),
        (seen(complete=False), None),
        (seen(process(8, is_agent=True), complete=False), None),
        (seen(doubted=[U1]), []),
        (seen(doubted=[U0]), None),
        (seen(process(7), complete=False), [7]),
    ],
)
def test_without_a_visible_holder_a_partly_read_gpu_has_unknown_holders(
    fact: GpuUseSeen, pids: list[int] | None
) -> None:
    on = node()
    on.apply(fact)
    found = owned(on)[0].holders
    assert (None if found is None else [each.pid for each in found]) == pids


def test_services_are_marked() -> None:
    on = node()
    on.apply(seen(process(7, service="nv-hostengine"), process(8, is_agent=True), process(9)))
    assert [each.service for each in owned(on)[0].holders or ()] == [True, True, False]


# The helper functions


OF_OPERATORS = {POD_A: PodSeen("gpu-operator", "dcgm-exporter-x")}
OF_TENANTS = {POD_A: PodSeen("ns1", "dcgm-exporter-x")}
LONG = "nvidia-device-plugin"


@pytest.mark.parametrize(
    ("use", "pods", "expected"),
    [
        (process(7, comm="x", service=LONG), None, True),
        (process(7, comm=LONG[:15], service="x"), None, False),
        (process(7, comm=LONG[:15]), None, False),
        # What root started it as could not be read.
        (process(7, comm=LONG[:15], service=None), None, True),
        (process(7, comm="x", service=None), None, False),
        (process(7, comm=LONG[:15], pod=POD_A), OF_OPERATORS, True),
        (process(7, comm="x", pod=POD_A), OF_OPERATORS, False),
        (process(7, comm=LONG[:15], pod=POD_A), OF_TENANTS, False),
        (process(7, comm=LONG[:15], pod=POD_A), {}, False),
        # Nor could its pod.
        (process(7, comm=LONG[:15], pod=POD_A), None, True),
        (process(7, comm="x", is_agent=True), None, True),
    ],
)
def test_a_service_is_what_root_or_an_administrator_started_by_its_name(
    use: ProcessUse, pods: Pods | None, *, expected: bool
) -> None:
    policy = LeakPolicy()
    assert is_service(use, policy.allowed, policy.namespaces, pods) is expected


def test_a_process_is_on_the_mig_devices_it_is_known_to_use() -> None:
    assert places_of(hold(slices=(M1, M2)), user(7, 1, 3, 0)) == (M1, M2)
    assert places_of(hold(), user(7, 1, 3, 0)) == (M3,)
    assert places_of(hold(), user(7, 1)) == (Placement(U0),)
    assert places_of(hold(), None) == (Placement(U0),)


@pytest.mark.parametrize(
    ("contexts", "partial", "listed", "info", "is_used"),
    [
        (1, False, False, "ok", True),
        (0, False, True, "ok", True),
        (0, False, False, "ok", False),
        (0, False, False, "unsupported", False),
        (0, True, False, "ok", False),
        (0, True, False, "unsupported", None),
        (None, False, False, "ok", False),
        (None, False, False, "unreliable", None),
        (None, False, True, "ok", True),
    ],
)
def test_to_have_a_gpu_open_is_not_to_use_it(
    contexts: int | None, info: str, *, partial: bool, listed: bool, is_used: bool | None
) -> None:
    users = (user(7, 1),) if listed else (user(8, 1),)
    memory_used = GpuMemory(1, 2, users, info)  # type: ignore[arg-type]
    assert is_in_use(process(7, partial=partial), hold(contexts=contexts), memory_used) is is_used
    if not listed and info != "ok":
        assert is_in_use(process(7, partial=partial), hold(contexts=contexts), None) is is_used


def test_unclaimed_memory_belongs_to_no_process_that_nvml_lists() -> None:
    used = memory(user(1, 100), user(2, 50), used=400).memory
    assert unclaimed_bytes(used) == 250 * MIB
    assert unclaimed_bytes(memory(used=400).memory) == 400 * MIB
    assert unclaimed_bytes(memory(user(1, 100), used=50).memory) == 0
    assert unclaimed_bytes(memory(user(1, None), user(2, 50), used=400).memory) is None
    assert unclaimed_bytes(replace(used, used_bytes=None)) is None
    assert unclaimed_bytes(replace(used, process_info="unsupported")) is None


def test_a_device_counts_as_allocated_to_each_pod_that_may_have_it() -> None:
    """Where the kubelet's list does not show which of two pods has a device, both may."""
    places = [(DeviceId("a"), M1), (DeviceId("b"), M2), (DeviceId("c"), Placement(U1))]
    places_of_pods = allocated_by_place(
        places, {DeviceId("a"): "ns/x", DeviceId("b"): "ns/y or ns/z", DeviceId("other"): "ns/x"}
    )
    assert set(places_of_pods) == {M1, M2}
    assert is_allocated(places_of_pods, [M1], "ns/x")
    assert is_allocated(places_of_pods, [Placement(U0)], "ns/x")
    assert not is_allocated(places_of_pods, [M2], "ns/x")
    assert is_allocated(places_of_pods, [M2, M3], "ns/y")
    assert is_allocated(places_of_pods, [M2], "ns/z")
    assert not is_allocated(places_of_pods, [M2], "ns/y or ns/z")
    assert not is_allocated(places_of_pods, [Placement(U1)], "ns/x")
    assert not is_allocated(places_of_pods, [], "ns/x")


def test_two_shares_of_one_place_are_both_allocated() -> None:
    places = [(DeviceId("a::0"), M1), (DeviceId("a::1"), M1)]
    places_of_pods = allocated_by_place(places, {DeviceId("a::0"): "ns/x", DeviceId("a::1"): "ns/y"})
    assert is_allocated(places_of_pods, [M1], "ns/x")
    assert is_allocated(places_of_pods, [M1], "ns/y")


def test_a_pod_is_shown_by_its_known_name() -> None:
    ref = PodRef(POD_A, None, None)
    assert name_of(ref, BOTH) == "ns1/job-a"
    assert name_of(ref, {}) == POD_A
    assert name_of(ref, None) == POD_A


def test_a_process_that_sleeps_in_the_driver_or_is_gone_is_not_killable() -> None:
    assert [state for state in "RSDZXTI" if not is_killable(process_status(7, state=state))] == [
        "D",
        "Z",
        "X",
    ]
