"""How the GPUs of a node are connected: by NVLink, and by what of PCIe lies between them.

Invariants: a value that was not reported is None, never "not connected".
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from agent.model.ids import GpuUuid


class PcieDistance(StrEnum):
    """What the way from one GPU to another over PCIe crosses, the nearest first.

    Source: nvmlGpuTopologyLevel_t of nvml.h.
    """

    SAME_BOARD = "same_board"
    SINGLE_SWITCH = "single_switch"
    """At most one PCIe switch."""
    MULTI_SWITCH = "multi_switch"
    """Several PCIe switches, and no host bridge."""
    HOST_BRIDGE = "host_bridge"
    """One PCIe host bridge."""
    SAME_NODE = "same_node"
    """The way between the host bridges of one NUMA node."""
    CROSS_NODE = "cross_node"
    """The way between NUMA nodes."""


class NvLinks(msgspec.Struct, frozen=True):
    """The NVLinks of one GPU that are up, by what is at their other ends."""

    to_gpus: Mapping[str, int] = msgspec.field(default_factory=dict)
    """How many lead to the GPU at a PCI address in sysfs form."""
    to_switches: int = 0
    """How many lead to NVSwitches."""


class TopologySample(msgspec.Struct, frozen=True):
    """What was found out of one GPU's place in the node."""

    nvlinks: NvLinks | None = None
    """None: the driver did not report them."""
    distances: Mapping[str, PcieDistance] = msgspec.field(default_factory=dict)
    """To the GPU at a PCI address in sysfs form, as far as the driver reported them."""
    path: str | None = None
    """Where the kernel has it among its devices: ``pci0000:00/0000:00:01.0/0000:01:00.0``."""
    cpu_affinity: str | None = None
    """The CPUs near it, as the kernel writes lists: ``0-15,32-47``."""


class Link(msgspec.Struct, frozen=True):
    """How two GPUs are connected."""

    nvlinks: int | None = None
    """How many NVLinks each has to the other, directly or through switches."""
    pcie: PcieDistance | None = None


UNKNOWN_LINK = Link()


class Topology(msgspec.Struct, frozen=True):
    """The connections of every two GPUs."""

    links: Mapping[tuple[GpuUuid, GpuUuid], Link] = msgspec.field(default_factory=dict)
    """Each pair in both orders; an unknown pair is not in it."""
    cpu_affinity: Mapping[GpuUuid, str] = msgspec.field(default_factory=dict)
    scores: Mapping[GpuUuid, Mapping[GpuUuid, int]] = msgspec.field(default_factory=dict)
    """How well each GPU goes together with each: worked out once, not while a pod waits."""

    def between(self, one: GpuUuid, other: GpuUuid) -> Link:
        """Return how two GPUs are connected, as far as it is known."""
        return self.links.get((one, other), UNKNOWN_LINK)
