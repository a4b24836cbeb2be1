"""The device nodes that a GPU or a MIG device needs.

Source: NVIDIA's MIG User Guide, "Device Nodes and Capabilities".
"""

from collections.abc import Iterable, Iterator
from typing import Final

from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import Placement

GPU_NODE: Final = "/dev/nvidia"
UVM_NODE: Final = "/dev/nvidia-uvm"
"""No CUDA program can start without it, yet it marks no device: NVIDIA's container runtime makes it when the
first container starts, which a node without a Healthy device never has."""
CAPABILITY_NODE: Final = "/dev/nvidia-caps/nvidia-cap"


def node_of(gpu: Gpu) -> Iterator[str]:
    """Yield a GPU's own node, if its minor is known."""
    if gpu.minor is not None:
        yield f"{GPU_NODE}{gpu.minor}"


def capability_nodes(mig: MigDevice) -> Iterator[str]:
    """Yield the capability nodes of a MIG device's instances, as far as the minors are known."""
    for minor in (mig.gi_minor, mig.ci_minor):
        if minor is not None:
            yield f"{CAPABILITY_NODE}{minor}"


def wanted_nodes(gpus: Iterable[Gpu], *, with_capabilities: bool) -> frozenset[str]:
    """Return the nodes that should exist for these GPUs, beside those of the driver itself."""
    found: set[str] = set()
    for gpu in gpus:
        found.update(node_of(gpu))
        if with_capabilities:
            found.update(path for mig in gpu.mig_devices for path in capability_nodes(mig))
    return frozenset(found)


def owners(gpus: Iterable[Gpu]) -> dict[str, list[Placement]]:
    """Return which devices cannot be used without each node."""
    found: dict[str, list[Placement]] = {}
    for gpu in gpus:
        for path in node_of(gpu):
            # Of two GPUs with one minor, the one that was listed later has it now.
            found[path] = [Placement(gpu.uuid)]
        for mig in gpu.mig_devices:
            for path in capability_nodes(mig):
                found.setdefault(path, []).append(Placement(gpu.uuid, mig.gi, mig.ci))
    return found


def unknown_nodes(gpu: Gpu, mig: MigDevice | None) -> tuple[str, ...]:
    """Return the parts of a device whose node has an unknown minor, and so no path."""
    minors: tuple[tuple[str, int | None], ...] = (("GPU", gpu.minor),)
    if mig is not None:
        minors += (("GPU instance", mig.gi_minor), ("compute instance", mig.ci_minor))
    return tuple(part for part, minor in minors if minor is None)


def without_path(gpus: Iterable[Gpu], *, with_capabilities: bool) -> dict[Placement, str]:
    """Return the devices with a node of unknown path, each with why."""
    found: dict[Placement, str] = {}
    for gpu in gpus:
        if unknown := unknown_nodes(gpu, None):
            found[Placement(gpu.uuid)] = unknown_message(unknown)
        for mig in gpu.mig_devices if with_capabilities and gpu.minor is not None else ():
            if unknown := unknown_nodes(gpu, mig):
                found[Placement(gpu.uuid, mig.gi, mig.ci)] = unknown_message(unknown)
    return found


def unknown_message(parts: Iterable[str]) -> str:
    """Return a message that nodes are unknown."""
    return f"the driver does not report the device node of its {' and '.join(parts)}"


def is_capability(path: str) -> bool:
    """Return whether a node is that of a GPU instance or compute instance."""
    return path.startswith(CAPABILITY_NODE)


def is_of_driver(path: str) -> bool:
    """Return whether no GPU can be used without a node, and it is not that of some GPU or MIG device."""
    return path != UVM_NODE and not is_capability(path) and not path.removeprefix(GPU_NODE).isdigit()
