"""The node of a scenario before its first step, from its specification alone: nothing is started.

Guarantee: the core gets the facts that the agent emits on such a node, so its snapshot is the agent's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from agent.config.load import load as load_settings
from agent.config.settings import Settings
from agent.core.health.reducer import step
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.model import facts
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import GpuUuid, pci_sysfs_name
from agent.model.policy import Policy
from agent.model.snapshot import Snapshot
from agent.simulation import roots, scenario
from agent.simulation.presets import GpuSpec, MigSpec, NodeSpec, PlacedMigDevice, place_mig_devices

USUAL_MPS_ROOT: Final = "/run/nvidia/mps"
"""Where NVIDIA's chart has the files of the MPS daemon; a scenario's node has no path of its own here."""


@dataclass(frozen=True, slots=True)
class ScenarioNode:
    """What commands show of a scenario's node; an agent.commands.extras.ScenarioNode."""

    spec: NodeSpec
    settings: Settings

    @property
    def snapshot(self) -> Snapshot:
        """The agent's snapshot of it, with every GPU healthy."""
        return healthy_snapshot(self.spec, self.settings.policy)

    @property
    def driver_version(self) -> str:
        """The version of its driver."""
        return self.spec.driver_version

    def write_roots(self, directory: Path) -> None:
        """Write the driver's files under ``directory``/driver, and those of the kernel under sys and proc."""
        roots.write_roots(self.spec, directory)
        (directory / "dev").rename(directory / "driver" / "dev")


def load(name: str, flags: Mapping[str, str]) -> ScenarioNode:
    """Return a scenario's node for an agent with these flags; raises ConfigError and UsageError."""
    loaded = scenario.load(name)
    defaults = {"mps-root": USUAL_MPS_ROOT, **loaded.agent}
    with TemporaryDirectory(prefix="gpu-agent-") as directory:
        if loaded.config is not None:
            defaults["config-file"] = f"{directory}/config.yaml"
            Path(defaults["config-file"]).write_text(loaded.config, encoding="utf-8")
        return ScenarioNode(loaded.node, load_settings({**defaults, **flags}, {}))


def healthy_snapshot(spec: NodeSpec, policy: Policy) -> Snapshot:
    """Return the snapshot of a node whose GPUs were all found and probed, and are healthy."""
    cuda = spec.cuda_version
    gpus = tuple(gpu_of(position, gpu) for position, gpu in enumerate(spec.gpus))
    emitted: tuple[facts.Fact, ...] = (
        facts.DriverReady(spec.driver_version, spec.nvml_version, (cuda // 1000, cuda % 1000 // 10)),
        facts.GpusEnumerated(gpus, control_nodes=tuple(f"/dev/{name}" for name in roots.DEVICE_FILES)),
        facts.MpsSeen(ready=True),
        *(facts.GpuProbePassed(gpu.uuid) for gpu in gpus),
    )
    state = initial_state(policy, None, now_ns=0)
    for fact in emitted:
        state, _, _ = step(state, fact, 0)
    return snapshot_of(state)


def gpu_of(position: int, spec: GpuSpec) -> Gpu:
    """Return the GPU of a position as NVML reports it at the start, when its index is its position."""
    mig = spec.mig if spec.mig is not None and spec.mig.enabled else None
    placed = place_mig_devices(position, mig.profiles, mig.devices) if mig is not None else ()
    return Gpu(
        uuid=GpuUuid(spec.uuid),
        index=position,
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
    gi_minor, ci_minor = roots.capability_minors(minor, placed.gi, placed.ci)
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
