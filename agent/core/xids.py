"""XIDs: which ones flip a device, and what brings it back.

Source: NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors) for the class of each code, and
NVIDIA/k8s-device-plugin:internal/rm/health.go for the codes that its plugin ignores.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from agent.model.health import Evidence, Recovery


class XidClass(StrEnum):
    """What the catalog says to do, reduced to what changes the agent's behaviour."""

    APPLICATION = "application"
    """Only the process that hit it has to be started again."""
    INFORMATION = "information"
    FOLLOW_UP = "follow_up"
    """Only ever follows another XID."""
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
        (XidClass.INFORMATION, "14 37 38 44 63 66 67 92 93 106 107 121 137 141 152-154 157 160 161"),
        (XidClass.FOLLOW_UP, "45"),
        (XidClass.RESET, "46 48 62 95 109 110 119 120 136 140 143 155 156 158"),
        (XidClass.LINK, "74 144-150"),
        (XidClass.LOST, "79"),
        (XidClass.REBOOT, "54 78 151"),
        (XidClass.RMA, "64"),
    )
    for code in _codes(text)
}

COMPAT_IGNORED: Final = frozenset({13, 31, 43, 45, 68, 109})
"""What NVIDIA's plugin ignores; every other XID flips under the ``compat`` policy."""

_RECOVERY: Final[Mapping[XidClass, Recovery]] = {
    XidClass.APPLICATION: Recovery.SELF_CLEARING,
    XidClass.INFORMATION: Recovery.SELF_CLEARING,
    XidClass.FOLLOW_UP: Recovery.SELF_CLEARING,
    XidClass.RESET: Recovery.RESET,
    XidClass.LINK: Recovery.RESET,
    XidClass.LOST: Recovery.RESET,
    XidClass.SUPPORT: Recovery.RESET,
    XidClass.REBOOT: Recovery.REBOOT,
    XidClass.RMA: Recovery.BY_HAND,
}


def class_of(xid: int) -> XidClass:
    """Return the class; a code that is not in the table is SUPPORT."""
    return CLASSES.get(xid, XidClass.SUPPORT)


def recovery_of(xid: int) -> Recovery:
    """Return what brings a device back that this XID flipped."""
    return _RECOVERY[class_of(xid)]


def evidence_of(xid: int) -> Evidence:
    """Return HARD where the device says of itself that it is not well."""
    return Evidence.SOFT if recovery_of(xid) is Recovery.SELF_CLEARING else Evidence.HARD


def flips_under_compat(xid: int, extra_ignored: frozenset[int]) -> bool:
    """Return whether NVIDIA's plugin would mark the device Unhealthy."""
    return xid not in COMPAT_IGNORED and xid not in extra_ignored
