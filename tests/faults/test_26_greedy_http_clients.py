"""Fault 26: clients of the HTTP port that take all there is keep no probe, command or kubelet out."""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.sinks.http.places import Bounds
from tests.harness import (
    PATIENCE_S,
    ROOT,
    AgentProcess,
    agent_process,
    simulated_node,
    uuids,
    wait_allocatable,
)
from tests.killed_runs import WITH_US
from tests.sinks.registrar import plugin

pytestmark = pytest.mark.slow

MIB = 2**20
PROBES = 300
ATTACKS = {"idle": 3_000, "readers": 200, "disguised": 50, "unread": 100, "drip": 300}


@asynccontextmanager
async def attack(port: int, event: int) -> AsyncIterator[None]:
    """Run every attack, each in a process of its own."""
    attackers = [
        await asyncio.create_subprocess_exec(
            *(
                *WITH_US,
                sys.executable,
                "-m",
                "tests.faults.http_attacks",
                str(port),
                str(event),
                name,
                str(connections),
            ),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        for name, connections in ATTACKS.items()
    ]
    try:
        for attacker in attackers:
            assert attacker.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                assert await attacker.stdout.readline() == b"attacking\n"
        yield
        assert [attacker.returncode for attacker in attackers] == [None] * len(attackers)
    finally:
        for attacker in attackers:
            if attacker.returncode is None:
                attacker.kill()
            await attacker.wait()


async def probe(port: int, path: str) -> float:
    """Ask as the kubelet does, on a connection of its own, and return the seconds: it allows one."""
    began_s = time.perf_counter()
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 "), (path, answer)
    return time.perf_counter() - began_s


def p99_ms(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98] * 1e3


def open_files(pid: int) -> int:
    return len(tuple(Path(f"/proc/{pid}/fd").iterdir()))


class Measured:
    """What served clients see, and what the process uses."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.probes_s: list[float] = []
        self.allocates_s: list[float] = []
        self.rss_bytes = 0
        self.files = 0

    def sample(self) -> None:
        fields = Path(f"/proc/{self._pid}/statm").read_text().split()
        self.rss_bytes = max(self.rss_bytes, int(fields[1]) * os.sysconf("SC_PAGE_SIZE"))
        self.files = max(self.files, open_files(self._pid))


async def measured(agent: AgentProcess, port: int, socket: Path, device: str) -> Measured:
    """Probe, allocate and give commands in turn."""
    seen = Measured(agent.process.pid)
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[device])])
    async with plugin(socket) as stub:
        for number in range(PROBES):
            path = ("/livez", "/readyz", "/preflight")[number % 3]
            seen.probes_s.append(await probe(port, path))
            began_s = time.perf_counter()
            await stub.Allocate(request, timeout=PATIENCE_S)
            seen.allocates_s.append(time.perf_counter() - began_s)
            if number % 10 == 0:
                assert (await agent.get("/v1/devices"))[0] == 200
                seen.sample()
    return seen


async def test_probes_commands_and_allocations_are_served_all_the_while() -> None:
    async with (
        simulated_node() as node,
        agent_process(node, http_listen="127.0.0.1:0", api_listen="127.0.0.1:0") as agent,
    ):
        await wait_allocatable(node.kubelet, 4)
        state = await agent.wait_answer("/debug/state", lambda status, _: status == 200)
        port = int(state["agent"]["listeners"]["http"].rpartition(":")[2])
        await agent.wait_answer("/readyz", lambda status, _: status == 200)
        target = (agent, port, node.directory.device_plugins / "nvidia-gpu.sock", uuids(node)[0])
        quiet = await measured(*target)
        newest = (await agent.get("/v1/events"))[1]["last"]
        async with attack(port, newest):
            busy = await measured(*target)
        async with asyncio.timeout(PATIENCE_S):
            while open_files(agent.process.pid) > quiet.files:
                await asyncio.sleep(0.02)

    late = sum(each > 1 for each in busy.probes_s)
    print(  # noqa: T201 - the figures
        f"\n/livez, /readyz, /preflight p99 {p99_ms(quiet.probes_s):.1f} ms quiet,"
        f" {p99_ms(busy.probes_s):.1f} ms attacked, max {max(busy.probes_s) * 1e3:.1f} ms,"
        f" {late} over 1 s, none rejected;"
        f" Allocate p99 {p99_ms(quiet.allocates_s):.1f} and {p99_ms(busy.allocates_s):.1f} ms"
        f" ({p99_ms(busy.allocates_s) / p99_ms(quiet.allocates_s):.1f} times);"
        f" memory +{(busy.rss_bytes - quiet.rss_bytes) / MIB:.1f} MiB,"
        f" descriptors {quiet.files} and {busy.files}"
    )
    bounds = Bounds()
    assert busy.files - quiet.files <= bounds.heads + sum(room.places for room in bounds.rooms.values())
    assert busy.rss_bytes - quiet.rss_bytes <= 16 * MIB
