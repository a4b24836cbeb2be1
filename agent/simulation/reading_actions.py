"""What a GPU of the simulated node can be made to read: one action for each kind of reading.

Guarantees as in ``actions``. A reading stays as it was set until another action sets it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from agent.core.wording import counted
from agent.simulation.action_table import action, choice, name_text, parameter, whole_number
from agent.simulation.nvml.state import EccCounter, EccLocation, EccType, FabricState

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode

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

_WIDTHS: Final = ("1", "2", "4", "8", "16")
_LOCATIONS: Final[tuple[EccLocation, ...]] = get_args(EccLocation)

_COUNT: Final = whole_number(0, 2**31 - 1)
_CODE: Final = whole_number(0, 9_999)
_KIND: Final = choice(*get_args(EccType))
_COUNTER: Final = choice(*get_args(EccCounter))
_LOCATION: Final = choice(*_LOCATIONS)
_FABRIC: Final = choice(*get_args(FabricState))


def _gpu() -> Any:
    return parameter("GPU", "Position or UUID", name_text)


def _recovery_action(text: str) -> int | None:
    if text in RECOVERY_ACTIONS:
        return RECOVERY_ACTIONS[text]
    try:
        return whole_number(0, 255)(text)
    except ValueError:
        raise ValueError(f"must be {', '.join(RECOVERY_ACTIONS)}, or NVML's number") from None


def _clock_reasons(text: str) -> int:
    mask = 0
    for word in text.split(","):
        if word.strip() not in CLOCK_REASONS:
            raise ValueError(f"must be {', '.join(CLOCK_REASONS)}, several with commas between them")
        mask |= CLOCK_REASONS[word.strip()]
    return mask


def _width(text: str) -> int:
    if text not in _WIDTHS:
        raise ValueError(f"must be {', '.join(_WIDTHS)}")
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
        position = node.position(self.gpu)
        node.nvml.set_recovery_action(position, self.action)
        what = "is not supported" if self.action is None else f"is {self.action}"
        return f"The recovery action of {node.gpu_name(position)} {what}"


@dataclass(frozen=True, slots=True)
class Ecc:
    """Set an ECC error counter of a GPU: uncorrected errors since the driver was loaded, by default."""

    count: int = parameter("N", "What the counter reads", _COUNT)
    gpu: str = _gpu()
    kind: str = parameter("KIND", "uncorrected (the default) or corrected", _KIND, default="uncorrected")
    counter: str = parameter("COUNTER", "volatile (the default) or aggregate", _COUNTER, default="volatile")
    location: str = parameter(
        "WHERE", f"{', '.join(_LOCATIONS)}; dram is the default", _LOCATION, default="dram"
    )

    async def apply(self, node: "SimulatedNode") -> str:
        """Set the counter."""
        position = node.position(self.gpu)
        node.nvml.set_ecc(
            position,
            self.count,
            kind=cast("EccType", self.kind),
            counter=cast("EccCounter", self.counter),
            location=cast("EccLocation", self.location),
        )
        return (
            f"{node.gpu_name(position)} counts {counted(self.count, f'{self.kind} ECC error')} "
            f"({self.counter}, {self.location})"
        )


@dataclass(frozen=True, slots=True)
class RemappedRows:
    """Set what row remapping reports: rows that wait for a reset, or a remapping that failed."""

    state: str = parameter("STATE", "none, pending or failed", choice("none", "pending", "failed"))
    gpu: str = _gpu()
    correctable: int = parameter("N", "Rows remapped for correctable errors", _COUNT, default=0)
    uncorrectable: int = parameter("N", "Rows remapped for uncorrectable errors", _COUNT, default=0)

    async def apply(self, node: "SimulatedNode") -> str:
        """Set the four values."""
        position = node.position(self.gpu)
        node.nvml.set_remapped_rows(
            position,
            correctable=self.correctable,
            uncorrectable=self.uncorrectable,
            pending=self.state == "pending",
            failed=self.state == "failed",
        )
        return f"Row remapping of {node.gpu_name(position)}: {self.state}"


@dataclass(frozen=True, slots=True)
class Temperature:
    """Set the temperature of a GPU."""

    celsius: int = parameter("CELSIUS", "Degrees", whole_number(0, 150))
    gpu: str = _gpu()

    async def apply(self, node: "SimulatedNode") -> str:
        """Set it."""
        position = node.position(self.gpu)
        node.nvml.set_temperature(position, self.celsius)
        return f"{node.gpu_name(position)} has {self.celsius} C"


@dataclass(frozen=True, slots=True)
class ClockReasons:
    """Set why the clocks of a GPU are held down, such as hw-slowdown."""

    reasons: int = parameter("LIST", f"{', '.join(CLOCK_REASONS)}; several with commas", _clock_reasons)
    gpu: str = _gpu()

    async def apply(self, node: "SimulatedNode") -> str:
        """Set the bit mask."""
        position = node.position(self.gpu)
        node.nvml.set_clock_reasons(position, self.reasons)
        return f"The clock event reasons of {node.gpu_name(position)} are {self.reasons:#x}"


@dataclass(frozen=True, slots=True)
class NvLink:
    """Take NVLinks of a GPU down or up: one, or all of them."""

    state: str = parameter("STATE", "up or down", choice("up", "down"))
    gpu: str = _gpu()
    link: int | None = parameter("N", "Which link; all by default", whole_number(0, 63), default=None)

    async def apply(self, node: "SimulatedNode") -> str:
        """Set the state of the links."""
        position = node.position(self.gpu)
        links = range(node.nvml.number(position, "links")) if self.link is None else (self.link,)
        for link in links:
            node.nvml.set_nvlink(position, link, up=self.state == "up")
        which = counted(len(links), "NVLink") if self.link is None else f"NVLink {self.link}"
        return f"{which} of {node.gpu_name(position)}: {self.state}"


@dataclass(frozen=True, slots=True)
class Fabric:
    """Set how far a GPU's registration with the NVSwitch fabric is."""

    state: str = parameter("STATE", ", ".join(get_args(FabricState)), _FABRIC)
    gpu: str = _gpu()
    status: int = parameter("CODE", "NVML's return code of it, 0 by default", _CODE, default=0)

    async def apply(self, node: "SimulatedNode") -> str:
        """Set state and status."""
        position = node.position(self.gpu)
        node.nvml.set_fabric(position, cast("FabricState", self.state), status=self.status)
        return f"The fabric of {node.gpu_name(position)}: {self.state}, status {self.status}"


@dataclass(frozen=True, slots=True)
class Pcie:
    """Set the width that the PCIe link of a GPU has trained to."""

    width: int = parameter("WIDTH", ", ".join(_WIDTHS), _width)
    gpu: str = _gpu()
    generation: int | None = parameter(
        "N", "Its generation; as it is by default", whole_number(1, 7), default=None
    )

    async def apply(self, node: "SimulatedNode") -> str:
        """Set the link."""
        position = node.position(self.gpu)
        now = node.nvml.number(position, "pcie_generation")
        generation = now if self.generation is None else self.generation
        node.nvml.set_pcie(position, generation=generation, width=self.width)
        return f"The PCIe link of {node.gpu_name(position)} is x{self.width}, generation {generation}"


READING_ACTIONS: Final = (
    action(RecoveryAction, "recovery-action", "action"),
    action(Ecc, "ecc", "count"),
    action(RemappedRows, "remapped-rows", "state"),
    action(Temperature, "temperature", "celsius"),
    action(ClockReasons, "clock-reasons", "reasons"),
    action(NvLink, "nvlink", "state"),
    action(Fabric, "fabric", "state"),
    action(Pcie, "pcie", "width"),
)
