"""C1, NVIDIA/k8s-device-plugin#1929: of a broken GPU's devices only one turns Unhealthy, or none."""

import pytest

from agent.model.ids import ALL
from agent.simulation.node import SimulatedNode
from tests.harness import GPU, agent_process, nothing_more, simulated_node, uuids, wait_allocatable

SHARED = """\
version: v1
sharing:
  timeSlicing:
    resources:
      - {name: nvidia.com/gpu, replicas: 3}
"""
MIG_NODE = {
    "preset": "8x-a100",
    "gpus": [{"mig": {"enabled": True, "devices": [{"profile": "1g.10gb", "gi": gi} for gi in (1, 2, 3)]}}],
}
MIG = "nvidia.com/mig-1g.10gb"
IGNORED = (13, 31, 43, 45, 68, 109)


async def test_an_xid_makes_every_replica_of_its_gpu_unhealthy_in_one_message_and_no_other() -> None:
    async with simulated_node({"preset": "4x-t4", "gpus": 2}) as node:
        config = node.directory.path / "config.yaml"
        config.write_text(SHARED)
        async with agent_process(node, config_file=str(config)):
            await wait_allocatable(node.kubelet, 6, capacity=6)
            before = len(node.kubelet.lists)
            u0, u1 = uuids(node)

            node.nvml.push_xid(0, 79)
            await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > before, 30)

            first = node.kubelet.lists[before]
            assert first.unhealthy == (f"{u0}::0", f"{u0}::1", f"{u0}::2")
            assert first.healthy == (f"{u1}::0", f"{u1}::1", f"{u1}::2")


def mig_devices(node: SimulatedNode) -> list[str]:
    return [node.nvml.text(0, "mig_uuid", row) for row in range(3)]


@pytest.mark.parametrize(
    ("gi", "ci", "unhealthy"),
    [(2, 0, {1}), (ALL, ALL, {0, 1, 2}), (2, ALL, {1})],
    ids=["one compute instance", "the whole GPU", "one GPU instance"],
)
async def test_an_xid_on_mig_makes_exactly_what_it_names_unhealthy(
    gi: int, ci: int, unhealthy: set[int]
) -> None:
    async with simulated_node(MIG_NODE) as node, agent_process(node, mig_strategy="mixed"):
        await wait_allocatable(node.kubelet, 3, capacity=3, resource=MIG)
        before = len(node.kubelet.lists)

        node.nvml.push_xid(0, 48, gi=gi, ci=ci)
        await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > before, 30)

        devices = mig_devices(node)
        assert set(node.kubelet.lists[before].unhealthy) == {devices[row] for row in unhealthy}


async def test_an_xid_of_an_instance_that_is_not_there_flips_nothing_and_is_reported_once() -> None:
    async with simulated_node(MIG_NODE) as node, agent_process(node, mig_strategy="mixed") as agent:
        await wait_allocatable(node.kubelet, 3, capacity=3, resource=MIG)

        node.nvml.push_xid(0, 48, gi=9, ci=0)
        await agent.wait_logged(lambda line: line["level"] == "warning" and line.get("xid") == 48)

        await nothing_more(node.kubelet, lambda kubelet: kubelet.allocatable(MIG) < 3, 1)
        assert len([line for line in agent.log if line["level"] == "warning"]) == 1, agent.text


async def test_application_xids_flip_nothing_and_are_counted() -> None:
    async with simulated_node({"preset": "4x-t4", "gpus": 2}) as node, agent_process(node) as agent:
        await wait_allocatable(node.kubelet, 2, capacity=2)
        for xid in IGNORED:
            node.nvml.push_xid(0, xid)

        expected = {str(xid): 1 for xid in IGNORED}
        state = await agent.wait_answer("/debug/state", lambda _, body: body["gpus"][0]["xids"] == expected)

        assert state["gpus"][1]["xids"] == {}
        assert node.kubelet.allocatable(GPU) == 2
        assert all(not each.unhealthy for each in node.kubelet.lists if len(each.healthy) == 2)
