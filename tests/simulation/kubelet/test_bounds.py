"""Everything the emulated kubelet keeps has a bound, and a test that reaches it."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent.errors import AgentError
from agent.simulation.kubelet import AllocatableChange, EmulatedKubelet
from agent.simulation.kubelet.devices import Device, DeviceTable
from agent.simulation.kubelet.front import MAX_CONNECTIONS
from agent.simulation.kubelet.pods import PodTable
from agent.simulation.kubelet.records import (
    MAX_ALLOCATIONS,
    MAX_CHANGES,
    MAX_LISTS,
    MAX_PODS,
    MAX_REGISTRATIONS,
    MAX_RESOURCES,
    MAX_SUBSCRIBERS,
)
from agent.simulation.kubelet.watch import Watchers
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.contract.reference_plugin import register
from tests.simulation.kubelet.plugins import GPU, plugin_for


async def test_a_reader_that_falls_too_far_behind_is_told() -> None:
    watchers = Watchers()
    changes = watchers.open()
    for number in range(MAX_CHANGES + 1):
        watchers.changed(AllocatableChange(number, GPU, 8, 8, ()))
    for number in range(MAX_CHANGES):
        assert (await anext(changes)).at_ns == number
    with pytest.raises(AgentError, match=f"more than {MAX_CHANGES} behind"):
        await anext(changes)


async def test_readers_are_bounded_and_forgotten_ones_do_not_count() -> None:
    watchers = Watchers()
    for _ in range(MAX_SUBSCRIBERS * 2):
        watchers.open()
    held = [watchers.open() for _ in range(MAX_SUBSCRIBERS)]
    with pytest.raises(AgentError, match=f"{MAX_SUBSCRIBERS} readers"):
        watchers.open()
    held[0].close()
    watchers.open()


def test_pods_are_bounded() -> None:
    pods = PodTable()
    for number in range(MAX_PODS):
        pods.add(f"pod-{number}", "default", {})
    with pytest.raises(AgentError, match=f"has {MAX_PODS} pods already"):
        pods.add("one-more", "default", {})


def test_resources_are_bounded() -> None:
    table = DeviceTable()
    for number in range(MAX_RESOURCES):
        assert table.replace(f"example.com/r{number}", {})
    assert not table.replace("example.com/one-more", {"a": Device(healthy=True, numa_nodes=())})
    assert not table.knows("example.com/one-more")


async def test_what_is_remembered_is_bounded(kubelet: EmulatedKubelet) -> None:
    request = pb.RegisterRequest(version="v0", endpoint="x.sock", resource_name=GPU)
    for _ in range(MAX_REGISTRATIONS + 5):
        await kubelet._registry._register(request, None, None, None)
    assert len(kubelet.registrations) == MAX_REGISTRATIONS
    assert kubelet.statistics().registrations == MAX_REGISTRATIONS + 5
    assert kubelet._registry.lists.maxlen == kubelet._registry.stream_ends.maxlen == MAX_LISTS
    assert kubelet._admission.allocations.maxlen == MAX_ALLOCATIONS
    assert kubelet._node.changes.maxlen == MAX_CHANGES


async def test_connections_are_bounded_and_others_go_on(kubelet: EmulatedKubelet) -> None:
    path = str(kubelet.device_plugins / "kubelet.sock")
    connections = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS)]
    reader, writer = await asyncio.open_unix_connection(path)
    assert await reader.read() == b""
    writer.close()
    connections.pop()[1].close()
    async with plugin_for(kubelet) as plugin, asyncio.timeout(10):
        while True:
            try:
                await plugin.register()
            except grpc.aio.AioRpcError:
                continue  # the closed connection's place is not free yet
            break
    for _, writer in connections:
        writer.close()


async def test_garbage_on_its_socket_harms_nobody(kubelet: EmulatedKubelet) -> None:
    path = str(kubelet.device_plugins / "kubelet.sock")
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100_000)
    await reader.read()
    writer.close()
    async with plugin_for(kubelet) as plugin:
        await plugin.register()


async def test_a_registration_of_another_folder_reaches_no_one(
    kubelet: EmulatedKubelet, tmp_path: Path
) -> None:
    request = pb.RegisterRequest(version="v1beta1", endpoint="x.sock", resource_name=GPU)
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await register(tmp_path, request)
    assert kubelet.registrations == ()
