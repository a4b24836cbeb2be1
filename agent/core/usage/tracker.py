"""Which processes use the driver: state built from the probe's events, scans of open files and process exits.

Guarantees:

1. The state can be rebuilt at any time from the rows of the kernel's map and a scan, and is then the same.
   Events that arrive late, twice, or from before a scan or a rebuild change nothing.
2. A process with a reused pid inherits nothing from the earlier process.
3. A file belongs to every process that holds it, however it got it. Where the driver reports the release of
   each file, only that closes it: a file without a holder is in a message, or mapped, and its clients live.
   Elsewhere a scan that finds no holder closes it, and its clients return if a process receives it within
   a time.
4. Every table is bounded, and so is the share of each process. A process over its share loses its own
   entries alone, and ``incomplete_because`` names it; an eviction makes no finding, since the clients of an
   evicted process go with it.
5. A usage snapshot costs what changed since the last one. Long operations can run step by step.

One source owns a tracker and changes it in place; what it returns is frozen. Without the probe its only input
is scans of /proc, and it reports no contexts.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.client_tree import CONTEXT_SHARE, NO_INSTANCE, Marker
from agent.core.usage.clients import ClientTable
from agent.core.usage.file_links import HALF
from agent.core.usage.files import OpenFileTable
from agent.core.usage.gpu_map import CONTROL, MINOR_BITS, NVIDIA_MAJOR, GpuMap
from agent.core.usage.processes import OpenFilesByProcess, Process, by_process
from agent.core.usage.records import UseRecords
from agent.core.usage.rows import Removed, Rows, live_rows
from agent.core.usage.scan_pace import ScanPace
from agent.model.ids import GpuUuid
from agent.model.rm import LAST, HeldFile, RmEvent, RmEventKind, RmObject, joined
from agent.model.usage import Certainty, ProcessKey, ProcessStatus, Usage, UsageSource

UVM_REGISTER_GPU_VASPACE: Final = 25
"""Source: open-gpu-kernel-modules:kernel-open/nvidia-uvm/uvm_ioctl.h."""
MAX_NAMED: Final = 3
"""Processes that ``incomplete_because`` names."""

_UNKNOWN: Final[Mapping[int, int]] = MappingProxyType({})


class Tracker:
    """The processes, open files and clients of one node."""

    def __init__(
        self,
        gpus: GpuMap,
        *,
        marker: Marker = CONTEXT_SHARE,
        source: UsageSource = "probe",
        certainty: Certainty = "unverified",
        agent_pid: int | None = None,
        pace: ScanPace | None = None,
        was_kept: bool = False,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """``was_kept``: the probe was in the kernel before, and has seen every open since its load."""
        self._source: Final = source
        self._pace: Final = pace or ScanPace()
        self._was_kept: Final = was_kept
        self._certainty: Final = certainty
        self._clients: Final = ClientTable(marker, bounds)
        self._open_files: Final = OpenFileTable(self._clients, bounds)
        self._records: Final = UseRecords(self._open_files, self._clients, source=source, agent_pid=agent_pid)
        self._rebuilt_ns = 0
        self._lost = 0
        self._was_scanned = False
        self._wants_rebuild = False
        self._unreadable_reason = ""
        self._unscanned_reason = "no scan was made yet"
        self._by_folded: dict[tuple[int, int], GpuUuid] = {}
        self.set_gpus(gpus)

    # Events and readings
    def set_gpus(self, gpus: GpuMap) -> None:
        """Set how the driver numbers the GPUs; to be called again after each load of the driver."""
        self._by_folded = gpus.by_folded()
        # The rows show again which GPUs processes registered with unified memory.
        self._wants_rebuild = self._wants_rebuild or len(self._clients) > 0
        self._clients.set_instances(gpus.by_instance)
        self._records.set_gpus(gpus)

    def set_release_events(self, *, enabled: bool) -> None:
        """Set whether the driver's release of each open file arrives as an event."""
        self._open_files.set_release_events(enabled=enabled)

    def handle_events(self, events: Iterable[RmEvent]) -> int | None:
        """Apply events in the order of the ring; return when they make a scan due, if they do."""
        asking = [event for event in events if self._handle_event(event)]
        self._open_files.enforce_bounds()
        due_ns = (self._pace.due_ns(event.cgroup_id, event.tgid, event.at_ns) for event in asking)
        return min(due_ns, default=None)

    def add_opened_devices(self, minors: Mapping[ProcessKey, int]) -> None:
        """Add the GPUs that each process has opened itself, as the kernel's table has it: a bit per minor."""
        for key, bits in minors.items():
            self._open_files.add_opened_devices(
                key,
                (
                    NVIDIA_MAJOR << MINOR_BITS | minor
                    for minor in range(bits.bit_length())
                    if bits >> minor & 1
                ),
            )

    def set_unsent_events(self, counts: Mapping[ProcessKey, int]) -> bool:
        """Set each process's number of events that the kernel did not send; return whether that changed.

        Processes without an entry have none. The effects of those events are in the rows of the kernel's map
        and in scans; other processes stay certain.
        """
        self._open_files.missed_events = self._open_files.missed_events or bool(counts)
        changed = [
            process
            for process in self._open_files.current()
            if process.unsent_events != counts.get(process.key, 0)
        ]
        for process in changed:
            process.unsent_events = counts.get(process.key, 0)
        return bool(changed)

    def handle_lost_events(self, count: int) -> None:
        """Apply a loss of events: until a rebuild and a scan the usage is incomplete."""
        self._lost += count
        self._open_files.handle_lost_events()
        self._wants_rebuild = True
        self._unscanned_reason = "events were lost"

    def handle_full_object_table(self) -> None:
        """Apply that the kernel's map had no room for some objects, of any living process."""
        for process in self._open_files.current():
            self._clients.mark_short(process.number, 0)

    def begin_scan(self) -> None:
        """Mark that a scan has begun; events continue to arrive until its result does."""
        self._open_files.begin_scan()
        self._pace.begin_scan()

    def pop_postponed_scans(self) -> Mapping[int, int]:
        """Return how many of each process's requests for scans were postponed since the last call."""
        return self._pace.pop_postponed()

    def handle_rejected_objects(self, keys: Iterable[ProcessKey]) -> None:
        """Apply that the kernel stores no more objects of these: over their share, or owned by another."""
        wanted = set(keys)
        for process in self._open_files.current():
            if process.key in wanted:
                self._clients.mark_short(process.number, 0)

    def set_unreadable_reason(self, why: str) -> None:
        """Set why some processes cannot be read (no host PID namespace, no rights); empty: all can."""
        self._unreadable_reason = why

    @property
    def older_files(self) -> frozenset[int]:
        """The files that are older than the probe, for ``rows.live_rows``."""
        return self._open_files.older_files()

    def rebuild(self, rows: Iterable[RmObject], at_ns: int, opened: Mapping[int, int] = _UNKNOWN) -> None:
        """Rebuild from all rows of the kernel's map at once; as ``rebuild_steps``."""
        for _ in self.rebuild_steps(live_rows(rows, opened, self.older_files), at_ns, opened):
            pass

    def rebuild_steps(self, rows: Rows, at_ns: int, opened: Mapping[int, int] = _UNKNOWN) -> Iterator[None]:
        """Rebuild step by step from all rows of the kernel's map, which was read from ``at_ns`` on.

        No other method may be called between the steps, and a scan has to follow. The rows include the effect
        of older events; those that were not lost should be applied before. Rows of files without a holder are
        stale, and so are rows older than their file: ``opened`` has the time of each open, where the kernel
        reported it. Where it did not, an address may have been reused while events were lost, so that a
        client known from its row alone makes no orphan.
        """
        self._rebuilt_ns = at_ns
        yield from self._clients.rebuild_steps(
            rows, lambda row: self._open_files.process_of_row(row).number, opened
        )
        for client in self._clients:
            self._open_files.expect_file(client.file, client.at_ns)
        for row in rows.living:
            gpu = self._by_folded.get((row.uvm & HALF, row.uvm >> 32)) if row.uvm else None
            if gpu is not None:
                self._clients.handle_uvm_registration(
                    row.client, row.handle, gpu, self._open_files.process_of_row(row).number
                )
        self._open_files.set_registrations(rows.registered)
        self._open_files.set_open_times(opened)
        self._wants_rebuild = False
        self._unscanned_reason = self._unscanned_reason or "rows were read and no scan was made since"
        self._open_files.enforce_bounds()

    def apply_scan(self, held: Iterable[HeldFile], at_ns: int) -> None:
        """Apply every open file of the driver on the machine at once; as ``apply_scan_steps``."""
        for _ in self.apply_scan_steps(by_process(held), at_ns):
            pass

    def apply_scan_steps(
        self, held: OpenFilesByProcess, at_ns: int, *, is_whole: bool = True
    ) -> Iterator[None]:
        """Apply step by step every open file of the driver on the machine, as found from ``at_ns`` on.

        No other method may be called between the steps. Events up to the end of the scan, then exits of
        processes, come before it. The first scan shows which files are older than the probe. Not
        ``is_whole``: the scan did not read all of them, so that no file counts as gone.
        """
        yield from self._open_files.apply_scan_steps(held, at_ns, is_whole=is_whole)
        if not self._was_scanned and self._source == "probe":
            self._mark_older_files(held)
        self._was_scanned = True
        self._open_files.enforce_bounds()
        if not self._open_files.is_crowded:
            self._wants_rebuild = self._wants_rebuild or self._open_files.has_evicted
            self._open_files.has_evicted = False
        self._unscanned_reason = "events were lost" if self._wants_rebuild else ""

    def update_statuses(self, statuses: Iterable[ProcessStatus], now_ns: int) -> None:
        """Apply what /proc shows of processes now."""
        for status in statuses:
            self._open_files.update_status(status, now_ns)

    def mark_statuses_stale(self) -> None:
        """Ask for every process's status again: state and name change without an event."""
        for process in self._open_files.current():
            process.is_status_stale = True

    def handle_process_gone(self, key: ProcessKey, now_ns: int) -> None:
        """Apply that a process is gone (its pidfd is readable, or /proc has it no more)."""
        self._open_files.handle_process_gone(key, now_ns)

    def _handle_event(self, event: RmEvent) -> bool:
        """Apply an event; return whether only a scan can show its effect."""
        process = self._open_files.process_of_event(event)
        match event.kind:
            case RmEventKind.OPEN:
                self._open_files.handle_open(event, process)
            case RmEventKind.RELEASE:
                self._open_files.handle_release(event)
            case RmEventKind.ALLOC | RmEventKind.DUP | RmEventKind.FREE | RmEventKind.UVM:
                if self._open_files.handle_use(event, process):
                    self._handle_object_event(event, process)
            case RmEventKind.REGISTER_FD:
                if self._open_files.handle_use(event, process) and event.at_ns >= self._rebuilt_ns:
                    self._open_files.handle_register_fd(
                        event.file, joined(event.parent, event.detail), event.at_ns
                    )
            case RmEventKind.CLOSE if event.detail == LAST:
                return self._open_files.handle_last_close(event, process)
            case _:
                self._handle_descriptor_event(event, process)
                return True
        return False

    def _handle_descriptor_event(self, event: RmEvent, process: Process) -> None:
        """Apply an event after which a process may have more or fewer descriptors."""
        match event.kind:
            case RmEventKind.EXIT:
                self._open_files.handle_exit_event(process, event.at_ns)
            case RmEventKind.RESCAN:
                process.is_status_stale = True
                self._open_files.handle_close(process, process.files)
            case RmEventKind.CLOSE:
                self._open_files.handle_close(process, (event.file,), event.device)

    def _handle_object_event(self, event: RmEvent, process: Process) -> None:
        if event.at_ns < self._rebuilt_ns:
            self._clients.mark_sure(event.client)
            return
        if event.kind is RmEventKind.FREE:
            self._clients.handle_free(event.client, event.handle, event.at_ns)
        elif event.kind is RmEventKind.UVM:
            gpu = self._by_folded.get((event.parent, event.detail))
            if event.rm_class == UVM_REGISTER_GPU_VASPACE and gpu is not None:
                self._clients.handle_uvm_registration(event.client, event.handle, gpu, process.number)
        else:
            made = RmObject(
                client=event.client,
                handle=event.handle,
                at_ns=event.at_ns,
                cgroup_id=event.cgroup_id,
                file=event.file,
                tgid=event.tgid,
                rm_class=event.rm_class,
                parent=event.parent,
                gpu=event.detail if event.kind is RmEventKind.ALLOC else NO_INSTANCE,
            )
            self._clients.handle_alloc(made, process.number)

    def _mark_older_files(self, held: OpenFilesByProcess) -> None:
        """Mark the files from before the probe: their holders may have contexts without an event or a row.

        Of several holders of such a control file the oldest counts as its maker: children inherit files from
        their parents.
        """
        found = [process for process in self._open_files.current() if process.key in held]
        for process in found:
            for name in process.files:
                file = self._open_files.files[name]
                if file.event_ns or (self._was_kept and file.device != CONTROL):
                    continue
                process.partial = file.is_older = True
                if file.device == CONTROL and (
                    file.maker is None or process.key[::-1] < file.maker.key[::-1]
                ):
                    self._open_files.set_maker(name, process)

    # Work for the source
    @property
    def needs_rebuild(self) -> bool:
        """Whether the source has to read the rows of the kernel's map because events were lost."""
        return self._wants_rebuild and self._source == "probe"

    @property
    def without_status(self) -> tuple[ProcessKey, ...]:
        """The processes whose status the source has to read (again), or to report as gone."""
        return tuple(
            process.key
            for process in self._open_files.current()
            if process.ended_ns is None and (process.status is None or process.is_status_stale)
        )

    @property
    def living(self) -> tuple[ProcessKey, ...]:
        """The processes whose exit the source has to report."""
        return tuple(
            process.key
            for process in self._open_files.processes.values()
            if process.ended_ns is None and process.start is not None
        )

    def holder_of(self, key: ProcessKey) -> Hashable:
        """Return whose share of a bounded resource a living process uses: its pod's, or its cgroup's."""
        return self._open_files.holder_of(key)

    @property
    def exiting(self) -> tuple[ProcessKey, ...]:
        """The processes that began to exit, whose state the source reads on every round."""
        return tuple(
            process.key
            for process in self._open_files.processes.values()
            if process.exiting_ns is not None and process.ended_ns is None and process.start is not None
        )

    def pop_removed(self) -> list[Removed]:
        """Return the objects whose rows in the kernel's map are stale, each once."""
        return self._clients.pop_removed()

    # Results
    def refresh(self, at_most: int) -> bool:
        """Refresh the records of so many changed processes; return whether there are more."""
        return self._records.refresh(at_most)

    def usage_snapshot(self, now_ns: int) -> Usage:
        """Return the usage now, without processes whose status was never read."""
        self._records.refresh()
        why = self._gap_reason()
        short = "" if why else self._short_reason() or self._unsent_reason()
        return Usage(
            at_ns=now_ns,
            processes=self._records.processes(),
            orphans=self._records.orphan_groups.records(),
            totals=tuple(self._records.totals()),
            source=self._source,
            complete=not (why or short),
            incomplete_because=why or short,
            doubted=self._records.doubted_gpus() if short else frozenset(),
            certainty=self._certainty,
            events_lost=self._lost,
            evicted=self._open_files.evicted + self._clients.evicted,
        )

    def _gap_reason(self) -> str:
        """Return why entries of any process may be missing."""
        if self._unreadable_reason:
            return self._unreadable_reason
        if self._unscanned_reason and not (self._source == "proc" and self._was_scanned):
            return self._unscanned_reason
        if self._open_files.is_crowded or self._open_files.has_evicted:
            return "there are more processes or files of the driver than the agent's tables hold"
        return ""

    def _short_reason(self) -> str:
        found = (self._open_files.processes.get(number) for number in self._clients.short)
        short = sorted(process.key for process in found if process is not None)
        if not short:
            return ""
        named = _named([str(key.pid) for key in short])
        return f"these processes have more objects than their share, or objects of another process: {named}"

    def _unsent_reason(self) -> str:
        found = sorted(
            (-process.unsent_events, process.key)
            for process in self._open_files.current()
            if process.unsent_events
        )
        if not found:
            return ""
        named = _named([f"{key.pid} ({-count} events)" for count, key in found])
        return f"these processes cause more events than the kernel sends: {named}"


def _named(names: list[str]) -> str:
    others = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + others
