"""Reads which device instance the driver's resource manager (RM) has given a GPU.

A context lies under a device that names its GPU by that number alone. It equals the minor only where GPUs
were attached in the order in which they were probed, so two calls read it: the GPU id of the minor, and
the instance of that id.

Invariants: it blocks, runs on the GPU's own thread with the deadline of any call there, and only while NVML
holds the GPU open, so that it attaches no GPU, and the instance is the GPU's until NVML closes it. An answer
that the driver does not give is unknown.

Source: NVIDIA/open-gpu-kernel-modules 515.43.04 to 595.45.04:kernel-open/common/inc/nv-ioctl.h, nvos.h,
ctrl0000gpu.h, src/nvidia/src/kernel/gpu_mgr/gpu_mgr.c (gpumgrAllocDeviceInstance).
"""

import ctypes
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from agent.model.rm import MAX_INSTANCES
from agent.model.structs import replace
from agent.sources.nvml.inventory import ProbeResult
from agent.sources.nvml.library import Nvml

CALL: Final = "GPU_GET_ID_INFO"
"""The call's name where it is reported overdue."""

_RM_CONTROL, _RM_ALLOC, _CARD_INFO = 0x2A, 0x2B, 200
_ROOT_CLIENT: Final = 0x41
_GET_ID_INFO_V2: Final = 0x205
_CARD: Final = struct.Struct("=?15xI36xI12x")
"""nv_ioctl_card_info_t: valid, GPU id, minor."""
_CARDS: Final = 64
"""Rows of the table; too few are an error."""
_ALLOC: Final = struct.Struct("=IIIIQII")
"""NVOS21: root, parent, new object, class, address and size of parameters, status (since driver 535)."""
_CONTROL: Final = struct.Struct("=IIIIQII")
"""NVOS54: client, object, command, flags, address and size of parameters, status."""
_ID_INFO: Final = struct.Struct("=IIIIIIIi")
"""NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS: GPU id, flags, device instance and five more."""


def with_instance(result: ProbeResult, nvml: Nvml, dev_root: Path) -> ProbeResult:
    """Return the result with the GPU's device instance, which is read once."""
    seen = result.discovered
    if seen.is_instance_read or result.failure is not None or seen.gpu.minor is None:
        return result
    instance = read_instance(nvml, dev_root, seen.gpu.minor)
    gpu = replace(seen.gpu, device_instance=instance)
    return replace(result, discovered=replace(seen, gpu=gpu, is_instance_read=True))


def read_instance(nvml: Nvml, dev_root: Path, minor: int) -> int | None:
    """Return the device instance of the GPU with a minor; None: unknown."""
    return nvml.observed(CALL, lambda: _read(dev_root / "nvidiactl", minor))


def _read(control: Path, minor: int) -> int | None:
    try:
        descriptor = os.open(control, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        gpu_id = _gpu_id(descriptor, minor)
        return None if gpu_id is None else _instance(descriptor, gpu_id)
    except OSError:
        return None
    finally:
        # The driver frees the client with the file.
        os.close(descriptor)


def _gpu_id(descriptor: int, minor: int) -> int | None:
    cards = bytearray(_CARD.size * _CARDS)
    fcntl.ioctl(descriptor, _request(_CARD_INFO, len(cards)), cards)
    rows = _CARD.iter_unpack(cards)
    return next((gpu_id for is_valid, gpu_id, number in rows if is_valid and number == minor), None)


def _instance(descriptor: int, gpu_id: int) -> int | None:
    made = bytearray(_ALLOC.pack(0, 0, 0, _ROOT_CLIENT, 0, 0, 0))
    fcntl.ioctl(descriptor, _request(_RM_ALLOC, len(made)), made)
    client = _ALLOC.unpack(made)[2]
    if not client:
        return None
    parameters = ctypes.create_string_buffer(_ID_INFO.pack(gpu_id, *[0] * 7), _ID_INFO.size)
    address = ctypes.addressof(parameters)
    asked = bytearray(_CONTROL.pack(client, client, _GET_ID_INFO_V2, 0, address, _ID_INFO.size, 0))
    fcntl.ioctl(descriptor, _request(_RM_CONTROL, len(asked)), asked)
    instance = int(_ID_INFO.unpack(parameters.raw)[2])
    is_answered = _CONTROL.unpack(asked)[-1] == 0
    return instance if is_answered and instance < MAX_INSTANCES else None


def _request(number: int, size: int) -> int:
    """Return the request number of an ioctl that reads and writes so many bytes (_IOWR)."""
    return 3 << 30 | size << 16 | ord("F") << 8 | number
