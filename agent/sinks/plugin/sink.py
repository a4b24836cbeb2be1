"""Offers the node's devices to the kubelet: serves each resource and registers it.

The core decides when (core/registration.py); this sink carries it out and tells what came of it.

Guarantees:

1. The old streams and server of a resource are ended before it is registered anew: the kubelet
   keeps its clients by resource name only, and drops the new one when the old one ends later.
2. Each RegisterResource that no newer one has overtaken is answered once, with Registered or
   RegistrationFailed of its generation.
3. What goes wrong with one resource touches no other.
4. ``register`` never blocks; everything else happens in tasks owned by ``run``.
5. Register is sent to a kubelet that was connected to while our socket was there: a kubelet deletes every
   socket before it listens, so it finds ours.
6. A Register call that a newer order overtook is not waited for and not cut off either, because a kubelet
   whose caller is gone forgets the resource by its name; each resource has ``overtaken_calls`` at most.
7. A part of the agent proves each second that every watcher was written the newest list, whatever became
   of the task that brings it there.

Tasks: one for each resource that obeys the newest order, one for the order it carries out, one for
its Register call, one for the endpoint it serves.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from pathlib import Path
from typing import Final

import msgspec

from agent import guard
from agent.bus import Inbox, Latest
from agent.core.freshness import Terms
from agent.log import about
from agent.model.effects import RegisterResource
from agent.model.facts import (
    Fact,
    Registered,
    RegisterSent,
    RegistrationFailed,
    RegistrationFailure,
    SocketFreed,
)
from agent.model.ids import NO_KUBELET, Part, ResourceName, SocketIdentity
from agent.model.parts import LIST_AND_WATCH
from agent.model.policy import SECOND_NS
from agent.model.snapshot import ListSent, Snapshot
from agent.proofs import Proofs
from agent.sinks.plugin.answers import CdiSpecs
from agent.sinks.plugin.endpoint import Endpoint
from agent.sinks.plugin.grpc_bounds import Bounds
from agent.sinks.plugin.grpc_server import ServerStatistics
from agent.sinks.plugin.registration import REGISTER_TIMEOUT_S, answers, connect, register, wait_unserved
from agent.sinks.plugin.service import PluginService, ServiceStatistics
from agent.sinks.plugin.socket_file import NotRegisteredError, clear_leftovers, identity_of, socket_path
from agent.threads import in_daemon_thread
from agent.unix_channel import UnixChannel

HANDOVER_GRACE_S: Final = 0.5
"""How long calls of the old server may take to end when a resource is registered anew."""

LIST_TERMS: Final = Terms(SECOND_NS, 5 * SECOND_NS)
"""The newest list may wait for devices that come back, and for a kubelet that is slow to read."""
KEPT_LISTS: Final = 32
"""Lists sent of which each resource keeps why devices were Unhealthy in them."""
MAX_OVERTAKEN_CALLS: Final = 8
"""Of one resource; each ends within REGISTER_TIMEOUT_S, and the oldest is cut off when there are more."""

log = logging.getLogger(__name__)


class ResourceStatistics(msgspec.Struct, frozen=True):
    """Counts of what serves one resource now; they begin anew with each server."""

    service: ServiceStatistics
    server: ServerStatistics


class _Slot(msgspec.Struct, eq=False):
    """One resource: what is wanted, and what there is."""

    resource: ResourceName
    order: RegisterResource
    is_fresh: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None
    attempt: asyncio.Task[None] | None = None
    asked: SocketIdentity | None = None
    """The kubelet that the attempt has sent Register to."""
    call: asyncio.Task[NotRegisteredError | None] | None = None
    other: asyncio.Task[None] | None = None
    """Waits for the end of another process that has our socket's path."""
    overtaken: list[asyncio.Task[NotRegisteredError | None]] = msgspec.field(default_factory=list)
    endpoint: Endpoint | None = None


class DevicePlugin:
    """The device-plugin sink."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        latest: Latest[Snapshot],
        kubelet_socket: Path,
        clock: Callable[[], int],
        bounds: Bounds | None = None,
        registers: bool = True,
        cdi: CdiSpecs | None = None,
        on_sent: Callable[[ListSent], None] | None = None,
        register_timeout_s: float = REGISTER_TIMEOUT_S,
        overtaken_calls: int = MAX_OVERTAKEN_CALLS,
        kept_lists: int = KEPT_LISTS,
        proofs: Proofs | None = None,
    ) -> None:
        """Serve beside ``kubelet_socket``. ``on_sent`` is told of each ListAndWatch message written.

        ``cdi`` knows which CDI names resolve; without it none does, and such answers are refused.
        With ``registers`` false the kubelet is left alone, and being served counts as registered.
        """
        self._inbox = inbox
        self._latest = latest
        self._kubelet_socket = kubelet_socket
        self._clock = clock
        self._bounds = bounds or Bounds()
        self._registers = registers
        self._cdi = cdi
        self._on_sent = on_sent
        self._register_timeout_s = register_timeout_s
        self._overtaken_calls = overtaken_calls
        self._kept_lists = kept_lists
        self._sent: dict[ResourceName, deque[ListSent]] = {}
        self._proofs = proofs or Proofs(clock=clock)
        self._slots: dict[ResourceName, _Slot] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._context: Context | None = None
        """The one of ``run``."""
        self._is_draining = False
        self._drained = asyncio.Event()

    def register(self, effect: RegisterResource) -> None:
        """Have a resource served and registered anew; the newest generation wins."""
        if self._is_draining:
            return
        slot = self._slots.get(effect.resource)
        if slot is not None and slot.order.generation > effect.generation:
            return
        slot = self._slots.setdefault(effect.resource, _Slot(effect.resource, effect))
        slot.order = effect
        self._proofs.expect(Part(LIST_AND_WATCH, effect.resource), LIST_TERMS)
        if self._is_being_asked(slot):
            # The core learned of the kubelet after this sink did: what it wants is under way.
            self._announce(slot)
            return
        slot.is_fresh.set()
        if slot.other is not None:
            slot.other.cancel()
        if slot.attempt is not None:
            slot.attempt.cancel()
            self._overtake(slot)
            slot.asked = None
        if slot.worker is None and self._tasks is not None:
            self._start(self._tasks, slot)

    def _overtake(self, slot: _Slot) -> None:
        """Wait no longer for the slot's Register call, see guarantee 6."""
        if slot.call is None:
            return
        slot.overtaken = [call for call in (*slot.overtaken, slot.call) if not call.done()]
        slot.call = None
        for call in slot.overtaken[: max(0, len(slot.overtaken) - self._overtaken_calls)]:
            call.cancel()

    @staticmethod
    def _is_being_asked(slot: _Slot) -> bool:
        """Tell whether the kubelet of the order is being asked, and can reach what is served."""
        endpoint = slot.endpoint
        is_asked = slot.asked is not None and slot.asked == slot.order.kubelet
        return is_asked and endpoint is not None and endpoint.is_intact()

    def _announce(self, slot: _Slot) -> None:
        """Report which kubelet is asked for the newest generation, and with which socket."""
        endpoint, kubelet, order = slot.endpoint, slot.asked, slot.order
        if endpoint is not None and endpoint.identity is not None and kubelet is not None:
            self._inbox.put(
                RegisterSent(order.resource, order.generation, kubelet=kubelet, socket=endpoint.identity)
            )
            endpoint.service.belong_to(order.generation)

    def _start(self, tasks: asyncio.TaskGroup, slot: _Slot) -> None:
        # Who orders it does not own it: what fails in there is this sink's to begin anew.
        name = f"device-plugin {slot.resource}"
        slot.worker = tasks.create_task(self._obey(tasks, slot), name=name, context=self._context)

    async def run(self) -> None:
        """Carry out orders until drained; orders given while this did not run are made up for."""
        # Before anything is served, so that nothing new is taken for a leftover.
        await self._clear_leftovers()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks, self._context = tasks, copy_context()
                for slot in self._slots.values():
                    slot.is_fresh.set()
                    self._start(tasks, slot)
                comparing = tasks.create_task(
                    guard.for_ever("device lists", self._compare_lists), name="compare device lists"
                )
                await self._drained.wait()
                comparing.cancel()
        finally:
            self._tasks = None
            for slot in self._slots.values():
                if slot.endpoint is not None:
                    slot.endpoint.close_now()
                slot.worker = slot.attempt = slot.endpoint = slot.asked = None

    async def _compare_lists(self) -> None:
        """Prove for each resource that the kubelet was written its newest list, for ever."""
        while True:
            for slot in self._slots.values():
                if slot.endpoint is None or slot.endpoint.service.is_up_to_date():
                    self._proofs.prove(Part(LIST_AND_WATCH, slot.resource))
            await asyncio.sleep(LIST_TERMS.period_ns / 1e9)

    def is_obeyed(self, resource: ResourceName) -> bool:
        """Tell whether the newest order for a resource was begun."""
        slot = self._slots.get(resource)
        if slot is None:
            return True
        return slot.endpoint is not None and slot.endpoint.service.generation == slot.order.generation

    async def _clear_leftovers(self) -> None:
        """Remove what an agent that was killed served and this one may never serve."""
        directory = self._kubelet_socket.parent
        try:
            names = await in_daemon_thread("leftover-sweeper", lambda: clear_leftovers(directory))
        except RuntimeError as error:
            # They disturb nobody, and the next start tries again.
            log.warning(
                "The device-plugin left sockets that nobody serves where they are: %(detail)s",
                about(detail=str(error)),
            )
            return
        if names:
            log.info("Removed sockets that nobody serves any more: %(names)s", about(names=list(names)))

    async def drain(self, grace_s: float) -> None:
        """End every stream and server; running calls have ``grace_s``. ``run`` returns after that."""
        self._is_draining = True
        self._proofs.follow(LIST_AND_WATCH, (), LIST_TERMS)
        slots = list(self._slots.values())
        for task in [
            task
            for slot in slots
            for task in (slot.worker, slot.attempt, slot.call, slot.other, *slot.overtaken)
        ]:
            if task is not None:
                task.cancel()
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in slots:
                    if slot.endpoint is not None:
                        ending = slot.endpoint.end_between_pods(grace_s)
                        tasks.create_task(ending, name=f"drain {slot.resource}")
        finally:
            self._drained.set()

    async def _obey(self, tasks: asyncio.TaskGroup, slot: _Slot) -> None:
        while True:
            await slot.is_fresh.wait()
            slot.is_fresh.clear()
            slot.attempt = tasks.create_task(self._attempt(tasks, slot), name=f"register {slot.resource}")
            await asyncio.wait({slot.attempt})
            slot.attempt = None

    async def _attempt(self, tasks: asyncio.TaskGroup, slot: _Slot) -> None:
        try:
            fact = await self._serve_and_register(tasks, slot)
        except NotRegisteredError as error:
            self._fail(slot.resource, slot.order.generation, error.failure, str(error))
            if error.failure == "socket_in_use":
                name = f"wait for {slot.resource}"
                slot.other = tasks.create_task(self._wait_for_other(slot), name=name)
        except Exception as error:
            log.exception("Could not register %(resource)s", about(resource=slot.resource))
            message = f"A bug in the agent: {error!r}"
            self._fail(slot.resource, slot.order.generation, "not_served", message)
        else:
            self._inbox.put(fact)
        finally:
            slot.asked = None

    async def _wait_for_other(self, slot: _Slot) -> None:
        """Report when another process, which has our socket's path, has left it."""
        generation = slot.order.generation
        await wait_unserved(socket_path(self._kubelet_socket.parent, slot.resource))
        self._inbox.put(SocketFreed(slot.resource, generation))

    async def _serve_and_register(self, tasks: asyncio.TaskGroup, slot: _Slot) -> Registered:
        endpoint, own = await self._serve(tasks, slot)
        if not self._registers:
            return Registered(slot.resource, slot.order.generation, kubelet=NO_KUBELET, socket=own)
        kubelet, channel = await self._connect()
        try:
            # The kubelet has deleted by now whatever it deletes.
            endpoint, own = await self._serve(tasks, slot)
        except BaseException:
            channel.close()
            raise
        slot.asked = kubelet
        self._announce(slot)
        name = f"call Register {slot.resource}"
        slot.call = tasks.create_task(self._call(channel, slot.resource, endpoint.path.name), name=name)
        error = await asyncio.shield(slot.call)
        if error is not None:
            raise error
        return Registered(slot.resource, slot.order.generation, kubelet=kubelet, socket=own)

    async def _connect(self) -> tuple[SocketIdentity, UnixChannel]:
        """Return which kubelet there is, and a connection to that one."""
        kubelet = identity_of(self._kubelet_socket)
        if kubelet is None:
            raise NotRegisteredError(
                "absent", f"{self._kubelet_socket} does not exist; it appears when the kubelet starts"
            )
        channel = await connect(self._kubelet_socket)
        if identity_of(self._kubelet_socket) == kubelet:
            return kubelet, channel
        channel.close()
        raise NotRegisteredError(
            "unreachable", f"{self._kubelet_socket} was replaced while it was connected to"
        )

    async def _call(
        self, kubelet: UnixChannel, resource: ResourceName, endpoint: str
    ) -> NotRegisteredError | None:
        """Call Register and return why it failed; the one who began it need not wait."""
        try:
            await register(
                kubelet,
                endpoint=endpoint,
                resource=resource,
                pre_start=self._latest.value.policy.pre_start_check,
                timeout_s=self._register_timeout_s,
            )
        except NotRegisteredError as error:
            return error
        finally:
            kubelet.close()
        return None

    async def _serve(self, tasks: asyncio.TaskGroup, slot: _Slot) -> tuple[Endpoint, SocketIdentity]:
        """Serve for the order; a server that nobody watches and everybody can reach is kept."""
        path = socket_path(self._kubelet_socket.parent, slot.resource)
        endpoint = slot.endpoint
        if endpoint is None or endpoint.service.watchers or not endpoint.is_intact():
            await self._end(slot)
            endpoint = self._open(tasks, slot, path, slot.order.generation)
        endpoint.service.begin(slot.order.generation)
        if endpoint.identity is None:
            raise NotRegisteredError("not_served", f"{path} was removed as soon as it was made")
        return endpoint, endpoint.identity

    def _open(self, tasks: asyncio.TaskGroup, slot: _Slot, path: Path, generation: int) -> Endpoint:
        service = PluginService(
            resource=slot.resource,
            generation=generation,
            inbox=self._inbox,
            latest=self._latest,
            clock=self._clock,
            cdi=self._cdi,
            on_sent=self._note_sent,
        )
        slot.endpoint = Endpoint(path, service, bounds=self._bounds)
        tasks.create_task(self._run_endpoint(slot.endpoint), name=f"serve {slot.resource}")
        return slot.endpoint

    async def _run_endpoint(self, endpoint: Endpoint) -> None:
        try:
            await endpoint.run()
        except* Exception as errors:
            resource = endpoint.service.resource
            log.exception("Stopped serving %(resource)s", about(resource=resource))
            message = f"The server of {resource} failed: {errors.exceptions[0]}"
            self._fail(resource, endpoint.service.generation, "not_served", message)

    async def _end(self, slot: _Slot) -> None:
        endpoint, slot.endpoint = slot.endpoint, None
        if endpoint is not None:
            await endpoint.end(HANDOVER_GRACE_S)

    def _fail(
        self, resource: ResourceName, generation: int, failure: RegistrationFailure, message: str
    ) -> None:
        self._inbox.put(RegistrationFailed(resource, generation, failure, message))

    async def unanswering(self, *, timeout_s: float) -> tuple[ResourceName, ...]:
        """Return the resources whose socket does not answer, asked the way the kubelet asks."""
        served = {slot.resource: slot.endpoint.path for slot in self._slots.values() if slot.endpoint}
        async with asyncio.TaskGroup() as tasks:
            asked = {
                resource: tasks.create_task(answers(path, timeout_s=timeout_s), name=f"ask {resource}")
                for resource, path in served.items()
            }
        return tuple(resource for resource, answer in asked.items() if not answer.result())

    def _note_sent(self, sent: ListSent) -> None:
        self._sent.setdefault(sent.resource, deque(maxlen=self._kept_lists)).append(sent)
        if self._on_sent is not None:
            self._on_sent(sent)

    def sent_before(self, at_ns: int) -> tuple[ListSent, ...]:
        """Return of each resource the newest list that a watcher can have had at a moment.

        A resource is missing where that is none of its ``kept_lists`` newest ones.
        """
        newest = (
            next((each for each in reversed(lists) if each.began_ns <= at_ns), None)
            for lists in self._sent.values()
        )
        return tuple(sent for sent in newest if sent is not None)

    def statistics(self) -> Mapping[ResourceName, ResourceStatistics]:
        """Return the counts of each resource that is served now."""
        return {
            slot.resource: ResourceStatistics(
                slot.endpoint.service.statistics(), slot.endpoint.server.statistics()
            )
            for slot in self._slots.values()
            if slot.endpoint is not None
        }
