"""A GPU and its MIG devices as NVML lists them; nothing here changes with health."""

import msgspec

from agent.model.ids import ALL, GpuUuid, Placement


class MigDevice(msgspec.Struct, frozen=True):
    """One compute instance that NVML lists as a MIG device."""

    uuid: str
    gi: int
    ci: int
    profile: str
    """Canonical profile name with its attributes: ``1g.5gb``, ``1g.10gb+me``."""
    memory_bytes: int
    index: int = 0
    """NVML's index of the MIG device on its GPU."""
    gi_minor: int | None = None
    """N of /dev/nvidia-caps/nvidia-capN that gives access to its GPU instance; None: not known."""
    ci_minor: int | None = None
    """The same of its compute instance."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A physical GPU."""

    uuid: GpuUuid
    index: int
    """NVML's index; it moves when another GPU is lost, so it is only for people and for order."""
    minor: int | None = None
    """N of /dev/nvidiaN; None where the driver does not report it."""
    name: str
    pci: str
    """PCI address in sysfs form."""
    memory_bytes: int | None
    """None where the driver does not report it."""
    compute_capability: tuple[int, int] | None = None
    numa_node: int | None = None
    """None where the kernel knows no node (sysfs has -1, no value, or an invalid one)."""
    serial: str | None = None
    part_number: str | None = None
    """Board part number; with serial, VBIOS and InfoROM it is what an RMA asks for."""
    vbios: str | None = None
    inforom: str | None = None
    device_instance: int | None = None
    """The driver's number of it in objects of CUDA and graphics programs; None: not reported."""
    coherent: bool | None = None
    """Whether GPU and CPU share one address space (ATS), as on Grace; None: not reported."""
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()

    @property
    def placement(self) -> Placement:
        """The whole GPU."""
        return Placement(self.uuid, ALL, ALL)
