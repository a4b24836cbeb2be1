"""The emulated kubelet: the peer of the device plugin on a simulated node."""

import os

# gRPC's core logs each lost connection to standard error, and here losing them is the point. It reads
# the variable when it is imported, which the modules below do.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from agent.simulation.kubelet.emulated import DIAL_TIMEOUT_S, ENDPOINT_STOP_GRACE_S, EmulatedKubelet
from agent.simulation.kubelet.faults import FAULTS, Fault, parse_fault
from agent.simulation.kubelet.records import (
    AllocatableChange,
    Allocation,
    ContainerOutcome,
    DeviceList,
    DeviceView,
    KubeletStatistics,
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
    "KubeletStatistics",
    "PodOutcome",
    "Registration",
    "StreamEnd",
    "parse_fault",
]
