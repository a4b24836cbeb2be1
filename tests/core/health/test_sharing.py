"""How devices are shared: which share is whose, under which name, and what cannot be shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.health.inventory import Unadvertised, advertised_devices, unadvertised_devices
from agent.model.effects import EventKind
from agent.model.facts import KubeletSocketSeen, MpsSeen, PolicyChanged
from agent.model.gpu import Gpu
from agent.model.health import Health, Reason
from agent.model.ids import ResourceName
from agent.model.policy import MigStrategy, Policy
from agent.model.sharing import Share, Sharing
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    GPU,
    K1,
    U0,
    U1,
    Node,
    enumerated,
    fields_of,
    gpu,
    healthy_node,
    mig_gpu,
    mig_uuid,
    passed,
    registered_node,
    xid,
)

SHARED = ResourceName("nvidia.com/gpu.shared")
SMALL = ResourceName("nvidia.com/mig-1g.10gb")

V100_16 = replace(gpu(0), name="Tesla V100-PCIE-16GB", compute_capability=(7, 0))
V100_32 = replace(gpu(1), name="Tesla V100-PCIE-32GB", compute_capability=(7, 0))


def sharing(*shares: Share, rename_by_default: bool = False) -> Policy:
    return Policy(mig_strategy="mixed", sharing=Sharing(shares=shares, rename_by_default=rename_by_default))


def mps(*shares: Share, mig_strategy: MigStrategy = "none") -> Policy:
    return Policy(mig_strategy=mig_strategy, sharing=Sharing("mps", shares))


def counts(*gpus: Gpu, policy: Policy) -> dict[str, dict[str, int]]:
    """How many devices of which GPU or MIG device, by resource."""
    found: dict[str, dict[str, int]] = {}
    for name, listed in advertised_devices(gpus, policy, {}).items():
        of_name = found.setdefault(name, {})
        for device in listed:
            of_name[device.uuid] = of_name.get(device.uuid, 0) + 1
    return found


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("Tesla V100-PCIE-16GB", True),
        ("Tesla*", True),
        ("*16GB", True),
        ("*V100*", True),
        ("*", True),
        ("*-*-*", True),
        ("V100", False),
        ("tesla*", False),
        ("*32GB", False),
        ("Tesla V100.PCIE.16GB", False),
        ("", False),
        ("*" * 60, True),
        ("*" * 60 + "X", False),
        ("Tesla V100-PCIE-16GB*Tesla V100-PCIE-16GB", False),
        ("*V100*V100*", False),
        ("*6GB*6GB", False),
    ],
)
def test_a_share_can_be_for_models_by_a_pattern_of_the_whole_name(pattern: str, *, fits: bool) -> None:
    found = counts(V100_16, policy=sharing(Share(GPU, 4, models=(pattern,))))
    assert found == {GPU: {U0: 4 if fits else 1}}
    assert advertised_devices([V100_16], sharing(Share(GPU, 4, models=(pattern,))), {})[GPU][0].replica == (
        0 if fits else None
    )


def test_unlike_cards_of_one_node_have_as_many_replicas_as_their_model_asks_for() -> None:
    policy = sharing(Share(GPU, 2, models=("*16GB",)), Share(GPU, 4, models=("*32GB",)))
    assert counts(V100_16, V100_32, policy=policy) == {GPU: {U0: 2, U1: 4}}


def test_the_first_share_that_fits_counts() -> None:
    policy = sharing(Share(GPU, 3, gpus=(U1,)), Share(GPU, 2))
    assert counts(V100_16, V100_32, policy=policy) == {GPU: {U0: 2, U1: 3}}


def test_a_share_by_index_is_also_that_of_the_cards_slices() -> None:
    policy = sharing(Share(SMALL, 2, gpus=("1",)))
    slices = [mig_gpu(number, (1, 0, "1g.10gb")) for number in range(2)]
    assert counts(*slices, policy=policy) == {SMALL: {mig_uuid(0): 1, mig_uuid(10): 2}}
    assert [device.index for device in advertised_devices(slices, policy, {})[SMALL]] == [0, 1, 1]


def test_a_share_by_index_stays_with_its_card_when_another_one_is_lost() -> None:
    policy = sharing(Share(GPU, 3, gpus=("2",)))
    node = healthy_node(gpu(0), gpu(1), gpu(2), policy=policy)
    before = [str(device.id) for device in node.devices()]
    assert [name.partition("::")[0] for name in before] == [U0, U1, *[gpu(2).uuid] * 3]
    node.apply(enumerated(gpu(0), gpu(2, index=1)))
    assert [str(device.id) for device in node.devices()] == before


def test_renamed_shares_leave_what_is_not_shared_under_its_own_name() -> None:
    policy = sharing(Share(GPU, 2, gpus=(U0,)), Share(SMALL, 2), rename_by_default=True)
    found = counts(V100_16, V100_32, mig_gpu(2, (1, 0, "1g.10gb"), (2, 0, "2g.20gb")), policy=policy)
    assert found == {
        SHARED: {U0: 2},
        GPU: {U1: 1},
        f"{SMALL}.shared": {mig_uuid(20): 2},
        "nvidia.com/mig-2g.20gb": {mig_uuid(21): 1},
    }


def test_a_resource_publishes_how_it_is_shared() -> None:
    node = healthy_node(C1B, gpu(1), policy=sharing(Share(GPU, 2)))
    assert {each.name: each.sharing for each in node.snapshot().resources} == {
        SMALL: None,
        GPU: "time-slicing",
    }
    node.apply(PolicyChanged(mps(Share(GPU, 2), mig_strategy="mixed")))
    assert {each.name: each.sharing for each in node.snapshot().resources} == {SMALL: None, GPU: "mps"}


# Renaming while running


def test_renamed_resources_are_registered_and_the_old_ones_emptied() -> None:
    node = registered_node(gpu(0), policy=sharing(Share(GPU, 2)))
    node.apply(xid(48))
    node.apply(PolicyChanged(sharing(Share(GPU, 2), rename_by_default=True)))
    assert node.devices(GPU) == ()
    assert node.standing(GPU).registered
    assert node.registrations(SHARED) == [node.now_ns]
    assert node.health(SHARED) == {f"{U0}::0": Health.UNHEALTHY, f"{U0}::1": Health.UNHEALTHY}
    node.accept(SHARED)
    node.apply(PolicyChanged(sharing(Share(GPU, 2))))
    assert node.devices(SHARED) == ()
    assert len(node.devices(GPU)) == 2
    assert node.registrations(GPU) == []


def test_what_was_renamed_away_is_not_registered_by_the_next_process() -> None:
    node = registered_node(gpu(0), policy=sharing(Share(GPU, 2)))
    node.apply(PolicyChanged(sharing(Share(GPU, 2), rename_by_default=True)))
    again = node.restarted()
    again.apply(enumerated(gpu(0)), passed(), KubeletSocketSeen(K1))
    assert list(again.state.advertised) == [SHARED]
    assert list(again.state.registrations) == [SHARED]


# MPS


@pytest.mark.parametrize(
    ("capability", "most"), [((7, 5), 48), ((9, 0), 48), ((7, 4), 16), ((7, 0), 16), (None, 16)]
)
def test_mps_serves_few_clients_on_old_cards(capability: tuple[int, int] | None, most: int) -> None:
    card = replace(V100_16, compute_capability=capability)
    assert counts(card, policy=mps(Share(GPU, most))) == {GPU: {U0: most}}
    assert unadvertised_devices([card], mps(Share(GPU, most))) == ()
    assert counts(card, policy=mps(Share(GPU, most + 1))) == {GPU: {}}
    assert counts(card, policy=sharing(Share(GPU, most + 1))) == {GPU: {U0: most + 1}}


def test_a_card_over_its_limit_is_named_and_the_others_are_advertised() -> None:
    new = replace(gpu(1), name="NVIDIA A30", compute_capability=(8, 0))
    node = registered_node(V100_16, new, policy=mps(Share(GPU, 20)))
    assert {device.uuid for device in node.devices()} == {U1}
    (finding,) = [each for each in node.snapshot().findings if each.reason is Reason.MPS_REPLICAS_OVER_LIMIT]
    assert finding.gpus == (U0,)
    assert finding.message == "20 replicas of Tesla V100-PCIE-16GB, MPS serves 16"


def test_the_kubelet_gets_an_empty_list_where_every_card_is_over_its_limit() -> None:
    node = registered_node(V100_16, policy=mps(Share(GPU, 20)))
    assert node.devices() == ()
    assert node.standing().registered


def test_mig_devices_are_advertised_unshared_under_mps_and_that_is_reported_once() -> None:
    policy = mps(Share(GPU, 4), Share(SMALL, 2), mig_strategy="mixed")
    node = Node(policy)
    node.apply(enumerated(C1B, gpu(1)), enumerated(C1B, gpu(1, index=0)))
    assert {device.replica for device in node.devices(SMALL)} == {None}
    reported = [event for event in node.events(EventKind.GPUS) if event.message == Unadvertised.MIG_UNDER_MPS]
    assert [fields_of(event)["detail"] for event in reported] == ["1g.10gb"]
    node.apply(MpsSeen(ready=False, message="x"), passed())
    assert {device.health for device in node.devices(SMALL)} == {Health.HEALTHY}


def test_with_strategy_single_slices_are_advertised_unshared_under_mps() -> None:
    policy = mps(Share(GPU, 4), mig_strategy="single")
    assert counts(C1B, policy=policy) == {GPU: {mig_uuid(0): 1, mig_uuid(1): 1, mig_uuid(2): 1}}
    assert {each.why for each in unadvertised_devices([C1B], policy)} == {Unadvertised.MIG_UNDER_MPS}


# What no resource has


def test_a_slice_smaller_than_its_instance_has_no_resource_and_that_is_reported_once() -> None:
    node = Node(Policy(mig_strategy="mixed"))
    part = mig_gpu(0, (1, 0, "1c.2g.20gb"), (1, 1, "1c.2g.20gb"), (2, 0, "2g.20gb"))
    node.apply(enumerated(part), enumerated(part), enumerated(part, gpu(1)))
    assert set(node.state.advertised) == {"nvidia.com/mig-2g.20gb", GPU}
    reported = [event for event in node.events(EventKind.GPUS) if event.message == Unadvertised.PROFILE]
    assert [(fields_of(event)["gpu"], fields_of(event)["detail"]) for event in reported] == [
        (0, "1c.2g.20gb")
    ]
    assert all(event.warning for event in reported)
    assert Reason.MIG_SINGLE_NOT_UNIFORM not in {each.reason for each in node.snapshot().findings}


def test_with_strategy_single_such_slices_are_gpus() -> None:
    part = mig_gpu(0, (1, 0, "1c.2g.20gb"), (1, 1, "1c.2g.20gb"))
    assert counts(part, policy=Policy(mig_strategy="single")) == {GPU: {mig_uuid(0): 1, mig_uuid(1): 1}}


def test_a_gpu_in_mig_mode_without_slices_is_a_warning_that_ends_with_them() -> None:
    node = Node(Policy(mig_strategy="mixed"))
    for _ in range(2):
        node.apply(enumerated(C1B, mig_gpu(1)), enumerated(C1B, mig_gpu(1, (1, 0, "1g.10gb"))))
    reported = [event for event in node.events(EventKind.GPUS) if event.message == Unadvertised.NO_MIG_DEVICE]
    assert [fields_of(event) for event in reported] == [{"gpu": 1, "uuid": U1, "pci": gpu(1).pci}] * 2
    assert len(node.devices(SMALL)) == 4
    assert unadvertised_devices([mig_gpu(1)], Policy(mig_strategy="single")) == ()
    assert unadvertised_devices([mig_gpu(1)], Policy()) == ()


# What holds for any shares


NAMES = st.sampled_from(["NVIDIA A30", "Tesla T4", "Tesla V100-PCIE-16GB"])
SHARES = st.builds(
    Share,
    st.sampled_from([GPU, SMALL]),
    st.integers(2, 50),
    models=st.sampled_from([(), ("Tesla*",), ("*",), ("none",)]),
    gpus=st.sampled_from([(), ("0",), ("1", "2"), (U1,)]),
)
POLICIES = st.builds(
    Policy,
    mig_strategy=st.sampled_from(["none", "single", "mixed"]),
    sharing=st.builds(
        Sharing,
        st.sampled_from(["time-slicing", "mps"]),
        st.lists(SHARES, max_size=3).map(tuple),
        rename_by_default=st.booleans(),
    ),
)
CARDS = st.builds(
    lambda number, name, slices: replace(
        mig_gpu(number, *slices) if slices is not None else gpu(number), name=name
    ),
    st.integers(0, 3),
    NAMES,
    st.sampled_from(
        [None, None, (), ((1, 0, "1g.10gb"), (2, 0, "1g.10gb")), ((1, 0, "3g.40gb"), (2, 0, "1c.2g.20gb"))]
    ),
)


@given(st.lists(CARDS, max_size=4, unique_by=lambda card: card.uuid), POLICIES)
def test_no_device_is_advertised_twice_and_every_one_exists(cards: list[Gpu], policy: Policy) -> None:
    advertised = advertised_devices(cards, policy, {})
    ids = [device.id for listed in advertised.values() for device in listed]
    assert len(ids) == len(set(ids))
    there = {card.uuid: card for card in cards}
    for listed in advertised.values():
        for device in listed:
            card = there[device.placement.gpu]
            parts = {mig.uuid for mig in card.mig_devices}
            is_slice = device.uuid in parts
            assert is_slice == (policy.mig_strategy != "none" and card.mig_enabled)
            assert device.uuid in parts | {card.uuid}
            assert is_slice == (device.mig_index is not None)
            assert not (is_slice and policy.sharing.strategy == "mps" and device.replica is not None)


@given(st.lists(CARDS, max_size=4, unique_by=lambda card: card.uuid), POLICIES)
def test_what_did_not_change_is_the_same_object(cards: list[Gpu], policy: Policy) -> None:
    before = advertised_devices(cards, policy, {})
    again = advertised_devices(cards, policy, before)
    assert all(again[name] is listed for name, listed in before.items())
    assert list(again) == list(before)
