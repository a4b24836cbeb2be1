"""Who uses the driver: a picture kept from the probe's events, scans of open files, and ends of processes.

Guarantees:

1. The picture can be made anew at any time from the rows of the kernel's map and a scan, and is then the
   same. Events that are told late, twice, or from before a scan or a rebuild change nothing.
2. A pid that is used again takes nothing over from who had it.
3. A file belongs to all who hold it, however they came by it. Where the driver tells the end of each file,
   that alone ends it: one that nobody is seen to hold is in a message, or mapped, and what was made with it
   lives. Elsewhere a scan that finds nobody ends it, and what was made with it comes back if somebody
   receives it within a time.
4. Every table is bounded, and so is the share of each process. Who takes more loses of its own alone, and is
   named by why the picture is not complete; to forget makes no finding, since what a forgotten process made
   is forgotten with it.
5. A picture costs what changed since the last one. What takes long can be taken step by step.

A tracker is changed in place and owned by one source; what leaves it is frozen. Without the probe it is
fed with scans of /proc alone and says nothing of contexts.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

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
"""Processes that are named by why a picture is not complete."""

_UNKNOWN: Final[Mapping[int, int]] = MappingProxyType({})


class _Owners:
    """What the clients have to know of who made them, which is told where all comes together."""

    records: UseRecords

    def only_gpu(self, owner: int) -> GpuUuid | None:
        return self.records.only_gpu(owner)

    def may_use(self, owner: int, gpu: GpuUuid) -> bool:
        return self.records.may_use(owner, gpu)


class Tracker:
    """The picture."""

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
    ) -> None:
        """``was_kept``: the probe was in the kernel before, and knows what was opened since it came there."""
        self._source: Final = source
        self._pace: Final = pace or ScanPace()
        self._was_kept: Final = was_kept
        self._certainty: Final = certainty
        owners = _Owners()
        self._clients: Final = ClientTable(marker, owners)
        self._open_files: Final = OpenFileTable(self._clients)
        self._records: Final = UseRecords(self._open_files, self._clients, source=source, agent_pid=agent_pid)
        owners.records = self._records
        self._rebuilt_ns = 0
        self._lost = 0
        self._was_scanned = False
        self._wants_rebuild = False
        self._unreadable_reason = ""
        self._unscanned_reason = "no scan was made yet"
        self._by_folded: dict[tuple[int, int], GpuUuid] = {}
        self.set_gpus(gpus)

    # What is told

    def set_gpus(self, gpus: GpuMap) -> None:
        """Take how the driver numbers the GPUs; to be told anew when the driver was loaded anew."""
        self._by_folded = gpus.by_folded()
        # What processes registered with unified memory is learned again, from the rows.
        self._wants_rebuild = self._wants_rebuild or len(self._clients) > 0
        self._clients.set_instances(gpus.by_instance)
        self._records.set_gpus(gpus)

    def set_release_events(self, *, enabled: bool) -> None:
        """Take whether the driver's own end of each open file is told as an event."""
        self._open_files.set_release_events(enabled=enabled)

    def handle_events(self, events: Iterable[RmEvent]) -> int | None:
        """Take events in the order of the ring; return when a scan is due because of them, if one is."""
        asking = [event for event in events if self._handle_event(event)]
        self._open_files.enforce_bounds()
        due_ns = (self._pace.due_ns(event.cgroup_id, event.tgid, event.at_ns) for event in asking)
        return min(due_ns, default=None)

    def add_opened_devices(self, minors: Mapping[ProcessKey, int]) -> None:
        """Take which GPUs processes have opened themselves, as the kernel noted it, a bit for each minor."""
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
        """Take how many events of processes were not told; all others have none. Return whether that is news.

        What came of those is in the rows of the kernel's map and shows in a scan; nobody else is in doubt.
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
        """Take that events were lost: until a rebuild and a scan the picture is not complete."""
        self._lost += count
        self._open_files.handle_lost_events()
        self._wants_rebuild = True
        self._unscanned_reason = "events were lost"

    def handle_full_object_table(self) -> None:
        """Take that the kernel had no room for some objects, of whoever lives now."""
        for process in self._open_files.current():
            self._clients.mark_short(process.number, 0)

    def begin_scan(self) -> None:
        """Take that a scan is under way; events are told meanwhile, and then what was found."""
        self._open_files.begin_scan()
        self._pace.begin_scan()

    def handle_rejected_objects(self, keys: Iterable[ProcessKey]) -> None:
        """Take whose further objects the kernel does not keep: they have too many, or others have them."""
        wanted = set(keys)
        for process in self._open_files.current():
            if process.key in wanted:
                self._clients.mark_short(process.number, 0)

    def set_unreadable_reason(self, why: str) -> None:
        """Take why not every process can be seen (no host PID namespace, no rights); empty: all can."""
        self._unreadable_reason = why

    @property
    def older_files(self) -> frozenset[int]:
        """The files that are older than the probe, as rm_rows.judged wants them."""
        return self._open_files.older_files()

    def rebuild(self, rows: Iterable[RmObject], at_ns: int, opened: Mapping[int, int] = _UNKNOWN) -> None:
        """Take all rows of the kernel's map at once; as ``rebuilding``."""
        for _ in self.rebuild_steps(live_rows(rows, opened, self.older_files), at_ns, opened):
            pass

    def rebuild_steps(self, rows: Rows, at_ns: int, opened: Mapping[int, int] = _UNKNOWN) -> Iterator[None]:
        """Take all rows of the kernel's map, which was read from ``at_ns`` on, step by step.

        Nothing else may be told between the steps. A scan has to follow. Events that are older are in it
        already; those that were not lost are best told before it. Rows of files that nobody holds are stale,
        and so are those that are older than their file: ``opened`` says when files were opened, where the
        kernel told. Where it did not, an address may have been used again while events were lost, so that
        nobody is said to have left behind what only rows tell of.
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
        """Take every open file of the driver on the machine at once; as ``scanning``."""
        for _ in self.apply_scan_steps(by_process(held), at_ns):
            pass

    def apply_scan_steps(
        self, held: OpenFilesByProcess, at_ns: int, *, is_whole: bool = True
    ) -> Iterator[None]:
        """Take every open file of the driver on the machine, as found from ``at_ns`` on, step by step.

        Nothing else may be told between the steps. Events up to the end of the scan, and ends of processes
        after them, are to be told before it. The first scan tells what is older than the probe. Not
        ``is_whole``: there are more than were looked at, so that nothing is taken for gone.
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

    def update_statuses(self, looks: Iterable[ProcessStatus], now_ns: int) -> None:
        """Take what /proc says of processes now."""
        for status in looks:
            self._open_files.update_status(status, now_ns)

    def mark_statuses_stale(self) -> None:
        """Want every process looked at: state and name change, and nothing tells of it."""
        for process in self._open_files.current():
            process.is_status_stale = True

    def handle_process_gone(self, key: ProcessKey, now_ns: int) -> None:
        """Take that a process is gone (its pidfd is readable, or it could not be looked at any more)."""
        self._open_files.handle_process_gone(key, now_ns)

    def _handle_event(self, event: RmEvent) -> bool:
        """Take an event; return whether a scan has to say what came of it."""
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
        """Take that descriptors may have come or gone."""
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
            self._clients.handle_alloc(_row(event), process.number)

    def _mark_older_files(self, held: OpenFilesByProcess) -> None:
        """Mark what was there before the probe: who holds it may have contexts that nobody counted.

        Of several who hold a control file of that time, the oldest is taken to have made it: a file goes
        from parents to children.
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

    # What is wanted

    @property
    def needs_rebuild(self) -> bool:
        """Whether the rows of the kernel's map are to be read because events were lost."""
        return self._wants_rebuild and self._source == "probe"

    @property
    def without_status(self) -> tuple[ProcessKey, ...]:
        """The processes to be looked at (again); one that is not there any more is told as exited."""
        return tuple(
            process.key
            for process in self._open_files.current()
            if process.ended_ns is None and (process.status is None or process.is_status_stale)
        )

    @property
    def living(self) -> tuple[ProcessKey, ...]:
        """The processes whose end is to be told."""
        return tuple(
            process.key
            for process in self._open_files.processes.values()
            if process.ended_ns is None and process.start is not None
        )

    def holder_of(self, key: ProcessKey) -> Hashable:
        """Return whose share of what is bounded a living process takes: its pod's, or its cgroup's."""
        return self._open_files.holder_of(key)

    @property
    def exiting(self) -> tuple[ProcessKey, ...]:
        """Those that began to end, whose state is to be read again."""
        return tuple(
            process.key
            for process in self._open_files.processes.values()
            if process.exiting_ns is not None and process.ended_ns is None and process.start is not None
        )

    def pop_removed(self) -> list[Removed]:
        """Return the objects whose rows are stale in the kernel's map, each once."""
        return self._clients.pop_removed()

    # What is known

    def refresh(self, at_most: int) -> bool:
        """Make ready what is told of so many processes; return whether there are more that changed."""
        return self._records.refresh(at_most)

    def usage_snapshot(self, now_ns: int) -> Usage:
        """Return what is known now; processes that nobody has looked at yet are left out."""
        self._records.refresh()
        why = self._gap_reason()
        short = "" if why else self._short_reason() or self._unsent_reason()
        return Usage(
            at_ns=now_ns,
            processes=self._records.processes(),
            orphans=self._records.orphans(),
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
        """Return why something may be missing anywhere."""
        if self._unreadable_reason:
            return self._unreadable_reason
        if self._unscanned_reason and not (self._source == "proc" and self._was_scanned):
            return self._unscanned_reason
        if self._open_files.is_crowded or self._open_files.has_evicted:
            return "there are more processes or files of the driver than are kept"
        return ""

    def _short_reason(self) -> str:
        found = (self._open_files.processes.get(number) for number in self._clients.short)
        short = sorted(process.key for process in found if process is not None)
        if not short:
            return ""
        named = _named([str(key.pid) for key in short])
        return f"not all that these processes have is kept, for it is too much or another's: {named}"

    def _unsent_reason(self) -> str:
        found = sorted(
            (-process.unsent_events, process.key)
            for process in self._open_files.current()
            if process.unsent_events
        )
        if not found:
            return ""
        named = _named([f"{key.pid} ({-count} events)" for count, key in found])
        return f"these processes do more than is followed event by event: {named}"


def _named(names: list[str]) -> str:
    others = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + others


def _row(event: RmEvent) -> RmObject:
    """Return an object as its event tells it, in the form in which the kernel's map has it."""
    return RmObject(
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
