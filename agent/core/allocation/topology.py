"""The connections of the GPUs of a node, joined from each GPU's topology sample.

Invariants: a GPU that is absent, or whose links could not be read, has unknown links; the others keep theirs.
The driver's PCIe distance takes precedence over that of the kernel's device paths.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

from agent.model.gpu import Gpu
from agent.model.ids import GpuUuid
from agent.model.topology import UNKNOWN_LINK, Link, PcieDistance, Topology, TopologySample

NUMA_WEIGHT: Final = 4_096
"""One point of a score outweighs every pair of a node's GPUs that is on one NUMA node."""

MAX_PATH_PARTS: Final = 64
"""Bridges between a GPU and its host bridge that count; machines have fewer than ten."""

NVLINK_SCORE: Final = 100
PCIE_SCORES: Final[Mapping[PcieDistance, int]] = {
    PcieDistance.CROSS_NODE: 10,
    PcieDistance.SAME_NODE: 20,
    PcieDistance.HOST_BRIDGE: 30,
    PcieDistance.MULTI_SWITCH: 40,
    PcieDistance.SINGLE_SWITCH: 50,
    PcieDistance.SAME_BOARD: 60,
}
"""Source: NVIDIA/go-gpuallocator:gpuallocator/besteffort_policy.go."""

_Links = Mapping[tuple[GpuUuid, GpuUuid], Link]

_BETWEEN_BRIDGES: Final[Mapping[bool | None, PcieDistance]] = {
    True: PcieDistance.SAME_NODE,
    False: PcieDistance.CROSS_NODE,
}

_SHORT_NAMES: Final[Mapping[PcieDistance, str]] = {
    PcieDistance.SAME_BOARD: "PIX",
    PcieDistance.SINGLE_SWITCH: "PIX",
    PcieDistance.MULTI_SWITCH: "PXB",
    PcieDistance.HOST_BRIDGE: "PHB",
    PcieDistance.SAME_NODE: "NODE",
    PcieDistance.CROSS_NODE: "SYS",
}


def topology_of(
    gpus: Iterable[Gpu], samples: Mapping[GpuUuid, TopologySample], present: frozenset[GpuUuid]
) -> Topology:
    """Return the known connections of every two GPUs, and the score of every two."""
    listed = tuple(gpus)
    known = [gpu for gpu in listed if gpu.uuid in samples]
    links: dict[tuple[GpuUuid, GpuUuid], Link] = {}
    for one, other in combinations(known, 2):
        ours, theirs = samples[one.uuid], samples[other.uuid]
        link = Link(
            nvlinks=_nvlinks(one, other, ours, theirs) if {one.uuid, other.uuid} <= present else None,
            pcie=_distance(one, other, ours, theirs),
        )
        links[one.uuid, other.uuid] = links[other.uuid, one.uuid] = link
    affinities = {gpu.uuid: samples[gpu.uuid].cpu_affinity for gpu in known}
    return Topology(
        links,
        {uuid: cpus for uuid, cpus in affinities.items() if cpus is not None},
        _scores(listed, links),
    )


def _scores(gpus: Sequence[Gpu], links: _Links) -> Mapping[GpuUuid, Mapping[GpuUuid, int]]:
    """Return the score of each pair; among equal ones those on one NUMA node are better."""
    scores = {gpu.uuid: {gpu.uuid: 0} for gpu in gpus}
    for one, other in combinations(gpus, 2):
        is_near = one.numa_node is not None and one.numa_node == other.numa_node
        value = NUMA_WEIGHT * score(links.get((one.uuid, other.uuid), UNKNOWN_LINK)) + is_near
        scores[one.uuid][other.uuid] = scores[other.uuid][one.uuid] = value
    return scores


def _nvlinks(one: Gpu, other: Gpu, ours: TopologySample, theirs: TopologySample) -> int | None:
    """Return how many links are up at both ends; through switches every GPU reaches every other."""
    if ours.nvlinks is None or theirs.nvlinks is None:
        return None
    direct = min(ours.nvlinks.to_gpus.get(other.pci, 0), theirs.nvlinks.to_gpus.get(one.pci, 0))
    return direct + min(ours.nvlinks.to_switches, theirs.nvlinks.to_switches)


def _distance(one: Gpu, other: Gpu, ours: TopologySample, theirs: TopologySample) -> PcieDistance | None:
    reported = ours.distances.get(other.pci) or theirs.distances.get(one.pci)
    if reported is not None or ours.path is None or theirs.path is None:
        return reported
    nodes = one.numa_node, other.numa_node
    return distance_of_paths(
        ours.path, theirs.path, same_node=None if None in nodes else nodes[0] == nodes[1]
    )


def distance_of_paths(one: str, other: str, *, same_node: bool | None) -> PcieDistance | None:
    """Return the distance of two PCI devices, from the kernel's device paths.

    A path names the host bridge, every port on the way, and the device. Behind the last port that two
    paths share, a switch adds one port and then the device; whatever is longer crosses another switch.
    Paths from two host bridges do not show whether these are of one NUMA node: ``same_node`` does.
    """
    ours, theirs = one.split("/", MAX_PATH_PARTS), other.split("/", MAX_PATH_PARTS)
    if ours == theirs or max(len(ours), len(theirs)) > MAX_PATH_PARTS:
        return None
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
        shared += 1
    if shared == 0:
        return _BETWEEN_BRIDGES.get(same_node)
    if shared == 1:
        return PcieDistance.HOST_BRIDGE
    longest = max(len(ours), len(theirs)) - shared
    return PcieDistance.SINGLE_SWITCH if longest <= 2 else PcieDistance.MULTI_SWITCH


def score(link: Link) -> int:
    """Return how well two GPUs are connected; an unknown connection counts nothing."""
    pcie = 0 if link.pcie is None else PCIE_SCORES[link.pcie]
    return pcie + NVLINK_SCORE * (link.nvlinks or 0)


def short_name(link: Link) -> str | None:
    """Return the name that nvidia-smi gives a connection: ``NV18``, ``PIX``; None: unknown."""
    if link.nvlinks:
        return f"NV{link.nvlinks}"
    if link.nvlinks is None or link.pcie is None:
        return None
    return _SHORT_NAMES[link.pcie]
