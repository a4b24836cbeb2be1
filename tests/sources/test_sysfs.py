"""The sysfs source over the doubles of /sys, /proc and /dev of a simulated node, and over the real ones."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agent.bus import Latest
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.errors import SourceError
from agent.model.facts import (
    SYSFS,
    DeviceNodesSeen,
    DriverModuleSeen,
    GpuRebound,
    PciConfigRead,
    PciGpusSeen,
    UvmProbed,
)
from agent.model.health import Health
from agent.model.ids import GpuUuid
from agent.model.policy import Injection, Policy
from agent.model.snapshot import DriverView, GpuView, Snapshot
from agent.model.structs import replace
from agent.simulation.presets import NodeSpec, load_preset
from agent.simulation.roots import (
    bind_pci_device,
    load_modules,
    remove_device_node,
    remove_pci_device,
    unload_modules,
    write_device_node,
    write_pci_device,
    write_roots,
)
from agent.sources.sysfs import SysfsSource
from agent.sources.sysfs_scan import MAX_GPUS, Exclusions, Roots, driver_of, scan_sysfs
from tests.core.build import gpu, mig_gpu
from tests.sources.recorder import Recorder, until

NEVER_NS = 3_600_000_000_000
"""Scans are requested; the period plays no part."""
SOON_NS = 20_000_000


def empty_snapshot() -> Snapshot:
    return snapshot_of(initial_state(Policy(), None, now_ns=0))


def ready(*minors: int) -> Snapshot:
    """The snapshot while the driver serves GPUs with these minors."""
    views = tuple(
        GpuView(gpu(number, minor=number), Health.HEALTHY, present=True, conditions=(), xids={})
        for number in minors
    )
    return replace(empty_snapshot(), driver=DriverView(ready=True), gpus=views)


class Node:
    """A simulated node under watch."""

    def __init__(self, directory: Path, recorder: Recorder) -> None:
        self.directory = directory
        self.recorder = recorder
        self.spec: NodeSpec = load_preset("4x-t4")
        self.latest = Latest(empty_snapshot())
        self.probed_layouts: list[GpuUuid] = []
        """GPUs whose MIG layout is to be probed."""
        write_roots(self.spec, directory)
        self.source = self.make_source(NEVER_NS)

    def make_source(
        self, period_ns: int, deadline_ns: int = NEVER_NS, *, sees_new_nodes: bool = True, confirm_ns: int = 0
    ) -> SysfsSource:
        return SysfsSource(
            inbox=self.recorder.inbox,
            latest=self.latest,
            sys_root=self.sys,
            proc_root=self.directory / "proc",
            dev_root=self.dev,
            clock=time.monotonic_ns,
            period_ns=period_ns,
            deadline_ns=deadline_ns,
            sees_new_nodes=sees_new_nodes,
            confirm_ns=confirm_ns,
            probe_layout=self.probed_layouts.append,
        )

    @property
    def sys(self) -> Path:
        return self.directory / "sys"

    @property
    def dev(self) -> Path:
        return self.directory / "dev"

    @property
    def pci(self) -> tuple[str, ...]:
        return tuple(gpu.pci_bus_id for gpu in self.spec.gpus)

    async def on_bus(self, *addresses: str) -> None:
        """Wait until the newest fact on the bus is this one."""
        await self.recorder.until(
            lambda: [fact.addresses for fact in self.recorder.of(PciGpusSeen)][-1:] == [addresses]
        )

    async def nodes_missing(self, *paths: str) -> None:
        await self.recorder.until(
            lambda: [fact.missing for fact in self.recorder.of(DeviceNodesSeen)][-1:] == [paths]
        )

    async def module_is(self, inode: int | None) -> None:
        await self.recorder.until(
            lambda: [fact.inode for fact in self.recorder.of(DriverModuleSeen)][-1:] == [inode]
        )

    def module_inode(self) -> int:
        return (self.sys / "module/nvidia").stat().st_ino


@pytest.fixture
async def node(tmp_path: Path, recorder: Recorder) -> AsyncIterator[Node]:
    node = Node(tmp_path, recorder)
    task = asyncio.get_running_loop().create_task(node.source.run(), name="sysfs")
    await node.on_bus(*node.pci)
    yield node
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# The bus


async def test_a_gpu_that_left_the_bus_is_emitted(node: Node) -> None:
    remove_pci_device(node.spec.gpus[1], node.sys)
    node.source.request()
    await node.on_bus(node.pci[0], *node.pci[2:])


async def test_gpus_of_other_drivers_or_of_none_are_not_there(node: Node) -> None:
    for index, driver in enumerate(("vfio-pci", "nouveau", None)):
        bind_pci_device(node.spec.gpus[index], node.sys, driver)
    node.source.request()
    await node.on_bus(node.pci[3])


@pytest.mark.parametrize(
    ("attribute", "value"), [("class", "0x068000"), ("class", "0x040300"), ("vendor", "0x1002")]
)
async def test_other_devices_are_not_gpus(node: Node, attribute: str, value: str) -> None:
    (node.sys / "bus/pci/devices" / node.pci[0] / attribute).write_text(f"{value}\n")
    node.source.request()
    await node.on_bus(*node.pci[1:])


async def test_a_vga_controller_is_a_gpu_and_a_virtual_function_is_none(node: Node) -> None:
    devices = node.sys / "bus/pci/devices"
    (devices / node.pci[0] / "class").write_text("0x030000\n")
    (devices / node.pci[1] / "physfn").symlink_to(devices / node.pci[0])
    node.source.request()
    await node.on_bus(node.pci[0], *node.pci[2:])


async def test_an_unchanged_bus_is_emitted_once(node: Node) -> None:
    remove_pci_device(node.spec.gpus[3], node.sys)
    node.source.request()
    await node.on_bus(*node.pci[:3])
    write_pci_device(node.spec.gpus[3], node.sys)
    node.source.request()
    await node.on_bus(*node.pci)
    assert len(node.recorder.of(PciGpusSeen)) == 3
    assert len(node.recorder.of(DriverModuleSeen)) == 1


async def test_it_scans_periodically(tmp_path: Path, recorder: Recorder) -> None:
    node = Node(tmp_path, recorder)
    task = asyncio.get_running_loop().create_task(node.make_source(SOON_NS).run(), name="sysfs")
    await node.on_bus(*node.pci)
    remove_pci_device(node.spec.gpus[0], node.sys)
    await node.on_bus(*node.pci[1:])
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_gpu_that_was_bound_again_is_emitted_as_reset(node: Node) -> None:
    bind_pci_device(node.spec.gpus[2], node.sys, "nvidia")
    node.source.request()
    assert await node.recorder.first(GpuRebound) == GpuRebound(node.pci[2], bound=True, source=SYSFS)


async def test_a_binding_that_uevents_emitted_is_not_emitted_again(node: Node) -> None:
    bind_pci_device(node.spec.gpus[2], node.sys, "nvidia")
    remove_pci_device(node.spec.gpus[3], node.sys)
    node.source.follow_up()
    await node.on_bus(*node.pci[:3])
    bind_pci_device(node.spec.gpus[1], node.sys, "nvidia")
    node.source.request()
    await node.recorder.first(GpuRebound)
    assert node.recorder.of(GpuRebound) == [GpuRebound(node.pci[1], bound=True, source=SYSFS)]


async def test_a_gpu_that_disappears_and_reappears_is_emitted_both_times(node: Node) -> None:
    remove_pci_device(node.spec.gpus[2], node.sys)
    node.source.request()
    await node.recorder.first(GpuRebound, lambda fact: not fact.bound)
    write_pci_device(node.spec.gpus[2], node.sys)
    node.source.request()
    assert (await node.recorder.first(GpuRebound, lambda fact: fact.bound)).pci == node.pci[2]
    assert len(node.recorder.of(GpuRebound)) == 2


def excluding(node_directory: Path, *, index: int, spec: NodeSpec) -> None:
    driver = node_directory / "proc/driver/nvidia"
    (driver / "params").write_text(f'EnableMSI: 1\nExcludedGpus: "{spec.gpus[index].uuid.upper()}"\n')


async def test_a_gpu_that_the_driver_excludes_does_not_count(node: Node) -> None:
    excluding(node.directory, index=1, spec=node.spec)
    node.source.request()
    await node.on_bus(node.pci[0], *node.pci[2:])


async def test_a_gpu_whose_own_file_marks_it_as_excluded_does_not_count(node: Node) -> None:
    driver = node.directory / "proc/driver/nvidia"
    (driver / "params").write_text('GpuBlacklist: "GPU-00000000-of-an-older-driver"\n')
    (driver / "gpus" / node.pci[3] / "information").write_text("Model: Tesla T4\nBlacklisted: \t Yes\n")
    node.source.request()
    await node.on_bus(*node.pci[:3])


def roots_of(directory: Path, *, strict_nodes: bool = False) -> Roots:
    return Roots(directory / "sys", directory / "proc", directory / "dev", strict_nodes)


def test_the_drivers_file_on_a_gpu_is_read_once_for_each_time_it_is_bound(tmp_path: Path) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    excluding(tmp_path, index=0, spec=spec)
    first = scan_sysfs(roots_of(tmp_path), None, Exclusions())
    assert first.gpus == tuple(gpu.pci_bus_id for gpu in spec.gpus[1:])

    # From now on it cannot be read any more, as with a driver that hangs.
    for information in (tmp_path / "proc/driver/nvidia/gpus").glob("*/information"):
        information.unlink()
    assert scan_sysfs(roots_of(tmp_path), None, first.exclusions).gpus == first.gpus

    bind_pci_device(spec.gpus[0], tmp_path / "sys", "nvidia")
    assert scan_sysfs(roots_of(tmp_path), None, first.exclusions).gpus == tuple(
        g.pci_bus_id for g in spec.gpus
    )


@pytest.mark.parametrize("name", ["vendor", "class", "params"])
def test_gpus_that_the_agent_may_not_read_have_not_left_the_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    (tmp_path / "proc/driver/nvidia/params").touch()
    known = Exclusions("GPU-1")

    def fail(path: Path, flags: int) -> int:
        if path.name == name:
            raise OSError(errno.ENFILE, "Too many open files in system")
        return os_open(path, flags)

    os_open = os.open
    monkeypatch.setattr("agent.sources.sysfs_scan.os.open", fail)
    seen = scan_sysfs(roots_of(tmp_path), None, known)
    assert (seen.gpus, dict(seen.bindings), seen.exclusions) == (None, {}, known)


def test_so_many_gpus_are_read(tmp_path: Path) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    devices = tmp_path / "sys/bus/pci/devices"
    for number in range(MAX_GPUS + 10):
        (devices / f"{0x1000 + number:04x}:00:00.0").symlink_to(devices / spec.gpus[0].pci_bus_id)
    seen = scan_sysfs(roots_of(tmp_path), None, Exclusions())
    assert seen.gpus is not None
    assert len(seen.gpus) == MAX_GPUS


# The module


async def test_a_reloaded_module_is_emitted(node: Node) -> None:
    await node.module_is(node.module_inode())
    load_modules(node.spec, node.sys)
    node.source.request()
    await node.module_is(node.module_inode())
    assert len(node.recorder.of(DriverModuleSeen)) == 2


async def test_an_unloaded_module_is_emitted(node: Node) -> None:
    unload_modules(node.spec, node.sys)
    node.source.request()
    await node.module_is(None)


# Device nodes


async def test_the_nodes_of_the_gpus_that_the_driver_serves_are_checked_at_once(node: Node) -> None:
    remove_device_node("nvidia2", node.dev)
    node.latest.publish(ready(0, 2))
    await node.nodes_missing("/dev/nvidia2")
    write_device_node("nvidia2", node.dev)
    node.source.request()
    await node.nodes_missing()


async def test_a_missing_control_node_is_emitted(node: Node) -> None:
    for name in ("nvidiactl", "nvidia-uvm"):
        remove_device_node(name, node.dev)
    node.latest.publish(ready(0))
    await node.nodes_missing("/dev/nvidiactl", "/dev/nvidia-uvm")


async def test_the_node_of_a_module_that_is_not_loaded_is_not_missed(node: Node) -> None:
    remove_device_node("nvidia-uvm", node.dev)
    (node.sys / "module/nvidia_uvm").rmdir()
    node.latest.publish(ready(0))
    await node.nodes_missing()


def ready_with_a_mig_device(**policy: Any) -> Snapshot:
    """The snapshot while the driver serves a MIG device whose capabilities have minors 12 and 13."""
    whole = mig_gpu(0, (1, 0, "1g.10gb"))
    (mig,) = whole.mig_devices
    whole = replace(whole, mig_devices=(replace(mig, gi_minor=12, ci_minor=13),))
    view = GpuView(whole, Health.HEALTHY, present=True, conditions=(), xids={})
    return replace(empty_snapshot(), driver=DriverView(ready=True), gpus=(view,), policy=Policy(**policy))


@pytest.mark.parametrize(
    "injection", [Injection(strategies=("envvar", "cdi-cri")), Injection(pass_device_specs=True)]
)
async def test_the_nodes_of_mig_devices_are_missed_where_we_give_them_to_containers(
    node: Node, injection: Injection
) -> None:
    write_device_node("nvidia-caps/nvidia-cap12", node.dev)
    node.latest.publish(ready_with_a_mig_device(mig_strategy="mixed", injection=injection))
    await node.nodes_missing("/dev/nvidia-caps/nvidia-cap13")


@pytest.mark.parametrize(
    "policy",
    [
        {"mig_strategy": "mixed", "injection": Injection()},
        {"mig_strategy": "none", "injection": Injection(pass_device_specs=True)},
    ],
    ids=["the runtime creates them", "whole GPUs are advertised"],
)
async def test_the_nodes_of_mig_devices_are_not_missed_elsewhere(node: Node, policy: dict[str, Any]) -> None:
    node.latest.publish(ready_with_a_mig_device(**policy))
    await node.nodes_missing()


@pytest.mark.parametrize(
    ("injection", "is_missed"),
    [(Injection(pass_device_specs=True), False), (Injection(strategies=("cdi-cri",)), True)],
    ids=["the node may have it", "the specification has not"],
)
async def test_a_containers_own_dev_shows_only_what_a_specification_made_of_it_lacks(
    tmp_path: Path, recorder: Recorder, injection: Injection, *, is_missed: bool
) -> None:
    node = Node(tmp_path, recorder)
    node.source = node.make_source(NEVER_NS, sees_new_nodes=False)
    node.latest.publish(ready_with_a_mig_device(mig_strategy="mixed", injection=injection))
    task = asyncio.get_running_loop().create_task(node.source.run(), name="sysfs")
    capabilities = ("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13")
    await node.nodes_missing(*(capabilities if is_missed else ()))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def doubting(node: Node, confirm_ns: int) -> AsyncIterator[None]:
    """A MIG device lacks one of its nodes, and NVML was not polled since."""
    policy: dict[str, Any] = {"mig_strategy": "mixed", "injection": Injection(strategies=("cdi-cri",))}
    node.source = node.make_source(NEVER_NS, confirm_ns=confirm_ns)
    node.latest.publish(ready_with_a_mig_device(**policy))
    write_device_node("nvidia-caps/nvidia-cap12", node.dev)
    task = asyncio.get_running_loop().create_task(node.source.run(), name="sysfs")
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_node_that_went_with_its_mig_device_is_not_missed(tmp_path: Path, recorder: Recorder) -> None:
    node = Node(tmp_path, recorder)
    async with doubting(node, NEVER_NS):
        await until(lambda: bool(node.probed_layouts))
        [view] = node.latest.value.gpus
        assert node.probed_layouts == [view.gpu.uuid]
        bare = replace(view, gpu=replace(view.gpu, mig_devices=()))
        node.latest.publish(replace(node.latest.value, gpus=(bare,)))
        signs = node.source.last_sign_ns
        await until(lambda: node.source.last_sign_ns != signs)
        assert {fact.missing for fact in recorder.of(DeviceNodesSeen)} == {()}


async def test_a_node_is_missed_if_its_mig_device_is_still_there_some_time_later(
    tmp_path: Path, recorder: Recorder
) -> None:
    node = Node(tmp_path, recorder)
    async with doubting(node, SOON_NS):
        await node.nodes_missing("/dev/nvidia-caps/nvidia-cap13")
        first, *later = [fact.missing for fact in recorder.of(DeviceNodesSeen)]
        assert (first, later) == ((), [("/dev/nvidia-caps/nvidia-cap13",)])
        assert len(node.probed_layouts) == 1


async def test_while_a_node_is_missing_it_scans_every_second(tmp_path: Path, recorder: Recorder) -> None:
    node = Node(tmp_path, recorder)
    node.latest.publish(ready(0))
    remove_device_node("nvidia0", node.dev)
    task = asyncio.get_running_loop().create_task(node.source.run(), name="sysfs")
    await node.nodes_missing("/dev/nvidia0")
    write_device_node("nvidia0", node.dev)
    await node.nodes_missing()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_nodes_are_not_checked_while_the_driver_is_unavailable_or_released(node: Node) -> None:
    node.latest.publish(ready(0))
    await node.nodes_missing()
    remove_device_node("nvidia0", node.dev)
    # Another change shows that there was a scan.
    node.latest.publish(replace(ready(0), driver=DriverView(ready=False)))
    remove_pci_device(node.spec.gpus[3], node.sys)
    node.source.request()
    await node.on_bus(*node.pci[:3])
    node.latest.publish(replace(ready(0), released_until_ns=1))
    write_pci_device(node.spec.gpus[3], node.sys)
    node.source.request()
    await node.on_bus(*node.pci)
    unload_modules(node.spec, node.sys)
    node.latest.publish(ready(0))
    await node.module_is(None)
    assert len(node.recorder.of(DeviceNodesSeen)) == 1

    load_modules(node.spec, node.sys)
    node.source.request()
    await node.nodes_missing("/dev/nvidia0")


NODES = ("/dev/nvidia0", "/dev/nvidia1")


def test_below_dev_a_node_is_a_character_device(tmp_path: Path) -> None:
    write_roots(load_preset("4x-t4"), tmp_path)
    (tmp_path / "dev/nvidia1").unlink()
    (tmp_path / "dev/nvidia1").symlink_to("/dev/null")
    strict = scan_sysfs(roots_of(tmp_path, strict_nodes=True), NODES, Exclusions())
    assert strict.missing == ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
    assert scan_sysfs(roots_of(tmp_path), NODES, Exclusions()).missing == ()


def test_a_directory_is_no_node(tmp_path: Path) -> None:
    write_roots(load_preset("4x-t4"), tmp_path)
    (tmp_path / "dev/nvidia1").unlink()
    (tmp_path / "dev/nvidia1").mkdir()
    assert scan_sysfs(roots_of(tmp_path), NODES, Exclusions()).missing == ("/dev/nvidia1",)


# Where nothing can be seen


async def test_what_cannot_be_read_is_not_emitted(tmp_path: Path, recorder: Recorder) -> None:
    node = Node(tmp_path, recorder)
    node.latest.publish(ready(0))
    for root in ("sys", "proc", "dev"):
        (tmp_path / root).rename(tmp_path / f"{root}.away")
    task = asyncio.get_running_loop().create_task(node.source.run(), name="sysfs")
    await asyncio.sleep(0.02)
    for root in ("sys", "proc", "dev"):
        (tmp_path / f"{root}.away").rename(tmp_path / root)
    node.source.request()
    await node.nodes_missing()
    assert [type(fact) for fact in recorder.facts] == [PciGpusSeen, DriverModuleSeen, DeviceNodesSeen]
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_kernel_that_does_not_answer_stops_the_source_and_blocks_one_thread(
    tmp_path: Path, recorder: Recorder
) -> None:
    node = Node(tmp_path, recorder)
    source = node.make_source(NEVER_NS, deadline_ns=SOON_NS)
    vendor = node.sys / "bus/pci/devices" / node.pci[0] / "vendor"
    vendor.unlink()
    os.mkfifo(vendor)  # to open it is to wait for a writer
    for _ in range(3):
        with pytest.raises(SourceError, match=r"Scanning .* did not finish within"):
            await source.run()
    assert [each.name for each in threading.enumerate()].count("sysfs-scan") == 1
    task = asyncio.get_running_loop().create_task(source.run(), name="sysfs")
    vendor.write_text("0x10de\n")
    await node.on_bus(*node.pci)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("config", "answers"),
    [(b"\xde\x10\x30\x23", [True]), (b"\xff" * 64, [False]), (b"\xde", []), (None, [])],
    ids=["answers", "all ones", "cut", "no file"],
)
async def test_the_configuration_space_is_read_when_it_is_asked_for(
    node: Node, config: bytes | None, answers: list[bool]
) -> None:
    pci = node.pci[1]
    if config is not None:
        (node.sys / "bus/pci/devices" / pci / "config").write_bytes(config)
    assert node.recorder.of(PciConfigRead) == []
    node.source.read_config(pci)
    await read_of_no_gpu(node)
    assert [fact.answers for fact in node.recorder.of(PciConfigRead) if fact.pci == pci] == answers


async def test_unified_memory_is_opened_until_that_succeeds_and_never_while_the_driver_is_released(
    node: Node,
) -> None:
    uvm = node.dev / "nvidia-uvm"
    uvm.unlink(missing_ok=True)
    uvm.mkdir()  # cannot be opened as a device, which is no matter of rights
    node.source.probe_uvm()
    await read_of_no_gpu(node)
    assert node.recorder.of(UvmProbed) == []
    node.latest.publish(ready(0))
    await node.recorder.until(lambda: len(node.recorder.of(UvmProbed)) == 1)
    assert node.recorder.of(UvmProbed)[-1].error is not None
    uvm.rmdir()
    uvm.touch()
    node.source.request()
    await node.recorder.until(lambda: node.recorder.of(UvmProbed)[-1].error is None)
    seen = len(node.recorder.of(UvmProbed))
    node.recorder.forget()
    await read_of_no_gpu(node)
    assert seen >= 2
    assert node.recorder.of(UvmProbed) == []


async def read_of_no_gpu(node: Node) -> None:
    """Wait for a scan: a device that is gone does not answer."""
    node.source.read_config("0000:ff:00.0")
    gone = PciConfigRead("0000:ff:00.0", answers=False)
    await node.recorder.until(lambda: gone in node.recorder.of(PciConfigRead))


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_unified_memory_that_cannot_be_opened_by_the_agent_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    write_roots(load_preset("4x-t4"), tmp_path)
    roots = Roots(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev", strict_nodes=False)
    opened = os.open

    def fail(path: str, *arguments: int) -> int:
        if "nvidia-uvm" in str(path):
            raise error(errno.ENOENT if error is FileNotFoundError else errno.EACCES, "no")
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", fail)
    assert scan_sysfs(roots, (), Exclusions(), uvm=True).uvm is None


def test_the_driver_of_a_function_is_read(tmp_path: Path) -> None:
    spec = load_preset("4x-t4")
    write_roots(spec, tmp_path)
    assert driver_of(tmp_path / "sys", spec.gpus[0].pci_bus_id) == "nvidia"
    assert driver_of(tmp_path / "sys", "0000:ff:00.0") is None


async def test_the_real_roots_can_be_scanned(recorder: Recorder) -> None:
    if not Path("/sys/bus/pci/devices").is_dir():
        pytest.skip("this machine shows no PCI bus under /sys")
    source = SysfsSource(
        inbox=recorder.inbox,
        latest=Latest(empty_snapshot()),
        sys_root=Path("/sys"),
        proc_root=Path("/proc"),
        dev_root=Path("/dev"),
        clock=time.monotonic_ns,
    )
    task = asyncio.get_running_loop().create_task(source.run(), name="sysfs")
    seen = await recorder.first(PciGpusSeen)
    assert all(driver_of(Path("/sys"), pci) == "nvidia" for pci in seen.addresses)
    module = await recorder.first(DriverModuleSeen)
    assert (module.inode is None) == (not Path("/sys/module/nvidia").exists())
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
