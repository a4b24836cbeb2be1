"""S6: what long device lists cost: 8 GPUs with 100 shares each, and 56 MIG devices."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

import msgspec

from agent.simulation.presets import MigDeviceSpec, MigSpec, NodeSpec, load_preset
from tests.bench.figures import NS_PER_MS, Effort, Figure, Measurement, MeasurementError, median_and_tail
from tests.bench.health import APPLICATION_XID, BETWEEN_S, FAST_RECOVERY
from tests.bench.node import PATIENCE_S, PRESET, AgentProcess, BenchNode, bench_node
from tests.bench.socket_watcher import SocketWatcher
from tests.bench.waiting import Bystander, Trial, agent_cpu, undisturbed

_REPLICAS: Final = 100
_SLICES: Final = 7
_PROFILE: Final = "1g.10gb"
_CONFIG: Final = f"""\
version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: {_REPLICAS}
"""
_KUBELET_TAKES_BYTES: Final = 4 * 1024 * 1024
"""gRPC's limit on a message that the kubelet does not change."""
_STALL_MS: Final = 20
"""What is promised of the loop under fifty scrapers."""


async def _lists(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Let one GPU after another fail and recover, and measure each message and the agent's loop.

    ``bytes`` is the longest message, whose target is what the kubelet takes. ``xid_to_socket`` as in S1.
    ``loop_stall`` is the longest time that the agent's event loop stood still in the whole measurement,
    whatever the reason; ``loop_stall_with_cpu`` is the longest less what its thread waited for a CPU in it.
    """
    trials = effort.of(quick=16, usual=200, full=500)
    eight = load_preset(PRESET)
    for name, spec, config, devices in (
        ("8x100", eight, _CONFIG, len(eight.gpus) * _REPLICAS),
        ("56_mig", _sliced(eight), "version: v1\nflags:\n  migStrategy: single\n", len(eight.gpus) * _SLICES),
    ):
        async with bench_node(spec) as node:
            parent = node.simulated.directory.path.parent
            (parent / "config.yaml").write_text(config, encoding="ascii")
            program = ("tests.bench.loop_lag", str(parent / "lag"))
            flags = FAST_RECOVERY | {"config-file": str(parent / "config.yaml")}
            with node.agent(flags, program=program) as agent:
                await agent.registered()
                await node.wait_allocatable(devices)
                async with SocketWatcher(node.plugin_socket) as watcher:
                    agent.signal(signal.SIGUSR1)
                    bystander = Bystander(agent.pid)
                    sent = [await _trial(node, bystander, watcher, devices, gpu % 8) for gpu in range(trials)]
                stall_ns, with_cpu_ns = await _longest_stalls(agent, parent / "lag")
                await agent.end()
        longest = max(each.size_bytes for each in node.kubelet.lists)
        yield Figure(f"S6.list_{name}.bytes", longest, "bytes", _KUBELET_TAKES_BYTES)
        heard = f"S6.list_{name}.xid_to_socket"
        for figure in median_and_tail(heard, [trial.took_ns for trial in sent], p50_ms=1, p99_ms=5):
            yield figure
        for figure in undisturbed(heard, sent, p50_ms=1, p99_ms=5):
            yield figure
        for figure in agent_cpu(heard, [trial.ran_ns for trial in sent]):
            yield figure
        yield Figure(f"S6.list_{name}.loop_stall", stall_ns / NS_PER_MS, "ms", _STALL_MS)
        yield Figure(f"S6.list_{name}.loop_stall_with_cpu", with_cpu_ns / NS_PER_MS, "ms", _STALL_MS)


def _sliced(spec: NodeSpec) -> NodeSpec:
    """Return the node with every GPU cut into its seven smallest slices."""

    def sliced(mig: MigSpec | None) -> MigSpec:
        if mig is None:
            raise MeasurementError(f"the preset {PRESET} has no MIG")
        devices = tuple(MigDeviceSpec(profile=_PROFILE) for _ in range(_SLICES))
        return msgspec.structs.replace(mig, enabled=True, devices=devices)

    gpus = tuple(msgspec.structs.replace(gpu, mig=sliced(gpu.mig)) for gpu in spec.gpus)
    return msgspec.structs.replace(spec, gpus=gpus)


async def _trial(
    node: BenchNode, bystander: Bystander, watcher: SocketWatcher, devices: int, gpu: int
) -> Trial:
    """Push an XID, until its message is on the socket."""
    await node.wait_allocatable(devices)
    await asyncio.sleep(random.uniform(*BETWEEN_S))
    bystander.begin()
    lists = node.kubelet.statistics().lists
    event = node.simulated.nvml.push_xid(gpu, APPLICATION_XID)
    await node.wait(lambda kubelet: kubelet.statistics().lists > lists, "the message of an XID")
    heard = node.kubelet.lists[lists - node.kubelet.statistics().lists]
    returned_ns = node.simulated.nvml.event_times(event).returned_ns
    if len(heard.unhealthy) != devices // 8 or returned_ns is None:
        raise MeasurementError(f"the message of an XID named {len(heard.unhealthy)} devices")
    return bystander.trial(await watcher.message_after(returned_ns) - returned_ns)


async def _longest_stalls(agent: AgentProcess, file: Path) -> tuple[int, int]:
    agent.signal(signal.SIGUSR2)
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if file.exists():
            longest_ns, with_cpu_ns = file.read_text(encoding="ascii").split()
            return int(longest_ns), int(with_cpu_ns)
        await asyncio.sleep(0.02)
    raise MeasurementError("the agent did not log how long its loop was blocked")


LISTS: Final = Measurement("S6", "ListAndWatch with 8 x 100 shares and with 56 MIG devices", _lists)
