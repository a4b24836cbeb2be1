"""What other work on the machine takes from a measurement, and what the agent itself takes for it.

The kernel counts for each thread how long it ran, and how long it was ready to run and had no CPU. A duration
with the latter in it depends on the machine as much as on the agent. So durations are also given of those
trials alone in which hardly any thread waited, and the agent's own CPU time beside them.

Source: Documentation/scheduler/sched-stats.rst of Linux, /proc/PID/schedstat.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench.figures import NS_PER_MS, Figure, beside_yardstick, median_and_tail, quantile

DISTURBED_NS: Final = 100_000
"""A trial in which threads waited longer than this, all together, is disturbed."""


class Times(NamedTuple):
    """How long threads ran, and how long they waited for a CPU, in nanoseconds."""

    ran_ns: int
    waited_ns: int


class Trial(NamedTuple):
    """One duration, what the threads of agent and client waited for a CPU in it, and what the agent ran."""

    took_ns: float
    waited_ns: int
    ran_ns: int


def times_of(thread: str = "thread-self") -> Times:
    """Return the times of a thread; ``PID`` is the main thread of a process, ``PID/task/TID`` any."""
    ran, waited, _ = Path(f"/proc/{thread}/schedstat").read_text(encoding="ascii").split()
    return Times(int(ran), int(waited))


class Bystander:
    """Reads the threads of an agent and of this process before and after each trial."""

    def __init__(self, agent: int) -> None:
        """``agent`` is its process id."""
        self._agent = agent
        self._before: dict[str, Times] = {}
        self.begin()

    def begin(self) -> None:
        """Read them before a trial."""
        self._before = dict(self._read())

    def trial(self, took_ns: float) -> Trial:
        """Read them after a trial; threads that ended in it do not count."""
        ran_ns = waited_ns = 0
        for thread, now in self._read():
            before = self._before.get(thread, Times(0, 0))
            waited_ns += now.waited_ns - before.waited_ns
            if thread.startswith(f"{self._agent}/"):
                ran_ns += now.ran_ns - before.ran_ns
        return Trial(took_ns, waited_ns, ran_ns)

    def _read(self) -> Iterator[tuple[str, Times]]:
        for pid in (self._agent, os.getpid()):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                name = f"{pid}/task/{thread.name}"
                with suppress(FileNotFoundError, ProcessLookupError):
                    yield name, times_of(name)


def undisturbed(name: str, trials: Sequence[Trial], *, p50_ms: float, p99_ms: float) -> Iterator[Figure]:
    """Yield the figures of the undisturbed trials, and how many of all these are."""
    calm = _calm(trials)
    yield Figure(f"{name}_undisturbed.share", 100 * len(calm) / len(trials), "%", None)
    if calm:
        yield from median_and_tail(f"{name}_undisturbed", calm, p50_ms=p50_ms, p99_ms=p99_ms)


def undisturbed_beside_yardstick(
    name: str, ours: Sequence[Trial], yardstick: Sequence[Trial], *, p50: float, p99: float
) -> Iterator[Figure]:
    """Yield the same with ratios to the undisturbed trials of the yardstick as targets."""
    calm, beside = _calm(ours), _calm(yardstick)
    yield Figure(f"{name}_undisturbed.share", 100 * len(calm) / len(ours), "%", None)
    if calm and beside:
        yield from beside_yardstick(f"{name}_undisturbed", calm, beside, p50=p50, p99=p99)


def _calm(trials: Sequence[Trial]) -> list[float]:
    return [trial.took_ns for trial in trials if trial.waited_ns <= DISTURBED_NS]


def agent_cpu(
    name: str, ran_ns: Sequence[int], *, yardstick_ns: Sequence[int] = (), p99_ms: float | None = None
) -> Iterator[Figure]:
    """Yield what the agent ran for it, which other work on the machine hardly changes."""
    for part, fraction, target in (("p50", 0.5, None), ("p99", 0.99, p99_ms)):
        beside = quantile(yardstick_ns, fraction) / NS_PER_MS if yardstick_ns else None
        ran_ms = quantile(ran_ns, fraction) / NS_PER_MS
        yield Figure(f"{name}_cpu.{part}", ran_ms, "ms", target, yardstick=beside)
