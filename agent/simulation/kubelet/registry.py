"""The registered plugins: the kubelet's Register call, its clients by resource name, and their streams.

Guarantees (facts: kubelet items 1 to 3 and 18; kubernetes pkg/kubelet/cm/devicemanager/plugin/v1beta1):

1. Register answers only after the plugin was dialled and gave its options, all within the caller's
   deadline. A Register that fails, or whose caller goes away meanwhile, makes the kubelet forget the
   client of that name, also an earlier one, whose end it then no longer notices.
2. Clients are kept by resource name alone. When a stream ends, the client registered under its name at
   that moment is disconnected, even if it is a newer one: this is the re-registration race.
3. A stream that ended is never tried again.
"""

import asyncio
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from agent.simulation.kubelet.devices import Device
from agent.simulation.kubelet.faults import Delay, RejectRegistrations
from agent.simulation.kubelet.node import Node
from agent.simulation.kubelet.plugin_client import PluginCallError, PluginClient
from agent.simulation.kubelet.records import (
    MAX_LISTS,
    MAX_REGISTRATIONS,
    MAX_RESOURCES,
    DeviceList,
    Registration,
    StreamEnd,
)
from agent.simulation.kubelet.wire import DEFAULT_MESSAGE_LIMIT_BYTES
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb

API_VERSION: Final = "v1beta1"
HEALTHY: Final = "Healthy"

_LABEL_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_SUBDOMAIN: Final = 253


class RegistrationRejectedError(Exception):
    """Register is answered with this text."""


class RegistrationFaults:
    """What is wrong with registration at the moment."""

    def __init__(self) -> None:
        self.rejecting: RejectRegistrations | None = None
        self.delay: Delay | None = None
        self.version = API_VERSION
        self.message_limit_bytes = DEFAULT_MESSAGE_LIMIT_BYTES
        self.unread: set[str] = set()
        """Resources whose ListAndWatch is not read, nor that of a later registration."""
        self._rejected = 0
        self._delayed = 0

    def set_rejection(self, fault: RejectRegistrations | None) -> None:
        """Set the fault, or clear it."""
        self.rejecting, self._rejected = fault, 0

    def set_delay(self, fault: Delay | None) -> None:
        """Be slow from now on, or no more."""
        self.delay, self._delayed = fault, 0

    def next_rejection(self) -> str | None:
        """Count one Register call; return the error to answer."""
        if self.rejecting is None or (
            self.rejecting.times is not None and self._rejected >= self.rejecting.times
        ):
            return None
        self._rejected += 1
        return self.rejecting.message

    def next_delay(self) -> Delay:
        """Count one Register call; return how slow it is."""
        if self.delay is None or (self.delay.times is not None and self._delayed >= self.delay.times):
            return Delay()
        self._delayed += 1
        return self.delay


class Registry:
    """The clients of one kubelet; ``spawn`` owns the tasks, ``node`` gets lists and ends."""

    def __init__(
        self,
        directory: Path,
        *,
        node: Node,
        dial_timeout_s: float,
        spawn: Callable[[Coroutine[Any, Any, object], str], asyncio.Task[Any]],
    ) -> None:
        self.faults = RegistrationFaults()
        self.registrations: deque[Registration] = deque(maxlen=MAX_REGISTRATIONS)
        self.lists: deque[DeviceList] = deque(maxlen=MAX_LISTS)
        self.stream_ends: deque[StreamEnd] = deque(maxlen=MAX_LISTS)
        self.registration_count = self.rejected_count = self.list_count = self.stream_end_count = 0
        self._directory = directory
        self._dial_timeout_s = dial_timeout_s
        self._spawn = spawn
        self._node = node
        node.on_expired = self._forget_endpoint
        self._clients: dict[str, PluginClient] = {}
        self._endpoints: dict[str, PluginClient] = {}
        self._open: dict[PluginClient, asyncio.Task[Any] | None] = {}
        self._registering: set[asyncio.Task[Any]] = set()
        self._late_ends: dict[str, asyncio.Event] = {}
        self._generation = 0

    def client(self, resource: str) -> PluginClient | None:
        """Return the client that Allocate would use, also one that has been stopped."""
        return self._endpoints.get(resource)

    def live(self, resource: str | None = None) -> list[PluginClient]:
        """Return the clients with a stream, of one resource or all."""
        return [client for name, client in self._clients.items() if resource in (None, name)]

    async def register(self, request: Any, pid: int | None, *, within_s: float | None = None) -> str | None:
        """Serve one Register call; return the error's text, or None. ``within_s`` is its deadline."""
        task = self._spawn(
            self._register(request, pid, within_s), f"kubelet-register-{request.resource_name}"
        )
        self._registering.add(task)
        task.add_done_callback(self._has_answered)
        error: str | None = await task
        return error

    def _has_answered(self, task: asyncio.Task[Any]) -> None:
        self._registering.discard(task)
        self._node.watchers.evaluate()

    async def _register(self, request: Any, pid: int | None, within_s: float | None) -> str | None:
        received_at_ns = time.monotonic_ns()
        error: str | None = None
        generation: int | None = None
        try:
            delay = self.faults.next_delay()
            await asyncio.sleep(delay.register)
            self._check(request)
            client = await self._connect(request.resource_name, request.endpoint, delay.dial, within_s)
            generation = client.generation
        except (RegistrationRejectedError, PluginCallError) as rejection:
            error = str(rejection)
        self.registration_count += 1
        self.rejected_count += error is not None
        self.registrations.append(
            Registration(
                received_at_ns=received_at_ns,
                at_ns=time.monotonic_ns(),
                version=request.version,
                endpoint=request.endpoint,
                resource=request.resource_name,
                error=error,
                peer_pid=pid,
                generation=generation,
            )
        )
        self._node.watchers.evaluate()
        return error

    def _check(self, request: Any) -> None:
        if request.version != self.faults.version:
            raise RegistrationRejectedError(
                f"requested API version {json.dumps(request.version)} is not supported by kubelet. "
                f"Supported version is [{json.dumps(self.faults.version)}]"
            )
        if not is_extended_resource_name(request.resource_name):
            raise RegistrationRejectedError(
                f"the ResourceName {json.dumps(request.resource_name)} is invalid"
            )
        if request.resource_name not in self._clients and len(self._clients) >= MAX_RESOURCES:
            raise RegistrationRejectedError(f"more than {MAX_RESOURCES} resources are registered already")
        rejection = self.faults.next_rejection()
        if rejection is not None:
            raise RegistrationRejectedError(rejection)

    async def _connect(
        self, resource: str, endpoint: str, delay_s: float, within_s: float | None = None
    ) -> PluginClient:
        self._generation += 1
        client = PluginClient(resource, self._socket_path(endpoint), self._generation)
        self._open[client] = None
        self._clients[resource] = client
        try:
            await asyncio.sleep(delay_s)
            await client.connect(self._dial_timeout_s, within_s=within_s)
        except BaseException:
            # By name, as the kubelet does: it forgets the earlier client of this resource too.
            self._clients.pop(resource, None)
            await self._close(client)
            raise
        client.set_reading(reading=resource not in self.faults.unread)
        self._endpoints[resource] = client
        self._node.connected(resource)
        self._open[client] = self._spawn(self._run(client), f"kubelet-stream-{resource}-{client.generation}")
        late_end = self._late_ends.pop(resource, None)
        if late_end is not None:
            late_end.set()
        return client

    async def _run(self, client: PluginClient) -> None:
        cause = await client.run(self._handle_list)
        self.stream_end_count += 1
        self.stream_ends.append(
            StreamEnd(time.monotonic_ns(), client.resource, client.endpoint, client.generation, cause)
        )
        self._node.watchers.evaluate()
        late_end = self._late_ends.get(client.resource)
        if late_end is not None:
            await late_end.wait()
        await self._close(client)
        current = self._clients.pop(client.resource, None)
        if current is None:
            return
        self._node.disconnected(client.resource)
        if current.dialled:
            await self._close(current)

    def _handle_list(self, client: PluginClient, data: bytes, at_ns: int) -> str | None:
        if client.forgotten:
            return None
        limit = self.faults.message_limit_bytes
        if len(data) > limit:
            return (
                "rpc error: code = ResourceExhausted desc = "
                f"grpc: received message larger than max ({len(data)} vs. {limit})"
            )
        message = plugin_pb.ListAndWatchResponse.FromString(data)
        devices = {
            sys.intern(device.ID): Device(
                device.health == HEALTHY, tuple(node.ID for node in device.topology.nodes)
            )
            for device in message.devices
        }
        self.list_count += 1
        self.lists.append(
            DeviceList(
                at_ns=at_ns,
                resource=client.resource,
                endpoint=client.endpoint,
                generation=client.generation,
                healthy=tuple(id_ for id_, device in devices.items() if device.healthy),
                unhealthy=tuple(id_ for id_, device in devices.items() if not device.healthy),
                size_bytes=len(data),
            )
        )
        self._node.replace(client.resource, devices)
        return None

    async def race_now(self, client: PluginClient) -> None:
        """Connect to a plugin a second time, then end its first stream (facts: kubelet item 3).

        Raises PluginCallError where the plugin rejects a second connection.
        """
        await self._connect(client.resource, client.endpoint, 0.0)
        client.cancel_stream("overtaken by a second registration (simulated)")

    def forget_endpoint(self, client: PluginClient) -> None:
        """Have nothing of a plugin any more, and leave its stream open."""
        client.forgotten = True
        self._clients.pop(client.resource, None)
        self._endpoints.pop(client.resource, None)
        self._node.disconnected(client.resource)

    def hold_end(self, resource: str) -> None:
        """Notice the end of this resource's stream only after its next registration."""
        self._late_ends.setdefault(resource, asyncio.Event())

    def release_ends(self) -> None:
        """Notice every end that was held back."""
        for late_end in self._late_ends.values():
            late_end.set()
        self._late_ends.clear()

    async def forget(self) -> None:
        """Close every connection and end every call, as the end of the kubelet's process does."""
        registering, clients = tuple(self._registering), dict(self._open)
        self._clients.clear()
        self._endpoints.clear()
        self.release_ends()
        for task in registering:
            task.cancel()
        for client in clients:
            await client.close()
        # Their ends must not be noticed by the next kubelet, which knows the same names.
        tasks = [task for task in (*registering, *clients.values()) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._open.clear()

    def _socket_path(self, endpoint: str) -> Path:
        """Return where the kubelet opens an endpoint; a leading slash does not leave the folder."""
        return Path(os.path.normpath(f"{self._directory}/{endpoint}"))

    def _forget_endpoint(self, resource: str) -> None:
        self._endpoints.pop(resource, None)

    async def _close(self, client: PluginClient) -> None:
        self._open.pop(client, None)
        await client.close()


def is_extended_resource_name(name: str) -> bool:
    """Return whether a plugin may register it. Source: kubernetes pkg/apis/core/v1/helper."""
    prefix, slash, label = name.partition("/")
    if not slash or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    prefix = f"requests.{prefix}"
    return (
        len(prefix) <= _MAX_SUBDOMAIN
        and _SUBDOMAIN.fullmatch(prefix) is not None
        and _LABEL_NAME.fullmatch(label) is not None
    )
