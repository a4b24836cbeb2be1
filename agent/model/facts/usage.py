"""The allocation and the use of each GPU."""

from collections.abc import Mapping

from agent.model.facts.message import PODS, PROBE, State
from agent.model.ids import DeviceId, GpuUuid, SourceName
from agent.model.usage import DeviceCall, Pods, ProbeView, Usage


class AllocationsListed(State, frozen=True):
    """Which pods hold which of our devices, without finished pods; kubelet's PodResources List."""

    pods: Mapping[DeviceId, str]
    """``namespace/name`` by device id."""
    source: SourceName = PODS


class PodsSeen(State, frozen=True):
    """The pods that this node's kubelet knows, by UID; what is not among them is gone."""

    pods: Pods
    complete: bool = True
    """False: only pods with devices are among them, so that another may live all the same."""
    source: SourceName = PODS


class GpuUseSeen(State, frozen=True):
    """The processes that use the driver now; emitted when they changed and at least every 30 s."""

    usage: Usage
    source: SourceName = PROBE


class ProbeSeen(State, frozen=True):
    """How the probe is: loaded, or why not."""

    probe: ProbeView
    source: SourceName = PROBE


class DeviceCallsSeen(State, frozen=True):
    """What the kernel saw of the calls that show whether devices answer; those that were made so far."""

    calls: Mapping[GpuUuid, DeviceCall]
    source: SourceName = PROBE


UsageFact = AllocationsListed | PodsSeen | GpuUseSeen | ProbeSeen | DeviceCallsSeen
