"""What is found of a driver's installation, on the tree of the simulated node and on stranger ones."""

import os
from pathlib import Path

import pytest

from agent.core.allocation.cdi import SOCKET, DriverFiles, Link
from agent.simulation.driver_tree import LIBRARY_DIR, linker_cache, write_driver_tree
from agent.simulation.presets import load_preset
from agent.simulation.roots import write_roots
from agent.sinks.cdi import driver_files
from agent.sinks.cdi.device_nodes import Places
from agent.sinks.cdi.driver_files import NotFoundError, find
from agent.sinks.cdi.file_tree import TooMuchError

VERSION = "550.54.15"
LIB = f"/{LIBRARY_DIR}"
HOST = "/run/nvidia/driver"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    root = tmp_path / "driver"
    write_driver_tree(VERSION, root)
    (tmp_path / "dev").mkdir()
    return root


def places(driver: Path) -> Places:
    return Places(
        root=str(driver),
        host_root=HOST,
        dev=str(driver.parent / "dev"),
        host_dev="/dev",
        sys=str(driver.parent / "sys"),
    )


def found(driver: Path, *flags: str, version: str = VERSION) -> DriverFiles:
    return find(places(driver), version, (), frozenset(flags))


def mounts(files: DriverFiles) -> dict[str, str]:
    return {mount.container_path: mount.host_path for mount in files.mounts}


def links(files: DriverFiles) -> dict[str, str]:
    return {link.path: link.target for link in files.links}


def add(driver: Path, *paths: str, mode: int = 0o644) -> None:
    for path in paths:
        (driver / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (driver / path.lstrip("/")).touch()
        (driver / path.lstrip("/")).chmod(mode)


# Libraries


def test_libraries_of_the_drivers_version_are_found_with_the_hosts_paths(driver: Path) -> None:
    add(driver, f"{LIB}/libcuda.so.535.1", f"{LIB}/libz.so.1")
    files = found(driver)
    assert mounts(files)[f"{LIB}/libcuda.so.{VERSION}"] == f"{HOST}{LIB}/libcuda.so.{VERSION}"
    assert f"{LIB}/vdpau/libvdpau_nvidia.so.{VERSION}" in mounts(files)
    assert f"{LIB}/libcuda.so.535.1" not in mounts(files)
    assert f"{LIB}/libz.so.1" not in mounts(files)
    assert files.library_dirs == (LIB,)
    assert files.linker_dirs == (LIB, f"{LIB}/vdpau")


def test_a_driver_in_no_usual_directory_is_found_by_the_linkers_cache(driver: Path) -> None:
    (driver / "opt").mkdir()
    (driver / LIBRARY_DIR).rename(driver / "opt/nvidia")
    cache = linker_cache({"libcuda.so.1": "/opt/nvidia/libcuda.so.1"})
    (driver / "etc/ld.so.cache").write_bytes(cache)
    files = found(driver)
    assert files.library_dirs == ("/opt/nvidia",)
    assert f"/opt/nvidia/libnvidia-ml.so.{VERSION}" in mounts(files)


def test_a_damaged_cache_costs_nothing_that_lies_in_a_usual_directory(driver: Path) -> None:
    expected = found(driver)
    (driver / "etc/ld.so.cache").write_bytes(os.urandom(4096))
    assert found(driver) == expected
    (driver / "etc/ld.so.cache").unlink()
    assert found(driver) == expected


def test_a_directory_that_goes_by_two_names_is_searched_once(driver: Path) -> None:
    paths = [path for path in mounts(found(driver)) if path.endswith(f"libcuda.so.{VERSION}")]
    assert paths == [f"{LIB}/libcuda.so.{VERSION}"]


def test_the_links_to_a_library_are_made_as_on_the_host(driver: Path) -> None:
    made = links(found(driver))
    assert made[f"{LIB}/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert made[f"{LIB}/libcuda.so"] == "libcuda.so.1"
    assert made[f"{LIB}/libGLX_indirect.so.0"] == f"libGLX_nvidia.so.{VERSION}"
    assert made[f"{LIB}/gbm/nvidia-drm_gbm.so"] == "../libnvidia-allocator.so.1"


def test_a_link_by_way_of_alternatives_leads_to_the_library_itself(driver: Path) -> None:
    """As on Debian, where containers have no /etc/alternatives of the host."""
    add(driver, f"{LIB}/nvidia/current/libcuda.so.{VERSION}")
    (driver / "etc/alternatives").mkdir()
    (driver / "etc/alternatives/libcuda.so.1").symlink_to(f"{LIB}/nvidia/current/libcuda.so.{VERSION}")
    own = driver / LIBRARY_DIR / "libcuda.so.1"
    own.unlink()
    own.symlink_to("/etc/alternatives/libcuda.so.1")
    (driver / LIBRARY_DIR / f"libcuda.so.{VERSION}").unlink()
    files = found(driver)
    assert f"{LIB}/nvidia/current/libcuda.so.{VERSION}" in mounts(files)
    assert links(files)[f"{LIB}/libcuda.so.1"] == f"{LIB}/nvidia/current/libcuda.so.{VERSION}"


def test_a_library_that_is_a_link_is_the_file_it_leads_to(driver: Path) -> None:
    add(driver, f"/store/abc/libcuda.so.{VERSION}")
    own = driver / LIBRARY_DIR / f"libcuda.so.{VERSION}"
    own.unlink()
    own.symlink_to(f"/store/abc/libcuda.so.{VERSION}")
    files = found(driver)
    path = f"/store/abc/libcuda.so.{VERSION}"
    assert mounts(files)[path] == HOST + path
    assert links(files)[f"{LIB}/libcuda.so.{VERSION}"] == path


def test_no_library_leads_out_of_the_driver_root(driver: Path) -> None:
    outside = driver.parent / f"libcuda.so.{VERSION}"
    outside.touch()
    own = driver / LIBRARY_DIR / f"libnvidia-encode.so.{VERSION}"
    own.unlink()
    own.symlink_to(outside)
    assert not any("encode" in path or str(driver.parent) in path for path in mounts(found(driver)).values())


def test_libraries_with_a_version_of_their_own_are_found(driver: Path) -> None:
    add(driver, f"{LIB}/libnvidia-egl-gbm.so.1.1.0", f"{LIB}/libnvidia-nvvm70.so.4")
    assert {f"{LIB}/libnvidia-egl-gbm.so.1.1.0", f"{LIB}/libnvidia-nvvm70.so.4"} <= set(mounts(found(driver)))


def test_what_every_vendor_brings_is_found_on_demand_only(driver: Path) -> None:
    add(driver, f"{LIB}/libOpenCL.so")
    assert f"{LIB}/libOpenCL.so" not in mounts(found(driver))
    assert f"{LIB}/libOpenCL.so" in mounts(found(driver, "enable-explicit-driver-libraries"))


@pytest.mark.parametrize("version", ["", "550.*", "550.54.15/../x", "550.54\n", "a" * 65])
def test_a_version_that_no_file_has_finds_no_driver(driver: Path, version: str) -> None:
    with pytest.raises(NotFoundError, match="which no file name holds"):
        found(driver, version=version)


def test_another_version_finds_no_driver_and_names_what_is_missing(driver: Path) -> None:
    with pytest.raises(NotFoundError, match=r"there is no libcuda\.so\.560\.1 below .*driver"):
        found(driver, version="560.1")


def test_a_root_that_is_not_there_finds_no_driver(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        found(tmp_path / "nothing")


def test_a_driver_with_too_many_files_is_rejected(driver: Path) -> None:
    many = (
        f"/usr/lib/x86_64-linux-gnu/libnvidia-{number}.so.{VERSION}"
        for number in range(driver_files.MAX_MOUNTS)
    )
    add(driver, *many)
    with pytest.raises(TooMuchError, match=f"over {driver_files.MAX_MOUNTS} files"):
        found(driver)


# Other files


def test_a_program_is_found_where_the_shell_finds_it_first(driver: Path) -> None:
    add(driver, "/usr/sbin/nvidia-smi", mode=0o755)
    add(driver, "/usr/local/bin/nvidia-smi", mode=0o644)
    paths = mounts(found(driver))
    assert paths["/usr/sbin/nvidia-smi"] == f"{HOST}/usr/sbin/nvidia-smi"
    assert "/usr/bin/nvidia-smi" not in paths
    assert "/usr/local/bin/nvidia-smi" not in paths


def test_settings_have_their_place_in_containers_wherever_the_host_has_them(driver: Path) -> None:
    add(driver, "/etc/glvnd/egl_vendor.d/10_nvidia.json", "/vulkan/icd.d/nvidia_layers.json")
    paths = mounts(found(driver))
    own = "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"
    assert paths[own] == f"{HOST}/etc/glvnd/egl_vendor.d/10_nvidia.json"
    assert paths["/etc/vulkan/icd.d/nvidia_layers.json"] == f"{HOST}/vulkan/icd.d/nvidia_layers.json"
    assert paths["/etc/OpenCL/vendors/nvidia.icd"] == f"{HOST}/etc/OpenCL/vendors/nvidia.icd"


def test_firmware_of_the_version_is_found_also_where_the_kernel_is_set_to_read_it(
    driver: Path,
) -> None:
    add(driver, f"/opt/fw/nvidia/{VERSION}/gsp_new.bin", "/usr/lib/firmware/nvidia/535.1/gsp_old.bin")
    parameter = driver.parent / "sys/module/firmware_class/parameters/path"
    parameter.parent.mkdir(parents=True)
    parameter.write_text("/opt/fw\n")
    firmware = {path for path in mounts(found(driver)) if path.endswith(".bin")}
    assert firmware == {
        f"/opt/fw/nvidia/{VERSION}/gsp_new.bin",
        f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
        f"/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin",
    }


def test_a_socket_that_is_there_is_mounted_as_one(driver: Path) -> None:
    (driver / "tmp/nvidia-mps").mkdir(parents=True)
    sockets = {mount.container_path for mount in found(driver).mounts if mount.options == SOCKET}
    assert sockets == {"/run/nvidia-persistenced/socket", "/tmp/nvidia-mps"}


def test_what_anybody_may_have_put_where_mps_has_its_pipes_is_not_mounted(driver: Path) -> None:
    (driver / "root/secrets").mkdir(parents=True)
    (driver / "tmp").mkdir()
    place = driver / "tmp/nvidia-mps"
    place.symlink_to("/root/secrets")
    assert "/tmp/nvidia-mps" not in mounts(found(driver))
    place.unlink()
    place.mkdir()
    if os.geteuid() == 0:
        os.chown(place, 1000, 1000)
        assert "/tmp/nvidia-mps" not in mounts(found(driver))


def test_sockets_are_left_out_on_demand(driver: Path) -> None:
    assert not [each for each in found(driver, "disable-ipc-discoverer").mounts if each.options == SOCKET]


def test_x_modules_keep_their_path(driver: Path) -> None:
    path = "/usr/lib/xorg/modules/drivers/nvidia_drv.so"
    add(driver, path)
    assert mounts(found(driver))[path] == HOST + path


def test_mounts_for_storage_are_returned_by_themselves(driver: Path) -> None:
    add(driver, "/run/udev/control", "/etc/cufile.json")
    files = found(driver)
    assert {each.container_path for each in files.storage_mounts} == {"/run/udev", "/etc/cufile.json"}
    assert "/etc/cufile.json" not in mounts(files)


# Device nodes


def test_only_nodes_with_one_of_the_drivers_names_are_returned(driver: Path) -> None:
    dev = driver.parent / "dev"
    add(dev, "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-fs0", "gdrdrv", "nvidia0.bak", "sda", "nvidia-x")
    add(dev, "dri/card0", "dri/control", "nvidia-caps/nvidia-cap3", "infiniband/uverbs0", "infiniband/umad0")
    (dev / "nvidia1").mkdir()
    assert sorted(found(driver).nodes) == [
        "/dev/dri/card0",
        "/dev/gdrdrv",
        "/dev/infiniband/uverbs0",
        "/dev/nvidia-caps/nvidia-cap3",
        "/dev/nvidia-fs0",
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        "/dev/nvidiactl",
    ]


@pytest.fixture
def closed_node(driver: Path) -> Path:
    """A character device that only its group may use; skipped where we may not make one."""
    path = driver.parent / "dev/nvidia0"
    try:
        os.mknod(path, 0o020660, os.makedev(1, 3))
        os.chown(path, 0, 44)
        path.chmod(0o660)
    except PermissionError:
        pytest.skip("making device nodes needs root")
    return path


def test_the_group_of_a_closed_node_is_returned(driver: Path, closed_node: Path) -> None:
    assert found(driver).nodes["/dev/nvidia0"].group == 44
    assert found(driver, "no-additional-gids-for-device-nodes").nodes["/dev/nvidia0"].group is None
    closed_node.chmod(0o666)
    assert found(driver).nodes["/dev/nvidia0"].group is None


def test_the_graphics_nodes_of_a_gpu_are_those_the_kernel_made_for_it(tmp_path: Path) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    pci = spec.gpus[1].pci_bus_id
    files = find(places(tmp_path / "driver"), spec.driver_version, (pci, "../../etc"), frozenset())
    assert files.drm[pci].nodes == ("/dev/dri/card1", "/dev/dri/renderD129")
    assert files.drm[pci].links == (
        Link("../card1", f"/dev/dri/by-path/pci-{pci}-card"),
        Link("../renderD129", f"/dev/dri/by-path/pci-{pci}-render"),
    )
    assert files.drm["../../etc"].nodes == ()


def test_a_link_to_the_graphics_node_of_another_gpu_is_left_out(tmp_path: Path) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    pci = spec.gpus[1].pci_bus_id
    link = tmp_path / f"dev/dri/by-path/pci-{pci}-card"
    link.unlink()
    link.symlink_to("../card0")
    files = find(places(tmp_path / "driver"), spec.driver_version, (pci,), frozenset())
    assert [each.path for each in files.drm[pci].links] == [f"/dev/dri/by-path/pci-{pci}-render"]
