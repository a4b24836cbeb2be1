"""Makes one harmless call into the driver on a GPU's own device file.

The eBPF probe sees it in the kernel: entered, returned, in what time. NVML's own calls go through
/dev/nvidiactl, whose file does not show which GPU they are for.

Invariants: it blocks, runs on the GPU's own thread and has the deadline of any call there, and is only made
while NVML holds the GPU open, so that it never initialises a GPU by itself. Its answer does not matter.

Source: NVIDIA/open-gpu-kernel-modules:kernel-open/common/inc/nv-ioctl-numa.h, kernel-open/nvidia/nv.c.
"""

import fcntl
import os
from pathlib import Path
from typing import Final

from agent.sources.nvml.library import Nvml

CALL: Final = "NUMA_INFO"
"""The call's name where it is reported overdue."""

_NUMBER: Final = 215
_SIZES: Final = (560, 552)
"""Of its parameters, since a member was added and before; any other size fails with EINVAL at once."""


def call_device(nvml: Nvml, dev_root: Path, minor: int) -> None:
    """Call the driver on a GPU; a device file that cannot be opened is reported elsewhere."""
    nvml.observed(CALL, lambda: _call(dev_root / f"nvidia{minor}"))


def _call(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    try:
        for size in _SIZES:
            try:
                fcntl.ioctl(descriptor, _request(size), bytearray(size))
            except OSError:
                continue
            return
    finally:
        os.close(descriptor)


def _request(size: int) -> int:
    """Return the request number of an ioctl that reads and writes so many bytes (_IOWR)."""
    return 3 << 30 | size << 16 | ord("F") << 8 | _NUMBER
