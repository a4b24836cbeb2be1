"""Fault 27: a program that faults without end costs a log entry a minute, and no device.

Right: faults and commands stay in the ring and in the log, however many events a program causes.
"""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from agent.views.event_files import path_of_others, read
from tests.harness import agent_process, gpu_agent, simulated_node, wait_allocatable

pytestmark = pytest.mark.slow

FAULTS = 1_000
PROGRAM_XID = 31


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_thousand_faults_of_a_program_cost_one_entry_and_no_device() -> None:
    async with simulated_node() as node:
        flags = node.directory.agent_flags()
        async with agent_process(node) as agent:
            await wait_allocatable(node.kubelet, 4)
            await agent.wait_answer("/readyz", lambda code, _: code == 200)
            done = await gpu_agent("hold", "2", "--why", "fan", "--control-socket", flags["control-socket"])
            assert done.status == 0
            await wait_allocatable(node.kubelet, 3)
            began_s, before_s = time.monotonic(), cpu_s(agent.process.pid)
            for number in range(FAULTS):
                node.nvml.push_xid(0, PROGRAM_XID)
                if number % 4 == 3:
                    await asyncio.sleep(0.002)
            await agent.wait_answer(
                "/debug/state", lambda _, state: state["gpus"][0]["xids"].get(str(PROGRAM_XID)) == FAULTS
            )
            took_s, used_s = time.monotonic() - began_s, cpu_s(agent.process.pid) - before_s
            node.nvml.push_xid(1, 79)
            await wait_allocatable(node.kubelet, 2)
            _, document = await agent.get("/v1/events")
            of_program = [each for each in document["events"] if each["fields"].get("xid") == PROGRAM_XID]
            assert len(of_program) == 1
            assert await agent.stop() == 0
        log = list(read(str(Path(flags["state-dir"], "events.jsonl"))))
        others = Path(path_of_others(str(Path(flags["state-dir"], "events.jsonl")))).read_text()

    of_program = [event for event in log if event["fields"].get("xid") == PROGRAM_XID]
    assert len(of_program) <= 2
    assert sum(event["fields"]["count"] for event in of_program) == FAULTS
    assert {json.loads(line)["kind"] for line in others.splitlines()} == {"xid"}
    assert [event["number"] for event in log] == sorted(event["number"] for event in log)
    assert {"A GPU is held", "A condition was raised"} <= {event["message"] for event in log}
    print(  # noqa: T201 - the figures
        f"\n{FAULTS} faults in {took_s:.1f} s: {used_s:.2f} s of CPU time,"
        f" {used_s / FAULTS * 1e6:.0f} us each, {len(of_program)} entries"
    )
