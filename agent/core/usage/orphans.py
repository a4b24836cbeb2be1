"""Orphans: clients of processes that are gone. Each holder has a few records, and one for the rest.

Invariants: each orphan is in exactly one record, so clients and contexts add up. A holder is a pod, or a
cgroup of the host: forked processes share. The number of records is bounded; adding or removing an orphan
costs the same however many there are.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from agent.model.ids import GpuUuid
from agent.model.structs import replace
from agent.model.usage import Orphan, ProcessKey

MAX_APART: Final = 8
"""Orphans of one holder that have a record each."""
MAX_GROUPS: Final = 512
"""Holders and GPUs that have records of their own; those beyond share one for each GPU."""


class _Name(NamedTuple):
    holder: Hashable
    gpu: GpuUuid | None
    is_counted: bool
    """Whether its contexts are known."""


_Key = tuple[ProcessKey, GpuUuid | None]


class _Group:
    __slots__ = ("clients", "contexts", "orphans", "records")

    def __init__(self) -> None:
        self.orphans: OrderedDict[_Key, Orphan] = OrderedDict()
        self.clients = self.contexts = 0
        self.records: tuple[Orphan, ...] | None = None


class OrphanGroups:
    """All orphans; see the invariants above."""

    def __init__(self, *, max_apart: int = MAX_APART, max_groups: int = MAX_GROUPS) -> None:
        self._max_apart = max_apart
        self._max_groups = max_groups
        self._groups: dict[_Name, _Group] = {}
        self._names: dict[_Key, _Name] = {}
        self._all: tuple[Orphan, ...] | None = ()

    def add(self, orphan: Orphan, holder: Hashable) -> None:
        """Add the clients that a process left on a GPU, under the holder that keeps them."""
        name = _Name(holder, orphan.gpu, orphan.contexts is not None)
        if name not in self._groups and len(self._groups) >= self._max_groups:
            name = name._replace(holder=None)
        key = (orphan.owner.key, orphan.gpu)
        self._names[key] = name
        group = self._groups.setdefault(name, _Group())
        group.orphans[key] = orphan
        self._add_counts(group, orphan, 1)

    def remove(self, orphan: Orphan) -> None:
        """Remove an orphan that was added."""
        key = (orphan.owner.key, orphan.gpu)
        name = self._names.pop(key)
        group = self._groups[name]
        self._add_counts(group, group.orphans.pop(key), -1)
        if not group.orphans:
            del self._groups[name]

    def _add_counts(self, group: _Group, orphan: Orphan, sign: int) -> None:
        group.clients += sign * orphan.clients
        group.contexts += sign * (orphan.contexts or 0)
        group.records = self._all = None

    def records(self) -> tuple[Orphan, ...]:
        """Return the records, by pid of the owner, then GPU; the same object if nothing changed."""
        if self._all is None:
            found = [record for group in self._groups.values() for record in self._records_of(group)]
            self._all = tuple(sorted(found, key=lambda each: (each.owner.key, each.gpu or "")))
        return self._all

    def _records_of(self, group: _Group) -> tuple[Orphan, ...]:
        if group.records is None:
            group.records = tuple(self._new_records(group))
        return group.records

    def _new_records(self, group: _Group) -> Iterator[Orphan]:
        *apart, last = islice(group.orphans.values(), self._max_apart + 1)
        yield from apart
        more = len(group.orphans) - len(apart) - 1
        if not more:
            yield last
            return
        contexts = group.contexts - sum(each.contexts or 0 for each in apart)
        yield replace(
            last,
            clients=group.clients - sum(each.clients for each in apart),
            contexts=None if last.contexts is None else contexts,
            more=more,
        )
