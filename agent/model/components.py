"""The components of the agent that give proofs of life, by name."""

from typing import Final

from agent.model.facts.message import (
    DEVICE_PLUGIN,
    KERNEL_LOG,
    KUBELET,
    KUBELET_COUNT,
    MPS,
    NVML,
    PODS,
    PROBE,
    SYSFS,
    UEVENTS,
)
from agent.model.ids import SourceName

GPU_PROBER: Final = SourceName("nvml-gpu")
NVML_EVENTS: Final = SourceName("nvml-events")
NVML_NODE: Final = SourceName("nvml-node")
LIST_AND_WATCH: Final = SourceName("list-and-watch")
ENGINE: Final = SourceName("engine")
HTTP: Final = SourceName("http")
STATE_FILE: Final = SourceName("statefile")
EVENT_LOG: Final = SourceName("eventlog")
EVIDENCE: Final = SourceName("evidence")
CDI: Final = SourceName("cdi")
LOOP: Final = SourceName("loop")
CONFIG_WATCH: Final = SourceName("config-watch")

__all__ = [
    "CDI",
    "CONFIG_WATCH",
    "DEVICE_PLUGIN",
    "ENGINE",
    "EVENT_LOG",
    "EVIDENCE",
    "GPU_PROBER",
    "HTTP",
    "KERNEL_LOG",
    "KUBELET",
    "KUBELET_COUNT",
    "LIST_AND_WATCH",
    "LOOP",
    "MPS",
    "NVML",
    "NVML_EVENTS",
    "NVML_NODE",
    "PODS",
    "PROBE",
    "STATE_FILE",
    "SYSFS",
    "UEVENTS",
]
