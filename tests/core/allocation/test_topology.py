"""How samples of single GPUs become the connections of a node, and what these are worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.allocation.topology import MAX_PATH_PARTS, distance_of_paths, score, short_name
from agent.model.facts import TopologySeen
from agent.model.gpu import Gpu
from agent.model.topology import UNKNOWN_LINK, Link, NvLinks, PcieDistance, TopologySample
from tests.core.build import U0, U1, U2, Node, enumerated, gpu, healthy_node, registered_node, uuid

ROOT = "pci0000:00"
PORT = f"{ROOT}/0000:00:01.0"
SWITCH = f"{PORT}/0000:01:00.0"


def sampled(*samples: TopologySample, gpus: tuple[Gpu, ...] | None = None) -> Node:
    listed = tuple(gpu(number) for number in range(len(samples))) if gpus is None else gpus
    node = healthy_node(*listed)
    node.apply(*(TopologySeen(one.uuid, sample) for one, sample in zip(listed, samples, strict=True)))
    return node


def between(node: Node, one: int = 0, other: int = 1) -> Link:
    link = node.snapshot().topology.between(uuid(one), uuid(other))
    assert link == node.snapshot().topology.between(uuid(other), uuid(one))
    return link


# NVLinks


def test_connections_are_unknown_before_the_first_sample() -> None:
    assert between(healthy_node(gpu(0), gpu(1))) == UNKNOWN_LINK


@pytest.mark.parametrize(
    ("ours", "theirs", "nvlinks"),
    [
        (NvLinks({"0000:11:00.0": 4}), NvLinks({"0000:10:00.0": 4}), 4),
        (NvLinks({"0000:11:00.0": 4}), NvLinks({"0000:10:00.0": 3}), 3),
        (NvLinks({"0000:12:00.0": 4}), NvLinks(), 0),
        (NvLinks(to_switches=18), NvLinks(to_switches=17), 17),
        (NvLinks(to_switches=18), NvLinks(), 0),
        (NvLinks(to_switches=18), None, None),
        (None, None, None),
    ],
)
def test_two_gpus_have_the_links_that_are_up_at_both_ends(
    ours: NvLinks | None, theirs: NvLinks | None, nvlinks: int | None
) -> None:
    assert between(sampled(TopologySample(ours), TopologySample(theirs))).nvlinks == nvlinks


def test_a_gpu_that_is_gone_loses_only_its_own_links() -> None:
    switched = TopologySample(NvLinks(to_switches=12), {"0000:11:00.0": PcieDistance.HOST_BRIDGE})
    node = sampled(switched, switched, switched)
    node.apply(enumerated(gpu(1), gpu(2)))
    assert between(node, 1, 2).nvlinks == 12
    assert between(node, 0, 1) == Link(None, PcieDistance.HOST_BRIDGE)
    node.apply(enumerated(gpu(0), gpu(1), gpu(2)))
    assert between(node, 0, 1) == Link(12, PcieDistance.HOST_BRIDGE)


def test_a_sample_of_an_unknown_gpu_is_ignored() -> None:
    node = healthy_node(gpu(0))
    before = node.state
    node.apply(TopologySeen(U1, TopologySample(NvLinks())))
    assert node.state is before


def test_an_equal_sample_changes_nothing_and_no_sample_sends_anything() -> None:
    node = registered_node(gpu(0), gpu(1))
    devices = node.devices()
    assert node.apply(TopologySeen(U0, TopologySample(NvLinks()))) == ()
    assert node.devices() is devices
    before = node.state
    node.apply(TopologySeen(U0, TopologySample(NvLinks())))
    assert node.state is before


# PCIe


def test_the_distance_of_either_driver_call_takes_precedence_over_the_paths() -> None:
    reported = {"0000:10:00.0": PcieDistance.MULTI_SWITCH}
    paths = f"{SWITCH}/0000:02:00.0/0000:10:00.0", f"{SWITCH}/0000:02:01.0/0000:11:00.0"
    assert between(
        sampled(TopologySample(path=paths[0]), TopologySample(distances=reported, path=paths[1]))
    ).pcie == (PcieDistance.MULTI_SWITCH)
    assert (
        between(sampled(TopologySample(path=paths[0]), TopologySample(path=paths[1]))).pcie
        == PcieDistance.SINGLE_SWITCH
    )


@pytest.mark.parametrize(
    ("nodes", "distance"),
    [
        ((0, 0), PcieDistance.SAME_NODE),
        ((0, 1), PcieDistance.CROSS_NODE),
        ((0, None), None),
        ((None, None), None),
    ],
)
def test_host_bridges_are_of_one_numa_node_by_the_kernels_list(
    nodes: tuple[int | None, int | None], distance: PcieDistance | None
) -> None:
    gpus = gpu(0, numa=nodes[0]), gpu(1, numa=nodes[1])
    node = sampled(TopologySample(path="pci0000:00/a/b"), TopologySample(path="pci0000:80/c/d"), gpus=gpus)
    assert between(node).pcie == distance


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        (f"{SWITCH}/0000:02:00.0/0000:03:00.0", f"{SWITCH}/0000:02:01.0/0000:04:00.0", "single_switch"),
        (f"{SWITCH}/0000:02:00.0/0000:03:00.0", f"{SWITCH}/0000:02:00.0/0000:03:00.1", "single_switch"),
        (f"{SWITCH}/a/b/c/0000:03:00.0", f"{SWITCH}/0000:02:01.0/0000:04:00.0", "multi_switch"),
        (f"{PORT}/0000:01:00.0", f"{ROOT}/0000:00:02.0/0000:02:00.0", "host_bridge"),
        (f"{ROOT}/0000:00:01.0", f"{ROOT}/0000:00:02.0", "host_bridge"),
        ("pci0000:00/a", "pci0000:80/a", "same_node"),
        (PORT, PORT, None),
        ("", "", None),
        ("/".join(["a"] * (MAX_PATH_PARTS + 1)), "a", None),
    ],
)
def test_paths_show_the_distance_of_two_devices(one: str, other: str, distance: str | None) -> None:
    for ours, theirs in ((one, other), (other, one)):
        found = distance_of_paths(ours, theirs, same_node=True)
        assert found == (None if distance is None else PcieDistance(distance))


@given(st.text("ab/", max_size=40), st.text("ab/", max_size=40))
def test_any_two_paths_have_an_answer_that_does_not_depend_on_their_order(one: str, other: str) -> None:
    found = distance_of_paths(one, other, same_node=None)
    assert found == distance_of_paths(other, one, same_node=None)
    assert found not in {PcieDistance.SAME_NODE, PcieDistance.CROSS_NODE, PcieDistance.SAME_BOARD}


# What it is worth, and how it is called


@pytest.mark.parametrize(
    ("link", "points", "name"),
    [
        (UNKNOWN_LINK, 0, None),
        (Link(None, PcieDistance.HOST_BRIDGE), 30, None),
        (Link(0, None), 0, None),
        (Link(0, PcieDistance.CROSS_NODE), 10, "SYS"),
        (Link(0, PcieDistance.SAME_NODE), 20, "NODE"),
        (Link(0, PcieDistance.HOST_BRIDGE), 30, "PHB"),
        (Link(0, PcieDistance.MULTI_SWITCH), 40, "PXB"),
        (Link(0, PcieDistance.SINGLE_SWITCH), 50, "PIX"),
        (Link(0, PcieDistance.SAME_BOARD), 60, "PIX"),
        (Link(1, None), 100, "NV1"),
        (Link(18, PcieDistance.CROSS_NODE), 1810, "NV18"),
    ],
)
def test_a_link_scores_as_with_nvidias_allocator_and_is_named_as_by_nvidia_smi(
    link: Link, points: int, name: str | None
) -> None:
    assert score(link) == points
    assert short_name(link) == name


def test_the_cpus_near_a_gpu_are_shown_where_they_are_known() -> None:
    node = sampled(
        TopologySample(cpu_affinity="0-15"), TopologySample(), TopologySample(cpu_affinity="16-31")
    )
    assert node.snapshot().topology.cpu_affinity == {U0: "0-15", U2: "16-31"}
