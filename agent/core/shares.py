"""A bounded table with a share for each client, so that one client's excess costs no other client an entry.

Invariants: the weights of all entries are at most ``total`` and those of one client at most ``share``. What
exceeds a client's share is lost by that client. Where the table is full, the client with the largest part of
it loses: so no client loses to one that has more than itself, and none that has at most ``total`` divided by
the number of clients loses to any. Every loss is counted, by client for the ``named``
clients with most losses: ``put == held + popped + lost``. A put or pop costs its weight, whatever the table
holds. Nothing is kept of a client without entries but its losses.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from heapq import nlargest
from typing import Final, Generic, TypeVar

import msgspec

C = TypeVar("C", bound=Hashable)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NAMED: Final = 64
"""Clients of which the losses are counted apart."""


class Entry(msgspec.Struct, Generic[C, K, V], frozen=True):
    """A value with its key, the client that fills the place, and how much room it takes."""

    client: C
    key: K
    value: V
    weight: int


class SharesStatistics(msgspec.Struct, frozen=True):
    """Weights since the start; ``put == held + popped + lost``."""

    put: int
    held: int
    popped: int
    lost: int


class Shares(Generic[C, K, V]):
    """Entries by key, in the order in which they were put; see the invariants above.

    A client that exceeds its share loses its oldest entry, or with ``rejects`` the one that it puts. A table
    that is full of clients of one entry each evicts the oldest for that of a new client, or with ``rejects``
    rejects it.
    """

    def __init__(
        self, total: int, share: int | None = None, *, rejects: bool = False, named: int = NAMED
    ) -> None:
        self.total: Final = total
        self.share: Final = total if share is None else min(share, total)
        self._rejects = rejects
        self._named = named
        # Not dict: the first entry of one is found by passing the places of all that were removed before.
        self._entries: OrderedDict[K, Entry[C, K, V]] = OrderedDict()
        self._of_client: OrderedDict[C, OrderedDict[K, None]] = OrderedDict()
        self._sizes: dict[C, int] = {}
        self._by_size: dict[int, OrderedDict[C, None]] = {}
        self._largest = 0
        self._losses: dict[C, int] = {}
        self._put = self._popped = self._lost = self._unnamed = self._held = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry[C, K, V]]:
        return iter(self._entries.values())

    def __reversed__(self) -> Iterator[Entry[C, K, V]]:
        return reversed(self._entries.values())

    def get(self, key: K) -> Entry[C, K, V] | None:
        """Return the entry of a key, or None."""
        return self._entries.get(key)

    def of(self, client: C) -> tuple[Entry[C, K, V], ...]:
        """Return the entries of a client, the oldest first."""
        return tuple(self._entries[key] for key in self._of_client.get(client, ()))

    def held_by(self, client: C) -> int:
        """Return the weight of a client's entries."""
        return self._sizes.get(client, 0)

    def clients(self) -> tuple[C, ...]:
        """Return the clients that have entries."""
        return tuple(self._of_client)

    def put(self, client: C, key: K, value: V, weight: int = 1) -> tuple[Entry[C, K, V], ...]:
        """Add an entry as the newest one, in place of any that has the key; return the entries that are lost.

        The new entry is among them where there is no room for it. ``weight`` is at least 1.
        """
        self.pop(key)
        self._put += weight
        entry = Entry(client, key, value, weight)
        if weight > self.share or (self._rejects and self.held_by(client) + weight > self.share):
            self._count_loss(client, weight)
            return (entry,)
        self._entries[key] = entry
        self._of_client.setdefault(client, OrderedDict())[key] = None
        self._resize(client, weight)
        lost: list[Entry[C, K, V]] = []
        while self._sizes.get(client, 0) > self.share:
            lost.append(self._evict(client))
        while self._held > self.total:
            lost.append(self._evict(self._greediest(client)))
        return tuple(lost)

    def evict(self) -> Entry[C, K, V] | None:
        """Remove and return what the largest client loses, or None: for when room elsewhere is short."""
        return self._evict(next(iter(self._by_size[self._largest]))) if self._entries else None

    def touch(self, key: K) -> None:
        """Make an entry the newest one of the table and of its client."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self._of_client[entry.client].move_to_end(key)

    def pop(self, key: K) -> Entry[C, K, V] | None:
        """Remove and return the entry of a key, or None."""
        entry = self._entries.get(key)
        if entry is not None:
            self._remove(entry)
            self._popped += entry.weight
        return entry

    def pop_next(self) -> Entry[C, K, V] | None:
        """Remove and return the oldest entry of the client whose turn it is: each client in turn, or None."""
        if not self._of_client:
            return None
        client = next(iter(self._of_client))
        self._of_client.move_to_end(client)
        return self.pop(next(iter(self._of_client[client])))

    def forget(self, client: C) -> tuple[Entry[C, K, V], ...]:
        """Remove and return all entries of a client, and the name of its losses, which stay counted."""
        entries = self.of(client)
        for entry in entries:
            self.pop(entry.key)
        self._unnamed += self._losses.pop(client, 0)
        return entries

    @property
    def losses(self) -> Mapping[C, int]:
        """What each of the clients with most losses lost; what the others lost is ``unnamed_losses``."""
        return self._losses

    @property
    def unnamed_losses(self) -> int:
        """What clients lost that are not in ``losses``."""
        return self._unnamed

    def statistics(self) -> SharesStatistics:
        """Return the weights that were put, are held, and left."""
        return SharesStatistics(self._put, self._held, self._popped, self._lost)

    def _greediest(self, client: C) -> C:
        """Return the client that loses for an entry that ``client`` just put."""
        largest = self._by_size[self._largest]
        if client in largest and (self._rejects or len(self._of_client[client]) > 1 or len(largest) == 1):
            return client
        return next(iter(largest))

    def _evict(self, client: C) -> Entry[C, K, V]:
        keys = self._of_client[client]
        entry = self._entries[next(reversed(keys) if self._rejects else iter(keys))]
        self._remove(entry)
        self._count_loss(client, entry.weight)
        return entry

    def _remove(self, entry: Entry[C, K, V]) -> None:
        del self._entries[entry.key]
        keys = self._of_client[entry.client]
        del keys[entry.key]
        if not keys:
            del self._of_client[entry.client]
        self._resize(entry.client, -entry.weight)

    def _resize(self, client: C, by: int) -> None:
        self._held += by
        before = self._sizes.get(client, 0)
        after = before + by
        if before:
            of_size = self._by_size[before]
            del of_size[client]
            if not of_size:
                del self._by_size[before]
        if after:
            self._sizes[client] = after
            self._by_size.setdefault(after, OrderedDict())[client] = None
        else:
            del self._sizes[client]
        self._largest = max(self._largest, after)
        while self._largest and self._largest not in self._by_size:
            self._largest -= 1

    def _count_loss(self, client: C, weight: int) -> None:
        self._lost += weight
        self._losses[client] = self._losses.get(client, 0) + weight
        if len(self._losses) > 2 * self._named:
            kept = dict(nlargest(self._named, self._losses.items(), key=lambda each: each[1]))
            self._unnamed += sum(self._losses.values()) - sum(kept.values())
            self._losses = kept
