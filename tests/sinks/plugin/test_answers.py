"""What a pod's container gets of the device plugin, as a kubelet on another gRPC and protobuf reads it."""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.model.health import Condition, ConditionKey, Evidence, Health, Reason, Recovery
from agent.model.ids import ResourceName, SourceName
from agent.model.policy import DeviceListStrategy, Injection, Policy
from agent.model.snapshot import Device, Snapshot
from agent.model.structs import replace
from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.kubelet.records import ContainerOutcome, DeviceSpecView, MountView, PodOutcome
from tests.sinks.servers import Sink, sink
from tests.sinks.snapshots import GPU, devices, resource, snapshot

PATIENCE_S = 60.0
ANNOTATION = re.compile(
    r"cdi\.k8s\.io/nvidia-device-plugin_[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
)
ANNOTATION_ID = "6f1c1a52-8d5e-4d4b-9a51-0d7f3c1b2a90"
U0 = "GPU-00000000-0000-4000-8000-000000000000"
U1 = "GPU-00000000-0000-4000-8000-000000000001"
CDI_0 = "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000"
CDI_1 = "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000001"
GDS = "k8s.device-plugin.nvidia.com/gds=all"


@dataclass
class Specs:
    """Spec files that resolve some names."""

    resolved: set[str] = field(default_factory=lambda: {CDI_0, CDI_1})
    absent: frozenset[str] = frozenset()

    async def settle(self) -> None:
        """Nothing is being written."""

    def missing(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name not in self.resolved), None)


def two_gpus(injection: Injection | None = None, **policy: Any) -> Snapshot:
    advertised = snapshot(resource(devices(2)))
    return replace(advertised, policy=Policy(injection=injection or Injection(), **policy))


@dataclass
class Served:
    """A kubelet with the sink registered to it."""

    kubelet: EmulatedKubelet
    sink: Sink
    pods: int = 0

    async def run_pod(self, gpus: int = 2, *, resource: ResourceName = GPU) -> PodOutcome:
        self.pods += 1
        return await self.kubelet.run_pod(f"job-{self.pods}", "ns1", {"main": {resource: gpus}})

    async def container(self, gpus: int = 2) -> ContainerOutcome:
        pod = await self.run_pod(gpus)
        assert pod.running, pod.message
        return pod.containers["main"]


@asynccontextmanager
async def served(directory: Path, state: Snapshot, specs: Specs | None = None) -> AsyncIterator[Served]:
    async with (
        EmulatedKubelet(directory / "dp", directory / "pr") as kubelet,
        sink(directory / "dp", state=state, cdi=specs) as plugin,
    ):
        plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 2, PATIENCE_S)
        yield Served(kubelet, plugin)


def masked(annotations: Mapping[str, str]) -> dict[str, str]:
    assert all(ANNOTATION.fullmatch(key) for key in annotations), annotations
    return {f"{key[: -len(ANNOTATION_ID)]}<uuid4>": value for key, value in annotations.items()}


BOTH = f"{CDI_0},{CDI_1}"
MASKED = "cdi.k8s.io/nvidia-device-plugin_<uuid4>"
MOUNTS = (
    MountView(f"/var/run/nvidia-container-devices/{U0}", "/dev/null", read_only=False),
    MountView(f"/var/run/nvidia-container-devices/{U1}", "/dev/null", read_only=False),
)
REASON_SPECS = (
    DeviceSpecView("/dev/nvidiactl", "/run/nvidia/driver/dev/nvidiactl", "rw"),
    DeviceSpecView("/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0", "rw"),
    DeviceSpecView("/dev/nvidia1", "/run/nvidia/driver/dev/nvidia1", "rw"),
)


@pytest.mark.parametrize(
    ("strategies", "envs", "mounts", "specs", "annotations", "cdi"),
    [
        (("envvar",), {"NVIDIA_VISIBLE_DEVICES": f"{U0},{U1}"}, (), REASON_SPECS, {}, ()),
        (
            ("volume-mounts",),
            {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
            MOUNTS,
            REASON_SPECS,
            {},
            (),
        ),
        (("cdi-annotations",), {}, (), (), {MASKED: BOTH}, ()),
        (("cdi-cri",), {}, (), (), {}, (CDI_0, CDI_1)),
        (
            ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"),
            {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
            MOUNTS,
            REASON_SPECS,
            {MASKED: BOTH},
            (CDI_0, CDI_1),
        ),
    ],
    ids=["envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "all"],
)
async def test_a_container_gets_its_devices_by_the_strategies_of_the_operator(
    tmp_path: Path,
    strategies: tuple[DeviceListStrategy, ...],
    envs: dict[str, str],
    mounts: tuple[MountView, ...],
    specs: tuple[DeviceSpecView, ...],
    annotations: dict[str, str],
    cdi: tuple[str, ...],
) -> None:
    injection = Injection(strategies=strategies, pass_device_specs=True, device_root="/run/nvidia/driver")
    async with served(tmp_path, two_gpus(injection), Specs()) as node:
        got = await node.container()
    assert got == ContainerOutcome(
        devices={GPU: (U0, U1)},
        envs=envs,
        annotations=got.annotations,
        mounts=mounts,
        device_specs=specs,
        cdi_devices=cdi,
        health=got.health,
    )
    assert masked(got.annotations) == annotations


async def test_each_container_has_an_annotation_of_its_own(tmp_path: Path) -> None:
    async with served(tmp_path, two_gpus(Injection(strategies=("cdi-annotations",))), Specs()) as node:
        first, second = await node.container(1), await node.container(1)
    assert not first.annotations.keys() & second.annotations.keys()


# CDI names that nothing resolves

CRI = Injection(strategies=("cdi-cri",))


async def test_a_name_that_no_spec_file_resolves_is_rejected_and_named(tmp_path: Path) -> None:
    specs = Specs()
    async with served(tmp_path, two_gpus(CRI), specs) as node:
        specs.resolved.remove(CDI_1)
        pod = await node.run_pod()
        assert pod.phase == "Failed"
        assert f"no CDI spec file on this node resolves {CDI_1}, so the container could" in pod.message
        assert "delete the pod" in pod.message
        assert node.sink.plugin.services[GPU].answers.rejections == {"missing": 1}
        specs.resolved.add(CDI_1)
        assert (await node.container()).cdi_devices == (CDI_0, CDI_1)


async def test_a_name_in_an_annotation_has_to_be_resolved_too(tmp_path: Path) -> None:
    async with served(
        tmp_path, two_gpus(Injection(strategies=("envvar", "cdi-annotations"))), Specs(set())
    ) as node:
        assert CDI_0 in (await node.run_pod()).message


async def test_without_anything_that_writes_spec_files_nothing_is_resolved(tmp_path: Path) -> None:
    async with served(tmp_path, two_gpus(CRI)) as node:
        assert CDI_0 in (await node.run_pod()).message


async def test_without_cdi_no_spec_file_is_needed(tmp_path: Path) -> None:
    async with served(tmp_path, two_gpus(), Specs(set())) as node:
        assert (await node.container()).envs == {"NVIDIA_VISIBLE_DEVICES": f"{U0},{U1}"}


@pytest.mark.parametrize("is_there", [True, False])
async def test_what_the_node_does_not_have_beside_gpus_is_left_out(tmp_path: Path, *, is_there: bool) -> None:
    specs = Specs({CDI_0, CDI_1, GDS}) if is_there else Specs(absent=frozenset({GDS}))
    async with served(tmp_path, two_gpus(replace(CRI, gds=True)), specs) as node:
        got = await node.container()
    assert got.cdi_devices == ((CDI_0, CDI_1, GDS) if is_there else (CDI_0, CDI_1))


async def test_what_the_node_has_beside_gpus_is_not_left_out_because_its_file_is_gone(tmp_path: Path) -> None:
    async with served(tmp_path, two_gpus(replace(CRI, gds=True)), Specs()) as node:
        assert GDS in (await node.run_pod()).message


# Before a container starts


def broken(device: Device, evidence: Evidence) -> Device:
    condition = Condition(
        key=ConditionKey(SourceName("nvml"), Reason.XID, device.placement, 79),
        evidence=evidence,
        recovery=Recovery.RESET,
        flips=True,
        message="XID 79: GPU has fallen off the bus",
        since_ns=1,
        last_ns=1,
    )
    return replace(device, health=Health.UNHEALTHY, reasons=(condition,))


class BreaksAfterAllocate(Specs):
    """Spec files that resolve everything; checking there is the last thing that Allocate does."""

    def __init__(self, evidence: Evidence) -> None:
        super().__init__()
        self.evidence = evidence
        self.sink: Sink | None = None

    def missing(self, names: Sequence[str]) -> str | None:
        assert self.sink is not None
        state = self.sink.latest.value
        unhealthy = [broken(each, self.evidence) for each in state.resources[0].devices]
        self.sink.latest.publish(replace(state, resources=(resource(unhealthy),)))
        return super().missing(names)


@pytest.mark.parametrize(
    ("is_checked", "evidence", "is_rejected"),
    [
        (True, Evidence.HARD, True),
        (True, Evidence.SOFT, False),
        (False, Evidence.HARD, False),
    ],
)
async def test_a_container_does_not_start_on_a_device_that_broke_meanwhile(
    tmp_path: Path, evidence: Evidence, *, is_checked: bool, is_rejected: bool
) -> None:
    specs = BreaksAfterAllocate(evidence)
    async with served(tmp_path, two_gpus(CRI, pre_start_check=is_checked), specs) as node:
        specs.sink = node.sink
        pod = await node.run_pod(1)
        service = node.sink.plugin.services[GPU]
    assert pod.phase == ("Pending" if is_rejected else "Running")
    assert service.pre_starts == (1 if is_checked and not is_rejected else 0)
    assert service.answers.rejections == ({"unhealthy": 1} if is_rejected else {})
    if is_rejected:
        assert pod.reason == "CreateContainerConfigError"
        assert "(GPU 0) failed after it was allocated: xid: XID 79: GPU has fallen off the bus" in pod.message


async def test_a_resource_that_is_gone_keeps_no_container_from_starting(tmp_path: Path) -> None:
    class Withdraws(BreaksAfterAllocate):
        def missing(self, names: Sequence[str]) -> str | None:
            assert self.sink is not None
            self.sink.latest.publish(replace(self.sink.latest.value, resources=()))
            return super(BreaksAfterAllocate, self).missing(names)

    specs = Withdraws(Evidence.HARD)
    async with served(tmp_path, two_gpus(CRI, pre_start_check=True), specs) as node:
        specs.sink = node.sink
        assert (await node.run_pod(1)).running
