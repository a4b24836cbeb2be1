"""Fault 1: a kubelet that restarts again and again, is absent or slow, rejects, or has another version."""

import asyncio
import random
import time

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
    nothing_more,
    simulated_node,
    uuids,
    wait_allocatable,
    wait_polls,
)

RESTARTS = 100


def lines_about(agent: AgentProcess, word: str) -> list[str]:
    return [line["message"] for line in agent.log if word in line["message"].lower()]


async def registered_again(node: SimulatedNode, count: int) -> None:
    await node.kubelet.wait_for(
        lambda kubelet: accepted(kubelet) >= count and kubelet.capacity(GPU) > 0, PATIENCE_S
    )


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True], ids=["graceful", "killed"])
async def test_every_restart_is_answered_with_one_registration_and_no_unhealthy_device_is_forgotten(
    *, kill: bool
) -> None:
    async with simulated_node("4x-t4") as node, agent_process(node) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)
        broken = uuids(node)[2]
        node.nvml.push_xid(2, 79)
        await wait_allocatable(node.kubelet, 3, capacity=4)

        # Longer than a retry takes, so that tries reach the stale socket until the new one is there.
        downtimes = random.Random(7)
        for restart in range(1, RESTARTS + 1):
            await node.kubelet.restart(kill=kill, downtime_s=downtimes.uniform(0, 0.12))
            await registered_again(node, 1 + restart)

        await nothing_more(node.kubelet, lambda kubelet: accepted(kubelet) > 1 + RESTARTS, 1)
        # None was rejected, as one is whose socket the kubelet deleted and then waited ten seconds for.
        assert all(each.accepted for each in node.kubelet.registrations)
        broken_lists = [each for each in node.kubelet.lists if each.generation > 1]
        assert len({each.generation for each in broken_lists}) == RESTARTS
        assert all(each.unhealthy == (broken,) for each in broken_lists)
        assert agent.process.returncode is None


async def test_an_absent_kubelet_is_waited_for_with_one_line_of_log() -> None:
    async with simulated_node("4x-t4", kubelet_present=False) as node, agent_process(node) as agent:
        await agent.wait_answer("/preflight", lambda _, body: "kubelet_unavailable" in codes(body))
        await wait_polls(node, 2)
        assert len(lines_about(agent, "kubelet")) <= 1, agent.text

        await node.kubelet.start()
        await wait_allocatable(node.kubelet, 4, capacity=4)
        await agent.wait_answer("/preflight", lambda status, _: status == 200)


async def test_a_kubelet_that_comes_up_slowly_is_registered_with_once_it_accepts() -> None:
    async with simulated_node("4x-t4", kubelet_present=False) as node, agent_process(node) as agent:
        await agent.wait_answer("/preflight", lambda _, body: "kubelet_unavailable" in codes(body))
        await node.kubelet.restart(rejecting_s=1.5)
        accepts_ns = time.monotonic_ns()
        await wait_allocatable(node.kubelet, 4, capacity=4)

        assert len(node.kubelet.registrations) == 1
        assert node.kubelet.registrations[0].received_at_ns - accepts_ns < SLACK_NS
        assert len(lines_about(agent, "register")) <= 3, agent.text


@pytest.mark.slow
async def test_a_rejection_is_named_tried_again_with_back_off_and_fails_readiness() -> None:
    async with simulated_node("4x-t4") as node:
        await node.do("kubelet refuse", {"message": "not today"})
        async with agent_process(node) as agent:
            answer = await agent.wait_answer(
                "/preflight", lambda _, body: "registration_refused" in codes(body)
            )
            assert any("not today" in reason["message"] for reason in answer["reasons"])

            body = await agent.wait_answer("/readyz", lambda status, _: status == 500)
            while "[-]kubelet-registered" not in body:
                await asyncio.sleep(0.1)
                _, body = await agent.get("/readyz")
            assert (await agent.get("/livez"))[0] == 200
            assert len(node.kubelet.registrations) <= 12
            assert agent.process.returncode is None


async def test_after_the_last_rejection_it_registers_by_itself() -> None:
    async with simulated_node("4x-t4") as node:
        await node.do("kubelet refuse", {"times": "3"})
        async with agent_process(node) as agent:
            await wait_allocatable(node.kubelet, 4, capacity=4)

            assert [each.accepted for each in node.kubelet.registrations] == [False, False, False, True]
            await agent.wait_answer("/preflight", lambda status, _: status == 200)


async def test_a_kubelet_of_another_api_version_is_named_and_registered_with_when_it_is_replaced() -> None:
    async with simulated_node("4x-t4") as node:
        await node.do("kubelet other-version", {})
        async with agent_process(node) as agent:
            answer = await agent.wait_answer(
                "/preflight", lambda _, body: "registration_refused" in codes(body)
            )
            assert any("version" in reason["message"].lower() for reason in answer["reasons"])

            await node.do("kubelet clear", {})
            await node.kubelet.restart()
            await wait_allocatable(node.kubelet, 4, capacity=4)
