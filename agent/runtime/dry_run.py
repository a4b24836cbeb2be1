"""Answers Allocate without a kubelet: what a container would get, for devices named the way people do.

Guarantees: nothing is allocated, registered or changed. A rejection has the words that the kubelet would
get, but for an unknown device: no pod was given that one, the caller mistyped it. CDI names are returned as
the kubelet would get them, without a check against spec files.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from agent.core.allocation.injection import ContainerAnswer, DeviceNode, Mount, name_in_container
from agent.core.allocation.requests import Rejection, allocate, shown
from agent.errors import AgentError, UsageError
from agent.model.ids import GpuUuid
from agent.model.policy import Injection
from agent.model.snapshot import Device, Resource, Snapshot
from agent.model.structs import replace

Json = dict[str, Any]

MAX_IDS: Final = 1_024
"""Devices asked for; a node with 16 GPUs of 48 shares has 768."""
MAX_NAMED: Final = 4
"""Devices that an error names to a caller that named an unknown one."""
ANNOTATION_ID: Final = "00000000-0000-4000-8000-000000000000"
"""Stands for the random UUID of a CDI annotation's key."""


def dry_run(snapshot: Snapshot, words: Sequence[str], *, resource: str | None = None) -> Json:
    """Return the AllocateResponse for devices by id, or shorter: ``0``, ``0:1``, ``0::2``, a UUID.

    Without a share's number, the next one of that device is meant. The resource is that of the first
    device that is known. Raises AgentError with a rejection, UsageError for what is no request.
    """
    if not 1 <= len(words) <= MAX_IDS:
        raise UsageError(f"Name 1 to {MAX_IDS} devices, by id, UUID or index")
    advertised = [each for each in snapshot.resources if resource in {None, each.name}]
    if not advertised:
        names = ", ".join(each.name for each in snapshot.resources) or "none"
        error = AgentError if resource is None else UsageError
        raise error(f"This node does not advertise {resource or 'any device'}; advertised: {names}")
    lookup = _DeviceLookup(advertised, {view.gpu.uuid for view in snapshot.gpus if view.present})
    ids = [lookup.id_of(word) for word in words]
    of = lookup.resource or advertised[0]
    known = {device.id for device in of.devices}
    unknown = next((word for word, device_id in zip(words, ids, strict=True) if device_id not in known), None)
    if unknown is not None:
        raise UsageError(lookup.divided(unknown) or _unknown(unknown, lookup.short_names(of), of))
    answer = allocate(snapshot, of, ids, annotation_id=ANNOTATION_ID)
    if isinstance(answer, Rejection):
        raise AgentError(answer.message)
    return allocate_response(answer)


def _unknown(word: str, names: Sequence[str], resource: Resource) -> str:
    some = ", ".join(names[:MAX_NAMED]) or "none"
    more = ", ..." if len(names) > MAX_NAMED else ""
    return (
        f"{shown(word)} is not a device of {resource.name} on this node, which has {some}{more};"
        " gpu-agent devices lists their ids"
    )


def with_injection(snapshot: Snapshot, changes: Mapping[str, object]) -> Snapshot:
    """Return the snapshot with some of the policy's ``Injection`` changed; raises UsageError."""
    unknown = sorted(changes.keys() - Injection.__struct_fields__)
    if unknown:
        raise UsageError(f"Unknown in an injection: {', '.join(str(name)[:40] for name in unknown[:8])}")
    try:
        injection = msgspec.convert(
            msgspec.structs.asdict(snapshot.policy.injection) | dict(changes), Injection
        )
    except msgspec.ValidationError as error:
        raise UsageError(f"The injection is wrong: {error}") from None
    return replace(snapshot, policy=replace(snapshot.policy, injection=injection))


class _DeviceLookup:
    """Finds the devices that words mean, each share once."""

    def __init__(self, advertised: Iterable[Resource], present: Collection[GpuUuid]) -> None:
        self._present = present
        """GPUs that NVML lists: another one may have the index now that a lost one had."""
        self.resource: Resource | None = None
        """Of the first device that is known."""
        self._chosen: set[str] = set()
        self._devices: dict[str, list[tuple[Resource, Device]]] = {}
        for resource in advertised:
            for device in resource.devices:
                for name in self._names(device):
                    self._devices.setdefault(name, []).append((resource, device))

    def id_of(self, word: str) -> str:
        """Return the id of the device that a word means; the word itself if it means none."""
        found = self._devices.get(word, ())
        resource, device = next(
            ((of, one) for of, one in found if one.id not in self._chosen),
            found[0] if found else (None, None),
        )
        if device is not None and device.id in self._chosen and len(found) > 1:
            raise UsageError(f"{shown(word)} has {len(found)} shares, and more were asked for")
        if resource is None or device is None:
            return word
        self._chosen.add(device.id)
        self.resource = self.resource or resource
        return device.id

    def divided(self, word: str) -> str | None:
        """Return the error for a GPU that is advertised in parts; None: this is none."""
        parts = [name for name in self._devices if name.startswith(f"{word}:") and "::" not in name]
        if not parts:
            return None
        some = ", ".join(parts[:MAX_NAMED]) + (", ..." if len(parts) > MAX_NAMED else "")
        return f"GPU {word} is divided into MIG devices, of which one is meant: {some}"

    def short_names(self, resource: Resource) -> list[str]:
        """Return what the devices of a resource are called for short."""
        return [list(self._names(device))[-1] for device in resource.devices]

    def _names(self, device: Device) -> Iterator[str]:
        """Yield what a device is called: by UUID and by index, without the share and with it."""
        names = [str(device.uuid)]
        if device.placement.gpu in self._present:
            names.append(name_in_container(device, "index"))
        for name in names:
            yield name
            if device.replica is not None:
                yield f"{name}::{device.replica}"


def allocate_response(*answers: ContainerAnswer) -> Json:
    """Return an AllocateResponse."""
    return {"containerResponses": [_container(answer) for answer in answers]}


def _container(answer: ContainerAnswer) -> Json:
    fields: Json = {
        "envs": dict(answer.envs),
        "mounts": [_mount(mount) for mount in answer.mounts],
        "devices": [_device_spec(node) for node in answer.device_nodes],
        "annotations": dict(answer.annotations),
        "cdiDevices": [{"name": name} for name in answer.cdi_devices],
    }
    return {name: value for name, value in fields.items() if value}


def _mount(mount: Mount) -> Json:
    document: Json = {"containerPath": mount.container_path, "hostPath": mount.host_path}
    return document | {"readOnly": True} if mount.read_only else document


def _device_spec(node: DeviceNode) -> Json:
    return {
        "containerPath": node.container_path,
        "hostPath": node.host_path,
        "permissions": node.permissions,
    }
