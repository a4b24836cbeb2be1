"""Which GPUs there are, over the simulated library and through the real pynvml."""

import logging
import re
from pathlib import Path

import pytest

from agent.model.facts import (
    DriverReady,
    GpuCallFailed,
    GpuMemorySeen,
    GpuProbePassed,
    GpuSampled,
    GpusEnumerated,
)
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import GpuUuid
from agent.model.structs import replace
from agent.simulation.presets import MigDeviceSpec, load_preset, preset_names
from agent.sources.nvml.inventory import MAX_MIG_DEVICES, control_nodes, profile_from_attributes
from agent.sources.nvml.library import MigAttributes
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import Recorder, until
from tests.sources.simulated import QUICK, Node

FOUR_T4 = "4x-t4"


async def listed(recorder: Recorder, count: int) -> tuple[Gpu, ...]:
    """Wait until so many GPUs are listed, and return them."""

    def is_so() -> bool:
        emitted = recorder.of(GpusEnumerated)
        return bool(emitted) and len(emitted[-1].gpus) == count

    await recorder.until(is_so)
    return recorder.of(GpusEnumerated)[-1].gpus


async def probed(recorder: Recorder, *gpus: GpuUuid) -> None:
    """Wait until each of these GPUs has passed a probe since the recorder last forgot."""
    await recorder.until(lambda: set(gpus) <= {fact.gpu for fact in recorder.of(GpuProbePassed)})


def failed(recorder: Recorder) -> set[GpuUuid]:
    return {fact.gpu for fact in recorder.of(GpuCallFailed)}


# At the start


async def test_every_gpu_is_listed_once_and_probed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("dgx-h100")
    await start_source(node)
    await probed(recorder, *node.uuids())
    assert [gpu.uuid for gpu in await listed(recorder, 8)] == node.uuids()
    assert len(recorder.of(GpusEnumerated)) == 1
    assert failed(recorder) == set()


@pytest.mark.parametrize(("preset", "coherent"), [("gb200", True), ("dgx-h100", False)])
async def test_a_gpu_is_coherent_where_it_shares_the_addresses_of_the_cpu(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, preset: str, *, coherent: bool
) -> None:
    node = make_node(preset)
    await start_source(node)
    assert {gpu.coherent for gpu in (await recorder.first(GpusEnumerated)).gpus} == {coherent}


async def test_whether_a_gpu_is_coherent_may_stay_unknown(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    no_permission = 4
    node.state.set_return("nvmlDeviceGetAddressingMode", no_permission, gpu=1)
    await start_source(node)
    seen = (await recorder.first(GpusEnumerated)).gpus
    assert [gpu.coherent for gpu in seen] == [False, None, False, False]


async def test_the_driver_is_emitted_before_its_gpus_and_they_before_their_probes(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    await start_source(node)
    await probed(recorder, *node.uuids())
    kinds = [type(fact) for fact in recorder.facts]
    assert kinds[:2] == [DriverReady, GpusEnumerated]
    assert set(kinds[2:]) == {GpuSampled, GpuMemorySeen, GpuProbePassed}


async def test_the_versions_of_the_driver_are_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    await start_source(make_node("8x-a100"))
    ready = await recorder.first(DriverReady)
    assert (ready.driver_version, ready.nvml_version, ready.cuda_version) == (
        "570.148.08",
        "12.570.148.08",
        (12, 8),
    )


async def test_a_gpu_is_emitted_with_all_that_never_changes(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("8x-a100")
    await start_source(node)
    gpu = (await listed(recorder, 8))[1]
    assert gpu == Gpu(
        uuid=node.uuid(1),
        index=1,
        minor=1,
        name="NVIDIA A100-SXM4-80GB",
        pci="0000:0f:00.0",
        memory_bytes=81920 << 20,
        compute_capability=(8, 0),
        numa_node=None,
        serial="1321620000001",
        part_number="692-2G506-0212-002",
        vbios="92.00.45.00.03",
        inforom="G506.0212.00.02",
        coherent=False,
    )


async def test_what_the_driver_does_not_support_stays_unknown(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node({"preset": FOUR_T4, "gpus": 1})
    for function in ("MinorNumber", "Serial", "CudaComputeCapability", "MemoryInfo"):
        node.state.set_return(f"nvmlDeviceGet{function}", 3)
    await start_source(node)
    (gpu,) = await listed(recorder, 1)
    assert (gpu.minor, gpu.serial, gpu.compute_capability, gpu.memory_bytes) == (None, None, None, None)
    await probed(recorder, gpu.uuid)


async def test_a_numa_node_is_only_emitted_if_the_kernel_has_one(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node("8x-a100")
    for gpu, text in enumerate(["0\n", "1\n", "-1\n", None, "x\n"]):
        if text is not None:
            write_numa_node(node, gpu, text)
    await start_source(node)
    emitted = [gpu.numa_node for gpu in await listed(recorder, 8)]
    assert emitted == [0, 1, None, None, None, None, None, None]
    await probed(recorder, *node.uuids())
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (line,) = [record.getMessage() for record in warnings]
    assert re.fullmatch("The NUMA node of the GPU at 0000:..:00.0 is not a number: x", line)


def write_numa_node(node: Node, gpu: int, text: str) -> None:
    bus, device = node.state.number(gpu, "pci_bus"), node.state.number(gpu, "pci_device")
    file = node.directory / f"sys/bus/pci/devices/0000:{bus:02x}:{device:02x}.0/numa_node"
    file.parent.mkdir(parents=True)
    file.write_text(text)


async def test_existing_control_nodes_are_emitted_by_their_names_in_a_container(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    (node.directory / "dev/nvidiactl").touch()
    (node.directory / "dev/nvidia-uvm").touch()
    await start_source(node)
    first = await recorder.first(GpusEnumerated)
    assert first.control_nodes == ("/dev/nvidiactl", "/dev/nvidia-uvm")
    (node.directory / "dev/nvidia-modeset").touch()
    await recorder.first(GpusEnumerated, lambda fact: "/dev/nvidia-modeset" in fact.control_nodes)


def test_a_control_node_that_cannot_be_read_does_not_count() -> None:
    # Root may read everything, but not a name that no file system supports.
    assert control_nodes(Path("/" + "x" * 300)) == ()


async def test_a_node_without_gpus_is_ready_with_none(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    await start_source(make_node({"preset": FOUR_T4, "gpus": 0}))
    assert (await recorder.first(GpusEnumerated)).gpus == ()
    await recorder.first(DriverReady)


async def test_more_gpus_than_the_bound_are_not_watched_and_logged_once(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(FOUR_T4)
    await start_source(node, replace(QUICK, max_gpus=2))
    assert [gpu.index for gpu in await listed(recorder, 2)] == [0, 1]
    await until(lambda: node.state.calls("nvmlDeviceGetCount") >= 3)
    assert [record.msg for record in caplog.records] == [
        "NVML lists %(count)s GPUs, but the agent watches only the first %(watched)s"
    ]
    assert len(recorder.of(GpusEnumerated)) == 1


async def test_as_many_mig_devices_as_fit_are_listed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100_IN_MIG)
    node.state.set_mig(0, [MigDeviceSpec(profile="1g.10gb")] * 7)
    node.state.set_number(0, "mig_maximum", 10_000)
    await start_source(node)
    assert len(await mig_devices(recorder, 7)) == 7
    assert node.state.calls("nvmlDeviceGetMigDeviceHandleByIndex") % MAX_MIG_DEVICES == 0


# Later


async def test_gpus_that_appear_late_are_found_without_a_new_init(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    for gpu in (1, 2, 3):
        node.state.hide_gpu(gpu)
    await start_source(node)
    await listed(recorder, 1)
    await probed(recorder, node.uuid(0))
    for gpu in (1, 2, 3):
        node.state.reveal_gpu(gpu)
    assert [gpu.uuid for gpu in await listed(recorder, 4)] == node.uuids()
    await probed(recorder, *node.uuids())
    assert node.state.inits == 1
    assert len(recorder.of(DriverReady)) == 1


async def test_a_gpu_that_is_gone_is_not_listed_and_the_others_are_not_affected(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("8x-a100")
    await start_source(node)
    await probed(recorder, *node.uuids())
    node.state.hide_gpu(3)
    gpus = await listed(recorder, 7)
    others = [uuid for uuid in node.uuids() if uuid != node.uuid(3)]
    assert [(gpu.index, gpu.uuid) for gpu in gpus] == list(enumerate(others))
    recorder.forget()
    await probed(recorder, *others)
    assert failed(recorder) <= {node.uuid(3)}


async def test_a_gpu_that_reappears_is_listed_as_before(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    await start_source(node)
    before = await listed(recorder, 4)
    node.state.hide_gpu(1)
    await listed(recorder, 3)
    recorder.forget()
    node.state.reveal_gpu(1)
    assert await listed(recorder, 4) == before
    await probed(recorder, *node.uuids())


async def test_one_gpu_that_disappears_as_another_appears_is_found(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    node.state.hide_gpu(0)
    await start_source(node)
    await listed(recorder, 3)
    node.state.hide_gpu(2)
    node.state.reveal_gpu(0)
    wanted = [node.uuid(0), node.uuid(1), node.uuid(3)]
    await recorder.until(lambda: [gpu.uuid for gpu in recorder.of(GpusEnumerated)[-1].gpus] == wanted)


async def test_a_gpu_that_cannot_be_identified_hides_no_other_and_is_tried_again(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    node.state.set_return("nvmlDeviceGetUUID", 15, gpu=1)
    await start_source(node)
    gpus = await listed(recorder, 3)
    assert [gpu.uuid for gpu in gpus] == [node.uuid(0), node.uuid(2), node.uuid(3)]
    node.state.clear_return("nvmlDeviceGetUUID", gpu=1)
    await listed(recorder, 4)
    await probed(recorder, node.uuid(1))


async def test_a_known_gpu_that_does_not_answer_stays_listed_as_it_was(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    await start_source(node)
    await listed(recorder, 4)
    node.state.set_return(None, 15, gpu=1)
    fact = await recorder.first(GpuCallFailed)
    assert (fact.gpu, fact.code) == (node.uuid(1), 15)
    recorder.forget()
    await probed(recorder, node.uuid(0), node.uuid(2), node.uuid(3))
    assert recorder.of(GpusEnumerated) == []
    assert failed(recorder) <= {node.uuid(1)}


async def test_a_gpu_that_is_unhealthy_at_the_start_is_listed_and_marked(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    node.state.set_return("nvmlDeviceGetMemoryInfo", 16, gpu=2)
    await start_source(node)
    assert [gpu.uuid for gpu in await listed(recorder, 4)] == node.uuids()
    fact = await recorder.first(GpuCallFailed)
    assert (fact.gpu, fact.code, fact.call) == (node.uuid(2), 16, "nvmlDeviceGetMemoryInfo")


async def test_a_gpu_that_was_unhealthy_at_the_start_gets_its_details_when_it_recovers(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(FOUR_T4)
    node.state.set_return("nvmlDeviceGetMemoryInfo", 16, gpu=2)
    await start_source(node)
    await listed(recorder, 4)
    node.state.clear_return("nvmlDeviceGetMemoryInfo", gpu=2)
    await recorder.first(GpusEnumerated, lambda fact: fact.gpus[2].name == "Tesla T4")


# MIG

A100_IN_MIG = {"preset": "8x-a100", "gpus": 1}


async def mig_devices(recorder: Recorder, count: int) -> tuple[MigDevice, ...]:
    fact = await recorder.first(
        GpusEnumerated, lambda fact: any(len(gpu.mig_devices) == count for gpu in fact.gpus)
    )
    return fact.gpus[0].mig_devices


async def test_mig_devices_are_emitted_with_their_instances_and_profiles(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100_IN_MIG)
    uuids = node.state.set_mig(
        0,
        [
            MigDeviceSpec(profile="3g.40gb"),
            MigDeviceSpec(profile="1g.10gb"),
            MigDeviceSpec(profile="1g.10gb+me"),
        ],
    )
    await start_source(node)
    devices = await mig_devices(recorder, 3)
    assert {device.uuid: device.profile for device in devices} == dict(
        zip(uuids, ["3g.40gb", "1g.10gb", "1g.10gb+me"], strict=True)
    )
    assert len({(device.gi, device.ci) for device in devices}) == 3
    assert {device.profile: device.memory_bytes >> 20 for device in devices}["3g.40gb"] == 40192
    assert recorder.of(GpusEnumerated)[-1].gpus[0].mig_enabled


async def test_the_profile_is_known_without_root_rights_from_the_name(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100_IN_MIG)
    node.state.set_mig(0, [MigDeviceSpec(profile="2g.20gb")])
    node.state.set_return("nvmlDeviceGetGpuInstanceById", 4)
    await start_source(node)
    (device,) = await mig_devices(recorder, 1)
    assert device.profile == "2g.20gb"


@pytest.mark.parametrize(
    ("before", "after"), [("3g.40gb", "4g.40gb"), ("1g.10gb", "1g.10gb+me"), ("2g.20gb", "1g.20gb")]
)
async def test_an_instance_of_another_profile_is_found_under_the_uuid_of_the_one_before(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, before: str, after: str
) -> None:
    node = make_node(A100_IN_MIG)
    (old,) = node.state.set_mig(0, [MigDeviceSpec(profile=before)])
    await start_source(node)
    await mig_devices(recorder, 1)
    assert node.state.set_mig(0, [MigDeviceSpec(profile=after)]) == (old,)
    fact = await recorder.first(
        GpusEnumerated, lambda fact: [mig.profile for mig in fact.gpus[0].mig_devices] == [after]
    )
    assert fact.gpus[0].mig_devices[0].uuid == old


async def test_a_mig_reconfiguration_is_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(A100_IN_MIG)
    await start_source(node)
    (gpu,) = await listed(recorder, 1)
    assert not gpu.mig_enabled
    node.state.set_mig(0, [MigDeviceSpec(profile="7g.80gb")])
    (whole,) = await mig_devices(recorder, 1)
    assert whole.profile == "7g.80gb"
    node.state.set_mig(0, [MigDeviceSpec(profile="1g.10gb")] * 7)
    assert [device.profile for device in await mig_devices(recorder, 7)] == ["1g.10gb"] * 7
    node.state.set_mig(0, [], enabled=False)
    await recorder.first(GpusEnumerated, lambda fact: fact == recorder.of(GpusEnumerated)[0])
    await recorder.until(lambda: not recorder.of(GpusEnumerated)[-1].gpus[0].mig_enabled)
    assert failed(recorder) == set()


@pytest.mark.parametrize(
    ("slices", "memory_mib", "total_mib", "name"),
    [
        ((1, 1), 4864, 40960, "1g.5gb"),
        ((2, 2), 9856, 40960, "2g.10gb"),
        ((7, 7), 40192, 40960, "7g.40gb"),
        ((3, 1), 40192, 81920, "1c.3g.40gb"),
        ((1, 1), 9728, 81559, "1g.10gb"),
        ((4, 4), 23680, 24576, "4g.24gb"),
        # Halves are rounded up: 1.5 of 12 GiB in eighths, and 22.5 of 180.
        ((1, 1), 1000, 12 * 1024, "1g.2gb"),
        ((1, 1), 22 * 1024, 180 * 1024, "1g.23gb"),
        ((3, 3), 60 * 1024, 180 * 1024, "3g.68gb"),
        ((1, 1), 4864, None, "1g.5gb"),
    ],
)
def test_the_profile_is_computed_from_the_size_where_nothing_names_it(
    slices: tuple[int, int], memory_mib: int, total_mib: int | None, name: str
) -> None:
    gpu_slices, compute_slices = slices
    attributes = MigAttributes(gpu_slices, compute_slices, memory_mib << 20)
    assert profile_from_attributes(attributes, total_mib and total_mib << 20) == name


def test_the_names_that_are_computed_are_those_that_the_driver_gives_on_every_preset() -> None:
    computed, given = {}, {}
    for preset in preset_names():
        for card in load_preset(preset).gpus:
            for profile in card.mig.profiles if card.mig else ():
                attributes = MigAttributes(profile.slices, profile.slices, profile.memory_mib << 20)
                name = profile.name.partition("+")[0]
                given[preset, profile.name] = name
                computed[preset, profile.name] = profile_from_attributes(attributes, card.memory_mib << 20)
    assert computed == given
    assert len(given) > 25
