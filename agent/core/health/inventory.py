"""Which devices are advertised under which resource name, from the GPUs that are known.

Invariants: ids are stable over restarts (NVML UUIDs). The order is stable also when a GPU is lost
and the others' indexes move: by PCI address, GPU instance, compute instance, replica. A resource
that was advertised once stays, with an empty list, so that the kubelet forgets its devices at once.
So does one whose list the kubelet would not take: it is never made, however many replicas are configured.
A device is advertised under one name. A device that exists and is not advertised is reported with its reason.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from agent.core.allocation.list_size import MAX_LIST_BYTES, device_bytes, replicas_bytes
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import DeviceId, GpuUuid, Placement, ResourceName, replica_id
from agent.model.policy import Policy
from agent.model.sharing import SHARED_SUFFIX, Share, Sharing

PREFIX = "nvidia.com/"
GPU_RESOURCE = ResourceName(PREFIX + "gpu")

_MAX_DEVICE_BYTES: Final = 320
"""More than any device takes in a list, whose id has at most 256 bytes."""

_SMALLER_THAN_ITS_INSTANCE: Final = re.compile(r"\d+c\.")
"""How the profile of a compute instance begins that has not all the slices of its GPU instance."""


class AdvertisedDevice(msgspec.Struct, frozen=True):
    """A device before its health is known."""

    id: DeviceId
    uuid: str
    placement: Placement
    index: int
    replica: int | None
    numa_node: int | None
    mig_index: int | None = None
    """NVML's index of the MIG device on its GPU; None: a whole GPU."""


class Unadvertised(StrEnum):
    """Why a device of a GPU is not advertised, or not as the policy requests."""

    PROFILE = "A MIG device with less compute than its GPU instance is not advertised"
    NO_MIG_DEVICE = "A GPU in MIG mode without a MIG device is not advertised"
    MIG_UNDER_MPS = "MIG devices are advertised unshared, because MPS cannot share them"
    TOO_MANY_REPLICAS = "A GPU is not advertised, because MPS cannot serve so many replicas"


class UnadvertisedDevice(NamedTuple):
    """A device that is not advertised, and why."""

    gpu: GpuUuid
    why: Unadvertised
    detail: str = ""
    """The profile, or the figures; empty where there is nothing to add."""


class _Part(NamedTuple):
    """A GPU or a MIG device, under the name that it has unshared."""

    gpu: Gpu
    place: int
    mig: MigDevice | None
    name: ResourceName


class _Planned(NamedTuple):
    """Devices that a part makes; ``replicas`` None: it is not shared, so itself."""

    part: _Part
    replicas: int | None

    @property
    def uuid(self) -> str:
        return self.part.gpu.uuid if self.part.mig is None else self.part.mig.uuid

    @property
    def list_bytes(self) -> int:
        numa_node = self.part.gpu.numa_node
        if self.replicas is None:
            return device_bytes(len(self.uuid), numa_node)
        return replicas_bytes(len(self.uuid), numa_node, self.replicas)


class Oversized(NamedTuple):
    """A resource whose list the kubelet would not take."""

    resource: ResourceName
    devices: int
    list_bytes: int

    @property
    def message(self) -> str:
        """The sentence on it."""
        return (
            f"{self.resource} would have {self.devices} devices, whose list takes up to {self.list_bytes}"
            f" bytes, and the kubelet takes {MAX_LIST_BYTES}; configure fewer replicas"
        )


AdvertisedDevices = Mapping[ResourceName, tuple[AdvertisedDevice, ...]]


def advertised_devices(gpus: Iterable[Gpu], policy: Policy, before: AdvertisedDevices) -> AdvertisedDevices:
    """Return the devices of each resource, in wire order; what did not change is the same object."""
    known = tuple(gpus)
    planned = _plan(known, policy)
    for each in _oversized(planned):
        planned[each.resource] = []
    listed: dict[ResourceName, list[AdvertisedDevice]] = {
        name: [] for name in (*before, *sorted(unfit(known, policy)))
    }
    for name, parts in planned.items():
        listed[name] = [device for each in parts for device in _advertised_of(each)]
    return {name: _same_if_equal(before.get(name), tuple(devices)) for name, devices in listed.items()}


def oversized(gpus: Iterable[Gpu], policy: Policy) -> tuple[Oversized, ...]:
    """Return the resources of a policy whose list the kubelet would not take."""
    most = max((share.replicas for share in policy.sharing.shares), default=1)
    known = tuple(gpus)
    parts = sum(max(1, len(gpu.mig_devices)) for gpu in known)
    if parts * most * _MAX_DEVICE_BYTES <= MAX_LIST_BYTES:
        # A snapshot is made at each change, and hardly any is near.
        return ()
    return tuple(_oversized(_plan(known, policy)))


def _oversized(planned: Mapping[ResourceName, Iterable[_Planned]]) -> list[Oversized]:
    found = []
    for name, parts in planned.items():
        list_bytes = sum(each.list_bytes for each in parts)
        if list_bytes > MAX_LIST_BYTES:
            devices = sum(1 if each.replicas is None else each.replicas for each in parts)
            found.append(Oversized(name, devices, list_bytes))
    return found


def _plan(gpus: Iterable[Gpu], policy: Policy) -> dict[ResourceName, list[_Planned]]:
    """Return what each resource is made of, in wire order."""
    planned: dict[ResourceName, list[_Planned]] = {}
    for part in _parts(gpus, policy):
        share = share_of(policy.sharing, part.name, part.gpu, part.place)
        obstacle = None if share is None else _obstacle(part, share, policy)
        if obstacle is Unadvertised.TOO_MANY_REPLICAS:
            continue
        if share is None or obstacle is Unadvertised.MIG_UNDER_MPS:
            planned.setdefault(part.name, []).append(_Planned(part, None))
        else:
            name = shared_name(policy.sharing, part.name)
            planned.setdefault(name, []).append(_Planned(part, share.replicas))
    return planned


def _same_if_equal(
    before: tuple[AdvertisedDevice, ...] | None, now: tuple[AdvertisedDevice, ...]
) -> tuple[AdvertisedDevice, ...]:
    return before if before is not None and before == now else now


def _parts(gpus: Iterable[Gpu], policy: Policy) -> Iterator[_Part]:
    """Yield what the MIG strategy makes of the GPUs."""
    ordered = sorted(gpus, key=lambda gpu: (gpu.pci, gpu.index))
    if mixed_profiles(ordered, policy):
        return
    for place, gpu in enumerate(ordered):
        if policy.mig_strategy == "none" or not gpu.mig_enabled:
            yield _Part(gpu, place, None, GPU_RESOURCE)
            continue
        for mig in sorted(gpu.mig_devices, key=lambda mig: (mig.gi, mig.ci)):
            if policy.mig_strategy == "single" or not _is_nameless(mig):
                yield _Part(gpu, place, mig, mig_resource(mig.profile, policy))


def _is_nameless(mig: MigDevice) -> bool:
    """Whether no resource of strategy ``mixed`` is named after a MIG device.

    Source: NVIDIA/k8s-device-plugin:api/config/v1/resources.go, only profiles with all compute slices.
    """
    return _SMALLER_THAN_ITS_INSTANCE.match(mig.profile) is not None


def _obstacle(part: _Part, share: Share, policy: Policy) -> Unadvertised | None:
    """Return what stands against sharing a device; only MPS has limits."""
    if policy.sharing.strategy != "mps":
        return None
    if part.mig is not None:
        return Unadvertised.MIG_UNDER_MPS
    return Unadvertised.TOO_MANY_REPLICAS if share.replicas > mps_clients(part.gpu) else None


def _advertised_of(planned: _Planned) -> Iterator[AdvertisedDevice]:
    gpu, mig = planned.part.gpu, planned.part.mig
    placement = gpu.placement if mig is None else Placement(gpu.uuid, mig.gi, mig.ci)
    for replica in (None,) if planned.replicas is None else range(planned.replicas):
        yield AdvertisedDevice(
            id=replica_id(planned.uuid, replica),
            uuid=planned.uuid,
            placement=placement,
            index=gpu.index,
            replica=replica,
            numa_node=gpu.numa_node,
            mig_index=None if mig is None else mig.index,
        )


def mig_resource(profile: str, policy: Policy) -> ResourceName:
    """Return the resource of a MIG profile: ``1g.10gb+me`` is ``nvidia.com/mig-1g.10gb.me``."""
    if policy.mig_strategy == "single":
        return GPU_RESOURCE
    return ResourceName(f"{PREFIX}mig-{profile.replace('+', '.')}")


def mixed_profiles(gpus: Iterable[Gpu], policy: Policy) -> tuple[str, ...]:
    """Return why strategy ``single`` cannot be followed: the unlike profiles; empty if it can.

    A GPU outside MIG mode, or in it but without a MIG device, counts as the profile ``none``.
    """
    listed = tuple(gpus)
    if policy.mig_strategy != "single" or not any(gpu.mig_enabled for gpu in listed):
        return ()
    profiles = {mig.profile for gpu in listed if gpu.mig_enabled for mig in gpu.mig_devices}
    if any(not (gpu.mig_enabled and gpu.mig_devices) for gpu in listed):
        profiles.add("none")
    return tuple(sorted(profiles)) if profiles == {"none"} or len(profiles) > 1 else ()


def unfit(gpus: Iterable[Gpu], policy: Policy) -> frozenset[ResourceName]:
    """Return the resources that the policy names and some of the GPUs cannot fill.

    They are registered even while they are empty and never were anything else: another plugin, or this one
    under another layout, may have advertised them before.
    """
    known = tuple(gpus)
    names = {GPU_RESOURCE} if mixed_profiles(known, policy) else set()
    for part, _, obstacle in _obstacles(known, policy):
        if obstacle is Unadvertised.TOO_MANY_REPLICAS:
            names.add(shared_name(policy.sharing, part.name))
    return frozenset(names)


def unadvertised_devices(gpus: Iterable[Gpu], policy: Policy) -> tuple[UnadvertisedDevice, ...]:
    """Return the devices that are not advertised, or not as configured, each once.

    What makes strategy ``single`` impossible is not among it: mixed_profiles returns that.
    """
    known = tuple(gpus)
    found: list[UnadvertisedDevice] = []
    for gpu in known if policy.mig_strategy == "mixed" else ():
        if gpu.mig_enabled and not gpu.mig_devices:
            found.append(UnadvertisedDevice(gpu.uuid, Unadvertised.NO_MIG_DEVICE))
        nameless = filter(_is_nameless, gpu.mig_devices)
        found += (UnadvertisedDevice(gpu.uuid, Unadvertised.PROFILE, mig.profile) for mig in nameless)
    for part, share, obstacle in _obstacles(known, policy):
        figures = f"{share.replicas} replicas of {part.gpu.name}, MPS serves {mps_clients(part.gpu)}"
        detail = figures if part.mig is None else part.mig.profile
        found.append(UnadvertisedDevice(part.gpu.uuid, obstacle, detail))
    return tuple(dict.fromkeys(found))


def _obstacles(gpus: Iterable[Gpu], policy: Policy) -> Iterator[tuple[_Part, Share, Unadvertised]]:
    """Yield what cannot be shared as it is to be."""
    for part in _parts(gpus, policy):
        share = share_of(policy.sharing, part.name, part.gpu, part.place)
        obstacle = None if share is None else _obstacle(part, share, policy)
        if share is not None and obstacle is not None:
            yield part, share, obstacle


MPS_CLIENTS: Final = 48
MPS_CLIENTS_OF_OLDER: Final = 16
"""Clients of one MPS server, so replicas of one GPU: on compute capability 7.5 and later, and before that.
Source: NVIDIA/k8s-device-plugin:cmd/mps-control-daemon/mps/device.go."""

_FIRST_WITH_MANY: Final = (7, 5)


def share_of(sharing: Sharing, resource: ResourceName, gpu: Gpu, place: int) -> Share | None:
    """Return the share of a resource's devices on a GPU, whether or not it can be had; None: there is none.

    ``place`` is the GPU's among the known ones, by PCI address.
    """
    return next((share for share in sharing.shares if _is_of(share, resource, gpu, place)), None)


def _is_of(share: Share, resource: ResourceName, gpu: Gpu, place: int) -> bool:
    if share.resource != resource:
        return False
    if share.models and not any(_matches(pattern, gpu.name) for pattern in share.models):
        return False
    return not share.gpus or str(place) in share.gpus or gpu.uuid in share.gpus


def _matches(pattern: str, name: str) -> bool:
    """Match a pattern in which ``*`` is any text; in one pass, since an operator may write many of them."""
    first, *further = pattern.split("*")
    if not further:
        return pattern == name
    *inner, last = further
    if len(first) + len(last) > len(name) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for text in inner:
        found = name.find(text, at, end)
        if found < 0:
            return False
        at = found + len(text)
    return True


def shared_name(sharing: Sharing, resource: ResourceName) -> ResourceName:
    """Return under which name the shared devices of a resource are advertised."""
    return ResourceName(resource + SHARED_SUFFIX) if sharing.rename_by_default else resource


def mps_clients(gpu: Gpu) -> int:
    """Return how many clients MPS serves on a GPU; few where its compute capability is not known."""
    capability = gpu.compute_capability
    return MPS_CLIENTS if capability is not None and capability >= _FIRST_WITH_MANY else MPS_CLIENTS_OF_OLDER
