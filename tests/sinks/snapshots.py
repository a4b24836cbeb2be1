"""Snapshots with devices to advertise, as short as a test wants them."""

from collections.abc import Iterable, Sequence

from agent.model.gpu import Gpu
from agent.model.health import Health
from agent.model.ids import DeviceId, GpuUuid, Placement, ResourceName
from agent.model.policy import Injection, Policy
from agent.model.snapshot import (
    Device,
    DriverView,
    Durable,
    GpuView,
    RegistrationPhase,
    Resource,
    Snapshot,
)

GPU = ResourceName("nvidia.com/gpu")


def uuid(number: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{number:012d}"


def device(number: int, *, health: Health = Health.HEALTHY, numa_node: int | None = 0) -> Device:
    name = uuid(number)
    return Device(
        id=DeviceId(name),
        uuid=name,
        placement=Placement(GpuUuid(name)),
        index=number,
        replica=None,
        numa_node=numa_node,
        health=health,
    )


def devices(count: int, *, unhealthy: Iterable[int] = ()) -> tuple[Device, ...]:
    numbers = set(unhealthy)
    return tuple(
        device(number, health=Health.UNHEALTHY if number in numbers else Health.HEALTHY, numa_node=number % 2)
        for number in range(count)
    )


def resource(advertised: Sequence[Device], *, name: ResourceName = GPU) -> Resource:
    return Resource(
        name=name,
        devices=tuple(advertised),
        phase=RegistrationPhase.REGISTERING,
        generation=1,
        message="",
        since_ns=0,
        socket=None,
    )


def snapshot(*resources: Resource, at_ns: int = 0, pass_device_specs: bool = False) -> Snapshot:
    gpus = tuple(_view(number) for number in range(8))
    return Snapshot(
        at_ns=at_ns,
        policy=Policy(injection=Injection(pass_device_specs=pass_device_specs)),
        driver=DriverView(),
        kubelet=None,
        gpus=gpus,
        resources=resources,
        control_nodes=("/dev/nvidiactl",),
        tasks={},
        facts_lost={},
        findings=(),
        durable=Durable(),
    )


def node(count: int = 8, *, unhealthy: Iterable[int] = (), at_ns: int = 0) -> Snapshot:
    """A node with ``count`` whole GPUs."""
    return snapshot(resource(devices(count, unhealthy=unhealthy)), at_ns=at_ns)


def _view(number: int) -> GpuView:
    gpu = Gpu(
        uuid=GpuUuid(uuid(number)),
        index=number,
        minor=number,
        name="Simulated GPU",
        pci=f"0000:{number:02x}:00.0",
        memory_bytes=2**36,
        compute_capability=(9, 0),
        numa_node=number % 2,
    )
    return GpuView(gpu=gpu, health=Health.HEALTHY, present=True, conditions=(), xids={})
