"""bpf(2), perf_event_open(2) and statx(2), by ctypes.

Guarantees: every failure is an OSError; the GIL is released meanwhile, so these may be called by a thread.
Source: linux/bpf.h (union bpf_attr), linux/perf_event.h (struct perf_event_attr), linux/stat.h (struct
statx).
"""

import ctypes
import errno
import fcntl
import os
import platform
import struct
from enum import IntEnum
from typing import Final, NamedTuple

_NUMBERS: Final = {"x86_64": (321, 298, 332), "aarch64": (280, 241, 291)}
_UNKNOWN: Final = (-1, -1, -1)
_OF_THIS_MACHINE: Final = _NUMBERS.get(platform.machine(), _UNKNOWN)

ANY: Final = 0
NOEXIST: Final = 1

BATCH_ROWS: Final = 4096
"""Rows read or deleted in one call."""
MAX_ROWS: Final = 1 << 20
"""No map of the probe has more; bounds a read that would not end."""

_TRACE_ITER: Final = 28  # enum bpf_attach_type
_PERF_EVENT: Final = 41
_ARRAY: Final = 2  # enum bpf_map_type
BPF_FS_MAGIC: Final = 0xCAFE4A11
"""Source: linux/magic.h."""
_STATFS_BYTES: Final = 512
_PERF_TYPE_TRACEPOINT: Final = 2
_PERF_FLAG_CLOEXEC: Final = 8
_PERF_ATTR_BYTES: Final = 128
_SET_BPF: Final = 0x40042408
_ENABLE: Final = 0x2400
_AT_FDCWD: Final = -100
_AT_NO_AUTOMOUNT: Final = 0x800
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE_AND_INO: Final = 0x101
_STATX: Final = struct.Struct("=32xQ88xIIII")
_STATX_BYTES: Final = 256

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Command(IntEnum):
    MAP_CREATE = 0
    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    MAP_DELETE = 3
    OBJECT_PIN = 6
    OBJECT_GET = 7
    OBJECT_INFO = 15
    RAW_TRACEPOINT_OPEN = 17
    MAP_LOOKUP_BATCH = 24
    MAP_DELETE_BATCH = 27
    LINK_CREATE = 28
    ITERATOR_CREATE = 33


def bpf(command: int, attributes: bytes) -> int:
    """Call the kernel and return what it returns; raises OSError."""
    return _call(0, command, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes))


def _call(which: int, *arguments: object) -> int:
    number = _OF_THIS_MACHINE[which]
    if number < 0:
        raise OSError(errno.ENOSYS, "system calls of this machine are not known")
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class FileNumbers(NamedTuple):
    """The identity of a file, in the numbers of ``os.stat``."""

    inode: int
    file_system: int
    device: int
    """Of a device file: which device; 0 of any other."""


def file_numbers(path: str) -> FileNumbers:
    """Return the identity of an open file without a call to its file system's server, which may never answer.

    Raises OSError. The kernel has the numbers of an open file in memory.
    """
    room = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC
    _call(2, _AT_FDCWD, os.fsencode(path), flags, _STATX_TYPE_AND_INO, room)
    inode, major, minor, of_major, of_minor = _STATX.unpack_from(room)
    return FileNumbers(inode, os.makedev(of_major, of_minor), os.makedev(major, minor))


class MapInfo(NamedTuple):
    """The kernel's description of a map."""

    kind: int
    number: int
    """The map's own, on the whole machine."""
    key_bytes: int
    value_bytes: int
    max_entries: int


def map_info(descriptor: int) -> MapInfo:
    """Return the kernel's description of a map."""
    # struct bpf_map_info begins with type, id, key_size, value_size, max_entries.
    info = ctypes.create_string_buffer(88)
    bpf(_Command.OBJECT_INFO, struct.pack("=IIQ", descriptor, len(info), ctypes.addressof(info)))
    return MapInfo._make(struct.unpack_from("=IIIII", info.raw))


def map_lookup(descriptor: int, key: bytes, value_bytes: int) -> bytes | None:
    """Return the value of a key, or None; of a per-CPU map all CPUs' values, so many bytes in all."""
    keys, values = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value_bytes)
    try:
        bpf(_Command.MAP_LOOKUP, _element(descriptor, keys, values, 0))
    except FileNotFoundError:
        return None
    return values.raw


def map_update(descriptor: int, key: bytes, value: bytes, flags: int = ANY) -> bool:
    """Set the value of a key; False if ``flags`` is NOEXIST and there is one."""
    keys, values = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
    try:
        bpf(_Command.MAP_UPDATE, _element(descriptor, keys, values, flags))
    except FileExistsError:
        return False
    return True


def map_delete(descriptor: int, key: bytes) -> bool:
    """Delete a key; False if it did not exist."""
    keys = ctypes.create_string_buffer(key, len(key))
    try:
        bpf(_Command.MAP_DELETE, _element(descriptor, keys, None, 0))
    except FileNotFoundError:
        return False
    return True


def _element(
    descriptor: int, key: ctypes.Array[ctypes.c_char], value: ctypes.Array[ctypes.c_char] | None, flags: int
) -> bytes:
    address = 0 if value is None else ctypes.addressof(value)
    return struct.pack("=IIQQQ", descriptor, 0, ctypes.addressof(key), address, flags)


class Rows(NamedTuple):
    """Rows of a map: keys and values, each concatenated."""

    keys: bytes
    values: bytes
    total: int


def map_rows(descriptor: int, key_bytes: int, value_bytes: int) -> Rows:
    """Return all rows of a hash map; one that is added or deleted meanwhile may be missing."""
    keys, values, total = [], [], 0
    room = BATCH_ROWS
    token = ctypes.create_string_buffer(max(8, key_bytes))
    started = False
    while total < MAX_ROWS:
        key_room = ctypes.create_string_buffer(room * key_bytes)
        value_room = ctypes.create_string_buffer(room * value_bytes)
        count, ended = _lookup_batch(
            descriptor, token if started else None, token, key_room, value_room, room
        )
        if count is None:  # one bucket alone has more rows
            room *= 2
            continue
        keys.append(key_room.raw[: count * key_bytes])
        values.append(value_room.raw[: count * value_bytes])
        total += count
        started = True
        if ended:
            break
    return Rows(b"".join(keys), b"".join(values), total)


def _lookup_batch(
    descriptor: int,
    before: ctypes.Array[ctypes.c_char] | None,
    after: ctypes.Array[ctypes.c_char],
    keys: ctypes.Array[ctypes.c_char],
    values: ctypes.Array[ctypes.c_char],
    room: int,
) -> tuple[int | None, bool]:
    """Return how many rows were read, None if a bucket did not fit, and whether these were the last."""
    attributes = ctypes.create_string_buffer(
        struct.pack(
            "=QQQQIIQQ",
            0 if before is None else ctypes.addressof(before),
            ctypes.addressof(after),
            ctypes.addressof(keys),
            ctypes.addressof(values),
            room,
            descriptor,
            0,
            0,
        ),
        56,
    )
    ended = False
    try:
        _call(0, _Command.MAP_LOOKUP_BATCH, attributes, 56)
    except FileNotFoundError:
        ended = True
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return None, False
    (count,) = struct.unpack_from("=I", attributes.raw, 32)
    return count, ended


def map_delete_keys(descriptor: int, keys: list[bytes]) -> int:
    """Delete keys and return how many existed."""
    return sum(map_delete(descriptor, key) for key in keys)


def iterator_link(program: int) -> int:
    """Return the descriptor of a link that ``iterator`` reads through."""
    return bpf(_Command.LINK_CREATE, struct.pack("=IIII", program, 0, _TRACE_ITER, 0) + bytes(32))


def iterator(link: int) -> int:
    """Return a descriptor; reading it to its end is one run of the iterator."""
    return bpf(_Command.ITERATOR_CREATE, struct.pack("=II", link, 0))


def raw_tracepoint(name: str, program: int) -> int:
    """Attach to a raw tracepoint; detached when the returned descriptor is closed."""
    text = ctypes.create_string_buffer(name.encode())
    return bpf(_Command.RAW_TRACEPOINT_OPEN, struct.pack("=QII", ctypes.addressof(text), program, 0))


def tracepoint(identifier: int, program: int) -> int:
    """Attach to a tracepoint by its id in tracefs; detached when the descriptor is closed."""
    return _perf_event(struct.pack("=IIQ", _PERF_TYPE_TRACEPOINT, _PERF_ATTR_BYTES, identifier), program)


def kprobe(pmu: int, function: str, program: int, *, at_return: bool, return_bit: int = 0) -> int:
    """Attach to a function of the kernel; detached when the descriptor is closed.

    ``pmu`` is /sys/bus/event_source/devices/kprobe/type, ``return_bit`` from its format/retprobe.
    """
    name = ctypes.create_string_buffer(function.encode())
    head = struct.pack("=IIQ", pmu, _PERF_ATTR_BYTES, int(at_return) << return_bit)
    # config1 (kprobe_func) and config2 (probe_offset) are at 56 and 64.
    return _perf_event(head.ljust(56, b"\0") + struct.pack("=QQ", ctypes.addressof(name), 0), program)


def _perf_event(attributes: bytes, program: int) -> int:
    room = ctypes.create_string_buffer(attributes, _PERF_ATTR_BYTES)
    # For every process, on CPU 0: the program runs on the CPU of each event all the same.
    event = _call(1, room, -1, 0, -1, _PERF_FLAG_CLOEXEC)
    try:
        try:
            link = bpf(_Command.LINK_CREATE, struct.pack("=IIII", program, event, _PERF_EVENT, 0) + bytes(32))
        except OSError:  # before Linux 5.15; such an attachment cannot be pinned
            fcntl.ioctl(event, _SET_BPF, program)
            link = event
        fcntl.ioctl(event, _ENABLE, 0)
    except OSError:
        os.close(event)
        raise
    if link != event:
        os.close(event)
    return link


def pin(descriptor: int, path: str) -> None:
    """Pin a map, program or link in bpffs, which keeps it; raises OSError."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    bpf(_Command.OBJECT_PIN, struct.pack("=QII", ctypes.addressof(name), descriptor, 0))


def pinned(path: str) -> int:
    """Return a descriptor of a pin in bpffs; raises OSError."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return bpf(_Command.OBJECT_GET, struct.pack("=QII", ctypes.addressof(name), 0, 0))


def array(value_bytes: int) -> int:
    """Return a new array map of one row; raises OSError."""
    return bpf(_Command.MAP_CREATE, struct.pack("=IIIII", _ARRAY, 4, value_bytes, 1, 0) + bytes(52))


def is_bpf_file_system(path: str) -> bool:
    """Return whether a directory is in bpffs; raises OSError."""
    room = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(path), room) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    (kind,) = struct.unpack_from("=q", room.raw)
    return bool(kind == BPF_FS_MAGIC)
