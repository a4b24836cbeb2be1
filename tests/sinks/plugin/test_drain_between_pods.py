"""A drain does not fall into the middle of a pod's admission, which would reject the pod for good."""

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest

from agent.model.facts import Registered, WatchersChanged
from agent.model.policy import Injection, Policy
from agent.model.structs import replace
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.sinks.plugin.service import BETWEEN_CALLS_NS
from tests.sinks.plugin_process import Resolved
from tests.sinks.raw_http2 import PATIENCE_S
from tests.sinks.registrar import plugin, registrar
from tests.sinks.servers import meanwhile, sink
from tests.sinks.snapshots import node, uuid

PREFERRED = pb.PreferredAllocationRequest(
    container_requests=[
        pb.ContainerPreferredAllocationRequest(available_deviceIDs=[uuid(0), uuid(1)], allocation_size=1)
    ]
)


async def test_a_drain_leaves_a_pod_the_time_for_its_next_call(tmp_path: Path) -> None:
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
            assert time.monotonic_ns() - asked_ns >= BETWEEN_CALLS_NS


class BeingWritten(Resolved):
    """Spec files that are being written until they are released."""

    def __init__(self) -> None:
        self.asked, self.written = asyncio.Event(), asyncio.Event()

    async def settle(self) -> None:
        self.asked.set()
        await self.written.wait()


async def test_a_pod_that_waits_for_its_cdi_file_is_being_admitted(tmp_path: Path) -> None:
    specs = BeingWritten()
    state = replace(node(), policy=Policy(injection=Injection(strategies=("cdi-cri",))))
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[uuid(0)])])
    async with registrar(tmp_path), sink(tmp_path, state=state, cdi=specs) as served:
        served.register()
        await served.wait_fact(Registered)
        async with plugin(served.socket) as stub, asyncio.timeout(PATIENCE_S):
            stream = stub.ListAndWatch(pb.Empty())
            await stream.read()
            await served.wait_fact(WatchersChanged)
            allocating = stub.Allocate(request)
            await specs.asked.wait()
            async with asyncio.TaskGroup() as tasks:
                ended = tasks.create_task(stream.read())
                tasks.create_task(served.plugin.drain(PATIENCE_S))
                # Twice the pause after which a drain would take it that no pod is being admitted.
                await asyncio.wait({ended}, timeout=2 * BETWEEN_CALLS_NS / 1e9)
                assert not ended.done()
                specs.written.set()
                assert len((await allocating).container_responses) == 1
                assert await ended is grpc.aio.EOF


async def test_a_pod_whose_admission_does_not_end_does_not_hold_a_drain_up(tmp_path: Path) -> None:
    specs = BeingWritten()
    state = replace(node(), policy=Policy(injection=Injection(strategies=("cdi-cri",))))
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[uuid(0)])])
    async with registrar(tmp_path), sink(tmp_path, state=state, cdi=specs) as served:
        served.register()
        await served.wait_fact(Registered)
        async with plugin(served.socket) as stub, asyncio.timeout(PATIENCE_S):
            allocating = stub.Allocate(request)
            await specs.asked.wait()
            await served.plugin.drain(0.1)
            with pytest.raises(grpc.aio.AioRpcError):
                await allocating
    assert not served.socket.exists()
