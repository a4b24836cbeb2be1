"""How the driver numbers the GPUs of the node: minors, device instances, capabilities."""

from collections.abc import Mapping
from typing import Final

import msgspec

from agent.model.ids import GpuUuid, Placement

NVIDIA_MAJOR: Final = 195
CONTROL_MINOR: Final = 255
"""Of /dev/nvidiactl; those of /dev/nvidiaN are N.
Source: open-gpu-kernel-modules:kernel-open/common/inc/nv-chardev-numbers.h."""
MINOR_BITS: Final = 20
"""The kernel's dev_t is major << 20 | minor."""
MINOR_MASK: Final = (1 << MINOR_BITS) - 1

CONTROL: Final = NVIDIA_MAJOR << MINOR_BITS | CONTROL_MINOR


class GpuMap(msgspec.Struct, frozen=True):
    """How the driver numbers the GPUs of the node."""

    by_minor: Mapping[int, GpuUuid]
    by_instance: Mapping[int, GpuUuid] = msgspec.field(default_factory=dict)
    """RM device instance, of GPUs for which the driver reported one. An address space registered with unified
    memory names the GPU itself, and takes precedence."""
    by_capability: Mapping[int, Placement] = msgspec.field(default_factory=dict)
    """The MIG device that each minor of /dev/nvidia-caps gives access to."""
    capabilities_major: int | None = None

    def gpu_of(self, device: int) -> GpuUuid | None:
        """Return the GPU of a device number; None: it is of none, or of all."""
        if device >> MINOR_BITS != NVIDIA_MAJOR:
            return None
        return self.by_minor.get(device & MINOR_MASK)

    def slice_of(self, device: int) -> Placement | None:
        """Return the MIG device that a device number gives access to."""
        if device >> MINOR_BITS != self.capabilities_major:
            return None
        return self.by_capability.get(device & MINOR_MASK)

    def by_folded(self) -> dict[tuple[int, int], GpuUuid]:
        """Return GPUs as unified memory's events name them, without those whose names there collide."""
        names = [folded(uuid) for uuid in self.by_minor.values()]
        return {folded(uuid): uuid for uuid in self.by_minor.values() if names.count(folded(uuid)) == 1}


def folded(uuid: GpuUuid) -> tuple[int, int]:
    """Return the halves of a GPU's UUID combined by XOR, as an event has them in two numbers."""
    try:
        raw = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
    except ValueError:
        return (-1, -1)
    words = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, 16, 4)]
    return words[0] ^ words[2], words[1] ^ words[3]
