"""S13, S16 and a storm: no flip without a fault, faults without an NVML event, and XIDs by the thousand."""

import asyncio
import time
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Final

from agent.threads import in_daemon_thread
from tests.bench.figures import NS_PER_MS, Effort, Figure, Measurement, quantile
from tests.bench.node import GPU, BenchNode, bench_node
from tests.bench.noise import false_flips

_POLL_S: Final = 1
_STORM_PER_S: Final = 1_000
_STORM_XID: Final = 79
_WINDOWS_PER_S: Final = 20
"""Changes are gathered for 50 ms, so a storm cannot make more messages than this."""


async def _false_flips(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Let nodes live with noise that is no fault, on a virtual clock, and count devices that flipped."""
    hours = effort.of(quick=20_000, usual=200_000, full=1_000_000)
    result = await in_daemon_thread("bench-noise", lambda: false_flips(hours, seed=13))
    yield Figure("S13.gpu_hours", result.gpu_hours, "h", hours, at_least=True)
    yield Figure("S13.false_flips", result.flips, "flips", 0)


async def _other_sources(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Break GPUs in ways of which NVML sends no event, until the kubelet knows.

    The kernel log has an XID of a GPU that the driver wants reset; and a reading changes, which is polled.
    """
    trials = effort.of(quick=2, usual=4)
    heard: dict[str, list[int]] = {"kernel_log": [], "polled": []}
    for _ in range(trials):
        async with bench_node() as node:
            with node.agent({"poll": f"{_POLL_S}s"}) as agent:
                await agent.ready()
                # The log is read from a moment after the registration on; what is older is only counted.
                await asyncio.sleep(_POLL_S)
                node.simulated.nvml.set_recovery_action(3, 1)
                heard["kernel_log"].append(await _until_heard(node, 3, "kernel-xid", xid="119"))
                heard["polled"].append(await _until_heard(node, 5, "recovery-action", action="1"))
                await agent.end()
    yield Figure("S16.kernel_log_to_kubelet.max", quantile(heard["kernel_log"], 1) / NS_PER_MS, "ms", 2_000)
    yield Figure(
        "S16.polled_to_kubelet.max", quantile(heard["polled"], 1) / NS_PER_MS, "ms", 1_000 * (_POLL_S + 1)
    )


async def _until_heard(node: BenchNode, gpu: int, name: str, **parameters: str) -> int:
    uuid = node.uuids[gpu]
    began_ns = time.monotonic_ns()
    await node.simulated.do(name, {"gpu": str(gpu), **parameters})
    await node.wait(lambda kubelet: uuid in kubelet.unhealthy(GPU), f"{name} to be heard of")
    return time.monotonic_ns() - began_ns


async def _storm(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Report a thousand XIDs a second on eight GPUs; the messages stay few, and none brings a GPU back."""
    seconds = effort.of(quick=2, usual=10)
    async with bench_node() as node:
        with node.agent() as agent:
            await agent.ready()
            before = node.kubelet.statistics().lists
            began_s = time.monotonic()
            for number in range(seconds * _STORM_PER_S):
                node.simulated.nvml.push_xid(number % len(node.uuids), _STORM_XID)
                late_s = began_s + number / _STORM_PER_S - time.monotonic()
                if late_s > 0:
                    await asyncio.sleep(late_s)
            took_s = time.monotonic() - began_s
            await node.wait(lambda kubelet: kubelet.allocatable(GPU) == 0, "every GPU to be unhealthy")
            lists = list(node.kubelet.lists)[before - node.kubelet.statistics().lists :]
            await agent.end()
    unhealthy = [len(each.unhealthy) for each in lists]
    yield Figure("STORM.messages_per_s", len(lists) / took_s, "1/s", _WINDOWS_PER_S)
    yield Figure("STORM.messages_out_of_order", sum(b < a for a, b in pairwise(unhealthy)), "", 0)


FALSE_FLIPS: Final = Measurement("S13", "devices flipped by what is no fault", _false_flips)
OTHER_SOURCES: Final = Measurement("S16", "faults without an NVML event -> ListAndWatch", _other_sources)
STORM: Final = Measurement("STORM", "1,000 XIDs a second on 8 GPUs", _storm)
