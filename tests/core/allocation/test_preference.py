"""Which devices are preferred among those that are free."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.allocation.injection import ContainerAnswer
from agent.core.allocation.preference import prefer
from agent.core.allocation.requests import Rejection, allocate
from agent.model.facts import GpusEnumerated, TopologySeen
from agent.model.gpu import Gpu
from agent.model.ids import ResourceName
from agent.model.policy import Policy, SharedAllocationPolicy
from agent.model.sharing import Sharing
from agent.model.snapshot import Resource
from agent.model.structs import replace
from agent.model.topology import NvLinks, PcieDistance, TopologySample
from tests.core.build import (
    GPU,
    U0,
    U1,
    U2,
    U3,
    U4,
    U5,
    U6,
    U7,
    Node,
    failed,
    gpu,
    healthy_node,
    mig_gpu,
    mig_uuid,
    uuid,
    xid,
)

FOUR = [U0, U1, U2, U3]
EIGHT = [*FOUR, U4, U5, U6, U7]


def resource_of(node: Node, name: ResourceName = GPU) -> Resource:
    return next(item for item in node.snapshot().resources if item.name == name)


def answer(
    node: Node, available: Sequence[str], size: int, must: Sequence[str] = (), name: ResourceName = GPU
) -> tuple[str, ...] | Rejection:
    return prefer(node.snapshot(), resource_of(node, name), available, must, size)


def preferred(
    node: Node, available: Sequence[str], size: int, must: Sequence[str] = (), name: ResourceName = GPU
) -> list[str]:
    chosen = answer(node, available, size, must, name)
    assert not isinstance(chosen, Rejection), chosen
    return [str(device) for device in chosen]


def rejected(node: Node, available: Sequence[str], must: Sequence[str], size: int) -> Rejection:
    chosen = answer(node, available, size, must)
    assert isinstance(chosen, Rejection)
    return chosen


# Whole GPUs, connected in a known way


def pcie_between(one: int, other: int) -> PcieDistance:
    """As in a machine of two sockets, where two GPUs share a switch and four a host bridge."""
    if one // 2 == other // 2:
        return PcieDistance.SINGLE_SWITCH
    return PcieDistance.HOST_BRIDGE if one // 4 == other // 4 else PcieDistance.CROSS_NODE


def connected(count: int, nvlinks: Mapping[tuple[int, int], int] | None = None, switched: int = 0) -> Node:
    """A node with so many healthy, sampled GPUs."""
    gpus = [gpu(number) for number in range(count)]
    node = healthy_node(*gpus)
    node.apply(*(TopologySeen(one.uuid, sample(one, gpus, nvlinks or {}, switched)) for one in gpus))
    return node


def sample(
    one: Gpu, gpus: Sequence[Gpu], nvlinks: Mapping[tuple[int, int], int], switched: int
) -> TopologySample:
    pairs = {tuple(sorted(pair)): links for pair, links in nvlinks.items()}
    others = [other for other in gpus if other is not one]
    links = {other.pci: pairs.get(tuple(sorted((one.index, other.index))), 0) for other in others}
    return TopologySample(
        nvlinks=NvLinks({pci: number for pci, number in links.items() if number}, switched),
        distances={other.pci: pcie_between(one.index, other.index) for other in others},
    )


PAIRS = {(0, 2): 4, (1, 3): 4, (4, 6): 4, (5, 7): 4}


PAIRED, BY_PCIE, SWITCHED = connected(8, PAIRS), connected(8), connected(8, switched=18)
CHAIN = connected(4, {(0, 1): 3, (1, 2): 4, (2, 3): 3})
"""Most links in the middle: taking 1 and 2 would leave 0 and 3 with none."""


@pytest.mark.parametrize(
    ("node", "available", "must", "chosen"),
    [
        pytest.param(PAIRED, EIGHT, [], [U0, U2], id="two are a pair with NVLinks"),
        pytest.param(PAIRED, [U0, U1, U5, U7], [], [U5, U7], id="two are the only pair"),
        pytest.param(BY_PCIE, [U0, U2, U4, U6, U7], [], [U6, U7], id="without NVLinks two are on one switch"),
        pytest.param(PAIRED, EIGHT, [], FOUR, id="four are two pairs near each other"),
        pytest.param(PAIRED, EIGHT[:1] + EIGHT[2:], [], EIGHT[4:], id="four are the two whole pairs"),
        pytest.param(PAIRED, [U0, U2, U3, U4, U6], [], [U3], id="one has a partner in use"),
        pytest.param(
            PAIRED,
            [*FOUR, U4, U6, U7],
            [],
            [U4, U6, U7],
            id="three are a pair and one whose partner is in use",
        ),
        pytest.param(CHAIN, FOUR, [], [U0, U1], id="a pair is not broken for what would score higher now"),
        pytest.param(PAIRED, EIGHT, [U7], [U7, U5], id="what must be included brings its partner"),
        pytest.param(PAIRED, EIGHT, [U6, U0], [U6, U0, U2, U4], id="both that must be included do so"),
        pytest.param(
            SWITCHED, [U0, U2, U3, U6], [], [U2, U3], id="behind NVSwitches the PCIe switch decides"
        ),
        pytest.param(SWITCHED, EIGHT[1:], [], EIGHT[4:], id="behind NVSwitches the host bridge decides"),
    ],
)
def test_connected_gpus_are_given_together(
    node: Node, available: list[str], must: list[str], chosen: list[str]
) -> None:
    assert preferred(node, available, len(chosen), must) == chosen


def test_among_equally_connected_gpus_those_on_one_numa_node_are_preferred() -> None:
    gpus = [gpu(number, numa=number % 2) for number in range(4)]
    node = healthy_node(*gpus)
    node.apply(*(TopologySeen(one.uuid, TopologySample(NvLinks(to_switches=12))) for one in gpus))
    assert preferred(node, FOUR, 2) == [U0, U2]


def test_a_newly_read_numa_node_decides_among_equally_connected_gpus() -> None:
    node = connected(8)
    assert preferred(node, [U0, U2, U4, U6], 2) == [U0, U2]
    nodes = {0: 0, 2: 1, 4: 2, 6: 2}
    node.apply(GpusEnumerated(tuple(gpu(number, numa=nodes.get(number)) for number in range(8))))
    assert preferred(node, [U0, U2, U4, U6], 2) == [U4, U6]


def test_a_gpu_with_unknown_links_takes_part_by_what_is_known() -> None:
    node = connected(4, {(0, 1): 2, (2, 3): 2})
    node.apply(TopologySeen(U0, TopologySample()))
    assert preferred(node, FOUR, 2) == [U2, U3]
    assert preferred(node, [U0, U1], 2) == [U0, U1]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_lost_gpu_does_not_block_the_others(size: int) -> None:
    """Case G1."""
    node = connected(8, PAIRS)
    node.apply(xid(79, U3), failed(U3, 15), TopologySeen(U3, TopologySample()))
    chosen = preferred(node, [item for item in EIGHT if item != U3], size)
    assert len(chosen) == size
    assert isinstance(allocate(node.snapshot(), resource_of(node), chosen), ContainerAnswer)


def test_an_unhealthy_gpu_is_preferred_only_where_it_has_to_be() -> None:
    node = connected(4, {(0, 1): 4})
    node.apply(failed(U1, 15))
    assert preferred(node, FOUR, 2) == [U2, U3]
    assert preferred(node, FOUR, 3) == [U0, U2, U3]
    assert preferred(node, FOUR, 4) == FOUR
    assert preferred(node, FOUR, 2, must=[U1]) == [U1, U0]


@given(st.permutations(EIGHT), st.integers(1, 8))
def test_the_choice_does_not_depend_on_the_order_of_the_request(order: list[str], size: int) -> None:
    assert preferred(PAIRED, order, size) == preferred(PAIRED, EIGHT, size)


# Whole GPUs, while their connections are not known


def test_devices_of_one_numa_node_are_preferred() -> None:
    node = healthy_node(*[gpu(number, numa=number % 2) for number in range(6)])
    everything = [gpu(number).uuid for number in range(6)]
    assert preferred(node, everything, 3) == [U0, U2, U4]
    assert preferred(node, everything, 2, must=[U1]) == [U1, U3]


def test_the_first_device_is_from_the_node_with_most_neighbours_left() -> None:
    node = healthy_node(gpu(0, numa=0), gpu(1, numa=1), gpu(2, numa=1), gpu(3, numa=1))
    assert preferred(node, FOUR, 2) == [U1, U2]
    assert preferred(node, FOUR, 1) == [U1]


def test_with_unknown_connections_the_stable_order_decides() -> None:
    node = healthy_node(*[gpu(number) for number in range(4)])
    assert preferred(node, [U2, U0, U3, U1], 2) == [U0, U1]


# Shares


def shares(
    count: int, *gpus: Gpu, policy: SharedAllocationPolicy = "distributed", distinct: bool = False
) -> Node:
    sharing = replace(Sharing.of({GPU: count}), distinct_cards=distinct)
    return healthy_node(*gpus, policy=Policy(sharing=sharing, shared_allocation=policy))


def share(on: str, replica: int) -> str:
    return f"{on}::{replica}"


def cards(chosen: Sequence[str], *on: str) -> list[int]:
    return [sum(device.startswith(card) for device in chosen) for card in on]


ALL_FREE = [(0, n) for n in range(4)] + [(1, n) for n in range(4)]
FIRST_FREE = ALL_FREE[:4]
THREE_FREE = [*FIRST_FREE, (1, 3), (2, 2), (2, 3)]


@pytest.mark.parametrize(
    ("policy", "free", "expected"),
    [
        ("distributed", ALL_FREE, [1, 1]),
        ("distributed", [(0, 2), (0, 3), (1, 3)], [1, 1]),
        ("distributed", [(0, 2), (0, 3)], [2, 0]),
        ("distributed", ALL_FREE, [2, 2]),
        ("distributed", [*FIRST_FREE, (1, 0)], [3, 1]),
        ("distributed", [*FIRST_FREE, (1, 0)], [2, 0]),
        ("packed", ALL_FREE, [2, 0]),
        ("packed", [(0, 2), (0, 3), (1, 3)], [0, 1]),
        ("packed", [(0, 2), (0, 3), (1, 3)], [1, 1]),
        ("packed", [*FIRST_FREE, (1, 0), (1, 1)], [1, 2]),
        ("spread", THREE_FREE, [1, 0, 1]),
        ("spread", THREE_FREE, [2, 1, 1]),
    ],
)
def test_shares_are_of_the_cards_that_the_policy_asks_for(
    policy: SharedAllocationPolicy, free: list[tuple[int, int]], expected: list[int]
) -> None:
    """Case F1; distributed: fewest in use, packed: most in use, spread: as many cards as there are."""
    gpus = [gpu(number) for number in range(len(expected))]
    node = shares(4, *gpus, policy=policy)
    chosen = preferred(node, [share(uuid(card), replica) for card, replica in free], sum(expected))
    assert cards(chosen, *(each.uuid for each in gpus)) == expected


def test_where_each_card_is_given_once_shares_are_of_as_many_cards_as_there_are() -> None:
    node = shares(4, gpu(0), gpu(1), distinct=True)
    chosen = preferred(node, [*(share(U0, n) for n in range(4)), share(U1, 3)], 2)
    assert cards(chosen, U0, U1) == [1, 1]
    assert isinstance(allocate(node.snapshot(), resource_of(node), chosen), ContainerAnswer)


def test_a_share_that_must_be_included_counts_as_in_use() -> None:
    node = shares(2, gpu(0), gpu(1))
    free = [share(U0, 0), share(U0, 1), share(U1, 0), share(U1, 1)]
    assert preferred(node, free, 2, must=[share(U0, 1)]) == [share(U0, 1), share(U1, 0)]


def test_another_card_goes_before_the_same_numa_node() -> None:
    node = shares(2, gpu(0, numa=0), gpu(1, numa=1))
    assert preferred(node, [share(U0, 0), share(U0, 1), share(U1, 0)], 2) == [share(U0, 0), share(U1, 0)]


def test_of_cards_that_are_in_use_alike_those_on_one_numa_node_are_preferred() -> None:
    node = shares(2, gpu(0, numa=0), gpu(1, numa=1), gpu(2, numa=0))
    chosen = preferred(node, [share(U0, 0), share(U1, 0), share(U2, 0)], 2)
    assert chosen == [share(U0, 0), share(U2, 0)]


@given(st.permutations(range(4)))
def test_shares_of_one_card_are_chosen_in_their_order(order: list[int]) -> None:
    node = shares(4, gpu(0))
    assert preferred(node, [share(U0, replica) for replica in order], 2) == [share(U0, 0), share(U0, 1)]


# MIG devices

MIG = ResourceName("nvidia.com/mig-1g.10gb")


def sliced(policy: SharedAllocationPolicy = "distributed") -> tuple[Node, list[str]]:
    """Two GPUs with three slices of one profile each, and one slice of another."""
    slices = [(gi, 0, "1g.10gb") for gi in (1, 2, 3)]
    gpus = mig_gpu(0, *slices), mig_gpu(1, *slices, (4, 0, "2g.20gb"))
    node = healthy_node(*gpus, policy=Policy(mig_strategy="mixed", shared_allocation=policy))
    return node, [device.id for device in node.devices(MIG)]


def test_slices_are_spread_over_the_gpus() -> None:
    node, free = sliced()
    assert preferred(node, free, 2, name=MIG) == [mig_uuid(0), mig_uuid(10)]
    assert preferred(node, free[1:], 2, name=MIG) == [mig_uuid(1), mig_uuid(10)]


def test_packed_slices_are_of_the_gpu_that_is_in_use() -> None:
    node, free = sliced("packed")
    assert preferred(node, free[:-1], 2, name=MIG) == [mig_uuid(10), mig_uuid(11)]


# What cannot be, and what is not known


def test_what_must_be_included_comes_first_and_once() -> None:
    node = healthy_node(*[gpu(number) for number in range(4)])
    assert preferred(node, FOUR, 3, must=[U3, U3]) == [U3, U0, U1]


def test_asking_for_nothing_gives_nothing() -> None:
    assert preferred(healthy_node(gpu(0)), [U0], 0) == []


def test_a_device_that_is_gone_does_not_block_the_others() -> None:
    assert preferred(healthy_node(gpu(0), gpu(1)), [U1, "MIG-gone", U0], 2) == [U0, U1]


def test_what_must_be_included_has_to_be_available() -> None:
    node = healthy_node(gpu(0), gpu(1))
    assert rejected(node, [U0], [U1, "x"], 2) == Rejection(
        "unknown", f"{U1} must be included but is not among the available devices"
    )
    assert rejected(node, [U0, "a\nb"], ["a\nb"], 2) == Rejection(
        "unknown", r"'a\nb' must be included but is not among the available devices"
    )


@pytest.mark.parametrize(
    ("available", "must", "size", "numbers"),
    [
        ([U0, U1], [], 3, "3 of nvidia.com/gpu were asked for, 2 are available and 0 must be included"),
        ([U0, "x"], [], 2, "2 of nvidia.com/gpu were asked for, 1 are available and 0 must be included"),
        ([U0, U1], [U0, U1], 1, "1 of nvidia.com/gpu were asked for, 2 are available and 2 must be included"),
        ([U0, U1], [U0], 3, "3 of nvidia.com/gpu were asked for, 2 are available and 1 must be included"),
    ],
)
def test_a_number_that_cannot_be_met_is_rejected(
    available: list[str], must: list[str], size: int, numbers: str
) -> None:
    node = healthy_node(gpu(0), gpu(1))
    assert rejected(node, available, must, size) == Rejection(
        "unsatisfiable", f"not enough available devices to satisfy allocation: {numbers}"
    )


def test_the_largest_request_for_shares_is_answered() -> None:
    node = shares(100, *[gpu(number) for number in range(8)])
    everything = [str(device.id) for device in node.devices()]
    chosen = preferred(node, everything, 799)
    assert len(set(chosen)) == 799
    assert sorted(cards(chosen, *EIGHT)) == [99, *[100] * 7]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Node, list[str], list[str], int]:
    replicas = draw(st.sampled_from([1, 2, 4]))
    node = shares(replicas, *[gpu(n, numa=draw(st.sampled_from([None, 0, 1]))) for n in range(4)])
    unhealthy = draw(st.sets(st.integers(0, 3), max_size=2))
    node.apply(*(failed(uuid(number), 15) for number in unhealthy))
    everything = [str(device.id) for device in node.devices()]
    available = draw(st.lists(st.sampled_from(everything), min_size=1, unique=True))
    must = draw(st.lists(st.sampled_from(available), max_size=3, unique=True))
    return node, available, must, draw(st.integers(len(must), len(available)))


@given(requests())
def test_a_preferred_allocation_is_from_what_is_free_and_as_even_as_it_can_be(
    request: tuple[Node, list[str], list[str], int],
) -> None:
    node, available, must, size = request
    chosen = preferred(node, available, size, must=must)
    assert len(set(chosen)) == len(chosen) == size
    assert chosen[: len(must)] == must
    assert set(chosen) <= set(available)
    in_use = Counter(card_of(str(device.id)) for device in node.devices())
    in_use.subtract(card_of(device) for device in set(available) - set(chosen))
    picked = {card_of(device) for device in chosen if device not in must}
    well = {str(device.id) for device in node.devices() if str(device.id) not in node.unhealthy()}
    spare = well & (set(available) - set(chosen))
    fewest = min((in_use[card_of(device)] for device in spare), default=len(in_use) * 4)
    if set(chosen) - set(must) <= well:
        assert all(in_use[card] <= fewest + 1 for card in picked)
    else:
        assert not spare


def card_of(device: str) -> str:
    return device.partition("::")[0]
