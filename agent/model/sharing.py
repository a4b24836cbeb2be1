"""How devices are shared: several replicas of one device, by time-slicing or by MPS."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from agent.model.ids import ResourceName

SharingStrategy = Literal["time-slicing", "mps"]

SHARED_SUFFIX = ".shared"
"""What a resource's name ends with where its replicas are renamed."""


class Share(msgspec.Struct, frozen=True):
    """How many replicas the devices of one resource have."""

    resource: ResourceName
    """The name before it is renamed: ``nvidia.com/gpu``."""
    replicas: int
    models: tuple[str, ...] = ()
    """Only on GPUs with such a name, ``*`` stands for anything; empty: on all. Ours, not NVIDIA's."""
    gpus: tuple[str, ...] = ()
    """Only on these GPUs, by NVML index or UUID; empty: on all. Ours, not NVIDIA's."""


class Sharing(msgspec.Struct, frozen=True):
    """What the operator decided on sharing; the first share that fits a device is its."""

    strategy: SharingStrategy = "time-slicing"
    shares: tuple[Share, ...] = ()
    rename_by_default: bool = False
    """Advertise shared devices as ``<resource>.shared``."""
    fail_requests_greater_than_one: bool = False
    distinct_cards: bool = False
    """Reject a container with two replicas of one device. Ours, not NVIDIA's."""

    @classmethod
    def of(cls, replicas: Mapping[ResourceName, int]) -> "Sharing":
        """Return plain time-slicing with so many replicas, by resource."""
        return cls(shares=tuple(Share(name, count) for name, count in replicas.items()))
