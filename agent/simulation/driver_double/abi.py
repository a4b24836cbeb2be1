"""The driver's interface as far as the doubles speak it: device numbers, commands, classes, structs.

Written down from the driver's headers, apart from what the probe has in bpf/, so that each checks the other.
Sources: NVIDIA/open-gpu-kernel-modules 515.43.04 to 595.45.04, nv-chardev-numbers.h, nv-ioctl.h, nvos.h,
nv_escape.h, g_allclasses.h, uvm_ioctl.h, uvm_linux_ioctl.h, nvstatuscodes.h, ctrl0000gpu.h.
"""

import struct
from typing import Final, NamedTuple

MAJOR: Final = 195
CONTROL_MINOR: Final = 255
MODESET_MINOR: Final = 254
MINOR_BITS: Final = 20
"""The kernel's own dev_t, as opposed to the one stat(2) returns."""

# Commands of nvidiactl and nvidiaN: the driver reads number and size, and no more of the word.

ALLOC_MEMORY: Final = 0x27
FREE: Final = 0x29
CONTROL: Final = 0x2A
ALLOC: Final = 0x2B
DUP_OBJECT: Final = 0x34
VID_HEAP_CONTROL: Final = 0x4A
CARD_INFO: Final = 200
REGISTER_FD: Final = 201
CHECK_VERSION_STR: Final = 210
XFER_CMD: Final = 211
SYS_PARAMS: Final = 214
NUMA_INFO: Final = 215

FREE_STRUCT: Final = struct.Struct("=IIII")
"""NVOS00: root, parent, object, status."""
CONTROL_STRUCT: Final = struct.Struct("=IIIIQII")
"""NVOS54: client, object, command, flags, address and size of parameters, status."""
DUP_STRUCT: Final = struct.Struct("=IIIIIII")
"""NVOS55: client, parent, object, source client, source object, flags, status."""
ALLOC_HEAD: Final = struct.Struct("=IIIIQ")
"""Begin of NVOS21 and NVOS64: root, parent, new object, class, address of parameters."""
ALLOC_MEMORY_BYTES: Final = 56
ALLOC_MEMORY_STATUS: Final = 40
VID_HEAP_BYTES: Final = 184
VERSION_STRUCT: Final = struct.Struct("=II64s")
"""Command, reply, version."""
VERSION_QUERY: Final = ord("2")
VERSION_RELAXED: Final = ord("1")
VERSION_RECOGNIZED: Final = 1
CARD_STRUCT: Final = struct.Struct("=B3xIBBBxHHIHxxQQQQI10s2x")
"""Valid, domain, bus, slot, function, vendor, device, GPU id, interrupt, four sizes, minor, name."""
XFER_STRUCT: Final = struct.Struct("=IIQ")
SYS_PARAMS_STRUCT: Final = struct.Struct("=Q")
NUMA_HEAD: Final = struct.Struct("=iiQQQ")
"""Node, status, block size, address, size."""
NO_NUMA_NODE: Final = -1
MAX_XFER_BYTES: Final = 16_384
"""Source: nv.c, NV_ABSOLUTE_MAX_IOCTL_SIZE."""


def command(number: int, size: int) -> int:
    """Return the word of a command as libcuda writes it: _IOWR('F', number, size)."""
    return 3 << 30 | size << 16 | ord("F") << 8 | number


def number_of(word: int) -> int:
    """Return a command's number, all of it that the driver reads beside the size."""
    return word & 0xFF


class Layout(NamedTuple):
    """What differs between branches of the driver, in bytes."""

    nvos21_status: int
    nvos64_size: int
    nvos64_status: int
    numa_info_size: int
    unregister_channel_status: int
    """Of unified memory; client and channel are before it, and before these, up to driver 580, the GPU."""

    @property
    def nvos21_size(self) -> int:
        """The same in every branch."""
        return 32

    def alloc_status(self, size: int) -> int:
        """Return where the status is in an ALLOC struct of this size; raises ValueError for another size."""
        if size == self.nvos64_size:
            return self.nvos64_status
        if size == self.nvos21_size:
            return self.nvos21_status
        raise ValueError(f"no ALLOC struct has {size} bytes")

    def uvm_status(self, command: int) -> int:
        """Return where the status is in a command of unified memory; raises KeyError for one without."""
        return self.unregister_channel_status if command == UVM_UNREGISTER_CHANNEL else _UVM_STATUS[command]


def layout(driver_version: str) -> Layout:
    """Return the layout of a driver, such as 570.148.08; raises ValueError for a text that is no version."""
    branch = int(driver_version.partition(".")[0])
    if branch >= 535:
        return Layout(28, 48, 40, 560, 8 if branch >= 590 else 24)
    return Layout(24, 40, 36 if branch >= 525 else 32, 552, 24)


# Classes

ROOTS: Final = frozenset({0x0, 0x1, 0x41})
ROOT_CLIENT: Final = 0x41
DEVICE: Final = 0x80
SUBDEVICE: Final = 0x2080
OS_EVENTS: Final = frozenset({0x5, 0x78, 0x79, 0x7E})
"""NV01_EVENT and its kinds: the only classes that are allocated on nvidiaN too."""
OS_EVENT: Final = 0x79
VA_SPACE: Final = 0x90F1
CONTEXT_SHARE: Final = 0x9067
"""One for each CUDA context, as far as is known."""
CHANNEL_GROUP: Final = 0xA06C
DEBUGGER: Final = 0x83DE
USERMODE: Final = 0xC661
GPFIFO_HOPPER: Final = 0xC86F
COMPUTE_HOPPER: Final = 0xCBC0
COPY_HOPPER: Final = 0xC8B5
MEMORY_SYSTEM: Final = 0x3E

# Handles the RM chooses

FIRST_CLIENT: Final = 0xC1D00001
FIRST_OBJECT: Final = 0xCAF00000

# Status

OK: Final = 0x0
INSERT_DUPLICATE_NAME: Final = 0x19
ILLEGAL_ACTION: Final = 0x16
INSUFFICIENT_RESOURCES: Final = 0x1A
INVALID_ADDRESS: Final = 0x1E
INVALID_ARGUMENT: Final = 0x1F
INVALID_CLIENT: Final = 0x23
INVALID_DEVICE: Final = 0x26
INVALID_OBJECT_PARENT: Final = 0x36
OBJECT_NOT_FOUND: Final = 0x57

# Controls of the root client

GET_ATTACHED_IDS: Final = 0x201
GET_ID_INFO: Final = 0x202
GET_ID_INFO_V2: Final = 0x205
GET_PROBED_IDS: Final = 0x214
ID_INFO_HEAD: Final = struct.Struct("=IIII")
"""GPU id, flags, device instance, subdevice instance: the same in both versions."""
MAX_GPU_IDS: Final = 32
NO_GPU_ID: Final = 0xFFFFFFFF
GPU_IN_USE: Final = 1

# Unified memory: plain numbers, structs read and written through the caller's memory

UVM_INITIALIZE: Final = 0x30000001
UVM_DEINITIALIZE: Final = 0x30000002
UVM_REGISTER_GPU_VASPACE: Final = 25
UVM_UNREGISTER_GPU_VASPACE: Final = 26
UVM_REGISTER_CHANNEL: Final = 27
UVM_UNREGISTER_CHANNEL: Final = 28
UVM_REGISTER_GPU: Final = 37
UVM_UNREGISTER_GPU: Final = 38
UVM_MM_INITIALIZE: Final = 75

VASPACE_STRUCT: Final = struct.Struct("=16siIII")
"""GPU, descriptor of nvidiactl, client, VA space, status."""
_UVM_STATUS: Final = {
    UVM_INITIALIZE: 8,
    UVM_REGISTER_GPU_VASPACE: 28,
    UVM_UNREGISTER_GPU_VASPACE: 16,
    UVM_REGISTER_CHANNEL: 48,
    UVM_REGISTER_GPU: 36,
    UVM_UNREGISTER_GPU: 16,
    UVM_MM_INITIALIZE: 4,
}
"""Where the status is in the struct of each command that is answered, in every branch."""
UVM_UUID_BYTES: Final = 16


def device_number(major: int, minor: int) -> int:
    """Return the kernel's dev_t."""
    return major << MINOR_BITS | minor
