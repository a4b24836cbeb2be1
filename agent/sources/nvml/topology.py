"""Samples the topology of a GPU: its NVLinks, the PCIe paths to the other GPUs, the CPUs near it.

Invariants: everything here blocks and runs on the GPU's own thread. Nothing that fails here is a
finding: it is unknown, and health polls find the rest. No call is made on another GPU; those that did
not answer lately are not even named to the driver, so that one that hangs delays no other.

Cost: two calls for each NVLink that is up, one for each other GPU, and one; once after the GPUs were
listed, and again when other GPUs are listed or another link is down.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from agent.errors import NvmlCode, NvmlError
from agent.model.ids import pci_sysfs_name
from agent.model.topology import NvLinks, PcieDistance, TopologySample
from agent.sources.nvml.inventory import DiscoveredGpu
from agent.sources.nvml.library import Handle
from agent.sources.nvml.optional_calls import UNSUPPORTED_CODES
from agent.sources.nvml.readings import LINK_TO_GPU, LINK_TO_SWITCH, MAX_LINKS, Readings

MAX_CPU_LIST_CHARS: Final = 1_024
MAX_PATH_CHARS: Final = 4_096

_CPU_LIST: Final = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_DISTANCES: Final[Mapping[int, PcieDistance]] = {
    0: PcieDistance.SAME_BOARD,
    10: PcieDistance.SINGLE_SWITCH,
    20: PcieDistance.MULTI_SWITCH,
    30: PcieDistance.HOST_BRIDGE,
    40: PcieDistance.SAME_NODE,
    50: PcieDistance.CROSS_NODE,
}
"""By nvmlGpuTopologyLevel_t. Source: nvml.h."""


class LinksUnknownError(Exception):
    """The driver could not read a link this time."""


def sample_topology(
    readings: Readings, seen: DiscoveredGpu, others: Mapping[str, Handle], sys_root: Path
) -> tuple[TopologySample, bool]:
    """Sample the topology of a GPU; ``others`` are those that answer, by PCI address in sysfs form.

    Returns also whether the sample is complete; if not, another one may be.
    """
    nvlinks, is_complete = None, True
    try:
        nvlinks = read_nvlinks(readings, seen.handle)
    except LinksUnknownError:
        is_complete = False
    distances = {pci: _distance(readings, seen.handle, other) for pci, other in others.items()}
    known = {pci: distance for pci, distance in distances.items() if distance is not None}
    near = sample_topology_without_driver(seen, sys_root)
    affinity = _cpu_affinity(readings, seen.handle) or near.cpu_affinity
    return TopologySample(
        nvlinks=nvlinks, distances=known, path=near.path, cpu_affinity=affinity
    ), is_complete


def sample_topology_without_driver(seen: DiscoveredGpu, sys_root: Path) -> TopologySample:
    """Return what the kernel alone shows of a GPU's topology."""
    device = sys_root / "bus/pci/devices" / seen.gpu.pci
    return TopologySample(path=_device_path(device), cpu_affinity=_local_cpus(device))


def read_nvlinks(readings: Readings, handle: Handle) -> NvLinks | None:
    """Return the NVLinks that are up; none where the GPU has no links, None if the driver cannot read them.

    Raises LinksUnknownError if a later call may succeed.
    """
    to_gpus: dict[str, int] = {}
    to_switches = 0
    for link in range(MAX_LINKS):
        try:
            if not readings.link_is_up(handle, link):
                continue
            kind, pci = _other_end(readings, handle, link)
        except NvmlError as error:
            if error.code == NvmlCode.NOT_SUPPORTED:
                continue
            if error.code == NvmlCode.INVALID_ARGUMENT:
                # NVML knows more links than this GPU has.
                break
            if error.code in UNSUPPORTED_CODES:
                return None
            raise LinksUnknownError from error
        if kind == LINK_TO_SWITCH:
            to_switches += 1
        elif kind == LINK_TO_GPU:
            to_gpus[pci] = to_gpus.get(pci, 0) + 1
    return NvLinks(to_gpus, to_switches)


def _other_end(readings: Readings, handle: Handle, link: int) -> tuple[int, str]:
    """Return what is at the other end of a link and, of a GPU, its address."""
    try:
        kind = readings.link_leads_to(handle, link)
    except NvmlError as error:
        if error.code not in UNSUPPORTED_CODES:
            raise
        # Drivers that do not report the kind report the address; the core checks whether it is a GPU's.
        kind = LINK_TO_GPU
    return kind, pci_sysfs_name(readings.link_peer(handle, link)) if kind == LINK_TO_GPU else ""


def _distance(readings: Readings, handle: Handle, other: Handle) -> PcieDistance | None:
    try:
        return _DISTANCES.get(readings.common_ancestor(handle, other))
    except NvmlError:
        return None


def _cpu_affinity(readings: Readings, handle: Handle) -> str | None:
    try:
        return cpu_list(readings.cpu_affinity(handle))
    except NvmlError:
        return None


def cpu_list(cpus: Iterable[int]) -> str | None:
    """Return ascending numbers in the kernel's list format: ``0-15,32-47``; None for none."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return _checked(",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs))


def _checked(text: str) -> str | None:
    return text if len(text) <= MAX_CPU_LIST_CHARS and _CPU_LIST.fullmatch(text) else None


def _device_path(device: Path) -> str | None:
    """Return the path of a device below /sys/devices."""
    try:
        target = str(device.readlink())
    except OSError:
        return None
    _, found, path = target.rpartition("devices/")
    return path if found and len(path) <= MAX_PATH_CHARS else None


def _local_cpus(device: Path) -> str | None:
    try:
        return _checked((device / "local_cpulist").read_text(errors="replace").strip())
    except OSError:
        return None
