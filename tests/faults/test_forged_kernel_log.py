"""Lines that users can cause make no GPU unhealthy; what the driver logs and NVML confirms does."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.commands.client import AgentClient
from agent.simulation.node import SimulatedNode
from agent.threads import in_daemon_thread
from tests.harness import (
    GPU,
    AgentProcess,
    agent_process,
    simulated_node,
    uuids,
    wait_allocatable,
    wait_polls,
)

SOURCE = Path(__file__).with_name("forged_segfault.c")
KMSG = Path("/dev/kmsg")
BUS = "1b:00"
"""Of the first GPU of the simulated node; a name has room for no more of its address."""

pytestmark = pytest.mark.slow


async def serves(agent: AgentProcess) -> None:
    """Return once all of the agent runs: what the kubelet waits for comes first."""
    await agent.wait_logged(lambda line: line.get("listener") == "control")
    await agent.wait_answer("/debug/state", lambda status, _: status == 200)


async def all_reasons(agent: AgentProcess) -> dict[str, set[str]]:
    """Return the reason codes by UUID, of devices that have any."""
    _, document = await agent.get("/v1/devices")
    return {
        str(each["uuid"]): {reason["code"] for reason in each["reasons"]}
        for each in document["devices"]
        if each["reasons"]
    }


async def kept_lines(node: SimulatedNode) -> str:
    """Return the lines of the kernel log that the agent keeps as evidence of a fault."""
    client = AgentClient(node.directory.agent_flags()["control-socket"])
    answer: Any = await in_daemon_thread("client", lambda: client.send_command("bundle", {"gpu": "0"}))
    return "\n".join(answer["bundle"]["kernel_log"])


@pytest.mark.parametrize("policy", ["compat", "catalog"])
async def test_a_crash_under_the_drivers_name_makes_no_gpu_unhealthy(tmp_path: Path, policy: str) -> None:
    compiler = shutil.which("cc")
    if os.geteuid() != 0 or not os.access(KMSG, os.R_OK) or compiler is None:
        pytest.skip("needs root, /dev/kmsg and a C compiler")
    if Path("/proc/sys/debug/exception-trace").read_text(encoding="ascii").strip() == "0":
        pytest.skip("this kernel writes no line when a process crashes")
    binary = tmp_path / "fallen off the bus"
    subprocess.run([compiler, "-o", binary, SOURCE], check=True)
    async with (
        simulated_node("dgx-h100") as node,
        agent_process(node, kernel_log=str(KMSG), xid_policy=policy) as agent,
    ):
        await wait_allocatable(node.kubelet, 8)
        await serves(agent)
        crash = await asyncio.create_subprocess_exec(binary, f"NVRM: GPU {BUS}")
        assert await crash.wait() == -signal.SIGSEGV
        written = f"NVRM: GPU {BUS}[{crash.pid}]: segfault at 0"
        async with asyncio.timeout(60):
            while written not in await kept_lines(node):
                await asyncio.sleep(0.05)
        await wait_polls(node, 3)
        assert await all_reasons(agent) == {}
        assert node.kubelet.allocatable(GPU) == 8


@pytest.mark.parametrize("policy", ["compat", "catalog"])
async def test_a_lost_gpu_is_unhealthy_as_soon_as_nvml_agrees_and_shown_as_unconfirmed_while_it_does_not(
    policy: str,
) -> None:
    """No poll comes by itself here, so it is the line that has the GPU probed."""
    async with (
        simulated_node("dgx-h100") as node,
        agent_process(node, poll="10m", xid_policy=policy, recovery_quiet="1h") as agent,
    ):
        await wait_allocatable(node.kubelet, 8)
        await serves(agent)
        first, second = uuids(node)[:2]
        await node.do("kernel-xid", {"xid": "79", "gpu": "0"})
        await agent.wait_answer("/v1/devices", lambda _, document: "unconfirmed" in json.dumps(document))
        assert await all_reasons(agent) == {first: {"unconfirmed"}}
        assert node.kubelet.allocatable(GPU) == 8

        await node.do("return-code", {"code": "15", "gpu": "1"})
        await node.do("kernel-xid", {"xid": "79", "gpu": "1"})
        await wait_allocatable(node.kubelet, 7)
        assert await all_reasons(agent) == {first: {"unconfirmed"}, second: {"gpu_lost", "xid"}}


@pytest.mark.parametrize("reads_action", [True, False])
async def test_ten_announcements_around_three_repairs_leave_every_device_healthy(
    *, reads_action: bool
) -> None:
    async with simulated_node({"preset": "dgx-h100", "gpus": 2}) as node:
        if not reads_action:
            node.nvml.set_recovery_action(0, None)
        async with agent_process(node) as agent:
            await wait_allocatable(node.kubelet, 2)
            await serves(agent)
            await wait_polls(node, 5)  # until which sysfs was read, too
            announced_times = 0
            for _ in range(3):
                node.nvml.push_xid(0, 119)
                await wait_allocatable(node.kubelet, 1)
                for action in (1, 4) if announced_times else (1, 4, 1):
                    await announce(node, action, is_read=reads_action)
                    announced_times += 1
                await announce(node, 0, is_read=reads_action)
                announced_times += 1
                await node.do("reload-module", {})
                await wait_allocatable(node.kubelet, 2)
            assert announced_times == 10
            await agent.wait_answer(
                "/v1/devices",
                lambda _, document: all(not each["reasons"] for each in document["devices"]),
            )


async def announce(node: SimulatedNode, action: int, *, is_read: bool) -> None:
    """Announce a recovery action as the driver does, which the driver also answers where it supports that."""
    if is_read:
        node.nvml.set_recovery_action(0, action)
    words = {0: "None", 1: "GPU Reset Required", 4: "Drain and Reset"}[action]
    text = f"GPU recovery action changed from 0x0 (None) to {action:#x} ({words})"
    await node.do("kernel-xid", {"xid": "154", "gpu": "0", "text": text})
    node.nvml.push_xid(0, 154)
