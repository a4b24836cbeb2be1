"""Who was given which GPU, and who uses it."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.model.facts.message import PODS, PROBE, State
from agent.model.ids import DeviceId, GpuUuid, SourceName
from agent.model.usage import DeviceCall, Pods, ProbeView, Usage


@dataclass(frozen=True, slots=True)
class AllocationsListed(State):
    """Which pods hold which of our devices, without finished pods; kubelet's PodResources List."""

    pods: Mapping[DeviceId, str]
    """``namespace/name`` by device id."""
    source: SourceName = PODS


@dataclass(frozen=True, slots=True)
class PodsSeen(State):
    """The pods that this node's kubelet knows, by UID; what is not among them is gone."""

    pods: Pods
    complete: bool = True
    """False: only pods with devices are among them, so that another may live all the same."""
    source: SourceName = PODS


@dataclass(frozen=True, slots=True)
class GpuUseSeen(State):
    """Who uses the driver now; told when it changed and at least every 30 s."""

    usage: Usage
    source: SourceName = PROBE


@dataclass(frozen=True, slots=True)
class ProbeSeen(State):
    """How the probe is: loaded, or why not."""

    probe: ProbeView
    source: SourceName = PROBE


@dataclass(frozen=True, slots=True)
class DeviceCallsSeen(State):
    """What the kernel saw of the calls that show whether devices answer; those that were made so far."""

    calls: Mapping[GpuUuid, DeviceCall]
    source: SourceName = PROBE


UsageFact = AllocationsListed | PodsSeen | GpuUseSeen | ProbeSeen | DeviceCallsSeen
