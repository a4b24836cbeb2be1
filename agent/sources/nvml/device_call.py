"""Makes one harmless call into the driver on a GPU's own device file.

The probe sees it in the kernel: entered, returned, in what time. NVML's own calls go through /dev/nvidiactl,
whose file says nothing of the GPU they are for.

Invariants: it blocks, runs on the GPU's own thread and has the deadline of any call there, and is only made
while NVML holds the GPU open, so that it never brings a GPU up by itself. What it answers does not matter.

Source: NVIDIA/open-gpu-kernel-modules:kernel-open/common/inc/nv-ioctl-numa.h, kernel-open/nvidia/nv.c.
"""

import fcntl
import os
from pathlib import Path
from typing import Final

from agent.sources.nvml.library import Nvml

CALL: Final = "NUMA_INFO"
"""What it is called where it does not answer."""

_NUMBER: Final = 215
_SIZES: Final = (560, 552)
"""Of its parameters, since a member was added and before; another size is answered with EINVAL at once."""


def call_device(nvml: Nvml, dev_root: Path, minor: int) -> None:
    """Call the driver on a GPU; a device file that cannot be opened is another finding."""
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
    """Return the word of an ioctl that reads and writes so many bytes (_IOWR)."""
    return 3 << 30 | size << 16 | ord("F") << 8 | _NUMBER
