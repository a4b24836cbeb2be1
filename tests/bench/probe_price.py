"""PROBE: what the probe costs the machine, and how much it can report."""

import asyncio
import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Final

from agent.model.rm import RmEvent
from agent.probe import procfs
from agent.probe.kernel import Majors
from agent.probe.probe import Probe
from tests.bench.figures import NS_PER_MS, Absent, Effort, Figure, Measurement, MeasurementError, quantile
from tests.bench.probe_load import DOUBLES, LOADERS, Loader, Tools, other_probes

Taken = dict[str, list[float]]
"""Nanoseconds of each kind of call, of each round."""

_CALLS: Final = 5_000
"""Of each kind, twenty times in each round."""
_PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.2

_ADDED_NS: Final = {
    "getppid": 75,
    "ioctl": 350,
    "rm_ioctl": 1300,
    "context": 1600,
    "open_close_file": 1200,
    "open_close": 1600,
}
"""What a call may cost more with the probe: a system call that is none of its business, an ioctl that is not,
one of the driver's, one that makes or ends a context and is emitted, and an open and close of another file
and of a device. A third more than on a CPU that has to guard every return (AMD Zen 4 with "safe RET", where
getppid alone takes 163 ns); one that need not pays a third of it or less."""

_CONTEXT: Final = 0x9067
_CLIENT: Final = 0xC1D00001
"""As tests/bench/probe_calls.c has them."""

_RATES_PER_S: Final = (10_000, 50_000, 100_000, 200_000, 400_000)
_LOSSLESS_PER_S: Final = 10_000
_DESCRIPTORS: Final = 10_000
_HOLDERS: Final = 10
_SCAN_MS: Final = 30
_PROCFS_SCAN_MS: Final = 150


async def _price(effort: Effort) -> AsyncGenerator[Figure | Absent, None]:
    """Measure on device doubles with tier syscalls, which is the dear one.

    Rounds without the probe and with each loader's alternate. A round's value is the best of twenty blocks
    of calls, in CPU time; the figure is the best over the rounds, less that without a probe: what others do
    only adds to it.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        tools = Tools(Path(folder))
        async for figure in _calls(tools, effort.of(quick=1, usual=5, full=15)):
            yield figure
        async for figure in _events(tools, effort.of(quick=1, usual=2, full=5)):
            yield figure
        async for figure in _scans(tools, effort.of(quick=5, usual=50, full=200)):
            yield figure


async def _calls(tools: Tools, rounds: int) -> AsyncGenerator[Figure | Absent, None]:
    usable = [loader for loader in LOADERS if tools.why_not(loader) is None]
    without: Taken = defaultdict(list)
    with_probe: dict[Loader, Taken] = {loader: defaultdict(list) for loader in usable}
    for _ in range(rounds):
        await _undisturbed_round(tools, without, probes=0)
        for loader in usable:
            async with tools.probe(loader) as probe:
                # As in the agent: events are read while they come.
                probe.ring.subscribe(asyncio.get_running_loop(), lambda _events: None)
                await _undisturbed_round(tools, with_probe[loader], probes=1)
    for kind, values in without.items():
        yield Figure(f"PROBE.off.{kind}", min(values), "ns", None)
    for loader in LOADERS:
        why = tools.why_not(loader)
        for kind, target in _ADDED_NS.items():
            name = f"PROBE.{loader}.{kind}_added"
            if why is not None:
                yield Absent(name, why)
            else:
                added = min(with_probe[loader][kind]) - min(without[kind])
                yield Figure(name, added, "ns", target)


async def _undisturbed_round(tools: Tools, into: Taken, *, probes: int) -> None:
    """Measure while just so many probes are in the kernel; others would be in the figure.

    Raises MeasurementError if that does not come about.
    """
    async with _patience():
        while True:
            before = other_probes()
            output = (
                await tools.run("measure", str(_CALLS), tools.file, tools.node) if before == probes else ""
            )
            if before == probes == other_probes():
                break
            await asyncio.sleep(_POLL_S)
    for line in output.splitlines():
        kind, value = line.split()
        into[kind].append(float(value))


@contextlib.asynccontextmanager
async def _patience() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            yield
    except TimeoutError:
        raise MeasurementError(
            "another agent's probe is in the kernel, whose price would be in every figure; stop that agent"
        ) from None


async def _events(tools: Tools, seconds: int) -> AsyncGenerator[Figure, None]:
    """Find the highest rate at which none is lost: the ring has its usual size, the reader an event loop."""
    async with tools.probe(tools.quickest) as probe:
        lossless = 0.0
        for rate in _RATES_PER_S:
            sent, seen, lost = await _send(tools, probe, rate, seconds)
            if lost or seen < sent:
                break
            lossless = sent / seconds
    yield Figure("PROBE.events_without_loss", lossless, "1/s", _LOSSLESS_PER_S, at_least=True)


async def _send(tools: Tools, probe: Probe, per_s: int, seconds: int) -> tuple[int, int, int]:
    """Return how many events were sent, how many of them were read, and how many were lost."""
    seen = 0

    def count(events: list[RmEvent]) -> None:
        nonlocal seen
        seen += sum(event.rm_class == _CONTEXT and event.client == _CLIENT for event in events)

    lost = probe.read_statistics().lost
    probe.ring.subscribe(asyncio.get_running_loop(), count)
    sent = int(await tools.run("send", str(per_s), str(seconds), tools.node))
    probe.ring.unsubscribe()
    while events := probe.ring.read():
        count(events)
    return sent, seen, probe.read_statistics().lost - lost


async def _scans(tools: Tools, times: int) -> AsyncGenerator[Figure, None]:
    """Find the holders of files, by the iterator in the kernel and by /proc alone; in CPU time."""
    files = _DESCRIPTORS // _HOLDERS
    async with tools.probe(tools.quickest) as probe:
        with tools.holders(_HOLDERS, files, tools.node):
            found = sum(held.fds for held in probe.scan().held)
            if found < _DESCRIPTORS:
                raise MeasurementError(f"the scan found {found} of {_DESCRIPTORS} descriptors")
            in_kernel = _timed(probe.scan, times)
            in_proc = _timed(lambda: procfs.scan(majors=Majors(DOUBLES.nvidia_major)), max(3, times // 5))
    yield Figure("PROBE.scan_10000_descriptors.p50", quantile(in_kernel, 0.5), "ms", _SCAN_MS)
    yield Figure("PROBE.procfs_scan_10000_descriptors.p50", quantile(in_proc, 0.5), "ms", _PROCFS_SCAN_MS)


def _timed(scan: Callable[[], object], times: int) -> list[float]:
    """Return what each run took, in milliseconds of CPU time."""
    times_ms: list[float] = []
    for _ in range(times):
        began_ns = time.thread_time_ns()
        scan()
        times_ms.append((time.thread_time_ns() - began_ns) / NS_PER_MS)
    return times_ms


PRICE: Final = Measurement("PROBE", "the probe: what calls cost more, events a second, scans", _price)
