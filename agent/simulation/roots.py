"""The doubles of /dev, /proc, /sys and the driver root: what a driver and the kernel show of a node's GPUs.

*Invariants*
- Device nodes are empty regular files, so opening them needs no rightsand means nothing.
- MIG capability minors are numbered as the driver does it (see `capability_minors`), for each GPU's minor.
- A module that is loaded again and a device that is bound again are other inodes than before, as in sysfs.
- Nothing outside the four roots is touched.

Sources: NVIDIA MIG User Guide, "Device Nodes and Capabilities"; proc(5); the kernel's sysfs-bus-pci.
"""

import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.simulation.driver_tree import write_driver_tree
from agent.simulation.presets import GpuSpec, NodeSpec, PlacedMigDevice, place_mig_devices

DEVICE_FILES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
CAPABILITY_DIRECTORY = "nvidia-caps"
DRIVER = "nvidia"
MODULES = (DRIVER, "nvidia_uvm")

_NVIDIA_VENDOR = 0x10DE
_3D_CONTROLLER = 0x030200
_CONFIG_MINOR, _MONITOR_MINOR, _FIRST_MINOR = 1, 2, 3
GENERAL_CAPABILITIES = (_CONFIG_MINOR, _MONITOR_MINOR)
_GPU_INSTANCES, _COMPUTE_INSTANCES = 15, 8
_CHARACTER_DEVICES = {
    195: ("nvidia", "nvidiactl", "nvidia-modeset"),
    234: ("nvidia-caps",),
    508: ("nvidia-uvm",),
}


def write_roots(spec: NodeSpec, node: Path) -> None:
    """Write dev, proc, sys and driver below a node directory."""
    write_dev(spec, node / "dev")
    write_proc(spec, node / "proc")
    write_sysfs(spec, node / "sys")
    write_driver_tree(spec.driver_version, node / "driver")


def write_dev(spec: NodeSpec, dev_root: Path) -> None:
    """Write the device nodes: one for each GPU, the driver's own, and MIG's capabilities."""
    dev_root.mkdir(parents=True, exist_ok=True)
    for name in DEVICE_FILES:
        (dev_root / name).touch()
    for position, gpu in enumerate(spec.gpus):
        (dev_root / f"nvidia{gpu.minor}").touch()
        write_mig_devices(gpu.minor, _placed(position, gpu), dev_root)
        _write_graphics_nodes(gpu, dev_root / "dri")


def _write_graphics_nodes(gpu: GpuSpec, directory: Path) -> None:
    by_path = directory / "by-path"
    by_path.mkdir(parents=True, exist_ok=True)
    for kind, name in _graphics_nodes(gpu).items():
        (directory / name).touch()
        link = by_path / f"pci-{gpu.pci_bus_id}-{kind}"
        link.unlink(missing_ok=True)
        link.symlink_to(f"../{name}")


def _graphics_nodes(gpu: GpuSpec) -> dict[str, str]:
    return {"card": f"card{gpu.minor}", "render": f"renderD{128 + gpu.minor}"}


def write_mig_devices(minor: int, placed: Sequence[PlacedMigDevice], dev_root: Path) -> None:
    """Write the capability nodes of a GPU's MIG devices in place of those it had."""
    directory = dev_root / CAPABILITY_DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    for number in GENERAL_CAPABILITIES:
        (directory / f"nvidia-cap{number}").touch()
    own = gpu_capabilities(minor)
    for file in list(directory.iterdir()):
        if int(file.name.removeprefix("nvidia-cap")) in own:
            file.unlink()
    for device in placed:
        for number in capability_minors(minor, device.gi, device.ci):
            (directory / f"nvidia-cap{number}").touch()


def gpu_capabilities(minor: int) -> range:
    """Return the minors that the MIG devices of a GPU may have."""
    return range(_gpu_minor(minor), _gpu_minor(minor + 1))


def capability_minors(minor: int, gi: int, ci: int) -> tuple[int, int]:
    """Return the minors of a GPU instance and of a compute instance in it, as mig-minors lists them.

    The first GPU's `gi0` is 3, its `gi0/ci0` 4, its `gi1` 12; the second GPU's `gi0` is 138.
    """
    gpu_instance = _gpu_minor(minor) + gi * (1 + _COMPUTE_INSTANCES)
    return gpu_instance, gpu_instance + 1 + ci


def write_sysfs(spec: NodeSpec, sys_root: Path) -> None:
    """Write the PCI devices, bound to the driver, and its modules."""
    for gpu in spec.gpus:
        write_pci_device(gpu, sys_root)
    load_modules(spec, sys_root)


def load_modules(spec: NodeSpec, sys_root: Path) -> None:
    """Write the driver's modules as after they were loaded, and bind the GPUs that no driver has."""
    modules = sys_root / "module"
    modules.mkdir(parents=True, exist_ok=True)
    for name in MODULES:
        draft, old = modules / f".{name}.new", modules / f".{name}.old"
        draft.mkdir()
        if name == DRIVER:
            (draft / "version").write_text(f"{spec.driver_version}\n", encoding="ascii")
        # Two directories at the same time cannot have one inode number.
        if (modules / name).exists():
            (modules / name).rename(old)
        draft.rename(modules / name)
        shutil.rmtree(old, ignore_errors=True)
    for gpu in spec.gpus:
        if _pci_directory(gpu, sys_root).is_dir() and driver_of(gpu, sys_root) is None:
            bind_pci_device(gpu, sys_root, DRIVER)


def unload_modules(spec: NodeSpec, sys_root: Path) -> None:
    """Take the driver's modules away, and the GPUs from the driver."""
    for name in MODULES:
        shutil.rmtree(sys_root / "module" / name, ignore_errors=True)
    for gpu in spec.gpus:
        if driver_of(gpu, sys_root) == DRIVER:
            bind_pci_device(gpu, sys_root, None)


def write_pci_device(gpu: GpuSpec, sys_root: Path) -> None:
    """Write one GPU's PCI device, as after it was found on the bus and bound to the driver."""
    directory = _pci_directory(gpu, sys_root)
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in _pci_attributes(gpu).items():
        (directory / name).write_text(f"{value}\n", encoding="ascii")
    for name in _graphics_nodes(gpu).values():
        (directory / "drm" / name).mkdir(parents=True, exist_ok=True)
    bind_pci_device(gpu, sys_root, DRIVER)


def remove_pci_device(gpu: GpuSpec, sys_root: Path) -> None:
    """Take one GPU's PCI device away, as when it was removed from the bus."""
    shutil.rmtree(_pci_directory(gpu, sys_root), ignore_errors=True)


def bind_pci_device(gpu: GpuSpec, sys_root: Path, driver: str | None) -> None:
    """Bind a GPU's PCI device to a driver (anew), or to none."""
    device = _pci_directory(gpu, sys_root)
    if driver is None:
        (device / "driver").unlink(missing_ok=True)
        return
    (sys_root / "bus" / "pci" / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    draft = device / ".driver.new"
    draft.symlink_to(f"../../drivers/{driver}")
    draft.rename(device / "driver")


def driver_of(gpu: GpuSpec, sys_root: Path) -> str | None:
    """Return the driver that a GPU's PCI device is bound to; None: to none, or there is no such device."""
    link = _pci_directory(gpu, sys_root) / "driver"
    return link.readlink().name if link.is_symlink() else None


def write_device_node(name: str, dev_root: Path) -> None:
    """Write a device node, such as nvidia3."""
    (dev_root / name).touch()


def remove_device_node(name: str, dev_root: Path) -> None:
    """Take a device node away."""
    (dev_root / name).unlink(missing_ok=True)


def _pci_directory(gpu: GpuSpec, sys_root: Path) -> Path:
    return sys_root / "bus" / "pci" / "devices" / gpu.pci_bus_id


def _pci_attributes(gpu: GpuSpec) -> dict[str, str]:
    return {
        "vendor": f"{_NVIDIA_VENDOR:#06x}",
        "device": f"{gpu.pci_device_id >> 16:#06x}",
        "subsystem_vendor": f"{gpu.pci_subsystem_id & 0xFFFF:#06x}",
        "subsystem_device": f"{gpu.pci_subsystem_id >> 16:#06x}",
        "class": f"{_3D_CONTROLLER:#08x}",
        "numa_node": str(-1 if gpu.numa_node is None else gpu.numa_node),
        "local_cpulist": gpu.cpu_affinity or "",
        "current_link_width": str(gpu.pcie.width),
        "max_link_width": str(gpu.pcie.width),
    }


def write_proc(spec: NodeSpec, proc_root: Path) -> None:
    """Write the device list, the boot id, and what the driver shows under driver/."""
    proc_root.mkdir(parents=True, exist_ok=True)
    lines = [f"{major:3} {name}" for major, names in _CHARACTER_DEVICES.items() for name in names]
    devices = "\n".join(["Character devices:", "  1 mem", *lines, "", "Block devices:", "259 blkext", ""])
    (proc_root / "devices").write_text(devices, encoding="ascii")
    write_boot_id(proc_root, boots=1)
    driver = proc_root / "driver" / "nvidia"
    driver.mkdir(parents=True, exist_ok=True)
    version = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {spec.driver_version}\n"
    (driver / "version").write_text(version, encoding="ascii")
    (driver / "params").write_text('ExcludedGpus: ""\n', encoding="ascii")
    for position, gpu in enumerate(spec.gpus):
        _write_information(gpu, driver / "gpus" / gpu.pci_bus_id)
        write_mig_capabilities(gpu.minor, _placed(position, gpu), proc_root)
    _write_minors(spec, proc_root / "driver" / "nvidia-caps")


def write_boot_id(proc_root: Path, *, boots: int) -> None:
    """Write the kernel's boot id; another count is another boot."""
    path = proc_root / "sys" / "kernel" / "random" / "boot_id"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{uuid.UUID(int=boots, version=4)}\n", encoding="ascii")


def write_mig_capabilities(minor: int, placed: Sequence[PlacedMigDevice], proc_root: Path) -> None:
    """Write the access files of a GPU's MIG devices in place of those it had."""
    mig = proc_root / "driver" / "nvidia" / "capabilities" / f"gpu{minor}" / "mig"
    shutil.rmtree(mig, ignore_errors=True)
    for device in placed:
        gpu_instance, compute_instance = capability_minors(minor, device.gi, device.ci)
        _write_access(mig / f"gi{device.gi}", gpu_instance)
        _write_access(mig / f"gi{device.gi}" / f"ci{device.ci}", compute_instance)


def _write_access(directory: Path, minor: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    text = f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    (directory / "access").write_text(text, encoding="ascii")


def _write_information(gpu: GpuSpec, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    facts = {
        "Model": gpu.name,
        "GPU UUID": gpu.uuid,
        "Video BIOS": gpu.vbios_version or "??.??.??.??.??",
        "Bus Type": "PCIe",
        "Bus Location": gpu.pci_bus_id,
        "Device Minor": str(gpu.minor),
        "GPU Excluded": "No",
    }
    text = "".join(f"{key + ':':<17}{value}\n" for key, value in facts.items())
    (directory / "information").write_text(text, encoding="utf-8")


def _write_minors(spec: NodeSpec, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"config {_CONFIG_MINOR}", f"monitor {_MONITOR_MINOR}"]
    lines += [line for gpu in spec.gpus if gpu.mig is not None for line in _minor_lines(gpu.minor)]
    (directory / "mig-minors").write_text("\n".join(lines) + "\n", encoding="ascii")


def _minor_lines(minor: int) -> Iterator[str]:
    for gi in range(_GPU_INSTANCES):
        yield f"gpu{minor}/gi{gi}/access {capability_minors(minor, gi, 0)[0]}"
        for ci in range(_COMPUTE_INSTANCES):
            yield f"gpu{minor}/gi{gi}/ci{ci}/access {capability_minors(minor, gi, ci)[1]}"


def _gpu_minor(minor: int) -> int:
    return _FIRST_MINOR + minor * _GPU_INSTANCES * (1 + _COMPUTE_INSTANCES)


def _placed(position: int, gpu: GpuSpec) -> tuple[PlacedMigDevice, ...]:
    if gpu.mig is None or not gpu.mig.enabled:
        return ()
    return place_mig_devices(position, gpu.mig.profiles, gpu.mig.devices)
