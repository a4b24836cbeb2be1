"""Fault 3: a ListAndWatch stream breaks, is overtaken by another, or its reader stops."""

import time
from pathlib import Path

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import (
    GPU,
    PATIENCE_S,
    SLACK_NS,
    AgentProcess,
    accepted,
    agent_process,
    codes,
    simulated_node,
    uuids,
    wait_allocatable,
    wait_polls,
)

AGAIN_WITHIN_NS = 2_000_000_000
"""S3: registered again after a stream that ended while the kubelet lives."""
REPLICAS = 800
"""With four GPUs a message of over 150 KiB, more than a reader that has stopped takes."""
FLIPS = 40
MEMORY_BYTES = 8 * 1024 * 1024
"""The messages of so many flips are over 12 MiB, if they were kept."""


async def flip(node: SimulatedNode, times: int) -> None:
    """Make a GPU unhealthy and healthy again; each change is a message of its own to every reader."""
    for _ in range(times):
        for code in ("UNKNOWN", "clear"):
            await node.do("return-code", {"code": code, "gpu": "0"})
            await wait_polls(node, 3)


def resident_bytes(agent: AgentProcess) -> int:
    return int(Path(f"/proc/{agent.process.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("how", ["cancel", "connection"])
async def test_after_a_broken_stream_the_newest_state_is_sent_on_a_new_one(how: str) -> None:
    async with simulated_node("4x-t4") as node, agent_process(node):
        await wait_allocatable(node.kubelet, 4, capacity=4)
        before = len(node.kubelet.lists)
        began_ns = time.monotonic_ns()
        await node.do("kubelet drop-stream", {"how": how})
        node.nvml.push_xid(1, 79)

        await node.kubelet.wait_for(lambda kubelet: accepted(kubelet) == 2, PATIENCE_S)
        await wait_allocatable(node.kubelet, 3, capacity=4)

        again = [each for each in node.kubelet.lists[before:] if each.generation == 2]
        assert again[0].at_ns - began_ns < AGAIN_WITHIN_NS + SLACK_NS
        assert again[-1].unhealthy == (uuids(node)[1],)


@pytest.mark.parametrize("how", ["second", "late-end"])
async def test_a_resource_lost_to_the_registration_race_is_registered_again(how: str) -> None:
    async with simulated_node("4x-t4") as node, agent_process(node) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        await node.do("kubelet race", {"how": how})
        if how == "late-end":
            await node.do("kubelet drop-stream", {})

        await node.kubelet.wait_for(
            lambda kubelet: bool(kubelet.stream_ends) and kubelet.allocatable(GPU) == 4, PATIENCE_S
        )
        await agent.wait_answer("/preflight", lambda status, _: status == 200)


async def test_a_kubelet_that_forgot_the_endpoint_but_not_its_stream_is_registered_with_anew() -> None:
    async with simulated_node("4x-t4") as node, agent_process(node, kubelet_count_poll="1s") as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        # What it is named by lasts until the kubelet has what it was sent, which it rejects.
        await node.do("kubelet refuse", {})
        await node.do("kubelet forget", {})
        answer = await agent.wait_answer(
            "/preflight", lambda _, body: {"kubelet_count_mismatch", "registration_refused"} <= codes(body)
        )
        assert any("0 of the 4 healthy devices" in reason["message"] for reason in answer["reasons"])
        await agent.wait_answer("/readyz", lambda status, _: status == 500)
        await node.do("kubelet clear", {})
        await wait_allocatable(node.kubelet, 4, capacity=4)
        await agent.wait_answer("/preflight", lambda status, _: status == 200)
        await agent.wait_answer("/readyz", lambda status, _: status == 200)


@pytest.mark.slow
async def test_a_reader_that_stops_costs_no_memory_and_gets_the_newest_state_when_it_goes_on() -> None:
    async with simulated_node("4x-t4") as node:
        config = node.directory.path / "config.yaml"
        config.write_text(
            "version: v1\nsharing: {timeSlicing: {resources: "
            f"[{{name: nvidia.com/gpu, replicas: {REPLICAS}}}]}}}}\n"
        )
        # Many faults of one GPU in a moment are flapping, which is another test.
        async with agent_process(
            node, config_file=str(config), poll="20ms", flapping_faults="100", flapping_within="1s"
        ) as agent:
            await wait_allocatable(node.kubelet, 4 * REPLICAS, capacity=4 * REPLICAS)
            await node.do("kubelet stop-reading", {})
            await flip(node, 5)  # what the first changes cost once stays
            before = resident_bytes(agent)
            _, earlier = await agent.get("/v1/events")
            await flip(node, FLIPS)
            assert (await agent.get("/v1/events"))[1]["last"] - earlier["last"] >= 2 * FLIPS

            node.nvml.push_xid(3, 79)
            await agent.wait_answer(
                "/v1/allocatable", lambda _, body: body["resources"][0]["allocatable"] == 3 * REPLICAS
            )
            assert resident_bytes(agent) - before < MEMORY_BYTES
            assert (await agent.get("/livez"))[0] == 200

            await node.do("kubelet clear", {"fault": "stop-reading"})
            newest = {f"{uuids(node)[3]}::{replica}" for replica in range(REPLICAS)}
            # Meanwhile the agent may have registered anew, since the newest list was not sent for too long.
            await node.kubelet.wait_for(lambda kubelet: set(kubelet.unhealthy(GPU)) == newest, PATIENCE_S)
