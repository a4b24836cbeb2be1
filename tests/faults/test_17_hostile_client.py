"""Fault 17: a hostile client on our socket costs little memory and few log lines, and hurts no one else."""

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.sinks.plugin.grpc_bounds import LINE_PERIOD_S, MIB, Bounds
from tests.killed_runs import WITH_US
from tests.sinks.plugin_process import REPOSITORY, PluginProcess, plugin_process
from tests.sinks.raw_http2 import PATIENCE_S
from tests.sinks.registrar import plugin
from tests.sinks.snapshots import uuid

pytestmark = pytest.mark.slow

MAX_GROWTH_BYTES = 16 * MIB


@dataclass
class Observed:
    """What the kubelet, and a reader of the process's figures, saw during an attack."""

    latencies_s: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    peak_files: int = 0


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginProcess]:
    with plugin_process(tmp_path_factory.mktemp("plugin")) as served:
        yield served


@pytest.fixture(scope="module")
def at_rest(process: PluginProcess) -> Observed:
    """The process after ordinary work."""
    asyncio.run(_work(process))
    return Observed(peak_rss_bytes=process.rss_bytes(), peak_files=process.open_files())


async def _work(process: PluginProcess) -> None:
    async with plugin(process.socket) as stub:
        for _ in range(300):
            await _allocate(stub)


async def _allocate(stub: object) -> None:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[uuid(1)])])
    answer = await stub.Allocate(request, timeout=PATIENCE_S)  # type: ignore[attr-defined]
    assert dict(answer.container_responses[0].envs) == {"NVIDIA_VISIBLE_DEVICES": uuid(1)}


@asynccontextmanager
async def observed(process: PluginProcess) -> AsyncIterator[Observed]:
    """Let a kubelet watch and allocate all the while, and sample the process."""
    seen = Observed()
    async with plugin(process.socket) as stub, asyncio.TaskGroup() as tasks:
        watch = stub.ListAndWatch(pb.Empty())
        assert len((await watch.read()).devices) == 8
        working = tasks.create_task(_keep_allocating(stub, process, seen))
        yield seen
        while len(seen.latencies_s) < 20:
            await asyncio.sleep(0.01)
        working.cancel()
        assert not watch.done()
        watch.cancel()


async def _keep_allocating(stub: object, process: PluginProcess, seen: Observed) -> None:
    while True:
        began_s = time.perf_counter()
        await _allocate(stub)
        seen.latencies_s.append(time.perf_counter() - began_s)
        seen.peak_rss_bytes = max(seen.peak_rss_bytes, process.rss_bytes())
        seen.peak_files = max(seen.peak_files, process.open_files())
        await asyncio.sleep(0.002)


async def attack(process: PluginProcess, name: str, waves: int) -> None:
    """Attack from another process, so that the kubelet's latency is not the attackers'."""
    attackers = await asyncio.create_subprocess_exec(
        *(*WITH_US, sys.executable, "-m", "tests.sinks.attacks"),
        str(process.socket),
        name,
        str(waves),
        cwd=REPOSITORY,
    )
    assert await attackers.wait() == 0


@pytest.mark.parametrize(
    ("name", "waves"),
    [
        ("declare_a_huge_message", 5),
        ("keep_the_rules_of_a_huge_message", 3),
        ("drip", 1),
        ("drip_a_request", 1),
        ("babble", 20),
        ("leave_out_pseudo_headers", 1),
        ("open_headers_and_never_end_them", 3),
        ("unpack_a_bomb", 5),
        ("open_100_streams", 3),
        ("cancel_every_call", 3),
        ("ping_and_never_read", 1),
        ("invent_settings", 3),
        ("connect_1000_times", 1),
    ],
)
async def test_an_attack_costs_little_and_the_kubelet_is_served_all_the_while(
    process: PluginProcess, at_rest: Observed, name: str, waves: int
) -> None:
    lines_before = len(process.log_lines())
    began_s = time.monotonic()
    async with asyncio.timeout(4 * PATIENCE_S), observed(process) as seen:
        await attack(process, name, waves)
    took_s = time.monotonic() - began_s
    assert seen.peak_rss_bytes - at_rest.peak_rss_bytes <= MAX_GROWTH_BYTES
    assert seen.peak_files - at_rest.peak_files <= Bounds().connections + 1
    assert len(process.log_lines()) - lines_before <= took_s / LINE_PERIOD_S + 1
    # The promise is a p99 of 100 ms on an idle machine, which the benchmark shows; here half of
    # the calls must meet it, whatever else this machine is doing.
    assert statistics.median(seen.latencies_s) <= 0.1
