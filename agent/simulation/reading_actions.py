"""What a GPU of the simulated node can be made to read: one action for each kind of reading.

Guarantees as in ``actions``. A reading stays as it was set until another action sets it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast, get_args

from agent.simulation.action_table import action, choice, name_text, parameter, whole_number

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode

_MAX_COUNT: Final = 2**31 - 1
_MAX_CELSIUS: Final = 150
_MAX_LINK: Final = 35
_MAX_GENERATION: Final = 7
_MAX_CODE: Final = 9_999

RECOVERY_ACTIONS: Final[Mapping[str, int | None]] = {
    "none": 0,
    "reset": 1,
    "reboot": 2,
    "drain-p2p": 3,
    "drain-reset": 4,
    "unsupported": None,
}
"""NVML's nvmlDeviceGpuRecoveryAction_t; unsupported is a driver without the field."""

CLOCK_REASONS: Final[Mapping[str, int]] = {
    "none": 0x0,
    "idle": 0x1,
    "sw-power-cap": 0x4,
    "hw-slowdown": 0x8,
    "sw-thermal": 0x20,
    "hw-thermal": 0x40,
    "hw-power-brake": 0x80,
}
"""NVML's nvmlClocksEventReason*."""

_ROWS: Final = ("none", "pending", "failed")
_LINK: Final = ("up", "down")
_WIDTHS: Final = (1, 2, 4, 8, 16)

_COUNT: Final = whole_number(0, _MAX_COUNT)


def _gpu() -> str:
    return cast("str", parameter("GPU", "Slot or UUID", name_text))


def _recovery_action(text: str) -> int | None:
    if text not in RECOVERY_ACTIONS and not text.isdigit():
        raise ValueError(f"must be {', '.join(RECOVERY_ACTIONS)}, or NVML's number")
    return RECOVERY_ACTIONS[text] if text in RECOVERY_ACTIONS else whole_number(0, 255)(text)


def _clock_reasons(text: str) -> int:
    mask = 0
    for word in text.split(","):
        if word.strip() not in CLOCK_REASONS:
            raise ValueError(f"must be {', '.join(CLOCK_REASONS)}, several with commas between them")
        mask |= CLOCK_REASONS[word.strip()]
    return mask


def _width(text: str) -> int:
    if text not in map(str, _WIDTHS):
        raise ValueError(f"must be {', '.join(map(str, _WIDTHS))}")
    return int(text)


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """Let the driver name the step that brings a GPU back (NVML field 230)."""

    action: int | None = parameter(
        "ACTION", f"{', '.join(RECOVERY_ACTIONS)}, or NVML's number", _recovery_action
    )
    gpu: str = _gpu()

    async def apply(self, node: "SimulatedNode") -> str:
        """Set the field."""
        slot = node.slot(self.gpu)
        node.nvml.set_recovery_action(slot, self.action)
        told = "is not offered" if self.action is None else f"is {self.action}"
        return f"The recovery action of {node.gpu_name(slot)} {told}"


_Location: Final = ("dram", "sram", "l1_cache", "l2_cache", "register_file", "texture", "shared", "cbu")


@dataclass(frozen=True, slots=True)
class Ecc:
    """Set an ECC error counter of a GPU, uncorrected errors since the driver was loaded by default."""

    count: int = parameter("N", "What the counter reads", _COUNT)
    gpu: str = _gpu()
    kind: str = parameter(
        "KIND", "uncorrected or corrected", choice("uncorrected", "corrected"), default="uncorrected"
    )
    counter: str = parameter(
        "COUNTER", "volatile or aggregate", choice("volatile", "aggregate"), default="volatile"
    )
    memory: str = parameter("MEMORY", "dram, sram, l2_cache, …", choice(*_Location), default="dram")
