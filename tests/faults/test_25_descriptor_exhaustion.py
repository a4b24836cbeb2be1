"""Fault 25, sink part: without file descriptors open connections go on, and new ones come later."""

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from agent.config.values import Address
from agent.model.facts import Registered, RegistrationFailed
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.sinks.http.places import Bounds, Places
from agent.sinks.http.server import OneRequestServer, tcp_socket
from tests.sinks.plugin_process import PluginProcess, plugin_process
from tests.sinks.raw_http2 import PATIENCE_S, raw_client
from tests.sinks.registrar import plugin, registrar
from tests.sinks.servers import sink

FAILED = "Could not accept a connection of the kubelet"
RECOVERED = "Accepted connections again"


async def wait_lines(process: PluginProcess, words: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not any(words in line for line in process.log_lines()):
            await asyncio.sleep(0.01)


async def test_open_sessions_go_on_and_new_ones_are_accepted_as_soon_as_there_is_room(tmp_path: Path) -> None:
    with plugin_process(tmp_path) as process:
        async with plugin(process.socket) as stub:
            watch = stub.ListAndWatch(pb.Empty())
            assert len((await watch.read()).devices) == 8
            process.exhaust()
            async with raw_client(process.socket) as last:
                assert await last.wait_status(await last.request("GetDevicePluginOptions")) == "0"
                # The kernel takes this connection, the process cannot.
                async with raw_client(process.socket) as newcomer:
                    call = await newcomer.request("GetDevicePluginOptions")
                    await wait_lines(process, FAILED)
                    for _ in range(20):
                        await stub.GetDevicePluginOptions(pb.Empty(), timeout=PATIENCE_S)
                    assert not watch.done()
                    process.give_back()
                    assert await newcomer.wait_status(call) == "0"
            await wait_lines(process, RECOVERED)
            watch.cancel()
        # One line for each change of state, none for each try.
        assert sum(FAILED in line for line in process.log_lines()) == 1
        assert sum(RECOVERED in line for line in process.log_lines()) == 1


async def test_the_end_of_the_shortage_is_reported_even_if_no_client_waits(tmp_path: Path) -> None:
    with plugin_process(tmp_path) as process:
        process.exhaust()
        async with raw_client(process.socket) as last:
            assert await last.wait_status(await last.request("GetDevicePluginOptions")) == "0"
            # With the last descriptor in use, there is none left to accept another connection with.
            await wait_lines(process, FAILED)
            process.give_back()
            await wait_lines(process, RECOVERED)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process without a descriptor to spare."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, before[1]))
    descriptors = []
    try:
        try:
            while True:
                descriptors.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_resource_that_cannot_have_a_socket_is_not_served_and_is_when_there_is_one(
    tmp_path: Path,
) -> None:
    async with registrar(tmp_path), sink(tmp_path) as served:
        with no_descriptors():
            served.register(generation=1)
            fact = await served.wait_fact(Registered, RegistrationFailed)
        assert isinstance(fact, RegistrationFailed)
        assert fact.failure == "not_served"
        assert "limit of open files" in fact.message
        served.register(generation=2)
        assert isinstance(await served.wait_fact(Registered, RegistrationFailed), Registered)


async def test_a_probe_over_http_gets_the_descriptor_of_a_connection_that_asks_nothing() -> None:
    listening = tcp_socket(Address("127.0.0.1", 0))
    server = OneRequestServer(answer_ok)
    async with asyncio.TaskGroup() as tasks:
        places = Places("http", listening, server.serve, Bounds(rest_s=0.01))
        running = tasks.create_task(places.run(), name="http")
        idle = [await asyncio.open_connection(*listening.getsockname()) for _ in range(3)]
        with socket.socket() as probe:
            probe.setblocking(False)
            while len(places._heads) < len(idle):
                await asyncio.sleep(0.01)
            with no_descriptors():
                async with asyncio.timeout(PATIENCE_S):
                    await (loop := asyncio.get_running_loop()).sock_connect(probe, listening.getsockname())
                    await loop.sock_sendall(probe, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert (await loop.sock_recv(probe, 64)).startswith(b"HTTP/1.1 200 ")
        running.cancel()
        for _, writer in idle:
            writer.close()
    listening.close()


async def answer_ok(_request: web.BaseRequest) -> web.Response:
    return web.Response(text="ok")
