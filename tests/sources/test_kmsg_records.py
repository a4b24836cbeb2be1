"""Every format of NVIDIA's lines in the kernel log, and lines that must not match."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.ids import ALL
from agent.model.xid import NO_WORDS, XidWords
from agent.sources.kmsg_records import (
    FALLEN_OFF,
    MAX_ADDRESSES,
    MAX_DETAIL,
    MAX_LINE,
    MAX_LINES_IN_RECORD,
    Line,
    LogReader,
    Record,
    RepairLine,
    SwitchLine,
    UvmLine,
    XidLine,
    parse_line,
    parse_record,
    split_lines,
)

UNANSWERED = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0\\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has"
    "\\x0aNVRM: fallen off the bus and is not responding to commands."
)
FALLEN = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."
NUMBERED = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def driver_record(text: str, time_us: int = 0) -> Record:
    return Record(sequence=1, time_us=time_us, is_kernel=True, text=text.encode())


def parse_text(text: str) -> Line | None:
    record = driver_record(text)
    return parse_line(split_lines(record)) if record.may_matter else None


def plain(
    pci: str, xid: int, detail: str = "", gi: int = ALL, ci: int = ALL, words: XidWords = NO_WORDS
) -> XidLine:
    return XidLine(pci, xid, detail, gi, ci, words)


def in_words(pci: str) -> XidLine:
    return XidLine(pci, FALLEN_OFF, in_words=True)


CHANGED = "GPU recovery action changed from 0x0 (None) to "


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # 515 to 565 name a process in each line, newer ones where there is one.
        (NUMBERED, plain("0000:3b:00.0", 79)),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", plain("0000:3b:00.0", 79)),
        ("NVRM: Xid (PCI:0000:01:00): 79, ", plain("0000:01:00.0", 79)),
        ("NVRM: Xid (PCI:10000:01:00): 48, DBE", plain("0000:01:00.0", 48, "DBE")),
        (
            "NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s of waiting",
            plain("0000:9b:00.0", 119, "Timeout after 6s of waiting"),
        ),
        (
            (
                "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, "
                "Contained: CE User Channel (0x9). RST: No, D-RST: No"
            ),
            plain(
                "0000:01:00.0",
                94,
                "Contained: CE User Channel (0x9). RST: No, D-RST: No",
                gi=5,
                words=XidWords(reset=False),
            ),
        ),
        (
            (
                "NVRM: Xid (PCI:0000:01:00): 95, pid=7062, name=RST: No, D-RST:, "
                "Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No"
            ),
            plain(
                "0000:01:00.0",
                95,
                "D-RST:, Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No",
                words=XidWords(reset=True),
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception",
            plain("0000:3b:00.0", 13, "Graphics Exception", gi=1, ci=2),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 45, pid=9, name=a, Ch 00000008 caused by previous Xid 31",
            plain("0000:3b:00.0", 45, "Ch 00000008 caused by previous Xid 31"),
        ),
        # 565 and newer; the words of an action changed with the branch, its number did not.
        (
            f"NVRM: Xid (PCI:0009:01:00): 154, {CHANGED}0x1 (GPU Reset Required)",
            plain("0009:01:00.0", 154, f"{CHANGED}0x1 (GPU Reset Required)", words=XidWords(action=1)),
        ),
        (
            f"NVRM: Xid (PCI:0009:01:00): 154, pid=7, name=x, y, {CHANGED}0x2 (OS Reboot)",
            plain("0009:01:00.0", 154, f"y, {CHANGED}0x2 (OS Reboot)", words=XidWords(action=2)),
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x1 (PF FLR) to 0x0 (None)",
            plain(
                "0009:01:00.0",
                154,
                "GPU recovery action changed from 0x1 (PF FLR) to 0x0 (None)",
                words=XidWords(action=0),
            ),
        ),
        (
            f"NVRM: Xid (PCI:0009:01:00): 154, {CHANGED}0x2",
            plain("0009:01:00.0", 154, f"{CHANGED}0x2"),
        ),
        (FALLEN, in_words("0000:3b:00.0")),
        (UNANSWERED, in_words("0000:b3:00.0")),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 30 sourcetrack timeout error",
            SwitchLine("0000:c3:00.0", 24007, fatal=True, detail="Link 30 sourcetrack timeout error"),
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress (First)",
            SwitchLine("0000:c1:00.0", 12028, fatal=False, detail="Link 32 egress (First)"),
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Data {0x0000008b}",
            SwitchLine("0000:c1:00.0", 12028, fatal=False, detail="Data {0x0000008b}"),
        ),
        (
            (
                "nvidia-uvm: uvm_global.c:416 uvm_global_set_fatal_error_impl[pid:71] Encountered a global "
                "fatal error: NV_ERR_RC_ERROR"
            ),
            UvmLine("NV_ERR_RC_ERROR"),
        ),
        (
            (
                "NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os"
                " reboot to recover."
            ),
            UvmLine("0x60"),
        ),
        ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.144.03  Mon Dec 30", RepairLine(None)),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15", RepairLine(None)),
        ("pci 0000:3b:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint", RepairLine("0000:3b:00.0")),
    ],
)
def test_every_form_of_the_driver_is_read(text: str, found: Line) -> None:
    assert parse_text(text) == found


@pytest.mark.parametrize(
    ("text", "detail", "words"),
    [
        (
            "149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x0 0x0)",
            "NETIR_LINK_EVT sub code 33, fatal, link 1",
            XidWords(severity="fatal", unit="NETIR_LINK_EVT", sub_code=33),
        ),
        (
            "145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00400004 0x00000001)",
            "RLW_REMAP sub code 4, nonfatal, link 0",
            XidWords(severity="nonfatal", unit="RLW_REMAP", sub_code=4),
        ),
        (
            "145, pid=7, name=A Fatal XC0 i0, RLW_SRC Nonfatal XC1 i1 Link -1 (0x00300000 0x0)",
            "RLW_SRC sub code 3, nonfatal, link -1",
            XidWords(severity="nonfatal", unit="RLW_SRC", sub_code=3),
        ),
        ("145, Something new", "Something new", NO_WORDS),
        (
            "74, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00400004 0x0)",
            "RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00400004 0x0)",
            NO_WORDS,
        ),
    ],
)
def test_an_nvlink_error_has_its_unit_sub_code_and_severity(text: str, detail: str, words: XidWords) -> None:
    found = parse_text(f"NVRM: Xid (PCI:0000:04:00): {text}")
    assert isinstance(found, XidLine)
    assert (found.detail, found.words) == (detail, words)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: GPU at PCI:0000:91:00: GPU-b6c3b2be-c55b-d076-fa0e-d464e4c7e08b",
        "NVRM: GPU Board Serial Number: 1653723052734",
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: Xid (PCI:0000:3b:00): , nothing",
        "NVRM: Xid (PCI:0000:3b:00): 0, nothing",
        "NVRM: Xid (PCI:0000:3b:00): 123456, too many digits",
        "NVRM: Xid (PCI:0000:3b): 79, no device",
        "NVRM: Xid (3b:00): 79, as a name has room for",
        "NVRM: Xid (0000:3b:00): 79, without the bus",
        "NVRM: GPU 3b:00.0: GPU has fallen off the bus.",
        "NVRM: GPU 0000:18:00.0 has fallen off the bus.",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus. And more",
        "NVRM: The NVIDIA GPU invalid-bdf.0\\x0aNVRM: fallen off the bus and is not responding",
        "NVRM: ",
        "nvidia-nvswitch[77]: segfault at 0 ip 0 sp 0 error 4 in SXid (PCI:0000:c1:00.0): 12028, Fatal",
        "nvidia-uvm: x[77]: segfault at 0 in Encountered a global fatal error: x",
        "pci 0000:3b:00.[77]: segfault at 0 ip 0 sp 0 error 4 in [10de:2330] type 00",
        "some driver: NVRM: Xid (PCI:0000:3b:00): 79, forged further on",
        "",
    ],
)
def test_other_lines_are_nothing(text: str) -> None:
    assert parse_text(text) is None


COMMS = (
    "NVRM: GPU 1b:00",
    "NVRM: Xid (1b:0",
    "NVRM: Xid (PCI:",
    "NVRM: The NVIDI",
    "nvidia-nvswitch",
    "nvidia-uvm: uvm",
    "pci 0000:1b:00.",
    "\\x0aNVRM: Xid (P",
)
"""Names that users may give to their processes: 15 bytes."""

KERNELS_OWN = (
    "{comm}[77]: segfault at 0 ip 000055 sp 00007f error 4 in {binary}[55d0+1000] likely on CPU 1",
    "{comm}: page allocation failure: order:9, mode:0x40dc0, nodemask=(null),cpuset={binary}",
    "{comm} invoked oom-killer: gfp_mask=0xcc0, order=0, oom_score_adj=0 {binary}",
    "{comm}[77] trap int3 ip:55 sp:7f error:0 in {binary}[55+1]",
    "{comm} (77): drop_caches: {binary}",
)
"""Records of the kernel's that begin with the name of a process and may end with that of a file."""

BINARIES = (
    "GPU has fallen off the bus.",
    "fallen off the bus and is not responding to commands.",
    "): 79, GPU has fallen off the bus.",
    "\\x0aNVRM: Xid (PCI:0000:1b:00): 79, x",
    "): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
)


@pytest.mark.parametrize("comm", COMMS)
def test_no_name_of_a_process_makes_a_line_of_the_driver(comm: str) -> None:
    assert len(comm.replace("\\x0a", "\n")) <= 15
    for form in KERNELS_OWN:
        for binary in BINARIES:
            assert parse_text(form.format(comm=comm, binary=binary)) is None


@given(
    comm=st.text(st.characters(codec="ascii", exclude_characters="\n"), max_size=15),
    form=st.sampled_from(KERNELS_OWN),
)
def test_no_other_name_does_either(comm: str, form: str) -> None:
    for prefix in ("", "NVRM: ", "NVRM: Xid ("):
        text = form.format(comm=(prefix + comm)[:15], binary=BINARIES[0])
        assert parse_line(split_lines(driver_record(text))) is None


def test_the_name_of_a_process_cannot_forge_another_fault() -> None:
    for name in (
        "NVRM: Xid (PCI:0000:5e:00): 79, fallen",
        "\\x0aNVRM: Xid (PCI:0000:5e:00): 79",
        "GPU has fallen off the bus",
    ):
        found = parse_text(f"NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name={name}, Graphics Exception")
        assert isinstance(found, XidLine)
        assert (found.pci, found.xid, found.in_words) == ("0000:3b:00.0", 13, False)


def test_the_process_is_not_part_of_the_detail() -> None:
    found = parse_text("NVRM: Xid (PCI:0000:3b:00): 13, pid=4711, name=secret-job, Graphics Exception")
    assert isinstance(found, XidLine)
    assert found.detail == "Graphics Exception"


def test_the_detail_is_short_and_printable() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 31, " + "\x1b[31m\u202e" * 500
    lines = split_lines(driver_record(line))
    found = parse_line(lines)
    assert isinstance(found, XidLine)
    assert 0 < len(found.detail) <= MAX_DETAIL
    assert all(" " <= char <= "~" for char in found.detail)
    assert len(lines[0]) == MAX_LINE


def test_lines_of_a_record_are_bounded() -> None:
    lines = split_lines(driver_record("\\x0a".join(["NVRM: x" * 100] * 100)))
    assert len(lines) <= MAX_LINES_IN_RECORD
    assert max(map(len, lines)) <= MAX_LINE


def test_a_record_is_taken_apart() -> None:
    line = b"3,1234,5678901,-,caller=T99;NVRM: Xid (PCI:0000:3b:00): 79, gone; really"
    assert parse_record(line) == Record(
        1234, 5678901, is_kernel=True, text=b"NVRM: Xid (PCI:0000:3b:00): 79, gone; really"
    )


def test_what_a_process_wrote_is_not_of_the_driver() -> None:
    record = parse_record(b"11,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, forged")
    assert record is not None
    assert not record.is_kernel
    assert not record.is_of_driver


@pytest.mark.parametrize(
    "line", [b"", b" SUBSYSTEM=pci", b"no header", b"1,2,3;no flags", b"a,1,2,-;x", b"-1,1,2,-;x", b"6,1,2,-"]
)
def test_other_lines_are_no_record(line: bytes) -> None:
    assert parse_record(line) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(junk: bytes) -> None:
    parse_record(junk)
    for text in (junk, b"NVRM: Xid (PCI:0000:3b:00" + junk, b"NVRM: GPU 0000:3b:00.0" + junk):
        found = parse_line(split_lines(Record(0, 0, is_kernel=True, text=text)))
        assert not isinstance(found, XidLine) or found.detail.isprintable()


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
            parse_text(evil)
    assert time.process_time() - began < 10


# One fault in two lines


def parse(reader: LogReader, text: str, time_us: int) -> Line | None:
    return reader.read(split_lines(driver_record(text)), time_us)


def test_a_number_and_words_together_are_one_fault() -> None:
    reader = LogReader()
    assert parse(reader, NUMBERED, 1_000) is not None
    assert parse(reader, FALLEN, 1_004) is None


def test_words_and_then_the_number_are_one_fault() -> None:
    reader = LogReader()
    assert parse(reader, FALLEN, 1_000) is not None
    assert parse(reader, NUMBERED, 1_004) is None


def test_each_number_counts() -> None:
    reader = LogReader()
    assert parse(reader, NUMBERED, 1_000) is not None
    assert parse(reader, NUMBERED, 1_004) is not None


def test_words_later_or_of_another_gpu_are_another_fault() -> None:
    reader = LogReader()
    assert parse(reader, NUMBERED, 0) is not None
    assert parse(reader, FALLEN.replace("3b", "3c"), 1_000) is not None
    assert parse(reader, FALLEN, 10_000_000) is not None


def test_words_that_are_repeated_at_once_are_one_fault() -> None:
    reader = LogReader()
    assert parse(reader, FALLEN, 0) is not None
    assert parse(reader, FALLEN, 1_000) is None


def test_it_is_remembered_of_so_many_gpus_which_fell() -> None:
    reader = LogReader()
    for bus in range(MAX_ADDRESSES + 1):
        parse(reader, f"NVRM: Xid (PCI:0000:{bus:02x}:00): 79, x", bus)
    assert parse(reader, "NVRM: GPU 0000:40:00.0: GPU has fallen off the bus.", 100) is None
    assert parse(reader, "NVRM: GPU 0000:00:00.0: GPU has fallen off the bus.", 100) is not None
