"""Clients in open files that nobody is seen to hold: those are gone, or on their way in a message.

Invariants: what is here counts for nothing, and comes back whole when somebody is seen with the file. It is
taken for gone after a time, or when there is too much of it: of the process that made most, what came first.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from agent.core.shares import Shares
from agent.core.usage.client_tree import Client
from agent.model.ids import GpuUuid

MAX_QUARANTINED: Final = 4_096
"""Clients and objects."""
QUARANTINE_NS: Final = 60_000_000_000

Counted = Mapping[GpuUuid | None, int]


class QuarantinedClient(NamedTuple):
    """A client, and what was counted as freed when it was put here."""

    client: Client
    freed: Counted


class Quarantine:
    """What was put aside, by file; where there is too much, the process that made most loses its oldest."""

    def __init__(self, max_size: int | None = None) -> None:
        self._files: Shares[int, int, tuple[int, list[QuarantinedClient]]] = Shares(
            MAX_QUARANTINED if max_size is None else max_size
        )
        """What came first first, with the time."""
        self._owners: dict[int, int] = {}
        """Clients of each owner."""

    def add(self, file: int, clients: Iterable[QuarantinedClient], now_ns: int) -> list[QuarantinedClient]:
        """Take what was made with a file; return what there is no room for any more."""
        found = list(clients)
        size = sum(client.size for client, _ in found)
        for client, _ in found:
            self._owners[client.owner] = self._owners.get(client.owner, 0) + 1
        lost = self._files.put(found[0].client.owner, file, (now_ns, found), size)
        return [each for entry in lost for each in self._without_owners(entry.value[1])]

    def pop(self, file: int) -> list[QuarantinedClient]:
        """Return what was made with a file, and keep it no more."""
        entry = self._files.pop(file)
        return [] if entry is None else self._without_owners(entry.value[1])

    def _without_owners(self, found: list[QuarantinedClient]) -> list[QuarantinedClient]:
        for client, _ in found:
            self._owners[client.owner] -= 1
            if not self._owners[client.owner]:
                del self._owners[client.owner]
        return found

    def files(self) -> tuple[int, ...]:
        """Return the files of which there is something here."""
        return tuple(entry.key for entry in self._files)

    def files_of(self, owner: int) -> tuple[int, ...]:
        """Return the files in which an owner has something here."""
        if owner not in self._owners:
            return ()
        return tuple(
            entry.key for entry in self._files if any(client.owner == owner for client, _ in entry.value[1])
        )

    def expired(self, now_ns: int) -> Iterator[int]:
        """Yield the files that are to be taken, one by one, since they were here too long."""
        while (entry := next(iter(self._files), None)) is not None and now_ns - entry.value[
            0
        ] >= QUARANTINE_NS:
            yield entry.key

    def has_owner(self, owner: int) -> bool:
        """Return whether a process made something that is here."""
        return owner in self._owners

    def transfer(self, owner: int, to: int) -> None:
        """Take that what one owner made is another's after all."""
        for file in self.files_of(owner):
            entry = self._files.get(file)
            for client, _ in () if entry is None else entry.value[1]:
                client.owner = to if client.owner == owner else client.owner
        if owner in self._owners:
            self._owners[to] = self._owners.get(to, 0) + self._owners.pop(owner)
