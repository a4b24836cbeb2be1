"""NVML's own events of GPUs bound to their driver or unbound, where the driver supports them.

Invariants: they are registered at most once in a process, since NVML accepts no second registration;
after NVML was shut down none arrive any more. Nothing depends on them: the kernel reports the same
by uevents, and each poll finds what both miss. So any failure here stops it, and is no finding.
"""

from typing import Any, Final

import pynvml

from agent.errors import NvmlCode, NvmlError
from agent.model import facts
from agent.sources.nvml.library import Nvml

MAX_AT_ONCE: Final = 32
"""Events read in one call; NVML keeps further ones for the next."""

_BOUND: Final = int(pynvml.nvmlSystemEventTypeGpuDriverBind)
_UNBOUND: Final = int(pynvml.nvmlSystemEventTypeGpuDriverUnbind)


class BindEvents:
    """The event set of the process, from the first session until NVML is shut down."""

    def __init__(self) -> None:
        self._set: Any = None
        self._is_over = False

    def open(self, nvml: Nvml) -> None:
        """Register for the events, the first time. Blocks."""
        if self._set is not None or self._is_over:
            return
        try:
            self._set = nvml.call(pynvml.nvmlSystemEventSetCreate, pynvml.nvmlSystemEventSetCreateRequest_v1)
            version, types = pynvml.nvmlSystemRegisterEventRequest_v1, _BOUND | _UNBOUND
            nvml.call(pynvml.nvmlSystemRegisterEvents, version, types, self._set)
        except NvmlError:
            self.close(nvml)

    def read_rebinds(self, nvml: Nvml) -> list[facts.GpuRebound]:
        """Return what happened since the last call, without waiting for more. Blocks as any call may."""
        if self._set is None:
            return []
        data = (pynvml.c_nvmlSystemEventData_v1_t * MAX_AT_ONCE)()
        version = pynvml.nvmlSystemEventSetWaitRequest_v1
        try:
            events = nvml.call(pynvml.nvmlSystemEventSetWait, version, self._set, 0, data, MAX_AT_ONCE)
        except NvmlError as error:
            if error.code != NvmlCode.TIMEOUT:
                self.close(nvml)
            return []
        return [
            facts.GpuRebound(
                pci=pci_of(int(event["gpuId"])), bound=bool(event["eventType"] & _BOUND), source=facts.NVML
            )
            for event in events
        ]

    def close(self, nvml: Nvml) -> None:
        """Free the event set for the rest of the process. Blocks."""
        events, self._set, self._is_over = self._set, None, True
        if events is None:
            return
        try:
            nvml.call(pynvml.nvmlSystemEventSetFree, pynvml.nvmlSystemEventSetFreeRequest_v1, events)
        except NvmlError:
            # A driver that is gone has nothing left to free.
            return


def pci_of(gpu_id: int) -> str:
    """Return the PCI address, in sysfs form, that NVML packs into a number as domain, bus and device."""
    return f"{gpu_id >> 16:04x}:{gpu_id >> 8 & 0xFF:02x}:{gpu_id & 0xFF:02x}.0"
