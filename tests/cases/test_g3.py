"""G3, NVIDIA/kubevirt-gpu-device-plugin#86: the kernel's "no NUMA node" is no node to advertise."""

from pathlib import Path

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import GPU, AgentProcess, agent_process, simulated_node, wait_allocatable

FIVE_GPUS = {"preset": "8x-a100", "gpus": 5}
NUMA_FILES = {0: "0\n", 1: "1\n", 2: "-1\n", 3: None, 4: "x\n"}
NODES = {0: (0,), 1: (1,), 2: (), 3: (), 4: ()}
TWO_REPLICAS = """\
version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 2
"""


def write_numa_files(node: SimulatedNode) -> None:
    for number, text in NUMA_FILES.items():
        pci = node.spec.gpus[number].pci_bus_id
        file = node.directory.path / "sys/bus/pci/devices" / pci / "numa_node"
        if text is None:
            file.unlink()
        else:
            file.write_text(text)


def numa_warnings(agent: AgentProcess) -> list[tuple[object, object]]:
    return [
        (line["pci"], line["found"])
        for line in agent.log
        if line["message"].startswith("The NUMA node of the GPU at ")
    ]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_numa_node_is_sent_only_where_the_kernel_knows_one(replicas: int, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(TWO_REPLICAS if replicas == 2 else "version: v1\n")
    async with simulated_node(FIVE_GPUS) as node:
        write_numa_files(node)
        async with agent_process(node, config_file=str(config)) as agent:
            await wait_allocatable(node.kubelet, 5 * replicas, capacity=5 * replicas)
            devices = node.kubelet.devices(GPU)
            for number, nodes in NODES.items():
                shares = [each for id_, each in devices.items() if id_.startswith(node.nvml.uuid(number))]
                assert [each.numa_nodes for each in shares] == [nodes] * replicas
            assert numa_warnings(agent) == [(node.spec.gpus[4].pci_bus_id, "x")]
