"""Every form of NVIDIA's lines in the kernel log, and what must not pass for one."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.ids import ALL
from agent.sources.kmsg_records import (
    FALLEN_OFF,
    MAX_ADDRESSES,
    MAX_DETAIL,
    MAX_LINE,
    MAX_LINES_IN_RECORD,
    Record,
    XidLine,
    XidReader,
    lines_of,
    record_of,
    xid_of,
)

UNANSWERED = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0\\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has"
    "\\x0aNVRM: fallen off the bus and is not responding to commands."
)
FALLEN = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."
NUMBERED = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def driver_record(text: str, time_us: int = 0) -> Record:
    return Record(sequence=1, time_us=time_us, is_kernel=True, text=text.encode())


def read(text: str) -> XidLine | None:
    record = driver_record(text)
    return xid_of(lines_of(record)) if record.is_of_driver else None


def plain(pci: str, xid: int, detail: str = "", gi: int = ALL, ci: int = ALL) -> XidLine:
    return XidLine(pci, xid, detail, gi, ci)


def in_words(pci: str) -> XidLine:
    return XidLine(pci, FALLEN_OFF, in_words=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", plain("0000:03:00.0", 14, "Channel 00000001")),
        (NUMBERED, plain("0000:3b:00.0", 79)),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", plain("0000:3b:00.0", 79)),
        ("NVRM: Xid (PCI:0000:01:00): 79, pid=1122, GPU has fallen off the bus.", plain("0000:01:00.0", 79)),
        ("NVRM: Xid (PCI:0000:01:00): 79, ", plain("0000:01:00.0", 79)),
        ("NVRM: Xid (PCI:0000:3B:00.0): 48, DBE", plain("0000:3b:00.0", 48, "DBE")),
        ("NVRM: Xid (GPU at PCI:0000:3b:00): 48, DBE", plain("0000:3b:00.0", 48, "DBE")),
        ("NVRM: Xid (PCI:00000000:3B:00): 48, DBE", plain("0000:3b:00.0", 48, "DBE")),
        ("NVRM: Xid (3b:00): 48", plain("0000:3b:00.0", 48)),
        (
            "NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s of waiting",
            plain("0000:9b:00.0", 119, "Timeout after 6s of waiting"),
        ),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No",
            plain("0000:01:00.0", 94, "Contained: CE User Channel (0x9). RST: No", gi=5),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception",
            plain("0000:3b:00.0", 13, "Graphics Exception", gi=1, ci=2),
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain)",
            plain("0009:01:00.0", 154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain)"),
        ),
        (FALLEN, in_words("0000:3b:00.0")),
        ("NVRM: GPU 18:00.0: GPU has fallen off the bus.", in_words("0000:18:00.0")),
        ("NVRM: GPU at 0000:18:00.0 has fallen off the bus.", in_words("0000:18:00.0")),
        (UNANSWERED, in_words("0000:b3:00.0")),
    ],
)
def test_every_form_of_the_driver_is_read(text: str, found: XidLine) -> None:
    assert read(text) == found


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        (
            "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x0 0x0)",
            "NETIR_LINK_EVT sub code 33, fatal, link 1",
        ),
        (
            "NVRM: Xid (PCI:0000:04:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00400004 0x00000001)",
            "RLW_REMAP sub code 4, nonfatal, link 0",
        ),
        (
            "NVRM: Xid (PCI:0000:04:00): 145, pid=7, name=x, RLW_SRC Fatal XC1 i1 Link -1 (0x00300000 0x0)",
            "RLW_SRC sub code 3, fatal, link -1",
        ),
        ("NVRM: Xid (PCI:0000:04:00): 145, Something new", "Something new"),
        (
            "NVRM: Xid (PCI:0000:04:00): 74, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00400004 0x0)",
            "RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00400004 0x0)",
        ),
    ],
)
def test_an_nvlink_error_tells_its_unit_and_sub_code(text: str, detail: str) -> None:
    found = read(text)
    assert found is not None
    assert found.detail == detail


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: GPU at PCI:0000:91:00: GPU-b6c3b2be-c55b-d076-fa0e-d464e4c7e08b",
        "NVRM: GPU Board Serial Number: 1653723052734",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.144.03",
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: Xid (PCI:0000:3b:00): , nothing",
        "NVRM: Xid (PCI:0000:3b:00): 0, nothing",
        "NVRM: Xid (PCI:0000:3b:00): 123456, too many digits",
        "NVRM: Xid (PCI:0000:3b): 79, no device",
        "NVRM: The NVIDIA GPU invalid-bdf.0\\x0aNVRM: fallen off the bus and is not responding",
        "NVRM: ",
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal",
        "some driver: NVRM: Xid (PCI:0000:3b:00): 79, forged further on",
        "",
    ],
)
def test_other_lines_are_no_xid(text: str) -> None:
    assert read(text) is None


def test_the_name_of_a_process_cannot_pretend_to_be_another_fault() -> None:
    for name in (
        "NVRM: Xid (PCI:0000:5e:00): 79, fallen",
        "\\x0aNVRM: Xid (PCI:0000:5e:00): 79",
        "GPU has fallen off the bus",
    ):
        found = read(f"NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name={name}, Graphics Exception")
        assert found is not None
        assert (found.pci, found.xid, found.in_words) == ("0000:3b:00.0", 13, False)


def test_the_process_is_not_part_of_what_is_told() -> None:
    found = read("NVRM: Xid (PCI:0000:3b:00): 13, pid=4711, name=secret-job, Graphics Exception")
    assert found is not None
    assert found.detail == "Graphics Exception"


def test_what_is_told_is_short_and_printable() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 31, " + "\x1b[31m\u202e" * 500
    lines = lines_of(driver_record(line))
    found = xid_of(lines)
    assert found is not None
    assert 0 < len(found.detail) <= MAX_DETAIL
    assert all(" " <= char <= "~" for char in found.detail)
    assert len(lines[0]) == MAX_LINE


def test_lines_of_a_record_are_bounded() -> None:
    lines = lines_of(driver_record("\\x0a".join(["NVRM: x" * 100] * 100)))
    assert len(lines) <= MAX_LINES_IN_RECORD
    assert max(map(len, lines)) <= MAX_LINE


def test_a_record_is_taken_apart() -> None:
    line = b"3,1234,5678901,-,caller=T99;NVRM: Xid (PCI:0000:3b:00): 79, gone; really"
    assert record_of(line) == Record(
        1234, 5678901, is_kernel=True, text=b"NVRM: Xid (PCI:0000:3b:00): 79, gone; really"
    )


def test_what_a_process_wrote_is_not_of_the_driver() -> None:
    record = record_of(b"11,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, forged")
    assert record is not None
    assert not record.is_kernel
    assert not record.is_of_driver


@pytest.mark.parametrize(
    "line", [b"", b" SUBSYSTEM=pci", b"no header", b"1,2,3;no flags", b"a,1,2,-;x", b"-1,1,2,-;x", b"6,1,2,-"]
)
def test_other_lines_are_no_record(line: bytes) -> None:
    assert record_of(line) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(junk: bytes) -> None:
    record_of(junk)
    for text in (junk, b"NVRM: Xid (PCI:0000:3b:00" + junk, b"NVRM: GPU 0000:3b:00.0" + junk):
        found = xid_of(lines_of(Record(0, 0, is_kernel=True, text=text)))
        assert found is None or found.detail.isprintable()


def test_reading_is_linear_in_the_length_of_a_line() -> None:
    """Lines that make a careless pattern try again and again; a quadratic one would take minutes."""
    began = time.process_time()
    for evil in (
        "NVRM: Xid (" + "PCI:" * 4_000,
        "NVRM: Xid (PCI:0000:3b:00" + " GPU-I:1" * 2_000,
        "NVRM: " + " " * 8_000 + "Xid",
        "NVRM: GPU 0000:3b:00.0" + "fallen off the bu" * 500,
        "NVRM: Xid (PCI:0000:3b:00): 145, " + "A_" * 4_000 + " Fatal",
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=" + "1" * 8_000,
        "\\x0a" * 2_000,
    ):
        for _ in range(20):
            read(evil)
    assert time.process_time() - began < 10


# One fault in two lines


def said(reader: XidReader, text: str, time_us: int) -> XidLine | None:
    return reader.read(lines_of(driver_record(text)), time_us)


def test_a_number_and_words_together_are_one_fault() -> None:
    reader = XidReader()
    assert said(reader, NUMBERED, 1_000) is not None
    assert said(reader, FALLEN, 1_004) is None


def test_words_and_then_the_number_are_one_fault() -> None:
    reader = XidReader()
    assert said(reader, FALLEN, 1_000) is not None
    assert said(reader, NUMBERED, 1_004) is None


def test_each_number_counts() -> None:
    reader = XidReader()
    assert said(reader, NUMBERED, 1_000) is not None
    assert said(reader, NUMBERED, 1_004) is not None


def test_words_later_or_of_another_gpu_are_another_fault() -> None:
    reader = XidReader()
    assert said(reader, NUMBERED, 0) is not None
    assert said(reader, FALLEN.replace("3b", "3c"), 1_000) is not None
    assert said(reader, FALLEN, 10_000_000) is not None


def test_words_that_are_repeated_at_once_are_one_fault() -> None:
    reader = XidReader()
    assert said(reader, FALLEN, 0) is not None
    assert said(reader, FALLEN, 1_000) is None


def test_it_is_remembered_of_so_many_gpus_which_fell() -> None:
    reader = XidReader()
    for bus in range(MAX_ADDRESSES + 1):
        said(reader, f"NVRM: Xid (PCI:0000:{bus:02x}:00): 79, x", bus)
    assert said(reader, "NVRM: GPU 0000:40:00.0: GPU has fallen off the bus.", 100) is None
    assert said(reader, "NVRM: GPU 0000:00:00.0: GPU has fallen off the bus.", 100) is not None
