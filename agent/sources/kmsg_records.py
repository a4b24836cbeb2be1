"""Parses records of the kernel log, and NVIDIA's lines among them.

Invariants: pure, and linear in the length of a record. Only the kernel's own records count: what a process
wrote into /dev/kmsg has another facility. The kernel's records may begin with the name of a process, 15
bytes that its user chooses (``NVRM: GPU 1b:00[7]: segfault at …``), so a line counts only where it matches
the driver's format in full, and every format begins with more than 15 bytes that no user chooses. Words in
the middle of a line, where a process name may stand too, are matched only by patterns longer than a name, or
at the end. Text that leaves this module is printable ASCII and bounded.

Sources: kernel Documentation/ABI/testing/dev-kmsg; NVIDIA/open-gpu-kernel-modules, tags 515 to 595:
kernel_rc.c, osinit.c, osapi.c, gpu.c, kern_gpu_error_cont_ga100.c, nv_gpu_ops.c, common_nvswitch.h,
uvm_global.c and nv.c (the formats of the lines); leptonai/gpud:components/accelerator/nvidia/xid/kmsg.go
(sub codes); kernel drivers/pci/probe.c (a device that was added).
"""

import re
from collections.abc import Callable
from typing import Final

import msgspec

from agent.model.ids import ALL, pci_sysfs_name
from agent.model.xid import NO_WORDS, NvlinkSeverity, XidWords

MAX_DETAIL: Final = 120
"""Characters of a line's message after the number of its XID."""
MAX_LINE: Final = 512
"""Characters kept of a line of NVIDIA's driver."""
MAX_LINES_IN_RECORD: Final = 16
"""Lines of one record that are parsed; the driver writes three at once."""

MAX_ADDRESSES: Final = 64
"""GPUs whose fall off the bus is remembered; the oldest one is evicted."""

SAME_FAULT_US: Final = 2_000_000
"""A line with the number and one without it within this time are one fault; the driver writes them
microseconds apart."""

FALLEN_OFF: Final = 79
"""The XID of a GPU that has fallen off the bus, which some lines report without its number."""

NVLINK_XIDS: Final = range(144, 151)
"""NVLink 5 errors, whose first number holds the sub code in bits 20 to 25."""

_KERNEL_FACILITY: Final = 0
_DRIVER_PREFIXES: Final = (b"NVRM:", b"nvidia-nvswitch", b"nvidia-uvm:")
_PREFIXES: Final = (*_DRIVER_PREFIXES, b"pci ")

_DEVICE: Final = r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})"
_HEADER: Final = re.compile(rb"([0-9]{1,10}),([0-9]{1,20}),([0-9]{1,20}),[^;]{0,256};")
_ESCAPED_LINE_END: Final = re.compile(r"\\x0[ad]")
_XID: Final = re.compile(
    rf"NVRM: Xid \(PCI:{_DEVICE}(?: GPU-I:([0-9]{{2,3}})(?: GPU-CI:([0-9]{{2,3}}))?)?\): ([0-9]{{1,5}}),(.*)"
)
_FALLEN: Final = re.compile(rf"NVRM: GPU {_DEVICE}(\.[0-7]): GPU has fallen off the bus\.\Z")
_UNANSWERED: Final = re.compile(
    rf"NVRM: The NVIDIA GPU {_DEVICE}(\.[0-7]) (?:NVRM: )?\(PCI ID: [0-9a-f]{{4}}:[0-9a-f]{{4}}\)"
    r" installed in this system has (?:NVRM: )?fallen off the bus and is not responding to commands\.\Z"
)
_FALLEN_WORDS: Final = "fallen off the bus"
_PROCESS: Final = re.compile(r"pid=[^,]{0,32}, (?:name=[^,]{0,64}, )?")
_NVLINK: Final = re.compile(
    r"(?:^|, )([A-Z][A-Z_/]{0,31}) {1,8}(Nonfatal|Fatal) {1,8}XC[01] {1,8}i[0-9]{1,3} {1,8}"
    r"Link {1,8}(-?[0-9]{1,3}) {1,8}\((0x[0-9a-fA-F]{1,8})(?![0-9a-fA-F])"
)
_ACTION: Final = re.compile(
    r"GPU recovery action changed from 0x[0-9a-f]{1,8} \([^()]{0,40}\)"
    r" to 0x([0-9a-f]{1,8}) \([^()]{0,40}\)\.?\Z"
)
_CONTAINMENT: Final = re.compile(r"RST: (Yes|No), D-RST: (?:Yes|No)\.?\Z")
_SWITCH: Final = re.compile(
    rf"nvidia-nvswitch[0-9]{{1,3}}: SXid \(PCI:{_DEVICE}(\.[0-9a-f])\): ([0-9]{{1,7}}), "
    r"(?:(Fatal|Non-fatal), )?(.*)"
)
_UVM: Final = re.compile(
    r"nvidia-uvm: uvm_global\.c:[0-9]{1,6} uvm_global_set_fatal_error_impl\[pid:[0-9]{1,10}\]"
    r" Encountered a global fatal error: (.{1,120})\Z"
)
_UVM_OF_RM: Final = re.compile(
    r"NVRM: (?:GPU[0-9]{1,3} )?nvGpuOpsReportFatalError: uvm encountered global fatal error"
    r" (0x[0-9a-f]{1,8}), requiring os reboot to recover\.\Z"
)
_LOADING: Final = re.compile(r"NVRM: loading NVIDIA UNIX .{1,200}\Z")
_ADDED: Final = re.compile(
    rf"pci {_DEVICE}(\.[0-7]): \[10de:[0-9a-f]{{4}}\] type [0-9a-f]{{2}} class 0x0[0-9a-f]{{5}}"
)


class Record(msgspec.Struct, frozen=True):
    """One record of the kernel log."""

    sequence: int
    time_us: int
    """Since the boot, by the kernel's own clock for its log."""
    is_kernel: bool
    """Whether the kernel wrote it, and no process."""
    text: bytes
    """Printable; the kernel escapes anything else: ``\\x0a`` is a line break."""

    @property
    def is_of_driver(self) -> bool:
        """Whether one of NVIDIA's modules wrote it, as far as its first bytes show."""
        return self.is_kernel and self.text.startswith(_DRIVER_PREFIXES)

    @property
    def may_matter(self) -> bool:
        """Whether it may have a format that this module parses."""
        return self.is_kernel and self.text.startswith(_PREFIXES)


class XidLine(msgspec.Struct, frozen=True):
    """An XID in the log."""

    pci: str
    """Sysfs form."""
    xid: int
    detail: str = ""
    gi: int = ALL
    ci: int = ALL
    words: XidWords = NO_WORDS
    in_words: bool = False
    """The line has no number: it only reports that the GPU has fallen off the bus."""


class SwitchLine(msgspec.Struct, frozen=True):
    """An error (SXid) of an NVSwitch."""

    pci: str
    sxid: int
    fatal: bool
    detail: str


class UvmLine(msgspec.Struct, frozen=True):
    """A global fatal error of the unified memory driver, which rejects every open from here on."""

    status: str


class RepairLine(msgspec.Struct, frozen=True):
    """The driver was loaded again, or a GPU was added to the bus: the GPU was initialised again."""

    pci: str | None
    """None: every GPU."""


Line = XidLine | SwitchLine | UvmLine | RepairLine


def parse_record(line: bytes) -> Record | None:
    """Parse a record; None for anything else, such as a record's further properties.

    Its format: ``priority,sequence,microseconds,flags[,…];text``.
    """
    header = _HEADER.match(line)
    if header is None:
        return None
    priority, sequence, time_us = (int(number) for number in header.groups())
    return Record(sequence, time_us, priority >> 3 == _KERNEL_FACILITY, line[header.end() :])


def split_lines(record: Record) -> tuple[str, ...]:
    """Return the lines of a record as printable text, each bounded."""
    text = record.text[: MAX_LINE * MAX_LINES_IN_RECORD].decode("ascii", "backslashreplace")
    lines = _ESCAPED_LINE_END.split(text, MAX_LINES_IN_RECORD)[:MAX_LINES_IN_RECORD]
    return tuple(_printable(line)[:MAX_LINE] for line in lines if line)


def parse_line(lines: tuple[str, ...]) -> Line | None:
    """Parse the lines of one record; None: no known format.

    The driver writes each XID as a record of its own, so one in a later line is not the driver's.
    """
    if not lines:
        return None
    # A process name with a line break splits a line, and one format has three lines.
    whole = " ".join(lines)
    for pattern, made in _FORMS:
        if (found := pattern.match(whole)) is not None:
            return made(found)
    return None


def _function_of(found: "re.Match[str]") -> str:
    return pci_sysfs_name(found[1] + found[2])


def _fallen_line(found: "re.Match[str]") -> Line:
    return XidLine(_function_of(found), FALLEN_OFF, in_words=True)


def _switch_line(found: "re.Match[str]") -> Line:
    is_fatal, message = found[4] == "Fatal", found[5].strip()
    return SwitchLine(_function_of(found), int(found[3]), is_fatal, message[:MAX_DETAIL])


def _xid_line(found: "re.Match[str]") -> Line | None:
    xid = int(found[4])
    if not xid:
        return None
    rest = found[5].strip()
    process = _PROCESS.match(rest)
    message = rest[process.end() :].strip() if process else rest
    nvlink = _NVLINK.search(message) if xid in NVLINK_XIDS else None
    return XidLine(
        pci=pci_sysfs_name(f"{found[1]}.0"),
        xid=xid,
        detail=_detail(xid, message, nvlink),
        gi=ALL if found[2] is None else int(found[2]),
        ci=ALL if found[3] is None else int(found[3]),
        words=_words(message, nvlink),
    )


def _words(message: str, nvlink: "re.Match[str] | None") -> XidWords:
    if nvlink is not None:
        severity: NvlinkSeverity = "fatal" if nvlink[2] == "Fatal" else "nonfatal"
        return XidWords(severity=severity, unit=nvlink[1], sub_code=_sub_code(nvlink))
    if (action := _ACTION.search(message)) is not None:
        return XidWords(action=int(action[1], 16))
    if (containment := _CONTAINMENT.search(message)) is not None:
        return XidWords(reset=containment[1] == "Yes")
    return NO_WORDS


def _sub_code(nvlink: "re.Match[str]") -> int:
    return (int(nvlink[4], 16) >> 20) & 0x3F


def _detail(xid: int, message: str, nvlink: "re.Match[str] | None") -> str:
    """Return the message of a line, without the process; of an NVLink error its unit and sub code.

    Empty where the message only repeats the meaning of the number.
    """
    if xid == FALLEN_OFF and _FALLEN_WORDS in message:
        return ""
    if nvlink is None:
        return message[:MAX_DETAIL]
    return f"{nvlink[1]} sub code {_sub_code(nvlink)}, {nvlink[2].lower()}, link {int(nvlink[3])}"


_FORMS: Final[tuple[tuple["re.Pattern[str]", Callable[["re.Match[str]"], Line | None]], ...]] = (
    (_XID, _xid_line),
    (_FALLEN, _fallen_line),
    (_UNANSWERED, _fallen_line),
    (_SWITCH, _switch_line),
    (_UVM, lambda found: UvmLine(found[1])),
    (_UVM_OF_RM, lambda found: UvmLine(found[1])),
    (_LOADING, lambda _: RepairLine(None)),
    (_ADDED, lambda found: RepairLine(_function_of(found))),
)


def _printable(text: str) -> str:
    """Return text with every character that is not printable ASCII escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if " " <= char <= "~" else f"\\x{ord(char):02x}" for char in text)


class LogReader:
    """Parses one pass over the log: a fault that two lines report is one XID."""

    def __init__(self) -> None:
        self._fallen: dict[str, tuple[int, bool]] = {}

    def read(self, lines: tuple[str, ...], time_us: int) -> Line | None:
        """Return the event in a record; None if there is none, or an XID that was reported just before."""
        line = parse_line(lines)
        if not isinstance(line, XidLine) or line.xid != FALLEN_OFF:
            return line
        before = self._fallen.pop(line.pci, None)
        self._fallen[line.pci] = (time_us, line.in_words)
        if len(self._fallen) > MAX_ADDRESSES:
            del self._fallen[next(iter(self._fallen))]
        if before is None or abs(time_us - before[0]) > SAME_FAULT_US:
            return line
        return None if line.in_words or before[1] else line
