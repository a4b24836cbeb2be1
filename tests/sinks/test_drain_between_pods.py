"""A drain does not fall into the middle of a pod's admission, which would reject the pod for good."""

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest

from agent.model.facts import Registered, WatchersChanged
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.sinks import plugin_service
from tests.sinks.offers import uuid
from tests.sinks.raw_http2 import PATIENCE_S
from tests.sinks.registrar import plugin, registrar
from tests.sinks.serving import meanwhile, sink

PAUSE_NS = 50_000_000

PREFERRED = pb.PreferredAllocationRequest(
    container_requests=[
        pb.ContainerPreferredAllocationRequest(available_deviceIDs=[uuid(0), uuid(1)], allocation_size=1)
    ]
)


async def test_a_drain_leaves_a_pod_the_time_for_its_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_service, "BETWEEN_CALLS_NS", PAUSE_NS)
    async with registrar(tmp_path), sink(tmp_path) as served:
        served.register()
        await served.wait_fact(Registered)
        async with plugin(served.socket) as stub, asyncio.timeout(PATIENCE_S):
            stream = stub.ListAndWatch(pb.Empty())
            await stream.read()
            await served.wait_fact(WatchersChanged)
            asked_ns = time.monotonic_ns()
            await stub.GetPreferredAllocation(PREFERRED)
            async with meanwhile(served.plugin.drain(PATIENCE_S)):
                assert await stream.read() is grpc.aio.EOF
            assert time.monotonic_ns() - asked_ns >= PAUSE_NS


async def test_pods_that_come_without_end_do_not_hold_a_drain_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_service, "BETWEEN_CALLS_NS", 3_600_000_000_000)
    async with registrar(tmp_path), sink(tmp_path) as served:
        served.register()
        await served.wait_fact(Registered)
        async with plugin(served.socket) as stub, asyncio.timeout(PATIENCE_S):
            await stub.GetPreferredAllocation(PREFERRED)
            await served.plugin.drain(0.1)
    assert not served.socket.exists()
