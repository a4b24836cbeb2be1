"""The emulated kubelet: the peer of the device plugin on a simulated node."""

from agent.simulation.kubelet.emulated import DIAL_TIMEOUT_S, ENDPOINT_STOP_GRACE_S, EmulatedKubelet
from agent.simulation.kubelet.faults import FAULTS, Fault, parse_fault
from agent.simulation.kubelet.records import (
    AllocatableChange,
    Allocation,
    ContainerOutcome,
    DeviceList,
    DeviceView,
    PodOutcome,
    Registration,
    StreamEnd,
)
from agent.simulation.kubelet.watch import ChangeStream

__all__ = [
    "DIAL_TIMEOUT_S",
    "ENDPOINT_STOP_GRACE_S",
    "FAULTS",
    "AllocatableChange",
    "Allocation",
    "ChangeStream",
    "ContainerOutcome",
    "DeviceList",
    "DeviceView",
    "EmulatedKubelet",
    "Fault",
    "PodOutcome",
    "Registration",
    "StreamEnd",
    "parse_fault",
]
