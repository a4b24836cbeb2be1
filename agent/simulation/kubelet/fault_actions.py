"""Applying and clearing each named fault on a running kubelet."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, assert_never

from agent.errors import UsageError
from agent.simulation.kubelet import faults as f
from agent.simulation.kubelet.plugin_client import PluginCallError, PluginClient
from agent.simulation.kubelet.process import SOCKET_NAME, delete_sockets
from agent.simulation.kubelet.registry import API_VERSION, Registry
from agent.simulation.kubelet.wire import DEFAULT_MESSAGE_LIMIT_BYTES, sever


class Life(Protocol):
    """Starting and stopping the kubelet."""

    async def start(self) -> None:
        """Start, unless it runs."""

    async def stop(self, *, kill: bool = False) -> None:
        """Stop, unless it is down."""

    async def restart(self, *, downtime_s: float = 0.0, kill: bool = False, rejecting_s: float = 0.0) -> None:
        """Stop and start again."""


class FaultActions:
    """Applies faults to one kubelet; ``spawn`` owns the tasks of those that end by themselves."""

    def __init__(
        self,
        life: Life,
        registry: Registry,
        device_plugins: Path,
        spawn: Callable[[Coroutine[Any, Any, object], str], asyncio.Task[Any]],
    ) -> None:
        self._life = life
        self._registry = registry
        self._device_plugins = device_plugins
        self._spawn = spawn
        self._clearing: dict[str, asyncio.Task[Any]] = {}

    async def apply(self, fault: f.Fault) -> None:  # noqa: C901, PLR0912 (one branch for each fault)
        """Apply the fault; raises UsageError where there is nothing it could act on."""
        match fault:
            case f.RejectRegistrations():
                self._registry.faults.set_rejection(fault)
            case f.Delay():
                self._registry.faults.set_delay(fault)
            case f.DropStream():
                self._drop_streams(fault)
            case f.StopReading():
                self._stop_reading(fault)
            case f.DeleteSockets():
                self._delete_sockets(fault)
            case f.Restart(downtime=downtime, how=how, refusing=rejecting_s):
                self._forget_end("absent")
                await self._life.restart(downtime_s=downtime, kill=how == "kill", rejecting_s=rejecting_s)
            case f.Race():
                await self._race(fault)
            case f.Forget():
                for client in self._live(fault.resource):
                    self._registry.forget_endpoint(client)
            case f.MessageLimit(limit=limit):
                self._limit_messages(limit)
            case f.OtherVersion(version=version):
                self._registry.faults.version = version
            case f.Absent():
                await self._be_absent(fault)
            case f.Clear(fault=name):
                for each in f.LASTING if name is None else (name,):
                    await self._clear(each)
            case _:
                assert_never(fault)

    def _live(self, resource: str | None) -> list[PluginClient]:
        clients = self._registry.live(resource)
        if not clients:
            raise UsageError(
                f"No ListAndWatch stream of {resource or 'any resource'} is open at this kubelet"
            )
        return clients

    def _drop_streams(self, fault: f.DropStream) -> None:
        clients = self._live(fault.resource)
        if fault.how == "cancel":
            for client in clients:
                client.cancel_stream("cancelled (simulated)")
            return
        for path in {client.path for client in clients}:
            if not sever(path):
                raise UsageError(f"The connection to {path} was not found, so it was not broken")

    def _stop_reading(self, fault: f.StopReading) -> None:
        clients = self._live(fault.resource)
        self._forget_end("stop_reading")
        for client in clients:
            self._registry.faults.unread.add(client.resource)
            client.set_reading(reading=False)
        if fault.duration is not None:
            self._end_after("stop_reading", fault.duration)

    def _delete_sockets(self, fault: f.DeleteSockets) -> None:
        if not delete_sockets(self._device_plugins, keep=SOCKET_NAME, only=fault.endpoint):
            name = fault.endpoint or "a plugin"
            raise UsageError(f"There is no socket of {name} to delete in {self._device_plugins}")

    async def _race(self, fault: f.Race) -> None:
        for client in self._live(fault.resource):
            if fault.how == "late-end":
                self._registry.hold_end(client.resource)
            else:
                await self._race_now(client)

    async def _race_now(self, client: PluginClient) -> None:
        try:
            await self._registry.race_now(client)
        except PluginCallError as error:
            raise UsageError(
                f"The plugin at {client.path} was not connected a second time: {error}"
            ) from None

    def _limit_messages(self, limit: int) -> None:
        if limit > DEFAULT_MESSAGE_LIMIT_BYTES:
            raise UsageError(f"The message limit of {DEFAULT_MESSAGE_LIMIT_BYTES} bytes can only be lowered")
        self._registry.faults.message_limit_bytes = limit

    async def _be_absent(self, fault: f.Absent) -> None:
        self._forget_end("absent")
        await self._life.stop(kill=fault.how == "kill")
        if fault.duration is not None:
            self._end_after("absent", fault.duration)

    def _end_after(self, name: str, seconds: float) -> None:
        async def end() -> None:
            await asyncio.sleep(seconds)
            self._clearing.pop(name, None)
            await self._clear(name)

        self._clearing[name] = self._spawn(end(), f"kubelet-fault-{name}")

    def _forget_end(self, name: str) -> None:
        """Cancel the timer of a fault; a newer one of the same name decides when it ends."""
        task = self._clearing.pop(name, None)
        if task is not None:
            task.cancel()

    async def _clear(self, name: str) -> None:
        self._forget_end(name)
        match name:
            case "refuse":
                self._registry.faults.set_rejection(None)
            case "delay":
                self._registry.faults.set_delay(None)
            case "stop_reading":
                self._registry.faults.unread.clear()
                for client in self._registry.live():
                    client.set_reading(reading=True)
            case "race":
                self._registry.release_ends()
            case "message_limit":
                self._registry.faults.message_limit_bytes = DEFAULT_MESSAGE_LIMIT_BYTES
            case "other_version":
                self._registry.faults.version = API_VERSION
            case _:
                await self._life.start()
