"""What can be made to happen to the kernel's side of a simulated node: its log, the bus, modules, nodes.

Guarantees as in ``actions``. Nothing here sends uevents: those are the real kernel's.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.errors import UsageError
from agent.simulation.action_table import action, name_text, parameter, whole_number
from agent.simulation.kernel_log import MAX_TEXT
from agent.simulation.roots import (
    DRIVER,
    bind_pci_device,
    driver_of,
    load_modules,
    remove_device_node,
)

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode

FALLEN_OFF: Final = 79

_INSTANCE: Final = whole_number(0, 254)
_XID: Final = whole_number(1, 65_535)
_MEANS: Final = {
    FALLEN_OFF: "GPU has fallen off the bus.",
    119: "Timeout after 6s of waiting for RPC response",
}


def _log_text(text: str) -> str:
    if not text.strip() or len(text) > MAX_TEXT:
        raise ValueError(f"must have 1 to {MAX_TEXT} characters")
    return text


def node_name(text: str) -> str:
    """Parse the name of a device node of the driver."""
    name = text.removeprefix("/dev/")
    if not name.startswith(DRIVER) or "/" in name or not name.isascii() or not name.isprintable():
        raise ValueError("must be a node of the driver, such as nvidia3 or nvidiactl")
    return name


@dataclass(frozen=True, slots=True)
class KernelXid:
    """Write an XID of a GPU into the kernel log, and nothing to NVML; 79 as the two lines it has."""

    xid: int = parameter("XID", "The error's number, such as 79", _XID)
    gpu: str = parameter("GPU", "Position or UUID", name_text)
    gi: int | None = parameter("N", "GPU instance of the MIG device", _INSTANCE, default=None)
    ci: int | None = parameter("N", "Compute instance of the MIG device", _INSTANCE, default=None)
    text: str = parameter("TEXT", "The line's text after the number", _log_text, default="")

    async def apply(self, node: "SimulatedNode") -> str:
        """Write it as the driver does."""
        position = node.position(self.gpu)
        pci = node.spec.gpus[position].pci_bus_id
        instance = "" if self.gi is None else f" GPU-I:{self.gi:02}"
        instance += "" if self.ci is None else f" GPU-CI:{self.ci:02}"
        text = self.text or f"pid='<unknown>', name=<unknown>, {_MEANS.get(self.xid, 'simulated')}"
        node.kernel_log.write(f"NVRM: Xid (PCI:{pci.rpartition('.')[0]}{instance}): {self.xid}, {text}")
        if self.xid == FALLEN_OFF:
            node.kernel_log.write(f"NVRM: GPU {pci}: GPU has fallen off the bus.")
        return f"The kernel log has XID {self.xid} of {node.gpu_name(position)}"


@dataclass(frozen=True, slots=True)
class KernelLogText:
    """Write a record into the kernel log."""

    text: str = parameter("TEXT", 'Such as "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."', _log_text)

    async def apply(self, node: "SimulatedNode") -> str:
        """Write it."""
        node.kernel_log.write(self.text)
        return "A record was written into the kernel log"


@dataclass(frozen=True, slots=True)
class Unbind:
    """Take a GPU from NVIDIA's driver: NVML no longer lists it, and no or another driver has it."""

    gpu: str = parameter("GPU", "Position or UUID", name_text)
    driver: str | None = parameter("NAME", "Its new driver, such as vfio-pci", name_text, default=None)

    async def apply(self, node: "SimulatedNode") -> str:
        """Hide it and change the link of its PCI device."""
        position = node.position(self.gpu)
        if self.driver is not None and ("/" in self.driver or self.driver in {DRIVER, ".", ".."}):
            raise UsageError(f"{self.driver[:80]} is no other driver; name one such as vfio-pci")
        node.nvml.hide_gpu(position)
        _bind(node, position, self.driver)
        return f"{node.gpu_name(position)} is bound to {self.driver or 'no driver'}"


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind a GPU to NVIDIA's driver, also one that is bound to it already: it is initialised anew."""

    gpu: str = parameter("GPU", "Position or UUID", name_text)

    async def apply(self, node: "SimulatedNode") -> str:
        """Change the link of its PCI device and show it."""
        position = node.position(self.gpu)
        _bind(node, position, DRIVER)
        node.nvml.reveal_gpu(position)
        return f"{node.gpu_name(position)} is bound to {DRIVER}"


def _bind(node: "SimulatedNode", position: int, driver: str | None) -> None:
    try:
        bind_pci_device(node.spec.gpus[position], node.directory.sys, driver)
    except FileNotFoundError:
        raise UsageError(f"{node.gpu_name(position)} is not on the bus; bring it back with add-gpu") from None


@dataclass(frozen=True, slots=True)
class RemoveNode:
    """Remove a device node."""

    name: str = parameter("NODE", "Such as nvidia3 or nvidiactl", node_name)

    async def apply(self, node: "SimulatedNode") -> str:
        """Remove the file."""
        remove_device_node(self.name, node.directory.dev)
        return f"/dev/{self.name} does not exist"


@dataclass(frozen=True, slots=True)
class AddNode:
    """Make a device node that was removed."""

    name: str = parameter("NODE", "Such as nvidia3 or nvidiactl", node_name)

    async def apply(self, node: "SimulatedNode") -> str:
        """Make the file."""
        node.add_device_node(self.name)
        return f"/dev/{self.name} exists"


@dataclass(frozen=True, slots=True)
class ReloadModule:
    """Load the driver's modules anew, faster than NVML's clients notice: only /sys shows it."""

    async def apply(self, node: "SimulatedNode") -> str:
        """Make their directories anew, and bind every GPU again."""
        sys_root = node.directory.sys
        # Without the old ones gone first: the file system would give the new ones their inodes.
        load_modules(node.spec, sys_root)
        for gpu in node.spec.gpus:
            if driver_of(gpu, sys_root) == DRIVER:
                bind_pci_device(gpu, sys_root, DRIVER)
        return "The driver's modules were loaded anew"


KERNEL_ACTIONS: Final = (
    action(KernelXid, "kernel-xid", "xid"),
    action(KernelLogText, "kernel-log", "text"),
    action(Unbind, "unbind", "gpu"),
    action(Bind, "bind", "gpu"),
    action(RemoveNode, "remove-node", "name"),
    action(AddNode, "add-node", "name"),
    action(ReloadModule, "reload-module"),
)
