"""What the probe reads of the driver's resource manager (RM): events, live objects, counters, open files.

Invariants: numbers are the kernel's own. A file is the address of the kernel's open file, so a copy of a
descriptor (dup, fork, a message) is the same file. An RM client belongs to one open file of /dev/nvidiactl,
so (client, handle) names an object on the whole node; a handle alone does not.
"""

from enum import IntEnum
from typing import Final, NamedTuple

MAX_INSTANCES: Final = 32
"""Device instances that the driver has. Source: open-gpu-kernel-modules:src/common/sdk/nvidia/inc/nvlimits.h
NV_MAX_DEVICES."""


class RmEventKind(IntEnum):
    """What happened; the numbers are those of bpf/gpu_probe.h."""

    OPEN = 1
    CLOSE = 2
    """A descriptor was closed; the file may live on."""
    ALLOC = 3
    FREE = 4
    DUP = 5
    """An object was copied into another client."""
    EXIT = 6
    """The last thread of a process began to exit; its files are still open."""
    FORK = 7
    RESCAN = 8
    """Descriptors may have moved in a way that is not followed (close_range, dup2, exec)."""
    UVM = 9
    """A client was registered with unified memory for a GPU, which names the GPU."""
    REGISTER_FD = 10
    RELEASE = 11
    """The open file ended (tier driver only)."""


class RmEvent(NamedTuple):
    """One event of the ring buffer."""

    at_ns: int
    """CLOCK_MONOTONIC."""
    cgroup_id: int
    """Inode of the cgroup v2 directory."""
    file: int
    tgid: int
    pid: int
    device: int
    """The kernel's dev_t: major << 20 | minor."""
    fd: int
    kind: RmEventKind
    rm_class: int
    """RM class of the object, or UVM command."""
    client: int
    parent: int
    handle: int
    detail: int
    """ALLOC of a device: its RM device instance. FORK: the child. CLOSE: LAST if the file ended with it.
    REGISTER_FD: with ``parent`` the halves of the address of the nvidiactl, the lower one there. UVM: with
    ``parent`` the eight bytes that the halves of the GPU's UUID make by exclusive or (little endian, as in
    the driver's own structure)."""


class RmObject(NamedTuple):
    """A live object that is tracked."""

    client: int
    handle: int
    at_ns: int
    cgroup_id: int
    file: int
    tgid: int
    """The process that allocated it."""
    rm_class: int
    parent: int
    gpu: int
    """RM device instance, for a device."""
    start_ticks: int = 0
    """When the process that allocated it began, as in HeldFile; 0 where it is not known."""
    uvm: int = 0
    """The GPU an address space was registered for with unified memory: the event's numbers ``joined``."""


REGISTRATION: Final = 0xFFFFFFFE
"""The class of a row that is no object: ``file``, of a GPU, was registered to an open nvidiactl, the halves
of whose address are ``parent``, the lower one, and ``gpu``. Its key is the address of ``file``."""
LAST: Final = 1
"""In an event's ``detail``: nothing else referred to the file that was closed."""


def joined(low: int, high: int) -> int:
    """Return the address whose halves these are."""
    return high << 32 | low


class ProcessCounters(NamedTuple):
    """What one process did since the probe was attached, or since it began."""

    tgid: int
    cgroup_id: int
    first_ns: int
    last_ns: int
    calls: int
    opens: int
    closes: int
    allocs: int
    frees: int
    contexts_allocated: int
    contexts_freed: int
    errors: int
    start_ticks: int = 0
    """As in HeldFile; 0 where it is not known."""
    exited_ns: int = 0
    """When its last thread began to exit; 0 while it lives."""
    rejected: int = 0
    """Objects of it that the kernel rejected, since it had too many: its objects are incomplete."""
    minors: int = 0
    """The GPUs that it opened itself, by minor, a bit for each; without those from 64 on."""
    unsent: int = 0
    """Events of it that were not sent, since it had used its share of the ring."""


class HeldFile(NamedTuple):
    """An open file of the driver in the descriptor table of one process."""

    tgid: int
    start_ticks: int
    """In clock ticks since boot, as /proc/PID/stat has it: with the pid it names a process."""
    file: int
    """0 where only /proc could be read, which does not show it."""
    device: int
    fds: int
    """How many descriptors of the process are this file."""
    cgroup_id: int
