"""A process, an open file of the driver, and the result of a scan."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from agent.model.rm import HeldFile
from agent.model.usage import ProcessKey, ProcessStatus

UNKNOWN_START: Final = 0
"""Start of a process that was gone before its first status; the kernel's first process never opens a GPU."""


class Descriptors(NamedTuple):
    """A process's descriptors of one open file."""

    fds: int
    device: int


OpenFiles = Mapping[int, Descriptors]
"""By file."""

OpenFilesByProcess = Mapping[ProcessKey, OpenFiles]
"""The result of a scan."""

NO_FILES: Final[OpenFiles] = MappingProxyType({})


def by_process(held: Iterable[HeldFile]) -> OpenFilesByProcess:
    """Return the result of a scan by process; pure, so that any thread may call it."""
    found: dict[ProcessKey, dict[int, Descriptors]] = {}
    for each in held:
        key = ProcessKey(each.tgid, each.start_ticks)
        of_process = found.setdefault(key, {})
        name = each.file or _stand_in(key, each.device)
        known = of_process.get(name)
        of_process[name] = Descriptors(each.fds + (known.fds if known else 0), each.device)
    return found


def _stand_in(key: ProcessKey, device: int) -> int:
    """Return a name for a file whose address /proc does not show: one for each process and device."""
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
    """The process called exec, so that its status may have changed."""
    files: dict[int, int] = msgspec.field(default_factory=dict)
    """Descriptors by file."""
    found: OpenFiles = msgspec.field(default_factory=lambda: NO_FILES)
    """The result of the last scan."""
    closed: set[int] = msgspec.field(default_factory=set)
    """Files of which it closed a descriptor since the last scan; it may hold more of them."""
    event_ns: int = 0
    exiting_ns: int | None = None
    exit_reported: bool = False
    """The kernel reported its exit; otherwise its state showed it."""
    ended_ns: int | None = None
    partial: bool = False
    before: "Process | None" = None
    """The earlier process with this pid, which is not known to be gone."""
    made: set[int] = msgspec.field(default_factory=set)
    """Files older than the probe of which it counts as the maker."""
    devices: frozenset[int] = frozenset()
    """The devices that it held when it was gone."""
    opened: set[int] | None = msgspec.field(default_factory=set)
    """All devices that it ever held, as far as known; None: known only from rows."""
    unsent_events: int = 0
    """Events of it that the kernel did not send, and whose effect was not read from its map yet."""
    lacks_files: bool = False
    """A file of it had no room in the table, so that it may have opened other devices."""

    @property
    def key(self) -> ProcessKey:
        """Its pid and start."""
        return ProcessKey(self.pid, UNKNOWN_START if self.start is None else self.start)

    @property
    def is_known(self) -> bool:
        """Whether it lives and its status was read."""
        return self.ended_ns is None and self.start is not None and self.status is not None


class File(msgspec.Struct):
    """An open file of the driver."""

    device: int
    event_ns: int = 0
    """Time of its last event; 0: none, so it may be older than the probe."""
    holders: set[Process] = msgspec.field(default_factory=set)
    is_older: bool = False
    """It was opened before the probe was loaded."""
    before_loss: set[Process] | None = None
    """Its holders when events were lost; a file that none of them holds now may be another."""
    control: int | None = None
    """The nvidiactl that it was registered to, which the driver keeps open for as long as this file."""
    keepers: set[int] = msgspec.field(default_factory=set)
    """Of a nvidiactl: the files that were registered to it."""
    maker: Process | None = None
    """Of a control file that is older than the probe: the process that counts as its maker."""
