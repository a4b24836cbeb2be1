"""HTTP: what a health probe waits while one client opens 10,000 connections a second."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from tests.bench.figures import Effort, Figure, Measurement, MeasurementError, quantile
from tests.bench.node import PATIENCE_S, ROOT, bench_node, free_port
from tests.bench.scrape import Scraper

PER_S: Final = 10_000
LONG_POLLS: Final = 64
FLOOD: Final = (sys.executable, "-m", "tests.bench.connection_flood")
_PAUSE_S: Final = 0.005
_NEVER: Final = "/v1/events?since=1000000&wait=30"


@dataclass
class Probes:
    """What the probes of one stretch of time saw."""

    times_s: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def p99_ms(self) -> float:
        """The time that one in a hundred exceeds."""
        return quantile(self.times_s, 0.99) * 1e3


async def _request(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return reader, writer


async def _probe(port: int, seen: Probes) -> None:
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await _request(port, "/livez")
            answer = await reader.read()
        writer.close()
    except OSError:  # TimeoutError too
        answer = b""
    seen.times_s.append(time.perf_counter() - began_s)
    seen.failed += not answer.startswith(b"HTTP/1.1 200 ")


async def _probed(port: int, seconds: float, per_s: int) -> tuple[Probes, float]:
    """Probe while so many connections a second are opened; returns the connections opened a second too."""
    seen = Probes()
    flood = await asyncio.create_subprocess_exec(
        *FLOOD, str(port), str(per_s), str(seconds), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        counting = asyncio.get_running_loop().create_task(flood.communicate(), name="flood")
        while not counting.done():
            await _probe(port, seen)
            await asyncio.sleep(_PAUSE_S)
        opened, _ = await counting
    finally:
        if flood.returncode is None:
            flood.kill()
    return seen, int(opened) / seconds


@asynccontextmanager
async def _long_polls(port: int) -> AsyncIterator[None]:
    opened = [await _request(port, _NEVER) for _ in range(LONG_POLLS)]
    yield
    for _, writer in opened:
        writer.close()


@asynccontextmanager
async def _bare_server() -> AsyncIterator[int]:
    server = await asyncio.create_subprocess_exec(*FLOOD, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        if server.stdout is None:
            raise MeasurementError("the server to compare with has no output")
        yield int(await server.stdout.readline())
    finally:
        server.kill()
        await server.wait()


async def _probes(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Send GET /livez, each time on a new connection, while a process opens 10,000 connections a second.

    That process sends nothing on them and keeps 600 open; 64 long polls of events are open besides. Client,
    attacker and agent share the cores. ``bare`` is a server on asyncio that bounds nothing, attacked alike:
    what the machine itself costs.
    """
    seconds = effort.of(quick=2, usual=15)
    port = free_port()
    async with bench_node() as node:
        with node.agent({"http-listen": f"127.0.0.1:{port}"}) as agent:
            await agent.ready()
            await Scraper(f"127.0.0.1:{port}").wait_listening()
            quiet, _ = await _probed(port, seconds, 0)
            async with _long_polls(port):
                cpu_s = agent.cpu_s()
                attacked, per_s = await _probed(port, seconds, PER_S)
                cpu_s = agent.cpu_s() - cpu_s
    async with _bare_server() as bare_port:
        bare, _ = await _probed(bare_port, seconds, PER_S)
    yield Figure("HTTP.livez_quiet.p99", quiet.p99_ms, "ms", None)
    yield Figure("HTTP.livez_attacked.p99", attacked.p99_ms, "ms", 200)
    yield Figure("HTTP.livez_attacked.failed", attacked.failed, "probes", 0)
    yield Figure("HTTP.bare_attacked.p99", bare.p99_ms, "ms", None)
    yield Figure("HTTP.connections", per_s, "1/s", None)
    yield Figure("HTTP.cpu_of_attack", 100 * cpu_s / seconds, "%", None)


PROBES: Final = Measurement("HTTP", "health probes under an attack by connections", _probes)
