"""S10: how many facts go through the inbox, and that each is accounted for."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from agent.bus import Inbox
from agent.model.ids import SourceName
from tests.bench.figures import Effort, Figure, Measurement

_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class _Call:
    """A fact of high rate: it has no key, so it may be lost, and then is counted."""

    number: int
    source: SourceName

    @property
    def key(self) -> None:
        """None: it is never merged."""
        return

    def merged_with(self, newer: "_Call") -> "_Call":
        """Never asked for."""
        return newer


async def _facts(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Put facts from four threads as fast as they can, while the loop takes them as the engine does.

    Sustained is what was taken a second, from the first put to the last fact taken; what was lost is not in
    it. Then every fact must be accounted for: seen plus lost is what was sent.
    """
    inbox: Inbox[_Call] = Inbox(clock=time.monotonic_ns)
    per_thread = effort.of(quick=50_000, usual=500_000, full=2_500_000)
    done = threading.Barrier(_THREADS + 1)

    def put(source: SourceName) -> None:
        for number in range(per_thread):
            inbox.put(_Call(number, source))
        done.wait()

    names = [SourceName(f"thread-{number}") for number in range(_THREADS)]
    threads = [threading.Thread(target=put, args=(name,), daemon=True) for name in names]
    began_ns = time.monotonic_ns()
    for thread in threads:
        thread.start()
    seen, lost = await _pop_all(inbox, per_thread * _THREADS)
    took_s = (time.monotonic_ns() - began_ns) / 1e9
    done.wait()
    for thread in threads:
        thread.join()
    inbox.close()
    yield Figure("S10.facts_sustained", seen / took_s, "1/s", 100_000, at_least=True)
    yield Figure("S10.facts_unaccounted", abs(per_thread * _THREADS - seen - lost), "facts", 0)


async def _pop_all(inbox: Inbox[_Call], sent: int) -> tuple[int, int]:
    """Pop until all that was sent is seen or known to be lost, or nothing more comes for a second."""
    seen = lost = 0
    while seen + lost < sent:
        await inbox.wait_nonempty(time.monotonic_ns() + 1_000_000_000)
        batch, losses = inbox.pop_all()
        if not batch and not losses:
            break
        seen += len(batch)
        lost += sum(loss.count for loss in losses)
        await asyncio.sleep(0)
    return seen, lost


FACTS: Final = Measurement("S10", "facts through the inbox from threads", _facts)
