"""S7 and S8: what the agent takes from the node: memory, and CPU while nothing or a lot happens."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from typing import Final

from tests.bench import probe_footprint, yardstick
from tests.bench.figures import Absent, Effort, Figure, Measurement, MeasurementError
from tests.bench.node import GPU, ROOT, SETTLE_S, BenchNode, bench_node, free_port, share_of_core
from tests.bench.scrape import scrape

_MIB: Final = 1024 * 1024

_SHARES_MIB: Final = {
    "python": 11.0,
    "asyncio": 10.0,
    "pynvml": 3.5,
    "grpclib": 3.5,
    "betterproto2": 2.5,
    "asyncinotify": 0.5,
    "msgspec": 1.5,
    "aiohttp": 12.5,
    "agent": 5.0,
}
"""What each import may add; together with the working memory the budget of 52 MiB."""

_NOISE_XID: Final = 31
"""Flips nothing, so a million of them leave the node as it was; each is counted and recorded."""
_FACTS_PER_S: Final = 10_000
_BATCH: Final = 500
"""Events pushed before the last one must be handed over; the library's queue holds a thousand."""


async def _memory(effort: Effort) -> AsyncGenerator[Figure | Absent, None]:
    """Read VmRSS of an agent with 8 GPUs, HTTP on and some pods served, and of its imports alone.

    Growth is from a state in which every bounded buffer is full (some of the load was given before) to
    the state after the load: XIDs through NVML's event wait, answers over HTTP, kubelet restarts. The load is
    a tenth of the promised one unless ``--full`` is given, and then has ``tenth`` in its name. The growth of
    open files and threads is between the same two states.
    """
    for share, kib in _import_shares().items():
        yield Figure(f"S7.share.{share}", kib / 1024, "MiB", _SHARES_MIB[share])
    is_full = effort is Effort.FULL
    facts = effort.of(quick=5_000, usual=100_000, full=1_000_000)
    address = f"127.0.0.1:{free_port()}"
    async with bench_node() as node:
        with node.agent({"http-listen": address}) as agent:
            await agent.ready()
            await _serve_pods(node, 20)
            await scrape(address, 20)
            warm = agent.rss_bytes()
            await _load(node, address, facts=max(facts // 5, 10_000), scrapes=facts // 100, restarts=60)
            full, open_before, threads_before = agent.rss_bytes(), agent.descriptors(), agent.threads()
            await _load(node, address, facts=facts, scrapes=facts // 100, restarts=facts // 1000)
            after = agent.rss_bytes()
            # What a kubelet of the last restart or a client left is closed a moment later.
            await asyncio.sleep(SETTLE_S)
            opened, begun = agent.descriptors() - open_before, agent.threads() - threads_before
            await agent.end()
    yield Figure("S7.rss_8_gpus", warm / _MIB, "MiB", 52)
    yield Figure("S7.rss_8_gpus_after_load", after / _MIB, "MiB", 52)
    yield Figure(f"S7.growth{'' if is_full else '_tenth'}", (after - full) / _MIB, "MiB", 1)
    yield Figure("S7.growth_open_files", opened, "files", 0)
    yield Figure("S7.growth_threads", begun, "threads", 0)
    yield Figure("S7.threads", threads_before, "threads", None)
    async for figure in probe_footprint.memory(effort):
        yield figure


def _import_shares() -> dict[str, int]:
    """Return the KiB of each share, measured in a fresh interpreter."""
    command = [sys.executable, "-m", "tests.bench.import_shares"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise MeasurementError(f"the imports could not be measured: {ended.stderr.strip()[-500:]}")
    shares: dict[str, int] = json.loads(ended.stdout)
    return shares


async def _serve_pods(node: BenchNode, count: int) -> None:
    for number in range(count):
        await node.kubelet.run_pod(f"pod-{number}", "bench", {"main": {GPU: 1}})
        node.kubelet.delete_pod(f"pod-{number}", "bench")


async def _load(node: BenchNode, address: str, *, facts: int, scrapes: int, restarts: int) -> None:
    """Give the agent that much to do, one kind after the other."""
    await _push_xids(node, facts)
    await scrape(address, scrapes)
    for _ in range(restarts):
        await node.kubelet.restart()
        await node.wait_allocatable(len(node.uuids))


async def _push_xids(node: BenchNode, count: int) -> None:
    """Push XIDs as fast as they are handed over."""
    nvml = node.simulated.nvml
    lost = nvml.events_lost
    for first in range(0, count, _BATCH):
        last = max(
            nvml.push_xid(number % len(node.uuids), _NOISE_XID)
            for number in range(first, min(first + _BATCH, count))
        )
        # The library's C code hands it over, which wakes no task here.
        async with asyncio.timeout(10):
            while nvml.event_times(last).returned_ns is None:
                await asyncio.sleep(0.001)
    if nvml.events_lost != lost:
        raise MeasurementError(f"{nvml.events_lost - lost} of {count} XIDs did not reach the agent")


async def _cpu(effort: Effort) -> AsyncGenerator[Figure | Absent, None]:
    """Read the CPU time of all threads of an agent with 8 GPUs, in percent of one core.

    ``idle``: registered, HTTP on, nothing happens but the agent's own polls; ``wakeups`` are those of all
    threads meanwhile. ``10000_facts_per_s``: a thread
    in the agent puts so many facts into the inbox: probes that passed, one in a hundred an XID that flips
    nothing but is recorded. What that thread itself takes is in it, and the idle share.
    """
    idle_s = effort.of(quick=5, usual=20, full=60)
    busy_s = effort.of(quick=2, usual=10, full=60)
    flags = {"http-listen": f"127.0.0.1:{free_port()}"}
    async with bench_node() as node:
        with node.agent(flags) as agent:
            await agent.ready()
            await asyncio.sleep(SETTLE_S)
            wakeups, began_s = agent.wakeups(), time.monotonic()
            yield Figure("S8.cpu_idle", await share_of_core(agent, idle_s), "%", 0.3)
            woken = (agent.wakeups() - wakeups) / (time.monotonic() - began_s)
            yield Figure("S8.wakeups_idle", woken, "1/s", 8)
            await agent.end()
        with node.agent(program=(yardstick.PROGRAM,)) as beside:
            yield Figure("S8.cpu_idle_yardstick", await share_of_core(beside, idle_s), "%", None)
            await beside.end()
        with node.agent(flags, program=("tests.bench.fact_load", str(_FACTS_PER_S))) as agent:
            await agent.ready()
            agent.signal(signal.SIGUSR1)
            yield Figure("S8.cpu_10000_facts_per_s", await share_of_core(agent, busy_s), "%", 10)
            await agent.end()
    async for figure in probe_footprint.cpu(effort):
        yield figure


MEMORY: Final = Measurement("S7", "memory: each import, the process, and its growth", _memory)
CPU: Final = Measurement("S8", "CPU: idle, and with 10,000 facts a second", _cpu)
