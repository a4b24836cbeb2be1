"""Topology samples: what they contain, and when they are taken."""

from pathlib import Path

import pytest

from agent.core.allocation.topology import short_name, topology_of
from agent.errors import NvmlError
from agent.model.facts import GpuCallFailed, GpuCallOverdue, GpuProbePassed, GpusEnumerated, TopologySeen
from agent.model.ids import GpuUuid
from agent.model.structs import replace
from agent.model.topology import NvLinks, PcieDistance, Topology, TopologySample
from agent.sources.nvml.inventory import DiscoveredGpu
from agent.sources.nvml.library import Handle
from agent.sources.nvml.readings import LINK_TO_GPU, LINK_TO_SWITCH, Readings
from agent.sources.nvml.topology import cpu_list, read_nvlinks, sample_topology_without_driver
from tests.core.build import gpu
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import Recorder
from tests.sources.simulated import MS, QUICK, Node

A100 = {"preset": "8x-a100"}


def samples(recorder: Recorder) -> dict[GpuUuid, TopologySample]:
    """Return the newest topology sample of each GPU."""
    return {fact.gpu: fact.sample for fact in recorder.of(TopologySeen)}


async def every_sample(recorder: Recorder, node: Node) -> list[TopologySample]:
    await recorder.until(lambda: len(samples(recorder)) == node.state.gpus)
    return [samples(recorder)[uuid] for uuid in node.uuids()]


def seen(recorder: Recorder) -> Topology:
    """Return the topology that the core derives from the samples."""
    (*_, listed) = recorder.of(GpusEnumerated)
    return topology_of(listed.gpus, samples(recorder), frozenset(gpu.uuid for gpu in listed.gpus))


# Contents


async def test_gpus_behind_nvswitches_reach_each_other_with_all_their_links(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    await start_source(node)
    first, second, third, *_ = await every_sample(recorder, node)
    assert first.nvlinks == NvLinks(to_switches=12)
    assert first.cpu_affinity == "48-63,176-191"
    assert first.distances["0000:0f:00.0"] is PcieDistance.MULTI_SWITCH
    assert set(first.distances.values()) == {PcieDistance.MULTI_SWITCH, PcieDistance.CROSS_NODE}
    assert third.distances["0000:4e:00.0"] is PcieDistance.MULTI_SWITCH
    assert len(second.distances) == 7
    topology = seen(recorder)
    assert {short_name(link) for link in topology.links.values()} == {"NV12"}
    assert len(topology.links) == 8 * 7


async def test_links_between_two_gpus_are_found_by_their_peers(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    for link in range(12):
        node.state.set_number(0, "link_peer", 0x47 << 16, link)
        node.state.set_number(2, "link_peer", 0x07 << 16, link)
    node.state.set_nvlink(0, 3, up=False)
    node.state.set_nvlink(2, 4, up=False)
    node.state.set_nvlink(2, 5, up=False)
    await start_source(node)
    first, _, third, *_ = await every_sample(recorder, node)
    assert first.nvlinks == NvLinks({"0000:47:00.0": 11})
    assert third.nvlinks == NvLinks({"0000:07:00.0": 10})
    topology = seen(recorder)
    # Up at both ends, as far as known.
    assert topology.between(node.uuid(0), node.uuid(2)).nvlinks == 10
    assert topology.between(node.uuid(0), node.uuid(1)).nvlinks == 0
    assert topology.between(node.uuid(1), node.uuid(3)).nvlinks == 12


async def test_gpus_without_links_have_none_and_not_unknown_ones(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    assert all(sample.nvlinks == NvLinks() for sample in await every_sample(recorder, node))
    assert {short_name(link) for link in seen(recorder).links.values()} <= {"PHB", "NODE", "SYS"}


async def test_what_the_driver_does_not_support_comes_from_the_kernel(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node({"preset": "8x-a100", "gpus": 2})
    devices = node.directory / "sys/bus/pci/devices"
    real = node.directory / "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    devices.mkdir(parents=True)
    for port, pci in (("0000:02:00.0", "0000:07:00.0"), ("0000:02:01.0", "0000:0f:00.0")):
        (real / port / pci).mkdir(parents=True)
        (real / port / pci / "local_cpulist").write_text("0-3\n")
        (devices / pci).symlink_to(
            f"../../../devices/{(real / port / pci).relative_to(node.directory / 'sys/devices')}"
        )
    for call in ("nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetCpuAffinity"):
        node.state.set_return(call, 3)
    await start_source(node)
    first, _ = await every_sample(recorder, node)
    assert (first.distances, first.cpu_affinity) == ({}, "0-3")
    assert seen(recorder).between(*node.uuids()).pcie is PcieDistance.SINGLE_SWITCH


# When it is sampled


async def test_the_topology_is_sampled_after_the_first_passed_probe(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    await start_source(node)
    await every_sample(recorder, node)
    for uuid in node.uuids():
        mine = [type(fact) for fact in recorder.facts if getattr(fact, "gpu", None) == uuid]
        assert mine.index(GpuProbePassed) < mine.index(TopologySeen)


async def test_it_is_sampled_once_while_nothing_changes(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    await start_source(node)
    await every_sample(recorder, node)
    await recorder.at_least(8 * 6, GpuProbePassed)
    assert len(recorder.of(TopologySeen)) == 8
    assert node.state.calls("nvmlDeviceGetCpuAffinity") == 8
    assert node.state.calls("nvmlDeviceGetTopologyCommonAncestor") == 8 * 7


async def test_it_is_sampled_again_when_a_link_goes_down(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    await start_source(node, replace(QUICK, slow_polls=0))
    await every_sample(recorder, node)
    node.state.set_nvlink(5, 7, up=False)
    await recorder.until(lambda: samples(recorder)[node.uuid(5)].nvlinks == NvLinks(to_switches=11))
    assert seen(recorder).between(node.uuid(5), node.uuid(0)).nvlinks == 11


async def test_it_is_sampled_again_when_another_gpu_is_listed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    node.state.hide_gpu(7)
    await start_source(node)
    await recorder.until(lambda: len(samples(recorder)) == 7)
    assert "0000:bd:00.0" not in samples(recorder)[node.uuid(0)].distances
    node.state.reveal_gpu(7)
    await recorder.until(lambda: "0000:bd:00.0" in samples(recorder)[node.uuid(0)].distances)
    await every_sample(recorder, node)


# Failures


async def test_a_lost_gpu_has_unknown_links_and_the_others_keep_theirs(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    """Case G1."""
    node = make_node(A100)
    node.state.set_return(None, 15, gpu=3)
    node.state.clear_return("nvmlDeviceGetHandleByIndex_v2", gpu=3)
    await start_source(node)
    others = [uuid for number, uuid in enumerate(node.uuids()) if number != 3]
    await recorder.until(lambda: samples(recorder).keys() >= set(others))
    topology = seen(recorder)
    assert {topology.between(one, other).nvlinks for one in others for other in others if one != other} == {
        12
    }
    assert all(topology.between(node.uuid(3), other).nvlinks is None for other in others)


async def test_a_gpu_that_is_lost_later_has_unknown_links_and_is_not_called(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    await start_source(node)
    await every_sample(recorder, node)
    node.state.set_return(None, 15, gpu=3)
    await recorder.until(lambda: samples(recorder)[node.uuid(3)].nvlinks is None)
    topology = seen(recorder)
    assert topology.between(node.uuid(3), node.uuid(0)).nvlinks is None
    # What is soldered on does not change.
    assert topology.between(node.uuid(3), node.uuid(2)).pcie is PcieDistance.MULTI_SWITCH
    assert node.state.calls("nvmlDeviceGetCpuAffinity", gpu=3) == 1
    node.state.clear_faults()
    await recorder.until(lambda: samples(recorder)[node.uuid(3)].nvlinks == NvLinks(to_switches=12))


async def test_links_that_could_not_be_read_are_unknown_and_read_again(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    node.state.set_return("nvmlDeviceGetNvLinkRemoteDeviceType", 999, gpu=1)
    await start_source(node, replace(QUICK, slow_polls=1))
    one = (await every_sample(recorder, node))[1]
    assert (one.nvlinks, one.cpu_affinity) == (None, "48-63,176-191")
    assert seen(recorder).between(node.uuid(0), node.uuid(2)).nvlinks == 12
    node.state.clear_faults()
    await recorder.until(lambda: samples(recorder)[node.uuid(1)].nvlinks == NvLinks(to_switches=12))


async def test_a_topology_sample_that_hangs_affects_that_gpu_alone(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    node.state.hang(gpu=2, function="nvmlDeviceGetCpuAffinity")
    await start_source(node, replace(QUICK, call_deadline_ns=300 * MS))
    others = [uuid for number, uuid in enumerate(node.uuids()) if number != 2]
    await recorder.until(lambda: samples(recorder).keys() >= set(others))
    late = await recorder.first(GpuCallOverdue)
    assert (late.gpu, late.call) == (node.uuid(2), "nvmlDeviceGetCpuAffinity")
    node.state.clear_faults()
    await every_sample(recorder, node)
    assert {fact.gpu for fact in recorder.of(GpuCallOverdue)} == {node.uuid(2)}


async def test_no_call_names_a_gpu_that_does_not_answer(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100)
    await start_source(node, replace(QUICK, slow_polls=0))
    await every_sample(recorder, node)
    node.state.set_return(None, 999, gpu=3)
    await recorder.first(GpuCallFailed)
    node.state.set_nvlink(5, 7, up=False)
    await recorder.until(lambda: samples(recorder)[node.uuid(5)].nvlinks == NvLinks(to_switches=11))
    assert node.state.calls("nvmlDeviceGetTopologyCommonAncestor", gpu=5) == 7 + 6


# One call each


class ScriptedReadings(Readings):
    """Scripted readings: what is at the other end of each link, or the code of an error."""

    def __init__(self, *links: tuple[int, str] | int, kinds: int = 0) -> None:
        self._links = links
        self._kinds = kinds

    def link_is_up(self, handle: Handle, link: int) -> bool:
        if link >= len(self._links):
            raise NvmlError("nvmlDeviceGetNvLinkState", 2, "Invalid Argument")
        answer = self._links[link]
        if isinstance(answer, int) and answer > 0:
            raise NvmlError("nvmlDeviceGetNvLinkState", answer, "Error")
        return answer != 0

    def link_leads_to(self, handle: Handle, link: int) -> int:
        if self._kinds:
            raise NvmlError("nvmlDeviceGetNvLinkRemoteDeviceType", self._kinds, "Error")
        answer = self._links[link]
        assert not isinstance(answer, int)
        return answer[0]

    def link_peer(self, handle: Handle, link: int) -> str:
        answer = self._links[link]
        assert not isinstance(answer, int)
        return answer[1]


TO_GPU = (LINK_TO_GPU, "00000000:3B:00.0")
TO_SWITCH = (LINK_TO_SWITCH, "00000000:C4:00.0")
TO_CPU = (1, "00000000:01:00.0")
HANDLE = Handle(object())


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        (ScriptedReadings(), NvLinks()),
        (ScriptedReadings(0, 3, TO_GPU, TO_GPU, TO_SWITCH), NvLinks({"0000:3b:00.0": 2}, 1)),
        (ScriptedReadings(TO_CPU), NvLinks()),
        (ScriptedReadings(TO_GPU, 13), None),
        (ScriptedReadings(TO_GPU, TO_SWITCH, kinds=13), NvLinks({"0000:3b:00.0": 1, "0000:c4:00.0": 1})),
    ],
)
def test_links_are_counted_by_their_other_ends(readings: ScriptedReadings, found: NvLinks | None) -> None:
    assert read_nvlinks(readings, HANDLE) == found


@pytest.mark.parametrize(
    ("cpus", "text"),
    [
        ([], None),
        ([3], "3"),
        ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"),
        (range(8192), "0-8191"),
        (range(0, 8192, 2), None),
    ],
)
def test_cpus_are_listed_as_the_kernel_lists_them(cpus: list[int], text: str | None) -> None:
    assert cpu_list(cpus) == text


def test_nonsense_in_sysfs_is_unknown(tmp_path: Path) -> None:
    discovered = DiscoveredGpu(gpu(0), HANDLE, "00000000:10:00.0")
    device = tmp_path / "bus/pci/devices" / discovered.gpu.pci
    device.mkdir(parents=True)
    assert sample_topology_without_driver(discovered, tmp_path) == TopologySample()
    (device / "local_cpulist").write_text("all of them\n")
    assert sample_topology_without_driver(discovered, tmp_path) == TopologySample()
    device.rename(device.with_name("old"))
    device.symlink_to("/somewhere/else")
    assert sample_topology_without_driver(discovered, tmp_path) == TopologySample()
