"""How long a change of the configuration takes, from the file to the kubelet, on 8 GPUs."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from agent.runtime.config_watch import SETTLE_NS
from agent.simulation.presets import load_preset
from tests.bench.figures import NS_PER_MS, Effort, Figure, Measurement, median_and_tail
from tests.bench.node import PRESET, BenchNode, MeasuredAgent, bench_node

_GPUS: Final = 8
_BETWEEN_S: Final = 0.1
_NUMBERS: Final = (2, 3)
"""Shares of each GPU, in turn, so that every reload changes what is advertised."""


async def _reload(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Change the number of shares, and wait for the kubelet's list.

    ``signal`` is from SIGHUP, ``file`` from the rename of the new file, which the agent lets settle first;
    both include reading and checking the file, making the devices anew, and the message.
    """
    trials = effort.of(quick=10, usual=200)
    async with bench_node(load_preset(PRESET)) as node:
        config = node.simulated.directory.path.parent / "config.yaml"
        config.write_text(_text(_NUMBERS[-1]), encoding="ascii")
        with node.agent({"config-file": str(config)}) as agent:
            await agent.registered()
            await node.wait_allocatable(_GPUS * _NUMBERS[-1])
            signalled = [await _trial(node, config, trial, agent) for trial in range(trials)]
            settle_ms = SETTLE_NS / NS_PER_MS
            for figure in median_and_tail("RELOAD.signal", signalled, p50_ms=50, p99_ms=100):
                yield figure
            renamed = [await _trial(node, config, trial) for trial in range(trials // 5)]
            for figure in median_and_tail(
                "RELOAD.file", renamed, p50_ms=settle_ms + 50, p99_ms=settle_ms + 100
            ):
                yield figure
            await agent.end()


async def _trial(node: BenchNode, config: Path, trial: int, agent: MeasuredAgent | None = None) -> int:
    """Change the file, and signal the agent if it is given; returns how long the list took in nanoseconds."""
    # Changes that follow each other at once go out together, a little later.
    await asyncio.sleep(_BETWEEN_S)
    number = _NUMBERS[trial % len(_NUMBERS)]
    new = config.with_suffix(".new")
    new.write_text(_text(number), encoding="ascii")
    new.rename(config)
    began_ns = time.monotonic_ns()
    if agent is not None:
        agent.signal(signal.SIGHUP)
    await node.wait_allocatable(_GPUS * number)
    return time.monotonic_ns() - began_ns


def _text(number: int) -> str:
    return f"sharing:\n  timeSlicing:\n    resources:\n      - {{name: nvidia.com/gpu, replicas: {number}}}\n"


RELOAD: Final = Measurement("RELOAD", "a changed configuration, until the kubelet has the list", _reload)
