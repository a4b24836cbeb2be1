"""E1, NVIDIA/k8s-device-plugin#240: after MIG is reconfigured the node has old and new devices at once.

A running agent follows each new layout: what is gone is advertised no more, and after a restart,
or a kill, no socket of an old resource is left.
"""

import signal
import time

import pytest

from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.node import SimulatedNode
from tests.harness import (
    GPU,
    PATIENCE_S,
    SLACK_NS,
    agent_process,
    simulated_node,
    wait_polls,
)
from tests.sources.recorder import until

SMALL = "nvidia.com/mig-1g.5gb"
WHOLE = "nvidia.com/mig-7g.40gb"

SLICE = {
    "name": "1g.5gb",
    "key": 0,
    "id": 19,
    "slices": 1,
    "instances": 7,
    "memory_mib": 4864,
    "multiprocessors": 14,
    "copy_engines": 1,
    "starts": [0, 1, 2, 3, 4, 5, 6],
    "size": 1,
    "first_gi": 7,
}
ALL_OF_IT = {
    "name": "7g.40gb",
    "key": 4,
    "id": 0,
    "slices": 7,
    "instances": 1,
    "memory_mib": 40192,
    "multiprocessors": 98,
    "copy_engines": 7,
    "starts": [0],
    "size": 8,
    "first_gi": 0,
}
EIGHT_A100_40GB = {
    "preset": "8x-a100",
    "gpu": {
        "name": "NVIDIA A100-SXM4-40GB",
        "memory_mib": 40960,
        "mig": {"profiles": [SLICE, ALL_OF_IT]},
    },
}

BOUND_NS = 2_000_000_000


def healthy(kubelet: EmulatedKubelet) -> dict[str, int]:
    """Return what the kubelet may allocate, without the resources that are empty."""
    counts = {name: kubelet.allocatable(name) for name in kubelet.resources}
    return {name: count for name, count in counts.items() if count}


async def reconfigured(node: SimulatedNode, devices: str, wanted: dict[str, int]) -> None:
    """Give every GPU a new layout, and see that within the bound exactly that is advertised, for good."""
    since_ns = time.monotonic_ns()
    await node.do("mig", {"gpu": "all", "devices": devices})
    await node.kubelet.wait_for(lambda kubelet: healthy(kubelet) == wanted, PATIENCE_S)
    assert time.monotonic_ns() - since_ns <= BOUND_NS + SLACK_NS
    newest = {each.resource: (len(each.healthy), len(each.unhealthy)) for each in node.kubelet.lists}
    assert newest == {name: (wanted.get(name, 0), 0) for name in newest}
    changes = len(node.kubelet.change_history)
    await wait_polls(node, 2)
    assert len(node.kubelet.change_history) == changes


def agent_sockets(node: SimulatedNode) -> set[str]:
    return {path.name for path in node.directory.device_plugins.glob("nvidia-*.sock")}


def is_layout_written(node: SimulatedNode, now: str, before: str) -> bool:
    state = (node.directory.agent / "state.json").read_text()
    return now in state and before not in state


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_each_layout_is_advertised_and_nothing_of_the_one_before(end: signal.Signals) -> None:
    async with simulated_node(EIGHT_A100_40GB) as node:
        async with agent_process(node, mig_strategy="mixed") as agent:
            await node.kubelet.wait_for(lambda kubelet: healthy(kubelet) == {GPU: 8}, PATIENCE_S)
            await reconfigured(node, "7x1g.5gb", {SMALL: 56})
            await reconfigured(node, "7g.40gb", {WHOLE: 8})
            await agent.wait_answer("/preflight", lambda status, _: status == 200)
            # Killed before that, the next one would begin with the layout that this one had written last.
            await until(lambda: is_layout_written(node, "7g.40gb", "1g.5gb"))
            await agent.stop(end)

        async with agent_process(node, mig_strategy="mixed"):
            await node.kubelet.wait_for(lambda kubelet: healthy(kubelet) == {WHOLE: 8}, PATIENCE_S)
            assert agent_sockets(node) == {"nvidia-mig-7g.40gb.sock"}
            assert {name: node.kubelet.capacity(name) for name in (GPU, SMALL)} == {GPU: 0, SMALL: 0}
