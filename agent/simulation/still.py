"""A simulated node at one moment, from its specification alone: nothing is started, nothing left behind.

Guarantee: the core is told what the agent finds on such a node, so its snapshot is the agent's own.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from agent.config.load import load
from agent.config.settings import Settings
from agent.core.reducer import step
from agent.core.state import initial_state
from agent.core.view import snapshot_of
from agent.model import facts
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import GpuUuid, pci_sysfs_name
from agent.model.policy import Policy
from agent.model.snapshot import Snapshot
from agent.simulation.presets import GpuSpec, MigSpec, NodeSpec, PlacedMigDevice, place_mig_devices
from agent.simulation.roots import DEVICE_FILES, capability_minors

if TYPE_CHECKING:
    from agent.simulation.scenario import Scenario

USUAL_MPS_ROOT: Final = "/run/nvidia/mps"
"""Where NVIDIA's chart has the files of the MPS daemon; a scenario's node has no path of its own here."""


def settings_of(scenario: "Scenario", given: Mapping[str, str]) -> Settings:
    """Return what an agent would run with on a scenario's node, where ``given`` are its flags too.

    Raises ConfigError.
    """
    flags = {"mps-root": USUAL_MPS_ROOT, **scenario.agent}
    with TemporaryDirectory(prefix="gpu-agent-") as directory:
        if scenario.config is not None:
            flags["config-file"] = f"{directory}/config.yaml"
            Path(flags["config-file"]).write_text(scenario.config, encoding="utf-8")
        return load({**flags, **given}, {})


def still(spec: NodeSpec, policy: Policy) -> Snapshot:
    """Return the snapshot of a node whose GPUs were all found, probed, and are well."""
    cuda = spec.cuda_version
    gpus = tuple(gpu_of(slot, gpu) for slot, gpu in enumerate(spec.gpus))
    seen: tuple[facts.Fact, ...] = (
        facts.DriverReady(spec.driver_version, spec.nvml_version, (cuda // 1000, cuda % 1000 // 10)),
        facts.GpusEnumerated(gpus, control_nodes=tuple(f"/dev/{name}" for name in DEVICE_FILES)),
        facts.MpsSeen(ready=True),
        *(facts.GpuProbePassed(gpu.uuid) for gpu in gpus),
    )
    state = initial_state(policy, None, now_ns=0)
    for fact in seen:
        state, _, _ = step(state, fact, 0)
    return snapshot_of(state)


def gpu_of(slot: int, spec: GpuSpec) -> Gpu:
    """Return the GPU of a slot as NVML tells of it at the start, when its index is its slot."""
    mig = spec.mig if spec.mig is not None and spec.mig.enabled else None
    placed = place_mig_devices(slot, mig.profiles, mig.devices) if mig is not None else ()
    return Gpu(
        uuid=GpuUuid(spec.uuid),
        index=slot,
        minor=spec.minor,
        name=spec.name,
        pci=pci_sysfs_name(spec.pci_bus_id),
        memory_bytes=spec.memory_mib << 20,
        compute_capability=spec.compute_capability,
        numa_node=spec.numa_node,
        serial=spec.serial,
        coherent=spec.addressing_mode == "ats",
        mig_enabled=mig is not None,
        mig_devices=tuple(
            _mig_device(spec.minor, mig, index, each) for index, each in enumerate(placed) if mig is not None
        ),
    )


def _mig_device(minor: int, mig: MigSpec, index: int, placed: PlacedMigDevice) -> MigDevice:
    profile = mig.profiles[placed.profile]
    gi_minor, ci_minor = capability_minors(minor, placed.gi, placed.ci)
    is_whole = placed.slices == profile.slices
    return MigDevice(
        uuid=placed.uuid,
        gi=placed.gi,
        ci=placed.ci,
        profile=profile.name if is_whole else f"{placed.slices}c.{profile.name}",
        memory_bytes=profile.memory_mib << 20,
        index=index,
        gi_minor=gi_minor,
        ci_minor=ci_minor,
    )
