"""The driver's nodes and GPUs: their names and numbers, as the driver knows them."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from agent.simulation.driver_double import abi

CONTROL: Final = "nvidiactl"
UVM: Final = "nvidia-uvm"


class Gpu(NamedTuple):
    """A GPU as the driver knows it."""

    minor: int
    uuid: str
    instance: int
    """RM device instance: the order in which GPUs were attached, which need not be that of the minors."""
    pci_bus_id: str
    pci_device_id: int

    @property
    def gpu_id(self) -> int:
        """The RM's number of it. Source: open-gpu-kernel-modules, gpu.c, gpuGenerate32BitId."""
        domain, bus, device = self._address()
        return domain << 16 | bus << 8 | device

    @property
    def raw_uuid(self) -> bytes:
        """The 16 bytes of its UUID."""
        return bytes.fromhex(self.uuid.removeprefix("GPU-").replace("-", ""))

    def card(self) -> bytes:
        """Return its row of CARD_INFO."""
        domain, bus, device = self._address()
        vendor, model = self.pci_device_id & 0xFFFF, self.pci_device_id >> 16
        return abi.CARD_STRUCT.pack(
            1, domain, bus, device, 0, vendor, model, self.gpu_id, 0, 0, 0, 0, 0, self.minor, b""
        )

    def _address(self) -> tuple[int, int, int]:
        domain, bus, rest = self.pci_bus_id.split(":")
        return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)


UVM_MAJOR: Final = 508
CAPABILITIES_MAJOR: Final = 234
"""The kernel assigns these two; the simulated /proc/devices lists them."""


def inodes(gpus: Sequence[Gpu], capabilities: Sequence[int] = ()) -> dict[str, int]:
    """Return the driver's nodes by name, each with the kernel's number of the device it stands for.

    ``capabilities`` are the minors of MIG devices' nodes, which lie beside the others here.
    """
    made = {
        CONTROL: abi.device_number(abi.MAJOR, abi.CONTROL_MINOR),
        "nvidia-modeset": abi.device_number(abi.MAJOR, abi.MODESET_MINOR),
        UVM: abi.device_number(UVM_MAJOR, 0),
        f"{UVM}-tools": abi.device_number(UVM_MAJOR, 1),
    }
    made |= {f"nvidia{gpu.minor}": abi.device_number(abi.MAJOR, gpu.minor) for gpu in gpus}
    return made | {
        capability_node(minor): abi.device_number(CAPABILITIES_MAJOR, minor) for minor in capabilities
    }


def capability_node(minor: int) -> str:
    """Return the name of a MIG device's node."""
    return f"nvidia-cap{minor}"
