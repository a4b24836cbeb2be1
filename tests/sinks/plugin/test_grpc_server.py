"""The bounded server: what it answers, what it rejects, and how it ends."""

import asyncio
import gc
import inspect
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import grpclib
import grpclib.events
import grpclib.protocol
import grpclib.server
import h2.connection
import h2.events
import pytest
from grpclib.const import Cardinality
from grpclib.const import Handler as Method
from grpclib.server import Stream
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from agent.model.structs import replace
from agent.sinks.plugin.grpc_bounds import PEER_LINES, Bounds, LineLimit, TokenBucket
from agent.sinks.plugin.grpc_connection import BoundedConnection
from agent.sinks.plugin.grpc_server import BoundedServer, receive_request
from tests.sinks.attacks import PING
from tests.sinks.raw_http2 import PATIENCE_S, RawClient, framed, raw_client
from tests.sinks.servers import ECHO, FLOOD, HOLD, EchoService, meanwhile, serve
from tests.sources.recorder import until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"

SMALL = Bounds(connections=3, streams=4, request_bytes=64 * 1024, requests_bytes=128 * 1024)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.sock"


@pytest.fixture(autouse=True)
def _patience() -> Any:
    PEER_LINES.__init__()  # type: ignore[misc] # each test may have its line
    return None


def lines(method: str) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]


@asynccontextmanager
async def grpcio(path: Path) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        yield channel


def unary(channel: Any, method: str) -> Any:
    return channel.unary_unary(method)


async def wait_until(server: BoundedServer, condition: Any) -> None:
    """Return once what the server counts meets a condition."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(server):
            await asyncio.sleep(0.005)


async def open_stream(client: RawClient, method: str, body: bytes = framed(b"x"), *, end: bool = True) -> int:
    stream_id = client.h2.get_next_available_stream_id()
    client.h2.send_headers(stream_id, lines(method))
    client.h2.send_data(stream_id, body, end_stream=end)
    await client.flush()
    return stream_id


async def wait_stuck(connection: Any) -> None:
    """Return once the connection waits for its peer to read, and no longer moves."""
    turns = 0
    async with asyncio.timeout(PATIENCE_S):
        while turns < 20:
            turns = 0 if connection.connection.write_ready.is_set() else turns + 1
            await asyncio.sleep(0.001)


async def wait_cut(client: RawClient) -> h2.events.ConnectionTerminated | None:
    """Return the server's goodbye, if it arrived before the end of the connection."""
    async with asyncio.timeout(PATIENCE_S):
        await client.wait_end()
    goodbyes = [event for event in client.seen if isinstance(event, h2.events.ConnectionTerminated)]
    return goodbyes[0] if goodbyes else None


# What we rely on


def test_the_private_names_of_grpclib_are_where_they_are_used() -> None:
    assert grpclib.__version__ == "0.4.9"
    assert list(inspect.signature(grpclib.server.Handler).parameters) == [
        "mapping",
        "codec",
        "status_details_codec",
        "dispatch",
    ]
    assert "_tasks" in inspect.getsource(grpclib.server.Handler.accept)
    assert list(inspect.signature(grpclib.server.Handler.accept).parameters) == [
        "self",
        "stream",
        "headers",
        "release_stream",
    ]
    assert callable(grpclib.events._DispatchServerEvents)
    assert list(inspect.signature(grpclib.protocol.H2Protocol).parameters) == [
        "handler",
        "config",
        "h2_config",
    ]
    assert list(inspect.signature(grpclib.protocol.Connection).parameters) == [
        "connection",
        "transport",
        "config",
    ]
    assert list(inspect.signature(grpclib.protocol.EventsProcessor).parameters) == ["handler", "connection"]
    processor = inspect.getsource(grpclib.protocol.EventsProcessor)
    for name in ("self.processors", "self.streams", "stream.data_received", "window_updated"):
        assert name in processor
    connection = inspect.getsource(grpclib.protocol.Connection)
    for name in ("write_ready", "last_stream_created", "def flush", "def is_closing", "def feed"):
        assert name in connection
    assert "_get_authority" in inspect.getsource(grpclib.client.Channel.__init__)


# What it answers


async def test_a_client_on_another_stack_is_answered(path: Path) -> None:
    async with serve(path, EchoService().methods()), grpcio(path) as channel:
        assert await unary(channel, ECHO)(b"hello", timeout=PATIENCE_S) == b"hello"


async def test_settings_are_sent_before_the_client_sends_anything(path: Path) -> None:
    async with serve(path, EchoService().methods()):
        client = await RawClient.connect(path)
        client.h2.initiate_connection()
        async with asyncio.timeout(PATIENCE_S):
            event = await anext(client.events())
        assert isinstance(event, h2.events.RemoteSettingsChanged)
        changed = event.changed_settings
        assert changed[SettingCodes.MAX_CONCURRENT_STREAMS].new_value == Bounds().streams
        assert changed[SettingCodes.MAX_HEADER_LIST_SIZE].new_value == Bounds().header_list_bytes
        await client.close()


async def test_a_request_of_many_windows_arrives_whole(path: Path) -> None:
    body = os.urandom(900_000)
    async with serve(path, EchoService().methods()), grpcio(path) as channel:
        assert await unary(channel, ECHO)(body, timeout=PATIENCE_S) == body


async def test_headers_of_any_bytes_are_accepted(path: Path) -> None:
    async with serve(path, EchoService().methods()), raw_client(path) as client:
        odd = [(name, "/run/ünïcode.sock" if name == ":authority" else value) for name, value in lines(ECHO)]
        stream_id = await client.request_with(odd, framed(b"hello"))
        assert await client.wait_message(stream_id) == b"hello"


async def test_frames_of_an_unknown_type_are_ignored(path: Path) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        await client.send(b"\x00\x00\x03\xfa\x00\x00\x00\x00\x00abc")
        stream_id = await open_stream(client, ECHO, framed(b"hello"))
        assert await client.wait_message(stream_id) == b"hello"
        assert not server.load.cuts


async def test_an_unknown_method_is_unimplemented(path: Path) -> None:
    async with serve(path, EchoService().methods()), grpcio(path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(channel, "/test.Echo/Other")(b"", timeout=PATIENCE_S)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "body",
    [b"\x01\x00\x00\x00\x01x", b"\x00\x00\x00\x00\x09x", b"\x00\x00", b""],
    ids=["packed", "short", "cut", "none"],
)
async def test_a_request_that_is_no_message_is_an_invalid_argument(
    path: Path, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(path, EchoService().methods()), raw_client(path) as client:
        stream_id = await open_stream(client, ECHO, body)
        assert await client.wait_status(stream_id) == str(grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert not caplog.records


async def test_a_request_that_does_not_arrive_is_ended(path: Path) -> None:
    async def hurried(stream: Stream[bytes, bytes]) -> None:
        await receive_request(stream, within_s=0.05)

    methods = {ECHO: Method(hurried, Cardinality.UNARY_UNARY, bytes, bytes)}
    async with serve(path, methods), raw_client(path) as client:
        stream_id = await open_stream(client, ECHO, b"\x00\x00", end=False)
        assert await client.wait_status(stream_id) == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


async def test_a_request_without_method_or_path_is_reset_and_not_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        for missing in (":method", ":path"):
            kept = [line for line in lines(ECHO) if line[0] != missing]
            await client.request_with(kept, framed(b""))
            async with asyncio.timeout(PATIENCE_S):
                async for event in client.events():
                    if isinstance(event, h2.events.StreamReset):
                        break
        assert server.load.malformed == 2
        stream_id = await open_stream(client, ECHO, framed(b"still there"))
        assert await client.wait_message(stream_id) == b"still there"
    assert not caplog.records


async def test_a_request_without_a_path_that_is_cancelled_at_once_hurts_no_other_call(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, [line for line in lines(ECHO) if line[0] != ":path"])
        client.h2.reset_stream(stream_id)
        await client.flush()
        stream_id = await open_stream(client, ECHO, framed(b"still there"))
        assert await client.wait_message(stream_id) == b"still there"
        assert server.load.malformed == 1
    assert not caplog.records


# Which peers may connect


async def test_a_peer_of_another_user_is_rejected(path: Path) -> None:
    async with serve(path, EchoService().methods(), uids=frozenset({os.geteuid() + 1})) as server:
        client = await RawClient.connect(path)
        await wait_cut(client)
        assert (server.load.rejected["peer"], server.load.accepted) == (1, 0)
        await client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_a_process_of_another_user_is_rejected_even_if_the_mode_of_the_file_allows_it() -> None:
    directory = Path("/tmp") / f"gpu-agent-peer-{os.getpid()}"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    path = directory / "server.sock"
    try:
        async with serve(path, EchoService().methods()) as server:
            path.chmod(0o777)
            script = (
                "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
                "s.connect(sys.argv[1]); s.recv(1)"
            )
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-c", script, str(path), stderr=subprocess.DEVNULL
            )
            await process.wait()
            assert server.load.rejected["peer"] == 1
    finally:
        path.unlink(missing_ok=True)
        directory.rmdir()


async def test_connections_over_the_bound_are_closed_and_room_is_given_again(path: Path) -> None:
    async with serve(path, EchoService().methods(), bounds=SMALL) as server:
        inside = [await RawClient.connect(path) for _ in range(SMALL.connections)]
        await wait_until(server, lambda now: now.connections == SMALL.connections)
        outside = await RawClient.connect(path)
        await wait_cut(outside)
        assert server.load.rejected["full"] == 1
        await inside[0].close()
        await wait_until(server, lambda now: now.connections == SMALL.connections - 1)
        async with grpcio(path) as channel:
            assert await unary(channel, ECHO)(b"room", timeout=PATIENCE_S) == b"room"
        for client in (*inside[1:], outside):
            await client.close()


# What a peer may cost


async def test_a_request_over_the_bound_ends_its_connection(path: Path) -> None:
    async with serve(path, EchoService().methods(), bounds=SMALL) as server, raw_client(path) as client:
        stream_id = await open_stream(client, ECHO, b"\x00\xff\xff\xff\xff", end=False)
        async with meanwhile(_pour(client, stream_id)) as pouring:
            goodbye = await wait_cut(client)
            pouring.cancel()
        assert goodbye is None or goodbye.error_code == ErrorCodes.ENHANCE_YOUR_CALM
        assert server.load.cuts == {"request_size": 1}
        assert server.load.buffered_bytes == 0


async def _pour(client: RawClient, stream_id: int) -> None:
    while True:
        while client.h2.local_flow_control_window(stream_id) > 8_192:
            client.h2.send_data(stream_id, b"x" * 8_192)
            await client.flush()
        await asyncio.sleep(0.001)


async def test_unfinished_requests_of_all_connections_together_are_bounded(path: Path) -> None:
    bounds = replace(SMALL, requests_bytes=80_000)
    async with serve(path, EchoService().methods(), bounds=bounds) as server:
        clients = [await RawClient.connect(path) for _ in range(2)]
        for client in clients:
            client.h2.initiate_connection()
            await open_stream(client, ECHO, b"\x00\x00\x00\xff\xff", end=False)
            for _ in range(6):
                client.h2.send_data(1, b"x" * 8_192)
            await client.flush()
        await wait_until(server, lambda now: now.load.cuts.get("requests_size") == 1)
        await wait_until(server, lambda now: now.connections == 1)
        for client in clients:
            await client.close()


async def test_empty_frames_count_too(path: Path) -> None:
    async with serve(path, EchoService().methods(), bounds=SMALL) as server, raw_client(path) as client:
        stream_id = await open_stream(client, HOLD, b"\x00\x00\x00\xff\xff", end=False)
        for _ in range(SMALL.request_bytes // SMALL.frame_cost_bytes + 1):
            client.h2.send_data(stream_id, b"", pad_length=0)
        await client.flush()
        await wait_cut(client)
        assert server.load.cuts == {"request_size": 1}


async def test_streams_over_the_bound_end_the_connection(path: Path) -> None:
    service = EchoService()
    async with serve(path, service.methods(), bounds=SMALL) as server, raw_client(path) as client:
        client.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 100
        client.h2.remote_settings.acknowledge()
        for _ in range(SMALL.streams + 1):
            await open_stream(client, HOLD)
        await wait_cut(client)
        assert server.load.cuts == {"protocol_error": 1}
        await wait_until(server, lambda now: (now.connections, now.load.calls) == (0, 0))


async def test_calls_over_the_bound_are_rejected_but_not_those_of_a_connection_within_its_share(
    path: Path,
) -> None:
    bounds = Bounds(streams=10, calls=6, calls_share=2)
    async with (
        serve(path, EchoService().methods(), bounds=bounds) as server,
        raw_client(path) as greedy,
        grpcio(path) as channel,
    ):
        for _ in range(8):
            await open_stream(greedy, HOLD)
        await wait_until(server, lambda now: now.load.calls_rejected == 2)
        async with asyncio.timeout(PATIENCE_S):
            async for event in greedy.events():
                if isinstance(event, h2.events.StreamReset):
                    assert event.error_code == ErrorCodes.REFUSED_STREAM
                    break
        assert await unary(channel, ECHO)(b"mine", timeout=PATIENCE_S) == b"mine"
        assert server.load.calls == 6


async def test_a_call_cancelled_before_it_began_is_released(path: Path) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, lines(HOLD))
        client.h2.reset_stream(stream_id)
        await client.flush()
        await wait_until(server, lambda now: (now.load.resets, now.load.calls) == (1, 0))
        [connection] = server.live
        assert not connection.processor.streams
        assert not connection.handler._tasks


async def test_an_ended_connection_leaves_nothing_for_the_garbage_collector(path: Path) -> None:
    service = EchoService()
    kinds = (BoundedConnection, grpclib.protocol.Stream, h2.connection.H2Connection)
    gc.collect()
    # Other tests of this process may have left some for the report of their failures.
    before = [each for each in gc.get_objects() if isinstance(each, kinds)]
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        async with serve(path, service.methods()) as server:
            async with raw_client(path) as client:
                await open_stream(client, HOLD)
                await open_stream(client, ECHO, b"\x00\x00\x00\xff\xff", end=False)
                stream_id = await open_stream(client, ECHO)
                await client.wait_message(stream_id)
            await wait_until(server, lambda now: (now.connections, now.load.calls) == (0, 0))
            left = [each for each in gc.get_objects() if isinstance(each, kinds)]
            known = {id(each) for each in (*before, client.h2)}
            assert [each for each in left if id(each) not in known] == []
    finally:
        if is_enabled:
            gc.enable()


async def test_calls_taken_back_again_and_again_end_the_connection(path: Path) -> None:
    bounds = replace(SMALL, resets=10, resets_per_s=0.001)
    async with serve(path, EchoService().methods(), bounds=bounds) as server, raw_client(path) as client:
        for _ in range(50):
            stream_id = client.h2.get_next_available_stream_id()
            client.h2.send_headers(stream_id, lines(HOLD))
            client.h2.reset_stream(stream_id)
        await client.flush()
        await wait_cut(client)
        assert server.load.cuts == {"resets": 1}
        assert server.load.resets == 11
        await wait_until(server, lambda now: now.load.calls == 0)


@pytest.mark.parametrize("repeated", [5, 200])
async def test_a_header_list_over_the_bound_ends_the_connection(path: Path, repeated: int) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        # The same long header again costs its sender a byte, and 4,000 to the server that decodes it.
        await client.request_with([*lines(ECHO), *[("x", "y" * 4_000)] * repeated], b"")
        await wait_cut(client)
        assert server.load.cuts == {"protocol_error": 1}


async def test_headers_that_never_end_end_the_connection(path: Path) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        await client.send(b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82")
        for _ in range(10):
            await client.send(b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + b"\x82" * 16_384)
        await wait_cut(client)
        assert server.load.cuts == {"incomplete": 1}


async def test_unknown_settings_are_not_remembered_without_end(path: Path) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        for first in range(0x100, 0x4000, 0x400):
            settings = b"".join(
                number.to_bytes(2, "big") + b"\0\0\0\1" for number in range(first, first + 0x400)
            )
            await client.send(len(settings).to_bytes(3, "big") + b"\x04\x00\x00\x00\x00\x00" + settings)
        await wait_cut(client)
        assert server.load.cuts == {"settings": 1}


async def test_pings_are_answered_however_many(path: Path) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        for number in range(2_000):
            client.h2.ping(number.to_bytes(8, "big"))
        await client.flush()
        async with asyncio.timeout(PATIENCE_S):
            async for event in client.events():
                if isinstance(event, h2.events.PingAckReceived) and event.ping_data == (1_999).to_bytes(
                    8, "big"
                ):
                    break
        assert not server.load.cuts


async def test_a_peer_that_sends_more_than_anyone_needs_is_slowed_not_cut(path: Path) -> None:
    bounds = Bounds(events=50, events_per_s=10_000)
    async with serve(path, EchoService().methods(), bounds=bounds) as server, grpcio(path) as channel:
        call = unary(channel, ECHO)
        for number in range(100):
            assert await call(str(number).encode(), timeout=PATIENCE_S) == str(number).encode()
        assert not server.load.cuts


async def test_a_flood_from_one_peer_leaves_turns_to_the_others(path: Path) -> None:
    async with (
        serve(path, EchoService().methods(), bounds=Bounds(events=5_000, events_per_s=100)) as server,
        raw_client(path) as flooder,
        grpcio(path) as channel,
    ):
        await flooder.send(b"\x00\x00\x08\x06\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" * 10_000)
        assert await unary(channel, ECHO)(b"me too", timeout=PATIENCE_S) == b"me too"
        assert server.connections == 2


async def test_a_peer_that_sends_but_does_not_read_is_not_read_either(path: Path) -> None:
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" * 500
    async with serve(path, EchoService().methods()) as server:
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        peer.connect(str(path))
        peer.send(PREFACE + NO_SETTINGS)
        blocked_turns = sent = 0
        # Not one byte of room in 50 turns: the server has stopped reading.
        while blocked_turns < 50:
            try:
                sent += peer.send(ping)
                blocked_turns = 0
            except BlockingIOError:
                blocked_turns += 1
            await asyncio.sleep(0.001)
        connection = next(iter(server.live))
        assert connection._transport.get_write_buffer_size() <= Bounds().unsent_bytes
        assert sent < 4 * 2**20
        assert not server.load.cuts
        peer.close()
        await wait_until(server, lambda now: now.connections == 0)


async def test_a_connection_without_a_request_is_closed(path: Path) -> None:
    bounds = Bounds(first_request_s=0.05)
    async with serve(path, EchoService().methods(), bounds=bounds) as server, raw_client(path) as client:
        goodbye = await wait_cut(client)
        assert goodbye is not None
        assert goodbye.error_code == ErrorCodes.NO_ERROR
        assert server.load.cuts == {"idle": 1}


async def test_a_connection_without_a_call_is_closed_but_not_one_with_a_stream(path: Path) -> None:
    bounds = Bounds(first_request_s=0.05, idle_s=0.05)
    service = EchoService()
    async with (
        serve(path, service.methods(), bounds=bounds) as server,
        raw_client(path) as watcher,
        raw_client(path) as idler,
    ):
        await open_stream(watcher, HOLD)
        stream_id = await open_stream(idler, ECHO)
        await idler.wait_status(stream_id)
        await wait_cut(idler)
        await wait_until(server, lambda now: now.connections == 1)
        service.release.set()


# Garbage


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        PREFACE + b"\xff" * 70_000,
        PREFACE + NO_SETTINGS + b"\x00\x00\x04\x01\x04\x00\x00\x00\x01\xff\xff\xff\xff",
        PREFACE + NO_SETTINGS + b"\x00\x00\x00\x00\x00\x00\x00\x00\x07",
    ],
    ids=["http1", "tls", "noise", "hpack", "data-on-nothing"],
)
async def test_garbage_ends_only_its_own_connection(
    path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(path, EchoService().methods()) as server, grpcio(path) as channel:
        assert await unary(channel, ECHO)(b"before", timeout=PATIENCE_S) == b"before"
        client = await RawClient.connect(path)
        await client.send(garbage)
        async with asyncio.timeout(PATIENCE_S):
            await client.wait_closed()
        await client.close()
        await wait_until(server, lambda now: now.connections == 1)
        assert await unary(channel, ECHO)(b"after", timeout=PATIENCE_S) == b"after"
    assert not caplog.records


async def test_errors_a_peer_can_cause_are_at_most_one_line_a_second(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(stream: Stream[bytes, bytes]) -> None:
        await receive_request(stream)
        raise RuntimeError("a bug")

    methods = {ECHO: Method(failing, Cardinality.UNARY_UNARY, bytes, bytes)}
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with serve(path, methods), grpcio(path) as channel:
        for _ in range(50):
            with pytest.raises(grpc.aio.AioRpcError):
                await unary(channel, ECHO)(b"", timeout=PATIENCE_S)
    assert 1 <= len(caplog.records) <= 2 + loop.time() - began_s
    assert PEER_LINES.suppressed == 50 - len(caplog.records)
    assert not any(record.exc_info for record in caplog.records)


def test_a_held_back_line_is_counted_on_the_next_one() -> None:
    now_s = 10.0
    limit = LineLimit(clock=lambda: now_s)
    first, second, third = (
        logging.LogRecord("grpclib.server", logging.ERROR, "", 0, "Application error", None, None)
        for _ in range(3)
    )
    assert limit.filter(first)
    now_s = 10.9
    assert not limit.filter(second)
    now_s = 11.0
    assert limit.filter(third)
    assert third.__dict__["fields"] == {"lines_held_back": 1}
    assert limit.suppressed == 1


def test_a_token_bucket_is_refilled_up_to_its_burst() -> None:
    bucket = TokenBucket(burst=10, per_s=2, left=10, at_s=0)
    assert bucket.spend(10, 0) == 0
    assert bucket.spend(4, 0) == 2
    assert bucket.spend(0, 2) == 0
    assert bucket.spend(11, 1_000) == 0.5


# How it ends


async def test_a_drain_lets_a_running_call_end_and_then_closes_the_connection(path: Path) -> None:
    service = EchoService()
    async with serve(path, service.methods()) as server, grpcio(path) as channel:
        call = unary(channel, HOLD)(b"allocate", timeout=PATIENCE_S)
        await service.held.wait()
        async with asyncio.timeout(PATIENCE_S), meanwhile(server.drain(PATIENCE_S)):
            service.release.set()
            assert await call == b"allocate"
        assert server.connections == 0


async def test_a_call_that_had_arrived_when_the_drain_began_is_answered(path: Path) -> None:
    async with serve(path, EchoService().methods()) as server, raw_client(path) as client:
        first = await open_stream(client, ECHO)
        await client.wait_message(first)
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, lines(ECHO))
        client.h2.send_data(stream_id, framed(b"in the socket"), end_stream=True)
        # Sent at once, and read by the server in a later turn.
        client.writer.write(client.h2.data_to_send())
        await server.drain(PATIENCE_S)
        assert await client.wait_message(stream_id) == b"in the socket"


async def test_answers_to_a_peer_that_has_just_gone_are_dropped_without_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = EchoService()
    async with serve(path, service.methods()) as server:
        client = await RawClient.connect(path)
        client.h2.initiate_connection()
        for _ in range(10):
            await open_stream(client, HOLD)
        await wait_until(server, lambda now: now.load.calls == 10)
        client.writer.transport.abort()
        service.release.set()
        await wait_until(server, lambda now: (now.connections, now.load.calls) == (0, 0))
    assert not caplog.records


async def test_a_drain_cancels_a_call_that_outlives_the_grace(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = EchoService()
    async with serve(path, service.methods()) as server, grpcio(path) as channel:
        call = unary(channel, HOLD)(b"", timeout=PATIENCE_S)
        await service.held.wait()
        async with asyncio.timeout(PATIENCE_S):
            await server.drain(0.01)
        assert service.ended.is_set()
        assert server.load.calls == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    assert not caplog.records


async def test_a_call_on_an_open_connection_is_answered_while_another_one_is_waited_for(path: Path) -> None:
    service = EchoService()
    async with serve(path, service.methods()) as server, grpcio(path) as channel:
        held = unary(channel, HOLD)(b"slow", timeout=PATIENCE_S)
        await service.held.wait()
        async with meanwhile(server.drain(PATIENCE_S)):
            assert await unary(channel, ECHO)(b"late", timeout=PATIENCE_S) == b"late"
            service.release.set()
            assert await held == b"slow"


async def test_a_client_that_writes_when_the_server_ends_reads_its_answer_all_the_same(path: Path) -> None:
    """As gRPC's library does, which gives up a connection that it cannot write to."""
    service = EchoService()
    bounds = Bounds(linger_s=PATIENCE_S)
    async with serve(path, service.methods(), bounds=bounds) as server, raw_client(path) as client:
        stream_id = await client.request_with(lines(HOLD), framed(b"slow"))
        await service.held.wait()
        connection = client.writer.get_extra_info("socket")
        ended = select.poll()
        ended.register(connection, select.POLLRDHUP)
        async with meanwhile(server.drain(PATIENCE_S)):
            service.release.set()
            await until(lambda: bool(ended.poll(0)))
            os.write(connection.fileno(), PING)
            assert await client.wait_message(stream_id) == b"slow"
            await client.close()


async def test_no_client_can_connect_once_a_drain_began(path: Path) -> None:
    async with serve(path, EchoService().methods()) as server, meanwhile(server.drain(1.0)):
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(path)


async def test_a_drain_does_not_wait_for_a_client_that_stays_or_does_not_read(path: Path) -> None:
    service = EchoService()
    async with serve(path, service.methods()) as server, raw_client(path) as client:
        await open_stream(client, FLOOD)
        await service.held.wait()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(PATIENCE_S):
            await server.drain(0.05)
        assert server.connections == 0
        assert service.ended.is_set()


async def test_run_returns_when_drained(path: Path) -> None:
    async with serve(path, EchoService().methods()) as server:
        await server.drain(0.0)
        async with asyncio.timeout(PATIENCE_S):
            await server.run()


async def test_no_call_is_left_when_its_peer_stopped_reading_took_it_back_and_died(path: Path) -> None:
    service = EchoService()
    async with serve(path, service.methods()) as server:
        client = await RawClient.connect(path)
        client.h2.initiate_connection()
        client.h2.increment_flow_control_window(2**30)
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
        stream_id = await open_stream(client, FLOOD)
        await service.held.wait()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection = next(iter(server.live))
        await wait_stuck(connection)
        # As if it had been read just before the server stopped reading.
        client.h2.reset_stream(stream_id)
        reset = client.h2.data_to_send()
        connection.get_buffer(-1)[: len(reset)] = reset
        connection.buffer_updated(len(reset))
        assert server.load.resets == 1
        tasks = set(connection.handler._cancelled)
        assert len(tasks) == 1
        client.writer.transport.abort()
        await wait_until(server, lambda now: now.connections == 0)
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.done() for task in tasks)
