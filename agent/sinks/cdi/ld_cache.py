"""Reads the dynamic linker's cache, which lists libraries that lie in no usual directory.

Guarantees: whatever the bytes are, it ends, in time and room that their number bounds, and without an
exception. What makes no sense is skipped.

Source: glibc:sysdeps/generic/dl-cache.h; the old format of before glibc 2.2 may stand before the new one.
"""

import struct
from collections.abc import Iterator
from typing import Final

MAX_BYTES: Final = 8 * 1024 * 1024
"""A desktop's cache has 200 KiB."""
MAX_LIBRARIES: Final = 16_384
MAX_PATH_BYTES: Final = 4_096

_OLD: Final = b"ld.so-1.7.0\0"
_NEW: Final = b"glibc-ld.so.cache1.1"

_OLD_ENTRY: Final = struct.Struct("<iII")
_HEADER: Final = struct.Struct("<20sII B3xI12x")
"""Magic, libraries, bytes of the strings, flags, offset of extensions."""
_ENTRY: Final = struct.Struct("<iIIIQ")
"""Flags, name, path, version of the system, hardware capabilities."""

_ELF: Final = 0x0001
_TYPE: Final = 0x00FF
_MACHINE: Final = 0xFF00
_WIDE: Final = frozenset((0x0300, 0x0500, 0x0A00))
"""64-bit libraries of x86-64, ppc64le and aarch64; a cache has no others beside those of its machine."""


def libraries(cache: bytes) -> Iterator[tuple[str, str]]:
    """Yield name and path of each 64-bit library in the cache."""
    start = _start(cache)
    if start is None:
        return
    strings = memoryview(cache)[start:]
    _, count, _, _, _ = _HEADER.unpack_from(strings)
    room = (len(strings) - _HEADER.size) // _ENTRY.size
    for number in range(min(count, room, MAX_LIBRARIES)):
        flags, name_at, path_at, _, _ = _ENTRY.unpack_from(strings, _HEADER.size + number * _ENTRY.size)
        if flags & _TYPE & _ELF and flags & _MACHINE in _WIDE:
            name, path = _text(strings, name_at), _text(strings, path_at)
            if name and path.startswith("/"):
                yield name, path


def _start(cache: bytes) -> int | None:
    """Return where the new format begins; None where there is none of it."""
    start = 0
    if cache.startswith(_OLD) and len(cache) >= len(_OLD) + 4:
        (count,) = struct.unpack_from("<I", cache, len(_OLD))
        end = len(_OLD) + 4 + count * _OLD_ENTRY.size
        start = -(-end // 8) * 8
    if cache[start : start + len(_NEW)] != _NEW or len(cache) < start + _HEADER.size:
        return None
    return start


def _text(strings: memoryview, at: int) -> str:
    """Return the text that ends with a zero; empty where none does, or where it is no path of ours."""
    piece = bytes(strings[at : at + MAX_PATH_BYTES])
    text, end, _ = piece.partition(b"\0")
    return text.decode("ascii", "replace") if end and text.isascii() else ""
