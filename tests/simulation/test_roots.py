"""The doubles of /dev, /proc and /sys show a preset's GPUs the way driver and kernel would."""

from pathlib import Path

import pytest

from agent.simulation.presets import MigDeviceSpec, load_preset, place_mig_devices
from agent.simulation.roots import (
    bind_pci_device,
    capability_minors,
    load_modules,
    remove_device_node,
    remove_pci_device,
    unload_modules,
    write_boot_id,
    write_device_node,
    write_mig_capabilities,
    write_mig_devices,
    write_pci_device,
    write_roots,
)

SLICED = {
    "preset": "8x-a100",
    "gpus": 2,
    "gpu": {"mig": {"enabled": True, "devices": [{"profile": "1g.10gb", "gi": 7}]}},
}


def test_sysfs_shows_each_gpu_on_its_numa_node(tmp_path: Path) -> None:
    spec = load_preset("dgx-h100")
    write_roots(spec, tmp_path)
    devices = tmp_path / "sys/bus/pci/devices"
    assert sorted(path.name for path in devices.iterdir()) == sorted(gpu.pci_bus_id for gpu in spec.gpus)
    for gpu in spec.gpus:
        shown = {
            path.name: path.read_text().strip()
            for path in (devices / gpu.pci_bus_id).iterdir()
            if path.is_file()
        }
        assert (shown["vendor"], shown["device"], shown["class"]) == ("0x10de", "0x2330", "0x030200")
        assert shown["numa_node"] == str(gpu.numa_node)


def test_the_device_nodes_are_there(tmp_path: Path) -> None:
    write_roots(load_preset("4x-t4"), tmp_path)
    names = {path.name for path in (tmp_path / "dev").iterdir()}
    assert names >= {"nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"}
    assert "nvidia4" not in names


def test_proc_names_the_driver_and_its_gpus(tmp_path: Path) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    driver = tmp_path / "proc/driver/nvidia"
    assert "570.148.08" in (driver / "version").read_text()
    assert "Tesla T4" in (driver / "gpus/0000:3b:00.0/information").read_text()
    assert "195 nvidia\n" in (tmp_path / "proc/devices").read_text()


@pytest.mark.parametrize(
    ("place", "minors"), [((0, 0, 0), (3, 4)), ((0, 1, 0), (12, 13)), ((1, 0, 7), (138, 146))]
)
def test_capability_minors_are_the_drivers(place: tuple[int, int, int], minors: tuple[int, int]) -> None:
    assert capability_minors(*place) == minors


def test_mig_devices_have_capabilities_and_change_with_them(tmp_path: Path) -> None:
    spec = load_preset(SLICED)
    write_roots(spec, tmp_path)
    caps, proc = tmp_path / "dev/nvidia-caps", tmp_path / "proc"
    gpu, compute = capability_minors(1, 7, 0)
    access = proc / "driver/nvidia/capabilities/gpu1/mig/gi7/access"
    assert f"DeviceFileMinor: {gpu}\n" in access.read_text()
    assert {f"nvidia-cap{gpu}", f"nvidia-cap{compute}"} <= {path.name for path in caps.iterdir()}
    assert f"gpu1/gi7/ci0/access {compute}\n" in (proc / "driver/nvidia-caps/mig-minors").read_text()
    mig = spec.gpus[1].mig
    assert mig is not None
    placed = place_mig_devices(1, mig.profiles, [MigDeviceSpec(profile="3g.40gb")])
    write_mig_devices(1, placed, tmp_path / "dev")
    write_mig_capabilities(1, placed, proc)
    assert not access.exists()
    assert not (caps / f"nvidia-cap{gpu}").exists()
    assert (caps / f"nvidia-cap{capability_minors(1, placed[0].gi, 0)[1]}").exists()
    assert (caps / f"nvidia-cap{capability_minors(0, 7, 0)[0]}").exists()


def test_a_gpu_falls_off_the_bus_and_comes_back(tmp_path: Path) -> None:
    gpu = load_preset("4x-t4").gpus[1]
    write_pci_device(gpu, tmp_path)
    device = tmp_path / "bus/pci/devices" / gpu.pci_bus_id
    assert (device / "vendor").exists()
    remove_pci_device(gpu, tmp_path)
    assert not device.exists()
    write_pci_device(gpu, tmp_path)
    assert (device / "vendor").exists()


def test_another_boot_has_another_id(tmp_path: Path) -> None:
    ids = set()
    for boots in (1, 2):
        write_boot_id(tmp_path, boots=boots)
        ids.add((tmp_path / "sys/kernel/random/boot_id").read_text())
    assert len(ids) == 2


def test_a_device_is_bound_anew_unbound_or_given_to_another_driver(tmp_path: Path) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    link = tmp_path / "sys/bus/pci/devices" / spec.gpus[0].pci_bus_id / "driver"
    first = link.lstat().st_ino
    assert link.resolve() == tmp_path / "sys/bus/pci/drivers/nvidia"

    bind_pci_device(spec.gpus[0], tmp_path / "sys", "nvidia")
    assert link.lstat().st_ino != first

    bind_pci_device(spec.gpus[0], tmp_path / "sys", "vfio-pci")
    assert link.resolve().name == "vfio-pci"

    bind_pci_device(spec.gpus[0], tmp_path / "sys", None)
    assert not link.is_symlink()


def test_modules_that_are_loaded_again_are_others_than_before(tmp_path: Path) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    modules = tmp_path / "sys/module"
    first = (modules / "nvidia").stat().st_ino

    load_modules(spec, tmp_path / "sys")
    assert (modules / "nvidia").stat().st_ino != first
    assert (modules / "nvidia" / "version").read_text() == f"{spec.driver_version}\n"
    assert sorted(path.name for path in modules.iterdir()) == ["nvidia", "nvidia_uvm"]

    unload_modules(spec, tmp_path / "sys")
    assert list(modules.iterdir()) == []


def test_a_device_node_goes_and_comes(tmp_path: Path) -> None:
    write_roots(load_preset("4x-t4"), tmp_path)
    remove_device_node("nvidia2", tmp_path / "dev")
    assert not (tmp_path / "dev/nvidia2").exists()
    write_device_node("nvidia2", tmp_path / "dev")
    assert (tmp_path / "dev/nvidia2").exists()
