"""O1, NVIDIA/k8s-device-plugin#221: the driver was updated under the plugin, which blocks or lies.

The case's 10 s and 30 s are a few polls here: what counts is that the agent has settled on what it saw first.
That the labels file holds no GPU labels waits for the labels (PENDING.md).
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from agent.simulation.node import SimulatedNode
from tests.harness import (
    PATIENCE_S,
    POLL_NS,
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
from tests.sources.recorder import until

INIT = "nvmlInitWithFlags"
TICKS = os.sysconf("SC_CLK_TCK")


def open_devices(agent: AgentProcess, node: SimulatedNode) -> set[str]:
    """The device doubles that any thread of the agent has open."""
    found = set()
    for link in Path(f"/proc/{agent.process.pid}/task").glob("*/fd/*"):
        with suppress(OSError):
            found.add(str(link.readlink()))
    prefix = f"{node.directory.path}/dev/"
    return {path.removeprefix(prefix) for path in found if path.startswith(prefix)}


def cpu_s(agent: AgentProcess) -> float:
    fields = Path(f"/proc/{agent.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def wait_inits(node: SimulatedNode, count: int) -> None:
    calls = node.nvml.calls(INIT) + count
    await until(lambda: node.nvml.calls(INIT) >= calls)


async def test_a_library_and_a_driver_of_different_versions_are_named_and_waited_for() -> None:
    async with simulated_node("8x-a100") as node:
        node.nvml.unload_driver(code=18)
        async with agent_process(node, fail_on_init_error="false") as agent:
            body = await agent.wait_answer(
                "/preflight", lambda status, body: status == 503 and "nvml_version_mismatch" in codes(body)
            )
            assert not body["ready"]
            await wait_inits(node, 3)

            assert (await agent.get("/healthz"))[0] == 200
            assert not [each for each in node.kubelet.lists if each.healthy]
            logged = [line for line in agent.log if "different versions" in str(line)]
            assert len(logged) == 1, agent.text

            node.nvml.load_driver()
            await wait_allocatable(node.kubelet, 8, capacity=8)
            assert agent.process.returncode is None


async def test_a_driver_that_dies_makes_all_unhealthy_can_be_unloaded_and_recovers_without_a_restart() -> (
    None
):
    async with simulated_node("8x-a100") as node, agent_process(node, fail_on_init_error="false") as agent:
        await wait_allocatable(node.kubelet, 8, capacity=8)
        await wait_polls(node, 2)
        assert "nvidiactl" in open_devices(agent, node)

        died_ns = time.monotonic_ns()
        node.nvml.unload_driver(code=999)
        await wait_allocatable(node.kubelet, 0, capacity=8)
        first = next(each for each in node.kubelet.lists if len(each.unhealthy) == 8)
        assert first.at_ns - died_ns <= 2 * POLL_NS + SLACK_NS

        await until(lambda: open_devices(agent, node) == set())
        inits, used_s, began_s = node.nvml.calls(INIT), cpu_s(agent), time.monotonic()
        await wait_inits(node, 4)
        took_s = time.monotonic() - began_s
        assert node.nvml.calls(INIT) - inits <= took_s + 1
        assert cpu_s(agent) - used_s < 0.05 * took_s
        assert open_devices(agent, node) == set()
        assert node.nvml.inits == node.nvml.shutdowns
        dead = [each for each in node.kubelet.lists if each.at_ns >= first.at_ns]
        assert not [each for each in dead if each.healthy]
        assert (await agent.get("/livez"))[0] == 200

        registered = node.nvml.calls("nvmlDeviceRegisterEvents")
        recovered_ns = time.monotonic_ns()
        node.nvml.load_driver()
        await wait_allocatable(node.kubelet, 8, capacity=8)
        back = next(
            each for each in node.kubelet.lists if each.at_ns > recovered_ns and len(each.healthy) == 8
        )
        assert back.at_ns - recovered_ns <= 3 * POLL_NS + SLACK_NS
        assert agent.process.returncode is None
        assert accepted(node.kubelet) == len(node.kubelet.registrations) == 1

        await until(lambda: node.nvml.calls("nvmlDeviceRegisterEvents") >= registered + 8)
        waits = node.nvml.calls("nvmlEventSetWait")
        await until(lambda: node.nvml.calls("nvmlEventSetWait") > waits)
        node.nvml.push_xid(5, 79)
        await node.kubelet.wait_for(lambda seen: seen.lists[-1].unhealthy == (uuids(node)[5],), PATIENCE_S)
