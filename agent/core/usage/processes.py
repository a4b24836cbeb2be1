"""A process, an open file of the driver, and what a scan finds of both."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from agent.model.rm import HeldFile
from agent.model.usage import ProcessKey, ProcessStatus

UNKNOWN_START: Final = 0
"""Start of a process that was gone before anyone looked; the kernel's first process never opens a GPU."""


class Descriptors(NamedTuple):
    """What a process has of one open file."""

    fds: int
    device: int


OpenFiles = Mapping[int, Descriptors]
"""By file."""

OpenFilesByProcess = Mapping[ProcessKey, OpenFiles]
"""What a scan found."""

NO_FILES: Final[OpenFiles] = MappingProxyType({})


def by_process(held: Iterable[HeldFile]) -> OpenFilesByProcess:
    """Return what a scan found by process; pure, so that any thread may do it."""
    found: dict[ProcessKey, dict[int, Descriptors]] = {}
    for each in held:
        key = ProcessKey(each.tgid, each.start_ticks)
        of_process = found.setdefault(key, {})
        name = each.file or _stand_in(key, each.device)
        known = of_process.get(name)
        of_process[name] = Descriptors(each.fds + (known.fds if known else 0), each.device)
    return found


def _stand_in(key: ProcessKey, device: int) -> int:
    """Return a name for a file that /proc cannot tell from others: one for each process and device."""
    return -(((key.start_ticks << 32 | key.pid) << 32) | device) - 1


class Process(msgspec.Struct, eq=False):
    """A process; eq=False: it is itself, whatever its pid is."""

    number: int
    pid: int
    since_ns: int
    """When it was first seen."""
    start: int | None = None
    status: ProcessStatus | None = None
    is_status_stale: bool = False
    """It called exec, so what was looked at may have changed."""
    files: dict[int, int] = msgspec.field(default_factory=dict)
    """Descriptors by file."""
    found: OpenFiles = msgspec.field(default_factory=lambda: NO_FILES)
    """What the last scan found."""
    closed: set[int] = msgspec.field(default_factory=set)
    """Files of which it closed a descriptor since the last scan; it may have others."""
    event_ns: int = 0
    exiting_ns: int | None = None
    exit_reported: bool = False
    """The kernel said that it exits; otherwise a look at its state did."""
    ended_ns: int | None = None
    partial: bool = False
    before: "Process | None" = None
    """Who had the pid before, and has not been seen to be gone."""
    made: set[int] = msgspec.field(default_factory=set)
    """Files older than the probe that it is taken to have made."""
    devices: frozenset[int] = frozenset()
    """The devices that it held when it ended."""
    opened: set[int] | None = msgspec.field(default_factory=set)
    """The devices that it was seen to hold, ever; None: it was not seen itself."""
    unsent_events: int = 0
    """Events of it that were not told, and what came of them was not looked for yet."""
    lacks_files: bool = False
    """There was no room for a file of it, so that it may have opened others."""

    @property
    def key(self) -> ProcessKey:
        """What names it."""
        return ProcessKey(self.pid, UNKNOWN_START if self.start is None else self.start)

    @property
    def is_known(self) -> bool:
        """Whether it lives and was looked at, so that something can be said of it."""
        return self.ended_ns is None and self.start is not None and self.status is not None


class File(msgspec.Struct):
    """An open file of the driver."""

    device: int
    event_ns: int = 0
    """When an event told of it last; 0: none did, so it may be older than the probe."""
    holders: set[Process] = msgspec.field(default_factory=set)
    is_older: bool = False
    """It was there before the probe."""
    before_loss: set[Process] | None = None
    """Who held it when events were lost; a file that none of them holds now may be another."""
    control: int | None = None
    """The nvidiactl that it was registered to, which the driver keeps for as long as this file lives."""
    keepers: set[int] = msgspec.field(default_factory=set)
    """Of a nvidiactl: the files that were registered to it."""
    maker: Process | None = None
    """Of a control file that is older than the probe: who is taken to have made it."""
