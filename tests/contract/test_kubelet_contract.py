"""Behaviours of a kubelet that a device plugin relies on (facts: kubelet items 1 to 4, 6 to 9, 11 to 17).

Asked of the emulated kubelet, and of a real one with ``--kubelet-dir``: what holds for both makes the
emulation trustworthy.
"""

import asyncio
import socket

import grpc
import grpc.aio
import pytest

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.contract.kubelet_under_test import KubeletUnderTest, identity, unique_resource
from tests.contract.reference_plugin import ReferencePlugin, device, register
from tests.contract.spy_plugin import LIST_AND_WATCH, OPTIONS, SpyPlugin

MESSAGE_LIMIT_BYTES = 4_194_304
QUICK = pytest.mark.parametrize("kubelet", [0.3], indirect=True)
"""An emulated kubelet that gives up dialling early; a real one takes its ten seconds."""


def plugin_for(kubelet: KubeletUnderTest, resource: str | None = None, **options: bool) -> ReferencePlugin:
    resource = resource or unique_resource()
    devices = [device("a"), device("b", numa=0), device("c", numa=1)]
    return ReferencePlugin(kubelet.directory, resource, devices, endpoint=_endpoint(resource), **options)


def _endpoint(resource: str) -> str:
    return f"{resource.rpartition('/')[2]}.sock"


async def rejected(plugin: ReferencePlugin, *, version: str = "v1beta1", resource: str | None = None) -> str:
    """Return the text a registration is rejected with; every rejection has the code UNKNOWN."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await plugin.register(version=version, resource=resource)
    assert raised.value.code() is grpc.StatusCode.UNKNOWN
    return raised.value.details() or ""


# Registration: items 1 and 2


async def test_a_registered_plugin_advertises_its_devices(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await kubelet.wait_capacity(plugin.resource, 3)


async def test_register_answers_only_after_the_plugin_gave_its_options(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        plugin.options_gate.clear()
        async with asyncio.TaskGroup() as group:
            registering = group.create_task(plugin.register())
            await plugin.wait_for(lambda: plugin.count("GetDevicePluginOptions") == 1)
            assert not registering.done()
            assert plugin.count("ListAndWatch") == 0
            plugin.options_gate.set()
        await plugin.wait_for(lambda: plugin.watchers == 1)


@QUICK
async def test_an_endpoint_that_is_missing_is_rejected_when_the_dial_is_over(
    kubelet: KubeletUnderTest,
) -> None:
    plugin = plugin_for(kubelet)
    assert await rejected(plugin) == "failed to dial device plugin: context deadline exceeded"


@QUICK
async def test_an_endpoint_that_is_mute_is_rejected_when_the_dial_is_over(kubelet: KubeletUnderTest) -> None:
    plugin = plugin_for(kubelet)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(plugin.path))
        mute.listen()
        text = await rejected(plugin)
    plugin.path.unlink()
    assert text == "failed to dial device plugin: context deadline exceeded"


async def test_another_api_version_is_rejected_by_name(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        text = await rejected(plugin, version="v0")
    assert text.startswith('requested API version "v0" is not supported by kubelet. Supported version is')
    assert plugin.count("GetDevicePluginOptions") == 0


@pytest.mark.parametrize(
    "name", ["gpu", "kubernetes.io/gpu", "requests.example.com/gpu", "example.com/", "a b/c"]
)
async def test_a_bad_resource_name_is_rejected_by_name(kubelet: KubeletUnderTest, name: str) -> None:
    async with plugin_for(kubelet) as plugin:
        assert await rejected(plugin, resource=name) == f'the ResourceName "{name}" is invalid'


async def test_a_plugin_without_options_is_rejected_with_its_own_words(kubelet: KubeletUnderTest) -> None:
    resource = unique_resource()
    async with SpyPlugin(kubelet.directory / _endpoint(resource), {}):
        request = pb.RegisterRequest(version="v1beta1", endpoint=_endpoint(resource), resource_name=resource)
        with pytest.raises(grpc.aio.AioRpcError, match="code = Unimplemented desc = not here") as raised:
            await register(kubelet.directory, request)
    assert raised.value.code() is grpc.StatusCode.UNKNOWN


async def test_the_options_that_count_are_those_the_plugin_answers(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        request = pb.RegisterRequest(
            version="v1beta1",
            endpoint=plugin.path.name,
            resource_name=plugin.resource,
            options=pb.DevicePluginOptions(get_preferred_allocation_available=True, pre_start_required=True),
        )
        await register(kubelet.directory, request)
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        assert (await kubelet.run_pod(plugin.resource, 1)).running
        assert plugin.count("GetPreferredAllocation") == 0
        assert plugin.count("PreStartContainer") == 0


async def test_preferred_allocation_and_pre_start_are_called_when_the_options_ask(
    kubelet: KubeletUnderTest,
) -> None:
    async with plugin_for(kubelet, preferred=True, pre_start=True) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        pod = await kubelet.run_pod(plugin.resource, 2)
        assert pod.devices == {"b", "c"}
        assert pod.envs == {"REFERENCE_DEVICES": "b,c"}
        names = [name for name, _ in plugin.calls]
        assert names[-3:] == ["GetPreferredAllocation", "Allocate", "PreStartContainer"]


# Registering again: item 3


async def test_stopping_before_registering_again_keeps_the_resource(kubelet: KubeletUnderTest) -> None:
    plugin = plugin_for(kubelet)
    for _ in range(3):
        async with plugin:
            await plugin.register()
            await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await kubelet.wait_healthy(plugin.resource, set())


async def test_a_second_registration_is_lost_when_the_first_stream_ends(kubelet: KubeletUnderTest) -> None:
    resource = unique_resource()
    devices = [device("a"), device("b")]
    first = ReferencePlugin(kubelet.directory, resource, devices, endpoint=_endpoint(resource))
    async with first:
        await first.register()
        await first.wait_for(lambda: first.watchers == 1)
        # The first socket's file is replaced under it, as by another instance of the same plugin.
        first.path.unlink()
        async with ReferencePlugin(
            kubelet.directory, resource, devices, endpoint=_endpoint(resource)
        ) as second:
            await second.register()
            await second.wait_for(lambda: second.watchers == 1)
            await kubelet.wait_healthy(resource, {"a", "b"})
            await first.end_streams()
            await second.wait_for(lambda: second.watchers == 0)
            await kubelet.wait_healthy(resource, set())
            await second.register()
            await kubelet.wait_healthy(resource, {"a", "b"})


async def test_a_stream_that_ended_is_not_tried_again(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await plugin.end_streams()
        await kubelet.wait_healthy(plugin.resource, set())
        await kubelet.wait_capacity(plugin.resource, 3)
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        assert plugin.watched == 2


# A kubelet that starts: item 4


@pytest.mark.parametrize("kill", [False, True])
async def test_a_kubelet_that_starts_deletes_every_socket_and_makes_its_own(
    kubelet: KubeletUnderTest, kill: bool
) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        own, before = kubelet.directory / "kubelet.sock", identity(kubelet.directory / "kubelet.sock")
        kept = kubelet.directory / "not-a-socket"
        kept.touch()
        try:
            await kubelet.restart(kill=kill)
            assert kept.exists()
        finally:
            kept.unlink()
        assert not plugin.path.exists()
        assert own.is_socket()
        assert identity(own) != before
        await plugin.wait_for(lambda: plugin.watchers == 0)


async def test_after_a_restart_a_resource_has_nothing_until_its_plugin_registers(
    kubelet: KubeletUnderTest,
) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await kubelet.restart()
        await kubelet.wait_capacity(plugin.resource, 0)
        await kubelet.wait_healthy(plugin.resource, set())
        await plugin.stop()
        await plugin.serve()
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await kubelet.wait_capacity(plugin.resource, 3)


# Streams: items 6 to 8, and what they carry: 9, 11, 13


async def test_each_list_replaces_the_one_before(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await plugin.send([device("a"), device("d")])
        await kubelet.wait_healthy(plugin.resource, {"a", "d"})
        await kubelet.wait_capacity(plugin.resource, 2)
        await plugin.send([])
        await kubelet.wait_healthy(plugin.resource, set())
        await kubelet.wait_capacity(plugin.resource, 0)


async def test_the_kubelet_half_closes_the_watch_and_stays(kubelet: KubeletUnderTest) -> None:
    resource = unique_resource()
    path = kubelet.directory / _endpoint(resource)
    listed = pb.ListAndWatchResponse(devices=[device("a")]).SerializeToString()
    async with SpyPlugin(path, {OPTIONS: b"", LIST_AND_WATCH: listed}) as spy:
        request = pb.RegisterRequest(version="v1beta1", endpoint=path.name, resource_name=resource)
        await register(kubelet.directory, request)
        await spy.wait_for(lambda: LIST_AND_WATCH in spy.half_closed)
        await kubelet.wait_healthy(resource, {"a"})
        assert not spy.resets
        assert spy.connections == 1


async def test_the_kubelet_calls_itself_localhost_and_hands_on_the_deadline_of_register_alone(
    kubelet: KubeletUnderTest,
) -> None:
    resource = unique_resource()
    path = kubelet.directory / _endpoint(resource)
    async with SpyPlugin(path, {OPTIONS: b"", LIST_AND_WATCH: b""}) as spy:
        request = pb.RegisterRequest(version="v1beta1", endpoint=path.name, resource_name=resource)
        await register(kubelet.directory, request)
        await spy.wait_for(lambda: LIST_AND_WATCH in spy.headers)
        for headers in (spy.headers[OPTIONS], spy.headers[LIST_AND_WATCH]):
            assert headers[":authority"] == "localhost"
            assert headers["te"] == "trailers"
            assert headers["content-type"] == "application/grpc"
        assert "grpc-timeout" in spy.headers[OPTIONS]
        assert "grpc-timeout" not in spy.headers[LIST_AND_WATCH]


async def test_a_list_up_to_the_message_limit_is_taken(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        large = sized_list(MESSAGE_LIMIT_BYTES)
        await plugin.send(large)
        await kubelet.wait_healthy(plugin.resource, {each.ID for each in large})


async def test_a_list_over_the_message_limit_loses_the_resource(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await plugin.send(sized_list(MESSAGE_LIMIT_BYTES + 1))
        await kubelet.wait_healthy(plugin.resource, set())
        await plugin.wait_for(lambda: plugin.watchers == 0)
        await kubelet.wait_capacity(plugin.resource, 3)


def sized_list(size: int) -> list[pb.Device]:
    """Return devices whose ListAndWatch message has exactly this many bytes."""
    devices = [device(f"{number:0>1000}") for number in range(4_000)]
    missing = size - pb.ListAndWatchResponse(devices=devices).ByteSize()
    # One more device: two length bytes, tag and length of each text, so the id's length follows.
    last = device("x" * 200_000)
    last.ID = "x" * (200_000 + missing - (pb.ListAndWatchResponse(devices=[last]).ByteSize()))
    assert pb.ListAndWatchResponse(devices=[*devices, last]).ByteSize() == size
    return [*devices, last]


# Health: items 14 to 16


async def test_unhealthy_lowers_allocatable_and_healthy_restores_it(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await plugin.send([device("a"), device("b", healthy=False), device("c")])
        await kubelet.wait_healthy(plugin.resource, {"a", "c"})
        await kubelet.wait_capacity(plugin.resource, 3)
        await plugin.send([device("a"), device("b"), device("c")])
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})


async def test_a_running_pod_keeps_a_device_that_turned_unhealthy(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        pod = await kubelet.run_pod(plugin.resource, 3)
        await plugin.send([device("a", healthy=False), device("b"), device("c")])
        await kubelet.wait_healthy(plugin.resource, {"b", "c"})
        assert (await kubelet.pod_resources.listed())[pod.name] == {"a", "b", "c"}


# Pods: items 9, 10, 15, 17


async def test_a_pod_that_asks_for_an_unknown_resource_runs_without_a_device(
    kubelet: KubeletUnderTest,
) -> None:
    pod = await kubelet.run_pod(unique_resource(), 1)
    assert pod.running
    assert pod.devices == set()
    assert pod.envs == {}


async def test_a_pod_that_asks_for_a_resource_without_a_healthy_device_fails(
    kubelet: KubeletUnderTest,
) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        await plugin.send([device("a", healthy=False)])
        await kubelet.wait_healthy(plugin.resource, set())
        pod = await kubelet.run_pod(plugin.resource, 1)
        assert (pod.phase, pod.reason) == ("Failed", "UnexpectedAdmissionError")
        assert "no healthy devices present" in pod.message
        assert plugin.count("Allocate") == 0


async def test_an_allocate_error_fails_the_pod_with_its_text(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        plugin.allocate_error = (grpc.StatusCode.FAILED_PRECONDITION, "device a is unhealthy: drain the node")
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        pod = await kubelet.run_pod(plugin.resource, 1)
        assert (pod.phase, pod.reason) == ("Failed", "UnexpectedAdmissionError")
        assert pod.message == (
            "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition "
            "desc = device a is unhealthy: drain the node, which is unexpected"
        )


async def test_devices_of_an_active_pod_are_not_given_out_again(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        first = await kubelet.run_pod(plugin.resource, 2)
        second = await kubelet.run_pod(plugin.resource, 2)
        assert first.running
        assert "Requested: 2, Available: 1" in second.message
        await kubelet.end_pod(first)
        third = await kubelet.run_pod(plugin.resource, 3)
        assert third.running
        assert third.devices == {"a", "b", "c"}


async def test_an_allocate_that_hangs_stops_every_other_pod(kubelet: KubeletUnderTest) -> None:
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_healthy(plugin.resource, {"a", "b", "c"})
        plugin.allocate_gate.clear()
        before = (await kubelet.pod_resources.listed()).keys()
        async with asyncio.TaskGroup() as group:
            hung = group.create_task(kubelet.run_pod(plugin.resource, 1))
            await plugin.wait_for(lambda: plugin.count("Allocate") == 1)
            other = group.create_task(kubelet.run_pod(unique_resource(), 1))
            assert len((await kubelet.pod_resources.listed()).keys() - before) <= 1
            assert not hung.done()
            assert not other.done()
            plugin.allocate_gate.set()
        assert hung.result().running
        assert other.result().running
