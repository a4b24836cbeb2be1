"""What changes how GPUs of a simulated node are shared and named: MIG layouts, the MPS daemon, CDI files.

Guarantees as in ``actions``. A layout changes in NVML and in what the driver shows under /dev and /proc.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.errors import UsageError
from agent.simulation.action_table import action, choice, name_text, parameter
from agent.simulation.presets import MigDeviceSpec, PresetError, place_mig_devices
from agent.simulation.roots import write_mig_capabilities, write_mig_devices

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode

ALL: Final = "all"
READY_FILE: Final = ".ready"
"""What NVIDIA's daemon makes below the MPS root when it serves.
Source: NVIDIA/k8s-device-plugin:cmd/mps-control-daemon/main.go."""

_MAX_DEVICES: Final = 64
_SEVERAL: Final = re.compile(r"([1-9]\d?)x(.+)")


def _profiles(text: str) -> tuple[str, ...]:
    """Parse ``1g.10gb,1g.10gb`` and ``2x1g.10gb`` alike."""
    names: list[str] = []
    for word in (each.strip() for each in text.split(",")):
        several = _SEVERAL.fullmatch(word)
        names += [word] if several is None else [several[2].strip()] * int(several[1])
    if not all(names):
        raise ValueError("must be MIG profiles with commas between them, none or off")
    if len(names) > _MAX_DEVICES:
        raise ValueError(f"must be at most {_MAX_DEVICES} MIG profiles")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class Mig:
    """Reconfigure MIG on a GPU: the devices it has from now on, handles from before are invalid."""

    gpu: str = parameter("GPU", "Position or UUID; all: one after the other", name_text)
    devices: tuple[str, ...] = parameter(
        "LIST",
        "Profiles in order, such as 3g.40gb,2x1g.10gb; none: MIG on without devices; off",
        _profiles,
    )

    async def apply(self, node: "SimulatedNode") -> str:
        """Place the devices."""
        positions = range(node.nvml.gpus) if self.gpu == ALL else (node.position(self.gpu),)
        for position in positions:
            self._apply_to(node, position)
        which = "every GPU" if self.gpu == ALL else node.gpu_name(positions[0])
        return f"MIG of {which} is {', '.join(self.devices)}"

    def _apply_to(self, node: "SimulatedNode", position: int) -> None:
        gpu = node.spec.gpus[position]
        if gpu.mig is None:
            raise UsageError(f"{node.gpu_name(position)}, a {gpu.name}, cannot do MIG")
        names = () if self.devices in (("off",), ("none",)) else self.devices
        devices = [MigDeviceSpec(profile=name) for name in names]
        try:
            placed = place_mig_devices(position, gpu.mig.profiles, devices)
            node.nvml.set_mig(position, devices, enabled=self.devices != ("off",))
        except PresetError as error:
            raise UsageError(f"MIG of {node.gpu_name(position)} cannot be set: {error}") from None
        write_mig_devices(gpu.minor, placed, node.directory.dev)
        node.show_capabilities()
        write_mig_capabilities(gpu.minor, placed, node.directory.proc)


_COMMANDS: Final[Mapping[str, str]] = {"start": "serves", "stop": "is away"}


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """Start or stop the MPS control daemon, as the agent reads it: the file that marks it as running."""

    command: str = parameter("COMMAND", "start or stop", choice(*_COMMANDS))

    async def apply(self, node: "SimulatedNode") -> str:
        """Make the file or remove it."""
        file = node.directory.mps / READY_FILE
        if self.command == "start":
            file.parent.mkdir(mode=0o700, exist_ok=True)
            file.touch()
        else:
            file.unlink(missing_ok=True)
        return f"The MPS control daemon {_COMMANDS[self.command]}"


@dataclass(frozen=True, slots=True)
class Cdi:
    """Take away the CDI spec files, as a clean-up of /var/run does that knows no better."""

    what: str = parameter("WHAT", "delete", choice("delete"))

    async def apply(self, node: "SimulatedNode") -> str:
        """Delete every spec file."""
        files = sorted(node.directory.cdi.glob("*.json"))
        if not files:
            raise UsageError(
                "The simulated node has no CDI spec file; the agent writes one with a CDI strategy, such as"
                " device-list-strategy: cdi-cri"
            )
        for file in files:
            file.unlink()
        return f"The CDI spec file {', '.join(file.name for file in files)} is deleted"


SHARING_ACTIONS: Final = (
    action(Mig, "mig", "gpu"),
    action(MpsDaemon, "mps-daemon", "command"),
    action(Cdi, "cdi", "what"),
)
