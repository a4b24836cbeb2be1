"""Which capability nodes open a MIG device: /dev/nvidia-caps/nvidia-capN of its GPU and compute instance.

Source: NVIDIA MIG User Guide, "Device Nodes and Capabilities": the driver lists the minors of every
possible instance in /proc/driver/nvidia-caps/mig-minors.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.model.gpu import MigDevice
from agent.model.structs import replace
from agent.sources.nvml.inventory import ProbeResult

MAX_TABLE_BYTES: Final = 1_048_576
"""The table has some 30 bytes for each of 135 instances of a GPU."""

_LINE: Final = re.compile(rb"^(gpu\d{1,4}/gi\d{1,4}(?:/ci\d{1,4})?)/access (\d{1,8})$", re.MULTILINE)


def with_minors(result: ProbeResult, proc_root: Path) -> ProbeResult:
    """Return the result with the nodes of the GPU's MIG devices; the table is read only for new devices."""
    gpu = result.discovered.gpu
    if gpu.minor is None or all(mig.gi_minor is not None for mig in gpu.mig_devices):
        return result
    table = _table(proc_root)
    devices = tuple(_with_minors(gpu.minor, mig, table) for mig in gpu.mig_devices)
    return replace(result, discovered=replace(result.discovered, gpu=replace(gpu, mig_devices=devices)))


def _with_minors(gpu_minor: int, mig: MigDevice, table: Mapping[str, int]) -> MigDevice:
    instance = f"gpu{gpu_minor}/gi{mig.gi}"
    return replace(mig, gi_minor=table.get(instance), ci_minor=table.get(f"{instance}/ci{mig.ci}"))


def _table(proc_root: Path) -> Mapping[str, int]:
    """Return the minors by instance; empty where the driver has no such table."""
    try:
        with (proc_root / "driver/nvidia-caps/mig-minors").open("rb") as file:
            content = file.read(MAX_TABLE_BYTES)
    except OSError:
        return {}
    return {name.decode(): int(minor) for name, minor in _LINE.findall(content)}
