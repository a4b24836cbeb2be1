"""CDI on a whole simulated node: what a pod is given is in a file, and what the file names is there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.core.allocation.cdi_schema import problems_of
from agent.simulation.kubelet import ContainerOutcome
from agent.simulation.node import SimulatedNode
from agent.simulation.roots import remove_device_node, write_device_node
from tests.harness import GPU, agent_process, gpu_agent, short_directory, simulated_node, wait_allocatable

MIG_NODE = {
    "preset": "8x-a100",
    "gpus": [{"mig": {"enabled": True, "devices": [{"profile": "1g.10gb", "gi": gi} for gi in (1, 2)]}}],
}
MIG = "nvidia.com/mig-1g.10gb"


def documents(node: SimulatedNode) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(node.directory.cdi.glob("*.json"))]


def resolved(node: SimulatedNode, name: str) -> list[dict[str, Any]]:
    """Return the edits that a runtime applies for a device: its own, and those of all devices."""
    kind, _, device = name.partition("=")
    (document,) = (each for each in documents(node) if each["kind"] == kind)
    (found,) = (each for each in document["devices"] if each["name"] == device)
    return [found["containerEdits"], document.get("containerEdits", {})]


def host_paths(edits: list[dict[str, Any]]) -> Iterator[Path]:
    for each in edits:
        for key in ("deviceNodes", "mounts"):
            yield from (Path(named["hostPath"]) for named in each.get(key, ()))
        yield from (Path(hook["path"]) for hook in each.get("hooks", ()))


async def container(node: SimulatedNode, name: str, resource: str = GPU) -> ContainerOutcome:
    pod = await node.kubelet.run_pod(name, "ns1", {"main": {resource: 1}})
    assert pod.running, pod.message
    return pod.containers["main"]


@pytest.mark.parametrize("ids", ["uuid", "index"])
async def test_a_gpu_is_resolved_to_files_of_the_node(ids: str) -> None:
    flags = {"device_list_strategy": "cdi-cri", "device_id_strategy": ids}
    async with simulated_node({"preset": "4x-t4", "gpus": 2}) as node, agent_process(node, **flags):
        await wait_allocatable(node.kubelet, 2, capacity=2)
        (name,) = (await container(node, "job")).cdi_devices
        edits = resolved(node, name)
        assert [path for path in host_paths(edits) if not path.exists()] == []
        assert [each for document in documents(node) for each in problems_of(document)] == []
        nodes = [each["path"] for each in edits[0]["deviceNodes"]]
        assert nodes == ["/dev/nvidia0", "/dev/dri/card0", "/dev/dri/renderD128"]


async def test_a_mig_device_is_resolved_to_its_gpu_and_its_capabilities() -> None:
    flags = {"device_list_strategy": "cdi-annotations", "mig_strategy": "mixed"}
    async with simulated_node(MIG_NODE) as node, agent_process(node, **flags):
        await wait_allocatable(node.kubelet, 2, capacity=2, resource=MIG)
        (name,) = (await container(node, "job", MIG)).annotations.values()
        (own, _) = resolved(node, name)
        paths = [each["path"] for each in own["deviceNodes"]]
        # Of GPU instance 1: see agent.simulation.roots.capability_minors.
        assert paths == ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"]
        assert all(Path(each["hostPath"]).exists() for each in own["deviceNodes"])


async def test_a_mig_device_without_its_capability_node_is_not_advertised_until_the_node_is_there() -> None:
    flags = {"device_list_strategy": "cdi-cri", "mig_strategy": "mixed"}
    async with simulated_node(MIG_NODE) as node:
        capability = "nvidia-caps/nvidia-cap13"
        remove_device_node(capability, node.directory.dev)
        async with agent_process(node, **flags) as agent:
            await wait_allocatable(node.kubelet, 1, capacity=2, resource=MIG)
            device = next(iter(node.kubelet.unhealthy(MIG)))

            def is_reported(status: int, body: Any) -> bool:
                reasons = [each["reasons"] for each in body["devices"] if each["id"] == device]
                return status == 200 and [each["code"] for each in reasons[0]] == ["device_node_missing"]

            await agent.wait_answer("/v1/devices", is_reported)
            write_device_node(capability, node.directory.dev)
            await wait_allocatable(node.kubelet, 2, capacity=2, resource=MIG)


async def test_a_new_mig_layout_is_in_the_file_when_its_devices_can_be_allocated() -> None:
    flags = {"device_list_strategy": "cdi-cri", "mig_strategy": "mixed"}
    async with simulated_node(MIG_NODE) as node, agent_process(node, **flags):
        await wait_allocatable(node.kubelet, 2, capacity=2, resource=MIG)
        await node.do("mig", {"gpu": "0", "devices": "7g.80gb"})
        await wait_allocatable(node.kubelet, 1, capacity=1, resource="nvidia.com/mig-7g.80gb")
        (name,) = (await container(node, "job", "nvidia.com/mig-7g.80gb")).cdi_devices
        assert [path for path in host_paths(resolved(node, name)) if not path.exists()] == []


@pytest.mark.slow
async def test_the_scenario_runs_a_pod_although_the_file_was_taken_away() -> None:
    with short_directory() as parent:
        result = await gpu_agent("demo", "--scenario=cdi", f"--node-dir={parent / 'node'}")
    assert result.status == 0, result.err
    for reported in (
        "Pod default/job-0 runs with k8s.device-plugin.nvidia.com/gpu=GPU-",
        "The CDI spec file k8s.device-plugin.nvidia.com-gpu.json is deleted",
        "Pod default/job-1 runs with k8s.device-plugin.nvidia.com/gpu=GPU-",
    ):
        assert reported in result.out
