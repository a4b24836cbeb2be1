"""Decides which rows of the kernel's map are of live objects.

A row outlives its object where that died with its parent, and where its file's address was reused.
Pure and without state, so that any thread may call it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from agent.core.usage.client_tree import MAX_DEPTH, ROOTS
from agent.model.rm import REGISTRATION, RmObject, joined


class Removed(NamedTuple):
    """An object that died without an event of its own: its row is still in the kernel's map."""

    client: int
    handle: int
    at_ns: int
    """When it was made; a newer row is of another object."""


class Rows(msgspec.Struct, frozen=True):
    """The rows of the kernel's map, live and stale ones apart."""

    living: tuple[RmObject, ...]
    """Roots first, then as they were made."""
    stale: tuple[Removed, ...]
    registered: tuple[tuple[int, int, int], ...] = ()
    """File, the nvidiactl that it refers to, and since when."""


def live_rows(rows: Iterable[RmObject], opened: Mapping[int, int], older: AbstractSet[int]) -> Rows:
    """Separate the rows of live objects from stale ones and registrations.

    ``opened`` has the time of each file's open, where it is known: older rows are of an earlier file at that
    address. A registration that is older than its nvidiactl is stale too, since the file that kept it open
    was closed. In files that are ``older`` than the probe parents may have no row.
    """
    there: dict[tuple[int, int], RmObject] = {}
    stale: list[Removed] = []
    registered: list[tuple[int, int, int]] = []
    for row in rows:
        is_registration = row.rm_class == REGISTRATION
        control = joined(row.parent, row.gpu) if is_registration else row.file
        if row.at_ns < max(opened.get(row.file, 0), opened.get(control, 0)):
            stale.append(Removed(row.client, row.handle, row.at_ns))
        elif is_registration:
            registered.append((row.file, control, row.at_ns))
        else:
            there[row.client, row.handle] = row
    lives = _lives(there, older)
    stale += [Removed(*name, row.at_ns) for name, row in there.items() if not lives[name]]
    living = (row for name, row in there.items() if lives[name])
    return Rows(tuple(sorted(living, key=_order)), tuple(stale), tuple(registered))


def _order(row: RmObject) -> tuple[bool, int]:
    return row.rm_class not in ROOTS, row.at_ns


def _lives(rows: Mapping[tuple[int, int], RmObject], older: AbstractSet[int]) -> dict[tuple[int, int], bool]:
    """Return for each row whether its ancestors live and it fits below them."""
    lives: dict[tuple[int, int], bool] = {}
    for name in rows:
        path: list[tuple[int, int]] = []
        at: tuple[int, int] | None = name
        while at is not None and at not in lives and len(path) < MAX_DEPTH:
            path.append(at)
            at = _above(rows, rows[at])
        above = True if at is None else lives.get(at, False)
        for each in reversed(path):
            above = lives[each] = above and _fits(rows, rows[each], older)
    return lives


def _above(rows: Mapping[tuple[int, int], RmObject], row: RmObject) -> tuple[int, int] | None:
    """Return the name of the parent's row; None: the row is a root, or its parent has no row."""
    if row.rm_class in ROOTS:
        return None
    name = (row.client, row.parent)
    return name if name in rows else None


def _fits(rows: Mapping[tuple[int, int], RmObject], row: RmObject, older: AbstractSet[int]) -> bool:
    """Return whether a row can be of a live object, if its parent is."""
    if row.rm_class in ROOTS:
        return True
    parent = rows.get((row.client, row.parent))
    if parent is not None:
        # A younger parent is another object, which got the handle later.
        return parent.at_ns <= row.at_ns
    return (row.client, row.client) not in rows and row.file in older
