"""The emulated kubelet's faults, each by its name."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent.errors import UsageError
from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.contract.reference_plugin import ReferencePlugin
from tests.simulation.kubelet.plugins import GPU, four, plugin_for, rejection, rejects


async def test_the_fault_answers_with_its_message_so_many_times(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet) as plugin:
        await kubelet.apply_fault("refuse", message="not today", times=2)
        assert [await rejection(plugin), await rejection(plugin)] == ["not today", "not today"]
        await plugin.register()
        assert plugin.count("GetDevicePluginOptions") == 1


async def test_the_fault_lasts_until_cleared(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet) as plugin:
        await kubelet.apply_fault("refuse")
        assert await rejection(plugin) == "registration rejected by the simulated kubelet"
        await kubelet.apply_fault("clear", fault="refuse")
        await plugin.register()


async def test_a_kubelet_that_forgot_a_plugin_leaves_its_stream_open(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.apply_fault("forget")
    assert (kubelet.capacity(GPU), kubelet.allocatable(GPU), plugin.watchers) == (4, 0, 1)
    await plugin.send(four("a"))
    await plugin.wait_for(lambda: plugin.sent == 2)
    assert len(kubelet.lists) == 1
    await plugin.end_streams()
    await plugin.register()
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 3)


async def test_the_end_of_an_earlier_stream_closes_no_connection_that_is_still_dialled(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    """As in the kubelet, whose Disconnect finds no connection yet (kubernetes:plugin/v1beta1/client.go)."""
    await kubelet.apply_fault("delay", dial=0.2)
    async with asyncio.TaskGroup() as group:
        registering = group.create_task(plugin.register())
        while not any(task.get_name() == f"kubelet-register-{GPU}" for task in asyncio.all_tasks()):
            await asyncio.sleep(0)
        await plugin.end_streams()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 0)
        assert not registering.done()
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


@pytest.mark.parametrize("how", ["graceful", "kill"])
async def test_while_it_is_down_its_socket_is_there_and_rejects(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, how: str
) -> None:
    own = kubelet.device_plugins / "kubelet.sock"
    await kubelet.apply_fault("absent", how=how)
    await plugin.wait_for(lambda: plugin.watchers == 0)
    assert rejects(own)
    assert plugin.path.exists()
    await kubelet.apply_fault("clear")
    assert not plugin.path.exists()
    assert not rejects(own)


async def test_a_slow_kubelet_rejects_for_a_while_after_its_socket_appeared(kubelet: EmulatedKubelet) -> None:
    own = kubelet.device_plugins / "kubelet.sock"
    restarting = asyncio.get_running_loop().create_task(kubelet.apply_fault("restart", refusing="1m"))
    await kubelet.wait_for(lambda seen: not seen.running)
    old = own.lstat().st_mtime_ns
    while not own.exists() or own.lstat().st_mtime_ns == old:
        await asyncio.sleep(0)
    assert rejects(own)
    assert not restarting.done()
    restarting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    await kubelet.apply_fault("restart", refusing="10ms")
    assert not rejects(own)


async def test_absent_comes_back_by_itself_or_when_cleared(kubelet: EmulatedKubelet) -> None:
    await kubelet.apply_fault("absent", how="kill")
    assert not kubelet.running
    assert rejects(kubelet.device_plugins / "kubelet.sock")
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
        text = await rejection(plugin)
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
        reported = [(each.capacity, each.allocatable) for each in [await anext(changes) for _ in range(3)]]
        assert reported == [(4, 4), (4, 0), (0, 0)]
        assert (await kubelet.run_pod("job", "default", {"main": {GPU: 1}})).containers["main"].devices == {}


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("explode", {}, 'no kubelet fault "explode"; known faults: refuse, delay, drop-stream'),
        ("refuse", {"mesage": "x"}, 'kubelet refuse has no parameter "mesage"; it accepts: message, times'),
        (
            "refuse",
            {"times": 0},
            'times of kubelet refuse must be a whole number between 1 and 2147483647, not "0"',
        ),
        ("refuse", {"times": True}, "times of kubelet refuse must be a whole number"),
        ("refuse", {"message": ""}, 'message of kubelet refuse must be a text, not ""'),
        (
            "restart",
            {"downtime": "soon"},
            'downtime of kubelet restart must be a duration like 2s or 500ms, not "soon"',
        ),
        ("restart", {"downtime": -1}, "downtime of kubelet restart must be a duration"),
        ("restart", {"downtime": float("nan")}, "downtime of kubelet restart must be a duration"),
        ("restart", {"how": "softly"}, 'how of kubelet restart must be graceful or kill, not "softly"'),
        ("message_limit", {}, "kubelet message-limit needs limit"),
        ("message_limit", {"limit": 5_000_000}, "limit of 4194304 bytes can only be lowered"),
        ("clear", {"fault": "restart"}, '"restart" cannot be cleared; those that last: refuse, delay'),
        ("drop_stream", {"resource": "x/y"}, "No ListAndWatch stream of x/y is open"),
        ("drop_stream", {}, "No ListAndWatch stream of any resource is open"),
        ("delete_sockets", {}, "There is no socket of a plugin to delete in"),
    ],
)
async def test_a_fault_that_makes_no_sense_is_rejected_in_a_sentence(
    kubelet: EmulatedKubelet, name: str, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as raised:
        await kubelet.apply_fault(name, **params)
    assert words in str(raised.value)
