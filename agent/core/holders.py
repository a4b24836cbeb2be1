"""Which processes there are, which files of the driver they hold, and which of them ended.

Invariants: a process is its pid and its start, and where the start is not known yet, itself. An ended
process holds nothing; it is remembered for as long as something that it made lives on. Where it cannot
be told whether a pid was used again, it is taken not to be: that may miss what was left behind, and never
takes what a living process has for left behind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.core.rm_objects import Clients
from agent.model.rm import HeldFile, RmEvent, RmObject
from agent.model.usage import ENDED, UNINTERRUPTIBLE, ProcessKey, ProcessLook

MAX_PROCESSES: Final = 65_536
MAX_FILES: Final = 65_536

UNKNOWN_START: Final = 0
"""Start of a process that was gone before anyone looked; the kernel's first process never opens a GPU."""


@dataclass(slots=True, eq=False)
class Process:
    """A process; eq=False: it is itself, whatever its pid is."""

    number: int
    pid: int
    since_ns: int
    """When it was first seen."""
    start: int | None = None
    look: ProcessLook | None = None
    is_look_old: bool = False
    """It called exec, so what was looked at may have changed."""
    files: dict[int, int] = field(default_factory=dict)
    """Descriptors by file."""
    closed: set[int] = field(default_factory=set)
    """Files of which it closed a descriptor since the last scan; it may have others."""
    event_ns: int = 0
    exiting_ns: int | None = None
    exit_told: bool = False
    """The kernel said that it exits; otherwise a look at its state did."""
    ended_ns: int | None = None
    partial: bool = False
    before: "Process | None" = None
    """Who had the pid before, and has not been seen to be gone."""
    made: int = 0
    """Files older than the probe that it is taken to have made."""
    devices: frozenset[int] = frozenset()
    """The devices that it held when it ended."""

    @property
    def key(self) -> ProcessKey:
        """What names it."""
        return ProcessKey(self.pid, UNKNOWN_START if self.start is None else self.start)

    @property
    def is_known(self) -> bool:
        """Whether it lives and was looked at, so that something can be said of it."""
        return self.ended_ns is None and self.start is not None and self.look is not None


@dataclass(slots=True)
class File:
    """An open file of the driver."""

    device: int
    event_ns: int = 0
    """When an event told of it last; 0: none did, so it may be older than the probe."""
    scan_ns: int = 0
    holders: set[Process] = field(default_factory=set)
    is_older: bool = False
    """It was there before the probe."""
    before_loss: set[Process] | None = None
    """Who held it when events were lost; a file that none of them holds now may be another."""
    maker: Process | None = None
    """Of a control file that is older than the probe: who is taken to have made it."""


Files = dict[Process, dict[int, tuple[int, int]]]
"""Descriptors and device by file, of each process."""


class Holders:
    """Processes and files; tells the clients when one of these ends."""

    def __init__(self, clients: Clients) -> None:
        self.evicted = 0
        self.in_doubt = False
        """Events were lost since the last scan: an exit may be among them, and its pid in use again."""
        self.forgot = False
        """Clients were forgotten for that doubt; the rows of the kernel's map have them still."""
        self.processes: dict[int, Process] = {}
        """By number, who was quiet longest first."""
        self.files: dict[int, File] = {}
        """By the kernel's address, what was quiet longest first."""
        self._clients = clients
        self._current: dict[int, Process] = {}
        self._by_key: dict[ProcessKey, Process] = {}
        """Those whose start is known."""
        self._numbers = 0
        self._scan_ns = 0

    def current(self) -> Iterable[Process]:
        """Return the newest process of each pid."""
        return self._current.values()

    def doubt(self) -> None:
        """Take that events were lost: an exit or a close may be among them, and the pid or address in use."""
        self.in_doubt = True
        for file in self.files.values():
            if file.before_loss is None:
                file.before_loss = set(file.holders)

    # Processes

    def of_event(self, event: RmEvent) -> Process:
        """Return the process that an event is of; after its exit was told its pid is another's."""
        now = self._current.get(event.tgid)
        if now is None:
            return self._new(event.tgid, event.at_ns, None)
        if now.ended_ns is not None:
            return now if event.at_ns <= now.ended_ns else self._new(event.tgid, event.at_ns, None)
        if now.exit_told and event.at_ns > (now.exiting_ns or 0):
            if now.start is not None:
                return self._new(event.tgid, event.at_ns, None, before=now)
            now.exiting_ns, now.exit_told = None, False
        self.processes[now.number] = self.processes.pop(now.number)
        now.event_ns = max(now.event_ns, event.at_ns)
        return now

    def of_row(self, row: RmObject) -> Process:
        """Return the process that made an object of which no event told."""
        now = self._current.get(row.tgid)
        if now is not None and now.start is not None and row.start_ticks:
            return self._named(row.tgid, row.start_ticks, row.at_ns) or self._gone(row, now)
        if now is None or (now.ended_ns is not None and now.ended_ns < row.at_ns):
            return self._new(row.tgid, row.at_ns, row.start_ticks or None)
        return now

    def _gone(self, row: RmObject, now: Process) -> Process:
        """Return the process that had the pid before and is gone."""
        if now.start == row.start_ticks:
            return now
        key = ProcessKey(row.tgid, row.start_ticks)
        process = self._by_key.get(key)
        if process is None:
            self._numbers += 1
            process = Process(self._numbers, row.tgid, row.at_ns, row.start_ticks, ended_ns=now.since_ns)
            self.processes[process.number] = self._by_key[key] = process
        return process

    def looked(self, look: ProcessLook, now_ns: int) -> None:
        """Take what /proc says of a process now."""
        process = self._named(look.key.pid, look.key.start_ticks, now_ns) if self._knows(look) else None
        if process is None:
            return
        process.look, process.is_look_old = look, False
        is_ending = look.state in ENDED or (look.killed and look.state == UNINTERRUPTIBLE)
        if is_ending and process.exiting_ns is None:
            process.exiting_ns = now_ns
        elif not is_ending and not process.exit_told:
            process.exiting_ns = None

    def exited(self, key: ProcessKey, now_ns: int) -> None:
        """Take that a process is gone."""
        process = self._current.get(key.pid)
        while process is not None and process.key != key:
            process = process.before
        if process is not None and process.ended_ns is None:
            self._end(process, now_ns)

    def _knows(self, look: ProcessLook) -> bool:
        return look.key.pid in self._current

    def _new(self, pid: int, at_ns: int, start: int | None, before: Process | None = None) -> Process:
        self._numbers += 1
        process = Process(self._numbers, pid, at_ns, start, event_ns=at_ns, before=before)
        self.processes[process.number] = process
        self._current[pid] = process
        if start is not None:
            self._by_key[process.key] = process
        return process

    def _named(self, pid: int, start: int, at_ns: int) -> Process | None:
        """Return the process of a pid and a start; None: what was told is old, and it is gone."""
        now = self._current.get(pid)
        if now is None:
            return self._new(pid, at_ns, start)
        if now.start is None:
            return self._new(pid, at_ns, start) if now.ended_ns is not None else self._with_start(now, start)
        if now.start == start:
            return now if now.ended_ns is None else None
        if start < now.start:
            return None
        if now.ended_ns is None:
            self._end(now, at_ns)
        return self._new(pid, at_ns, start)

    def _with_start(self, process: Process, start: int) -> Process:
        """Return the process after its start was seen; it may be the one that only seemed to have ended."""
        before, process.before = process.before, None
        if before is not None and before.ended_ns is None:
            if before.start == start:
                self._merge(process, before)
                return before
            self._end(before, process.since_ns)
        process.start = start
        self._by_key[process.key] = process
        # An exit that was told of somebody nobody had looked at may be of another who had the pid.
        process.exiting_ns, process.exit_told = None, False
        return process

    def _merge(self, process: Process, into: Process) -> None:
        for name, fds in process.files.items():
            into.files[name] = into.files.get(name, 0) + fds
            self.files[name].holders.discard(process)
            self.files[name].holders.add(into)
        self._clients.give(process.number, into.number)
        into.exiting_ns, into.exit_told = None, False
        into.event_ns = process.event_ns
        self._current[into.pid] = into
        del self.processes[process.number]

    def _end(self, process: Process, now_ns: int) -> None:
        if self.in_doubt:
            self._disown(process)
            self.forgot = True
            return
        process.ended_ns = now_ns
        process.devices = frozenset(self.files[name].device for name in process.files)
        for name in process.files:
            file = self.files[name]
            file.holders.discard(process)
            # Others may hold it too, which only a scan tells; nothing depends on one that is empty.
            if not file.holders and file.maker is None and not self._clients.has_file(name):
                del self.files[name]
        process.files = {}
        self._forget_if_done(process)

    def _forget_if_done(self, process: Process) -> None:
        if not process.made and not self._clients.has_owner(process.number):
            self._forget(process)

    def _forget(self, process: Process) -> None:
        self.processes.pop(process.number, None)
        if self._by_key.get(process.key) is process:
            del self._by_key[process.key]
        if self._current.get(process.pid) is process:
            del self._current[process.pid]
            if process.before is not None and process.before.ended_ns is None:
                self._current[process.pid] = process.before
        self._clients.forget_owner(process.number)

    # Files

    def opened(self, event: RmEvent, process: Process) -> None:
        """Take that a process opened a file; what had the same address before is gone."""
        known = self.files.get(event.file)
        if known is not None and event.at_ns > max(known.event_ns, known.scan_ns):
            self.end_file(event.file, event.at_ns)
        self.used(event, process)

    def used(self, event: RmEvent, process: Process) -> bool:
        """Take that a process did something with a file, and so holds it; return whether there is that file.

        What is told only after a later scan says nothing of who holds what: the scan knew better.
        """
        is_late = event.at_ns < self._scan_ns
        file = self.files.pop(event.file, None)
        if file is None:
            if is_late:
                return False
            file = File(event.device)
        self.files[event.file] = file
        file.event_ns = max(file.event_ns, event.at_ns)
        if not is_late and process.ended_ns is None and event.file not in process.files:
            process.files[event.file] = 1
            file.holders.add(process)
        return True

    def released(self, event: RmEvent) -> None:
        """Take that the driver let go of a file."""
        known = self.files.get(event.file)
        if known is not None and event.at_ns >= known.event_ns:
            self.end_file(event.file, event.at_ns)

    def end_file(self, name: int, before_ns: int | None = None) -> None:
        """Forget a file, with the clients that were made with it (before that time)."""
        file = self.files.pop(name)
        for holder in file.holders:
            holder.files.pop(name, None)
        if file.maker is not None:
            file.maker.made -= 1
        self._clients.file_ended(name, before_ns)

    def is_older(self, name: int) -> bool:
        """Return whether a file was there before the probe."""
        return name in self.files and self.files[name].is_older

    def expect(self, name: int, at_ns: int) -> None:
        """Take that there is a file, of which only what was made with it tells."""
        if name not in self.files:
            self.files[name] = File(0, event_ns=at_ns)

    def scanned(self, held: Iterable[HeldFile], at_ns: int) -> Files:
        """Take every open file there is, as found from ``at_ns`` on; return who has what."""
        self._scan_ns = at_ns
        found: Files = {}
        named: dict[tuple[int, int], Process | None] = {}
        for each in held:
            key = (each.tgid, each.start_ticks)
            if key not in named:
                named[key] = self._named(*key, at_ns)
            process = named[key]
            if process is not None:
                name = each.file or _stand_in(process, each.device)
                of_process = found.setdefault(process, {})
                fds, _ = of_process.get(name, (0, 0))
                of_process[name] = (fds + each.fds, each.device)
        self._replace(found, at_ns)
        return found

    def _replace(self, found: Files, at_ns: int) -> None:
        # Where events were lost, the end of a file may be among them, and the scan alone is to be believed.
        exiting = {
            process
            for process in self.processes.values()
            if process.exiting_ns is not None and process not in found and not self.in_doubt
        }
        kept = {
            process: self._kept(process, at_ns, is_exiting=process in exiting)
            for process in self.processes.values()
        }
        for file in self.files.values():
            file.holders = set()
        for names in found.values():
            for name, (_, device) in names.items():
                file = self.files.setdefault(name, File(device))
                file.device, file.scan_ns = device, at_ns
        for process, before in kept.items():
            process.files = {**before, **{name: fds for name, (fds, _) in found.get(process, {}).items()}}
            for name in process.files:
                self.files[name].holders.add(process)
        for name in [name for name, file in self.files.items() if not file.holders and file.event_ns < at_ns]:
            self.end_file(name)
        for process in tuple(self.processes.values()):
            if not process.files and (process.ended_ns is not None or process.event_ns < at_ns):
                self._forget_if_done(process)
        self._resolve_doubt()

    def _resolve_doubt(self) -> None:
        self.in_doubt = False
        for name, file in self.files.items():
            if file.before_loss is not None and not file.before_loss & file.holders:
                self._clients.doubt(name)
            file.before_loss = None

    def _kept(self, process: Process, at_ns: int, *, is_exiting: bool) -> Mapping[int, int]:
        """Return the files that a process still holds although a scan did not show it.

        They came while the scan ran; or the process exits: then its whole table of descriptors is gone at
        once, and its files only when the driver has let go of them.
        """
        closed, process.closed = process.closed, set()
        return {
            name: fds
            for name, fds in process.files.items()
            if self.files[name].event_ns >= at_ns or (is_exiting and name not in closed)
        }

    # Bounds

    def bound(self) -> None:
        """Forget what was quiet longest where there is too much."""
        while len(self.files) > MAX_FILES:
            self.evicted += 1
            self.end_file(next(iter(self.files)))
        while len(self.processes) > MAX_PROCESSES:
            self.evicted += 1
            self._disown(next(iter(self.processes.values())))

    def _disown(self, process: Process) -> None:
        """Forget a process and what it made; nothing is said to be left behind by it."""
        for name in process.files:
            self.files[name].holders.discard(process)
        if process.made:
            for file in self.files.values():
                file.maker = None if file.maker is process else file.maker
        self._forget(process)


def _stand_in(process: Process, device: int) -> int:
    """Return a name for a file that /proc cannot tell from others: one for each process and device."""
    return -((process.number << 32) | device) - 1
