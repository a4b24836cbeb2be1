"""Servers under test, each at a socket of its own."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpclib.const import Cardinality
from grpclib.const import Handler as Method
from grpclib.server import Stream

from agent.bus import Inbox, Latest
from agent.model.effects import RegisterResource
from agent.model.facts import Fact
from agent.model.ids import ResourceName
from agent.model.snapshot import ListSent, Snapshot
from agent.proofs import Proofs
from agent.sinks.plugin.answers import CdiSpecs
from agent.sinks.plugin.grpc_bounds import Bounds
from agent.sinks.plugin.grpc_server import BoundedServer, receive_request
from agent.sinks.plugin.sink import KEPT_LISTS, MAX_OVERTAKEN_CALLS, DevicePlugin
from agent.sinks.plugin.socket_file import identity_of, listen
from tests.sinks.raw_http2 import PATIENCE_S
from tests.sinks.snapshots import GPU, node

ECHO = "/test.Echo/Echo"
HOLD = "/test.Echo/Hold"
FLOOD = "/test.Echo/Flood"


@dataclass
class EchoService:
    """Answers with what it was asked, at once or when released, or sends without end."""

    release: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def methods(self) -> dict[str, Method]:
        return {
            ECHO: Method(self._echo, Cardinality.UNARY_UNARY, bytes, bytes),
            HOLD: Method(self._hold, Cardinality.UNARY_UNARY, bytes, bytes),
            FLOOD: Method(self._flood, Cardinality.UNARY_STREAM, bytes, bytes),
        }

    async def _echo(self, stream: Stream[bytes, bytes]) -> None:
        await stream.send_message(await receive_request(stream))

    async def _hold(self, stream: Stream[bytes, bytes]) -> None:
        request = await receive_request(stream)
        self.held.set()
        try:
            await self.release.wait()
            await stream.send_message(request)
        finally:
            self.ended.set()

    async def _flood(self, stream: Stream[bytes, bytes]) -> None:
        await receive_request(stream)
        self.held.set()
        try:
            while True:
                await stream.send_message(b"x" * 60_000)
        finally:
            self.ended.set()


@asynccontextmanager
async def meanwhile(work: Coroutine[object, object, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Have something done beside the block, begun before it and done at its end."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        await asyncio.sleep(0)
        yield task


@asynccontextmanager
async def serve(
    path: Path,
    methods: Mapping[str, Method],
    *,
    bounds: Bounds | None = None,
    uids: frozenset[int] | None = None,
) -> AsyncIterator[BoundedServer]:
    """A server that is closed at the end, however far the test got."""
    server = BoundedServer(methods, listen(path, backlog=128), bounds=bounds, uids=uids)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.run())
        try:
            yield server
        finally:
            server.close_now()
            running.cancel()


@dataclass
class Sink:
    """A device-plugin sink and what surrounds it."""

    plugin: DevicePlugin
    inbox: Inbox[Fact]
    latest: Latest[Snapshot]
    directory: Path
    sent: list[ListSent]
    running: asyncio.Task[None]

    def register(self, generation: int = 1, resource: ResourceName = GPU) -> None:
        kubelet = identity_of(self.directory / "kubelet.sock")
        self.plugin.register(RegisterResource(resource, generation, kubelet))

    @property
    def socket(self) -> Path:
        return self.directory / "nvidia-gpu.sock"

    async def wait_fact(self, *kinds: type[Fact]) -> Fact:
        """Return the next fact of these kinds; others before it are dropped."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                batch, _ = self.inbox.pop_all()
                for position, item in enumerate(batch):
                    if isinstance(item.fact, kinds):
                        for later in batch[position + 1 :]:
                            self.inbox.put(later.fact)
                        return item.fact
                await self.inbox.wait_nonempty(time.monotonic_ns() + 1_000_000_000)


@asynccontextmanager
async def sink(
    directory: Path,
    *,
    state: Snapshot | None = None,
    bounds: Bounds | None = None,
    register_timeout_s: float = 12.0,
    overtaken_calls: int = MAX_OVERTAKEN_CALLS,
    cdi: CdiSpecs | None = None,
    kept_lists: int = KEPT_LISTS,
    proofs: Proofs | None = None,
) -> AsyncIterator[Sink]:
    """A running sink, drained at the end."""
    inbox: Inbox[Fact] = Inbox(clock=time.monotonic_ns)
    latest = Latest(state or node())
    sent: list[ListSent] = []
    plugin = DevicePlugin(
        inbox=inbox,
        latest=latest,
        kubelet_socket=directory / "kubelet.sock",
        clock=time.monotonic_ns,
        bounds=bounds,
        cdi=cdi,
        on_sent=sent.append,
        register_timeout_s=register_timeout_s,
        overtaken_calls=overtaken_calls,
        kept_lists=kept_lists,
        proofs=proofs,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(plugin.run())
            try:
                yield Sink(plugin, inbox, latest, directory, sent, running)
            finally:
                await plugin.drain(1.0)
    finally:
        inbox.close()
