"""The live objects of the driver's resource manager (RM): clients, their trees, the contexts in them.

Invariants: a client belongs to one open file, so (client, handle) names an object on the whole node. A
repeated event changes nothing. An object's event and its row in the kernel's map give the same entry. All
tables are bounded; an owner that makes more than a share of the room loses its own entries alone, and is
then in ``short``.

A process can change its calls' parameters while the driver reads them. So the GPUs that its calls name count
for its own clients alone, and only GPUs that the kernel saw it open. The remaining error: a process may place
its own contexts on the wrong one of the GPUs that it has open.

Owners are numbers that the tracker gives to processes, never pids.
"""

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heapreplace
from typing import Final, Protocol

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.client_tree import DEVICE, NO_INSTANCE, ROOTS, Client, Marker, Object
from agent.core.usage.quarantine import Quarantine, QuarantinedClient
from agent.core.usage.rows import Removed, Rows
from agent.model.ids import GpuUuid
from agent.model.rm import MAX_INSTANCES, RmObject


class OwnerGpus(Protocol):
    """The GPUs of the processes that made clients."""

    def only_gpu(self, owner: int) -> GpuUuid | None:
        """Return the only GPU that a process has open, or had when it ended."""

    def may_use(self, owner: int, gpu: GpuUuid) -> bool:
        """Return whether a process is known to have had a GPU open, or is known only from rows."""


class ClientTable:
    """All clients of the node."""

    owner_gpus: OwnerGpus
    """Set by the records, which are made after this table."""

    def __init__(self, marker: Marker, bounds: Bounds = BOUNDS) -> None:
        self.marker = marker
        self._bounds: Final = bounds
        self.evicted = 0
        self.short: set[int] = set()
        """Owners of evicted or rejected objects: their counts are lower bounds."""
        self.changed: set[int] = set()
        """Owners whose record is to be refreshed; the records empty it."""
        self.freed: dict[int, dict[GpuUuid | None, int]] = {}
        """Freed contexts by owner and GPU, for as long as the owner has an entry."""
        self._instances: Mapping[int, GpuUuid] = {}
        self._claims: dict[int, dict[int, GpuUuid]] = {}
        """The GPU of each device instance by the owner's own calls."""
        self._clients: dict[int, Client] = {}
        self._by_file: dict[int, set[int]] = {}
        self._by_owner: dict[int, dict[int, None]] = {}
        """Clients of each owner, the one with the oldest event first."""
        self._sizes: dict[int, int] = {}
        """Room that each owner takes."""
        self._size = 0
        self._quarantine = Quarantine(bounds)
        self._removed: list[Removed] = []

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def __len__(self) -> int:
        return self._size

    def pop_removed(self) -> list[Removed]:
        """Return, once, the objects that were freed without an event of their own."""
        removed, self._removed = self._removed, []
        return removed

    # Events

    def set_instances(self, instances: Mapping[int, GpuUuid]) -> None:
        """Set the GPU of each device instance; claims under an earlier load of the driver are void."""
        self._instances = instances
        self._claims = {}

    def handle_alloc(self, row: RmObject, owner: int) -> None:
        """Apply a new object."""
        is_root = row.rm_class in ROOTS
        client = self._client(row, owner, whole=is_root)
        if client is None or (is_root and row.handle == row.client):
            return
        known = client.objects.get(row.handle)
        if known is not None:
            if (known.rm_class, known.parent) == (row.rm_class, row.parent):
                return
            self._drop_object(client, row.handle)
        # Making room may have dropped this client.
        if self._has_room(client.owner, row) and self._clients.get(row.client) is client:
            instance = row.gpu if row.rm_class == DEVICE else NO_INSTANCE
            client.add(row.handle, Object(row.rm_class, row.parent, instance, row.at_ns), self.marker)
            self._grow(client.owner, 1)

    def handle_free(self, client_handle: int, handle: int, at_ns: int) -> None:
        """Apply that an object, or a whole client, was freed."""
        client = self._clients.get(client_handle)
        if client is None:
            return
        if handle == client_handle:
            if client.at_ns <= at_ns:
                self.drop(client_handle)
            return
        known = client.objects.get(handle)
        if known is not None and known.at_ns <= at_ns:
            self._drop_object(client, handle)

    def handle_uvm_registration(self, client_handle: int, vaspace: int, gpu: GpuUuid, owner: int) -> None:
        """Apply that a process registered a client's address space with unified memory for a GPU.

        The call names the GPU itself, and so the GPU of the device instance above that space, for the
        clients of this process. For a client of another process it has no effect.
        """
        client = self._clients.get(client_handle)
        if client is None or client.owner != owner:
            return
        client.gpus.add(gpu)
        self.changed.add(owner)
        instance = client.instance_of(vaspace)
        claims = self._claims.setdefault(owner, {})
        if instance != NO_INSTANCE and (instance in claims or len(claims) < MAX_INSTANCES):
            claims[instance] = gpu

    def handle_file_closed(self, file: int, before_ns: int | None = None) -> None:
        """Drop the clients of a file that is gone; of a reused address, those made before that time."""
        for handle in tuple(self._by_file.get(file, ())):
            if before_ns is None or self._clients[handle].at_ns < before_ns:
                self.drop(handle)
        self._drop_quarantined(file)

    def handle_file_evicted(self, file: int) -> None:
        """Evict the clients of a file that was evicted."""
        for handle in tuple(self._by_file.get(file, ())):
            client = self._clients[handle]
            self.mark_short(client.owner, client.size)
            self.drop(handle, is_gone=False)

    def quarantine_file(self, file: int, now_ns: int) -> None:
        """Quarantine the clients of a file without a holder, which is gone, or in a message."""
        clients = [self._clients[handle] for handle in self._by_file.get(file, ())]
        if clients:
            entries = [QuarantinedClient(client, self.contexts(client)) for client in clients]
            for client in clients:
                self.drop(client.handle, is_gone=False)
            for client, _ in self._quarantine.add(file, entries, now_ns):
                self._add_removed_client(client)

    def restore_file(self, file: int) -> None:
        """Restore the quarantined clients of a file that has a holder."""
        for client, counted in self._quarantine.pop(file):
            if client.handle not in self._clients:
                self._insert(client)
                for gpu, count in counted.items():
                    self._add_freed(client.owner, gpu, -count)

    def expire_quarantined(self, now_ns: int) -> None:
        """Drop clients whose file had no holder for too long."""
        for file in self._quarantine.expired(now_ns):
            self._drop_quarantined(file)

    def drop(self, handle: int, *, is_gone: bool = True) -> None:
        """Drop a client with its objects; where it is gone, its rows count as removed."""
        if handle not in self._clients:
            return
        client = self._clients[handle]
        for gpu, count in self.contexts(client).items():
            self._add_freed(client.owner, gpu, count)
        self._remove(handle)
        if is_gone:
            self._add_removed_client(client)

    def rebuild_steps(
        self, rows: Rows, owner_of: Callable[[RmObject], int], opened: Mapping[int, int]
    ) -> Iterator[None]:
        """Replace all clients by the rows of the kernel's map, step by step.

        No other method may be called between the steps. ``opened`` is as in ``rows.live_rows``.
        """
        for file in self._quarantine.files():
            self.restore_file(file)
        live_before: dict[tuple[int, GpuUuid | None], int] = {}
        yield from self._count(live_before)
        before = self._clients
        self.changed.update(self._by_owner)
        self._clients, self._by_file, self._by_owner, self._sizes, self._size = {}, {}, {}, {}, 0
        self._removed += rows.stale
        for number, row in enumerate(rows.living):
            self._restore(row, before.get(row.client), owner_of, opened)
            if number % self._bounds.step_rows == self._bounds.step_rows - 1:
                yield
        live: dict[tuple[int, GpuUuid | None], int] = {}
        yield from self._count(live)
        for (owner, gpu), count in live_before.items():
            ended = count - live.get((owner, gpu), 0)
            if ended > 0:
                self._add_freed(owner, gpu, ended)
        del self._removed[: -self._bounds.objects]

    def _restore(
        self,
        row: RmObject,
        known: Client | None,
        owner_of: Callable[[RmObject], int],
        opened: Mapping[int, int],
    ) -> None:
        # A row has the start of the process that made it; events between lost ones may be of another.
        is_surer = row.rm_class in ROOTS and (row.start_ticks or known is None or not known.whole)
        self.handle_alloc(row, owner_of(row) if is_surer or known is None else known.owner)
        client = self._clients.get(row.client)
        if client is not None:
            client.sure = row.file in opened or (known is not None and known.sure)
            client.gpus = set() if known is None else known.gpus

    def _count(self, found: dict[tuple[int, GpuUuid | None], int]) -> Iterator[None]:
        """Count the live contexts by owner and GPU."""
        for number, client in enumerate(self):
            for gpu, count in self.contexts(client).items():
                found[client.owner, gpu] = found.get((client.owner, gpu), 0) + count
            if number % self._bounds.step_rows == self._bounds.step_rows - 1:
                yield
        yield

    # Queries
    def contexts(self, client: Client) -> dict[GpuUuid | None, int]:
        """Return the live contexts of a client by GPU; None: the GPU is unknown."""
        found: dict[GpuUuid | None, int] = {}
        counts: dict[int, int] = {}
        for context in client.markers:
            instance = client.instance_of(context)
            counts[instance] = counts.get(instance, 0) + 1
        for instance, count in counts.items():
            gpu = self._gpu_of_instance(client, instance)
            found[gpu] = found.get(gpu, 0) + count
        return found

    def gpu_of(self, client: Client, handle: int) -> GpuUuid | None:
        """Return the GPU of an object; None: unknown."""
        return self._gpu_of_instance(client, client.instance_of(handle))

    def _gpu_of_instance(self, client: Client, instance: int) -> GpuUuid | None:
        """Return the GPU of a device instance in a client, by the surest source that has it.

        In this order: the owner's registration with unified memory, the driver's list, the only GPU that the
        client was registered for, the only GPU that its owner has open.
        """
        owner = client.owner
        candidates = (
            self._claims.get(owner, {}).get(instance),
            self._instances.get(instance),
            next(iter(client.gpus)) if len(client.gpus) == 1 else None,
        )
        for gpu in candidates:
            if gpu is not None and self.owner_gpus.may_use(owner, gpu):
                return gpu
        return self.owner_gpus.only_gpu(owner)

    def mark_sure(self, handle: int) -> None:
        """Mark a client as certain, since an event names it."""
        if handle in self._clients:
            self._clients[handle].sure = True
            self.changed.add(self._clients[handle].owner)

    def mark_unsure(self, file: int) -> None:
        """Mark a file's clients as uncertain: its address may have been reused since."""
        for handle in self._by_file.get(file, ()):
            self._clients[handle].sure = False
            self.changed.add(self._clients[handle].owner)

    def of_owner(self, owner: int) -> Iterator[Client]:
        """Yield the clients that a process made."""
        return (self._clients[handle] for handle in self._by_owner.get(owner, ()))

    def mark_file_changed(self, file: int) -> None:
        """Mark the owners of a file's clients: their orphans depend on its holders."""
        for handle in self._by_file.get(file, ()):
            self.changed.add(self._clients[handle].owner)

    def has_file(self, file: int) -> bool:
        """Return whether any client was made with an open file."""
        return file in self._by_file

    def has_owner(self, owner: int) -> bool:
        """Return whether a process made a client that lives or is quarantined."""
        return owner in self._by_owner or self._quarantine.has_owner(owner)

    def transfer(self, owner: int, to: int) -> None:
        """Give the clients of one owner to another."""
        for handle in tuple(self._by_owner.get(owner, ())):
            client = self._remove(handle)
            client.owner = to
            self._insert(client)
        self._quarantine.transfer(owner, to)
        for gpu, count in self.freed.pop(owner, {}).items():
            self._add_freed(to, gpu, count)
        if owner in self._claims:
            self._claims[to] = {**self._claims.get(to, {}), **self._claims.pop(owner)}
        if owner in self.short:
            self.short.remove(owner)
            self.short.add(to)
        self.changed |= {owner, to}

    def forget_owner(self, owner: int) -> None:
        """Drop a process's clients, whose rows may stay in the kernel's map."""
        for handle in tuple(self._by_owner.get(owner, ())):
            self.drop(handle, is_gone=False)
        for file in self._quarantine.files_of(owner):
            self._quarantine.pop(file)
        self.freed.pop(owner, None)
        self._claims.pop(owner, None)
        self.short.discard(owner)
        self.changed.add(owner)

    # Room

    def mark_short(self, owner: int, count: int = 1) -> None:
        """Count entries of an owner that were evicted or rejected, and mark it as ``short``."""
        self.evicted += count
        self.short.add(owner)
        self.changed.add(owner)

    def _has_room(self, owner: int, row: RmObject) -> bool:
        """Return whether an owner may have one more entry, after evicting others' where that is needed."""
        if self._sizes.get(owner, 0) >= self._bounds.objects_of_owner:
            self.mark_short(owner)
            # Its row uses room in the kernel's map that others need.
            self.add_removed(Removed(row.client, row.handle, row.at_ns))
            return False
        if self._size >= self._bounds.objects:
            self._make_room()
        return True

    def _make_room(self) -> None:
        """Evict, one by one, the client with the oldest event of the owner with the most entries."""
        most = [(-size, owner) for owner, size in self._sizes.items()]
        heapify(most)
        while self._size > self._bounds.objects * 7 // 8:
            owner = most[0][1]
            oldest = next(iter(self._by_owner[owner]))
            self.mark_short(owner, self._clients[oldest].size)
            self.drop(oldest, is_gone=False)
            heapreplace(most, (-self._sizes.get(owner, 0), owner))

    def _grow(self, owner: int, by: int) -> None:
        self._size += by
        left = self._sizes.get(owner, 0) + by
        if left:
            self._sizes[owner] = left
        else:
            del self._sizes[owner]

    # Internals
    def _client(self, row: RmObject, owner: int, *, whole: bool) -> Client | None:
        """Return the client of an object, made where needed; None: no room."""
        client = self._clients.get(row.client)
        if client is not None and whole and (client.file, client.owner) != (row.file, owner):
            # The handle was reused: the free of its earlier client was missed.
            self.drop(row.client)
            client = None
        if client is None:
            if not self._has_room(owner, row):
                return None
            client = Client(row.client, row.file, owner, row.at_ns, whole)
            self._insert(client)
        of_owner = self._by_owner[client.owner]
        of_owner[row.client] = of_owner.pop(row.client)
        client.sure = True
        self.changed.add(client.owner)
        return client

    def _insert(self, client: Client) -> None:
        self._clients[client.handle] = client
        self._by_file.setdefault(client.file, set()).add(client.handle)
        self._by_owner.setdefault(client.owner, {})[client.handle] = None
        self._grow(client.owner, client.size)
        self.changed.add(client.owner)

    def _remove(self, handle: int) -> Client:
        """Remove a client from the tables."""
        client = self._clients.pop(handle)
        self._grow(client.owner, -client.size)
        of_file, of_owner = self._by_file[client.file], self._by_owner[client.owner]
        of_file.remove(handle)
        if not of_file:
            del self._by_file[client.file]
        del of_owner[handle]
        if not of_owner:
            del self._by_owner[client.owner]
        self.changed.add(client.owner)
        return client

    def _drop_object(self, client: Client, handle: int) -> None:
        """Drop an object and everything below it."""
        doomed = client.with_descendants(handle)
        # A context's ancestors name its GPU, so the tree stays until all contexts are counted.
        for each in doomed:
            if client.unmark(each):
                self._add_freed(client.owner, self.gpu_of(client, each), 1)
        self._removed += [Removed(client.handle, each, client.objects[each].at_ns) for each in doomed]
        del self._removed[: -self._bounds.objects]
        client.remove(doomed)
        self._grow(client.owner, -len(doomed))
        self.changed.add(client.owner)

    def _add_freed(self, owner: int, gpu: GpuUuid | None, count: int) -> None:
        of_owner = self.freed.setdefault(owner, {})
        of_owner[gpu] = of_owner.get(gpu, 0) + count
        self.changed.add(owner)

    def _drop_quarantined(self, file: int) -> None:
        for client, _ in self._quarantine.pop(file):
            self._add_removed_client(client)

    def _add_removed_client(self, client: Client) -> None:
        self._removed += [Removed(client.handle, each, known.at_ns) for each, known in client.objects.items()]
        self.add_removed(Removed(client.handle, client.handle, client.at_ns))

    def add_removed(self, removed: Removed) -> None:
        """Add a stale row of the kernel's map."""
        self._removed.append(removed)
        del self._removed[: -self._bounds.objects]
