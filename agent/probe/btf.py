"""Offsets of struct members from BTF, the kernel's own description of its types, in pure Python.

Guarantees: describes the running kernel, not that of installed headers. Needs no headers and no bpftool.
Source: Documentation/bpf/btf.rst.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "task_struct": (
        "pid",
        "tgid",
        "start_boottime",
        "group_leader",
        "files",
        "signal",
        "cgroups",
    ),
    "signal_struct": ("live",),
    "files_struct": ("fdt",),
    "fdtable": ("max_fds", "fd"),
    "file": ("f_inode",),
    "inode": ("i_rdev", "i_ino", "i_sb"),
    "super_block": ("s_dev",),
    "css_set": ("dfl_cgrp",),
    "cgroup": ("kn",),
    "kernfs_node": ("id",),
}
"""The members that OFFSET() of bpf/gpu_probe.bpf.c is used for."""
OF_SOME_KERNELS: Final[Mapping[str, tuple[str, ...]]] = {"file": ("f_count", "f_ref")}
"""Members of which a kernel has one or the other."""

_MAGIC: Final = 0xEB9F
_STRUCT, _UNION = 4, 5
_HEAD: Final = struct.Struct("<III")
_MEMBER: Final = struct.Struct("<III")
# What follows the 12 bytes of a type, by kind: fixed, and for each of its entries.
_FOLLOWS: Final = {
    1: (4, 0),
    3: (12, 0),
    4: (0, 12),
    5: (0, 12),
    6: (0, 8),
    13: (0, 8),
    14: (4, 0),
    15: (0, 12),
    17: (4, 0),
    19: (0, 12),
}
_NOTHING: Final = (0, 0)


class BtfError(Exception):
    """There is no BTF, or it lacks what is needed."""


class StructLayout(NamedTuple):
    """Where the members of a struct are."""

    size: int
    offsets: Mapping[str, int]
    """In bytes; members of anonymous structs and unions are among them."""


def layouts(raw: bytes, names: "frozenset[str] | set[str]") -> dict[str, StructLayout]:
    """Return the layout of each struct of these names that a BTF blob describes; raises BtfError."""
    try:
        return _Blob(raw).layouts(names)
    except (struct.error, IndexError, ValueError) as error:
        raise BtfError(f"BTF is damaged: {error}") from error


def kernel_offsets(path: str) -> dict[str, int]:
    """Return the offset of each member that is needed as ``struct_member``; raises BtfError."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise BtfError(f"{path}: {error.strerror}") from error
    found = layouts(raw, frozenset(NEEDED))
    offsets: dict[str, int] = {}
    for name, members in NEEDED.items():
        for member in members:
            if name not in found or member not in found[name].offsets:
                raise BtfError(f"The kernel has no {name}.{member}")
            offsets[f"{name}_{member}"] = found[name].offsets[member]
    for name, members in OF_SOME_KERNELS.items():
        for member in set(members) & found[name].offsets.keys():
            offsets[f"{name}_{member}"] = found[name].offsets[member]
    return offsets


class _Blob:
    def __init__(self, raw: bytes) -> None:
        magic, _, _, header, types, type_bytes, strings, string_bytes = struct.unpack_from("<HBBIIIII", raw)
        if magic != _MAGIC:
            raise BtfError("BTF has another byte order or is none")
        self._raw = raw
        self._strings = raw[header + strings : header + strings + string_bytes]
        self._begin, self._end = header + types, header + types + type_bytes
        self._positions: list[int] = []

    def layouts(self, names: "frozenset[str] | set[str]") -> dict[str, StructLayout]:
        """Walk all types once; names are compared by the offset of their strings, which is fast."""
        wanted = {offset: name for name in names for offset in self._occurrences(name)}
        structs: list[tuple[str, int]] = []
        position, end, raw = self._begin, self._end, self._raw
        unpack, note = _HEAD.unpack_from, self._positions.append
        while position < end:
            note(position)
            name, info, _ = unpack(raw, position)
            kind = info >> 24 & 31
            if kind == _STRUCT and name in wanted:
                structs.append((wanted[name], position))
            fixed, each = _FOLLOWS.get(kind, _NOTHING)
            position += 12 + fixed + each * (info & 0xFFFF)
        return {name: self._layout(at) for name, at in reversed(structs)}

    def _occurrences(self, name: str) -> Iterator[int]:
        text = b"\0" + name.encode() + b"\0"
        at = self._strings.find(text)
        while at >= 0:
            yield at + 1
            at = self._strings.find(text, at + 1)

    def _layout(self, position: int) -> StructLayout:
        offsets = dict(self._members(position, 0))
        return StructLayout(_HEAD.unpack_from(self._raw, position)[2], offsets)

    def _members(self, position: int, base_bits: int) -> Iterator[tuple[str, int]]:
        _, info, _ = _HEAD.unpack_from(self._raw, position)
        for index in range(info & 0xFFFF):
            name, kind, bits = _MEMBER.unpack_from(self._raw, position + 12 + 12 * index)
            # With the kind flag, the upper byte is the size of a bit field.
            bits = base_bits + (bits & 0xFFFFFF if info >> 31 else bits)
            if name:
                yield self._text(name), bits // 8
            elif kind:
                inner = self._positions[kind - 1]
                if _HEAD.unpack_from(self._raw, inner)[1] >> 24 & 31 in (_STRUCT, _UNION):
                    yield from self._members(inner, bits)

    def _text(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()
