"""Which devices are advertised under which name, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from agent.core.health.inventory import advertised_devices, mig_resource, mixed_profiles
from agent.model.effects import RegisterResource
from agent.model.facts import KubeletSocketSeen, PolicyChanged
from agent.model.gpu import Gpu
from agent.model.health import Health, Reason
from agent.model.ids import ALL, Placement, ResourceName
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    GPU,
    K1,
    U0,
    U1,
    Node,
    S,
    enumerated,
    gpu,
    healthy_node,
    mig_gpu,
    mig_uuid,
    passed,
    ready,
    registered_node,
    xid,
)

SMALL = ResourceName("nvidia.com/mig-1g.10gb")
MEDIA = ResourceName("nvidia.com/mig-1g.10gb.me")
LARGE = ResourceName("nvidia.com/mig-3g.40gb")

PLAIN = gpu(1)
SINGLE = Policy(mig_strategy="single")
MIXED = Policy(mig_strategy="mixed")


def ids(*gpus: Gpu, policy: Policy) -> dict[str, list[str]]:
    return {
        name: [str(device.id) for device in listed]
        for name, listed in advertised_devices(gpus, policy, {}).items()
    }


def test_without_a_mig_strategy_every_gpu_is_one_device() -> None:
    assert ids(C1B, PLAIN, policy=Policy()) == {GPU: [U0, U1]}
    assert advertised_devices([C1B], Policy(), {})[GPU][0].placement == Placement(U0, ALL, ALL)


def test_strategy_mixed_advertises_each_profile_under_its_own_name() -> None:
    sliced = mig_gpu(0, (1, 0, "1g.10gb"), (2, 0, "3g.40gb"), (3, 0, "1g.10gb+me"))
    assert ids(sliced, PLAIN, policy=MIXED) == {
        SMALL: [mig_uuid(0)],
        LARGE: [mig_uuid(1)],
        MEDIA: [mig_uuid(2)],
        GPU: [U1],
    }


def test_strategy_mixed_advertises_nothing_of_a_gpu_without_mig_devices() -> None:
    assert ids(mig_gpu(0), PLAIN, policy=MIXED) == {GPU: [U1]}


def test_strategy_single_advertises_equal_slices_as_gpus() -> None:
    assert ids(C1B, policy=SINGLE) == {GPU: [mig_uuid(0), mig_uuid(1), mig_uuid(2)]}
    assert [device.placement.gi for device in advertised_devices([C1B], SINGLE, {})[GPU]] == [1, 2, 3]


def test_strategy_single_advertises_whole_gpus_where_none_is_in_mig_mode() -> None:
    assert ids(gpu(0), gpu(1), policy=SINGLE) == {GPU: [U0, U1]}


@pytest.mark.parametrize(
    ("gpus", "unlike"),
    [
        ([C1B, PLAIN], ("1g.10gb", "none")),
        ([C1B, mig_gpu(1)], ("1g.10gb", "none")),
        ([mig_gpu(0)], ("none",)),
        ([mig_gpu(0), PLAIN], ("none",)),
        ([mig_gpu(0, (1, 0, "3g.40gb"), (2, 0, "1g.10gb"))], ("1g.10gb", "3g.40gb")),
    ],
)
def test_strategy_single_advertises_nothing_where_the_devices_are_unlike(
    gpus: list[Gpu], unlike: tuple[str, ...]
) -> None:
    assert mixed_profiles(gpus, SINGLE) == unlike
    assert advertised_devices(gpus, SINGLE, {}) == {GPU: ()}
    assert advertised_devices(gpus, SINGLE, advertised_devices([PLAIN], SINGLE, {})) == {GPU: ()}
    node = healthy_node(*gpus, policy=SINGLE)
    findings = {finding.reason: finding.message for finding in node.snapshot().findings}
    assert findings[Reason.MIG_SINGLE_NOT_UNIFORM] == (
        f"Strategy single needs one profile, found [{', '.join(unlike)}]"
    )


@pytest.mark.parametrize("policy", [Policy(), MIXED])
def test_other_strategies_know_no_unlike_devices(policy: Policy) -> None:
    assert mixed_profiles([C1B, PLAIN], policy) == ()


def test_a_mig_resource_is_named_after_its_profile() -> None:
    assert mig_resource("1g.10gb+me", MIXED) == MEDIA
    assert mig_resource("1g.10gb+me", SINGLE) == GPU


def test_shares_are_numbered_from_zero_and_stay_where_their_device_is() -> None:
    policy = Policy(mig_strategy="mixed", sharing=Sharing.of({SMALL: 2, GPU: 3}))
    listed = advertised_devices([C1B, replace(PLAIN, numa_node=1)], policy, {})
    assert [str(device.id) for device in listed[SMALL]] == [
        f"{mig_uuid(number)}::{replica}" for number in range(3) for replica in range(2)
    ]
    assert [(device.uuid, device.replica, device.placement.gi) for device in listed[SMALL]][:2] == [
        (mig_uuid(0), 0, 1),
        (mig_uuid(0), 1, 1),
    ]
    assert [(str(device.id), device.numa_node) for device in listed[GPU]] == [
        (f"{U1}::{n}", 1) for n in range(3)
    ]


def test_a_device_is_an_advertised_device_with_its_health() -> None:
    policy = Policy(mig_strategy="mixed", sharing=Sharing.of({SMALL: 2}))
    node = healthy_node(replace(C1B, numa_node=1), policy=policy)
    for advertised, device in zip(node.state.advertised[SMALL], node.devices(SMALL), strict=True):
        assert asdict(advertised).items() <= asdict(device).items()
        assert (device.health, device.reasons) == (Health.HEALTHY, ())


@given(st.permutations([gpu(number, index=7 - number) for number in range(8)]))
def test_the_order_is_that_of_the_pci_addresses_whatever_nvml_reports(gpus: list[Gpu]) -> None:
    assert ids(*gpus, policy=Policy()) == {GPU: [gpu(number).uuid for number in range(8)]}


def test_gpus_at_one_address_are_in_the_order_of_their_indexes() -> None:
    one, two = gpu(0, index=1), replace(gpu(1, index=0), pci=gpu(0).pci)
    assert ids(one, two, policy=Policy()) == {GPU: [U1, U0]}
    node = healthy_node(one, two)
    assert [view.gpu.uuid for view in node.snapshot().gpus] == [U1, U0]


def test_mig_devices_are_in_the_order_of_their_instances() -> None:
    sliced = mig_gpu(0, (2, 1, "1g.10gb"), (2, 0, "1g.10gb"), (1, 0, "1g.10gb"))
    assert [
        (device.placement.gi, device.placement.ci) for device in advertised_devices([sliced], SINGLE, {})[GPU]
    ] == [
        (1, 0),
        (2, 0),
        (2, 1),
    ]


# Changes while running


def test_a_resource_that_was_advertised_once_stays_with_an_empty_list() -> None:
    node = registered_node(C1B, policy=MIXED)
    assert list(node.state.registrations) == [SMALL]
    node.apply(enumerated(mig_gpu(0, (1, 0, "3g.40gb"))), passed())
    assert node.devices(SMALL) == ()
    assert node.standing(SMALL).registered
    assert [effect.resource for _, effect in node.effects if isinstance(effect, RegisterResource)] == [LARGE]
    assert node.health(LARGE) == {mig_uuid(0): Health.HEALTHY}


def test_an_empty_resource_of_an_earlier_policy_is_not_registered() -> None:
    node = healthy_node(C1B, policy=SINGLE)
    node.apply(PolicyChanged(MIXED), KubeletSocketSeen(K1))
    assert node.devices(GPU) == ()
    assert node.devices(SMALL) != ()
    assert node.registrations(SMALL) == [node.now_ns]


def test_what_replaced_the_devices_of_an_earlier_process_is_registered() -> None:
    node = healthy_node(C1B, policy=MIXED).restarted(after_ns=S)
    node.apply(enumerated(mig_gpu(0, (1, 0, "3g.40gb"))), passed(), KubeletSocketSeen(K1))
    assert list(node.state.advertised) == [SMALL, LARGE]
    assert list(node.state.registrations) == [LARGE]
    assert node.registrations(LARGE) == [node.now_ns]


def test_a_resource_waits_since_it_was_first_advertised() -> None:
    node = Node()
    node.after(S, enumerated(gpu(0)))
    advertised_ns = node.now_ns
    node.after(10 * S)
    assert node.snapshot().resources[0].since_ns == advertised_ns


def test_another_policy_changes_what_is_advertised_and_an_equal_one_nothing() -> None:
    node = healthy_node(gpu(0))
    before = node.state
    assert node.apply(PolicyChanged(replace(before.policy))) == ()
    assert node.state is before
    node.apply(PolicyChanged(Policy(sharing=Sharing.of({GPU: 2}))))
    assert node.health() == {f"{U0}::0": Health.HEALTHY, f"{U0}::1": Health.HEALTHY}


def test_capacity_does_not_fall_because_of_health() -> None:
    node = healthy_node(*[gpu(number) for number in range(8)])
    for number in range(8):
        node.apply(xid(79, gpu(number).uuid))
    node.apply(enumerated())
    (resource,) = node.snapshot().resources
    assert (resource.capacity, resource.allocatable) == (8, 0)


def test_what_was_advertised_is_advertised_again_before_the_driver_answers() -> None:
    policy = Policy(sharing=Sharing.of({GPU: 2}))
    node = healthy_node(gpu(0), gpu(1), policy=policy)
    again = node.restarted(after_ns=S)
    assert [device.id for device in again.devices()] == [device.id for device in node.devices()]
    assert set(again.health().values()) == {Health.UNKNOWN}
    again.apply(KubeletSocketSeen(K1))
    assert again.registrations() == []
    began_ns = again.now_ns
    again.until(began_ns + S)
    assert again.registrations() == [began_ns + policy.first_probe_wait_ns]


def test_a_node_without_a_past_begins_with_nothing() -> None:
    node = Node()
    assert node.state.advertised == {}
    assert node.state.devices == {}
    assert node.state.first_probes_by_ns is None
    assert node.snapshot().at_ns == node.now_ns
    node.apply(ready())
    assert healthy_node().restarted().state.first_probes_by_ns is None
