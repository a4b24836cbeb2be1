"""The driver's calls by name: each ioctl on its device files, its object and its outcome.

Invariants: a layout is only named where every driver from 515 to 595 has it, or where its size or the
driver's branch distinguishes them; unknown values are None. Sources: NVIDIA/open-gpu-kernel-modules
nv_escape.h, nv-ioctl-numbers.h, nvos.h, g_allclasses.h, uvm_ioctl.h, uvm_linux_ioctl.h, nvstatuscodes.h.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.probe.kernel import Majors, alloc_status
from agent.probe.layout import TracedCall

ANY_SIZE: Final = 0
"""For a call whose status is at the same offset whatever its size."""
CONTROL_MINOR: Final = 255
MODESET_MINOR: Final = 254
MINOR_MASK: Final = (1 << 20) - 1


@dataclass(frozen=True, slots=True)
class _Form:
    """A call: its name, and the byte offsets of its values in the parameters."""

    name: str
    client: int | None = None
    object: int | None = None
    rm_class: int | None = None
    command: int | None = None
    status: Mapping[int, int] = field(default_factory=dict)
    """By the size of the parameters."""


RM_ALLOC: Final = 0x2B

_FORMS: Final[Mapping[int, _Form]] = {
    0x27: _Form("RM_ALLOC_MEMORY", 0, 8, rm_class=12, status={56: 40}),
    0x28: _Form("RM_ALLOC_OBJECT", 0, 8, rm_class=12, status={20: 16}),
    0x29: _Form("RM_FREE", 0, 8, status={16: 12}),
    0x2A: _Form("RM_CONTROL", 0, 4, command=8, status={32: 28}),
    RM_ALLOC: _Form("RM_ALLOC", 0, 8, rm_class=12),
    0x32: _Form("RM_CONFIG_GET"),
    0x33: _Form("RM_CONFIG_SET"),
    0x34: _Form("RM_DUP_OBJECT", 0, 8, status={28: 24}),
    0x35: _Form("RM_SHARE", 0, 4),
    0x37: _Form("RM_CONFIG_GET_EX"),
    0x38: _Form("RM_CONFIG_SET_EX"),
    0x39: _Form("RM_I2C_ACCESS"),
    0x41: _Form("RM_IDLE_CHANNELS", 0),
    0x4A: _Form("RM_VID_HEAP_CONTROL", 0, status={ANY_SIZE: 20}),
    0x4D: _Form("RM_ACCESS_REGISTRY"),
    0x4E: _Form("RM_MAP_MEMORY", 0, 8, status={56: 40}),
    0x4F: _Form("RM_UNMAP_MEMORY", 0, 8, status={32: 24}),
    0x52: _Form("RM_GET_EVENT_DATA"),
    0x54: _Form("RM_ALLOC_CONTEXT_DMA2", object=8, rm_class=12, status={56: 48}),
    0x56: _Form("RM_ADD_VBLANK_CALLBACK"),
    0x57: _Form("RM_MAP_MEMORY_DMA", 0, 12, status={56: 48, 64: 56}),
    0x58: _Form("RM_UNMAP_MEMORY_DMA", 0, 12, status={40: 32, 48: 40}),
    0x59: _Form("RM_BIND_CONTEXT_DMA", 0),
    0x5C: _Form("RM_EXPORT_OBJECT_TO_FD"),
    0x5D: _Form("RM_IMPORT_OBJECT_FROM_FD"),
    0x5E: _Form("RM_UPDATE_DEVICE_MAPPING_INFO", 0, 8, status={40: 32}),
    200: _Form("CARD_INFO"),
    201: _Form("REGISTER_FD"),
    206: _Form("ALLOC_OS_EVENT", 0, status={16: 12}),
    207: _Form("FREE_OS_EVENT", 0, status={16: 12}),
    209: _Form("STATUS_CODE"),
    210: _Form("CHECK_VERSION_STR"),
    211: _Form("XFER_CMD"),
    212: _Form("ATTACH_GPUS_TO_FD"),
    213: _Form("QUERY_DEVICE_INTR"),
    214: _Form("SYS_PARAMS"),
    215: _Form("NUMA_INFO"),
    216: _Form("SET_NUMA_STATUS"),
    217: _Form("EXPORT_TO_DMABUF_FD"),
    218: _Form("WAIT_OPEN_COMPLETE"),
}
"""Of nvidiactl and nvidiaN, by the number in the ioctl's command."""


def _uvm(name: str, status: int | None = None, client: int | None = None, handle: int | None = None) -> _Form:
    return _Form(f"UVM_{name}", client, handle, status={} if status is None else {ANY_SIZE: status})


_UVM_FORMS: Final[Mapping[int, _Form]] = {
    0x30000001: _uvm("INITIALIZE", 8),
    0x30000002: _uvm("DEINITIALIZE"),
    23: _uvm("CREATE_RANGE_GROUP", 8),
    24: _uvm("DESTROY_RANGE_GROUP", 8),
    25: _uvm("REGISTER_GPU_VASPACE", 28, 20, 24),
    26: _uvm("UNREGISTER_GPU_VASPACE", 16),
    27: _uvm("REGISTER_CHANNEL", 48, 20, 24),
    28: _uvm("UNREGISTER_CHANNEL"),
    29: _uvm("ENABLE_PEER_ACCESS", 32),
    30: _uvm("DISABLE_PEER_ACCESS", 32),
    31: _uvm("SET_RANGE_GROUP", 24),
    33: _uvm("MAP_EXTERNAL_ALLOCATION"),
    34: _uvm("FREE"),
    37: _uvm("REGISTER_GPU", 36, 28),
    38: _uvm("UNREGISTER_GPU", 16),
    39: _uvm("PAGEABLE_MEM_ACCESS", 4),
    40: _uvm("PREVENT_MIGRATION_RANGE_GROUPS"),
    41: _uvm("ALLOW_MIGRATION_RANGE_GROUPS"),
    42: _uvm("SET_PREFERRED_LOCATION"),
    43: _uvm("UNSET_PREFERRED_LOCATION", 16),
    44: _uvm("ENABLE_READ_DUPLICATION", 16),
    45: _uvm("DISABLE_READ_DUPLICATION", 16),
    46: _uvm("SET_ACCESSED_BY", 32),
    47: _uvm("UNSET_ACCESSED_BY", 32),
    51: _uvm("MIGRATE"),
    53: _uvm("MIGRATE_RANGE_GROUP", 24),
    54: _uvm("ENABLE_SYSTEM_WIDE_ATOMICS", 16),
    55: _uvm("DISABLE_SYSTEM_WIDE_ATOMICS", 16),
    65: _uvm("MAP_DYNAMIC_PARALLELISM_REGION", 32),
    66: _uvm("UNMAP_EXTERNAL", 32),
    68: _uvm("ALLOC_SEMAPHORE_POOL"),
    70: _uvm("PAGEABLE_MEM_ACCESS_ON_GPU"),
    71: _uvm("POPULATE_PAGEABLE"),
    72: _uvm("VALIDATE_VA_RANGE"),
    73: _uvm("CREATE_EXTERNAL_RANGE", 16),
    75: _uvm("MM_INITIALIZE", 4),
}
"""Of nvidia-uvm, by the whole command."""

_UVM_BEFORE_590: Final[Mapping[int, _Form]] = {
    28: _uvm("UNREGISTER_CHANNEL", 24, 16, 20),
    34: _uvm("FREE", 16),
}
_UVM_SINCE_590: Final[Mapping[int, _Form]] = {
    28: _uvm("UNREGISTER_CHANNEL", 8, 0, 4),
    34: _uvm("FREE", 8),
}
"""Those of which members went: the GPU of a channel, the length of a range."""
_UVM_MOVED: Final = 590

_CLASSES: Final[Mapping[int, str]] = {
    0x0000: "NV01_ROOT",
    0x0001: "NV01_ROOT_NON_PRIV",
    0x0005: "NV01_EVENT",
    0x003E: "NV01_MEMORY_SYSTEM",
    0x0040: "NV01_MEMORY_LOCAL_USER",
    0x0041: "NV01_ROOT_CLIENT",
    0x0071: "NV01_MEMORY_SYSTEM_OS_DESCRIPTOR",
    0x0079: "NV01_EVENT_OS_EVENT",
    0x0080: "NV01_DEVICE_0",
    0x2080: "NV20_SUBDEVICE_0",
    0x83DE: "GT200_DEBUGGER",
    0x9067: "FERMI_CONTEXT_SHARE_A",
    0x90F1: "FERMI_VASPACE_A",
    0xA06C: "KEPLER_CHANNEL_GROUP_A",
    0xC06F: "PASCAL_CHANNEL_GPFIFO_A",
    0xC36F: "VOLTA_CHANNEL_GPFIFO_A",
    0xC46F: "TURING_CHANNEL_GPFIFO_A",
    0xC56F: "AMPERE_CHANNEL_GPFIFO_A",
    0xC86F: "HOPPER_CHANNEL_GPFIFO_A",
    0xC96F: "BLACKWELL_CHANNEL_GPFIFO_A",
    0xCA6F: "BLACKWELL_CHANNEL_GPFIFO_B",
    0xC361: "VOLTA_USERMODE_A",
    0xC461: "TURING_USERMODE_A",
    0xC561: "AMPERE_USERMODE_A",
    0xC661: "HOPPER_USERMODE_A",
    0xC761: "BLACKWELL_USERMODE_A",
    0xC3B5: "VOLTA_DMA_COPY_A",
    0xC5B5: "TURING_DMA_COPY_A",
    0xC6B5: "AMPERE_DMA_COPY_A",
    0xC7B5: "AMPERE_DMA_COPY_B",
    0xC8B5: "HOPPER_DMA_COPY_A",
    0xC9B5: "BLACKWELL_DMA_COPY_A",
    0xCAB5: "BLACKWELL_DMA_COPY_B",
    0xC5C0: "TURING_COMPUTE_A",
    0xC6C0: "AMPERE_COMPUTE_A",
    0xC7C0: "AMPERE_COMPUTE_B",
    0xC9C0: "ADA_COMPUTE_A",
    0xCBC0: "HOPPER_COMPUTE_A",
    0xCDC0: "BLACKWELL_COMPUTE_A",
    0xCEC0: "BLACKWELL_COMPUTE_B",
}
_ROOTS: Final = frozenset({0x0000, 0x0001, 0x0041})

_STATUS: Final[Mapping[int, str]] = {
    0x00: "OK",
    0x03: "BUSY_RETRY",
    0x05: "CARD_NOT_PRESENT",
    0x0B: "ECC_ERROR",
    0x0F: "GPU_IS_LOST",
    0x10: "GPU_IN_FULLCHIP_RESET",
    0x11: "GPU_NOT_FULL_POWER",
    0x12: "GPU_UUID_NOT_FOUND",
    0x16: "ILLEGAL_ACTION",
    0x17: "IN_USE",
    0x19: "INSERT_DUPLICATE_NAME",
    0x1A: "INSUFFICIENT_RESOURCES",
    0x1B: "INSUFFICIENT_PERMISSIONS",
    0x1E: "INVALID_ADDRESS",
    0x1F: "INVALID_ARGUMENT",
    0x21: "INVALID_CHANNEL",
    0x22: "INVALID_CLASS",
    0x23: "INVALID_CLIENT",
    0x24: "INVALID_COMMAND",
    0x26: "INVALID_DEVICE",
    0x31: "INVALID_OBJECT",
    0x33: "INVALID_OBJECT_HANDLE",
    0x36: "INVALID_OBJECT_PARENT",
    0x3A: "INVALID_PARAM_STRUCT",
    0x3B: "INVALID_PARAMETER",
    0x3D: "INVALID_POINTER",
    0x3F: "INVALID_REQUEST",
    0x40: "INVALID_STATE",
    0x51: "NO_MEMORY",
    0x55: "NOT_READY",
    0x56: "NOT_SUPPORTED",
    0x57: "OBJECT_NOT_FOUND",
    0x59: "OPERATING_SYSTEM",
    0x62: "RESET_REQUIRED",
    0x63: "STATE_IN_USE",
    0x65: "TIMEOUT",
    0x66: "TIMEOUT_RETRY",
    0x6A: "LIB_RM_VERSION_MISMATCH",
    0x6E: "RESOURCE_LOST",
    0x71: "FATAL_ERROR",
    0x72: "MEMORY_ERROR",
    0xFFFF: "GENERIC",
}


@dataclass(frozen=True, slots=True)
class DriverCall:
    """One call of the driver, with names."""

    at_ns: int
    """When it began."""
    thread: int
    device: str
    name: str
    about: str | None
    """The class of the object, or the control's command."""
    client: int | None
    handle: int | None
    took_ns: int | None
    """None: it has not returned."""
    result: int
    """What the ioctl returned: 0, or a negative errno; the driver's own answer is the status."""
    status: int | None
    """Of the resource manager or of unified memory; None where it is unknown."""

    @property
    def answer(self) -> str | None:
        """The outcome, in a word; None while it is under way."""
        if self.took_ns is None:
            return None
        if self.result:
            return errno.errorcode.get(-self.result, str(self.result))
        return "OK" if self.status is None else status_name(self.status)

    @property
    def failed(self) -> bool:
        """Whether it failed."""
        return bool(self.result or self.status)


def named(call: TracedCall, majors: Majors, *, branch: int) -> DriverCall:
    """Return a traced call with names; ``branch`` is the driver's, such as 570; 0: unknown."""
    is_uvm = bool(majors.uvm) and call.device >> 20 == majors.uvm
    form = _uvm_form(call.number, branch) if is_uvm else _FORMS.get(call.number)
    form = form or _unknown(call.number, is_uvm=is_uvm)
    rm_class, handle = _word(call, form.rm_class), _word(call, form.object)
    client = handle if call.number == RM_ALLOC and rm_class in _ROOTS else _word(call, form.client)
    return DriverCall(
        at_ns=call.entered_ns,
        thread=call.pid,
        device=device_name(call.device, majors),
        name=form.name,
        about=_about(rm_class, _word(call, form.command)),
        client=client,
        handle=handle,
        took_ns=call.took_ns or None,
        result=call.result,
        status=_word(call, _status_at(call, form, branch)) if call.took_ns else None,
    )


def device_name(device: int, majors: Majors) -> str:
    """Return the name of a device file."""
    major, minor = device >> 20, device & MINOR_MASK
    if majors.uvm and major == majors.uvm:
        return "nvidia-uvm-tools" if minor else "nvidia-uvm"
    if majors.caps and major == majors.caps:
        return f"nvidia-cap{minor}"
    return {CONTROL_MINOR: "nvidiactl", MODESET_MINOR: "nvidia-modeset"}.get(minor, f"nvidia{minor}")


def class_name(rm_class: int) -> str:
    """Return the name of a class; its number where that is unknown."""
    return _CLASSES.get(rm_class, f"class {rm_class:#06x}")


def status_name(status: int) -> str:
    """Return the name of a status; its number where that is unknown."""
    return _STATUS.get(status, f"status {status:#x}")


def _unknown(number: int, *, is_uvm: bool) -> _Form:
    return _Form(f"UVM_{number}" if is_uvm else f"ioctl {number:#04x}")


def _about(rm_class: int | None, command: int | None) -> str | None:
    if rm_class is not None:
        return class_name(rm_class)
    return None if command is None else f"{command:#010x}"


def _uvm_form(number: int, branch: int) -> _Form | None:
    moved = (_UVM_SINCE_590 if branch >= _UVM_MOVED else _UVM_BEFORE_590) if branch else {}
    return moved.get(number) or _UVM_FORMS.get(number)


def _status_at(call: TracedCall, form: _Form, branch: int) -> int | None:
    if call.number == RM_ALLOC:
        return alloc_status(branch, call.size)
    return form.status.get(call.size, form.status.get(ANY_SIZE))


def _word(call: TracedCall, at: int | None) -> int | None:
    """Return a number of the parameters; None where it is beyond what was read."""
    if at is None or at + 4 > call.block_bytes:
        return None
    return int.from_bytes(call.block[at : at + 4], "little")
