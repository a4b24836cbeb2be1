"""Fault 12: SIGKILL at a random moment, and a restart with running pods.

Right: the state is as before, or unknown and evaluated anew, and never silently Healthy; what pods hold is
theirs. Twenty kills by default; GPU_AGENT_TEST_KILLS sets another number (the promise is 200).
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.commands.client import AgentClient
from agent.errors import AgentError
from agent.model.snapshot import Durable
from agent.runtime.bootstrap import boot_id_of
from agent.simulation.node import SimulatedNode
from agent.sinks import statefile
from agent.threads import in_daemon_thread
from tests.harness import GPU, PATIENCE_S, AgentProcess, flags_of, running, simulated_node

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("GPU_AGENT_TEST_KILLS", "20"))

XIDS = (48, 54, 64, 79, 94, 119)
"""One of each class; none of them is over within the test."""


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node("dgx-h100") as made:
        yield made


def kept(node: SimulatedNode) -> Durable:
    """What a process that is started now finds; a file that is unusable would fail the test."""
    flags = node.directory.agent_flags()
    path = Path(flags["state-dir"], "state.json")
    if not path.exists():
        return Durable()
    found = statefile.load(str(path), boot_id=boot_id_of(flags["proc-root"]))
    assert found is not None
    return found


def unhealthy_of(durable: Durable) -> set[str]:
    return {each.placement.gpu for each in durable.conditions if each.flips}


def unhealthy(node: SimulatedNode) -> set[str]:
    return set(node.kubelet.unhealthy(GPU))


async def listed_as(node: SimulatedNode, lists: int, broken: set[str]) -> None:
    """Wait until the kubelet got a list after so many, and knows exactly these devices as unhealthy."""
    await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > lists, PATIENCE_S)
    await node.kubelet.wait_for(lambda _: unhealthy(node) == broken, PATIENCE_S)


async def recover(agent: AgentProcess, uuid: str) -> None:
    client = AgentClient(agent.flags["control-socket"])
    try:
        await in_daemon_thread("client", lambda: client.send_command("recover", {"gpu": uuid}))
    except AgentError:
        return  # it was killed meanwhile


async def test_nothing_that_is_unhealthy_is_healthy_after_a_kill(node: SimulatedNode) -> None:
    chance = random.Random(12)
    broken: set[str] = set()
    for number in range(KILLS):
        lists = len(node.kubelet.lists)
        async with running(flags_of(node, recovery_quiet="24h")) as agent:
            await listed_as(node, lists, broken)
            for listed in node.kubelet.lists[lists:]:
                assert broken <= set(listed.unhealthy), f"a list of life {number} forgot what was unhealthy"
            if number == 0:
                assert (await node.kubelet.run_pod("train", "ml", {"main": {GPU: 2}})).running
            before, least, most = broken, set(broken), set(broken)
            async with asyncio.TaskGroup() as group:
                if len(before) > 4 or (before and chance.random() < 0.3):
                    uuid = chance.choice(sorted(before))
                    least.discard(uuid)
                    await agent.wait_line("Listening", listener="control")
                    group.create_task(recover(agent, uuid))
                else:
                    gpu = chance.randrange(node.nvml.gpus)
                    most.add(node.nvml.uuid(gpu))
                    node.nvml.push_xid(gpu, chance.choice(XIDS))
                await asyncio.sleep(chance.uniform(0, 0.03))
                agent.signal(signal.SIGKILL)
            await agent.ended()
        broken = unhealthy_of(await in_daemon_thread("state-reader", lambda: kept(node)))
        assert least <= broken <= most, f"kill {number} lost or invented a fault"
    assert [pod.name for pod in node.kubelet.pods if pod.running] == ["train"]
    assert len(node.kubelet.allocations) == 1


@pytest.mark.parametrize("faults", [{2: 64}, {0: 79, 5: 48}])
async def test_the_conditions_are_the_same_before_and_after(
    node: SimulatedNode, faults: dict[int, int]
) -> None:
    async with running(flags_of(node)) as agent:
        await agent.wait_registered()
        await node.kubelet.wait_for(lambda kubelet: kubelet.allocatable(GPU) == 8, PATIENCE_S)
        for gpu, xid in faults.items():
            node.nvml.push_xid(gpu, xid)
        wanted = {node.nvml.uuid(gpu) for gpu in faults}
        await node.kubelet.wait_for(lambda _: unhealthy(node) == wanted, PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while (
                unhealthy_of(before := await in_daemon_thread("state-reader", lambda: kept(node))) != wanted
            ):
                await asyncio.sleep(0.01)
        agent.signal(signal.SIGKILL)
        await agent.ended()
    lists = len(node.kubelet.lists)
    async with running(flags_of(node)) as agent:
        await listed_as(node, lists, wanted)
        assert await agent.stop() == 0
    after = await in_daemon_thread("state-reader", lambda: kept(node))
    assert [each.key for each in after.conditions] == [each.key for each in before.conditions]
    assert [each.since_ns for each in after.conditions] == [each.since_ns for each in before.conditions]
    assert after.xids == before.xids


async def restarted(node: SimulatedNode, *, wanted: set[str], read: int) -> Durable:
    """Let an agent read so much of the kernel log, and end; returns what it kept."""
    async with running(flags_of(node)) as agent:
        await node.kubelet.wait_for(lambda _: bool(node.kubelet.devices(GPU)), PATIENCE_S)
        await node.kubelet.wait_for(lambda _: unhealthy(node) == wanted, PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while (now := await in_daemon_thread("state-reader", lambda: kept(node))).kernel_log_read != read:
                await asyncio.sleep(0.01)
        assert await agent.stop() == 0
    return now


async def test_an_xid_that_came_while_no_agent_was_there_is_evaluated_by_the_next_one(
    node: SimulatedNode,
) -> None:
    address = node.spec.gpus[2].pci_bus_id.rpartition(".")[0]
    node.kernel_log.write(f"NVRM: Xid (PCI:{address}): 48, pid=7, name=x, before any agent of this boot")
    await restarted(node, wanted=set(), read=0)
    broken = {node.nvml.uuid(2)}
    node.nvml.set_recovery_action(2, 1)
    node.kernel_log.write(f"NVRM: Xid (PCI:{address}): 48, pid=7, name=x, while no agent was there")
    first = await restarted(node, wanted=broken, read=1)
    again = await restarted(node, wanted=broken, read=1)
    assert unhealthy_of(again) == unhealthy_of(first) == broken
    assert again.xids == first.xids == ((node.nvml.uuid(2), 48, 2),)
