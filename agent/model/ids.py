"""Names of things: a GPU is its UUID, never its index."""

from typing import Final, NamedTuple, NewType

import msgspec

GpuUuid = NewType("GpuUuid", str)
"""NVML UUID of a physical GPU: ``GPU-…``."""

DeviceId = NewType("DeviceId", str)
"""What the kubelet calls a device: a GPU or MIG UUID, with ``::n`` for a replica."""

ResourceName = NewType("ResourceName", str)
"""Extended resource with its prefix: ``nvidia.com/gpu``, ``nvidia.com/mig-1g.5gb``."""

SourceName = NewType("SourceName", str)
"""A source or sink as its task is named: ``nvml``, ``kubelet``, ``device-plugin``."""

ALL: Final = 0xFFFFFFFF
"""NVML's "not a MIG event" value for a GPU instance or compute instance id."""


class Placement(msgspec.Struct, frozen=True, order=True):
    """Where on a GPU something is: the whole GPU, a GPU instance (gi) or a compute instance (ci)."""

    gpu: GpuUuid
    gi: int = ALL
    ci: int = ALL

    def overlaps(self, other: "Placement") -> bool:
        """Return whether a fault at one place touches a device at the other.

        A whole GPU contains all of its instances, so an unset id matches every id.
        """
        return (
            self.gpu == other.gpu
            and (self.gi == other.gi or ALL in (self.gi, other.gi))
            and (self.ci == other.ci or ALL in (self.ci, other.ci))
        )


class SocketIdentity(msgspec.Struct, frozen=True):
    """A socket file as it was seen; another file at the same path has another identity.

    The modification time is part of it because file systems hand the inode number of a deleted
    socket to the next one; unlike the change time it survives a chmod.
    """

    device: int
    inode: int
    mtime_ns: int


NO_KUBELET: Final = SocketIdentity(0, 0, 0)
"""Stands for a kubelet where the operator wants devices served and not registered."""


REPLICA_SEPARATOR: Final = "::"


def replica_id(device: str, replica: int | None) -> DeviceId:
    """Return the id the kubelet sees for the n-th share of a device (facts: ``<uuid>::<n>``)."""
    return DeviceId(device if replica is None else f"{device}{REPLICA_SEPARATOR}{replica}")


def pci_sysfs_name(bus_id: str) -> str:
    """Return NVML's PCI bus id in sysfs form: four-digit domain, lower case.

    NVML writes ``00000000:3B:00.0``, /sys/bus/pci/devices has ``0000:3b:00.0``.
    """
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if rest.count(":") == 1 else bus_id.strip().lower()


def socket_name(resource: ResourceName) -> str:
    """Return the file name of a resource's plugin socket: ``nvidia-gpu.sock`` for ``nvidia.com/gpu``.

    The names are those of NVIDIA's plugin, so that one can replace the other in place.
    Source: NVIDIA/k8s-device-plugin:internal/plugin/server.go.
    """
    return f"nvidia-{resource.rpartition('/')[2]}.sock"


class ComponentId(NamedTuple):
    """A component that gives proofs of life: ``nvml-gpu`` of a GPU, ``list-and-watch`` of a resource."""

    name: SourceName
    of: str = ""
    """The GPU's UUID or the resource's name; empty where there is one such component."""

    def __str__(self) -> str:
        """Return the name as log lines and health checks show it."""
        return f"{self.name} {self.of}" if self.of else self.name
