"""Struct offsets from BTF."""

import struct
from pathlib import Path

import pytest

from agent.probe import btf
from agent.probe.kernel import Roots

STRUCT, UNION, INT = 4, 5, 1


class Blob:
    """Builds a BTF blob type by type; the first type has number 1."""

    def __init__(self) -> None:
        self._types = b""
        self._strings = b"\0"

    def _text(self, name: str) -> int:
        if not name:
            return 0
        at = len(self._strings)
        self._strings += name.encode() + b"\0"
        return at

    def whole(self, name: str) -> None:
        self._types += struct.pack("<IIII", self._text(name), INT << 24, 4, 32)

    def compound(
        self, kind: int, name: str, members: list[tuple[str, int, int]], *, bit_fields: bool = False
    ) -> None:
        info = bit_fields << 31 | kind << 24 | len(members)
        self._types += struct.pack("<III", self._text(name), info, 64)
        for member, number, bits in members:
            self._types += struct.pack("<III", self._text(member), number, bits)

    def raw(self) -> bytes:
        head = struct.pack(
            "<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(self._types), len(self._types), len(self._strings)
        )
        return head + self._types + self._strings


def test_members_of_nested_anonymous_compounds_are_found() -> None:
    blob = Blob()
    blob.whole("int")
    blob.compound(UNION, "", [("deep", 1, 32), ("also", 1, 0)])
    blob.compound(STRUCT, "", [("inner", 1, 0), ("", 2, 64)])
    blob.compound(STRUCT, "outer", [("first", 1, 0), ("", 3, 128)])

    assert btf.layouts(blob.raw(), {"outer"}) == {
        "outer": btf.StructLayout(64, {"first": 0, "inner": 16, "deep": 28, "also": 24})
    }


def test_a_struct_with_bit_fields_has_its_offsets_in_the_lower_bytes() -> None:
    blob = Blob()
    blob.whole("int")
    blob.compound(STRUCT, "packed", [("bit", 1, 1 << 24 | 64), ("word", 1, 96)], bit_fields=True)

    assert btf.layouts(blob.raw(), {"packed"})["packed"].offsets == {"bit": 8, "word": 12}


def test_a_name_that_ends_like_another_is_another() -> None:
    blob = Blob()
    blob.whole("int")
    blob.compound(STRUCT, "my_file", [("x", 1, 0)])
    blob.compound(STRUCT, "file", [("y", 1, 32)])

    assert btf.layouts(blob.raw(), {"file"})["file"].offsets == {"y": 4}


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:20],
        lambda raw: b"\x9f\xeb"[::-1] + raw[2:],
        lambda raw: raw[:30],
        lambda raw: raw[:12] + b"\xff\xff\xff\x7f" + raw[16:],
    ],
)
def test_damaged_btf_is_reported(damage: object) -> None:
    blob = Blob()
    blob.whole("int")
    blob.compound(STRUCT, "file", [("f_inode", 1, 0)])
    assert callable(damage)

    with pytest.raises(btf.BtfError):
        btf.layouts(damage(blob.raw()), {"file"})["file"]


def test_a_kernel_that_lacks_a_member_is_named(tmp_path: Path) -> None:
    blob = Blob()
    blob.whole("int")
    blob.compound(STRUCT, "task_struct", [("pid", 1, 0)])
    (tmp_path / "vmlinux").write_bytes(blob.raw())

    with pytest.raises(btf.BtfError, match=r"task_struct\.tgid"):
        btf.kernel_offsets(str(tmp_path / "vmlinux"))


def test_this_kernel_has_every_offset() -> None:
    path = Roots().btf
    if not Path(path).exists():
        pytest.skip("this kernel has no BTF")

    offsets = btf.kernel_offsets(path)

    # And one of the two counts of a file's references.
    assert len(offsets) == sum(len(members) for members in btf.NEEDED.values()) + 1
    # In one word each, and in this order since Linux 2.6.
    assert offsets["task_struct_tgid"] == offsets["task_struct_pid"] + 4
