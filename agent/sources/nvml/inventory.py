"""Probes one GPU through NVML: its identity, its properties, and whether its basic calls succeed.

Invariants: everything here blocks and runs on a GPU's own thread. A GPU that can be identified is
returned even if a later call on it fails: an unhealthy GPU is listed and marked, never hidden. Nothing is
invented: what the driver does not answer stays unknown.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from agent.errors import NvmlCode, NvmlError
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import GpuUuid, pci_sysfs_name
from agent.model.sample import GpuSample
from agent.model.structs import replace
from agent.model.usage import GpuMemory
from agent.sources.nvml.library import (
    FINDINGS,
    GPU_INSTANCE_PROFILES,
    Handle,
    MigAttributes,
    Nvml,
    not_supported,
)

CONTROL_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""What every container with a GPU needs. Source: NVIDIA/k8s-device-plugin:internal/plugin/server.go."""
IMEX_NODES: Final = ("/dev/nvidia-caps-imex-channels/channel0",)
"""The only channel that can be configured. Source: NVIDIA/k8s-device-plugin:internal/imex/imex.go."""

MAX_MIG_DEVICES: Final = 64
"""MIG devices read of a GPU; today's GPUs have seven GPU instances of up to seven each."""

_MIG_NAME: Final = re.compile(r"\bMIG ((?:\d+c\.)?\d+g\.\d+gb(?:[+-][\w.]+)*)\s*$")
_GONE: Final = frozenset({NvmlCode.NOT_FOUND, NvmlCode.GPU_NOT_FOUND})

GIB: Final = 1 << 30

T = TypeVar("T")


class GpuGoneError(Exception):
    """There is no GPU at this PCI address any more, or a different one."""


class DiscoveredGpu(msgspec.Struct, frozen=True):
    """A GPU as the newest probe found it."""

    gpu: Gpu
    handle: Handle
    bus_id: str
    """The PCI address as NVML writes it."""
    has_mig: bool = True
    """False once the GPU answered that it has no MIG."""
    mig: Mapping[str, MigAttributes] = msgspec.field(default_factory=dict)
    """How large its MIG devices are, by UUID: a new instance may have the UUID of an old one."""
    complete: bool = False
    """Whether what never changes was read in full."""
    is_instance_read: bool = False
    """Whether the device instance was read."""
    numa_problem: str | None = None
    """What sysfs holds instead of a node number."""
    celsius: int | None = None
    """The temperature at that moment; None where the GPU does not report it."""


class ProbeResult(msgspec.Struct, frozen=True):
    """The result of one probe: the GPU, the first call that failed with a finding, its readings."""

    discovered: DiscoveredGpu
    failure: NvmlError | None
    sample: GpuSample | None = None
    memory: GpuMemory | None = None


_UUID: Final = re.compile(r"GPU-[0-9A-Za-z-]{1,75}")
"""Source: nvml.h, NVML_DEVICE_UUID_V2_BUFFER_SIZE (96 bytes with the terminator)."""


def discover_gpu(nvml: Nvml, index: int, sys_root: Path) -> ProbeResult:
    """Identify the GPU that NVML has at an index; raises NvmlError or GpuGoneError if that fails."""
    handle = nvml.handle_by_index(index)
    uuid = nvml.uuid(handle)
    if not _UUID.fullmatch(uuid):
        raise GpuGoneError(f"The GPU at index {index} has no UUID but {uuid[:100]!r}")
    bus_id = nvml.pci_bus_id(handle)
    pci = pci_sysfs_name(bus_id)
    numa_node, numa_problem = read_numa_node(sys_root, pci)
    gpu = Gpu(
        uuid=GpuUuid(uuid),
        index=index,
        minor=None,
        name="",
        pci=pci,
        memory_bytes=None,
        compute_capability=None,
        numa_node=numa_node,
    )
    return _examine(nvml, DiscoveredGpu(gpu, handle, bus_id, numa_problem=numa_problem))


def probe_gpu(nvml: Nvml, known: DiscoveredGpu) -> ProbeResult:
    """Probe a known GPU. Raises GpuGoneError if it is not there any more."""
    known = replace(known, celsius=None)
    try:
        handle = nvml.handle_by_pci(known.bus_id)
        uuid = nvml.uuid(handle)
        index = nvml.index(handle)
    except NvmlError as error:
        if error.code in _GONE:
            raise GpuGoneError(str(error)) from None
        return ProbeResult(known, error)
    if uuid != known.gpu.uuid:
        raise GpuGoneError(f"{known.bus_id} is now {uuid}")
    return _examine(nvml, replace(known, handle=handle, gpu=replace(known.gpu, index=index)))


def _examine(nvml: Nvml, seen: DiscoveredGpu) -> ProbeResult:
    for examine in (_with_details, _with_mig, _with_health):
        try:
            seen = examine(nvml, seen)
        except NvmlError as error:
            return ProbeResult(seen, error)
    return ProbeResult(seen, None)


def _unless_unsupported(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except NvmlError as error:
        if not_supported(error):
            return otherwise
        raise


def _with_details(nvml: Nvml, seen: DiscoveredGpu) -> DiscoveredGpu:
    if seen.complete:
        return seen
    handle = seen.handle
    minor: int | None = _unless_unsupported(lambda: nvml.minor(handle), None)
    memory_bytes: int | None = _unless_unsupported(lambda: nvml.memory_bytes(handle), None)
    capability: tuple[int, int] | None = _unless_unsupported(lambda: nvml.compute_capability(handle), None)
    gpu = replace(
        seen.gpu,
        name=_unless_unsupported(lambda: nvml.name(handle), ""),
        memory_bytes=memory_bytes,
        minor=minor,
        compute_capability=capability,
        serial=_if_available(lambda: nvml.serial(handle)),
        part_number=_if_available(lambda: nvml.part_number(handle)),
        vbios=_if_available(lambda: nvml.vbios(handle)),
        inforom=_if_available(lambda: nvml.inforom(handle)),
        coherent=_coherent(nvml, handle),
    )
    return replace(seen, gpu=gpu, complete=True)


def _coherent(nvml: Nvml, handle: Handle) -> bool | None:
    """Return whether a GPU is coherent; one without addressing modes, in hardware or driver, is not.

    Source: NVIDIA/go-nvlib:pkg/nvlib/device/device.go.
    """
    try:
        return nvml.coherent(handle)
    except NvmlError as error:
        if error.code in FINDINGS:
            raise
        return False if error.code in (NvmlCode.NOT_SUPPORTED, NvmlCode.FUNCTION_NOT_FOUND) else None


def _if_available(call: Callable[[], str]) -> str | None:
    """Return a text for display that no device depends on: a GPU without it works all the same."""
    try:
        return call() or None
    except NvmlError as error:
        if error.code in FINDINGS:
            raise
        return None


def _with_health(nvml: Nvml, seen: DiscoveredGpu) -> DiscoveredGpu:
    """Make the harmless calls whose return codes show whether the GPU works."""
    _unless_unsupported(lambda: nvml.memory_bytes(seen.handle), 0)
    celsius: int | None = _unless_unsupported(lambda: nvml.temperature_celsius(seen.handle), None)
    return seen if celsius == seen.celsius else replace(seen, celsius=celsius)


# MIG


def _with_mig(nvml: Nvml, seen: DiscoveredGpu) -> DiscoveredGpu:
    if not seen.has_mig:
        return seen
    enabled: bool | None = _unless_unsupported(lambda: nvml.mig_enabled(seen.handle), None)
    if enabled is None:
        return replace(seen, has_mig=False)
    found = _mig_devices(nvml, seen) if enabled else []
    devices = tuple(sorted((mig for mig, _ in found), key=lambda mig: (mig.gi, mig.ci)))
    sizes = {mig.uuid: attributes for mig, attributes in found}
    if (enabled, devices, sizes) == (seen.gpu.mig_enabled, seen.gpu.mig_devices, seen.mig):
        return seen
    return replace(seen, gpu=replace(seen.gpu, mig_enabled=enabled, mig_devices=devices), mig=sizes)


def _mig_devices(nvml: Nvml, seen: DiscoveredGpu) -> list[tuple[MigDevice, MigAttributes]]:
    known = {mig.uuid: mig for mig in seen.gpu.mig_devices}
    found: list[tuple[MigDevice, MigAttributes]] = []
    for index in range(min(nvml.mig_maximum(seen.handle), MAX_MIG_DEVICES)):
        try:
            mig = nvml.mig_handle(seen.handle, index)
            uuid = nvml.uuid(mig)
            instances = nvml.mig_instances(mig)
            attributes = nvml.mig_attributes(mig)
            device = known.get(uuid)
            is_same = device is not None and (device.gi, device.ci) == instances
            if device is None or not is_same or seen.mig.get(uuid) != attributes:
                device = _mig_device(nvml, seen, mig, uuid, instances, attributes)
        except NvmlError as error:
            # INVALID_ARGUMENT: it was destroyed between two calls. The next probe reads the rest.
            if error.code in (*_GONE, NvmlCode.INVALID_ARGUMENT):
                continue
            raise
        found.append((device if device.index == index else replace(device, index=index), attributes))
    return found


def _mig_device(
    nvml: Nvml,
    seen: DiscoveredGpu,
    mig: Handle,
    uuid: str,
    instances: tuple[int, int],
    attributes: MigAttributes,
) -> MigDevice:
    gi, ci = instances
    return MigDevice(
        uuid=uuid,
        gi=gi,
        ci=ci,
        profile=_profile(nvml, seen, mig, gi, attributes),
        memory_bytes=attributes.memory_bytes,
    )


def _profile(nvml: Nvml, seen: DiscoveredGpu, mig: Handle, gi: int, attributes: MigAttributes) -> str:
    """Return the canonical profile name, from the best of three sources."""
    try:
        # Only the instance's profile shows ``+me`` and its like; it needs root's rights.
        name = _gpu_instance_profile_name(nvml, seen.handle, gi)
    except NvmlError as error:
        if not not_supported(error):
            raise
        name = None
    if name is not None:
        if attributes.compute_slices != attributes.gpu_slices:
            return f"{attributes.compute_slices}c.{name}"
        return name
    found_name = _MIG_NAME.search(_unless_unsupported(lambda: nvml.name(mig), ""))
    if found_name is not None:
        return found_name[1]
    return profile_from_attributes(attributes, seen.gpu.memory_bytes)


def _gpu_instance_profile_name(nvml: Nvml, handle: Handle, gi: int) -> str | None:
    wanted = nvml.gpu_instance_profile(handle, gi)
    for number in range(GPU_INSTANCE_PROFILES):
        try:
            profile, name = nvml.profile_name(handle, number)
        except NvmlError as error:
            # A GPU supports only some of the profiles that NVML knows.
            if not_supported(error) or error.code in (*_GONE, NvmlCode.INVALID_ARGUMENT):
                continue
            raise
        if profile == wanted:
            found_name = _MIG_NAME.search(name if "MIG " in name else f"MIG {name}")
            return found_name[1] if found_name is not None else None
    return None


def profile_from_attributes(attributes: MigAttributes, gpu_memory_bytes: int | None) -> str:
    """Return the profile name that NVIDIA's tools would compute: memory in eighths of the GPU's.

    Half a gibibyte is rounded up. Where the GPU's memory is unknown it is the slice's own, rounded up.
    Source: NVIDIA/go-nvlib:pkg/nvlib/device/mig_profile.go.
    """
    memory_gb = -(-attributes.memory_bytes // GIB)
    if gpu_memory_bytes:
        eighths = -(-attributes.memory_bytes * 8 // gpu_memory_bytes)
        memory_gb = (eighths * -(-gpu_memory_bytes // GIB) + 4) // 8
    slices = f"{attributes.gpu_slices}g.{memory_gb}gb"
    if attributes.compute_slices == attributes.gpu_slices:
        return slices
    return f"{attributes.compute_slices}c.{slices}"


# The node


def read_numa_node(sys_root: Path, pci: str) -> tuple[int | None, str | None]:
    """Return the NUMA node of a PCI device, and the text that sysfs has if that is no number.

    The kernel writes -1 for none; that must never reach the kubelet.
    """
    try:
        text = (sys_root / "bus/pci/devices" / pci / "numa_node").read_text(errors="replace").strip()
    except OSError:
        return None, None
    try:
        node = int(text)
    except ValueError:
        return None, text[:32]
    return (node if node >= 0 else None), None


def control_nodes(dev_root: Path) -> tuple[str, ...]:
    """Return the control nodes and IMEX channels that exist, by the names they have in a container.

    One that a security module hides does not count, as for NVIDIA's plugin.
    """
    return tuple(
        node
        for node in CONTROL_NODES + IMEX_NODES
        if os.path.exists(f"{dev_root}/{node.removeprefix('/dev/')}")  # noqa: PTH110 - Path's raises
    )
