"""What a container is given for the devices it was allocated.

Invariants: answers come from the snapshot alone, no driver call and no file is touched. The values
do not depend on the order of the request, which the kubelet shuffles. A refusal is read by the
pod's owner, so it names the device and the next step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agent.core.reasons import advice_of
from agent.model.health import Health
from agent.model.snapshot import Device, Resource, Snapshot

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node to be put into the container."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class ContainerAnswer:
    """What one container gets."""

    envs: Mapping[str, str]
    device_nodes: tuple[DeviceNode, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request cannot be met."""

    kind: Literal["unknown", "unhealthy", "unsatisfiable"]
    message: str


def allocate(snapshot: Snapshot, resource: Resource, ids: Sequence[str]) -> ContainerAnswer | Refusal:
    """Return what a container gets for the devices ``ids`` (duplicates are one)."""
    devices = find_devices(resource, ids)
    if isinstance(devices, Refusal):
        return devices
    for device in devices:
        if device.health is not Health.HEALTHY:
            return Refusal("unhealthy", _unhealthy_message(device))
    devices.sort(key=container_order)
    uuids = dict.fromkeys(device.uuid for device in devices)
    return ContainerAnswer(
        envs={VISIBLE_DEVICES: ",".join(uuids)},
        device_nodes=_device_nodes(snapshot, devices) if snapshot.policy.injection.pass_device_specs else (),
    )


def find_devices(resource: Resource, ids: Sequence[str]) -> list[Device] | Refusal:
    """Return the devices of ``ids`` in the order asked for, duplicates once, or name the unknown ones."""
    known: dict[str, Device] = {device.id: device for device in resource.devices}
    unknown = [wanted for wanted in dict.fromkeys(ids) if wanted not in known]
    if unknown:
        return Refusal(
            "unknown",
            f"invalid request: unknown device: {', '.join(_shown(name) for name in unknown[:4])} is not a"
            f" device of {resource.name} on this node; delete the pod so that it is allocated anew",
        )
    return [known[wanted] for wanted in dict.fromkeys(ids)]


def _shown(name: str) -> str:
    """Return an id from outside so that it can stand in a message: short, and printable."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= 64 else text[:61] + "..."


def _unhealthy_message(device: Device) -> str:
    if not device.reasons:
        return f"{device.id} has not been probed yet, so it is not known to work; try again in a moment"
    condition = device.reasons[0]
    return (
        f"{device.id} (GPU {device.index}) is unhealthy: {condition.reason}: {condition.message};"
        f" {advice_of(condition)}, or delete the pod so that it is allocated anew"
    )


def container_order(device: Device) -> tuple[int, int, int, int]:
    """Return where ``device`` stands in the stable order: GPU, GPU instance, compute instance, replica."""
    placement = device.placement
    return (device.index, placement.gi, placement.ci, device.replica or 0)


def _device_nodes(snapshot: Snapshot, devices: Sequence[Device]) -> tuple[DeviceNode, ...]:
    minors = {view.gpu.uuid: view.gpu.minor for view in snapshot.gpus}
    own = (minors.get(device.placement.gpu) for device in devices)
    paths = (*snapshot.control_nodes, *(f"/dev/nvidia{minor}" for minor in own if minor is not None))
    root = snapshot.policy.injection.device_root.rstrip("/")
    return tuple(DeviceNode(container_path=path, host_path=root + path) for path in dict.fromkeys(paths))
