"""G1, NVIDIA/k8s-device-plugin#231: one GPU falls off the bus and every GPU pod on the node is rejected."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import (
    GPU,
    POLL_NS,
    SLACK_NS,
    agent_process,
    simulated_node,
    uuids,
    wait_allocatable,
    wait_polls,
)
from tests.sources.recorder import until

EIGHT_WITHOUT_NVLINK = {"preset": "8x-a100", "gpu": {"nvlink": None}}
LOST = 3
PCI = "0000:4e:00.0"
PAIR = "nvmlDeviceGetTopologyCommonAncestor"


def falls_off_with_an_xid(node: SimulatedNode) -> None:
    node.nvml.push_xid(LOST, 79)
    node.nvml.set_return(None, 15, gpu=LOST)


def falls_off_without_a_word(node: SimulatedNode) -> None:
    node.nvml.hide_gpu(LOST)


@pytest.mark.parametrize(
    ("falls_off", "xids"),
    [(falls_off_with_an_xid, {"79": 1}), (falls_off_without_a_word, {})],
    ids=["a: with an XID", "b: without one, and NVML counts one less"],
)
async def test_a_gpu_that_falls_off_is_named_and_the_seven_others_stay_allocatable(
    falls_off: Callable[[SimulatedNode], None], xids: dict[str, int]
) -> None:
    async with simulated_node(EIGHT_WITHOUT_NVLINK) as node, agent_process(node) as agent:
        await wait_allocatable(node.kubelet, 8, capacity=8)
        await wait_polls(node, 2)
        lost = uuids(node)[LOST]

        lost_ns = time.monotonic_ns()
        falls_off(node)
        await wait_allocatable(node.kubelet, 7, capacity=8)

        first = next(each for each in node.kubelet.lists if each.unhealthy and each.at_ns > lost_ns)
        assert first.at_ns - lost_ns <= 2 * POLL_NS + SLACK_NS
        assert first.unhealthy == (lost,)

        def is_reported(status: int, body: Any) -> bool:
            return status == 200 and "gpu_lost" in codes_of(body, lost)

        body = await agent.wait_answer("/v1/devices", is_reported)
        (device,) = [each for each in body["devices"] if each["id"] == lost]
        assert (len(body["devices"]), device["health"], device["pci"]) == (8, "unhealthy", PCI)
        (reason,) = [each for each in device["reasons"] if each["code"] == "gpu_lost"]
        assert "reset" in reason["advice"]
        assert "reboot" in reason["advice"]
        assert reason["message"].endswith(("(code 15)", "NVML does not list the GPU any more"))

        state = await agent.wait_answer("/debug/state", lambda status, _body: status == 200)
        (view,) = [each for each in state["gpus"] if each["uuid"] == lost]
        assert view["xids"] == xids
        assert ("xid" in codes_of(body, lost)) == bool(xids)


def codes_of(body: Any, device: str) -> set[str]:
    return {reason["code"] for each in body["devices"] if each["id"] == device for reason in each["reasons"]}


async def test_a_gpu_that_fell_off_stays_unhealthy_while_the_others_are_polled_on() -> None:
    async with simulated_node(EIGHT_WITHOUT_NVLINK) as node, agent_process(node, poll="100ms"):
        await wait_allocatable(node.kubelet, 8, capacity=8)
        falls_off_with_an_xid(node)
        await wait_allocatable(node.kubelet, 7, capacity=8)
        lists = len(node.kubelet.lists)
        await wait_polls(node, 10)
        assert all(each.unhealthy == (uuids(node)[LOST],) for each in node.kubelet.lists[lists:])


@pytest.mark.parametrize(
    ("falls_off", "hardware", "sampled_again"),
    [
        (falls_off_with_an_xid, EIGHT_WITHOUT_NVLINK, 0),
        (falls_off_without_a_word, EIGHT_WITHOUT_NVLINK, 7 * 6),
        (falls_off_with_an_xid, "8x-a100", 0),
    ],
    ids=["a", "b", "a, with NVLinks"],
)
async def test_a_thousand_pods_get_the_gpus_that_did_not_fall_off(
    falls_off: Callable[[SimulatedNode], None], hardware: str | dict[str, object], sampled_again: int
) -> None:
    """``sampled_again``: the pairs of GPUs of which NVML lists fewer than before."""
    async with simulated_node(hardware) as node, agent_process(node) as agent:
        await wait_allocatable(node.kubelet, 8, capacity=8)
        await agent.wait_answer("/v1/topology", has_topology)
        calls = node.nvml.calls(PAIR) + sampled_again
        falls_off(node)
        await wait_allocatable(node.kubelet, 7, capacity=8)
        client = node.kubelet.client(GPU)
        assert client is not None
        others = [uuid for number, uuid in enumerate(uuids(node)) if number != LOST]
        await until(lambda: node.nvml.calls(PAIR) >= calls)
        for number in range(1000):
            chosen = await client.preferred(
                others[number % 7 :] + others[: number % 7], (), (1, 2, 7)[number % 3]
            )
            assert len(set(chosen)) == (1, 2, 7)[number % 3]
            assert set(chosen) <= set(others)
            if number % 50 == 0:
                given = await client.allocate(chosen)
                assert set(given.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == set(chosen)
        assert node.nvml.calls(PAIR) == calls
        # Also one that still names the lost GPU is answered, without it where there are others.
        assert uuids(node)[LOST] not in await client.preferred(uuids(node), (), 7)


def has_topology(status: int, body: Any) -> bool:
    return status == 200 and all(link["kind"] for gpu in body["gpus"] for link in gpu["links"])
