"""Who uses the driver: a picture kept from the probe's events, scans of open files, and ends of processes.

Guarantees:

1. The picture can be made anew at any time from the rows of the kernel's map and a scan, and is then the
   same. Events that are told late, twice, or from before a scan or a rebuild change nothing.
2. A pid that is used again takes nothing over from who had it.
3. A file belongs to all who hold it, however they came by it. It is a scan, not a close, that says so,
   and that ends a file, except where the driver itself tells the end.
4. Every table is bounded. What was quiet longest is forgotten first, and counted; to forget makes no
   finding, since what a forgotten process made is forgotten with it.

A tracker is changed in place and owned by one source; what leaves it is frozen. Without the probe it is
fed with scans of /proc alone and says nothing of contexts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from agent.core.holders import Files, Holders, Process
from agent.core.rm_objects import CONTEXT_SHARE, NO_INSTANCE, Clients, Marker, Removed
from agent.model.ids import GpuUuid, Placement
from agent.model.rm import HeldFile, RmEvent, RmEventKind, RmObject
from agent.model.usage import (
    MAX_HOLDERS,
    Certainty,
    GpuHold,
    GpuTotal,
    Orphan,
    ProcessKey,
    ProcessLook,
    ProcessUse,
    Usage,
    UsageSource,
)

NVIDIA_MAJOR: Final = 195
CONTROL_MINOR: Final = 255
"""Of /dev/nvidiactl; those of /dev/nvidiaN are N.
Source: open-gpu-kernel-modules:kernel-open/common/inc/nv-chardev-numbers.h."""
MINOR_BITS: Final = 20
"""The kernel's dev_t is major << 20 | minor."""

CONTROL: Final = NVIDIA_MAJOR << MINOR_BITS | CONTROL_MINOR

UVM_REGISTER_GPU_VASPACE: Final = 25
"""Source: open-gpu-kernel-modules:kernel-open/nvidia-uvm/uvm_ioctl.h."""

_UNKNOWN: Final[Mapping[int, int]] = MappingProxyType({})

_NEEDS_SCAN: Final = frozenset({RmEventKind.CLOSE, RmEventKind.EXIT, RmEventKind.FORK, RmEventKind.RESCAN})


@dataclass(frozen=True, slots=True)
class GpuMap:
    """How the driver numbers the GPUs of the node."""

    by_minor: Mapping[int, GpuUuid]
    by_instance: Mapping[int, GpuUuid] = field(default_factory=dict)
    """RM device instance, where the driver told it; unified memory tells it too, and is believed more."""
    by_capability: Mapping[int, Placement] = field(default_factory=dict)
    """The MIG device that each minor of /dev/nvidia-caps gives access to."""
    capabilities_major: int | None = None


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
    ) -> None:
        self._source: Final = source
        self._certainty: Final = certainty
        self._agent_pid: Final = agent_pid
        self._clients: Final = Clients(marker, self._only_gpu)
        self._holders: Final = Holders(self._clients)
        self._rebuilt_ns = 0
        self._lost = 0
        self._was_scanned = False
        self._wants_rebuild = False
        self._blind = ""
        self._unscanned = "no scan was made yet"
        self.gpus_are(gpus)

    # What is told

    def gpus_are(self, gpus: GpuMap) -> None:
        """Take how the driver numbers the GPUs; to be told anew when the driver was loaded anew."""
        self._gpus = gpus
        names = [folded(uuid) for uuid in gpus.by_minor.values()]
        self._by_folded = {
            folded(uuid): uuid for uuid in gpus.by_minor.values() if names.count(folded(uuid)) == 1
        }
        self._clients.instances_are(gpus.by_instance)

    def take(self, events: Iterable[RmEvent]) -> bool:
        """Take events in the order of the ring; return whether a scan is due."""
        wants_scan = False
        for event in events:
            self._take(event)
            wants_scan = wants_scan or event.kind in _NEEDS_SCAN
        self._holders.bound()
        return wants_scan

    def lost(self, count: int) -> None:
        """Take that events were lost: until a rebuild and a scan the picture is not complete."""
        self._lost += count
        self._holders.doubt()
        self._wants_rebuild = True
        self._unscanned = "events were lost"

    def blind(self, why: str) -> None:
        """Take why not every process can be seen (no host PID namespace, no rights); empty: all can."""
        self._blind = why

    def rebuilt(self, rows: Iterable[RmObject], at_ns: int, opened: Mapping[int, int] = _UNKNOWN) -> None:
        """Take all rows of the kernel's map, which was read from ``at_ns`` on; a scan has to follow.

        Events that are older are in it already; those that were not lost are best told before it. Rows of
        files that nobody holds are stale, and so are those that are older than their file: ``opened`` says
        when files were opened, where the kernel told. Where it did not, an address may have been used again
        while events were lost, so that nobody is said to have left behind what only rows tell of.
        """
        self._rebuilt_ns = at_ns
        self._clients.rebuilt(
            rows, lambda row: self._holders.of_row(row).number, self._holders.is_older, opened
        )
        for client in self._clients:
            self._holders.expect(client.file, client.at_ns)
        self._wants_rebuild = False
        self._unscanned = self._unscanned or "rows were read and no scan was made since"
        self._holders.bound()

    def scanned(self, held: Iterable[HeldFile], at_ns: int) -> None:
        """Take every open file of the driver on the machine, as a scan found them from ``at_ns`` on.

        Events up to the end of the scan, and ends of processes after them, are to be told before it. The
        first scan tells what is older than the probe.
        """
        found = self._holders.scanned(held, at_ns)
        if not self._was_scanned and self._source == "probe":
            self._mark_older(found)
        self._was_scanned = True
        self._wants_rebuild = self._wants_rebuild or self._holders.forgot
        self._holders.forgot = False
        self._unscanned = "events were lost" if self._wants_rebuild else ""
        self._holders.bound()

    def looked(self, looks: Iterable[ProcessLook], now_ns: int) -> None:
        """Take what /proc says of processes now."""
        for look in looks:
            self._holders.looked(look, now_ns)

    def look_again(self) -> None:
        """Want every process looked at: state and name change, and nothing tells of it."""
        for process in self._holders.current():
            process.is_look_old = True

    def exited(self, key: ProcessKey, now_ns: int) -> None:
        """Take that a process is gone (its pidfd is readable, or it could not be looked at any more)."""
        self._holders.exited(key, now_ns)

    def _take(self, event: RmEvent) -> None:
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
                self._holders.used(event, process)
            case RmEventKind.EXIT:
                process.exiting_ns, process.exit_told = event.at_ns, True
            case RmEventKind.RESCAN:
                process.is_look_old = True
                process.closed.update(process.files)
            case RmEventKind.CLOSE:
                process.closed.add(event.file)
            case RmEventKind.FORK:
                pass

    def _take_object(self, event: RmEvent, process: Process) -> None:
        if event.at_ns < self._rebuilt_ns:
            self._clients.confirm(event.client)
            return
        if event.kind is RmEventKind.FREE:
            self._clients.freed_by(event.client, event.handle, event.at_ns)
        elif event.kind is RmEventKind.UVM:
            gpu = self._by_folded.get((event.parent, event.detail))
            if event.rm_class == UVM_REGISTER_GPU_VASPACE and gpu is not None:
                self._clients.registered(event.client, event.handle, gpu)
        else:
            self._clients.allocated(_row(event), process.number)

    def _mark_older(self, found: Files) -> None:
        """Mark what was there before the probe: who holds it may have contexts that nobody counted.

        Of several who hold a control file of that time, the oldest is taken to have made it: a file goes
        from parents to children.
        """
        for process, names in found.items():
            for name in names:
                file = self._holders.files[name]
                if file.event_ns:
                    continue
                process.partial = file.is_older = True
                if file.device == CONTROL and (
                    file.maker is None or process.key[::-1] < file.maker.key[::-1]
                ):
                    file.maker = process
        for file in self._holders.files.values():
            if file.maker is not None:
                file.maker.made += 1

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
            if process.ended_ns is None and (process.look is None or process.is_look_old)
        )

    @property
    def living(self) -> tuple[ProcessKey, ...]:
        """The processes whose end is to be told."""
        return tuple(
            process.key
            for process in self._holders.processes.values()
            if process.ended_ns is None and process.start is not None
        )

    @property
    def exiting(self) -> tuple[ProcessKey, ...]:
        """Those that began to end, whose state is worth another look."""
        return tuple(
            process.key
            for process in self._holders.processes.values()
            if process.ended_ns is None and process.start is not None and process.exiting_ns is not None
        )

    def take_removed(self) -> list[Removed]:
        """Return the objects whose rows are stale in the kernel's map, each once."""
        return self._clients.take_removed()

    # What is known

    def picture(self, now_ns: int) -> Usage:
        """Return what is known now; processes that nobody has looked at yet are left out."""
        processes = tuple(sorted(self._uses(), key=lambda use: use.key))
        orphans = tuple(sorted(self._orphans(), key=lambda left: (left.owner.key, left.gpu or "")))
        why = self._blind or ("" if self._source == "proc" and self._was_scanned else self._unscanned)
        return Usage(
            at_ns=now_ns,
            processes=processes,
            orphans=orphans,
            totals=tuple(self._totals(processes, orphans)),
            source=self._source,
            complete=not why,
            incomplete_because=why,
            certainty=self._certainty,
            events_lost=self._lost,
            evicted=self._holders.evicted + self._clients.evicted,
        )

    def _uses(self) -> Iterator[ProcessUse]:
        for process in self._holders.processes.values():
            if process.look is None or not process.is_known:
                continue
            contexts = self._contexts_of(process)
            if process.files or contexts:
                yield self._use(process, process.look, contexts)

    def _use(self, process: Process, look: ProcessLook, contexts: Mapping[GpuUuid | None, int]) -> ProcessUse:
        fds = self._fds_of(process)
        freed = self._clients.freed.get(process.number, {})
        gpus = sorted({gpu for gpu in (*fds, *contexts) if gpu is not None})
        shared = fds.get(None, 0) if len(gpus) == 1 else 0
        slices = self._slices_of(process)
        is_counted = self._source == "probe"
        return ProcessUse(
            look=look,
            since_ns=process.since_ns,
            holds=tuple(
                GpuHold(
                    gpu=gpu,
                    fds=fds.get(gpu, 0) + shared,
                    contexts=contexts.get(gpu, 0) if is_counted else None,
                    allocated=contexts.get(gpu, 0) + freed.get(gpu, 0),
                    freed=freed.get(gpu, 0),
                    slices=tuple(place for place in slices if place.gpu == gpu),
                )
                for gpu in gpus
            ),
            files=len(process.files) if is_counted else None,
            fds=sum(process.files.values()),
            exiting_since_ns=process.exiting_ns,
            partial=process.partial,
            unplaced=contexts.get(None, 0),
            is_agent=process.pid == self._agent_pid,
        )

    def _contexts_of(self, process: Process) -> dict[GpuUuid | None, int]:
        found: dict[GpuUuid | None, int] = {}
        for client in self._clients.of_owner(process.number):
            for gpu, count in self._clients.contexts(client).items():
                found[gpu] = found.get(gpu, 0) + count
        return found

    def _fds_of(self, process: Process) -> dict[GpuUuid | None, int]:
        """Return descriptors by GPU; None is what all GPUs share."""
        found: dict[GpuUuid | None, int] = {}
        for name, fds in process.files.items():
            gpu = self._gpu_of_device(self._holders.files[name].device)
            found[gpu] = found.get(gpu, 0) + fds
        return found

    def _slices_of(self, process: Process) -> list[Placement]:
        major = self._gpus.capabilities_major
        places = {
            self._gpus.by_capability.get(device & ((1 << MINOR_BITS) - 1))
            for device in (self._holders.files[name].device for name in process.files)
            if device >> MINOR_BITS == major
        }
        return sorted(place for place in places if place is not None)

    def _gpu_of_device(self, device: int) -> GpuUuid | None:
        if device >> MINOR_BITS != NVIDIA_MAJOR:
            return None
        return self._gpus.by_minor.get(device & ((1 << MINOR_BITS) - 1))

    def _only_gpu(self, number: int) -> GpuUuid | None:
        """Return the only GPU that a process has open, or had when it ended."""
        process = self._holders.processes.get(number)
        gpus = set() if process is None else self._open_gpus(process)
        return gpus.pop() if len(gpus) == 1 else None

    def _open_gpus(self, process: Process) -> set[GpuUuid]:
        devices = process.devices or {self._holders.files[name].device for name in process.files}
        gpus = (self._gpu_of_device(device) for device in devices)
        return {gpu for gpu in gpus if gpu is not None}

    def _orphans(self) -> Iterator[Orphan]:
        older = self._older_files() if self._source == "probe" else {}
        for process in self._holders.processes.values():
            if process.ended_ns is not None:
                yield from self._left_by(process, process.ended_ns, older.get(process, []))

    def _older_files(self) -> dict[Process, list[int]]:
        """Return the files older than the probe, by who is taken to have made them."""
        found: dict[Process, list[int]] = {}
        for name, file in self._holders.files.items():
            if file.maker is not None:
                found.setdefault(file.maker, []).append(name)
        return found

    def _left_by(self, process: Process, ended_ns: int, older: list[int]) -> Iterator[Orphan]:
        """Yield what a process that ended left in the hands of others, by GPU."""
        files: dict[GpuUuid | None, list[int]] = {}
        counts: dict[GpuUuid | None, int | None] = {}
        for client in self._clients.of_owner(process.number):
            for gpu, count in self._clients.contexts(client).items():
                if client.sure and self._holders_of(client.file):
                    files.setdefault(gpu, []).append(client.file)
                    counts[gpu] = (counts.get(gpu) or 0) + count
        for name in older:
            for gpu in self._open_gpus(process) or (None,):
                if self._holders_of(name):
                    files.setdefault(gpu, []).append(name)
                    counts[gpu] = None
        for gpu, names in files.items():
            holders = {key for name in names for key in self._holders_of(name)}
            yield Orphan(
                owner=process.look or ProcessLook(process.key, "", "", "", None),
                ended_ns=ended_ns,
                gpu=gpu,
                clients=len(names),
                contexts=counts[gpu],
                holders=tuple(sorted(holders)[:MAX_HOLDERS]),
                since_ns=process.since_ns,
            )

    def _holders_of(self, name: int) -> list[ProcessKey]:
        file = self._holders.files.get(name)
        return [] if file is None else [holder.key for holder in file.holders if holder.is_known]

    def _totals(self, processes: Iterable[ProcessUse], orphans: Iterable[Orphan]) -> Iterator[GpuTotal]:
        counts: dict[GpuUuid, tuple[int, int]] = {}
        for process in processes:
            for hold in process.holds:
                number, contexts = counts.get(hold.gpu, (0, 0))
                counts[hold.gpu] = (number + 1, contexts + (hold.contexts or 0))
        for orphan in orphans:
            if orphan.gpu is not None:
                number, contexts = counts.get(orphan.gpu, (0, 0))
                counts[orphan.gpu] = (number, contexts + (orphan.contexts or 0))
        for gpu in sorted(counts):
            number, contexts = counts[gpu]
            yield GpuTotal(gpu, number, contexts if self._source == "probe" else None)


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


def folded(uuid: GpuUuid) -> tuple[int, int]:
    """Return the halves of a GPU's UUID, one upon the other, as an event has them in two numbers."""
    try:
        raw = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
    except ValueError:
        return (-1, -1)
    words = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, 16, 4)]
    return words[0] ^ words[2], words[1] ^ words[3]
