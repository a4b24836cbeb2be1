"""One client of the driver's resource manager (RM): the tree of its objects, and the contexts among them.

Invariants: an object dies with its parent. Handles are reused, so of two objects with one name the later
counts. Wrong events may make a ring of a tree; every loop here ends on one.
Sources: facts of the driver are those of open-gpu-kernel-modules (rs_server.c, escape.c, nvos.h).
"""

from typing import Final, NamedTuple

import msgspec

from agent.model.ids import GpuUuid

MAX_DEPTH: Final = 16
"""From a context to its device; the driver's trees are four deep."""

ROOTS: Final = frozenset({0x0000, 0x0001, 0x0041})
DEVICE: Final = 0x0080

NO_INSTANCE: Final = 0xFFFFFFFF
"""The probe's value for "no device instance"."""


class Marker(NamedTuple):
    """Which object marks a context, of CUDA or of graphics.

    Each context has one FERMI_CONTEXT_SHARE_A. Other markers, should a driver differ: the debugger object
    (0x83de), or the channel groups (0xa06c), of which a context makes several at once: those of one
    client and parent that are less than ``gap_ns`` apart are one context.
    """

    rm_class: int = 0x9067
    gap_ns: int = 0


CONTEXT_SHARE: Final = Marker()
CHANNEL_GROUPS: Final = Marker(0xA06C, 250_000_000)
DEBUGGER: Final = Marker(0x83DE)


class Object(msgspec.Struct):
    """An object in a client."""

    rm_class: int
    parent: int
    instance: int
    at_ns: int
    context: int | None = None
    """The context that it belongs to: the handle of that context's first marker."""


class Client(msgspec.Struct):
    """A client and its objects."""

    handle: int
    file: int
    owner: int
    at_ns: int
    whole: bool
    """Its root is known, so every parent in it is."""
    sure: bool = True
    """False: its file may be gone, and the address reused by another."""
    objects: dict[int, Object] = msgspec.field(default_factory=dict)
    children: dict[int, set[int]] = msgspec.field(default_factory=dict)
    markers: dict[int, int] = msgspec.field(default_factory=dict)
    """Live markers of each live context, by the handle of the first."""
    newest: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    """When the newest marker under a parent was made, and its context."""
    gpus: set[GpuUuid] = msgspec.field(default_factory=set)
    """The GPUs that it was registered for with unified memory."""

    @property
    def size(self) -> int:
        """Its entries: itself and its objects."""
        return 1 + len(self.objects)

    def add(self, handle: int, made: Object, marker: Marker) -> None:
        """Add an object with a free handle; a marker is of its own context, or of that of its burst."""
        self.objects[handle] = made
        self.children.setdefault(made.parent, set()).add(handle)
        if made.rm_class != marker.rm_class:
            return
        at_ns, context = self.newest.get(made.parent, (0, handle))
        is_part = context in self.markers and 0 <= made.at_ns - at_ns < marker.gap_ns
        made.context = context if is_part else handle
        self.markers[made.context] = self.markers.get(made.context, 0) + 1
        self.newest[made.parent] = (made.at_ns, made.context)

    def unmark(self, handle: int) -> bool:
        """Remove the mark of an object; return whether its context ended with it."""
        context = self.objects[handle].context
        if context is None:
            return False
        self.markers[context] -= 1
        if self.markers[context]:
            return False
        del self.markers[context]
        return True

    def with_descendants(self, handle: int) -> list[int]:
        """Return an object and everything below it."""
        found = {handle: None}
        todo = [handle]
        while todo:
            below = [each for each in self.children.get(todo.pop(), ()) if each not in found]
            found.update(dict.fromkeys(below))
            todo += below
        return list(found)

    def remove(self, doomed: list[int]) -> None:
        """Remove an object, the first, with everything below it."""
        parent = self.objects[doomed[0]].parent
        siblings = self.children[parent]
        siblings.discard(doomed[0])
        if not siblings:
            # A parent that is older than the probe is not in the tree itself.
            del self.children[parent]
            self.newest.pop(parent, None)
        for each in doomed:
            del self.objects[each]
            self.children.pop(each, None)
            self.newest.pop(each, None)

    def instance_of(self, handle: int) -> int:
        """Return the device instance of the device that an object is, or lies under."""
        for _ in range(MAX_DEPTH):
            known = self.objects.get(handle)
            if known is None:
                break
            if known.rm_class == DEVICE:
                return known.instance
            handle = known.parent
        return NO_INSTANCE
