"""What the kernel log says of GPUs: its records taken apart, and NVIDIA's lines among them read.

Invariants: pure, and linear in the length of a record. Only the kernel's own records count: what a
process wrote into /dev/kmsg has another facility. An address is looked for where the driver writes it,
at the beginning of a line, so the name of a process later in the line cannot pretend to be one. Text
that leaves this module is printable ASCII and bounded.

Sources: kernel Documentation/ABI/testing/dev-kmsg; NVIDIA/open-gpu-kernel-modules:kernel_rc.c, osinit.c
and nv.c (the forms of the lines); leptonai/gpud:components/accelerator/nvidia/xid/kmsg.go (sub codes).
"""

import re
from dataclasses import dataclass
from typing import Final

from agent.model.ids import ALL, pci_sysfs_name

MAX_DETAIL: Final = 120
"""Characters of what a line says after the number of its XID."""
MAX_LINE: Final = 512
"""Characters kept of a line of NVIDIA's driver."""
MAX_LINES_IN_RECORD: Final = 16
"""Lines of one record that are looked at; the driver writes three at once."""

MAX_ADDRESSES: Final = 64
"""GPUs of which it is remembered when they fell off the bus; the one that fell first is forgotten."""

SAME_FAULT_US: Final = 2_000_000
"""A number and words within this time are one fault. The driver writes them microseconds apart."""

FALLEN_OFF: Final = 79
"""The XID of a GPU that has fallen off the bus, which some lines say in words alone."""

NVLINK_XIDS: Final = range(144, 151)
"""NVLink 5 errors, whose first number holds the sub code in bits 20 to 25."""

_KERNEL_FACILITY: Final = 0
_PREFIX: Final = b"NVRM:"

_ADDRESS: Final = r"(?:PCI:)?((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(\.[0-7])?"
_HEADER: Final = re.compile(rb"([0-9]{1,10}),([0-9]{1,20}),([0-9]{1,20}),[^;]{0,256};")
_ESCAPED_LINE_END: Final = re.compile(r"\\x0[ad]")
_XID: Final = re.compile(
    rf"NVRM: {{1,8}}Xid \((?:GPU at )?{_ADDRESS}([^()]{{0,80}})\): ?([0-9]{{1,5}})(?![0-9])(?:, ?(.*))?"
)
_GPU_INSTANCE: Final = re.compile(r"GPU-I:([0-9]{1,3})(?![0-9])")
_COMPUTE_INSTANCE: Final = re.compile(r"GPU-CI:([0-9]{1,3})(?![0-9])")
_FALLEN: Final = re.compile(
    rf"NVRM: {{1,8}}(?:The NVIDIA )?GPU (?:at )?{_ADDRESS}(?![0-9a-fA-F.])(.*)", re.DOTALL
)
_FALLEN_WORDS: Final = "fallen off the bus"
_PROCESS: Final = re.compile(r"pid=[^,]{0,32}, (?:name=[^,]{0,64}, )?")
_NVLINK: Final = re.compile(
    r"([A-Z][A-Z_/]{0,31}) {1,8}(Nonfatal|Fatal) {1,8}XC[01] {1,8}i[0-9]{1,3} {1,8}"
    r"Link {1,8}(-?[0-9]{1,3}) {1,8}\((0x[0-9a-fA-F]{1,8})(?![0-9a-fA-F])"
)


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the kernel log."""

    sequence: int
    time_us: int
    """Since the boot, by the kernel's own clock for its log."""
    is_kernel: bool
    """Whether the kernel wrote it, and no process."""
    text: bytes
    """Printable but for what is escaped: ``\\x0a`` is the end of a line within."""

    @property
    def is_of_driver(self) -> bool:
        """Whether NVIDIA's driver wrote it."""
        return self.is_kernel and self.text.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class XidLine:
    """An XID that the log tells of."""

    pci: str
    """Sysfs form."""
    xid: int
    detail: str = ""
    gi: int = ALL
    ci: int = ALL
    in_words: bool = False
    """The line has no number: it only says that the GPU has fallen off the bus."""


def record_of(line: bytes) -> Record | None:
    """Take a record apart; None for anything else, such as a record's further properties.

    Its form: ``priority,sequence,microseconds,flags[,…];text``.
    """
    header = _HEADER.match(line)
    if header is None:
        return None
    priority, sequence, time_us = (int(number) for number in header.groups())
    return Record(sequence, time_us, priority >> 3 == _KERNEL_FACILITY, line[header.end() :])


def lines_of(record: Record) -> tuple[str, ...]:
    """Return the lines of a record as printable text, each bounded."""
    text = record.text[: MAX_LINE * MAX_LINES_IN_RECORD].decode("ascii", "backslashreplace")
    lines = _ESCAPED_LINE_END.split(text, MAX_LINES_IN_RECORD)[:MAX_LINES_IN_RECORD]
    return tuple(_printable(line)[:MAX_LINE] for line in lines if line)


def xid_of(lines: tuple[str, ...]) -> XidLine | None:
    """Return the XID that the lines of one record of the driver tell of; None: of none.

    The driver writes each XID as a record of its own, so one in a later line is not the driver's.
    """
    if not lines:
        return None
    found = _XID.match(lines[0])
    if found is not None:
        return _xid_line(found, int(found[4])) if int(found[4]) else None
    # These words are written in three lines at once: the address is in the first, the end in the third.
    fallen = _FALLEN.match("\n".join(lines))
    if fallen is not None and _FALLEN_WORDS in fallen[3]:
        return XidLine(_address(fallen), FALLEN_OFF, in_words=True)
    return None


def _xid_line(found: "re.Match[str]", xid: int) -> XidLine:
    rest = found[5] or ""
    process = _PROCESS.match(rest)
    said = rest[process.end() :] if process else rest
    return XidLine(
        pci=_address(found),
        xid=xid,
        detail=_detail(xid, said.strip()),
        gi=_instance(_GPU_INSTANCE, found[3]),
        ci=_instance(_COMPUTE_INSTANCE, found[3]),
    )


def _address(found: "re.Match[str]") -> str:
    """Return the address in sysfs form: domain 0 and function 0 where the line leaves them out."""
    address = found[1] if found[1].count(":") == 2 else f"0000:{found[1]}"
    return pci_sysfs_name(address + (found[2] or ".0"))


def _instance(pattern: "re.Pattern[str]", attributes: str) -> int:
    found = pattern.search(attributes)
    return ALL if found is None else int(found[1])


def _detail(xid: int, said: str) -> str:
    """Return what a line says, without the process; of an NVLink error its unit and sub code.

    Nothing where it only says in words what the number means.
    """
    if xid == FALLEN_OFF and _FALLEN_WORDS in said:
        return ""
    nvlink = _NVLINK.match(said) if xid in NVLINK_XIDS else None
    if nvlink is None:
        return said[:MAX_DETAIL]
    sub_code = (int(nvlink[4], 16) >> 20) & 0x3F
    return f"{nvlink[1]} sub code {sub_code}, {nvlink[2].lower()}, link {int(nvlink[3])}"


def _printable(text: str) -> str:
    """Return text with every character that is not printable ASCII escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if " " <= char <= "~" else f"\\x{ord(char):02x}" for char in text)


class XidReader:
    """Reads the XIDs of one reading of the log: a fault that is told in two lines is one XID."""

    def __init__(self) -> None:
        self._fallen: dict[str, tuple[int, bool]] = {}

    def read(self, lines: tuple[str, ...], time_us: int) -> XidLine | None:
        """Return the XID of a record of the driver; None if there is none, or it was told just now."""
        line = xid_of(lines)
        if line is None or line.xid != FALLEN_OFF:
            return line
        before = self._fallen.pop(line.pci, None)
        self._fallen[line.pci] = (time_us, line.in_words)
        if len(self._fallen) > MAX_ADDRESSES:
            del self._fallen[next(iter(self._fallen))]
        if before is None or abs(time_us - before[0]) > SAME_FAULT_US:
            return line
        return None if line.in_words or before[1] else line
