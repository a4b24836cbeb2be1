"""The live objects of the driver's resource manager (RM): clients, their trees, the contexts in them.

Invariants: a client belongs to one open file, so (client, handle) names an object on the whole node. An
object dies with its parent. Handles are used again, so of two objects of one name the later counts; what
is told twice changes nothing. Both ways to learn of an object, its event and its row in the kernel's map,
give the same picture. Nothing grows without a bound: the client that was quiet longest is forgotten.

Owners are numbers that the tracker gives to processes, never pids.
Sources: facts of the driver are those of open-gpu-kernel-modules (rs_server.c, escape.c, nvos.h).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.model.ids import GpuUuid
from agent.model.rm import RmObject

MAX_OBJECTS: Final = 65_536
MAX_CLIENTS: Final = 65_536
MAX_DEPTH: Final = 16
"""From a context to its device; the driver's trees are four deep."""

ROOTS: Final = frozenset({0x0000, 0x0001, 0x0041})
DEVICE: Final = 0x0080

NO_INSTANCE: Final = 0xFFFFFFFF
"""The probe's word for "no device instance"."""


class Marker(NamedTuple):
    """Which object stands for a CUDA context.

    Each context has one FERMI_CONTEXT_SHARE_A. Other marks, should a driver differ: the debugger object
    (0x83de), or the channel groups (0xa06c), of which a context makes several at once: those of one
    client and parent that are less than ``gap_ns`` apart are one context.
    """

    rm_class: int = 0x9067
    gap_ns: int = 0


CONTEXT_SHARE: Final = Marker()
CHANNEL_GROUPS: Final = Marker(0xA06C, 250_000_000)
DEBUGGER: Final = Marker(0x83DE)


class Removed(NamedTuple):
    """An object that died without an event of its own: its row is still in the kernel's map."""

    client: int
    handle: int
    at_ns: int
    """When it was made; a row that is newer is of another object."""


@dataclass(slots=True)
class _Object:
    rm_class: int
    parent: int
    instance: int
    at_ns: int
    context: int | None = None
    """Which context it is a part of: the handle of that context's first marker."""


@dataclass(slots=True)
class Client:
    """A client and what it has."""

    handle: int
    file: int
    owner: int
    at_ns: int
    whole: bool
    """It was seen from its beginning, so every parent in it is known."""
    sure: bool = True
    """False: it may have gone with its file, and another file have got the address since."""
    objects: dict[int, _Object] = field(default_factory=dict)
    children: dict[int, set[int]] = field(default_factory=dict)
    markers: dict[int, int] = field(default_factory=dict)
    """Live markers of each live context, by the handle of the first."""
    newest: dict[int, tuple[int, int]] = field(default_factory=dict)
    """When the newest marker under a parent was made, and its context."""


class Clients:
    """All clients of the node."""

    def __init__(self, marker: Marker, gpu_of_owner: Callable[[int], GpuUuid | None]) -> None:
        self.marker = marker
        self.evicted = 0
        self.freed: dict[int, dict[GpuUuid | None, int]] = {}
        """Contexts that ended, by owner and GPU; the tracker forgets an owner's when it forgets the owner."""
        self._gpu_of_owner = gpu_of_owner
        self._instances: Mapping[int, GpuUuid] = {}
        self._seen: dict[int, GpuUuid] = {}
        self._clients: dict[int, Client] = {}
        self._by_file: dict[int, set[int]] = {}
        self._by_owner: dict[int, set[int]] = {}
        self._count = 0
        self._removed: list[Removed] = []
        self._registered: dict[int, GpuUuid | None] = {}
        """The GPU that each client was registered for; None: several."""

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def __len__(self) -> int:
        return self._count

    def take_removed(self) -> list[Removed]:
        """Return what died since the last call without an event of its own, and forget it."""
        taken, self._removed = self._removed, []
        return taken

    # What is told

    def instances_are(self, instances: Mapping[int, GpuUuid]) -> None:
        """Take which GPU has which device instance; what was learned of an earlier driver is forgotten."""
        self._instances = instances
        self._seen = {}

    def allocated(self, row: RmObject, owner: int) -> None:
        """Take a new object."""
        is_root = row.rm_class in ROOTS
        client = self._client(row, owner, whole=is_root)
        if not is_root or row.handle != row.client:
            self._add(client, row)
        self._bound()

    def _add(self, client: Client, row: RmObject) -> None:
        known = client.objects.get(row.handle)
        if known is not None:
            if (known.rm_class, known.parent) == (row.rm_class, row.parent):
                return
            self._drop(client, row.handle)
        instance = row.gpu if row.rm_class == DEVICE else NO_INSTANCE
        made = client.objects[row.handle] = _Object(row.rm_class, row.parent, instance, row.at_ns)
        client.children.setdefault(row.parent, set()).add(row.handle)
        self._count += 1
        if row.rm_class == self.marker.rm_class:
            self._mark(client, row.handle, made)

    def freed_by(self, client_handle: int, handle: int, at_ns: int) -> None:
        """Take that an object, or a whole client, was freed."""
        client = self._clients.get(client_handle)
        if client is None:
            return
        if handle == client_handle:
            if client.at_ns <= at_ns:
                self.drop(client_handle)
            return
        known = client.objects.get(handle)
        if known is not None and known.at_ns <= at_ns:
            self._drop(client, handle)

    def registered(self, client_handle: int, vaspace: int, gpu: GpuUuid) -> None:
        """Take that a client's address space was registered with unified memory for a GPU.

        This names the GPU itself, and so also tells whose the device instance above that space is.
        """
        known = self._registered.pop(client_handle, gpu)
        self._registered[client_handle] = gpu if known == gpu else None
        if len(self._registered) > MAX_CLIENTS:
            del self._registered[next(iter(self._registered))]
        client = self._clients.get(client_handle)
        instance = NO_INSTANCE if client is None else _instance(client, vaspace)
        if instance != NO_INSTANCE:
            self._seen[instance] = gpu

    def file_ended(self, file: int, before_ns: int | None = None) -> None:
        """Take that an open file is gone, and its clients with it.

        Of an address that is in use again already, those made before that.
        """
        for handle in tuple(self._by_file.get(file, ())):
            if before_ns is None or self._clients[handle].at_ns < before_ns:
                self.drop(handle)

    def drop(self, handle: int, *, is_gone: bool = True) -> None:
        """Forget a client and all that it has; of what is gone the rows are told as removed."""
        client = self._clients.pop(handle, None)
        if client is None:
            return
        self._registered.pop(handle, None)
        for context in client.markers:
            self._add_freed(client.owner, self.gpu_of(client, context), 1)
        if is_gone:
            self._removed += (Removed(handle, each, known.at_ns) for each, known in client.objects.items())
            self._removed.append(Removed(handle, handle, client.at_ns))
            del self._removed[:-MAX_OBJECTS]
        self._count -= len(client.objects)
        _discard(self._by_file, client.file, handle)
        _discard(self._by_owner, client.owner, handle)

    def rebuilt(
        self,
        rows: Iterable[RmObject],
        owner_of: Callable[[RmObject], int],
        is_older: Callable[[int], bool],
        opened: Mapping[int, int],
    ) -> None:
        """Take the rows of the kernel's map instead of everything that was told before.

        A row outlives its object where that died with its parent: such rows are told as removed. Of files
        that are older than the probe (``is_older``) the parents may have no row. ``opened`` says when each
        file was opened, where that is known: what is older went with an earlier file of that address.
        """
        before = self._clients
        live_before = self._live()
        self._clients, self._by_file, self._by_owner, self._count = {}, {}, {}, 0
        for row in _alive(self._of_files_there(rows, opened), self._removed, is_older):
            known = before.get(row.client)
            is_new = known is None or (row.rm_class in ROOTS and not known.whole)
            self.allocated(row, owner_of(row) if is_new or known is None else known.owner)
            is_sure = row.file in opened or (known is not None and known.sure)
            self._clients[row.client].sure = is_sure
        del self._removed[:-MAX_OBJECTS]
        live = self._live()
        for (owner, gpu), count in live_before.items():
            ended = count - live.get((owner, gpu), 0)
            if ended > 0:
                self._add_freed(owner, gpu, ended)

    def _of_files_there(self, rows: Iterable[RmObject], opened: Mapping[int, int]) -> Iterator[RmObject]:
        for row in rows:
            if row.at_ns >= opened.get(row.file, 0):
                yield row
            else:
                self._removed.append(Removed(row.client, row.handle, row.at_ns))

    # What is known

    def contexts(self, client: Client) -> dict[GpuUuid | None, int]:
        """Return the live contexts of a client by GPU; None is the GPU that could not be found out."""
        found: dict[GpuUuid | None, int] = {}
        for context in client.markers:
            gpu = self.gpu_of(client, context)
            found[gpu] = found.get(gpu, 0) + 1
        return found

    def gpu_of(self, client: Client, handle: int) -> GpuUuid | None:
        """Return the GPU of an object, by the surest that is known.

        What unified memory said of the device instance, what the driver's own list says, the only GPU
        that the client was registered for, the only one that its owner has open.
        """
        instance = _instance(client, handle)
        gpu = self._seen.get(instance) or self._instances.get(instance)
        return gpu or self._registered.get(client.handle) or self._gpu_of_owner(client.owner)

    def confirm(self, handle: int) -> None:
        """Take that an event told of a client after all."""
        if handle in self._clients:
            self._clients[handle].sure = True

    def doubt(self, file: int) -> None:
        """Take that a file may be another than that with which its clients were made."""
        for handle in self._by_file.get(file, ()):
            self._clients[handle].sure = False

    def of_owner(self, owner: int) -> Iterator[Client]:
        """Yield the clients that a process made."""
        return (self._clients[handle] for handle in self._by_owner.get(owner, ()))

    def has_file(self, file: int) -> bool:
        """Return whether any client was made with an open file."""
        return file in self._by_file

    def has_owner(self, owner: int) -> bool:
        """Return whether a process made a client that lives."""
        return owner in self._by_owner

    def give(self, owner: int, to: int) -> None:
        """Take that what one owner made is another's after all."""
        for handle in self._by_owner.pop(owner, ()):
            self._clients[handle].owner = to
            self._by_owner.setdefault(to, set()).add(handle)
        for gpu, count in self.freed.pop(owner, {}).items():
            self._add_freed(to, gpu, count)

    def forget_owner(self, owner: int) -> None:
        """Forget a process with all that it made, which may live on in the kernel's map."""
        for handle in tuple(self._by_owner.get(owner, ())):
            self.drop(handle, is_gone=False)
        self.freed.pop(owner, None)

    # Within

    def _live(self) -> dict[tuple[int, GpuUuid | None], int]:
        """Return the live contexts by owner and GPU."""
        found: dict[tuple[int, GpuUuid | None], int] = {}
        for client in self:
            for gpu, count in self.contexts(client).items():
                found[client.owner, gpu] = found.get((client.owner, gpu), 0) + count
        return found

    def _client(self, row: RmObject, owner: int, *, whole: bool) -> Client:
        client = self._clients.pop(row.client, None)
        if client is not None and whole and (client.file, client.owner) != (row.file, owner):
            # The number was used again: the end of the client that had it was missed.
            self._clients[row.client] = client
            self.drop(row.client)
            client = None
        if client is None:
            client = Client(row.client, row.file, owner, row.at_ns, whole)
            self._by_file.setdefault(row.file, set()).add(row.client)
            self._by_owner.setdefault(owner, set()).add(row.client)
        # The order of the table is that of use, so that who was quiet longest goes first.
        self._clients[row.client] = client
        client.sure = True
        return client

    def _mark(self, client: Client, handle: int, made: _Object) -> None:
        at_ns, context = client.newest.get(made.parent, (0, handle))
        is_part = context in client.markers and 0 <= made.at_ns - at_ns < self.marker.gap_ns
        made.context = context if is_part else handle
        client.markers[made.context] = client.markers.get(made.context, 0) + 1
        client.newest[made.parent] = (made.at_ns, made.context)

    def _drop(self, client: Client, handle: int) -> None:
        """Forget an object and everything below it."""
        doomed = _with_descendants(client, handle)
        # The GPU of a context is told by its ancestors, so the tree is left as it is until all are counted.
        for each in doomed:
            context = client.objects[each].context
            if context is not None:
                self._unmark(client, each, context)
        _unlink(client, handle)
        for each in doomed:
            known = client.objects.pop(each)
            client.children.pop(each, None)
            client.newest.pop(each, None)
            self._removed.append(Removed(client.handle, each, known.at_ns))
        del self._removed[:-MAX_OBJECTS]
        self._count -= len(doomed)

    def _unmark(self, client: Client, handle: int, context: int) -> None:
        left = client.markers[context] - 1
        if left:
            client.markers[context] = left
            return
        self._add_freed(client.owner, self.gpu_of(client, handle), 1)
        del client.markers[context]

    def _add_freed(self, owner: int, gpu: GpuUuid | None, count: int) -> None:
        of_owner = self.freed.setdefault(owner, {})
        of_owner[gpu] = of_owner.get(gpu, 0) + count

    def _bound(self) -> None:
        while self._count > MAX_OBJECTS or len(self._clients) > MAX_CLIENTS:
            oldest = next(iter(self._clients))
            self.evicted += 1 + len(self._clients[oldest].objects)
            self.drop(oldest, is_gone=False)


def _discard(sets: dict[int, set[int]], name: int, handle: int) -> None:
    """Take a handle out of one of the sets, and the set away if it is empty."""
    of_name = sets[name]
    of_name.discard(handle)
    if not of_name:
        del sets[name]


def _with_descendants(client: Client, handle: int) -> list[int]:
    """Return an object and everything below it; what is told wrong may make a ring of a tree."""
    found = {handle: None}
    todo = [handle]
    while todo:
        below = [each for each in client.children.get(todo.pop(), ()) if each not in found]
        found.update(dict.fromkeys(below))
        todo += below
    return list(found)


def _unlink(client: Client, handle: int) -> None:
    """Take an object from its parent, which may be older than the probe and not in the tree itself."""
    parent = client.objects[handle].parent
    _discard(client.children, parent, handle)
    if parent not in client.children:
        client.newest.pop(parent, None)


def _instance(client: Client, handle: int) -> int:
    """Return the device instance of the device that an object is, or lies under."""
    for _ in range(MAX_DEPTH):
        known = client.objects.get(handle)
        if known is None:
            break
        if known.rm_class == DEVICE:
            return known.instance
        handle = known.parent
    return NO_INSTANCE


def _alive(
    rows: Iterable[RmObject], removed: list[Removed], is_older: Callable[[int], bool]
) -> list[RmObject]:
    """Return the rows whose ancestors live, roots first, then as they were made; the others are removed."""
    by_name = {(row.client, row.handle): row for row in rows}
    lives: dict[tuple[int, int], bool] = {}
    for name in by_name:
        path: list[tuple[int, int]] = []
        at: tuple[int, int] | None = name
        while at is not None and at not in lives and len(path) < MAX_DEPTH:
            path.append(at)
            at = _above(by_name, by_name[at])
        above = True if at is None else lives.get(at, False)
        for each in reversed(path):
            above = lives[each] = above and _fits(by_name, by_name[each], is_older)
    removed += [Removed(*name, row.at_ns) for name, row in by_name.items() if not lives[name]]
    living = (row for name, row in by_name.items() if lives[name])
    return sorted(living, key=lambda row: (row.rm_class not in ROOTS, row.at_ns))


def _above(rows: dict[tuple[int, int], RmObject], row: RmObject) -> tuple[int, int] | None:
    """Return the name of the row that this one hangs on; None: on nothing that has a row."""
    if row.rm_class in ROOTS:
        return None
    name = (row.client, row.parent)
    return name if name in rows else None


def _fits(rows: dict[tuple[int, int], RmObject], row: RmObject, is_older: Callable[[int], bool]) -> bool:
    """Whether a row can be of a live object, if its parent is."""
    if row.rm_class in ROOTS:
        return True
    parent = rows.get((row.client, row.parent))
    if parent is not None:
        # A parent that is younger is another object, which got the handle later.
        return parent.at_ns <= row.at_ns
    return (row.client, row.client) not in rows and is_older(row.file)
