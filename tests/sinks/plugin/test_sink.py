"""The device-plugin sink against a kubelet on another HTTP/2 stack."""

import asyncio
import contextlib
import socket
import stat
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from h2.settings import SettingCodes

from agent.model.components import LIST_AND_WATCH
from agent.model.facts import ListWritten, Registered, RegisterSent, RegistrationFailed, WatchersChanged
from agent.model.health import Condition, ConditionKey, Evidence, Health, Reason, Recovery
from agent.model.ids import ComponentId, DeviceId, ResourceName, SourceName
from agent.model.snapshot import Device, Snapshot
from agent.model.structs import replace
from agent.proofs import Proofs
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.sinks.plugin.answers import MAX_ERROR_CHARS
from agent.sinks.plugin.registration import connect
from agent.sinks.plugin.service import WINDOW_S, PluginService
from agent.sinks.plugin.socket_file import identity_of
from agent.unix_channel import UnixChannel
from tests.sinks.raw_http2 import PATIENCE_S, raw_client
from tests.sinks.registrar import plugin, registrar
from tests.sinks.servers import Sink, meanwhile, sink
from tests.sinks.snapshots import GPU, device, devices, node, resource, snapshot, uuid

MIG = ResourceName("nvidia.com/mig-1g.5gb")


def shown(message: Any) -> list[tuple[str, str]]:
    return [(entry.ID, entry.health) for entry in message.devices]


def expected(listed: Sequence[Device]) -> list[tuple[str, str]]:
    return [(entry.id, "Healthy" if entry.health is Health.HEALTHY else "Unhealthy") for entry in listed]


async def read(stream: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await stream.read()


async def ended(stream: Any) -> None:
    """Return once a stream has ended; its client may write to a connection that was closed just now."""
    try:
        assert await read(stream) is grpc.aio.EOF
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 - or it ends without an error


async def wait_served(served: Sink) -> None:
    """Have the resource served; there is no kubelet to take it."""
    served.register()
    fact = await served.wait_fact(RegistrationFailed)
    assert isinstance(fact, RegistrationFailed)
    assert fact.failure == "absent"


@contextlib.asynccontextmanager
async def watched(tmp_path: Path, state: Snapshot | None = None) -> AsyncIterator[tuple[Sink, Any]]:
    """A sink whose resource is watched: the first list was read off the stream."""
    async with sink(tmp_path, state=state or node()) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            await read(stream)
            yield served, stream


# Registration


async def test_a_resource_is_registered_under_its_socket_with_its_options(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        served.register(generation=7)
        fact = await served.wait_fact(Registered, RegistrationFailed)
        kubelet_socket, own = identity_of(tmp_path / "kubelet.sock"), identity_of(served.socket)
        assert kubelet_socket is not None
        assert own is not None
        assert fact == Registered(GPU, 7, kubelet=kubelet_socket, socket=own)
        [request] = kubelet.requests
        assert (request.version, request.endpoint, request.resource_name) == (
            "v1beta1",
            "nvidia-gpu.sock",
            GPU,
        )
        assert request.options.get_preferred_allocation_available
        assert not request.options.pre_start_required
        [options] = kubelet.options
        assert options == request.options


async def test_the_socket_is_open_to_its_owner_alone(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        assert stat.S_IMODE(served.socket.lstat().st_mode) == 0o600


async def test_an_absent_kubelet_is_reported_once_for_each_try(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        served.register()
        fact = await served.wait_fact(RegistrationFailed)
        assert isinstance(fact, RegistrationFailed)
        assert (fact.generation, fact.failure) == (1, "absent")
        assert str(tmp_path / "kubelet.sock") in fact.message


async def test_a_kubelet_socket_without_a_listener_is_unreachable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "kubelet.sock"))
        async with sink(tmp_path) as served:
            served.register()
            fact = await served.wait_fact(Registered, RegistrationFailed)
            assert isinstance(fact, RegistrationFailed)
            assert fact.failure == "unreachable"
            assert "check that the kubelet is running" in fact.message


async def test_a_kubelet_that_does_not_answer_is_unreachable_after_the_timeout(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path, register_timeout_s=0.2) as served:
        kubelet.release = asyncio.Event()
        served.register()
        fact = await served.wait_fact(Registered, RegistrationFailed)
        assert isinstance(fact, RegistrationFailed)
        assert fact.failure == "unreachable"
        assert "0.2 s" in fact.message
        kubelet.release.set()


async def test_a_kubelet_whose_own_clock_ends_the_call_is_unreachable(tmp_path: Path) -> None:
    """The deadline travels with the call: grpc's server may notice it before the caller."""
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        kubelet.status, kubelet.answer = grpc.StatusCode.DEADLINE_EXCEEDED, lambda _request: "too late"
        served.register()
        fact = await served.wait_fact(Registered, RegistrationFailed)
        assert isinstance(fact, RegistrationFailed)
        assert fact.failure == "unreachable"
        assert "did not answer Register" in fact.message


async def test_a_kubelet_that_hangs_up_is_unreachable(tmp_path: Path) -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_unix_server(hang_up, tmp_path / "kubelet.sock"), sink(tmp_path) as served:
        served.register()
        fact = await served.wait_fact(Registered, RegistrationFailed)
        assert isinstance(fact, RegistrationFailed)
        assert fact.failure == "unreachable"


async def test_a_rejection_is_reported_in_the_kubelets_words(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        kubelet.answer = lambda _request: "requested API version is not supported by kubelet: ünï"
        served.register()
        fact = await served.wait_fact(Registered, RegistrationFailed)
        assert isinstance(fact, RegistrationFailed)
        assert fact.failure == "rejected"
        assert "requested API version is not supported by kubelet: ünï" in fact.message


async def test_an_order_for_the_kubelet_that_is_being_asked_is_the_call_under_way(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        kubelet.release = asyncio.Event()
        served.register(generation=1)
        async with asyncio.timeout(PATIENCE_S):
            await kubelet.arrived.wait()
        async with plugin(served.socket) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            await read(stream)
            served.register(generation=3)
            served.register(generation=2)
            assert await served.wait_fact(WatchersChanged) == WatchersChanged(GPU, 3, 1)
            kubelet.release.set()
            fact = await served.wait_fact(Registered, RegistrationFailed)
            assert isinstance(fact, Registered)
            assert fact.generation == 3
            assert len(kubelet.requests) == 1


async def test_a_replaced_kubelet_is_neither_waited_for_nor_cut_off_but_for_the_oldest_of_many(
    tmp_path: Path,
) -> None:
    async with contextlib.AsyncExitStack() as kubelets, sink(tmp_path, overtaken_calls=1) as served:
        hanging = []
        for generation in (1, 2, 3):
            kubelet = await kubelets.enter_async_context(registrar(tmp_path))
            kubelet.release = asyncio.Event()
            served.register(generation=generation)
            async with asyncio.timeout(PATIENCE_S):
                await kubelet.arrived.wait()
            hanging.append(kubelet)
            (tmp_path / "kubelet.sock").unlink()
        await kubelets.enter_async_context(registrar(tmp_path))
        served.register(generation=4)
        fact = await served.wait_fact(Registered, RegistrationFailed)
        assert isinstance(fact, Registered)
        assert fact.generation == 4
        async with asyncio.timeout(PATIENCE_S):
            await hanging[0].abandoned.wait()
            await hanging[1].abandoned.wait()
        assert not hanging[2].abandoned.is_set()


async def test_a_socket_deleted_by_the_kubelet_that_was_just_reached_is_there_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet deletes every socket before it listens: the agent reaches it, and its socket is gone."""

    async def connect_to_a_new_kubelet(path: Path) -> UnixChannel:
        channel = await connect(path)
        served.socket.unlink()
        return channel

    monkeypatch.setattr("agent.sinks.plugin.sink.connect", connect_to_a_new_kubelet)
    async with registrar(tmp_path), sink(tmp_path) as served:
        served.register()
        fact = await served.wait_fact(Registered, RegistrationFailed)
        assert isinstance(fact, Registered)
        assert fact.socket == identity_of(served.socket)


async def test_the_old_stream_ends_before_the_new_registration(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        served.register()
        await served.wait_fact(Registered)
        async with plugin(served.socket) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            await read(stream)
            old_socket = identity_of(served.socket)
            open_when_asked: list[bool] = []
            kubelet.answer = lambda _request: open_when_asked.append(_watchers(served) > 0)
            served.register(generation=2)
            fact = await served.wait_fact(Registered)
            assert isinstance(fact, Registered)
            assert fact.socket == identity_of(served.socket) != old_socket
            assert open_when_asked == [False]
            # A clean end of stream, not an error.
            assert await read(stream) is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK


def _watchers(served: Sink) -> int:
    return served.plugin.services[GPU].watchers


async def test_a_retry_keeps_a_server_without_watchers(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        before = identity_of(served.socket)
        async with registrar(tmp_path):
            served.register(generation=2)
            fact = await served.wait_fact(Registered, RegistrationFailed)
            assert isinstance(fact, Registered)
            assert fact.socket == before == identity_of(served.socket)
            async with plugin(served.socket) as stub:
                stream = stub.ListAndWatch(pb.Empty())
                await read(stream)
                assert await served.wait_fact(WatchersChanged) == WatchersChanged(GPU, 2, 1)


async def test_a_retry_serves_anew_when_the_socket_file_is_gone(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        served.socket.unlink()
        async with registrar(tmp_path) as kubelet:
            served.register(generation=2)
            assert isinstance(await served.wait_fact(Registered, RegistrationFailed), Registered)
            assert len(kubelet.options) == 1


async def test_a_resource_that_cannot_be_served_touches_no_other(tmp_path: Path) -> None:
    state = snapshot(resource(devices(8)), resource(devices(2), name=MIG))
    (tmp_path / "nvidia-gpu.sock").mkdir()
    async with registrar(tmp_path), sink(tmp_path, state=state) as served:
        served.register()
        served.register(resource=MIG)
        facts = [await served.wait_fact(Registered, RegistrationFailed) for _ in range(2)]
        outcomes = {
            fact.resource: type(fact) for fact in facts if isinstance(fact, Registered | RegistrationFailed)
        }
        assert outcomes == {GPU: RegistrationFailed, MIG: Registered}


async def test_a_name_that_is_no_resource_is_not_served(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        served.register(resource=ResourceName("nvidia.com/../kubelet"))
        fact = await served.wait_fact(Registered, RegistrationFailed)
        assert isinstance(fact, RegistrationFailed)
        assert fact.failure == "not_served"
        assert not kubelet.requests


async def test_orders_given_before_it_runs_are_carried_out(tmp_path: Path) -> None:
    async with registrar(tmp_path), sink(tmp_path) as served:
        served.register()
        assert isinstance(await served.wait_fact(Registered, RegistrationFailed), Registered)


async def test_a_sink_started_again_serves_again(tmp_path: Path) -> None:
    async with registrar(tmp_path), sink(tmp_path) as served:
        served.register()
        await served.wait_fact(Registered)
        old = identity_of(served.socket)
        served.running.cancel()
        await asyncio.wait({served.running})
        assert not served.socket.exists()
        async with meanwhile(served.plugin.run()):
            fact = await served.wait_fact(Registered, RegistrationFailed)
            assert isinstance(fact, Registered)
            assert identity_of(served.socket) not in {None, old}
            await served.plugin.drain(1.0)


@pytest.mark.parametrize("turns", range(8))
async def test_a_sink_that_is_stopped_at_any_moment_of_its_start_leaves_no_socket(
    tmp_path: Path, turns: int
) -> None:
    async with sink(tmp_path) as served:
        served.register()
        for _ in range(turns):
            await asyncio.sleep(0)
        served.running.cancel()
        await asyncio.wait({served.running})
        assert not served.socket.exists()


async def test_a_socket_that_does_not_answer_is_named(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        assert await served.plugin.unanswering(timeout_s=PATIENCE_S) == ()
        await wait_served(served)
        assert await served.plugin.unanswering(timeout_s=PATIENCE_S) == ()
        served.socket.unlink()
        assert await served.plugin.unanswering(timeout_s=PATIENCE_S) == (GPU,)


# ListAndWatch


async def test_a_watcher_gets_the_newest_state_and_then_each_change(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        served.latest.publish(node(unhealthy=[7]))
        async with plugin(served.socket) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            assert shown(await read(stream)) == expected(devices(8, unhealthy=[7]))
            served.latest.publish(node(unhealthy=[3, 7]))
            assert shown(await read(stream)) == expected(devices(8, unhealthy=[3, 7]))
            served.latest.publish(node())
            assert shown(await read(stream)) == expected(devices(8))


async def test_a_list_that_is_not_sent_to_the_watcher_is_noticed_and_sent_by_a_new_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_service: PluginService) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(PluginService, "follow", hang)
    async with watched(tmp_path) as (served, stream):
        assert served.plugin.services[GPU].is_up_to_date()
        # Nothing is overdue, so a registration would change nothing: the comparison of the lists hangs.
        assert not served.plugin.recovers_by_registration(GPU)
        served.latest.publish(node(unhealthy=[3]))
        assert not served.plugin.services[GPU].is_up_to_date()
        assert served.plugin.recovers_by_registration(GPU)
        served.register(generation=2)
        # Not yet served.
        assert not served.plugin.recovers_by_registration(GPU)
        await served.wait_fact(RegistrationFailed)
        await ended(stream)
        async with plugin(served.socket) as stub:
            assert shown(await read(stub.ListAndWatch(pb.Empty()))) == expected(devices(8, unhealthy=[3]))
            assert served.plugin.services[GPU].is_up_to_date()


async def test_an_up_to_date_list_is_proven_again_and_again(tmp_path: Path) -> None:
    proofs, component = Proofs(clock=time.monotonic_ns), ComponentId(LIST_AND_WATCH, GPU)
    async with sink(tmp_path, proofs=proofs) as served:
        await wait_served(served)
        before_ns = proofs.expected()[component].proven_ns
        async with asyncio.timeout(PATIENCE_S):
            while proofs.expected()[component].proven_ns == before_ns:
                await asyncio.sleep(0.05)
    assert not proofs.expected()


async def test_a_device_never_probed_is_unhealthy_on_the_wire(tmp_path: Path) -> None:
    state = snapshot(resource([device(0, health=Health.UNKNOWN), device(1)]))
    async with sink(tmp_path, state=state) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub:
            message = await read(stub.ListAndWatch(pb.Empty()))
            assert shown(message) == [(uuid(0), "Unhealthy"), (uuid(1), "Healthy")]


async def test_a_resource_without_devices_is_an_empty_list(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            assert len((await read(stream)).devices) == 8
            served.latest.publish(snapshot(resource([])))
            assert shown(await read(stream)) == []


async def test_a_state_in_which_this_resource_is_the_same_is_not_sent(tmp_path: Path) -> None:
    async with watched(tmp_path) as (served, stream):
        for number in range(20):
            served.latest.publish(replace(node(), at_ns=number))
            await asyncio.sleep(0)
        served.latest.publish(node(unhealthy=[1]))
        assert shown(await read(stream)) == expected(devices(8, unhealthy=[1]))
        assert len(served.sent) == 2


async def test_the_first_change_goes_out_at_once_and_those_after_it_in_one_message(tmp_path: Path) -> None:
    async with watched(tmp_path) as (served, stream):
        began_ns = time.monotonic_ns()
        served.latest.publish(node(unhealthy=[0]))
        first = await read(stream)
        # Published in one turn of the loop, so all within the window however slow the machine is.
        for last in range(1, 5):
            served.latest.publish(node(unhealthy=range(last + 1)))
        second = await read(stream)
        assert shown(first) == expected(devices(8, unhealthy=[0]))
        assert shown(second) == expected(devices(8, unhealthy=range(5)))
        # The window is open from the first message on, which is never before the change.
        assert served.sent[2].sent_at_ns - began_ns >= WINDOW_S * 1e9


async def test_devices_that_recover_one_by_one_are_sent_in_one_message(tmp_path: Path) -> None:
    async with watched(tmp_path, node(unhealthy=range(8))) as (served, stream):
        for out in range(7, -1, -1):
            served.latest.publish(node(unhealthy=range(out)))
            await asyncio.sleep(0)

        assert shown(await read(stream)) == expected(devices(8))
        assert len(served.sent) == 2


async def test_a_device_that_becomes_unhealthy_is_sent_at_once_while_others_recover(tmp_path: Path) -> None:
    async with watched(tmp_path, node(unhealthy=[0, 1])) as (served, stream):
        served.latest.publish(node(unhealthy=[1]))
        await asyncio.sleep(0)
        served.latest.publish(node(unhealthy=[1, 2]))

        assert shown(await read(stream)) == expected(devices(8, unhealthy=[1, 2]))
        assert len(served.sent) == 2


async def test_healthy_devices_wait_only_so_long_for_one_that_stays_unhealthy(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path, node(unhealthy=[0, 1])) as (served, stream):
        served.latest.publish(node(unhealthy=[1]))

        assert shown(await read(stream)) == expected(devices(8, unhealthy=[1]))


async def test_each_message_is_reported_with_the_age_of_its_state(tmp_path: Path) -> None:
    async with watched(tmp_path) as (served, stream):
        changed_at_ns = time.monotonic_ns()
        served.latest.publish(node(unhealthy=[0], at_ns=changed_at_ns))
        message = await read(stream)
        [_, sent] = served.sent
        assert (sent.resource, sent.devices, sent.bytes) == (GPU, 8, message.ByteSize())
        assert sent.changed_at_ns == changed_at_ns <= sent.sent_at_ns


async def test_what_was_sent_is_known_by_the_moment_at_which_the_kubelet_had_it(tmp_path: Path) -> None:
    async with sink(tmp_path, kept_lists=2) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub:
            stream, moments = stub.ListAndWatch(pb.Empty()), []
            for numbers in ([], [1], [2]):
                served.latest.publish(node(unhealthy=numbers))
                await read(stream)
                moments.append(time.monotonic_ns())

    def unhealthy(at_ns: int) -> list[list[str]]:
        return [[each.id for each in sent.unhealthy] for sent in served.plugin.sent_before(at_ns)]

    # The first of three is no longer kept.
    assert [unhealthy(at_ns) for at_ns in moments] == [[], [[uuid(1)]], [[uuid(2)]]]


async def test_a_watcher_that_stopped_reading_gets_the_newest_state_and_nothing_between(
    tmp_path: Path,
) -> None:
    async with sink(tmp_path) as served, registrar(tmp_path):
        served.register()
        await served.wait_fact(Registered)
        async with plugin(served.socket) as stub, raw_client(served.socket) as slow:
            slow.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
            stream_id = await slow.request("ListAndWatch")
            await served.wait_fact(WatchersChanged)
            other = stub.ListAndWatch(pb.Empty())
            await read(other)
            for number in range(1, 5):
                served.latest.publish(node(unhealthy=range(number)))
                # The other watcher is not held up.
                assert shown(await read(other)) == expected(devices(8, unhealthy=range(number)))
            slow.h2.increment_flow_control_window(1_000_000, stream_id)
            await slow.flush()
            lists = [await slow.wait_message(stream_id), await slow.wait_message(stream_id)]
            assert [shown(pb.ListAndWatchResponse.FromString(data)) for data in lists] == [
                expected(devices(8)),
                expected(devices(8, unhealthy=range(4))),
            ]


async def test_a_change_that_was_taken_back_while_a_watcher_did_not_read_is_not_sent(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub, raw_client(served.socket) as slow:
            slow.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
            stream_id = await slow.request("ListAndWatch")
            await served.wait_fact(WatchersChanged)
            other = stub.ListAndWatch(pb.Empty())
            await read(other)
            for state in (node(unhealthy=[1]), node()):
                served.latest.publish(state)
                await read(other)
            slow.h2.increment_flow_control_window(1_000_000, stream_id)
            await slow.flush()
            first = await slow.wait_message(stream_id)
            served.latest.publish(node(unhealthy=[2]))
            second = await slow.wait_message(stream_id)
            assert [shown(pb.ListAndWatchResponse.FromString(data)) for data in (first, second)] == [
                expected(devices(8)),
                expected(devices(8, unhealthy=[2])),
            ]


async def test_a_watcher_that_comes_inside_the_window_gets_the_newest_state(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        async with plugin(served.socket) as one, plugin(served.socket) as other:
            stream = one.ListAndWatch(pb.Empty())
            await read(stream)
            served.latest.publish(node(unhealthy=[0]))
            await read(stream)
            served.latest.publish(node(unhealthy=[0, 1]))
            assert shown(await read(other.ListAndWatch(pb.Empty()))) == expected(devices(8, unhealthy=[0, 1]))


async def test_every_watcher_gets_every_change(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        async with plugin(served.socket) as one, plugin(served.socket) as other:
            streams = [one.ListAndWatch(pb.Empty()), other.ListAndWatch(pb.Empty())]
            for stream in streams:
                await read(stream)
            assert await served.wait_fact(WatchersChanged) == WatchersChanged(GPU, 1, 2)
            served.latest.publish(node(unhealthy=[5]))
            for stream in streams:
                assert shown(await read(stream)) == expected(devices(8, unhealthy=[5]))


async def test_the_end_of_a_stream_is_reported(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            await read(stream)
            assert await served.wait_fact(WatchersChanged) == WatchersChanged(GPU, 1, 1)
        assert await served.wait_fact(WatchersChanged) == WatchersChanged(GPU, 1, 0)


async def test_800_devices_are_one_message(tmp_path: Path) -> None:
    async with sink(tmp_path, state=node(800)) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub:
            assert shown(await read(stub.ListAndWatch(pb.Empty()))) == expected(devices(800))


async def test_a_list_the_kubelet_cannot_take_is_an_error_with_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = snapshot(resource([replace(device(0), id=DeviceId("x" * 2_000))] * 2_100))
    async with sink(tmp_path, state=state) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="configure fewer replicas") as raised:
                await read(stub.ListAndWatch(pb.Empty()))
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    (line,) = [record.message for record in caplog.records if record.name.startswith("agent.")]
    assert line.startswith("Could not send the list of nvidia.com/gpu: the kubelet accepts no ")


# Allocate and the others


async def wait_answer(served: Sink, method: str, request: Any) -> Any:
    async with plugin(served.socket) as stub:
        return await getattr(stub, method)(request, timeout=PATIENCE_S)


def allocation(*containers: Sequence[str]) -> Any:
    return pb.AllocateRequest(
        container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    )


async def test_a_container_gets_its_devices_in_the_environment(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        answer = await wait_answer(served, "Allocate", allocation([uuid(3), uuid(1)], [uuid(2)]))
        assert [dict(container.envs) for container in answer.container_responses] == [
            {"NVIDIA_VISIBLE_DEVICES": f"{uuid(1)},{uuid(3)}"},
            {"NVIDIA_VISIBLE_DEVICES": uuid(2)},
        ]
        assert not any(container.devices for container in answer.container_responses)


async def test_a_container_gets_device_nodes_where_that_is_configured(tmp_path: Path) -> None:
    state = snapshot(resource(devices(8)), pass_device_specs=True)
    async with sink(tmp_path, state=state) as served:
        await wait_served(served)
        answer = await wait_answer(served, "Allocate", allocation([uuid(3)]))
        [container] = answer.container_responses
        assert [(spec.container_path, spec.host_path, spec.permissions) for spec in container.devices] == [
            ("/dev/nvidiactl", "/dev/nvidiactl", "rw"),
            ("/dev/nvidia3", "/dev/nvidia3", "rw"),
        ]


def xid_79(on: Device, message: str) -> Condition:
    return Condition(
        key=ConditionKey(SourceName("nvml"), Reason.XID, on.placement, 79),
        evidence=Evidence.HARD,
        recovery=Recovery.RESET,
        flips=True,
        message=message,
        since_ns=0,
        last_ns=0,
    )


async def test_an_error_is_no_longer_than_a_header_should_be(tmp_path: Path) -> None:
    unhealthy = device(3, health=Health.UNHEALTHY)
    talkative = replace(unhealthy, reasons=(xid_79(unhealthy, "much " * 2_000),))
    async with sink(tmp_path, state=snapshot(resource([talkative]))) as served:
        await wait_served(served)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await wait_answer(served, "Allocate", allocation([uuid(3)]))
        assert len(str(raised.value.details())) == MAX_ERROR_CHARS


async def test_an_unhealthy_device_is_a_failed_precondition_with_reason_and_next_step(tmp_path: Path) -> None:
    unhealthy = device(3, health=Health.UNHEALTHY)
    condition = xid_79(unhealthy, "XID 79: GPU has fallen off the bus")
    async with sink(tmp_path, state=snapshot(resource([replace(unhealthy, reasons=(condition,))]))) as served:
        await wait_served(served)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await wait_answer(served, "Allocate", allocation([uuid(3)]))
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "XID 79: GPU has fallen off the bus" in str(raised.value.details())
        assert served.plugin.services[GPU].answers.rejections == {"unhealthy": 1}


async def test_a_newly_unhealthy_device_is_rejected_before_the_kubelet_knows(
    tmp_path: Path,
) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        async with plugin(served.socket) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            await read(stream)
            served.latest.publish(node(unhealthy=[0]))
            await read(stream)
            # Inside the window: the list is still to be sent.
            served.latest.publish(node(unhealthy=[0, 1]))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Allocate(allocation([uuid(1)]), timeout=PATIENCE_S)
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_resource_no_longer_advertised_is_a_failed_precondition(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        served.latest.publish(snapshot())
        with pytest.raises(grpc.aio.AioRpcError, match="not advertised by this node any more") as raised:
            await wait_answer(served, "Allocate", allocation([uuid(1)]))
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_preference_is_made_from_the_request_alone(tmp_path: Path) -> None:
    request = pb.PreferredAllocationRequest(
        container_requests=[
            pb.ContainerPreferredAllocationRequest(
                available_deviceIDs=[uuid(number) for number in (5, 2, 4, 1)],
                must_include_deviceIDs=[uuid(4)],
                allocation_size=2,
            )
        ]
    )
    async with sink(tmp_path) as served:
        await wait_served(served)
        answer = await wait_answer(served, "GetPreferredAllocation", request)
        # The other one on the NUMA node of the one that must be in it.
        assert [list(container.deviceIDs) for container in answer.container_responses] == [[uuid(4), uuid(2)]]


async def test_a_preference_that_cannot_be_met_is_an_invalid_argument(tmp_path: Path) -> None:
    request = pb.PreferredAllocationRequest(
        container_requests=[
            pb.ContainerPreferredAllocationRequest(available_deviceIDs=[uuid(0)], allocation_size=2)
        ]
    )
    async with sink(tmp_path) as served:
        await wait_served(served)
        with pytest.raises(grpc.aio.AioRpcError, match="not enough available devices") as raised:
            await wait_answer(served, "GetPreferredAllocation", request)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_prestart_answers_with_nothing(tmp_path: Path) -> None:
    async with sink(tmp_path) as served:
        await wait_served(served)
        answer = await wait_answer(
            served, "PreStartContainer", pb.PreStartContainerRequest(devices_ids=[uuid(0)])
        )
        assert answer == pb.PreStartContainerResponse()


# Draining


async def test_a_drain_ends_streams_cleanly_sends_no_list_and_removes_the_socket(
    tmp_path: Path,
) -> None:
    async with registrar(tmp_path), sink(tmp_path) as served:
        served.register()
        await served.wait_fact(Registered)
        async with plugin(served.socket) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            await read(stream)
            await served.wait_fact(WatchersChanged)
            await served.plugin.drain(PATIENCE_S)
            assert await read(stream) is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK
        assert not served.socket.exists()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({served.running})
        assert served.running.exception() is None
        assert len(served.sent) == 1
        assert [type(item.fact) for item in served.inbox.pop_all()[0]] == [ListWritten]


async def test_nothing_is_registered_once_a_drain_began(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        await served.plugin.drain(0.0)
        served.register()
        await asyncio.wait({served.running})
        assert not kubelet.requests
        assert not served.socket.exists()


async def test_a_drain_does_not_wait_for_a_registration(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        kubelet.release = asyncio.Event()
        served.register()
        async with asyncio.timeout(PATIENCE_S):
            await kubelet.arrived.wait()
            await served.plugin.drain(PATIENCE_S)
            await asyncio.wait({served.running})
        kubelet.release.set()
        assert not served.socket.exists()
        assert [type(item.fact) for item in served.inbox.pop_all()[0]] == [RegisterSent]
