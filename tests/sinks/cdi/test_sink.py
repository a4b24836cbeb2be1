"""The CDI sink on a real directory and the driver's installation of the simulated node."""

import asyncio
import contextlib
import json
import logging
import os
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.bus import Latest
from agent.config.settings import Cdi
from agent.core.allocation.cdi_schema import problems_of
from agent.model.facts import CdiReported, Fact, WatchedDirectoryDeleted
from agent.model.gpu import Gpu, MigDevice
from agent.model.health import Health
from agent.model.ids import GpuUuid
from agent.model.policy import Injection, Policy
from agent.model.snapshot import DriverView, GpuView, Snapshot
from agent.model.structs import replace
from agent.simulation.driver_tree import write_driver_tree
from agent.sinks.cdi import sink as sink_module
from agent.sinks.cdi.sink import CdiSink
from tests.sinks.snapshots import snapshot, uuid
from tests.sources.recorder import until

VERSION = "550.54.15"
KIND = "k8s.device-plugin.nvidia.com/gpu"
CRI = Injection(strategies=("cdi-cri",))
U0, U1 = (f"{KIND}={uuid(number)}" for number in range(2))


def gpu(number: int, **changes: Any) -> Gpu:
    made = Gpu(
        uuid=GpuUuid(uuid(number)),
        index=number,
        minor=number,
        name="Tesla T4",
        pci=f"0000:{0x10 + number:02x}:00.0",
        memory_bytes=1,
        compute_capability=None,
        numa_node=None,
    )
    return replace(made, **changes)


def state(*gpus: Gpu, version: str | None = VERSION, **policy: Any) -> Snapshot:
    views = tuple(GpuView(each, Health.HEALTHY, present=True, conditions=(), xids={}) for each in gpus)
    return replace(
        snapshot(),
        gpus=views,
        driver=DriverView(ready=version is not None, driver_version=version),
        policy=Policy(**({"injection": CRI} | policy)),
    )


class Node:
    """A node's directories, and the sink that runs on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "run/cdi"
        self.file = self.directory / "k8s.device-plugin.nvidia.com-gpu.json"
        self.driver = root / "driver"
        write_driver_tree(VERSION, self.driver)
        self.add_nodes("nvidia0", "nvidia1", "nvidiactl")
        self.latest = Latest(state(gpu(0), gpu(1)))
        self.facts: list[Fact] = []
        self.settings = Cdi(
            spec_dir=str(self.directory),
            hook_path=str(self.driver / "usr/bin/nvidia-ctk"),
            driver_root=str(self.driver),
            driver_root_ctr_path=str(root / "nothing"),
            dev_root=str(root),
        )
        self.is_in_container = False
        self.recheck_ns = sink_module.RECHECK_NS
        self.sink = self.make()

    def make(self) -> CdiSink:
        self.sink = CdiSink(
            emit=self.facts.append,
            latest=self.latest,
            settings=self.settings,
            sys_root=str(self.root / "sys"),
            is_in_container=self.is_in_container,
            clock=time.monotonic_ns,
            recheck_ns=self.recheck_ns,
        )
        return self.sink

    def add_nodes(self, *names: str) -> None:
        for name in names:
            path = self.root / "dev" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.file.read_text())
        assert problems_of(document) == ()
        return document

    def names(self) -> set[str]:
        return {device["name"] for device in self.document()["devices"]}

    def resolves(self, *names: str) -> bool:
        return self.sink.missing(names) is None

    async def publish(self, snapshot: Snapshot) -> None:
        self.latest.publish(snapshot)
        await self.sink.settle()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[CdiSink]:
        task = asyncio.get_running_loop().create_task(self.sink.run())
        try:
            await self.sink.settle()
            yield self.sink
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def times(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def is_logged(caplog: pytest.LogCaptureFixture, text: str, count: int) -> bool:
    return times(caplog, text) == count


# Writing


async def test_the_file_is_there_for_every_runtime_to_read(node: Node) -> None:
    old = os.umask(0o077)
    try:
        async with node.running():
            assert node.names() == {uuid(0), uuid(1)}
    finally:
        os.umask(old)
    assert stat.S_IMODE(node.file.stat().st_mode) == 0o644
    assert stat.S_IMODE(node.directory.stat().st_mode) == 0o755
    assert [path.name for path in node.directory.iterdir()] == [node.file.name]


async def test_every_host_path_in_the_file_exists(node: Node) -> None:
    async with node.running():
        document = node.document()
    edits = [document["containerEdits"], *(device["containerEdits"] for device in document["devices"])]
    paths = [
        each["hostPath"] for one in edits for key in ("mounts", "deviceNodes") for each in one.get(key, ())
    ]
    assert len(paths) > 20
    assert [path for path in paths if not os.path.lexists(path)] == []


async def test_without_a_cdi_strategy_nothing_is_read_or_written(node: Node) -> None:
    node.latest.publish(state(gpu(0), injection=Injection()))
    async with node.running() as sink:
        await node.publish(state(gpu(0), gpu(1), injection=Injection()))
        assert not node.directory.exists()
        assert sink.trouble is None
        assert not node.resolves(U0)


async def test_a_strategy_that_comes_with_a_reload_is_followed(node: Node) -> None:
    node.latest.publish(state(gpu(0), injection=Injection()))
    async with node.running():
        await node.publish(state(gpu(0)))
        assert node.resolves(U0)


async def test_the_file_waits_for_the_driver(node: Node) -> None:
    node.latest.publish(state(gpu(0), version=None))
    async with node.running() as sink:
        assert not node.resolves(U0)
        assert sink.trouble is None
        await node.publish(state(gpu(0)))
        assert node.resolves(U0)


async def test_a_driver_that_is_away_for_a_while_changes_nothing(node: Node) -> None:
    async with node.running():
        before = node.file.stat()
        await node.publish(state(gpu(0), gpu(1), version=None))
        assert node.resolves(U0, U1)
        assert node.file.stat() == before


async def test_a_restart_finds_the_file_right_and_leaves_it(node: Node) -> None:
    async with node.running():
        before = node.file.stat()
    node.make()
    async with node.running():
        assert node.resolves(U0, U1)
        assert (node.file.stat().st_ino, node.file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("old", [b"", b"\0" * 100, b"{}", b"x" * 100_000], ids=len)
async def test_what_was_in_the_file_before_is_replaced(node: Node, old: bytes) -> None:
    node.directory.mkdir(parents=True)
    node.file.write_bytes(old)
    async with node.running():
        assert node.names() == {uuid(0), uuid(1)}


async def test_a_link_in_the_files_place_is_replaced_not_followed(node: Node) -> None:
    node.directory.mkdir(parents=True)
    elsewhere = node.root / "elsewhere"
    elsewhere.write_text("precious")
    node.file.symlink_to(elsewhere)
    async with node.running():
        assert not node.file.is_symlink()
        assert elsewhere.read_text() == "precious"


# Changes of the node


async def test_a_gpu_that_comes_has_a_name_before_it_is_answered_with(node: Node) -> None:
    node.latest.publish(state(gpu(0)))
    async with node.running():
        assert not node.resolves(U1)
        await node.publish(state(gpu(0), gpu(1)))
        assert node.resolves(U0, U1)


async def test_a_new_mig_layout_has_new_names(node: Node) -> None:
    node.add_nodes(*(f"nvidia-caps/nvidia-cap{minor}" for minor in (3, 4, 12, 13)))

    def sliced(*parts: tuple[int, int, int]) -> Snapshot:
        migs = tuple(MigDevice(f"MIG-{gi}", gi, 0, "1g.5gb", 1, gi_minor=a, ci_minor=b) for gi, a, b in parts)
        return state(gpu(0, mig_enabled=True, mig_devices=migs), mig_strategy="mixed")

    node.latest.publish(sliced((0, 3, 4)))
    async with node.running():
        assert node.resolves(f"{KIND}=MIG-0")
        await node.publish(sliced((1, 12, 13)))
        assert node.resolves(f"{KIND}=MIG-1")
        assert not node.resolves(f"{KIND}=MIG-0")
        assert node.names() == {"MIG-1"}


async def test_another_driver_version_means_other_libraries(node: Node) -> None:
    async with node.running():
        write_driver_tree("560.1", node.driver)
        await node.publish(state(gpu(0), version="560.1"))
        paths = {mount["containerPath"] for mount in node.document()["containerEdits"]["mounts"]}
    assert "/usr/lib/x86_64-linux-gnu/libcuda.so.560.1" in paths
    assert f"/usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}" not in paths


async def test_the_driver_is_read_again_although_nothing_changed(node: Node) -> None:
    """A daemon's socket that is gone would keep every container from starting."""
    node.recheck_ns = 10_000_000
    node.make()
    socket = node.driver / "run/nvidia-persistenced/socket"
    async with node.running():
        assert str(socket) in node.file.read_text()
        socket.unlink()
        await until(lambda: str(socket) not in node.file.read_text())


# What others do to the file


def delete(node: Node) -> None:
    node.file.unlink()


def replace_it(node: Node) -> None:
    other = node.directory / "other"
    other.write_text('{"cdiVersion": "0.5.0"}')
    other.replace(node.file)


def overwrite(node: Node) -> None:
    node.file.write_text("{}")


def hide(node: Node) -> None:
    node.file.chmod(0o000)


def delete_directory(node: Node) -> None:
    node.file.unlink()
    node.directory.rmdir()


def move_directory(node: Node) -> None:
    node.directory.rename(node.root / "run/old")


HARM = [delete, replace_it, overwrite, hide, delete_directory, move_directory]


@pytest.mark.parametrize("harm", HARM, ids=lambda each: each.__name__)
async def test_a_harmed_file_is_made_anew_by_itself(node: Node, harm: Callable[[Node], None]) -> None:
    async with node.running():
        harm(node)
        # To ask whether names resolve would cause a check.
        await until(lambda: node.file.is_file() and bool(node.file.stat().st_mode & 0o044))
        await until(lambda: node.file.stat().st_size > 100 and node.names() == {uuid(0), uuid(1)})


@pytest.mark.parametrize("harm", HARM, ids=lambda each: each.__name__)
async def test_no_name_resolves_by_a_harmed_file(node: Node, harm: Callable[[Node], None]) -> None:
    async with node.running() as sink:
        assert node.resolves(U0)
        harm(node)
        # Nothing else can have run since.
        assert sink.missing([U0]) == U0
        await sink.settle()
        assert sink.missing([U0]) is None


async def test_a_fight_over_the_file_slows_down(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with node.running() as sink:
        for number in range(1, 4):
            node.file.unlink()
            await until(partial(is_logged, caplog, "again, which was gone", number))
        assert sink._gap_s > sink_module.MIN_GAP_S


async def test_a_device_that_comes_does_not_wait_until_a_fight_is_over(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "MAX_GAP_S", 3_600.0)
    async with node.running() as sink:
        # The file was removed only just now, and many times before that.
        sink._gap_s, sink._written_ns = 3_600.0, time.monotonic_ns()
        node.file.unlink()
        monkeypatch.setattr(sink_module, "SETTLE_S", 0.2)
        await sink.settle()
        monkeypatch.setattr(sink_module, "SETTLE_S", 30.0)
        node.add_nodes("nvidia2")
        await node.publish(state(gpu(0), gpu(1), gpu(2)))
        assert node.resolves(f"{KIND}={uuid(2)}")


async def test_files_of_others_are_left_alone(node: Node) -> None:
    node.directory.mkdir(parents=True)
    other = node.directory / "management.nvidia.com-gpu.yaml"
    other.write_text("kind: management.nvidia.com/gpu")
    async with node.running() as sink:
        assert node.resolves(U0)
        assert sink.trouble is None
    assert other.read_text() == "kind: management.nvidia.com/gpu"


@pytest.mark.parametrize("form", ["json", "yaml"])
async def test_a_file_of_another_that_names_our_devices_makes_them_ambiguous(node: Node, form: str) -> None:
    text = (
        json.dumps({"kind": KIND, "devices": [{"name": uuid(0)}]})
        if form == "json"
        else f"kind: {KIND}\ndevices:\n- name: {uuid(0)}\n"
    )
    other = node.directory / f"old-plugin.{form}"
    async with node.running() as sink:
        other.write_text(text)
        await until(lambda: sink.trouble is not None)
        assert f"{other} names {U0} too" in str(sink.trouble)
        assert not node.resolves(U0)
        assert node.resolves(U1)
        other.unlink()
        await until(lambda: sink.trouble is None)
        assert node.resolves(U0, U1)
    assert [fact.trouble is None for fact in node.facts if isinstance(fact, CdiReported)] == [False, True]


# Trouble


async def test_a_missing_driver_is_reported_with_what_is_missing(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    (node.driver / "usr").rename(node.root / "usr")
    async with node.running() as sink:
        assert "there is no libcuda.so.550.54.15 below" in str(sink.trouble)
        assert not node.resolves(U0)
        (node.root / "usr").rename(node.driver / "usr")
        await sink.settle()
        assert node.resolves(U0)
        assert sink.trouble is None
    assert times(caplog, "Could not write the CDI specification") == 1


async def test_a_rejected_write_is_reported_and_retried(node: Node) -> None:
    node.directory.parent.mkdir()
    node.directory.write_text("a file where the directory should be")
    async with node.running() as sink:
        assert sink.trouble == f"{node.directory}: File exists"
        assert sink.failures >= 1
        node.directory.unlink()
        await sink.settle()
        assert node.resolves(U0)
    assert node.facts == [CdiReported(f"{node.directory}: File exists"), CdiReported(None)]


async def test_a_device_in_no_file_is_reported_with_why_until_it_is_there(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    (node.root / "dev/nvidia1").unlink()
    async with node.running() as sink:
        assert node.resolves(U0)
        assert str(sink.trouble) == (
            f"1 device is in no CDI specification ({uuid(1)}: /dev/nvidia1 does not exist);"
            " run nvidia-modprobe -u -c 0 (or reboot)"
        )
        assert sink.failures == 0
        node.add_nodes("nvidia1")
        await node.publish(replace(node.latest.value, control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm")))
        assert node.resolves(U0, U1)
        assert sink.trouble is None
    assert times(caplog, "The CDI specification: ") == 1


async def test_many_devices_that_are_left_out_are_not_all_named(node: Node) -> None:
    node.latest.publish(state(*map(gpu, range(8))))
    async with node.running() as sink:
        assert str(sink.trouble).startswith("6 devices are in no CDI specification (")
        assert str(sink.trouble).count("does not exist") == sink_module.MAX_NAMED


async def test_a_gpu_that_is_gone_is_not_missed(node: Node) -> None:
    (node.root / "dev/nvidia1").unlink()
    views = node.latest.value.gpus
    node.latest.publish(replace(node.latest.value, gpus=(views[0], replace(views[1], present=False))))
    async with node.running() as sink:
        assert node.resolves(U0)
        assert sink.trouble is None


async def test_a_device_in_no_file_keeps_no_caller_from_waiting_for_another(node: Node) -> None:
    (node.root / "dev/nvidia1").unlink()
    async with node.running() as sink:
        assert sink.trouble is not None
        node.add_nodes("nvidia2", "nvidia3")
        node.latest.publish(state(*map(gpu, range(3))))
        await asyncio.sleep(0)
        await node.publish(state(*map(gpu, range(4))))
        assert node.resolves(f"{KIND}={uuid(2)}", f"{KIND}={uuid(3)}")


async def test_settling_ends_although_the_trouble_does_not(node: Node) -> None:
    (node.driver / "usr").rename(node.root / "usr")
    async with node.running() as sink:
        async with asyncio.timeout(sink_module.SETTLE_S / 2):
            await sink.settle()
        assert sink.failures == 2


async def test_settling_waits_no_longer_than_a_pod_can(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "SETTLE_S", 0.01)
    # Nothing runs that could do the work.
    await node.sink.settle()
    assert not node.resolves(U0)


async def test_a_directory_that_only_a_mount_keeps_alive_is_reported(node: Node) -> None:
    node.directory.mkdir(parents=True)
    descriptor = os.open(node.directory, os.O_RDONLY)
    node.directory.rmdir()
    node.settings = replace(node.settings, spec_dir=f"/proc/self/fd/{descriptor}")
    node.make()
    try:
        async with node.running() as sink:
            assert sink.trouble is not None
    finally:
        os.close(descriptor)
    assert node.facts[:1] == [WatchedDirectoryDeleted(path=f"/proc/self/fd/{descriptor}")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
async def test_a_directory_that_is_made_anew_where_the_agent_may_not_write_is_reported(node: Node) -> None:
    # As in the unit's namespace, where only the directory of the start is writable.
    node.directory.mkdir(parents=True)
    async with node.running():
        assert node.resolves(U0)
        node.directory.rename(node.root / "old")
        node.directory.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", node.directory], check=True)
        try:
            assert not node.resolves(U0)
            await node.sink.settle()
        finally:
            subprocess.run(["umount", "-l", node.directory], check=True)
    assert WatchedDirectoryDeleted(path=str(node.directory)) in node.facts


# Containers


async def test_in_a_container_paths_are_written_as_the_host_has_them(node: Node) -> None:
    node.is_in_container = True
    node.settings = replace(
        node.settings,
        driver_root="/run/nvidia/driver",
        driver_root_ctr_path=str(node.driver),
        dev_root="/run/nvidia/driver",
    )
    (node.root / "dev").rename(node.driver / "dev")
    node.make()
    async with node.running():
        document = node.document()
    assert str(node.root) not in json.dumps(
        [each["containerEdits"]["deviceNodes"] for each in document["devices"]]
    )
    (device, _) = document["devices"]
    assert device["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidia0", "hostPath": "/run/nvidia/driver/dev/nvidia0"}
    ]
    mounts = document["containerEdits"]["mounts"]
    assert {each["hostPath"].startswith("/run/nvidia/driver/") for each in mounts} == {True}
    assert {each["containerPath"].startswith("/run/nvidia/driver/") for each in mounts} == {False}


async def test_in_a_container_without_the_driver_root_the_error_names_what_to_mount(node: Node) -> None:
    node.is_in_container = True
    node.make()
    async with node.running() as sink:
        assert f"is not mounted at {node.root}/nothing" in str(sink.trouble)


@pytest.mark.parametrize(
    ("is_there", "is_in_container", "driver_root", "has_hooks"),
    [
        (True, False, "", True),
        (False, False, "", False),
        (True, True, "/", True),
        (False, True, "/", False),
        # The host's own root is not to be seen then, so the setting is believed.
        (False, True, "/run/nvidia/driver", True),
    ],
)
async def test_hooks_are_there_where_their_program_is(
    node: Node,
    caplog: pytest.LogCaptureFixture,
    *,
    is_there: bool,
    is_in_container: bool,
    driver_root: str,
    has_hooks: bool,
) -> None:
    program = node.driver / "usr/bin/nvidia-ctk"
    if not is_there:
        program.unlink()
    path = str(program) if not is_in_container else "/usr/bin/nvidia-ctk"
    node.is_in_container = is_in_container
    node.settings = replace(
        node.settings,
        hook_path=path,
        driver_root=driver_root or str(node.driver),
        driver_root_ctr_path=str(node.driver),
    )
    node.make()
    async with node.running():
        hooks = node.document()["containerEdits"].get("hooks", ())
    assert bool(hooks) is has_hooks
    assert {hook["path"] for hook in hooks} <= {path}
    assert (times(caplog, "The CDI specification: ") == 0) is has_hooks


# What a node has beside GPUs


async def test_what_is_wanted_beside_gpus_is_absent_or_resolves(node: Node) -> None:
    gds, mofed = "k8s.device-plugin.nvidia.com/gds=all", "k8s.device-plugin.nvidia.com/mofed=all"
    node.add_nodes("nvidia-fs0")
    node.latest.publish(state(gpu(0), injection=replace(CRI, gds=True, mofed=True)))
    async with node.running() as sink:
        assert sink.absent == {mofed}
        assert node.resolves(U0, gds)
        (node.directory / "k8s.device-plugin.nvidia.com-gds.json").unlink()
        assert sink.missing([U0, gds]) == gds
        assert sink.absent == {mofed}


async def test_what_an_operator_may_not_expect_is_logged_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.settings = replace(node.settings, hook_path="/nonexistent/nvidia-ctk")
    node.make()
    async with node.running() as sink:
        node.file.unlink()
        await sink.settle()
    logged = [record for record in caplog.records if "The CDI specification: " in record.getMessage()]
    assert len(logged) == 1


async def test_gpus_are_annotated_as_coherent_or_not_where_that_is_asked_for(node: Node) -> None:
    node.latest.publish(state(gpu(0, coherent=True), gpu(1, coherent=False)))
    node.settings = replace(node.settings, feature_flags=frozenset(("enable-coherent-annotations",)))
    node.make()
    async with node.running():
        assert [device.get("annotations") for device in node.document()["devices"]] == [
            {"gpu.nvidia.com/coherent": "true"},
            {"gpu.nvidia.com/coherent": "false"},
        ]
