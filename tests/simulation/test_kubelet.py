"""The emulated kubelet beyond the contract: its view, its faults by name, its bounds, its clean end."""

import asyncio
import base64
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent.errors import AgentError, UsageError
from agent.simulation.kubelet import AllocatableChange, EmulatedKubelet
from agent.simulation.kubelet.devices import Device, DeviceTable
from agent.simulation.kubelet.faults import Delay
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
from tests.contract.kubelet_under_test import PodResources
from tests.contract.reference_plugin import ReferencePlugin, device, register

GPU = "nvidia.com/gpu"
NOTHING: dict[str, tuple[str, ...]] = {}


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[EmulatedKubelet]:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as emulated:
        yield emulated


@pytest.fixture
async def plugin(kubelet: EmulatedKubelet) -> AsyncIterator[ReferencePlugin]:
    """A plugin that serves and is registered, with four healthy devices."""
    async with plugin_for(kubelet) as serving:
        await serving.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        yield serving


def plugin_for(kubelet: EmulatedKubelet, resource: str = GPU, **options: bool) -> ReferencePlugin:
    endpoint = f"{resource.replace('/', '-')}.sock"
    return ReferencePlugin(kubelet.device_plugins, resource, four(), endpoint=endpoint, **options)


def four(*unhealthy: str) -> list[pb.Device]:
    return [device(id_, healthy=id_ not in unhealthy, numa=index // 2) for index, id_ in enumerate("abcd")]


async def refusal(plugin: ReferencePlugin) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await plugin.register()
    return raised.value.details() or ""


def refuses(path: Path) -> bool:
    """Return whether a connection is refused, though the file is there."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        return False


# The view


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


# Its life


async def test_nothing_is_left_when_it_ends(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "warm", tmp_path / "up"):
        pass  # gRPC's own threads and descriptors come with its first use and stay
    files, tasks = open_sockets(), asyncio.all_tasks()
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        plugin = plugin_for(kubelet)
        await plugin.serve()
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        await kubelet.apply_fault("stop_reading", duration="1m")
        await kubelet.apply_fault("absent", duration="1m")
        await kubelet.apply_fault("clear", fault="absent")
        await plugin.stop()
    assert [path for path in tmp_path.rglob("*") if path.is_socket()] == []
    assert asyncio.all_tasks() == tasks
    assert open_sockets() <= files


def open_sockets() -> set[str]:
    """Return the names of this process's unix sockets, those in the file system and abstract ones."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(str(entry.readlink()))
    columns = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in columns if len(line) > 7 and f"socket:[{line[6]}]" in own}


async def test_it_can_leave_its_sockets_as_a_real_one_does(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", remove_sockets=False):
        pass
    assert refuses(tmp_path / "dp" / "kubelet.sock")
    assert refuses(tmp_path / "pr" / "kubelet.sock")


async def test_it_leaves_a_socket_file_that_is_not_its_own(tmp_path: Path) -> None:
    own = tmp_path / "dp" / "kubelet.sock"
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr"):
        own.unlink()
        own.touch()
    assert own.exists()


async def test_it_can_come_late(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", present=False) as kubelet:
        assert not kubelet.running
        assert list(kubelet.device_plugins.iterdir()) == []
        async with plugin_for(kubelet) as plugin:
            await kubelet.start()
            assert kubelet.statistics().starts == 1
            assert not plugin.path.exists()
            await plugin.stop()
            await plugin.serve()
            await plugin.register()


async def test_a_resource_from_an_earlier_checkpoint_is_known_without_devices(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet, plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        assert (kubelet.resources, kubelet.capacity(GPU)) == ((GPU,), 0)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\x00", b'{"Data":{"RegisteredDevices":null}}'])
async def test_a_broken_checkpoint_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dp").mkdir()
    (tmp_path / "dp" / "kubelet_internal_checkpoint").write_bytes(content)
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        assert kubelet.resources == ()


async def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    with pytest.raises(UsageError, match="longer than 107 bytes; choose a shorter directory"):
        async with EmulatedKubelet(long, tmp_path / "pr"):
            pass


async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AgentError, match=f"cannot make its directories.*{tmp_path}/file"):
        async with EmulatedKubelet(tmp_path / "file", tmp_path / "pr"):
            pass


async def test_a_bug_in_a_task_of_it_is_raised_and_not_waited_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bug"):
        await _run_with_a_bug(tmp_path)


async def _run_with_a_bug(tmp_path: Path) -> None:
    async def broken() -> None:
        raise ValueError("a bug")

    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        kubelet._spawn(broken(), "broken")
        with pytest.raises(AgentError, match="a bug"):
            await kubelet.wait_for(lambda seen: seen.statistics().starts > 1)


# Faults


async def test_refuse_answers_with_its_message_so_many_times(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet) as plugin:
        await kubelet.apply_fault("refuse", message="not today", times=2)
        assert [await refusal(plugin), await refusal(plugin)] == ["not today", "not today"]
        await plugin.register()
        assert plugin.count("GetDevicePluginOptions") == 1


async def test_refuse_lasts_until_cleared(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet) as plugin:
        await kubelet.apply_fault("refuse")
        assert await refusal(plugin) == "registration refused by the simulated kubelet"
        await kubelet.apply_fault("clear", fault="refuse")
        await plugin.register()


async def test_delay_makes_register_slow_so_many_times(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet) as plugin:
        await kubelet.apply_fault("delay", register="60ms", dial=0.06, times=1)
        await plugin.register()
    (slow,) = kubelet.registrations
    assert slow.at_ns - slow.received_at_ns >= 120_000_000
    assert kubelet._registry.faults.next_delay() == Delay()


async def test_a_plugin_that_stops_waiting_is_registered_all_the_same(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet) as plugin:
        plugin.options_gate.clear()
        registering = asyncio.get_running_loop().create_task(plugin.register())
        await plugin.wait_for(lambda: plugin.count("GetDevicePluginOptions") == 1)
        registering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await registering
        plugin.options_gate.set()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)


async def test_a_failed_registration_makes_the_kubelet_miss_the_end_of_the_stream_it_has(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    wrong = pb.RegisterRequest(version="v1beta1", endpoint="dead.sock", resource_name=GPU)
    kubelet._registry._dial_timeout_s = 0.05
    with pytest.raises(grpc.aio.AioRpcError, match="context deadline exceeded"):
        await register(kubelet.device_plugins, wrong)
    await plugin.end_streams()
    await kubelet.wait_for(lambda seen: len(seen.stream_ends) == 1)
    assert kubelet.allocatable(GPU) == 4
    kubelet._registry._dial_timeout_s = 10.0
    await plugin.register()


async def test_an_endpoint_is_looked_for_below_the_folder(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register(endpoint=f"/{plugin.path.name}")
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)


@pytest.mark.parametrize("how", ["cancel", "connection"])
async def test_drop_stream_loses_the_devices_and_keeps_the_capacity(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, how: str
) -> None:
    await kubelet.apply_fault("drop_stream", resource=GPU, how=how)
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 0)
    assert kubelet.capacity(GPU) == 4
    await plugin.wait_for(lambda: plugin.watchers == 0)
    assert list(plugin.ended) == ["cancelled"]
    await plugin.register()
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)


async def test_drop_stream_of_one_resource_leaves_the_others(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    async with plugin_for(kubelet, "nvidia.com/mig-1g.10gb") as other:
        await other.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(other.resource) == 4)
        await kubelet.apply_fault("drop-stream", resource=other.resource)
        await kubelet.wait_for(lambda seen: seen.allocatable(other.resource) == 0)
        assert kubelet.allocatable(GPU) == 4
        assert plugin.watchers == 1


async def test_a_watcher_that_stops_reading_sees_the_newest_list_afterwards(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.apply_fault("stop_reading")
    await plugin.send(four("a"))
    await plugin.wait_for(lambda: plugin.sent == 2)
    await plugin.send(four("b"))
    await plugin.wait_for(lambda: plugin.sent == 3)
    assert kubelet.allocatable(GPU) == 4
    await kubelet.apply_fault("clear")
    await kubelet.wait_for(lambda seen: seen.unhealthy(GPU) == ("b",))


async def test_a_watcher_that_stops_reading_holds_the_plugin_back(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.apply_fault("stop_reading", resource=GPU)
    large, held = [device("x" * 1_000_000)], False
    for number in range(20):
        await plugin.send(large)
        try:
            await plugin.wait_for(lambda awaited=number + 2: plugin.sent >= awaited, timeout_s=0.2)
        except TimeoutError:
            held = True
            break
    assert held
    await kubelet.apply_fault("clear", fault="stop-reading")
    await kubelet.wait_for(lambda seen: seen.capacity(GPU) == 1)


async def test_stop_reading_ends_by_itself(kubelet: EmulatedKubelet, plugin: ReferencePlugin) -> None:
    await kubelet.apply_fault("stop_reading", duration="20ms")
    await plugin.send(four("a"))
    await kubelet.wait_for(lambda seen: seen.unhealthy(GPU) == ("a",))


async def test_delete_sockets_takes_the_plugins_and_not_the_kubelets(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    async with plugin_for(kubelet, "nvidia.com/other") as other:
        await kubelet.apply_fault("delete_sockets", endpoint=other.path.name)
        assert (plugin.path.exists(), other.path.exists()) == (True, False)
        await kubelet.apply_fault("delete_sockets")
        assert not plugin.path.exists()
        assert (kubelet.device_plugins / "kubelet.sock").is_socket()
        assert kubelet.allocatable(GPU) == 4


async def test_restart_drops_everything_and_answers_again(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.apply_fault("restart")
    assert kubelet.statistics().starts == 2
    assert (kubelet.capacity(GPU), kubelet.allocatable(GPU)) == (0, 0)
    await plugin.wait_for(lambda: plugin.watchers == 0)
    assert not plugin.path.exists()
    await plugin.stop()
    await plugin.serve()
    await plugin.register()
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)


@pytest.mark.parametrize(("how", "left"), [("graceful", False), ("kill", True)])
async def test_while_it_is_down_its_socket_is_gone_or_refuses(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, how: str, left: bool
) -> None:
    own = kubelet.device_plugins / "kubelet.sock"
    await kubelet.apply_fault("absent", how=how)
    await plugin.wait_for(lambda: plugin.watchers == 0)
    assert own.exists() == left
    assert plugin.path.exists()
    assert not left or refuses(own)
    await kubelet.apply_fault("clear")
    assert not plugin.path.exists()
    assert not refuses(own)


async def test_a_restart_takes_its_downtime(kubelet: EmulatedKubelet) -> None:
    before = time.monotonic()
    await kubelet.apply_fault("restart", downtime="60ms", how="kill")
    assert time.monotonic() - before >= 0.06
    assert kubelet.statistics().starts == 2


async def test_a_slow_kubelet_refuses_for_a_while_after_its_socket_appeared(kubelet: EmulatedKubelet) -> None:
    own = kubelet.device_plugins / "kubelet.sock"
    restarting = asyncio.get_running_loop().create_task(kubelet.apply_fault("restart", refusing="1m"))
    await kubelet.wait_for(lambda seen: not seen.running)
    while not own.exists():
        await asyncio.sleep(0)
    assert refuses(own)
    assert not restarting.done()
    restarting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    await kubelet.apply_fault("restart", refusing="10ms")
    assert not refuses(own)


async def test_the_end_does_not_wait_for_a_long_downtime(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group, EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as kubelet:
        group.create_task(kubelet.apply_fault("restart", downtime="1m"))
        await kubelet.wait_for(lambda seen: not seen.running)
    assert kubelet.statistics().starts == 1


async def test_absent_comes_back_by_itself_or_when_cleared(kubelet: EmulatedKubelet) -> None:
    await kubelet.apply_fault("absent", how="kill")
    assert not kubelet.running
    assert refuses(kubelet.device_plugins / "kubelet.sock")
    await kubelet.apply_fault("clear")
    assert kubelet.statistics().starts == 2
    await kubelet.apply_fault("absent", duration="10ms")
    await kubelet.wait_for(lambda seen: seen.statistics().starts == 3)


async def test_race_disconnects_the_second_registration(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.apply_fault("race", resource=GPU)
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 0)
    await plugin.wait_for(lambda: plugin.watchers == 0)
    assert kubelet.capacity(GPU) == 4
    assert len(kubelet.registrations) == 1
    await plugin.register()
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)


async def test_a_race_needs_a_plugin_that_can_be_dialled(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    kubelet._registry._dial_timeout_s = 0.05
    plugin.path.unlink()
    with pytest.raises(UsageError, match="was not connected a second time: failed to dial"):
        await kubelet.apply_fault("race")


async def test_an_end_noticed_late_costs_the_next_registration(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.apply_fault("race", how="late-end")
    await plugin.stop()
    await kubelet.wait_for(lambda seen: len(seen.stream_ends) == 1)
    assert kubelet.allocatable(GPU) == 4
    await plugin.serve()
    await plugin.register()
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 0)
    await plugin.register()
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)


async def test_a_lower_message_limit_ends_the_stream_of_a_longer_list(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    size = pb.ListAndWatchResponse(devices=four()).ByteSize()
    await kubelet.apply_fault("message_limit", limit=size)
    await plugin.send(four("a"))
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 0)
    assert (
        f"code = ResourceExhausted desc = grpc: received message larger than max ({size + 2} vs. {size})"
        in (kubelet.stream_ends[-1].cause)
    )
    await plugin.send(four())
    await plugin.register()
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)


async def test_a_kubelet_of_another_version_names_it(kubelet: EmulatedKubelet) -> None:
    await kubelet.apply_fault("other_version", version="v2")
    async with plugin_for(kubelet) as plugin:
        text = await refusal(plugin)
        await kubelet.apply_fault("clear")
        await plugin.register()
    assert text == 'requested API version "v1beta1" is not supported by kubelet. Supported version is ["v2"]'


async def test_a_resource_whose_plugin_stays_away_is_forgotten(tmp_path: Path) -> None:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", endpoint_stop_grace_s=0.02) as kubelet:
        changes = kubelet.changes()
        async with plugin_for(kubelet) as plugin:
            await plugin.register()
            await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        await kubelet.wait_for(lambda seen: seen.resources == ())
        told = [(each.capacity, each.allocatable) for each in [await anext(changes) for _ in range(3)]]
        assert told == [(4, 4), (4, 0), (0, 0)]
        assert (await kubelet.run_pod("job", "default", {"main": {GPU: 1}})).containers["main"].devices == {}


async def test_a_plugin_that_returns_in_time_is_kept(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await plugin.end_streams()
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 0)
    assert set(kubelet._node._grace_timers) == {GPU}
    await plugin.register()
    assert not kubelet._node._grace_timers


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("explode", {}, "no kubelet fault 'explode'; known faults: refuse, delay, drop_stream"),
        ("refuse", {"mesage": "x"}, "refuse has no parameter 'mesage'; it takes: message, times"),
        ("refuse", {"times": 0}, "refuse: times must be a whole number of at least 1, not 0"),
        ("refuse", {"times": True}, "refuse: times must be a whole number"),
        ("refuse", {"message": ""}, "refuse: message must be a text, not ''"),
        (
            "restart",
            {"downtime": "soon"},
            "restart: downtime must be a duration like 2s or 500ms, not 'soon'",
        ),
        ("restart", {"downtime": -1}, "restart: downtime must be a duration"),
        ("restart", {"downtime": float("nan")}, "restart: downtime must be a duration"),
        ("restart", {"how": "softly"}, "restart: how must be one of graceful, kill, not 'softly'"),
        ("message_limit", {}, "message_limit needs the parameter 'limit'"),
        ("message_limit", {"limit": 5_000_000}, "limit of 4194304 bytes can only be lowered"),
        ("clear", {"fault": "restart"}, "'restart' cannot be cleared; those that last: refuse, delay"),
        ("drop_stream", {"resource": "x/y"}, "No ListAndWatch stream of x/y is open"),
        ("drop_stream", {}, "No ListAndWatch stream of any resource is open"),
        ("delete_sockets", {}, "There is no socket of a plugin to delete in"),
    ],
)
async def test_a_fault_that_makes_no_sense_is_refused_in_a_sentence(
    kubelet: EmulatedKubelet, name: str, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as raised:
        await kubelet.apply_fault(name, **params)
    assert words in str(raised.value)


# Pods


async def test_ids_go_out_in_an_order_the_seed_decides(tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        directory = tmp_path / str(number)
        async with EmulatedKubelet(directory / "dp", directory / "pr", seed=seed) as kubelet:
            async with plugin_for(kubelet) as plugin:
                await plugin.register()
                await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
                for _ in range(5):
                    await kubelet.run_pod("job", "default", {"main": {GPU: 4}})
                    kubelet.delete_pod("job", "default")
            orders.append([each.ids for each in kubelet.allocations])
    assert orders[0] == orders[1] != orders[2]
    assert {tuple(sorted(ids)) for ids in orders[0]} == {("a", "b", "c", "d")}
    assert len(set(orders[0])) > 1


async def test_a_pod_waits_for_a_kubelet_that_is_down(kubelet: EmulatedKubelet) -> None:
    await kubelet.stop()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(kubelet.run_pod("job", "default", {"main": {GPU: 1}}))
        await asyncio.sleep(0)
        assert not waiting.done()
        await kubelet.start()
    assert waiting.result().running


async def test_a_pod_whose_admission_a_restart_cut_short_is_admitted_anew(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    plugin.allocate_gate.clear()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(kubelet.run_pod("job", "default", {"main": {GPU: 1}}))
        await plugin.wait_for(lambda: plugin.count("Allocate") == 1)
        await kubelet.restart()
    # The new kubelet knows the resource and has no device of it yet, so the pod fails for good.
    assert "no healthy devices present" in waiting.result().message
    assert "Canceled" in (kubelet.allocations[0].error or "")


async def test_a_pod_that_waits_is_told_when_the_kubelet_ends(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", present=False) as kubelet:
            waiting = group.create_task(_run_to_error(kubelet))
            await asyncio.sleep(0)
        assert "the simulated kubelet has ended" in await waiting


async def _run_to_error(kubelet: EmulatedKubelet) -> str:
    with pytest.raises(AgentError) as raised:
        await kubelet.run_pod("job", "default", {"main": {GPU: 1}})
    return str(raised.value)


async def test_a_failed_pre_start_leaves_the_pod_pending(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet, pre_start=True) as plugin:
        plugin.pre_start_error = (grpc.StatusCode.INTERNAL, "device a is busy")
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        pod = await kubelet.run_pod("job", "default", {"main": {GPU: 1}})
    assert (pod.phase, pod.reason) == ("Pending", "CreateContainerConfigError")
    assert pod.message == (
        "device plugin PreStartContainer rpc failed with err: "
        "rpc error: code = Internal desc = device a is busy"
    )


async def test_a_pod_gets_what_the_plugin_answered_for_each_container(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    pod = await kubelet.run_pod("job", "default", {"one": {GPU: 1}, "two": {GPU: 2}, "none": {}})
    one, two, none = pod.containers["one"], pod.containers["two"], pod.containers["none"]
    assert one.envs == {"REFERENCE_DEVICES": one.devices[GPU][0]}
    assert two.envs == {"REFERENCE_DEVICES": ",".join(two.devices[GPU])}
    assert not set(one.devices[GPU]) & set(two.devices[GPU])
    assert none.devices == {}
    assert [spec.container_path for spec in two.device_specs] == ["/dev/null"]


async def test_a_finished_pod_is_listed_until_it_is_deleted(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    sockets = PodResources(kubelet.pod_resources)
    await kubelet.run_pod("old", "default", {"main": {GPU: 4}})
    kubelet.finish_pod("old", "default")
    assert (await kubelet.run_pod("new", "default", {"main": {GPU: 4}})).running
    everything = {"a", "b", "c", "d"}
    assert await sockets.listed() == {"default/old": everything, "default/new": everything}
    assert {each.pod for each in kubelet.devices(GPU).values()} == {"default/new"}
    kubelet.delete_pod("old", "default")
    assert set(await sockets.listed()) == {"default/new"}


async def test_pod_resources_list_each_device_by_itself_with_its_numa_node(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.run_pod("job", "default", {"main": {GPU: 4}})
    pod = await PodResources(kubelet.pod_resources).get("job", "default")
    found = [
        (list(each.device_ids), [node.ID for node in each.topology.nodes])
        for each in pod.containers[0].devices
    ]
    assert found == [(["a"], [0]), (["b"], [0]), (["c"], [1]), (["d"], [1])]


async def test_a_pod_that_is_not_there_is_named(kubelet: EmulatedKubelet) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="pod job in namespace default not found"):
        await PodResources(kubelet.pod_resources).get("job", "default")
    with pytest.raises(UsageError, match="no pod default/job"):
        kubelet.finish_pod("job", "default")


async def test_two_pods_of_one_name_are_refused(kubelet: EmulatedKubelet) -> None:
    await kubelet.run_pod("job", "default", {"main": {}})
    with pytest.raises(UsageError, match="default/job exists already"):
        await kubelet.run_pod("job", "default", {"main": {}})


async def test_a_pod_that_nobody_waits_for_any_more_is_gone(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    plugin.allocate_gate.clear()
    task = asyncio.get_running_loop().create_task(kubelet.run_pod("job", "default", {"main": {GPU: 1}}))
    await plugin.wait_for(lambda: plugin.count("Allocate") == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    plugin.allocate_gate.set()
    assert kubelet.pods == ()
    assert (await kubelet.run_pod("job", "default", {"main": {GPU: 4}})).running


async def test_the_checkpoint_has_the_kubelets_shape(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    path = kubelet.device_plugins / "kubelet_internal_checkpoint"
    assert json.loads(path.read_bytes())["Data"] == {
        "PodDeviceEntries": None,
        "RegisteredDevices": {GPU: ["a", "b", "c", "d"]},
    }
    await plugin.send(four("d"))
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 3)
    await kubelet.run_pod("job", "default", {"main": {GPU: 3}})
    document = json.loads(path.read_bytes())
    (entry,) = document["Data"]["PodDeviceEntries"]
    assert entry["DeviceIDs"] == {"0": ["a", "b"], "1": ["c"]}
    assert (entry["ContainerName"], entry["ResourceName"]) == ("main", GPU)
    answer = pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
    assert answer.envs["REFERENCE_DEVICES"] == "a,b,c"
    assert isinstance(document["Checksum"], int)
    kubelet.finish_pod("job", "default")
    assert json.loads(path.read_bytes())["Data"]["PodDeviceEntries"] is None


@pytest.mark.slow
async def test_the_contract_suite_can_be_pointed_at_a_running_kubelet(kubelet: EmulatedKubelet) -> None:
    command = ["-m", "pytest", "tests/contract", "--kubelet-dir", str(kubelet.device_plugins)]
    directories = ["--pod-resources-dir", str(kubelet.pod_resources), "-p", "no:cacheprovider"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, *directories, "-k", "offers or restart", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    assert child.returncode == 0, output.decode()
    assert b"a real kubelet is not restarted by a test" in output
    assert {each.peer_pid for each in kubelet.registrations} == {child.pid}


# Bounds


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
        await kubelet._registry._register(request, None, None)
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
