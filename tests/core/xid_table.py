"""The XID table of NVIDIA's catalog as rows, written apart from the agent's own.

Source: the catalog at docs.nvidia.com/deploy/xid-errors (immediate action of each code) and the list
that NVIDIA's device plugin ignores (NVIDIA/k8s-device-plugin:internal/rm/health.go).
"""

from typing import Literal, NamedTuple

Action = Literal[
    "RESTART_APP",
    "IGNORE",
    "WORKFLOW_XID_45",
    "RESET_GPU",
    "WORKFLOW_XID_48",
    "WORKFLOW_NVLINK",
    "RESTART_BM",
    "CHECK_MECHANICALS",
    "UPDATE_SWFW",
    "RESTART_VM",
    "REMAP_FAILURE",
    "XID_154",
    "CONTACT_SUPPORT",
]


class Row(NamedTuple):
    """What the rules of recovery make of an immediate action."""

    xid_class: str
    recovery: str
    evidence: str


RULES: dict[Action, Row] = {
    "RESTART_APP": Row("application", "self_clearing", "soft"),
    "IGNORE": Row("information", "self_clearing", "soft"),
    "XID_154": Row("announcement", "self_clearing", "soft"),
    "WORKFLOW_XID_45": Row("follow_up", "self_clearing", "soft"),
    "RESET_GPU": Row("reset", "reset", "hard"),
    "WORKFLOW_XID_48": Row("reset", "reset", "hard"),
    "WORKFLOW_NVLINK": Row("link", "reset", "hard"),
    "RESTART_BM": Row("lost", "reset", "hard"),
    "CHECK_MECHANICALS": Row("reboot", "reboot", "hard"),
    "UPDATE_SWFW": Row("reboot", "reboot", "hard"),
    "RESTART_VM": Row("reboot", "reboot", "hard"),
    "REMAP_FAILURE": Row("rma", "by_hand", "hard"),
    "CONTACT_SUPPORT": Row("support", "reset", "hard"),
}

ACTIONS: dict[int, Action] = {
    8: "RESTART_APP",
    11: "RESTART_APP",
    13: "RESTART_APP",
    14: "IGNORE",
    25: "RESTART_APP",
    31: "RESTART_APP",
    32: "RESTART_APP",
    37: "IGNORE",
    38: "IGNORE",
    39: "RESTART_APP",
    40: "RESTART_APP",
    41: "RESTART_APP",
    43: "RESTART_APP",  # the catalog has IGNORE; the application that hit it is gone
    44: "IGNORE",
    45: "WORKFLOW_XID_45",
    46: "RESET_GPU",
    48: "WORKFLOW_XID_48",
    54: "CHECK_MECHANICALS",
    60: "RESTART_APP",
    62: "RESET_GPU",
    63: "IGNORE",
    64: "REMAP_FAILURE",
    66: "IGNORE",
    67: "IGNORE",
    68: "RESTART_APP",
    69: "RESTART_APP",
    70: "RESTART_APP",
    71: "RESTART_APP",
    72: "RESTART_APP",
    74: "WORKFLOW_NVLINK",
    75: "RESTART_APP",
    76: "RESTART_APP",
    77: "RESTART_APP",
    78: "UPDATE_SWFW",
    79: "RESTART_BM",
    80: "RESTART_APP",
    82: "RESTART_APP",
    83: "RESTART_APP",
    84: "RESTART_APP",
    85: "RESTART_APP",
    86: "RESTART_APP",
    88: "RESTART_APP",
    89: "RESTART_APP",
    92: "IGNORE",
    93: "IGNORE",
    94: "RESTART_APP",
    95: "RESET_GPU",
    96: "RESTART_APP",
    97: "RESTART_APP",
    98: "RESTART_APP",
    99: "RESTART_APP",
    100: "RESTART_APP",
    101: "RESTART_APP",
    102: "RESTART_APP",
    103: "RESTART_APP",
    104: "RESTART_APP",
    105: "RESTART_APP",
    106: "IGNORE",
    107: "IGNORE",
    109: "RESET_GPU",
    110: "RESET_GPU",
    119: "RESET_GPU",
    120: "RESET_GPU",
    121: "IGNORE",
    126: "RESTART_APP",
    127: "RESTART_APP",
    128: "RESTART_APP",
    129: "RESTART_APP",
    130: "RESTART_APP",
    131: "RESTART_APP",
    132: "RESTART_APP",
    133: "RESTART_APP",
    134: "RESTART_APP",
    135: "RESTART_APP",
    136: "RESET_GPU",
    137: "IGNORE",
    139: "RESTART_APP",
    140: "RESET_GPU",
    141: "IGNORE",
    143: "RESET_GPU",
    144: "WORKFLOW_NVLINK",
    145: "WORKFLOW_NVLINK",
    146: "WORKFLOW_NVLINK",
    147: "WORKFLOW_NVLINK",
    148: "WORKFLOW_NVLINK",
    149: "WORKFLOW_NVLINK",
    150: "WORKFLOW_NVLINK",
    151: "RESTART_VM",
    152: "IGNORE",
    153: "IGNORE",
    154: "XID_154",
    155: "RESET_GPU",
    156: "RESET_GPU",
    157: "IGNORE",
    158: "RESET_GPU",
    160: "IGNORE",
    161: "IGNORE",
}
"""By XID; every code that is absent is CONTACT_SUPPORT, or the catalog does not name it."""

IGNORED_BY_NVIDIAS_PLUGIN = (13, 31, 43, 45, 68, 109)


def row_of(xid: int) -> Row:
    """The row of an XID."""
    return RULES[ACTIONS.get(xid, "CONTACT_SUPPORT")]
