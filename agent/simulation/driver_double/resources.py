"""A miniature of the driver's resource manager (RM): clients, trees of objects, and the books on them. Pure.

It behaves as the driver does at the level that a probe of its calls sees: a client belongs to one open file,
a handle used through another file is rejected, freeing an object frees what is below it, freeing an unknown
handle is no error, a copy lives on its own, and the end of the file frees its clients.

*Invariants*
- Every object but its client has a parent that lives.
- ``allocated - freed`` of contexts is the number that lives, always.
- Clients and objects are bounded; beyond that, allocations are rejected as by a driver without resources.

Sources: open-gpu-kernel-modules, rs_server.c, rs_client.c, escape.c.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.simulation.driver_double import abi

MAX_CLIENTS: Final = 65_536
MAX_OBJECTS: Final = 262_144
"""Objects of all clients together."""


@dataclass(slots=True)
class _Object:
    rm_class: int
    parent: int
    instance: int | None = None
    """RM device instance, for a device."""
    children: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Client:
    file: int
    pid: int
    objects: dict[int, _Object]


@dataclass(slots=True)
class Counts:
    """Calls and objects since the start."""

    allocated: int = 0
    """Objects, clients among them, by ALLOC and by DUP."""
    freed: int = 0
    """Objects that ended, however that came about."""
    frees: int = 0
    """FREE calls that ended something."""
    contexts_allocated: int = 0
    contexts_freed: int = 0
    rejected: int = 0
    """Calls answered with a status other than 0."""


class LiveContext(NamedTuple):
    """A context share that lives."""

    client: int
    handle: int
    pid: int
    """The process that allocated the client."""
    instance: int | None
    """RM device instance of the device above it."""


class LiveClient(NamedTuple):
    """A client that lives."""

    client: int
    pid: int
    file: int
    objects: int


class Rejected(Exception):  # noqa: N818 - it is a status, not an error of ours
    """The RM does not grant a call."""

    def __init__(self, status: int) -> None:
        super().__init__(f"RM status {status:#x}")
        self.status = status


class ResourceManager:
    """See the module. Methods raise Rejected."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._clients: dict[int, _Client] = {}
        self._of_file: dict[int, set[int]] = {}
        self._objects = 0
        self._next_client = abi.FIRST_CLIENT
        self._next_object = abi.FIRST_OBJECT

    def allocate_client(self, file: int, pid: int) -> int:
        """Make a client of an open file; returns its handle."""
        if len(self._clients) >= MAX_CLIENTS:
            raise self._rejection(abi.INSUFFICIENT_RESOURCES)
        handle = self._next_client
        self._next_client += 1
        self._clients[handle] = _Client(file, pid, {})
        self._of_file.setdefault(file, set()).add(handle)
        self._add(self._clients[handle], handle, _Object(abi.ROOT_CLIENT, 0))
        return handle

    def allocate(
        self, file: int, client: int, parent: int, handle: int, rm_class: int, instance: int | None = None
    ) -> int:
        """Make an object below another one; a handle of 0 is chosen. Returns the handle."""
        owner = self._client(file, client)
        if parent not in owner.objects:
            raise self._rejection(abi.INVALID_OBJECT_PARENT)
        if handle in owner.objects:
            raise self._rejection(abi.INSERT_DUPLICATE_NAME)
        if self._objects >= MAX_OBJECTS:
            raise self._rejection(abi.INSUFFICIENT_RESOURCES)
        handle = handle or self._chosen()
        self._add(owner, handle, _Object(rm_class, parent, instance))
        owner.objects[parent].children.add(handle)
        return handle

    def duplicate(
        self, file: int, client: int, parent: int, handle: int, source_client: int, source: int
    ) -> int:
        """Copy another client's object below one of this client's; returns the copy's handle."""
        other = self._clients.get(source_client)
        if other is None:
            raise self._rejection(abi.INVALID_CLIENT)
        found = other.objects.get(source)
        if found is None:
            raise self._rejection(abi.OBJECT_NOT_FOUND)
        return self.allocate(file, client, parent, handle, found.rm_class, found.instance)

    def free(self, file: int, client: int, handle: int) -> None:
        """End an object and what is below it; an unknown one is nothing to be done."""
        owner = self._client(file, client)
        if handle == client:
            self.counts.frees += 1
            self._end_client(client)
        elif handle in owner.objects:
            self.counts.frees += 1
            owner.objects[owner.objects[handle].parent].children.discard(handle)
            self._end(owner, handle)

    def check(self, file: int, client: int) -> None:
        """Raise Rejected unless the client may be used through this file."""
        self._client(file, client)

    def has(self, client: int, handle: int) -> bool:
        """Return whether an object lives."""
        owner = self._clients.get(client)
        return owner is not None and handle in owner.objects

    def end_file(self, file: int) -> None:
        """End the clients of an open file that no process holds any more."""
        for client in self._of_file.pop(file, ()):
            self._end_client(client)

    def reject(self, status: int) -> Rejected:
        """Return what to raise for a call that is rejected before it reaches the resource manager."""
        return self._rejection(status)

    # The books

    def contexts(self) -> Iterator[LiveContext]:
        """Return every context that lives."""
        for client, owner in self._clients.items():
            for handle, each in owner.objects.items():
                if each.rm_class == abi.CONTEXT_SHARE:
                    yield LiveContext(client, handle, owner.pid, _instance_above(owner, each))

    def clients(self) -> Iterator[LiveClient]:
        """Return every client that lives."""
        for client, owner in self._clients.items():
            yield LiveClient(client, owner.pid, owner.file, len(owner.objects))

    # Inside

    def _rejection(self, status: int) -> Rejected:
        self.counts.rejected += 1
        return Rejected(status)

    def _client(self, file: int, client: int) -> _Client:
        owner = self._clients.get(client)
        if owner is None or owner.file != file:
            raise self._rejection(abi.INVALID_CLIENT)
        return owner

    def _chosen(self) -> int:
        handle = self._next_object
        self._next_object += 1
        return handle

    def _add(self, owner: _Client, handle: int, made: _Object) -> None:
        owner.objects[handle] = made
        self._objects += 1
        self.counts.allocated += 1
        self.counts.contexts_allocated += made.rm_class == abi.CONTEXT_SHARE

    def _end_client(self, client: int) -> None:
        owner = self._clients.pop(client)
        self._of_file.get(owner.file, set()).discard(client)
        for handle in list(owner.objects):
            self._forget(owner, handle)

    def _end(self, owner: _Client, handle: int) -> None:
        pending = [handle]
        while pending:
            each = pending.pop()
            pending += owner.objects[each].children
            self._forget(owner, each)

    def _forget(self, owner: _Client, handle: int) -> None:
        ended = owner.objects.pop(handle)
        self._objects -= 1
        self.counts.freed += 1
        self.counts.contexts_freed += ended.rm_class == abi.CONTEXT_SHARE


def _instance_above(owner: _Client, below: _Object) -> int | None:
    found: _Object | None = below
    while found is not None and found.rm_class != abi.DEVICE:
        found = owner.objects.get(found.parent)
    return None if found is None else found.instance
