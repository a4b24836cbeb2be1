"""The layout of bpf/gpu_probe.h as struct formats, and rows of it as the agent's records.

Invariants: sizes are asserted in the header, offsets are compared with the object's BTF by
tests/probe/test_layout.py, and key and value sizes with the kernel's own when maps are handed over.
"""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.model.rm import HeldFile, ProcessCounters, RmEvent, RmEventKind, RmObject

EVENT: Final = struct.Struct("=QQQIIIiIIIIII")
OBJECT_KEY: Final = struct.Struct("=II")
OBJECT: Final = struct.Struct("=5Q4I")
PROCESS_KEY: Final = struct.Struct("=I")
PROCESS: Final = struct.Struct("=16Q4Iq")
PROCESS_LIFE: Final = struct.Struct("=8xQ16xQ112x")
"""Of the same row, when the process started and when it exited."""
FORGOTTEN_KEY: Final = struct.Struct("=Q")
FORGOTTEN: Final = struct.Struct("=Qq")
OF_CGROUP: Final = 1 << 63
"""In a key of ``forgotten``: the row of a cgroup, not of a process."""
CGROUP_KEY: Final = struct.Struct("=Q")
CGROUP: Final = struct.Struct("=q")
OPENING_KEY: Final = struct.Struct("=Q")
OPENING: Final = struct.Struct("=Q")
CONFIG: Final = struct.Struct("=8IQII")
INDEX: Final = struct.Struct("=I")
DEVICE: Final = struct.Struct("=I")
CHECK: Final = struct.Struct("=QQQq")
STATISTICS: Final = struct.Struct("=13Q")
HELD: Final = struct.Struct("=QQQQIIII")
TRACED_KEY: Final = struct.Struct("=Q")
TRACED: Final = struct.Struct("=QQQIIIiIIiI64s")

SIZES: Final = {
    "objects": (OBJECT_KEY.size, OBJECT.size),
    "processes": (PROCESS_KEY.size, PROCESS.size),
    "forgotten": (FORGOTTEN_KEY.size, FORGOTTEN.size),
    "cgroups": (CGROUP_KEY.size, CGROUP.size),
    "openings": (OPENING_KEY.size, OPENING.size),
    "config": (INDEX.size, CONFIG.size),
    "devices": (INDEX.size, DEVICE.size),
    "checks": (INDEX.size, CHECK.size),
    "statistics": (INDEX.size, STATISTICS.size),
    "traced": (TRACED_KEY.size, TRACED.size),
    "events": (0, 0),
}
"""Key and value of each map, in bytes."""

RESERVE_PROGRAMS: Final = ("ioctl", "open", "close", "process")
"""Names of enum gpu_program."""
MAX_OBJECTS_EACH: Final = 16_384
"""Objects kept of one process, and of one cgroup; further ones are rejected, and counted for it."""
MINORS: Final = 256
"""Entries of the arrays that are indexed by minor."""

CONTEXT_CLASS: Final = 0x9067
"""FERMI_CONTEXT_SHARE_A: one for each CUDA context."""
NS_PER_TICK: Final = 10_000_000
"""/proc counts in USER_HZ, which is 100 on every machine that is supported."""

_KINDS: Final = {int(kind): kind for kind in RmEventKind}


class ProbeConfig(NamedTuple):
    """struct gpu_config: the settings that user space writes for the programs, at any time."""

    nvidia_major: int = 195
    uvm_major: int = 0
    caps_major: int = 0
    context_class: int = CONTEXT_CLASS
    driver_branch: int = 0
    agent_tgid: int = 0
    test_filesystem: int = 0
    any_return: int = 0
    answer_within_ns: int = 5_000_000_000
    trace_tgid: int = 0
    scan: int = 0
    """How many scans were started; an event that a scan resolves is sent once until the next one starts."""

    def pack(self) -> bytes:
        """Return the value of the map's only row."""
        return CONFIG.pack(*self)


class Check(NamedTuple):
    """struct gpu_check: the last readiness check of one device, as measured in the kernel."""

    entered_ns: int
    returned_ns: int
    calls: int
    result: int
    """What the ioctl returned: 0, or a negative errno."""

    @property
    def in_flight(self) -> bool:
        """Whether the call entered and did not return."""
        return self.entered_ns > self.returned_ns

    @property
    def took_ns(self) -> int | None:
        """How long the call took; None while it is in flight."""
        return None if self.in_flight else self.returned_ns - self.entered_ns


class ProbeStatistics(NamedTuple):
    """struct gpu_statistics, summed over CPUs."""

    events: int
    calls: int
    unreadable: int
    objects_full: int
    """Objects that found no room in the table."""
    rejected: int
    """Objects that were rejected because their process or cgroup has MAX_OBJECTS_EACH already."""
    unsent: int
    """Events of processes that had used their share of the ring; their rows count them, too."""
    processes_full: int
    """Times that a process found no room in the table."""
    processes_added: int
    unreturned: int
    """Calls whose return was not seen: too many were in the driver at once. Their effect is unknown."""
    reserve_failures: tuple[int, int, int, int]
    """Events that found no room on the ring, in the order of RESERVE_PROGRAMS."""

    @property
    def lost(self) -> int:
        """Events that found no room on the ring, and calls whose return was not seen."""
        return self.unreturned + sum(self.reserve_failures)


def decode_event(data: "bytes | memoryview", offset: int = 0) -> RmEvent | None:
    """Return the event at an offset, None if its kind is unknown."""
    row = EVENT.unpack_from(data, offset)
    kind = _KINDS.get(row[7])
    return None if kind is None else RmEvent._make((*row[:7], kind, *row[8:]))


def decode_objects(keys: bytes, values: bytes) -> list[RmObject]:
    """Return the rows of the map ``objects``."""
    return [
        RmObject(client, handle, at, cgroup, file, tgid, rm_class, parent, gpu, start // NS_PER_TICK, uvm)
        for (client, handle), (at, cgroup, file, start, uvm, tgid, rm_class, parent, gpu) in zip(
            OBJECT_KEY.iter_unpack(keys), OBJECT.iter_unpack(values), strict=True
        )
    ]


def decode_processes(keys: bytes, values: bytes) -> list[ProcessCounters]:
    """Return the rows of the map ``processes``."""
    return [
        ProcessCounters._make(
            (tgid, cgroup, first, last, *counts, start // NS_PER_TICK, exited, rejected, minors, unsent)
        )
        for (tgid,), (
            cgroup,
            start,
            first,
            last,
            exited,
            *counts,
            rejected,
            minors,
            unsent,
            _,
            _,
            _,
            _,
            _,
        ) in zip(PROCESS_KEY.iter_unpack(keys), PROCESS.iter_unpack(values), strict=True)
    ]


def decode_ended(keys: bytes, values: bytes, before_ns: int) -> list[tuple[int, int]]:
    """Return pid and start, in clock ticks, of the rows of ``processes`` that exited before a time."""
    return [
        (tgid, start_ns // NS_PER_TICK)
        for (tgid,), (start_ns, exited_ns) in zip(
            PROCESS_KEY.iter_unpack(keys), PROCESS_LIFE.iter_unpack(values), strict=True
        )
        if 0 < exited_ns < before_ns
    ]


def encode_process(cgroup_id: int, start_ticks: int, now_ns: int, *, objects: int = 0) -> bytes:
    """Return the row of a process that holds files and has no counts yet."""
    return PROCESS.pack(cgroup_id, start_ticks * NS_PER_TICK, now_ns, now_ns, *[0] * 16, objects)


def decode_statistics(value: bytes) -> ProbeStatistics:
    """Return the sum over the CPUs, whose values are concatenated."""
    sums = [sum(column) for column in zip(*STATISTICS.iter_unpack(value), strict=True)]
    *counts, ioctl, opened, closed, process = sums
    return ProbeStatistics._make((*counts, (ioctl, opened, closed, process)))


class TracedCall(NamedTuple):
    """struct gpu_traced_call: one call of the process that is traced."""

    entered_ns: int
    took_ns: int
    """0 while it has not returned."""
    argument: int
    tgid: int
    pid: int
    device: int
    fd: int
    """-1: unknown."""
    number: int
    """_IOC_NR of the driver's command, or the whole command of unified memory."""
    size: int
    """Of the parameters, from the command; 0 for unified memory, whose commands do not contain it."""
    result: int
    """What the ioctl returned: 0, or a negative errno."""
    block_bytes: int
    block: bytes
    """The first ``block_bytes`` of the parameters; after the return they include the answer."""


def decode_traced(data: "bytes | memoryview", offset: int = 0) -> TracedCall:
    """Return the traced call at an offset."""
    return TracedCall._make(TRACED.unpack_from(data, offset))


def decode_held(data: bytes) -> list[HeldFile]:
    """Return the open files whose descriptors the iterator listed.

    Threads with a descriptor table of their own are listed separately, and on some kernels once for each
    thread that shares one, so table and number identify a descriptor.
    """
    return merge_held(
        ((tgid, start // NS_PER_TICK, file, device, cgroup), (table, fd))
        for file, table, cgroup, start, tgid, fd, device, _ in HELD.iter_unpack(
            data[: len(data) // HELD.size * HELD.size]
        )
    )


def merge_held(
    descriptors: Iterable[tuple[tuple[int, int, int, int, int], tuple[int, int]]],
) -> list[HeldFile]:
    """Return one record for each (tgid, start, file, device, cgroup), with how many descriptors it has."""
    found: dict[tuple[int, int, int, int, int], set[tuple[int, int]]] = {}
    for owner, descriptor in descriptors:
        found.setdefault(owner, set()).add(descriptor)
    return [
        HeldFile(tgid, start, file, device, len(numbers), cgroup)
        for (tgid, start, file, device, cgroup), numbers in found.items()
    ]
