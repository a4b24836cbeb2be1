"""What the emulated kubelet shows, tells and remembers."""

import asyncio
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent.errors import AgentError
from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.contract.reference_plugin import ReferencePlugin, device
from tests.simulation.kubelet.plugins import GPU, four, plugin_for

NOTHING: dict[str, tuple[str, ...]] = {}


async def test_every_change_is_told_once_and_in_order(kubelet: EmulatedKubelet) -> None:
    changes = kubelet.changes()
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        await plugin.send(four("b"))
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 3)
        await plugin.send(four("b"))
        await kubelet.wait_for(lambda seen: len(seen.lists) == 3)
        await plugin.send(four())
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
    seen = [await anext(changes) for _ in range(4)]
    assert [(each.resource, each.capacity, each.allocatable, each.unhealthy) for each in seen] == [
        (GPU, 4, 4, ()),
        (GPU, 4, 3, ("b",)),
        (GPU, 4, 4, ()),
        (GPU, 4, 0, ("a", "b", "c", "d")),
    ]
    assert sorted(each.at_ns for each in seen) == [each.at_ns for each in seen]
    assert list(kubelet.change_history) == seen


async def test_another_device_unhealthy_is_a_change_though_the_numbers_stay(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    changes = kubelet.changes()
    await plugin.send(four("a"))
    assert (await anext(changes)).unhealthy == ("a",)
    await plugin.send(four("b"))
    assert (await anext(changes)).unhealthy == ("b",)


async def test_a_reader_may_start_with_the_present_state(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    assert (await anext(kubelet.changes(current=True))).allocatable == 4


async def test_change_streams_end_with_the_kubelet(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        changes = kubelet.changes()
    assert [each async for each in changes] == []


async def test_a_wait_ends_with_the_kubelet(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
            waiting = group.create_task(_wait_to_error(kubelet))
            await asyncio.sleep(0)
        assert "kubelet has ended" in await waiting


async def _wait_to_error(kubelet: EmulatedKubelet) -> str:
    with pytest.raises(AgentError) as raised:
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 1)
    return str(raised.value)


async def test_devices_show_health_numa_nodes_and_their_pod(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.run_pod("job", "default", {"main": {GPU: 4}})
    await plugin.send([device("a", healthy=False, numa=1), device("b")])
    await kubelet.wait_for(lambda seen: seen.capacity(GPU) == 2)
    devices = kubelet.devices(GPU)
    assert (devices["a"].healthy, devices["a"].numa_nodes, devices["a"].pod) == (False, (1,), "default/job")
    assert (devices["b"].healthy, devices["b"].numa_nodes) == (True, ())


async def test_a_wait_sees_a_state_that_is_gone_again(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(kubelet.wait_for(lambda seen: seen.unhealthy(GPU) == ("c",)))
        await asyncio.sleep(0)
        # Both in one turn of the loop, so that the waiting task runs only when the first is gone.
        client = kubelet.client(GPU)
        assert client is not None
        for each in (four("c"), four()):
            kubelet._registry._take(client, pb.ListAndWatchResponse(devices=each).SerializeToString(), 0)
        await waiting


async def test_a_wait_that_fails_tells_what_there_was(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    with pytest.raises(TimeoutError, match=r"running, nvidia\.com/gpu 4/4, 1 registrations"):
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 5, timeout_s=0.01)


async def test_an_error_in_a_predicate_reaches_who_waits(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_wait_for_broken(kubelet))
        await asyncio.sleep(0)
        await plugin.send(four("a"))
        assert isinstance(await waiting, KeyError)


async def _wait_for_broken(kubelet: EmulatedKubelet) -> Exception | None:
    try:
        await kubelet.wait_for(lambda seen: seen.unhealthy(GPU) == NOTHING["missing"])
    except KeyError as error:
        return error
    return None


async def test_a_registration_is_recorded_with_who_sent_it(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await refusal_of_version(kubelet, plugin)
    accepted, refused = kubelet.registrations
    assert (accepted.version, accepted.endpoint, accepted.resource) == ("v1beta1", plugin.path.name, GPU)
    assert (accepted.accepted, accepted.generation, accepted.peer_pid) == (True, 1, os.getpid())
    assert (accepted.authority, refused.authority) == ("localhost", "localhost")
    assert accepted.received_at_ns <= accepted.at_ns
    assert (refused.accepted, refused.version, refused.generation) == (False, "v0", None)
    assert kubelet.statistics().registrations == 2
    assert kubelet.statistics().refused == 1


async def refusal_of_version(kubelet: EmulatedKubelet, plugin: ReferencePlugin) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await plugin.register(version="v0")


async def test_a_list_is_recorded_with_its_registration(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await plugin.send(four("d"))
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 3)
    last = kubelet.lists[-1]
    assert (last.resource, last.endpoint, last.generation) == (GPU, plugin.path.name, 1)
    assert (last.healthy, last.unhealthy) == (("a", "b", "c"), ("d",))
    assert last.size_bytes == pb.ListAndWatchResponse(devices=four("d")).ByteSize()
