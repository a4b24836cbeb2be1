"""Fault 25, sink part: without file descriptors open connections go on, and new ones come later."""

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.model.facts import Registered, RegistrationFailed
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.sinks.plugin_process import PluginProcess, plugin_process
from tests.sinks.raw_http2 import PATIENCE_S, raw_client
from tests.sinks.registrar import plugin, registrar
from tests.sinks.serving import sink

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
            process.send(signal.SIGUSR1)
            # The kernel takes the connection, the process cannot.
            async with raw_client(process.socket) as newcomer:
                call = await newcomer.request("GetDevicePluginOptions")
                await wait_lines(process, FAILED)
                for _ in range(20):
                    await stub.GetDevicePluginOptions(pb.Empty(), timeout=PATIENCE_S)
                assert not watch.done()
                process.send(signal.SIGUSR2)
                assert await newcomer.wait_status(call) == "0"
            await wait_lines(process, RECOVERED)
            watch.cancel()
        # One line for each change of state, none for each try.
        assert sum(FAILED in line for line in process.log_lines()) == 1
        assert sum(RECOVERED in line for line in process.log_lines()) == 1


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process without a descriptor to spare."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, before[1]))
    taken = []
    try:
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        yield
    finally:
        for descriptor in taken:
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
