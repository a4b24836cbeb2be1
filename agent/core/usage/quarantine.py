"""Quarantine for clients whose open file has no known holder: the file is closed, or in a message.

Invariants: a quarantined client counts nowhere, and returns whole when a process holds the file. It counts as
gone after a time, or when there is no room: then the process with the most clients loses its oldest.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from agent.core.shares import Shares
from agent.core.usage.bounds import BOUNDS, Bounds
from agent.core.usage.client_tree import Client
from agent.model.ids import GpuUuid

Counted = Mapping[GpuUuid | None, int]


class QuarantinedClient(NamedTuple):
    """A client, and the contexts that were counted as freed with it."""

    client: Client
    freed: Counted


class Quarantine:
    """Quarantined clients by file; where there is no room, the process with the most loses its oldest."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self._expires_ns: Final = bounds.quarantine_ns
        self._files: Shares[int, int, tuple[int, list[QuarantinedClient]]] = Shares(bounds.quarantined)
        """In the order of arrival, with the time."""
        self._owners: dict[int, int] = {}
        """Clients of each owner."""

    def add(self, file: int, clients: Iterable[QuarantinedClient], now_ns: int) -> list[QuarantinedClient]:
        """Add the clients of a file; return the clients that are evicted for it."""
        found = list(clients)
        size = sum(client.size for client, _ in found)
        for client, _ in found:
            self._owners[client.owner] = self._owners.get(client.owner, 0) + 1
        lost = self._files.put(found[0].client.owner, file, (now_ns, found), size)
        return [each for entry in lost for each in self._without_owners(entry.value[1])]

    def pop(self, file: int) -> list[QuarantinedClient]:
        """Remove and return the clients of a file."""
        entry = self._files.pop(file)
        return [] if entry is None else self._without_owners(entry.value[1])

    def _without_owners(self, found: list[QuarantinedClient]) -> list[QuarantinedClient]:
        for client, _ in found:
            self._owners[client.owner] -= 1
            if not self._owners[client.owner]:
                del self._owners[client.owner]
        return found

    def files(self) -> tuple[int, ...]:
        """Return the files with quarantined clients."""
        return tuple(entry.key for entry in self._files)

    def files_of(self, owner: int) -> tuple[int, ...]:
        """Return the files with quarantined clients of an owner."""
        if owner not in self._owners:
            return ()
        return tuple(
            entry.key for entry in self._files if any(client.owner == owner for client, _ in entry.value[1])
        )

    def expired(self, now_ns: int) -> Iterator[int]:
        """Yield, one by one, the files that were here too long; the caller pops each before the next."""
        while (entry := next(iter(self._files), None)) is not None and (
            now_ns - entry.value[0] >= self._expires_ns
        ):
            yield entry.key

    def has_owner(self, owner: int) -> bool:
        """Return whether an owner has a quarantined client."""
        return owner in self._owners

    def transfer(self, owner: int, to: int) -> None:
        """Give the clients of one owner to another."""
        for file in self.files_of(owner):
            entry = self._files.get(file)
            for client, _ in () if entry is None else entry.value[1]:
                client.owner = to if client.owner == owner else client.owner
        if owner in self._owners:
            self._owners[to] = self._owners.get(to, 0) + self._owners.pop(owner)
