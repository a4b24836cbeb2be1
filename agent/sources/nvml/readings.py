"""The readings of a GPU as typed NVML calls, beside those of nvml_library.

Invariants: one method is one NVML call, made through Nvml.call, so it is observed and its error is
translated like any other. This module keeps no state and decides nothing: see sampling.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import pynvml

from agent.errors import NvmlCode, NvmlError
from agent.model.usage import MemoryUser
from agent.sources.nvml.library import Handle, Nvml

RECOVERY_ACTION_FIELD: Final = int(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)

HW_SLOWDOWN_REASONS: Final = int(
    pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
)
"""Reasons by which hardware, not the driver or a user, lowers the clocks."""

MAX_PROCESSES: Final = 65_536
"""More on one GPU are rejected, and no room is allocated for them."""
IMPOSSIBLE: Final = MemoryUser(pid=0, used_bytes=None, gi=0, ci=0)
"""No process: stands for an impossible list, see core.usage.process_list."""

MAX_LINKS: Final = int(pynvml.NVML_NVLINK_MAX_LINKS)

LINK_TO_GPU: Final = int(pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)
LINK_TO_SWITCH: Final = int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)

MAX_CPUS: Final = 8_192
"""CPUs in the affinity mask that is read; the most that distributions build their kernels for."""
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


class Readings:
    """The readings of a GPU, one call each; every method blocks and raises NvmlError."""

    def __init__(self, nvml: Nvml) -> None:
        self._call: Final[Callable[..., Any]] = nvml.call

    def recovery_action(self, handle: Handle) -> int:
        """Return the driver's recovery action for the GPU; 0: none."""
        (value,) = self._call(pynvml.nvmlDeviceGetFieldValues, handle, [RECOVERY_ACTION_FIELD])
        if value.nvmlReturn != NvmlCode.SUCCESS:
            # The call succeeds even if its one field does not.
            code = int(value.nvmlReturn)
            raise NvmlError("nvmlDeviceGetFieldValues", code, f"Field {RECOVERY_ACTION_FIELD} is not there")
        return int(value.value.uiVal)

    def ecc_uncorrected(self, handle: Handle) -> int:
        """Return the uncorrected ECC errors of all memories since the driver was loaded."""
        return int(
            self._call(
                pynvml.nvmlDeviceGetTotalEccErrors,
                handle,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            )
        )

    def remapped_rows(self, handle: Handle) -> tuple[bool, bool]:
        """Return whether a row remapping waits for a reset, and whether one failed."""
        _corrected, _uncorrected, pending, failed = self._call(pynvml.nvmlDeviceGetRemappedRows, handle)
        return bool(pending), bool(failed)

    def pages_pending(self, handle: Handle) -> bool:
        """Return whether a page retirement waits for a reset."""
        return bool(self._call(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle))

    def hw_slowed(self, handle: Handle) -> bool:
        """Return whether hardware lowers the clocks."""
        reasons = self._call(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        return bool(reasons & HW_SLOWDOWN_REASONS)

    def hw_slowed_old(self, handle: Handle) -> bool:
        """Return the same by the call's older name."""
        return bool(
            self._call(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) & HW_SLOWDOWN_REASONS
        )

    def slowdown_celsius(self, handle: Handle) -> int:
        """Return the temperature at which the GPU slows itself down."""
        threshold = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return int(self._call(pynvml.nvmlDeviceGetTemperatureThreshold, handle, threshold))

    def pcie_width(self, handle: Handle) -> int:
        """Return the present width of the PCIe link."""
        return int(self._call(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle))

    def pcie_width_max(self, handle: Handle) -> int:
        """Return the width of the PCIe link that GPU and slot support."""
        return int(self._call(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle))

    def pcie_replays(self, handle: Handle) -> int:
        """Return the PCIe replays since the driver was loaded."""
        return int(self._call(pynvml.nvmlDeviceGetPcieReplayCounter, handle))

    def memory_used(self, handle: Handle) -> int:
        """Return the memory in use, without what the driver reserves for itself."""
        return int(self._call(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2).used)

    def compute_processes(self, handle: Handle) -> tuple[MemoryUser, ...]:
        """Return the processes that have a CUDA context on the GPU."""
        return self._users("nvmlDeviceGetComputeRunningProcesses_v3", handle)

    def compute_processes_old(self, handle: Handle) -> tuple[MemoryUser, ...]:
        """Return the same from the call that was there before."""
        return self._users("nvmlDeviceGetComputeRunningProcesses_v2", handle)

    def graphics_processes(self, handle: Handle) -> tuple[MemoryUser, ...]:
        """Return the processes that have a graphics context on the GPU."""
        return self._users("nvmlDeviceGetGraphicsRunningProcesses_v3", handle)

    def graphics_processes_old(self, handle: Handle) -> tuple[MemoryUser, ...]:
        """Return the same from the call that was there before."""
        return self._users("nvmlDeviceGetGraphicsRunningProcesses_v2", handle)

    def mps_processes(self, handle: Handle) -> tuple[MemoryUser, ...]:
        """Return the processes that use the GPU through an MPS server."""
        return self._users("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)

    def mps_processes_old(self, handle: Handle) -> tuple[MemoryUser, ...]:
        """Return the same from the call that was there before."""
        return self._users("nvmlDeviceGetMPSComputeRunningProcesses_v2", handle)

    def _users(self, name: str, handle: Handle) -> tuple[MemoryUser, ...]:
        """Return a list of processes; without the binding, which allocates for any number of them."""

        def listed(handle: Handle) -> tuple[MemoryUser, ...]:
            return _listed(name, handle)

        listed.__name__ = name
        users: tuple[MemoryUser, ...] = self._call(listed, handle)
        return users

    def link_is_up(self, handle: Handle, link: int) -> bool:
        """Return whether an NVLink is active; INVALID_ARGUMENT past the GPU's last one."""
        return bool(self._call(pynvml.nvmlDeviceGetNvLinkState, handle, link))

    def link_has_peer(self, handle: Handle, link: int) -> bool:
        """Return whether the driver names a peer at the other end of an NVLink."""
        pci = self._call(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        return any((pci.domain, pci.bus, pci.device))

    def link_leads_to(self, handle: Handle, link: int) -> int:
        """Return what is at the other end of an NVLink: LINK_TO_GPU, LINK_TO_SWITCH, or something else."""
        return int(self._call(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link))

    def link_peer(self, handle: Handle, link: int) -> str:
        """Return the PCI address of what is at the other end of an NVLink, without its function."""
        pci = self._call(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        return f"{int(pci.domain):08x}:{int(pci.bus):02x}:{int(pci.device):02x}.0"

    def common_ancestor(self, handle: Handle, other: Handle) -> int:
        """Return the nearest common ancestor of two GPUs on PCIe, as nvmlGpuTopologyLevel_t."""
        return int(self._call(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle, other))

    def cpu_affinity(self, handle: Handle) -> tuple[int, ...]:
        """Return the CPUs near a GPU, ascending."""
        words = self._call(pynvml.nvmlDeviceGetCpuAffinity, handle, MAX_CPUS // _WORD_BITS)
        return tuple(
            number * _WORD_BITS + bit
            for number, word in enumerate(words)
            if word
            for bit in range(_WORD_BITS)
            if word >> bit & 1
        )

    def fabric(self, handle: Handle) -> tuple[int, int]:
        """Return state and status of the GPU's registration with the NVSwitch fabric."""
        return self._fabric(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, pynvml.c_nvmlGpuFabricInfo_v2_t())

    def fabric_old(self, handle: Handle) -> tuple[int, int]:
        """Return the same from the call that was there before."""
        return self._fabric(pynvml.nvmlDeviceGetGpuFabricInfo, handle, pynvml.c_nvmlGpuFabricInfo_t())

    def _fabric(self, function: Callable[..., Any], handle: Handle, info: Any) -> tuple[int, int]:
        self._call(function, handle, ctypes.byref(info))
        # One byte in nvml.h, wider in the binding.
        return int(info.state) & 0xFF, int(info.status)


def _listed(name: str, handle: Handle) -> tuple[MemoryUser, ...]:
    function = pynvml._nvmlGetFunctionPointer(name)  # noqa: SLF001 - no public way
    count = ctypes.c_uint(0)
    code = function(handle, ctypes.byref(count), None)
    if code == pynvml.NVML_SUCCESS:
        return ()
    if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
        raise pynvml.NVMLError(code)
    if count.value > MAX_PROCESSES:
        return (IMPOSSIBLE,)
    # More may appear before the next call.
    count.value = 2 * count.value + 5
    records = (pynvml.c_nvmlProcessInfo_v2_t * count.value)()
    code = function(handle, ctypes.byref(count), records)
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return tuple(
        MemoryUser(
            int(record.pid),
            int(record.usedGpuMemory),
            int(record.gpuInstanceId),
            int(record.computeInstanceId),
        )
        for record in records[: count.value]
    )
