"""Which watchers of GPUs there are to be, from what NVML counts and what the watchers know: pure.

NVML numbers the GPUs that it lists from 0, and numbers them anew when one appears or disappears. A watcher
begins with an index, and from its first probe on follows one GPU by its PCI address.

Invariants: a GPU that answers keeps its watcher, whatever its index is. A GPU that does not answer keeps it
for as long as NVML counts it. No GPU has two watchers for longer than a round.
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto

import msgspec

from agent.model.ids import GpuUuid


class Watched(msgspec.Struct, frozen=True):
    """What a watcher knows of its GPU."""

    index: int
    uuid: GpuUuid | None = None
    """None: not identified yet."""
    is_gone: bool = False
    """NVML has no GPU at its address, or another watcher has the GPU."""
    answers: bool = False
    """The newest probe found the GPU."""
    is_overdue: bool = False
    """A call is past its deadline."""


class Found(Enum):
    """What a probe that found a GPU means for the list."""

    SAME = auto()
    MOVED = auto()
    """Its index changed, so those of others may have changed too."""
    TWICE = auto()
    """Another watcher has this GPU: the indexes changed during the probe."""


def surplus(watched: Sequence[Watched], count: int) -> list[int]:
    """Return the positions of the watchers to drop where NVML counts so many GPUs.

    Those that are gone, and of more than the count those that do not answer: first one that has identified
    no GPU, then one whose calls return errors, last one whose call hangs.
    """
    gone = [position for position, each in enumerate(watched) if each.is_gone]
    mute = [position for position, each in enumerate(watched) if not each.is_gone and not each.answers]
    mute.sort(key=lambda position: (watched[position].uuid is not None, watched[position].is_overdue))
    return gone + mute[: max(0, len(watched) - len(gone) - count)]


def unwatched(watched: Sequence[Watched], count: int) -> list[int]:
    """Return the indexes that watchers are to be started for."""
    used = {each.index for each in watched}
    free = [index for index in range(count) if index not in used]
    return free[: max(0, count - len(watched))]


def found(own: Watched, others: Iterable[Watched], uuid: GpuUuid, index: int) -> Found:
    """Return what it means that a watcher found a GPU with this index."""
    if own.uuid is None:
        return Found.TWICE if any(each.uuid == uuid for each in others) else Found.SAME
    return Found.SAME if own.index == index else Found.MOVED
