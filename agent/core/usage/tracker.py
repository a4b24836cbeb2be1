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
from agent.core.usage.clients import Clients
from agent.core.usage.file_links import HALF
from agent.core.usage.files import Holders
from agent.core.usage.gpu_map import CONTROL, MINOR_BITS, NVIDIA_MAJOR, GpuMap
from agent.core.usage.processes import Held, Process, by_process
from agent.core.usage.records import UseRecords
from agent.core.usage.rows import Removed, Rows, judged
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
        self._clients: Final = Clients(marker, owners)
        self._holders: Final = Holders(self._clients)
        self._records: Final = UseRecords(self._holders, self._clients, source=source, agent_pid=agent_pid)
        owners.records = self._records
        self._rebuilt_ns = 0
        self._lost = 0
        self._was_scanned = False
        self._wants_rebuild = False
        self._blind = ""
        self._unscanned = "no scan was made yet"
        self._by_folded: dict[tuple[int, int], GpuUuid] = {}
        self.gpus_are(gpus)

    # What is told

    def gpus_are(self, gpus: GpuMap) -> None:
        """Take how the driver numbers the GPUs; to be told anew when the driver was loaded anew."""
        self._by_folded = gpus.by_folded()
        # What processes registered with unified memory is learned again, from the rows.
        self._wants_rebuild = self._wants_rebuild or len(self._clients) > 0
        self._clients.instances_are(gpus.by_instance)
        self._records.gpus_are(gpus)

    def releases_are(self, *, told: bool) -> None:
        """Take whether the driver's own end of each open file is told as an event."""
        self._holders.releases_are(told=told)

    def take(self, events: Iterable[RmEvent]) -> int | None:
        """Take events in the order of the ring; return when a scan is due because of them, if one is."""
        asking = [event for event in events if self._take(event)]
        self._holders.bound()
        due_ns = (self._pace.due_ns(event.cgroup_id, event.tgid, event.at_ns) for event in asking)
        return min(due_ns, default=None)

    def opened_are(self, minors: Mapping[ProcessKey, int]) -> None:
        """Take which GPUs processes have opened themselves, as the kernel noted it, a bit for each minor."""
        for key, bits in minors.items():
            self._holders.opened_are(
                key,
                (
                    NVIDIA_MAJOR << MINOR_BITS | minor
                    for minor in range(bits.bit_length())
                    if bits >> minor & 1
                ),
            )

    def unsent(self, counts: Mapping[ProcessKey, int]) -> bool:
        """Take how many events of processes were not told; all others have none. Return whether that is news.

        What came of those is in the rows of the kernel's map and shows in a scan; nobody else is in doubt.
        """
        self._holders.missed = self._holders.missed or bool(counts)
        changed = [
            process for process in self._holders.current() if process.unsent != counts.get(process.key, 0)
        ]
        for process in changed:
            process.unsent = counts.get(process.key, 0)
        return bool(changed)

    def lost(self, count: int) -> None:
        """Take that events were lost: until a rebuild and a scan the picture is not complete."""
        self._lost += count
        self._holders.doubt()
        self._wants_rebuild = True
        self._unscanned = "events were lost"

    def table_was_full(self) -> None:
        """Take that the kernel had no room for some objects, of whoever lives now."""
        for process in self._holders.current():
            self._clients.fell_short(process.number, 0)

    def scan_begins(self) -> None:
        """Take that a scan is under way; events are told meanwhile, and then what was found."""
        self._holders.scan_begins()
        self._pace.scan_begins()

    def refused(self, keys: Iterable[ProcessKey]) -> None:
        """Take whose further objects the kernel does not keep: they have too many, or others have them."""
        wanted = set(keys)
        for process in self._holders.current():
            if process.key in wanted:
                self._clients.fell_short(process.number, 0)

    def blind(self, why: str) -> None:
        """Take why not every process can be seen (no host PID namespace, no rights); empty: all can."""
        self._blind = why

    @property
    def older(self) -> frozenset[int]:
        """The files that are older than the probe, as rm_rows.judged wants them."""
        return self._holders.older()

    def rebuilt(self, rows: Iterable[RmObject], at_ns: int, opened: Mapping[int, int] = _UNKNOWN) -> None:
        """Take all rows of the kernel's map at once; as ``rebuilding``."""
        for _ in self.rebuilding(judged(rows, opened, self.older), at_ns, opened):
            pass

    def rebuilding(self, rows: Rows, at_ns: int, opened: Mapping[int, int] = _UNKNOWN) -> Iterator[None]:
        """Take all rows of the kernel's map, which was read from ``at_ns`` on, step by step.

        Nothing else may be told between the steps. A scan has to follow. Events that are older are in it
        already; those that were not lost are best told before it. Rows of files that nobody holds are stale,
        and so are those that are older than their file: ``opened`` says when files were opened, where the
        kernel told. Where it did not, an address may have been used again while events were lost, so that
        nobody is said to have left behind what only rows tell of.
        """
        self._rebuilt_ns = at_ns
        yield from self._clients.rebuilding(rows, lambda row: self._holders.of_row(row).number, opened)
        for client in self._clients:
            self._holders.expect(client.file, client.at_ns)
        for row in rows.living:
            gpu = self._by_folded.get((row.uvm & HALF, row.uvm >> 32)) if row.uvm else None
            if gpu is not None:
                self._clients.registered(row.client, row.handle, gpu, self._holders.of_row(row).number)
        self._holders.registered_are(rows.registered)
        self._holders.openings_are(opened)
        self._wants_rebuild = False
        self._unscanned = self._unscanned or "rows were read and no scan was made since"
        self._holders.bound()

    def scanned(self, held: Iterable[HeldFile], at_ns: int) -> None:
        """Take every open file of the driver on the machine at once; as ``scanning``."""
        for _ in self.scanning(by_process(held), at_ns):
            pass

    def scanning(self, held: Held, at_ns: int, *, is_whole: bool = True) -> Iterator[None]:
        """Take every open file of the driver on the machine, as found from ``at_ns`` on, step by step.

        Nothing else may be told between the steps. Events up to the end of the scan, and ends of processes
        after them, are to be told before it. The first scan tells what is older than the probe. Not
        ``is_whole``: there are more than were looked at, so that nothing is taken for gone.
        """
        yield from self._holders.scanning(held, at_ns, is_whole=is_whole)
        if not self._was_scanned and self._source == "probe":
            self._mark_older(held)
        self._was_scanned = True
        self._holders.bound()
        if not self._holders.is_crowded:
            self._wants_rebuild = self._wants_rebuild or self._holders.forgot
            self._holders.forgot = False
        self._unscanned = "events were lost" if self._wants_rebuild else ""

    def looked(self, looks: Iterable[ProcessStatus], now_ns: int) -> None:
        """Take what /proc says of processes now."""
        for status in looks:
            self._holders.looked(status, now_ns)

    def look_again(self) -> None:
        """Want every process looked at: state and name change, and nothing tells of it."""
        for process in self._holders.current():
            process.is_look_old = True

    def exited(self, key: ProcessKey, now_ns: int) -> None:
        """Take that a process is gone (its pidfd is readable, or it could not be looked at any more)."""
        self._holders.exited(key, now_ns)

    def _take(self, event: RmEvent) -> bool:
        """Take an event; return whether a scan has to say what came of it."""
        process = self._holders.of_event(event)
        match event.kind:
            case RmEventKind.OPEN:
                self._holders.opened(event, process)
            case RmEventKind.RELEASE:
                self._holders.released(event)
            case RmEventKind.ALLOC | RmEventKind.DUP | RmEventKind.FREE | RmEventKind.UVM:
                if self._holders.used(event, process):
                    self._take_object(event, process)
            case RmEventKind.REGISTER_FD:
                if self._holders.used(event, process) and event.at_ns >= self._rebuilt_ns:
                    self._holders.registers(event.file, joined(event.parent, event.detail), event.at_ns)
            case RmEventKind.CLOSE if event.detail == LAST:
                return self._holders.closed_last(event, process)
            case _:
                self._take_move(event, process)
                return True
        return False

    def _take_move(self, event: RmEvent, process: Process) -> None:
        """Take that descriptors may have come or gone."""
        match event.kind:
            case RmEventKind.EXIT:
                self._holders.exits(process, event.at_ns)
            case RmEventKind.RESCAN:
                process.is_look_old = True
                self._holders.closes(process, process.files)
            case RmEventKind.CLOSE:
                self._holders.closes(process, (event.file,), event.device)

    def _take_object(self, event: RmEvent, process: Process) -> None:
        if event.at_ns < self._rebuilt_ns:
            self._clients.confirm(event.client)
            return
        if event.kind is RmEventKind.FREE:
            self._clients.freed_by(event.client, event.handle, event.at_ns)
        elif event.kind is RmEventKind.UVM:
            gpu = self._by_folded.get((event.parent, event.detail))
            if event.rm_class == UVM_REGISTER_GPU_VASPACE and gpu is not None:
                self._clients.registered(event.client, event.handle, gpu, process.number)
        else:
            self._clients.allocated(_row(event), process.number)

    def _mark_older(self, held: Held) -> None:
        """Mark what was there before the probe: who holds it may have contexts that nobody counted.

        Of several who hold a control file of that time, the oldest is taken to have made it: a file goes
        from parents to children.
        """
        found = [process for process in self._holders.current() if process.key in held]
        for process in found:
            for name in process.files:
                file = self._holders.files[name]
                if file.event_ns or (self._was_kept and file.device != CONTROL):
                    continue
                process.partial = file.is_older = True
                if file.device == CONTROL and (
                    file.maker is None or process.key[::-1] < file.maker.key[::-1]
                ):
                    self._holders.made_by(name, process)

    # What is wanted

    @property
    def needs_rebuild(self) -> bool:
        """Whether the rows of the kernel's map are to be read because events were lost."""
        return self._wants_rebuild and self._source == "probe"

    @property
    def unlooked(self) -> tuple[ProcessKey, ...]:
        """The processes to be looked at (again); one that is not there any more is told as exited."""
        return tuple(
            process.key
            for process in self._holders.current()
            if process.ended_ns is None and (process.status is None or process.is_look_old)
        )

    @property
    def living(self) -> tuple[ProcessKey, ...]:
        """The processes whose end is to be told."""
        return tuple(
            process.key
            for process in self._holders.processes.values()
            if process.ended_ns is None and process.start is not None
        )

    def holder_of(self, key: ProcessKey) -> Hashable:
        """Return whose share of what is bounded a living process takes: its pod's, or its cgroup's."""
        return self._holders.holder_of(key)

    @property
    def exiting(self) -> tuple[ProcessKey, ...]:
        """Those that began to end, whose state is to be read again."""
        return tuple(
            process.key
            for process in self._holders.processes.values()
            if process.exiting_ns is not None and process.ended_ns is None and process.start is not None
        )

    def take_removed(self) -> list[Removed]:
        """Return the objects whose rows are stale in the kernel's map, each once."""
        return self._clients.take_removed()

    # What is known

    def refresh(self, at_most: int) -> bool:
        """Make ready what is told of so many processes; return whether there are more that changed."""
        return self._records.refresh(at_most)

    def picture(self, now_ns: int) -> Usage:
        """Return what is known now; processes that nobody has looked at yet are left out."""
        self._records.refresh()
        why = self._why_blind()
        short = "" if why else self._who_is_short() or self._who_is_unsent()
        return Usage(
            at_ns=now_ns,
            processes=self._records.processes(),
            orphans=self._records.orphans(),
            totals=tuple(self._records.totals()),
            source=self._source,
            complete=not (why or short),
            incomplete_because=why or short,
            doubted=self._records.doubted() if short else frozenset(),
            certainty=self._certainty,
            events_lost=self._lost,
            evicted=self._holders.evicted + self._clients.evicted,
        )

    def _why_blind(self) -> str:
        """Return why something may be missing anywhere."""
        if self._blind:
            return self._blind
        if self._unscanned and not (self._source == "proc" and self._was_scanned):
            return self._unscanned
        if self._holders.is_crowded or self._holders.forgot:
            return "there are more processes or files of the driver than are kept"
        return ""

    def _who_is_short(self) -> str:
        found = (self._holders.processes.get(number) for number in self._clients.short)
        short = sorted(process.key for process in found if process is not None)
        if not short:
            return ""
        named = _named([str(key.pid) for key in short])
        return f"not all that these processes have is kept, for it is too much or another's: {named}"

    def _who_is_unsent(self) -> str:
        found = sorted(
            (-process.unsent, process.key) for process in self._holders.current() if process.unsent
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
