"""What a standing-by agent remembers, so that it can take over at once.

While another agent serves the node, the engine does not run, but the GPUs are watched. Of the facts that
the sources emit, the newest of each kind is kept; at the take-over they are emitted to an engine whose state
comes from the file that the other agent left. What the other agent has seen too is not emitted again: it is
in the file, with what became of it.

Invariants: the room needed is the number of keys, as in the inbox.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final

from agent.bus import Inbox
from agent.model.facts import (
    DriverCallAnswered,
    DriverCallOverdue,
    DriverReady,
    DriverUnavailable,
    Fact,
    FactsLost,
    GpuCallFailed,
    GpuCallOverdue,
    GpuProbePassed,
    XidReported,
)
from agent.model.policy import SECOND_NS

POLL_S: Final = 1.0
"""How often the facts that the sources emitted are read."""
RECENT_NS: Final = 10 * SECOND_NS
"""An XID that is older was written down by the agent that served."""


class RecentFacts:
    """The newest facts, in the order in which they were last seen."""

    def __init__(self) -> None:
        self._newest: dict[Hashable, tuple[Fact, int]] = {}

    def note(self, fact: Fact, now_ns: int) -> None:
        """Remember a fact, in place of an older one of its key."""
        if fact.key is None or isinstance(fact, FactsLost):
            return
        self._newest.pop(fact.key, None)
        self._newest[fact.key] = (fact, now_ns)

    def recall(self, now_ns: int) -> Iterator[Fact]:
        """Yield what is still true, oldest first."""
        items = list(self._newest.values())
        for position, (fact, at_ns) in enumerate(items):
            later = (newer for newer, _ in items[position + 1 :])
            if isinstance(fact, XidReported) and now_ns - at_ns > RECENT_NS:
                continue
            if not _is_over(fact, later):
                yield fact


def _is_over(fact: Fact, later: Iterable[Fact]) -> bool:
    """Return whether something newer ends what a fact reports."""
    match fact:
        case GpuCallFailed() | GpuCallOverdue():
            return any(isinstance(newer, GpuProbePassed) and newer.gpu == fact.gpu for newer in later)
        case DriverUnavailable():
            return any(isinstance(newer, DriverReady) for newer in later)
        case DriverCallOverdue():
            return any(isinstance(newer, DriverCallAnswered | DriverReady) for newer in later)
        case _:
            return False


async def collect_facts_until(
    freed: asyncio.Future[None],
    inbox: Inbox[Fact],
    *,
    after_poll: Callable[[int], None],
    clock: Callable[[], int],
) -> Iterator[Fact]:
    """Collect facts while another agent serves; return what of them is still true when it ended.

    ``after_poll`` is called with each poll's time: it is the sign of life of an agent that stands by.
    """
    recent = RecentFacts()
    while not freed.done():
        await asyncio.wait({freed}, timeout=POLL_S)
        now_ns = clock()
        for item in inbox.pop_all()[0]:
            recent.note(item.fact, now_ns)
        after_poll(now_ns)
    return recent.recall(clock())
