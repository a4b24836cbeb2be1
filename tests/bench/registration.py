"""S2 and S3: how soon the agent is registered again after it was not any more."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from agent.simulation.kubelet import DeviceList, EmulatedKubelet, Registration
from tests.bench.figures import (
    NS_PER_MS,
    Effort,
    Figure,
    Measurement,
    MeasurementError,
    median_and_tail,
    quantile,
)
from tests.bench.node import GPU, BenchNode, bench_node

_RESET_XID: Final = 79
"""Stays until a reset, so it must be there after each restart."""


async def _kubelet_restart(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Restart the kubelet; from its socket accepting to Register being answered.

    Includes the notice of the new socket, Register, and the kubelet dialling back before it answers. One GPU
    is unhealthy from the start: a first list without that, or with it for another one, is lost state.
    """
    rng = random.Random(2)
    times_ns: list[int] = []
    wrong = 0
    async with bench_node() as node:
        with node.agent() as agent:
            await agent.ready()
            broken = node.uuids[3]
            node.simulated.nvml.push_xid(3, _RESET_XID)
            await node.wait(lambda kubelet: kubelet.unhealthy(GPU) == (broken,), "the unhealthy GPU")
            for _ in range(effort.of(quick=10, usual=100)):
                await asyncio.sleep(rng.uniform(0.02, 0.06))
                registered_ns, first = await _restart_kubelet(node)
                times_ns.append(registered_ns)
                wrong += first.unhealthy != (broken,) or len(first.healthy) != len(node.uuids) - 1
            await agent.end()
    for figure in median_and_tail("S2.kubelet_restart", times_ns, p50_ms=15, p99_ms=200):
        yield figure
    yield Figure("S2.lost_state", wrong, "lists", 0)


async def _restart_kubelet(node: BenchNode) -> tuple[int, DeviceList]:
    """Restart; returns how long registration took and the first list of devices."""
    before = node.kubelet.registrations[-1:]
    lists = node.kubelet.statistics().lists
    await node.kubelet.restart()
    accepting_ns = time.monotonic_ns()
    registered = await _next_registration(node, before)
    await node.wait(lambda kubelet: kubelet.statistics().lists > lists, "a list of devices")
    first = next(each for each in node.kubelet.lists if each.at_ns > accepting_ns - NS_PER_MS)
    return registered.at_ns - accepting_ns, first


async def _next_registration(node: BenchNode, before: tuple[Registration, ...]) -> Registration:
    """Wait for an accepted registration after those there were."""

    def newest(kubelet: EmulatedKubelet) -> Registration | None:
        last = kubelet.registrations[-1:]
        return last[0] if last and last != before and last[0].accepted else None

    await node.wait(lambda kubelet: newest(kubelet) is not None, "the registration")
    found = newest(node.kubelet)
    if found is None:
        raise MeasurementError("the registration was followed by one that was rejected")
    return found


async def _lost_registration(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Take the registration away while the kubelet lives; from the fault to Register being answered.

    A kubelet restart between two trials makes each one the first loss of a registration: losses in a row are
    answered more slowly on purpose.
    """
    trials = effort.of(quick=4, usual=25)
    async with bench_node() as node:
        with node.agent() as agent:
            await agent.ready()
            kubelet = node.kubelet
            faults: dict[str, Callable[[], Awaitable[None]]] = {
                "socket_deleted": lambda: kubelet.apply_fault("delete_sockets"),
                "stream_cancelled": lambda: kubelet.apply_fault("drop_stream", how="cancel"),
                "connection_lost": lambda: kubelet.apply_fault("drop_stream", how="connection"),
            }
            for name, fault in faults.items():
                times_ns = [await _lose_and_register(node, fault) for _ in range(trials)]
                yield Figure(f"S3.{name}.p50", quantile(times_ns, 0.5) / NS_PER_MS, "ms", 2000)
                yield Figure(f"S3.{name}.max", max(times_ns) / NS_PER_MS, "ms", 2000)
            await agent.end()


async def _lose_and_register(node: BenchNode, fault: Callable[[], Awaitable[None]]) -> int:
    await node.wait_allocatable(len(node.uuids))
    before = node.kubelet.registrations[-1:]
    began_ns = time.monotonic_ns()
    await fault()
    registered = await _next_registration(node, before)
    await node.wait_allocatable(len(node.uuids))
    await _restart_kubelet(node)
    return registered.at_ns - began_ns


KUBELET_RESTART: Final = Measurement(
    "S2", "kubelet restart: socket accepts -> registered again", _kubelet_restart
)
LOST_REGISTRATION: Final = Measurement(
    "S3", "own socket deleted or stream ended -> registered again", _lost_registration
)
