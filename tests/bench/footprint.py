"""S7 and S8: what the agent takes from the node: memory, and CPU while nothing or a lot happens."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Final

from tests.bench.figures import Effort, Figure, Measurement, MeasurementError
from tests.bench.node import GPU, ROOT, AgentProcess, BenchNode, bench_node, free_port
from tests.bench.scrape import scrape

_MIB: Final = 1024 * 1024

_SHARES_MIB: Final = {
    "python": 9.0,
    "asyncio": 11.0,
    "pynvml": 3.5,
    "grpclib": 3.0,
    "betterproto2": 2.5,
    "asyncinotify": 0.5,
    "msgspec": 1.5,
    "aiohttp": 14.0,
    "agent": 5.0,
}
"""What each import may add; together with the working memory the budget of 52 MiB."""

_NOISE_XID: Final = 31
"""Flips nothing, so a million of them leave the node as it was; each is counted and recorded."""
_FACTS_PER_S: Final = 10_000
_PUSH_PERIOD_S: Final = 0.005
_MAX_BEHIND: Final = 500
"""Events pushed and not yet handed over; the library's queue holds a thousand."""


async def _memory(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Read VmRSS of an agent with 8 GPUs, HTTP on and some pods served, and of its imports alone.

    Growth is from a state in which every bounded buffer is full (a tenth of the load was given before) to
    the state after the load: XIDs through NVML's event wait, answers over HTTP, kubelet restarts. The load is
    a tenth of the promised one unless ``--full`` is given, and then has ``tenth`` in its name.
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
            await _load(node, address, facts=max(facts // 10, 10_000), scrapes=facts // 100, restarts=20)
            full = agent.rss_bytes()
            await _load(node, address, facts=facts, scrapes=facts // 100, restarts=facts // 1000)
            after = agent.rss_bytes()
            await agent.end()
    yield Figure("S7.rss_8_gpus", warm / _MIB, "MiB", 52)
    yield Figure("S7.rss_8_gpus_after_load", after / _MIB, "MiB", 52)
    yield Figure(f"S7.growth{'' if is_full else '_tenth'}", (after - full) / _MIB, "MiB", 1)


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
    await _push_facts(node, facts, per_s=None)
    await scrape(address, scrapes)
    for _ in range(restarts):
        await node.kubelet.restart()
        await node.wait_allocatable(len(node.uuids))


async def _push_facts(node: BenchNode, count: int, *, per_s: int | None) -> None:
    """Push XIDs, as fast as they are taken or at a rate, and wait until the last one was handed over."""
    nvml = node.simulated.nvml
    began_s = time.monotonic()
    lost = nvml.events_lost
    sent = 0
    last = -1
    while sent < count:
        due = count if per_s is None else min(count, int((time.monotonic() - began_s) * per_s))
        for _ in range(min(due - sent, _MAX_BEHIND)):
            last = nvml.push_xid(sent % len(node.uuids), _NOISE_XID)
            sent += 1
        if per_s is None and last >= 0:
            await _handed_over(node, last)
        else:
            await asyncio.sleep(_PUSH_PERIOD_S)
    await _handed_over(node, last)
    if nvml.events_lost != lost:
        raise MeasurementError(
            f"the agent took fewer facts than it was sent: {nvml.events_lost - lost} of {count} were lost"
        )


async def _handed_over(node: BenchNode, event: int) -> None:
    """Wait until NVML's event wait returned an event; from C code, which wakes nobody here."""
    async with asyncio.timeout(10):
        while node.simulated.nvml.event_times(event).returned_ns is None:
            await asyncio.sleep(0.001)


async def _cpu(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Read the CPU time of all threads of an agent with 8 GPUs, in percent of one core.

    ``idle``: registered, HTTP on, nothing happens but the agent's own polls. ``10000_facts_per_s``: so many
    XIDs a second through NVML's event wait, each a call of pynvml in a thread, into the inbox and the core;
    they flip nothing.
    """
    idle_s = effort.of(quick=5, usual=20, full=60)
    busy_s = effort.of(quick=2, usual=8, full=30)
    async with bench_node() as node:
        with node.agent({"http-listen": f"127.0.0.1:{free_port()}"}) as agent:
            await agent.ready()
            await asyncio.sleep(2)
            idle = await _share_of_core(agent, asyncio.sleep(idle_s))
            yield Figure("S8.cpu_idle", idle, "%", 0.5)
            busy = await _share_of_core(agent, _push_facts(node, busy_s * _FACTS_PER_S, per_s=_FACTS_PER_S))
            yield Figure("S8.cpu_10000_facts_per_s", busy, "%", 10)
            await agent.end()


async def _share_of_core(agent: AgentProcess, work: Coroutine[object, object, None]) -> float:
    """Return how much of one core the agent used while something was done, in percent."""
    cpu_s, began_s = agent.cpu_s(), time.monotonic()
    await work
    return 100 * (agent.cpu_s() - cpu_s) / (time.monotonic() - began_s)


MEMORY: Final = Measurement("S7", "memory: each import, the process, and its growth", _memory)
CPU: Final = Measurement("S8", "CPU: idle, and with 10,000 facts a second", _cpu)
