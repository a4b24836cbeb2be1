"""E2, NVIDIA/gpu-operator#460: strategy "single" with unlike slices makes the plugin panic in a loop.

The agent reports what is unlike, advertises nothing meanwhile, and goes on by itself once they are alike.
The labels wait for theirs (PENDING.md).
"""

import time
from collections.abc import Mapping
from typing import Any

from agent.simulation.kubelet import EmulatedKubelet
from tests.harness import (
    GPU,
    PATIENCE_S,
    POLL_NS,
    SLACK_NS,
    agent_process,
    codes,
    simulated_node,
    wait_allocatable,
)

UNLIKE = {"enabled": True, "devices": [{"profile": "2g.12gb"}, {"profile": "1g.6gb"}, {"profile": "1g.6gb"}]}
ONE_A30: Mapping[str, object] = {"preset": "4x-a30", "gpus": [{"mig": UNLIKE}]}


def has_empty_list(kubelet: EmulatedKubelet) -> bool:
    return any(each.resource == GPU for each in kubelet.lists)


async def test_unlike_slices_are_named_and_alike_ones_are_advertised_without_a_restart() -> None:
    async with simulated_node(ONE_A30) as node, agent_process(node, mig_strategy="single") as agent:
        await node.kubelet.wait_for(has_empty_list, PATIENCE_S)
        assert {(each.healthy, each.unhealthy) for each in node.kubelet.lists} == {((), ())}

        def is_reported(status: int, body: Any) -> bool:
            return status == 503 and codes(body) == {"mig_single_not_uniform"}

        body = await agent.wait_answer("/preflight", is_reported)
        (reason,) = body["reasons"]
        assert "[1g.6gb, 2g.12gb]" in reason["message"]
        assert agent.process.returncode is None

        since_ns = time.monotonic_ns()
        await node.do("mig", {"gpu": "0", "devices": "4g.24gb"})
        await wait_allocatable(node.kubelet, 1, capacity=1)
        assert time.monotonic_ns() - since_ns <= 2 * POLL_NS + SLACK_NS
        await agent.wait_answer("/preflight", lambda status, _body: status == 200)


async def test_with_strategy_mixed_a_gpu_without_slices_is_a_warning_and_the_others_are_advertised() -> None:
    two = {"preset": "4x-a30", "gpus": [{"mig": UNLIKE}, {"mig": {"enabled": True}}]}
    async with simulated_node(two) as node, agent_process(node, mig_strategy="mixed") as agent:
        await wait_allocatable(node.kubelet, 1, capacity=1, resource="nvidia.com/mig-2g.12gb")
        await wait_allocatable(node.kubelet, 2, capacity=2, resource="nvidia.com/mig-1g.6gb")
        line = await agent.wait_logged(lambda line: "without a MIG device" in str(line.get("message")))
        assert line["gpu_uuid"] == node.nvml.uuid(1)
        await agent.wait_answer("/preflight", lambda status, _body: status == 200)
        assert GPU not in node.kubelet.resources
