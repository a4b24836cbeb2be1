"""Clients in open files that nobody is seen to hold: those are gone, or on their way in a message.

Invariants: what is here counts for nothing, and comes back whole when somebody is seen with the file. It is
taken for gone after a time, or when there is too much of it, what came first first.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from agent.core.rm_trees import Client
from agent.model.ids import GpuUuid

MAX_ASIDE: Final = 4_096
"""Clients and objects."""
ASIDE_NS: Final = 60_000_000_000

Counted = Mapping[GpuUuid | None, int]


class PutAside(NamedTuple):
    """A client, and what was counted as freed when it was put here."""

    client: Client
    freed: Counted


class Aside:
    """What was put aside, by file."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, list[PutAside]]] = {}
        """What came first first, with the time."""
        self._owners: dict[int, int] = {}
        """Clients of each owner."""
        self._size = 0

    def put(self, file: int, clients: Iterable[PutAside], now_ns: int) -> None:
        """Take what was made with a file."""
        found = list(clients)
        self._files[file] = (now_ns, found)
        for client, _ in found:
            self._size += client.size
            self._owners[client.owner] = self._owners.get(client.owner, 0) + 1

    def take(self, file: int) -> list[PutAside]:
        """Return what was made with a file, and keep it no more."""
        _, found = self._files.pop(file, (0, []))
        for client, _ in found:
            self._size -= client.size
            self._owners[client.owner] -= 1
            if not self._owners[client.owner]:
                del self._owners[client.owner]
        return found

    def files(self) -> tuple[int, ...]:
        """Return the files of which there is something here."""
        return tuple(self._files)

    def files_of(self, owner: int) -> tuple[int, ...]:
        """Return the files in which an owner has something here."""
        if owner not in self._owners:
            return ()
        return tuple(
            file
            for file, (_, found) in self._files.items()
            if any(client.owner == owner for client, _ in found)
        )

    def over(self, now_ns: int) -> Iterator[int]:
        """Yield the files that are to be taken, one by one, since they were here too long or are too much."""
        for file, (since_ns, _) in tuple(self._files.items()):
            if now_ns - since_ns < ASIDE_NS and self._size <= MAX_ASIDE:
                return
            yield file

    def has_owner(self, owner: int) -> bool:
        """Return whether a process made something that is here."""
        return owner in self._owners

    def give(self, owner: int, to: int) -> None:
        """Take that what one owner made is another's after all."""
        for file in self.files_of(owner):
            for client, _ in self._files[file][1]:
                client.owner = to if client.owner == owner else client.owner
        if owner in self._owners:
            self._owners[to] = self._owners.get(to, 0) + self._owners.pop(owner)
