"""Which devices are offered under which resource name, from the GPUs that are known.

Invariants: ids are stable over restarts (NVML UUIDs). The order is stable also when a GPU is lost
and the others' indexes move: by PCI address, GPU instance, compute instance, replica. A resource
that was offered once stays, with an empty list, so that the kubelet forgets its devices at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import DeviceId, Placement, ResourceName, replica_id
from agent.model.policy import Policy

PREFIX = "nvidia.com/"
GPU_RESOURCE = ResourceName(PREFIX + "gpu")


@dataclass(frozen=True, slots=True)
class Offer:
    """A device before its health is known."""

    id: DeviceId
    uuid: str
    placement: Placement
    index: int
    replica: int | None
    numa_node: int | None
    mig_index: int | None = None
    """NVML's index of the MIG device on its GPU; None: a whole GPU."""


def offers(
    gpus: Iterable[Gpu], policy: Policy, already_offered: Iterable[ResourceName]
) -> Mapping[ResourceName, tuple[Offer, ...]]:
    """Return the devices of each resource, in wire order."""
    listed: dict[ResourceName, list[Offer]] = {name: [] for name in already_offered}
    ordered = sorted(gpus, key=lambda gpu: (gpu.pci, gpu.index))
    if mixed_profiles(ordered, policy):
        ordered = []
    for gpu in ordered:
        if policy.mig_strategy == "none" or not gpu.mig_enabled:
            listed.setdefault(GPU_RESOURCE, []).extend(_shares(gpu, None, GPU_RESOURCE, policy))
            continue
        for mig in sorted(gpu.mig_devices, key=lambda mig: (mig.gi, mig.ci)):
            name = mig_resource(mig.profile, policy)
            listed.setdefault(name, []).extend(_shares(gpu, mig, name, policy))
    return {name: tuple(devices) for name, devices in listed.items()}


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


def _shares(gpu: Gpu, mig: MigDevice | None, name: ResourceName, policy: Policy) -> Iterable[Offer]:
    uuid = gpu.uuid if mig is None else mig.uuid
    place = gpu.placement if mig is None else Placement(gpu.uuid, mig.gi, mig.ci)
    count = policy.sharing.replicas_of(name)
    for replica in [None] if count is None else range(count):
        yield Offer(
            id=replica_id(uuid, replica),
            uuid=uuid,
            placement=place,
            index=gpu.index,
            replica=replica,
            numa_node=gpu.numa_node,
            mig_index=None if mig is None else mig.index,
        )
