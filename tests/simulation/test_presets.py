"""The node presets are the machines that they name, and inline nodes are checked."""

import pytest

from agent.simulation.presets import (
    MigDeviceSpec,
    NodeSpec,
    PresetError,
    load_preset,
    place_mig_devices,
    preset_names,
)
from agent.simulation.roots import capability_minors

MACHINES = {
    "dgx-h100": ("NVIDIA H100 80GB HBM3", 8, 81559, (9, 0), 18, "1g.10gb"),
    "8x-a100": ("NVIDIA A100-SXM4-80GB", 8, 81920, (8, 0), 12, "1g.10gb"),
    "hgx-b200": ("NVIDIA B200", 8, 183359, (10, 0), 18, "1g.23gb"),
    "gb200": ("NVIDIA GB200", 4, 189471, (10, 0), 18, "1g.23gb"),
    "4x-a30": ("NVIDIA A30", 4, 24576, (8, 0), 0, "1g.6gb"),
    "4x-t4": ("Tesla T4", 4, 15360, (7, 5), 0, None),
}


@pytest.mark.parametrize(("preset", "machine"), MACHINES.items())
def test_a_preset_is_the_machine_it_is_named_after(preset: str, machine: tuple[object, ...]) -> None:
    spec = load_preset(preset)
    name, count, memory_mib, capability, links, smallest = machine
    assert len(spec.gpus) == count
    for gpu in spec.gpus:
        found = 0 if gpu.nvlink is None else len(gpu.nvlink.ends())
        profile = None if gpu.mig is None else gpu.mig.profiles[0].name
        assert (gpu.name, gpu.memory_mib, gpu.compute_capability) == (name, memory_mib, capability)
        assert (found, profile) == (links, smallest)


def test_every_preset_that_comes_with_the_package_loads() -> None:
    assert set(preset_names()) >= set(MACHINES)
    for name in preset_names():
        assert isinstance(load_preset(name), NodeSpec)


def test_uuids_follow_from_the_position() -> None:
    assert load_preset("dgx-h100").gpus[7].uuid == "GPU-00000000-0000-4000-8000-000000000007"


def test_two_cards_of_one_node_can_be_unlike() -> None:
    cards = [(gpu.name, gpu.memory_mib) for gpu in load_preset("2x-v100").gpus]
    assert cards == [("Tesla V100-PCIE-16GB", 16384), ("Tesla V100-PCIE-32GB", 32768)]


@pytest.mark.parametrize("preset", ["dgx-h100", "8x-a100", "hgx-b200", "gb200", "4x-a30"])
def test_the_profiles_fit_as_often_as_they_claim(preset: str) -> None:
    mig = load_preset(preset).gpus[0].mig
    assert mig is not None
    for profile in mig.profiles:
        devices = [MigDeviceSpec(profile=profile.name)] * profile.instances
        placed = place_mig_devices(0, mig.profiles, devices)
        assert len({device.start for device in placed}) == profile.instances
        with pytest.raises(PresetError, match="no room"):
            place_mig_devices(0, mig.profiles, [*devices, MigDeviceSpec(profile=profile.name)])


def test_instances_are_placed_in_whatever_order_they_are_asked_for() -> None:
    mig = load_preset("dgx-h100").gpus[0].mig
    assert mig is not None
    names = ["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]
    for turn in range(len(names)):
        devices = [MigDeviceSpec(profile=name) for name in names[turn:] + names[:turn]]
        assert len(place_mig_devices(0, mig.profiles, devices)) == 4


def test_an_inline_node_changes_a_preset() -> None:
    spec = load_preset(
        {"preset": "8x-a100", "driver_version": "580.1", "gpus": 2, "gpu": {"thermal": {"idle": 50}}}
    )
    assert (spec.driver_version, len(spec.gpus)) == ("580.1", 2)
    assert [gpu.thermal.idle for gpu in spec.gpus] == [50, 50]
    assert spec.gpus[0].thermal.shutdown == 92


def test_an_inline_node_changes_single_gpus() -> None:
    spec = load_preset({"preset": "4x-t4", "gpus": [{}, {"uuid": "GPU-other"}]})
    assert [gpu.uuid for gpu in spec.gpus] == ["GPU-00000000-0000-4000-8000-000000000000", "GPU-other"]


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ("dgx-h1000", "preset: there is no 'dgx-h1000', choose from 2x-v100, 4x-a30, 4x-t4, 8x-a100"),
        ({"preset": 3}, "preset: expected a preset's name"),
        ({"presets": "4x-t4"}, "presets: unknown key of a node"),
        ({"preset": "4x-t4", "gpus": 5}, "gpus: 5 wanted, the preset has 4"),
        ({"preset": "4x-t4", "gpus": "all"}, "gpus: expected a number or a list"),
        ({"preset": "4x-t4", "gpus": [{"minor": "one"}]}, "gpus[0].minor: expected `int`"),
        ({"preset": "4x-t4", "gpu": {"nam": "x"}}, "gpus[0]: object contains unknown field `nam`"),
        ({"preset": "4x-t4", "gpu": {"thermal": {"idle": -1}}}, "gpus[0].thermal.idle: expected `int` >= 0"),
        (
            {"preset": "4x-t4", "gpu": {"pci_bus_id": "1b:00.0"}},
            "gpus[0].pci_bus_id: expected `str` matching",
        ),
        ({"preset": "4x-t4", "gpus": [{}, {"minor": 0}]}, "gpus[1].minor: 0 is gpus[0]'s already"),
        (
            {"driver_version": "1", "nvml_version": "1", "cuda_version": "x", "gpus": []},
            "cuda_version: expected",
        ),
        (
            {"preset": "8x-a100", "gpu": {"mig": {"devices": [{"profile": "9g.1gb"}]}}},
            "gpus[0].mig.devices[0].profile: '9g.1gb' is not supported, choose from 1g.10gb",
        ),
        (
            {"preset": "8x-a100", "gpu": {"mig": {"devices": [{"profile": "1g.10gb", "gi": 7}] * 2}}},
            "gpus[0].mig.devices[1]: GPU instance 7 has 1 compute slices",
        ),
        (
            {"preset": "8x-a100", "gpus": 1, "gpu": {"nvlink": {"peers": {"0000:c4:00.0": 36}}}},
            "gpus[0].nvlink.peers: more than 36 links",
        ),
        (
            {"preset": "dgx-h100", "gpu": {"fabric": {"cluster": "here"}}},
            "gpus[0].fabric.cluster: expected `str` matching",
        ),
    ],
)
def test_a_malformed_node_names_the_key(node: object, problem: str) -> None:
    with pytest.raises(PresetError) as raised:
        load_preset(node)  # type: ignore[arg-type]
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize(
    ("place", "minors"), [((0, 0, 0), (3, 4)), ((0, 1, 0), (12, 13)), ((1, 0, 7), (138, 146))]
)
def test_capability_minors_are_the_drivers(place: tuple[int, int, int], minors: tuple[int, int]) -> None:
    assert capability_minors(*place) == minors
