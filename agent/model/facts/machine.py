"""What the machine shows beside NVML: its kernel's log, sysfs, device nodes, uevents, the MPS daemon."""

from collections.abc import Hashable

from agent.model.facts.message import KERNEL_LOG, MPS, SYSFS, UEVENTS, Counted, State
from agent.model.ids import ALL, SourceName
from agent.model.xid import NO_WORDS, XidWords


class KernelXidSeen(Counted, frozen=True):
    """The kernel log has an XID of a PCI address."""

    pci: str
    """Sysfs form."""
    xid: int
    detail: str = ""
    """The text after the number, shortened; unit and sub code of NVLink errors."""
    words: XidWords = NO_WORDS
    """What of that a verdict rests on."""
    in_words: bool = False
    """The line has no number: it only has that the GPU has fallen off the bus."""
    backlog: bool = False
    """From before any agent of this boot began to read: an earlier process may have counted it."""
    live: bool = True
    """False: written while no agent listened, so that no listener had NVML's event of it."""
    repaired: bool = False
    """A later record shows a new initialisation of the GPU, or that no action is required any more."""
    gi: int = ALL
    ci: int = ALL
    source: SourceName = KERNEL_LOG

    @property
    def key(self) -> Hashable:
        """The same XID at the same place is counted, not queued twice; a graver one stays one of its own."""
        variant = (
            self.backlog,
            self.live,
            self.repaired,
            self.in_words,
            self.words.severity,
            self.words.reset,
        )
        return (KernelXidSeen, self.pci, self.gi, self.ci, self.xid, *variant)


class SwitchErrorSeen(Counted, frozen=True):
    """The kernel log has an error (SXid) of an NVSwitch."""

    pci: str
    sxid: int
    fatal: bool
    detail: str = ""
    source: SourceName = KERNEL_LOG

    @property
    def key(self) -> Hashable:
        """The same error of the same switch is counted, not queued twice."""
        return (SwitchErrorSeen, self.pci, self.sxid, self.fatal)


class UvmErrorSeen(State, frozen=True):
    """By the kernel log, the unified memory driver (nvidia-uvm) rejects all work from here on."""

    status: str
    source: SourceName = KERNEL_LOG


class UvmProbed(State, frozen=True):
    """/dev/nvidia-uvm was opened after the kernel log had spoken of it."""

    error: str | None
    """The driver's error; None: the open succeeded."""
    source: SourceName = SYSFS


class PciConfigRead(State, frozen=True):
    """The PCI configuration space of a GPU was read after the kernel log had spoken of it."""

    pci: str
    answers: bool
    """False: it reads all ones, or the device is gone."""
    source: SourceName = SYSFS

    @property
    def key(self) -> Hashable:
        """One for each address."""
        return (PciConfigRead, self.pci)


class KernelLogRead(State, frozen=True):
    """Every XID of the kernel log up to a record was emitted; emitted after them."""

    until: int
    """Sequence number of the record; the kernel counts anew with each boot."""
    source: SourceName = KERNEL_LOG


class PciGpusSeen(State, frozen=True):
    """The PCI addresses of the GPUs that are bound to NVIDIA's driver, as sysfs has them now.

    Functions on vfio-pci or nouveau, and those bound to no driver, are not among them.
    """

    addresses: tuple[str, ...]
    source: SourceName = SYSFS


class DriverModuleSeen(State, frozen=True):
    """Which load of the kernel module this is: the inode of /sys/module/nvidia; None: not loaded."""

    inode: int | None
    source: SourceName = SYSFS


class DeviceNodesSeen(State, frozen=True):
    """The device nodes that should exist and do not: ``/dev/nvidia3``, ``/dev/nvidiactl``."""

    missing: tuple[str, ...]
    source: SourceName = SYSFS


class GpuRebound(State, frozen=True):
    """A GPU was unbound from its driver, or bound to it: what was wrong with it may be gone."""

    pci: str
    bound: bool
    source: SourceName = UEVENTS

    @property
    def key(self) -> Hashable:
        """One for each address and direction."""
        return (GpuRebound, self.pci, self.bound)


class MpsSeen(State, frozen=True):
    """Whether the MPS control daemon reports that it serves."""

    ready: bool
    message: str = ""
    """What is missing, if it does not."""
    source: SourceName = MPS


MachineFact = (
    KernelXidSeen
    | SwitchErrorSeen
    | UvmErrorSeen
    | UvmProbed
    | PciConfigRead
    | KernelLogRead
    | PciGpusSeen
    | DriverModuleSeen
    | DeviceNodesSeen
    | GpuRebound
    | MpsSeen
)
