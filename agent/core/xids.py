"""XIDs: which ones flip a device, and what brings it back: tables as data, from which ``explain`` is made.

The verdict rests on the number, on what the line has beside it (NVLink severity and unit, whether a memory
error wants a reset), and on the driver's branch, since numbers were given anew. Whether a second witness is
needed is decided in core.kernel_log.

Sources: NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors) for the class of each code and the decoding
of XIDs 144 to 150; NVIDIA/k8s-device-plugin:internal/rm/health.go for the codes that its plugin ignores;
NVIDIA/open-gpu-kernel-modules:nverror.h, tags 515 to 595, for the branches, and kern_gpu_error_cont_ga100.c.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from agent.model.health import Evidence, Reason, Recovery
from agent.model.policy import Policy
from agent.model.xid import NO_WORDS, NvlinkSeverity, XidWords

RECOVERY_ACTION_CHANGED: Final = 154
"""Announces another recovery action, which NVML field 230 reads."""


class XidClass(StrEnum):
    """The catalog's action, reduced to what changes the agent's behaviour."""

    APPLICATION = "application"
    """Only the process that hit it has to be started again."""
    INFORMATION = "information"
    FOLLOW_UP = "follow_up"
    """Only ever follows another XID."""
    ANNOUNCEMENT = "announcement"
    """Announces a reading of the driver, which counts instead."""
    RESET = "reset"
    LINK = "link"
    """NVLink: a reset of both ends."""
    LOST = "lost"
    """Fallen off the bus."""
    REBOOT = "reboot"
    """Needs a reboot, firmware or hands."""
    RMA = "rma"
    SUPPORT = "support"
    """NVIDIA wants to be asked; also every code not in the table."""


NAMES: Final[Mapping[int, str]] = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    32: "corrupted push buffer",
    43: "GPU stopped processing",
    45: "preemptive cleanup after another error",
    48: "double-bit ECC error",
    54: "auxiliary power is not connected",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    68: "video decoder exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    121: "C2C error",
    123: "PMU RPC write failure",
    136: "link training failed",
    137: "NVLink privilege error",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
    144: "NVLink SAW error",
    145: "NVLink RLW error",
    146: "NVLink TLW error",
    147: "NVLink TREX error",
    148: "NVLink NVLPW_CTRL error",
    149: "NVLink NETIR error",
    150: "NVLink MSE error",
    151: "key rotation error",
    154: "recovery action changed",
    155: "NVLink software-defined error",
    156: "resource retired",
    157: "resource could not be retired",
    158: "GPU fatal timeout",
}
"""Short names, for people."""


def _codes(text: str) -> tuple[int, ...]:
    codes: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        codes.extend(range(int(first), int(last or first) + 1))
    return tuple(codes)


CLASSES: Final[Mapping[int, XidClass]] = {
    code: xid_class
    for xid_class, text in (
        (
            XidClass.APPLICATION,
            "8 11 13 25 31 32 39-41 43 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139",
        ),
        (XidClass.INFORMATION, "14 37 38 44 63 66 67 92 93 106 107 121 137 141 152 153 157 160 161"),
        (XidClass.FOLLOW_UP, "45"),
        (XidClass.ANNOUNCEMENT, str(RECOVERY_ACTION_CHANGED)),
        (XidClass.RESET, "46 48 62 95 109 110 119 120 136 140 143 155 156 158"),
        (XidClass.LINK, "74 144-150"),
        (XidClass.LOST, "79"),
        (XidClass.REBOOT, "54 78 151"),
        (XidClass.RMA, "64"),
    )
    for code in _codes(text)
}


class Refinement(msgspec.Struct, frozen=True):
    """What a line must have, or which driver must write it, for its XID to be of another class."""

    codes: range
    xid_class: XidClass
    summary: str
    """Why, for people."""
    severity: NvlinkSeverity | None = None
    reset: bool | None = None
    before_branch: int | None = None
    """Only of drivers of an older branch; what branch a driver is of has to be known."""

    def fits(self, xid: int, words: XidWords, branch: int | None) -> bool:
        """Return whether an XID is one of those."""
        return (
            xid in self.codes
            and self.severity in {None, words.severity}
            and self.reset in {None, words.reset}
            and (self.before_branch is None or (branch is not None and branch < self.before_branch))
        )

    @property
    def when(self) -> str:
        """What has to be so, for people."""
        conditions = [] if self.severity is None else [f"the line has {self.severity}"]
        if self.reset is not None:
            conditions.append(f"the line has RST: {'Yes' if self.reset else 'No'}")
        if self.before_branch is not None:
            conditions.append(f"the driver is older than {self.before_branch}")
        return " and ".join(conditions)


NVLINK_5: Final = range(144, 151)

REFINEMENTS: Final = (
    Refinement(
        range(139, 140), XidClass.INFORMATION, "CUDA fast path error, as 141 is now", before_branch=560
    ),
    Refinement(range(144, 145), XidClass.REBOOT, "key rotation error, as 151 is now", before_branch=555),
    Refinement(
        NVLINK_5,
        XidClass.INFORMATION,
        "not fatal: nothing is to be done unless the driver asks for a recovery action",
        severity="nonfatal",
    ),
    Refinement(range(94, 95), XidClass.RESET, "contained, but the driver wants a reset", reset=True),
)
"""The first one that fits counts."""

WITNESSES: Final[Mapping[XidClass, frozenset[Reason]]] = {
    XidClass.RESET: frozenset({Reason.ECC_UNCORRECTED, Reason.NVLINK_DOWN}),
    XidClass.LINK: frozenset({Reason.NVLINK_DOWN, Reason.FABRIC_FAILED}),
    XidClass.RMA: frozenset({Reason.ROW_REMAP_FAILED}),
}
"""Readings that confirm an XID of a class, beside those that confirm any (core.kernel_log)."""

COMPAT_IGNORED: Final = frozenset({13, 31, 43, 45, 68, 109})
"""What NVIDIA's plugin ignores; every other XID flips under the ``compat`` policy."""

_RECOVERY: Final[Mapping[XidClass, Recovery]] = {
    XidClass.APPLICATION: Recovery.SELF_CLEARING,
    XidClass.INFORMATION: Recovery.SELF_CLEARING,
    XidClass.FOLLOW_UP: Recovery.SELF_CLEARING,
    XidClass.ANNOUNCEMENT: Recovery.SELF_CLEARING,
    XidClass.RESET: Recovery.RESET,
    XidClass.LINK: Recovery.RESET,
    XidClass.LOST: Recovery.RESET,
    XidClass.SUPPORT: Recovery.RESET,
    XidClass.REBOOT: Recovery.REBOOT,
    XidClass.RMA: Recovery.BY_HAND,
}


_DRAIN_AND_RESET: Final = "drain the GPU, then reset it (nvidia-smi --gpu-reset) or reboot the node"

_ADVICE: Final[Mapping[XidClass, str]] = {
    XidClass.APPLICATION: "check the application that ran on the GPU, and start it again",
    XidClass.INFORMATION: "none is needed; ask NVIDIA if it repeats",
    XidClass.FOLLOW_UP: "find the XID before it",
    XidClass.ANNOUNCEMENT: "read the recovery action (nvidia-smi -q)",
    XidClass.RESET: _DRAIN_AND_RESET,
    XidClass.LINK: f"{_DRAIN_AND_RESET}; check the NVLinks",
    XidClass.LOST: "reset the GPU or reboot the node; have it replaced if it repeats",
    XidClass.REBOOT: "check power and firmware, and reboot the node",
    XidClass.RMA: "have the GPU replaced (RMA)",
    XidClass.SUPPORT: "ask NVIDIA's support; reset the GPU meanwhile",
}


def branch_of(driver_version: str | None) -> int | None:
    """Return the branch of a driver's version: 570 of ``570.86.15``; None: not known."""
    first = (driver_version or "").partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() and len(first) <= 4 else None


def class_of(xid: int, words: XidWords = NO_WORDS, branch: int | None = None) -> XidClass:
    """Return the class; a code that is not in the table is SUPPORT."""
    fitting = (each.xid_class for each in REFINEMENTS if each.fits(xid, words, branch))
    return next(fitting, CLASSES.get(xid, XidClass.SUPPORT))


def recovery_of(xid: int, words: XidWords = NO_WORDS, branch: int | None = None) -> Recovery:
    """Return what brings a device back that this XID flipped."""
    return _RECOVERY[class_of(xid, words, branch)]


def evidence_of(xid: int, words: XidWords = NO_WORDS, branch: int | None = None) -> Evidence:
    """Return HARD where the device itself reports the fault."""
    is_hard = recovery_of(xid, words, branch) is not Recovery.SELF_CLEARING
    return Evidence.HARD if is_hard else Evidence.SOFT


def flips(xid: int, policy: Policy, words: XidWords = NO_WORDS, branch: int | None = None) -> bool:
    """Return whether a device is Unhealthy by this XID.

    The override of a single XID is the last word; then come "none" and "all", then the policy. What only
    announces a reading flips nothing, whatever the policy: the reading does.
    """
    override = policy.xid_overrides.get(xid)
    if override is not None:
        return override == "flip"
    if class_of(xid, words, branch) is XidClass.ANNOUNCEMENT:
        return False
    if policy.xids_all or policy.xids_off:
        return policy.xids_all
    if policy.xid_policy == "catalog":
        return recovery_of(xid, words, branch) is not Recovery.SELF_CLEARING
    return xid not in COMPAT_IGNORED


def text_of(xid: int, detail: str = "", branch: int | None = None) -> str:
    """Return an XID in words: ``XID 79: GPU has fallen off the bus``."""
    older = (each.summary for each in REFINEMENTS if each.before_branch and each.fits(xid, NO_WORDS, branch))
    name = next(older, NAMES.get(xid))
    return f"XID {xid}" + (f": {name}" if name else "") + (f" ({detail})" if detail else "")


def advice_of(xid: int) -> str:
    """Return the next step after an XID."""
    return _ADVICE[class_of(xid)]
