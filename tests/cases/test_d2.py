"""D2, NVIDIA/nvidia-container-toolkit#1239: the CDI name that was answered is in no spec file."""

import json
from pathlib import Path
from typing import Any

from agent.simulation.kubelet import PodOutcome
from agent.simulation.node import SimulatedNode
from tests.harness import GPU, agent_process, simulated_node, uuids, wait_allocatable

KIND = "k8s.device-plugin.nvidia.com/gpu"
NODE = {"preset": "4x-t4", "gpus": 2}
FOREIGN: dict[str, Any] = {
    "cdiVersion": "0.5.0",
    "kind": "management.nvidia.com/gpu",
    "devices": [{"name": "all", "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}],
}


def spec_file(node: SimulatedNode) -> Path:
    return node.directory.path / "cdi" / "k8s.device-plugin.nvidia.com-gpu.json"


def add_foreign_spec(node: SimulatedNode) -> Path:
    path = node.directory.path / "cdi" / "management.nvidia.com-gpu.json"
    path.parent.mkdir()
    path.write_text(json.dumps(FOREIGN))
    return path


def qualified_names(path: Path) -> list[str]:
    document = json.loads(path.read_text())
    return sorted(f"{document['kind']}={device['name']}" for device in document["devices"])


async def run_pod(node: SimulatedNode, name: str) -> PodOutcome:
    return await node.kubelet.run_pod(name, "ns1", {"main": {GPU: 1}})


def cdi_names(pod: PodOutcome) -> tuple[str, ...]:
    return pod.containers["main"].cdi_devices


async def test_the_agents_own_file_lists_exactly_the_gpus_of_the_node() -> None:
    async with simulated_node(NODE) as node:
        foreign = add_foreign_spec(node)
        async with agent_process(node, device_list_strategy="cdi-cri"):
            await wait_allocatable(node.kubelet, 2, capacity=2)

            first, second = await run_pod(node, "job-0"), await run_pod(node, "job-1")

            expected = [f"{KIND}={uuid}" for uuid in uuids(node)]
            assert sorted([*cdi_names(first), *cdi_names(second)]) == expected
            assert qualified_names(spec_file(node)) == expected
            assert json.loads(foreign.read_text()) == FOREIGN


async def test_a_deleted_file_is_back_before_the_answer() -> None:
    async with simulated_node(NODE) as node, agent_process(node, device_list_strategy="cdi-cri"):
        await wait_allocatable(node.kubelet, 2, capacity=2)
        assert (await run_pod(node, "before")).phase == "Running"

        spec_file(node).unlink()
        after = await run_pod(node, "after")

        (name,) = cdi_names(after)
        assert name in qualified_names(spec_file(node))


async def test_a_file_that_cannot_be_written_again_fails_the_call_with_the_name() -> None:
    async with simulated_node(NODE) as node, agent_process(node, device_list_strategy="cdi-cri") as agent:
        await wait_allocatable(node.kubelet, 2, capacity=2)
        assert (await run_pod(node, "before")).phase == "Running"

        # A directory in its place cannot be replaced by a file, not even by root.
        spec_file(node).unlink()
        spec_file(node).mkdir()
        (spec_file(node) / "occupied").touch()
        after = await run_pod(node, "after")

        assert (after.phase, after.reason) == ("Failed", "UnexpectedAdmissionError")
        assert any(f"{KIND}={uuid}" in after.message for uuid in uuids(node))
        assert "sink-cdi" in await agent.wait_answer("/readyz", lambda status, _: status == 500)
        await agent.wait_answer("/readyz?exclude=sink-cdi", lambda status, _: status == 200)
