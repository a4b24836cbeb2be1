"""``gpu-agent topology``: the connections of the GPUs, as nvidia-smi shows them."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, cast

import pytest

from agent.commands.topology import LEGEND, topology_lines
from agent.model.facts import TopologySeen
from agent.model.topology import NvLinks, PcieDistance, TopologySample
from agent.threads import in_daemon_thread
from agent.views import documents
from tests.core.build import Node, enumerated, gpu, healthy_node
from tests.harness import PATIENCE_S, clean_environment, flags_of, running, simulated_node


def asked(node: Node) -> dict[str, Any]:
    """Return the agent's answer, as a client parses it."""
    return cast("dict[str, Any]", json.loads(json.dumps(documents.topology(node.snapshot(), str))))


def matrix(node: Node) -> list[str]:
    lines = topology_lines(asked(node)["gpus"])
    return lines[: lines.index("")]


def sampled(samples: Mapping[int, TopologySample], count: int = 3) -> Node:
    node = healthy_node(*[gpu(number, numa=0) for number in range(count)])
    node.apply(*(TopologySeen(gpu(number).uuid, sample) for number, sample in samples.items()))
    return node


PAIR = {
    0: TopologySample(
        NvLinks({"0000:11:00.0": 4}), {"0000:12:00.0": PcieDistance.HOST_BRIDGE}, cpu_affinity="0-15"
    ),
    1: TopologySample(
        NvLinks({"0000:10:00.0": 4}), {"0000:12:00.0": PcieDistance.CROSS_NODE}, cpu_affinity="0-15"
    ),
}


def test_the_matrix_has_a_line_and_a_column_for_each_gpu() -> None:
    assert matrix(sampled(PAIR | {2: TopologySample(NvLinks())})) == [
        "GPU   GPU0  GPU1  GPU2  CPU-AFFINITY  NUMA-AFFINITY",
        "GPU0  X     NV4   PHB   0-15          0",
        "GPU1  NV4   X     SYS   0-15          0",
        "GPU2  PHB   SYS   X     <unknown>     0",
    ]


def test_an_unknown_link_is_a_question_mark() -> None:
    assert matrix(sampled(PAIR)) == [
        "GPU   GPU0  GPU1  GPU2  CPU-AFFINITY  NUMA-AFFINITY",
        "GPU0  X     NV4   ?     0-15          0",
        "GPU1  NV4   X     ?     0-15          0",
        "GPU2  ?     ?     X     <unknown>     0",
    ]


def test_a_gpu_that_is_no_longer_listed_is_named_by_its_pci_address() -> None:
    node = sampled(PAIR)
    node.apply(enumerated(gpu(1, index=0), gpu(2, index=1)))
    assert matrix(node) == [
        "GPU           0000:10:00.0  GPU0  GPU1  CPU-AFFINITY  NUMA-AFFINITY",
        "0000:10:00.0  X             ?     ?     0-15          0",
        "GPU0          ?             X     ?     0-15          <unknown>",
        "GPU1          ?             ?     X     <unknown>     <unknown>",
    ]


def test_the_legend_explains_every_name_there_is() -> None:
    explained = {line.split()[0] for line in LEGEND.splitlines()}
    assert explained == {"X", "NV#", "PIX", "PXB", "PHB", "NODE", "SYS", "?"}
    assert topology_lines([])[-1] == LEGEND.splitlines()[-1]


def test_the_document_has_each_link_with_null_for_unknown_values() -> None:
    document = asked(sampled(PAIR | {2: TopologySample(None)}))
    assert document["apiVersion"] == "gpu-agent/v1"
    first = document["gpus"][0]
    assert (first["gpu"], first["pci"], first["cpu_affinity"], first["numa_node"]) == (
        0,
        "0000:10:00.0",
        "0-15",
        0,
    )
    assert first["links"] == [
        {"uuid": gpu(1).uuid, "nvlinks": 4, "pcie": None, "kind": "NV4"},
        {"uuid": gpu(2).uuid, "nvlinks": None, "pcie": "host_bridge", "kind": None},
    ]


@pytest.mark.slow
async def test_a_running_agent_shows_how_its_gpus_are_connected() -> None:
    async with simulated_node("dgx-h100") as node, running(flags_of(node)) as agent:
        await agent.wait_registered()
        await agent.wait_line("Listening", listener="control")

        async def ask(*arguments: str) -> str:
            command = [sys.executable, "-m", "agent", "topology", *arguments]
            socket = {"GPU_AGENT_CONTROL_SOCKET": agent.flags["control-socket"]}
            done = await in_daemon_thread(
                "command",
                lambda: subprocess.run(
                    command, capture_output=True, text=True, check=True, env=clean_environment() | socket
                ),
            )
            return done.stdout

        async with asyncio.timeout(PATIENCE_S):
            while "?" in (await ask()).split("\n\n")[0]:
                pass
        document = json.loads(await ask("-o", "json"))
        kinds = {link["kind"] for each in document["gpus"] for link in each["links"]}
        assert (len(document["gpus"]), kinds) == (8, {"NV18"})
        assert (await ask("-o", "yaml")).startswith("apiVersion: gpu-agent/v1\n")
        assert "GPU7  NV18  NV18  NV18  NV18  NV18  NV18  NV18  X     56-111,168-223  1" in await ask()
