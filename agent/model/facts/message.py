"""The base of every fact: its source, and how it is queued."""

from collections.abc import Hashable
from typing import Final, Protocol, Self

import msgspec

from agent.model.ids import GpuUuid, ResourceName, SourceName
from agent.model.structs import replace

NVML: Final = SourceName("nvml")
KUBELET: Final = SourceName("kubelet")
DEVICE_PLUGIN: Final = SourceName("device-plugin")
AGENT: Final = SourceName("agent")
KERNEL_LOG: Final = SourceName("kernel-log")
SYSFS: Final = SourceName("sysfs")
UEVENTS: Final = SourceName("uevents")
PODS: Final = SourceName("pods")
PROBE: Final = SourceName("probe")
KUBELET_COUNT: Final = SourceName("kubelet-count")
MPS: Final = SourceName("mps")
OPERATOR: Final = SourceName("operator")


class Message(Protocol):
    """What the inbox needs to know of a fact."""

    @property
    def source(self) -> SourceName:
        """The source that emitted it; losses are counted by source."""

    @property
    def key(self) -> Hashable | None:
        """Facts of one key are merged; None may be dropped."""

    def merged_with(self, newer: Self) -> Self:
        """Return one fact that stands for both."""


class State(msgspec.Struct, frozen=True):
    """A fact about the present state: of two, the newer one counts."""

    @property
    def key(self) -> Hashable | None:
        """One of its kind."""
        return (type(self),)

    def merged_with(self, newer: Self) -> Self:
        """Forget the older one."""
        return newer


class GpuState(State, frozen=True):
    """How one GPU is now."""

    gpu: GpuUuid

    @property
    def key(self) -> Hashable:
        """One for each GPU."""
        return (type(self), self.gpu)


class ResourceState(State, frozen=True):
    """How one resource stands with the kubelet now."""

    resource: ResourceName
    generation: int
    """Which registration of the resource it is about."""

    @property
    def key(self) -> Hashable:
        """One for each resource."""
        return (type(self), self.resource)


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """A fact that can happen again and again: two of one key are one, with both counts."""

    count: int = 1

    def merged_with(self, newer: Self) -> Self:
        """Add the counts."""
        return replace(newer, count=self.count + newer.count)
