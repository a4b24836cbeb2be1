"""S6: what long device lists cost: 8 GPUs with 100 shares each, and 56 MIG devices."""

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from agent.simulation.presets import MigDeviceSpec, MigSpec, NodeSpec, load_preset
from tests.bench import yardstick
from tests.bench.figures import NS_PER_MS, Effort, Figure, Measurement, MeasurementError, beside_yardstick
from tests.bench.health import FAST_RECOVERY, xid_target, xids_in_turn
from tests.bench.node import PATIENCE_S, PRESET, MeasuredAgent
from tests.bench.waiting import agent_cpu, undisturbed_beside_yardstick

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

    ``bytes`` is the longest message, whose target is what the kubelet takes. ``xid_to_socket`` as in S1, with
    the yardstick of 8 devices beside it. ``loop_stall`` is the longest time that the agent's event loop stood
    still in the whole measurement, whatever the reason; ``loop_stall_with_cpu`` is the longest less what its
    thread waited for a CPU in it.
    """
    trials = effort.of(quick=16, usual=200, full=500)
    eight = load_preset(PRESET)
    for name, spec, config, devices in (
        ("8x100", eight, _CONFIG, len(eight.gpus) * _REPLICAS),
        ("56_mig", _sliced(eight), "version: v1\nflags:\n  migStrategy: single\n", len(eight.gpus) * _SLICES),
    ):
        with tempfile.TemporaryDirectory(prefix="gpu-bench-") as directory:
            lag, file = Path(directory, "lag"), Path(directory, "config.yaml")
            file.write_text(config, encoding="ascii")
            async with AsyncExitStack() as stack:
                ours = await stack.enter_async_context(
                    xid_target(
                        spec,
                        flags=FAST_RECOVERY | {"config-file": str(file)},
                        program=("tests.bench.loop_lag", str(lag)),
                        devices=devices,
                    )
                )
                beside = await stack.enter_async_context(xid_target(program=(yardstick.PROGRAM,)))
                ours.agent.signal(signal.SIGUSR1)
                sent, beside_sent = await xids_in_turn(ours, beside, trials)
                stall_ns, with_cpu_ns = await _longest_stalls(ours.agent, lag)
                longest = max(each.size_bytes for each in ours.node.kubelet.lists)
        yield Figure(f"S6.list_{name}.bytes", longest, "bytes", _KUBELET_TAKES_BYTES)
        heard = f"S6.list_{name}.xid_to_socket"
        seen, beside_seen = [each.seen for each in sent], [each.seen for each in beside_sent]
        socket_ns, beside_ns = [each.socket_ns for each in sent], [each.socket_ns for each in beside_sent]
        for figure in beside_yardstick(heard, socket_ns, beside_ns, p50=2, p99=2):
            yield figure
        for figure in undisturbed_beside_yardstick(heard, seen, beside_seen, p50=2, p99=2):
            yield figure
        ran_ns, beside_ran_ns = [each.ran_ns for each in seen], [each.ran_ns for each in beside_seen]
        for figure in agent_cpu(heard, ran_ns, yardstick_ns=beside_ran_ns):
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


async def _longest_stalls(agent: MeasuredAgent, file: Path) -> tuple[int, int]:
    agent.signal(signal.SIGUSR2)
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if file.exists():
            longest_ns, with_cpu_ns = file.read_text(encoding="ascii").split()
            return int(longest_ns), int(with_cpu_ns)
        await asyncio.sleep(0.02)
    raise MeasurementError("the agent did not log how long its loop was blocked")


LISTS: Final = Measurement("S6", "ListAndWatch with 8 x 100 shares and with 56 MIG devices", _lists)
