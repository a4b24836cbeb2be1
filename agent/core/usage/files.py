"""The table of processes and of the driver's files that they hold.

Invariants: a process's identity is its pid and start time; while the start is unknown, the object itself. A
process that is gone holds nothing; its entry stays for as long as one of its clients lives. Where a reuse of
its pid is uncertain, the pid counts as not reused: that may miss an orphan, and never declares the clients of
a living process orphans. A process that opens more than a share of the room loses its own entries.

A scan costs what it changes: a process whose files are those of the last scan, without an event since, costs
a comparison.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.clients import ClientTable
from agent.core.usage.file_links import Registrations
from agent.core.usage.gpu_map import CONTROL
from agent.core.usage.processes import NO_FILES, File, OpenFiles, OpenFilesByProcess, Process
from agent.model.rm import RmEvent, RmObject
from agent.model.usage import ENDED, UNINTERRUPTIBLE, PodRef, ProcessKey, ProcessStatus


class OpenFileTable:
    """Processes and their open files; reports to the client table which of them are gone."""

    def __init__(self, clients: ClientTable, bounds: Bounds = BOUNDS) -> None:
        self._bounds: Final = bounds
        self.evicted = 0
        self.has_release_events = False
        """Whether the driver reports the release of each file; then only that closes a file."""
        self.in_doubt = False
        """Events were lost since the last scan: an exit may be among them, and its pid reused."""
        self.missed_events = False
        """The kernel did not send all events of a process since the last scan; a release may be missing."""
        self.has_evicted = False
        """Clients were evicted; the kernel's map still has their rows."""
        self.is_crowded = False
        """Since the last scan began processes or files were evicted because there are too many."""
        self.processes: dict[int, Process] = {}
        """By number, the one with the oldest event first."""
        self.files: dict[int, File] = {}
        """By the kernel's address, the one with the oldest event first."""
        self.changed: set[Process] = set()
        """Processes whose record is to be refreshed; the records empty it."""
        self._clients = clients
        self._current: dict[int, Process] = {}
        self._by_key: dict[ProcessKey, Process] = {}
        """Those whose start is known."""
        self._numbers = 0
        self._scan_ns = 0
        self._unsettled: set[Process] = set()
        """Those whose files are not what the last scan found."""
        self._unheld: set[int] = set()
        """Files without a known holder."""
        self._idle: set[Process] = set()
        """Processes that hold no file."""
        self._doubted: set[int] = set()
        """Files that were there when events were lost."""
        self._open_times: Mapping[int, int] = {}
        """When files that are still open were opened, by the kernel's table after a loss of events."""
        self._registrations = Registrations(self._bounds)
        self._closed_in_scan: set[tuple[Process, int]] | None = None
        """The files closed since the current scan began, each with the process that closed it."""

    def set_release_events(self, *, enabled: bool) -> None:
        """Set whether the driver reports the release of each file; orphans depend on it."""
        if enabled != self.has_release_events:
            self.has_release_events = enabled
            self.changed.update(self.processes.values())

    def current(self) -> Iterable[Process]:
        """Return the newest process of each pid."""
        return self._current.values()

    def holder_of(self, key: ProcessKey, otherwise: ProcessStatus | None = None) -> Hashable:
        """Return the pod of a living process, or its cgroup; of an unknown one those of ``otherwise``."""
        process = self._current.get(key.pid)
        status = process.status if process is not None and process.key == key else None
        status = status or otherwise
        if status is None:
            return None
        return status.pod.uid if isinstance(status.pod, PodRef) else status.cgroup

    def handle_lost_events(self) -> None:
        """Apply a loss of events: an exit or a close may be among them, and the pid or address reused."""
        self.in_doubt = True
        for name, file in self.files.items():
            if file.before_loss is None:
                file.before_loss = set(file.holders)
                self._doubted.add(name)

    # Processes

    def process_of_event(self, event: RmEvent) -> Process:
        """Return the process of an event; after an exit event its pid belongs to another process."""
        now = self._current.get(event.tgid)
        if now is None:
            return self._add_process(event.tgid, event.at_ns, None)
        if now.ended_ns is not None:
            return now if event.at_ns <= now.ended_ns else self._add_process(event.tgid, event.at_ns, None)
        if now.exit_reported and event.at_ns > (now.exiting_ns or 0):
            if now.start is not None:
                return self._add_process(event.tgid, event.at_ns, None, before=now)
            now.exiting_ns, now.exit_reported = None, False
        self.processes[now.number] = self.processes.pop(now.number)
        now.event_ns = max(now.event_ns, event.at_ns)
        return now

    def process_of_row(self, row: RmObject) -> Process:
        """Return the process that made an object without an event."""
        now = self._current.get(row.tgid)
        if now is not None and now.start is not None and row.start_ticks:
            return self._process_of_key(row.tgid, row.start_ticks, row.at_ns) or self._earlier_process(
                row, now
            )
        if now is None or (now.ended_ns is not None and now.ended_ns < row.at_ns):
            return self._add_process(row.tgid, row.at_ns, row.start_ticks or None)
        return now

    def _earlier_process(self, row: RmObject, now: Process) -> Process:
        """Return the process that had the pid before and is gone."""
        if now.start == row.start_ticks:
            return now
        key = ProcessKey(row.tgid, row.start_ticks)
        process = self._by_key.get(key)
        if process is None:
            self._numbers += 1
            process = Process(
                self._numbers, row.tgid, row.at_ns, row.start_ticks, ended_ns=now.since_ns, opened=None
            )
            self.processes[process.number] = self._by_key[key] = process
            self._idle.add(process)
        return process

    def update_status(self, status: ProcessStatus, now_ns: int) -> None:
        """Apply what /proc shows of a process now."""
        process = (
            self._process_of_key(status.key.pid, status.key.start_ticks, now_ns)
            if self._knows(status)
            else None
        )
        if process is None:
            return
        before = (process.status, process.exiting_ns)
        was_known = process.is_known
        process.status, process.is_status_stale = status, False
        is_exiting = status.state in ENDED or (status.killed and status.state == UNINTERRUPTIBLE)
        if is_exiting and process.exiting_ns is None:
            process.exiting_ns = now_ns
        elif not is_exiting and not process.exit_reported:
            process.exiting_ns = None
        if (process.status, process.exiting_ns) != before:
            self.changed.add(process)
        if not was_known:
            for name in process.files:
                self._mark_file_changed(name)

    def handle_process_gone(self, key: ProcessKey, now_ns: int) -> None:
        """Apply that a process is gone."""
        process = self._current.get(key.pid)
        while process is not None and process.key != key:
            process = self._before(process)
        if process is not None and process.ended_ns is None:
            self._mark_gone(process, now_ns)

    def handle_exit_event(self, process: Process, at_ns: int) -> None:
        """Apply that the last thread of a process began to exit."""
        process.exiting_ns, process.exit_reported = at_ns, True
        self.changed.add(process)

    def handle_close(self, process: Process, names: Iterable[int], device: int | None = None) -> None:
        """Apply that a process closed a descriptor of each of these files, of a device where it is known."""
        process.closed.update(names)
        self._unsettled.add(process)
        if device is not None:
            self._add_opened_device(process, device)

    def _add_opened_device(self, process: Process, device: int) -> None:
        """Add a device that a process has, or had, open: its calls that name that GPU are trusted."""
        if process.opened is not None and device not in process.opened:
            process.opened.add(device)
            self.changed.add(process)

    def add_opened_devices(self, key: ProcessKey, devices: Iterable[int]) -> None:
        """Add devices that a process has opened itself."""
        process = self._by_key.get(key)
        if process is not None:
            for device in devices:
                self._add_opened_device(process, device)

    def _knows(self, status: ProcessStatus) -> bool:
        return status.key.pid in self._current

    def _add_process(self, pid: int, at_ns: int, start: int | None, before: Process | None = None) -> Process:
        self._numbers += 1
        process = Process(self._numbers, pid, at_ns, start, event_ns=at_ns, before=before)
        self.processes[process.number] = process
        self._current[pid] = process
        self._idle.add(process)
        if start is not None:
            self._by_key[process.key] = process
        return process

    def _process_of_key(self, pid: int, start: int, at_ns: int) -> Process | None:
        """Return the process of a pid and a start; None: the report is old and the process gone."""
        now = self._current.get(pid)
        if now is None:
            return self._add_process(pid, at_ns, start)
        if now.start is None:
            return (
                self._add_process(pid, at_ns, start)
                if now.ended_ns is not None
                else self._set_start(now, start)
            )
        if now.start == start:
            return now if now.ended_ns is None else None
        if start < now.start:
            return None
        if now.ended_ns is None:
            self._mark_gone(now, at_ns)
        return self._add_process(pid, at_ns, start)

    def _set_start(self, process: Process, start: int) -> Process:
        """Set a process's start; return the process, which may be the earlier one that only seemed gone."""
        before, process.before = self._before(process), None
        if before is not None and before.ended_ns is None:
            if before.start == start:
                self._merge(process, before)
                return before
            self._mark_gone(before, process.since_ns)
        process.start = start
        self._by_key[process.key] = process
        # An exit event from before the first status may be of an earlier process with this pid.
        process.exiting_ns, process.exit_reported = None, False
        self.changed.add(process)
        return process

    def _merge(self, process: Process, into: Process) -> None:
        for name, fds in tuple(process.files.items()):
            self._remove_holder(process, name)
            self._set_descriptors(into, name, into.files.get(name, fds))
        for device in process.opened or ():
            self._add_opened_device(into, device)
        self._unsettled.add(into)
        self._clients.transfer(process.number, into.number)
        into.exiting_ns, into.exit_reported = None, False
        into.event_ns = process.event_ns
        self._current[into.pid] = into
        self._drop(process)
        self.changed.add(into)

    def _mark_gone(self, process: Process, now_ns: int) -> None:
        process.ended_ns = now_ns
        # Without a known open, which GPUs it used is unknown.
        process.opened = process.opened or None
        process.devices = frozenset(self.files[name].device for name in process.files)
        for name in tuple(process.files):
            self._remove_holder(process, name)
            file = self.files[name]
            # Others may hold it too, which only a scan shows; nothing depends on a file without clients.
            is_tied = file.maker is not None or file.control is not None or bool(file.keepers)
            if not (file.holders or is_tied or self._clients.has_file(name)):
                self._forget_file(name)
        process.found = NO_FILES
        self._unsettled.discard(process)
        self.changed.add(process)
        self._forget_if_done(process)

    def _forget_if_done(self, process: Process) -> None:
        if not process.made and not self._clients.has_owner(process.number):
            self._forget(process)

    def _forget(self, process: Process) -> None:
        self._drop(process)
        if self._by_key.get(process.key) is process:
            del self._by_key[process.key]
        if self._current.get(process.pid) is process:
            del self._current[process.pid]
            before = self._before(process)
            if before is not None and before.ended_ns is None:
                self._current[process.pid] = before
        self._clients.forget_owner(process.number)

    def _before(self, process: Process) -> Process | None:
        """Return the earlier process with the same pid, unless it was evicted."""
        before = process.before
        return before if before is None or before.number in self.processes else self._before(before)

    def _drop(self, process: Process) -> None:
        """Remove a process from the tables by number."""
        self.processes.pop(process.number, None)
        self._idle.discard(process)
        self._unsettled.discard(process)
        self.changed.add(process)

    # Files

    def handle_open(self, event: RmEvent, process: Process) -> None:
        """Apply that a process opened a file; an earlier file at the same address is gone."""
        known = self.files.get(event.file)
        if event.at_ns >= self._scan_ns:
            if known is not None and event.at_ns > known.event_ns:
                self.close_file(event.file, event.at_ns)
            elif known is None:
                self._remove_registration(event.file, event.at_ns)
                self._clients.handle_file_closed(event.file, event.at_ns)
        self.handle_use(event, process)

    def handle_use(self, event: RmEvent, process: Process) -> bool:
        """Apply that a process used a file, and so holds it; return whether the table has that file.

        An event from before the last scan adds no holder: the scan is newer.
        """
        is_late = event.at_ns < self._scan_ns
        file = self.files.pop(event.file, None)
        if file is None:
            if is_late or not self._has_room(process):
                return False
            file = self._add_file(event.file, event.device)
        self.files[event.file] = file
        file.event_ns = max(file.event_ns, event.at_ns)
        if (
            not is_late
            and process.ended_ns is None
            and event.file not in process.files
            and self._has_room(process)
        ):
            self._set_descriptors(process, event.file, 1)
            self._unsettled.add(process)
        return True

    def handle_release(self, event: RmEvent) -> None:
        """Apply that the driver released a file."""
        known = self.files.get(event.file)
        if known is None:
            self._remove_registration(event.file, event.at_ns)
            self._clients.handle_file_closed(event.file, event.at_ns)
        elif event.at_ns >= known.event_ns:
            self.close_file(event.file, event.at_ns)

    def handle_last_close(self, event: RmEvent, process: Process) -> bool:
        """Apply the close of a file's last descriptor; return whether a scan is due for its nvidiactl."""
        if self._closed_in_scan is not None:
            self._closed_in_scan.add((process, event.file))
        self._add_opened_device(process, event.device)
        file = self.files.get(event.file)
        if file is None or event.at_ns < max(file.event_ns, self._scan_ns):
            return False
        self._mark_file_changed(event.file)
        # A process that copies a descriptor at the same moment keeps the file: the next scan shows it.
        self._clients.quarantine_file(event.file, event.at_ns)
        kept = file.control
        self._forget_file(event.file)
        return kept in self._unheld

    def handle_register_fd(self, name: int, control: int, at_ns: int) -> None:
        """Apply that a file refers to a nvidiactl, which stays open for as long as the file."""
        self._registrations.add(name, control, at_ns)
        self.expect_file(name, at_ns)
        self._link_control(name)

    def set_registrations(self, registered: Iterable[tuple[int, int, int]]) -> None:
        """Replace all registrations: file, nvidiactl, time."""
        self._registrations = Registrations(self._bounds)
        for name, file in tuple(self.files.items()):
            self._unlink_control(name, file)
        for each in registered:
            self.handle_register_fd(*each)

    def _link_control(self, name: int) -> None:
        """Link a file to the nvidiactl that it was registered to."""
        kept = self._registrations.get(name)
        file = self.files[name]
        self._unlink_control(name, file)
        if kept is not None:
            self.expect_file(kept.control, kept.at_ns, CONTROL)
            file.control = kept.control
            self.files[kept.control].keepers.add(name)
            self._mark_file_changed(name)

    def _unlink_control(self, name: int, file: File) -> None:
        control = self.files.get(file.control or 0)
        if control is not None:
            control.keepers.discard(name)
        file.control = None

    def _remove_registration(self, name: int, before_ns: int | None = None) -> None:
        """Remove the registration (before that time) of a file that is gone."""
        removed = self._registrations.remove(name, before_ns)
        if removed is not None:
            self._clients.add_removed(removed)

    def holders_of_file(self, name: int) -> set[Process]:
        """Return the processes that hold a file, or one that refers to it."""
        file = self.files[name]
        return file.holders.union(*(self.files[keeper].holders for keeper in file.keepers))

    def close_file(self, name: int, before_ns: int | None = None) -> None:
        """Remove a file that is gone, with the clients that were made with it (before that time)."""
        self._remove_registration(name, before_ns)
        self._forget_file(name)
        self._clients.handle_file_closed(name, before_ns)

    def _forget_file(self, name: int) -> None:
        file = self.files.pop(name)
        for holder in tuple(file.holders):
            self._remove_holder(holder, name, file)
            self._unsettled.add(holder)
        if file.maker is not None:
            file.maker.made.discard(name)
            self.changed.add(file.maker)
        self._unlink_control(name, file)
        for keeper in file.keepers:
            self.files[keeper].control = None
        self._unheld.discard(name)
        self._doubted.discard(name)

    def _add_file(self, name: int, device: int, *, event_ns: int = 0) -> File:
        file = self.files[name] = File(device, event_ns)
        self._unheld.add(name)
        self._clients.restore_file(name)
        self._link_control(name)
        return file

    def _set_descriptors(self, process: Process, name: int, fds: int) -> None:
        """Set how many descriptors of a file a process has."""
        if process.files.get(name) == fds:
            return
        is_new = name not in process.files
        process.files[name] = fds
        self.changed.add(process)
        if is_new:
            file = self.files[name]
            file.holders.add(process)
            self._unheld.discard(name)
            self._idle.discard(process)
            self._add_opened_device(process, file.device)
            self._mark_file_changed(name)

    def _remove_holder(self, process: Process, name: int, file: File | None = None) -> None:
        """Remove a process from the holders of a file, which stays open itself."""
        del process.files[name]
        file = file or self.files[name]
        file.holders.discard(process)
        if not file.holders:
            self._unheld.add(name)
        if not process.files:
            self._idle.add(process)
        self.changed.add(process)
        self._mark_file_changed(name)

    def _mark_file_changed(self, name: int) -> None:
        """Mark every record that depends on a file's holders: its owners' orphans."""
        self._clients.mark_file_changed(name)
        file = self.files.get(name)
        if file is None:
            return
        if file.maker is not None:
            self.changed.add(file.maker)
        if file.control is not None:
            self._mark_file_changed(file.control)

    def set_maker(self, name: int, process: Process) -> None:
        """Set the process that counts as the maker of a control file that is older than the probe."""
        file = self.files[name]
        if file.maker is not None:
            file.maker.made.discard(name)
        file.maker = process
        process.made.add(name)
        self.changed.add(process)

    def older_files(self) -> frozenset[int]:
        """Return the files that are older than the probe."""
        return frozenset(name for name, file in self.files.items() if file.is_older)

    def expect_file(self, name: int, at_ns: int, device: int = 0) -> None:
        """Add a file that is known only from its clients or its registration."""
        if name not in self.files:
            self._add_file(name, device, event_ns=at_ns)

    def set_open_times(self, openings: Mapping[int, int]) -> None:
        """Set when the kernel saw each file that is still open being opened."""
        self._open_times = openings
        for name, at_ns in openings.items():
            if name in self.files:
                self.files[name].event_ns = max(self.files[name].event_ns, at_ns)

    # Scans

    def begin_scan(self) -> None:
        """Mark that a scan has begun; ``apply_scan_steps`` applies its result."""
        self._closed_in_scan = set()

    def apply_scan_steps(self, held: OpenFilesByProcess, at_ns: int, *, is_whole: bool) -> Iterator[None]:
        """Apply every open file, as found from ``at_ns`` on, step by step.

        No other method may be called between the steps. Not ``is_whole``: there may be more files than were
        found.
        """
        self._scan_ns = at_ns
        self.is_crowded = False
        found = {self._process_of_key(*key, at_ns): files for key, files in held.items()}
        found.pop(None, None)
        done = 0
        for number, process in enumerate(tuple(self.processes.values()), start=1):
            files = found.get(process, NO_FILES)
            if process in self._unsettled or files != process.found:
                done += 1
                self._apply_found_files(process, files, at_ns, is_found=process in found, is_whole=is_whole)
            if number % self._bounds.step_unchanged == 0 or done == self._bounds.step_changed:
                done = 0
                yield
        if is_whole:
            self._close_unheld_files(at_ns)
            self._resolve_doubt()
        self._closed_in_scan = None
        self._clients.expire_quarantined(at_ns)
        for removed in self._registrations.expired(self.files, at_ns):
            self._clients.add_removed(removed)
        for process in tuple(self._idle):
            if process.ended_ns is not None or process.event_ns < at_ns:
                self._forget_if_done(process)

    def _apply_found_files(
        self, process: Process, found: OpenFiles, at_ns: int, *, is_found: bool, is_whole: bool
    ) -> None:
        """Set a process's files to those that a scan found, and those that a scan cannot show."""
        # Where events were lost, a close may be among them, and the scan alone counts.
        is_exiting = process.exiting_ns is not None and not is_found and not self.in_doubt
        closed, process.closed = process.closed, set()
        kept = False
        for name in [name for name in process.files if name not in found]:
            # The process opened it during the scan; or the process exits: its table of descriptors is gone at
            # once, and its files only when the driver has released them.
            if not is_whole or self.files[name].event_ns >= at_ns or (is_exiting and name not in closed):
                kept = True
            else:
                self._remove_holder(process, name)
        for name, (fds, device) in found.items():
            self._apply_found_file(process, name, fds, device)
        process.found = found
        if kept:
            self._unsettled.add(process)
        else:
            self._unsettled.discard(process)

    def _apply_found_file(self, process: Process, name: int, fds: int, device: int) -> None:
        is_over = self._closed_in_scan is not None and (process, name) in self._closed_in_scan
        if name not in process.files and (is_over or not self._has_room(process)):
            return
        file = self.files.get(name) or self._add_file(name, device, event_ns=self._open_times.get(name, 0))
        if file.device != device:
            file.device = device
            for holder in file.holders:
                self._add_opened_device(holder, device)
                self.changed.add(holder)
        self._set_descriptors(process, name, fds)

    def _close_unheld_files(self, at_ns: int) -> None:
        """Close the files without a holder, unless their release is still to be reported."""
        names = list(self._unheld)
        for name in names:
            file = self.files.get(name)
            if file is None or file.holders or file.keepers or file.event_ns >= at_ns:
                continue
            is_used = file.maker is not None or self._clients.has_file(name)
            if self.has_release_events and is_used and not (self.in_doubt or self.missed_events):
                # In a message, or mapped; otherwise its release event would have come.
                continue
            if not self.in_doubt:
                self._mark_file_changed(name)
                self._clients.quarantine_file(name, at_ns)
            if file.control is not None:
                # This may have been the last file to refer to it.
                names.append(file.control)
            if self.in_doubt:
                self.close_file(name)
            else:
                # Its clients are in quarantine, and may be restored.
                self._forget_file(name)

    def _resolve_doubt(self) -> None:
        self.in_doubt = self.missed_events = False
        for name in self._doubted:
            file = self.files[name]
            is_same = name in self._open_times or (file.before_loss or set()) & self.holders_of_file(name)
            if file.before_loss is not None and not is_same:
                self._clients.mark_unsure(name)
            file.before_loss = None
        self._doubted.clear()
        self._open_times = {}

    # Bounds

    def _has_room(self, process: Process) -> bool:
        """Return whether a process may have another file in the table."""
        if len(process.files) < self._bounds.files_of_process:
            return True
        process.lacks_files = True
        self._clients.mark_short(process.number)
        return False

    def enforce_bounds(self) -> None:
        """Evict, above the bounds, files of the process with the most and processes with the oldest event."""
        if len(self.files) > self._bounds.files:
            self._evict_files()
        while len(self.processes) > self._bounds.processes:
            self.evicted += 1
            self.is_crowded = self.has_evicted = True
            self._evict_process(next(iter(self.processes.values())))

    def _evict_files(self) -> None:
        """Evict files: first those of the process with the most, then those without a holder."""
        self.is_crowded = self.has_evicted = True
        by_files = sorted(self.processes.values(), key=_files_of, reverse=True)
        candidates: Iterable[Iterable[int]] = (*(process.files for process in by_files), self.files)
        for files in candidates:
            too_many = len(self.files) - self._bounds.files * 7 // 8
            if too_many <= 0:
                return
            for name in tuple(islice(files, too_many)):
                self._evict_file(name)

    def _evict_file(self, name: int) -> None:
        self.evicted += 1
        for holder in self.files[name].holders:
            self._clients.mark_short(holder.number, 0)
        self._clients.handle_file_evicted(name)
        self._forget_file(name)

    def _evict_process(self, process: Process) -> None:
        """Evict a process with its clients; it leaves no orphan."""
        for name in tuple(process.files):
            self._remove_holder(process, name)
        for name in process.made:
            self.files[name].maker = None
        process.made = set()
        self._forget(process)


def _files_of(process: Process) -> int:
    return len(process.files)
