"""A4, GoogleCloudPlatform/container-engine-accelerators#110: GPUs that come late are never advertised.

The case's 20 s before the change are three polls here: what counts is that the agent has settled on what
it saw first. That the labels file holds nothing meanwhile waits for the labels (PENDING.md).
"""

import time

from tests.harness import (
    GPU,
    POLL_NS,
    SLACK_NS,
    accepted,
    agent_process,
    codes,
    simulated_node,
    uuids,
    wait_allocatable,
    wait_polls,
)


async def test_gpus_that_come_late_are_advertised_within_two_polls_and_without_a_new_registration() -> None:
    async with simulated_node("4x-t4") as node:
        await node.do("reveal", {"gpus": "1"})
        async with agent_process(node):
            await wait_allocatable(node.kubelet, 1, capacity=1)
            first = uuids(node)[0]
            assert node.kubelet.lists[-1].healthy == (first,)
            await wait_polls(node, 3)

            revealed_ns = time.monotonic_ns()
            await node.do("reveal", {"gpus": "4"})
            await wait_allocatable(node.kubelet, 4, capacity=4)

            complete = [each for each in node.kubelet.lists if len(each.healthy) == 4]
            assert complete[0].at_ns - revealed_ns <= 2 * POLL_NS + SLACK_NS
            assert set(complete[0].healthy) == set(uuids(node))
            assert all(first in each.healthy for each in node.kubelet.lists)
            assert accepted(node.kubelet) == len(node.kubelet.registrations) == 1


async def test_a_driver_that_comes_late_is_waited_for_without_a_restart() -> None:
    async with simulated_node("4x-t4") as node:
        await node.do("driver", {"state": "unloaded"})
        async with agent_process(node, fail_on_init_error="false") as agent:
            await agent.wait_answer(
                "/preflight", lambda status, body: status == 503 and "driver_not_loaded" in codes(body)
            )
            assert not [each for each in node.kubelet.lists if each.healthy]

            await node.do("driver", {"state": "loaded"})
            await wait_allocatable(node.kubelet, 4, capacity=4)

            await agent.wait_answer("/preflight", lambda status, body: status == 200 and body["ready"])
            assert agent.process.returncode is None
            assert accepted(node.kubelet, GPU) == 1
