"""The record of each process in the usage snapshot, rebuilt only where something changed.

Invariants: an unchanged record is the same object as before, so that snapshots can be compared by identity.
Sums by GPU are updated by the difference.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Final

from agent.core.usage.clients import ClientTable
from agent.core.usage.files import OpenFileTable
from agent.core.usage.gpu_map import GpuMap
from agent.core.usage.orphans import OrphanGroups
from agent.core.usage.processes import Process
from agent.model.ids import GpuUuid, Placement
from agent.model.structs import replace
from agent.model.usage import (
    GONE,
    MAX_HOLDERS,
    GpuHold,
    GpuTotal,
    NoPod,
    Orphan,
    ProcessKey,
    ProcessStatus,
    ProcessUse,
    UsageSource,
)


class _Sum:
    """The sum of all processes on one GPU."""

    __slots__ = ("contexts", "parts", "processes")

    def __init__(self) -> None:
        self.parts = self.processes = self.contexts = 0


class UseRecords:
    """The records of all processes, and their sums."""

    def __init__(
        self, open_files: OpenFileTable, clients: ClientTable, *, source: UsageSource, agent_pid: int | None
    ) -> None:
        self._open_files: Final = open_files
        self._clients: Final = clients
        clients.owner_gpus = self
        self._is_probe: Final = source == "probe"
        self._agent_pid: Final = agent_pid
        self._gpus = GpuMap({})
        self._pending: set[Process] = set()
        self._uses: dict[Process, ProcessUse] = {}
        self._orphans_by_process: dict[Process, tuple[Orphan, ...]] = {}
        self.orphan_groups: Final = OrphanGroups()
        self._sums: dict[GpuUuid, _Sum] = {}
        self._processes: tuple[ProcessUse, ...] | None = ()
        self._order: list[Process] | None = []
        """Processes with a record, in order; None: to be sorted again."""

    def set_gpus(self, gpus: GpuMap) -> None:
        """Set how the driver numbers the GPUs, on which every record depends."""
        self._gpus = gpus
        self._pending.update(self._open_files.processes.values())

    # Of an owner, for its clients

    def only_gpu(self, owner: int) -> GpuUuid | None:
        """Return the only GPU that a process has open, or had when it ended."""
        process = self._open_files.processes.get(owner)
        gpus = set() if process is None else self._open_gpus(process)
        return gpus.pop() if len(gpus) == 1 else None

    def may_use(self, owner: int, gpu: GpuUuid) -> bool:
        """Return whether a process is known to have had a GPU open, or is known only from rows."""
        process = self._open_files.processes.get(owner)
        if process is None or process.opened is None:
            return True
        return any(self._gpus.gpu_of(device) == gpu for device in process.opened)

    def doubted_gpus(self) -> frozenset[GpuUuid]:
        """Return the GPUs that processes with missing entries may use; empty: it may be any."""
        found: set[GpuUuid | None] = set()
        for process in self._open_files.processes.values():
            if process.number not in self._clients.short and not process.unsent_events:
                continue
            if process.opened is None or process.lacks_files:
                return frozenset()
            found.update(self._gpus.gpu_of(device) for device in process.opened)
        return frozenset(gpu for gpu in found if gpu is not None)

    # Records

    def refresh(self, at_most: int | None = None) -> bool:
        """Refresh the records of so many changed processes; return whether there are more."""
        for number in self._clients.changed:
            process = self._open_files.processes.get(number)
            if process is not None:
                self._pending.add(process)
        self._clients.changed.clear()
        self._pending.update(self._open_files.changed)
        self._open_files.changed.clear()
        count = len(self._pending) if at_most is None else min(at_most, len(self._pending))
        for _ in range(count):
            self._refresh_process(self._pending.pop())
        return bool(self._pending)

    def processes(self) -> tuple[ProcessUse, ...]:
        """Return the processes that hold files or have contexts, by pid."""
        if self._order is None:
            self._order = sorted(self._uses, key=lambda process: process.key)
        if self._processes is None:
            self._processes = tuple([self._uses[process] for process in self._order])
        return self._processes

    def totals(self) -> Iterator[GpuTotal]:
        """Yield the sum of each GPU, in order."""
        for gpu in sorted(self._sums):
            found = self._sums[gpu]
            yield GpuTotal(gpu, found.processes, found.contexts if self._is_probe else None)

    def _refresh_process(self, process: Process) -> None:
        is_there = self._open_files.processes.get(process.number) is process
        self._set_use(process, self._use_of(process) if is_there else None)
        left: tuple[Orphan, ...] = ()
        if is_there and process.ended_ns is not None and self._is_probe:
            left = tuple(self._orphans_of(process, process.ended_ns))
        self._set_orphans(process, left)

    def _set_use(self, process: Process, use: ProcessUse | None) -> None:
        before = self._uses.get(process)
        if before == use:
            return
        if before is not None:
            self._add_use(before, -1)
        if use is None:
            del self._uses[process]
        else:
            self._uses[process] = use
            self._add_use(use, 1)
        self._processes = None
        if before is None or use is None:
            self._order = None

    def _set_orphans(self, process: Process, left: tuple[Orphan, ...]) -> None:
        before = self._orphans_by_process.pop(process, ())
        if left:
            self._orphans_by_process[process] = left
        if before != left:
            for orphan in before:
                self._add(orphan.gpu, -1, 0, -(orphan.contexts or 0))
                self.orphan_groups.remove(orphan)
            for orphan in left:
                self._add(orphan.gpu, 1, 0, orphan.contexts or 0)
                self.orphan_groups.add(orphan, self._holder_of(orphan))

    def _holder_of(self, orphan: Orphan) -> Hashable:
        """Return the pod, or the cgroup of the host, that keeps an orphan alive."""
        return self._open_files.holder_of((*orphan.holders, orphan.owner.key)[0], orphan.owner)

    def _add_use(self, use: ProcessUse, sign: int) -> None:
        for hold in () if use.is_agent else use.holds:
            self._add(hold.gpu, sign, sign, sign * (hold.contexts or 0))

    def _add(self, gpu: GpuUuid | None, parts: int, processes: int, contexts: int) -> None:
        if gpu is None:
            return
        found = self._sums.setdefault(gpu, _Sum())
        found.parts += parts
        found.processes += processes
        found.contexts += contexts
        if not found.parts:
            del self._sums[gpu]

    # Of one process

    def _use_of(self, process: Process) -> ProcessUse | None:
        """Return the record of a process; None: its status was never read, or it has no files or contexts."""
        if process.status is None or not process.is_known:
            return None
        contexts, compute = self._contexts_of(process)
        if not process.files and not contexts:
            return None
        return ProcessUse(
            status=process.status,
            since_ns=process.since_ns,
            holds=self._holds_of(process, contexts, compute),
            files=len(process.files) if self._is_probe else None,
            fds=sum(process.files.values()),
            exiting_since_ns=process.exiting_ns,
            partial=process.partial or process.number in self._clients.short or bool(contexts.get(None)),
            unplaced=contexts.get(None, 0),
            is_agent=process.pid == self._agent_pid,
        )

    def _holds_of(
        self, process: Process, contexts: Counter[GpuUuid | None], compute: Counter[GpuUuid | None]
    ) -> tuple[GpuHold, ...]:
        fds = self._fds_of(process)
        freed = self._clients.freed.get(process.number, {})
        gpus = sorted({gpu for gpu in (*fds, *contexts) if gpu is not None})
        shared = fds.get(None, 0) if len(gpus) == 1 else 0
        slices = self._slices_of(process)
        return tuple(
            GpuHold(
                gpu=gpu,
                fds=fds.get(gpu, 0) + shared,
                contexts=contexts.get(gpu, 0) if self._is_probe else None,
                allocated=contexts.get(gpu, 0) + freed.get(gpu, 0),
                freed=freed.get(gpu, 0),
                compute=compute[gpu] if self._is_probe else None,
                slices=tuple(place for place in slices if place.gpu == gpu),
            )
            for gpu in gpus
        )

    def _contexts_of(self, process: Process) -> tuple[Counter[GpuUuid | None], Counter[GpuUuid | None]]:
        """Return all contexts by GPU, and those of clients that use unified memory."""
        found: Counter[GpuUuid | None] = Counter()
        compute: Counter[GpuUuid | None] = Counter()
        for client in self._clients.of_owner(process.number):
            contexts = self._clients.contexts(client)
            found.update(contexts)
            if client.gpus:
                compute.update(contexts)
        return found, compute

    def _fds_of(self, process: Process) -> dict[GpuUuid | None, int]:
        """Return descriptors by GPU; None: of devices that all GPUs share."""
        found: dict[GpuUuid | None, int] = {}
        for name, fds in process.files.items():
            gpu = self._gpus.gpu_of(self._open_files.files[name].device)
            found[gpu] = found.get(gpu, 0) + fds
        return found

    def _slices_of(self, process: Process) -> list[Placement]:
        if not self._gpus.by_capability:
            return []
        places = {self._gpus.slice_of(self._open_files.files[name].device) for name in process.files}
        return sorted(place for place in places if place is not None)

    def _open_gpus(self, process: Process) -> set[GpuUuid]:
        devices = process.devices or {self._open_files.files[name].device for name in process.files}
        gpus = (self._gpus.gpu_of(device) for device in devices)
        return {gpu for gpu in gpus if gpu is not None}

    def _orphans_of(self, process: Process, ended_ns: int) -> Iterator[Orphan]:
        """Yield the orphans of a process that is gone, by GPU."""
        files: dict[GpuUuid | None, list[int]] = {}
        counts: dict[GpuUuid | None, int | None] = {}
        for client in self._clients.of_owner(process.number):
            if client.sure and self._is_orphaned(client.file):
                for gpu, count in self._clients.contexts(client).items():
                    files.setdefault(gpu, []).append(client.file)
                    counts[gpu] = (counts.get(gpu) or 0) + count
        for name in sorted(process.made):
            for gpu in self._open_gpus(process) or (None,):
                if self._is_orphaned(name):
                    files.setdefault(gpu, []).append(name)
                    counts[gpu] = None
        for gpu, names in files.items():
            holders = {key for name in names for key in self._holders_of(name)}
            status = process.status or ProcessStatus(process.key, "", "", "", NoPod.UNKNOWN)
            yield Orphan(
                owner=replace(status, state=GONE),
                ended_ns=ended_ns,
                gpu=gpu,
                clients=len(names),
                contexts=counts[gpu],
                holders=tuple(sorted(holders)[:MAX_HOLDERS]),
                since_ns=process.since_ns,
            )

    def _is_orphaned(self, name: int) -> bool:
        """Return whether a file is open: a known process holds it, or its release event has not come."""
        file = self._open_files.files.get(name)
        if file is None:
            return False
        if not self._open_files.holders_of_file(name):
            return self._open_files.has_release_events
        return bool(self._holders_of(name))

    def _holders_of(self, name: int) -> list[ProcessKey]:
        return [holder.key for holder in self._open_files.holders_of_file(name) if holder.is_known]
