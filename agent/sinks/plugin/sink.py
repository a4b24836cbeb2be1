"""Advertises the node's devices to the kubelet: serves each resource and registers it.

The core decides when (core/health/registration.py); this sink executes that and emits the outcome.

Guarantees:

1. The old streams and server of a resource end before it is registered again: the kubelet
   keeps its clients by resource name only, and drops the new one when the old one ends later.
2. Each RegisterResource that no newer one has overtaken is answered once, with Registered or
   RegistrationFailed of its generation.
3. A fault of one resource affects no other.
4. ``register`` never blocks; everything else happens in tasks owned by ``run``.
5. Register is sent to a kubelet that was connected to while our socket was there: a kubelet deletes every
   socket before it listens, so it finds ours.
6. A Register call that a newer effect overtook is not waited for and not cut off either, because a kubelet
   whose caller is gone forgets the resource by its name; each resource has ``overtaken_calls`` at most.
7. A component proves each second that every watcher was written the newest list, whatever the state of the
   task that sends it.

Tasks: one for each resource that executes the newest effect, one for the effect it executes, one for
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
from agent.model.components import LIST_AND_WATCH
from agent.model.effects import RegisterResource
from agent.model.facts import (
    Fact,
    Registered,
    RegisterSent,
    RegistrationFailed,
    RegistrationFailure,
    SocketFreed,
)
from agent.model.ids import NO_KUBELET, ComponentId, ResourceName, SocketIdentity
from agent.model.policy import SECOND_NS
from agent.model.snapshot import ListSent, Snapshot
from agent.proofs import Proofs
from agent.sinks.plugin.answers import CdiSpecs
from agent.sinks.plugin.grpc_bounds import Bounds
from agent.sinks.plugin.grpc_server import BoundedServer
from agent.sinks.plugin.registration import REGISTER_TIMEOUT_S, answers, connect, register, wait_unserved
from agent.sinks.plugin.service import PluginService
from agent.sinks.plugin.socket_file import (
    NotRegisteredError,
    clear_leftovers,
    identity_of,
    listen,
    remove,
    socket_path,
)
from agent.threads import in_daemon_thread
from agent.unix_channel import UnixChannel

HANDOVER_GRACE_S: Final = 0.5
"""How long calls of the old server may take to end when a resource is registered again."""

LIST_TERMS: Final = Terms(SECOND_NS, 5 * SECOND_NS)
"""The newest list may wait for devices that recover, and for a kubelet that is slow to read."""
KEPT_LISTS: Final = 32
"""Sent lists of each resource for which it keeps why devices were Unhealthy in them."""
MAX_OVERTAKEN_CALLS: Final = 8
"""Of one resource; each ends within REGISTER_TIMEOUT_S, and the oldest is cut off when there are more."""

log = logging.getLogger(__name__)


class Endpoint:
    """A service, its server and its socket file; they begin and end together."""

    def __init__(self, path: Path, service: PluginService, *, bounds: Bounds) -> None:
        """Listen at ``path``; NotRegisteredError if that is not possible."""
        listener = listen(path, backlog=bounds.backlog)
        self.path: Final = path
        self.service: Final = service
        self.identity: Final = identity_of(path)
        """Of the socket file; None if another process removed it at once."""
        self.server: Final = BoundedServer(service.methods(), listener, bounds=bounds)
        self._is_over = False

    async def run(self) -> None:
        """Serve until ``end`` was called."""
        try:
            async with asyncio.TaskGroup() as tasks:
                follower = tasks.create_task(
                    guard.run_forever(LIST_AND_WATCH, self.service.follow),
                    name=f"follow {self.service.resource}",
                )
                await self.server.run()
                follower.cancel()
        finally:
            self.close_now()

    def is_intact(self) -> bool:
        """Return whether the kubelet can still reach it: it runs, and its file is still ours."""
        return not self._is_over and self.identity is not None and identity_of(self.path) == self.identity

    async def end(self, grace_s: float) -> None:
        """End the watchers' streams, let running calls end within ``grace_s``, then close everything."""
        self._is_over = True
        remove(self.path, self.identity)
        self.service.end_watchers()
        await self.server.drain(grace_s)

    async def end_between_pods(self, grace_s: float) -> None:
        """End at a moment when the kubelet admits no pod, if there is one within half of ``grace_s``."""
        await self.service.wait_between_pods(grace_s / 2)
        await self.end(grace_s / 2)

    def close_now(self) -> None:
        """Close everything at once; also if ``run`` never began."""
        self._is_over = True
        remove(self.path, self.identity)
        self.server.close_now()


class _ResourceState(msgspec.Struct, eq=False):
    """One resource: what is wanted, and what there is."""

    resource: ResourceName
    effect: RegisterResource
    is_fresh: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None
    attempt: asyncio.Task[None] | None = None
    sent_to: SocketIdentity | None = None
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
        """Serve beside ``kubelet_socket``. ``on_sent`` is called for each ListAndWatch message written.

        ``cdi`` knows which CDI names resolve; without it none does, and such answers are rejected.
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
        self._states: dict[ResourceName, _ResourceState] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._context: Context | None = None
        """The one of ``run``."""
        self._is_draining = False
        self._drained = asyncio.Event()

    def register(self, effect: RegisterResource) -> None:
        """Have a resource served and registered again; the newest generation wins."""
        if self._is_draining:
            return
        state = self._states.get(effect.resource)
        if state is not None and state.effect.generation > effect.generation:
            return
        state = self._states.setdefault(effect.resource, _ResourceState(effect.resource, effect))
        state.effect = effect
        self._proofs.expect(ComponentId(LIST_AND_WATCH, effect.resource), LIST_TERMS)
        if self._is_register_sent(state):
            # The core learned of the kubelet after this sink did: what it wants is under way.
            self._emit_register_sent(state)
            return
        state.is_fresh.set()
        if state.other is not None:
            state.other.cancel()
        if state.attempt is not None:
            state.attempt.cancel()
            self._overtake(state)
            state.sent_to = None
        if state.worker is None and self._tasks is not None:
            self._start(self._tasks, state)

    def _overtake(self, state: _ResourceState) -> None:
        """Wait no longer for the state's Register call, see guarantee 6."""
        if state.call is None:
            return
        state.overtaken = [call for call in (*state.overtaken, state.call) if not call.done()]
        state.call = None
        for call in state.overtaken[: max(0, len(state.overtaken) - self._overtaken_calls)]:
            call.cancel()

    @staticmethod
    def _is_register_sent(state: _ResourceState) -> bool:
        """Return whether Register was sent to the effect's kubelet, and it can reach what is served."""
        endpoint = state.endpoint
        is_asked = state.sent_to is not None and state.sent_to == state.effect.kubelet
        return is_asked and endpoint is not None and endpoint.is_intact()

    def _emit_register_sent(self, state: _ResourceState) -> None:
        """Report which kubelet is asked for the newest generation, and with which socket."""
        endpoint, kubelet, effect = state.endpoint, state.sent_to, state.effect
        if endpoint is not None and endpoint.identity is not None and kubelet is not None:
            self._inbox.put(
                RegisterSent(effect.resource, effect.generation, kubelet=kubelet, socket=endpoint.identity)
            )
            endpoint.service.belong_to(effect.generation)

    def _start(self, tasks: asyncio.TaskGroup, state: _ResourceState) -> None:
        # The caller does not own the task: this sink restarts what fails in it.
        name = f"device-plugin {state.resource}"
        state.worker = tasks.create_task(
            self._execute_effects(tasks, state), name=name, context=self._context
        )

    async def run(self) -> None:
        """Execute effects until drained; those that came before this ran are executed first."""
        # Before anything is served, so that nothing new is mistaken for a leftover.
        await self._clear_leftovers()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks, self._context = tasks, copy_context()
                for state in self._states.values():
                    state.is_fresh.set()
                    self._start(tasks, state)
                comparing = tasks.create_task(
                    guard.run_forever("device lists", self._compare_lists), name="compare device lists"
                )
                await self._drained.wait()
                comparing.cancel()
        finally:
            self._tasks = None
            for state in self._states.values():
                if state.endpoint is not None:
                    state.endpoint.close_now()
                state.worker = state.attempt = state.endpoint = state.sent_to = None

    async def _compare_lists(self) -> None:
        """Prove for each resource that the kubelet was written its newest list, until cancelled."""
        while True:
            for state in self._states.values():
                if state.endpoint is None or state.endpoint.service.is_up_to_date():
                    self._proofs.prove(ComponentId(LIST_AND_WATCH, state.resource))
            await asyncio.sleep(LIST_TERMS.period_ns / 1e9)

    def recovers_by_registration(self, resource: ResourceName) -> bool:
        """Return whether a new registration sends the list that is overdue.

        It does not while the newest effect is not served, and not when every watcher was written the newest
        list: then the comparison of the lists hangs, and ``run`` has to start again.
        """
        state = self._states.get(resource)
        if state is None or state.endpoint is None:
            return state is None
        service = state.endpoint.service
        return service.generation == state.effect.generation and not service.is_up_to_date()

    async def _clear_leftovers(self) -> None:
        """Remove what an agent that was killed served and this one may never serve."""
        directory = self._kubelet_socket.parent
        try:
            names = await in_daemon_thread("leftover-sweeper", lambda: clear_leftovers(directory))
        except RuntimeError as error:
            # They disturb no other process, and the next start tries again.
            log.warning(
                "The device plugin left sockets that no process serves where they are: %(detail)s",
                about(detail=str(error)),
            )
            return
        if names:
            log.info("Removed sockets that no process serves any more: %(names)s", about(names=list(names)))

    async def drain(self, grace_s: float) -> None:
        """End every stream and server; running calls have ``grace_s``. ``run`` returns after that."""
        self._is_draining = True
        self._proofs.follow(LIST_AND_WATCH, (), LIST_TERMS)
        states = list(self._states.values())
        for task in [
            task
            for state in states
            for task in (state.worker, state.attempt, state.call, state.other, *state.overtaken)
        ]:
            if task is not None:
                task.cancel()
        try:
            async with asyncio.TaskGroup() as tasks:
                for state in states:
                    if state.endpoint is not None:
                        end = state.endpoint.end_between_pods(grace_s)
                        tasks.create_task(end, name=f"drain {state.resource}")
        finally:
            self._drained.set()

    async def _execute_effects(self, tasks: asyncio.TaskGroup, state: _ResourceState) -> None:
        while True:
            await state.is_fresh.wait()
            state.is_fresh.clear()
            state.attempt = tasks.create_task(self._attempt(tasks, state), name=f"register {state.resource}")
            await asyncio.wait({state.attempt})
            state.attempt = None

    async def _attempt(self, tasks: asyncio.TaskGroup, state: _ResourceState) -> None:
        try:
            fact = await self._serve_and_register(tasks, state)
        except NotRegisteredError as error:
            self._emit_failed(state.resource, state.effect.generation, error.failure, str(error))
            if error.failure == "socket_in_use":
                name = f"wait for {state.resource}"
                state.other = tasks.create_task(self._wait_for_other(state), name=name)
        except Exception as error:
            log.exception("Could not register %(resource)s", about(resource=state.resource))
            message = f"A bug in the agent: {error!r}"
            self._emit_failed(state.resource, state.effect.generation, "not_served", message)
        else:
            self._inbox.put(fact)
        finally:
            state.sent_to = None

    async def _wait_for_other(self, state: _ResourceState) -> None:
        """Report when another process, which has our socket's path, has left it."""
        generation = state.effect.generation
        await wait_unserved(socket_path(self._kubelet_socket.parent, state.resource))
        self._inbox.put(SocketFreed(state.resource, generation))

    async def _serve_and_register(self, tasks: asyncio.TaskGroup, state: _ResourceState) -> Registered:
        endpoint, own = await self._serve(tasks, state)
        if not self._registers:
            return Registered(state.resource, state.effect.generation, kubelet=NO_KUBELET, socket=own)
        kubelet, channel = await self._connect()
        try:
            # The kubelet has deleted by now whatever it deletes.
            endpoint, own = await self._serve(tasks, state)
        except BaseException:
            channel.close()
            raise
        state.sent_to = kubelet
        self._emit_register_sent(state)
        name = f"call Register {state.resource}"
        state.call = tasks.create_task(self._call(channel, state.resource, endpoint.path.name), name=name)
        error = await asyncio.shield(state.call)
        if error is not None:
            raise error
        return Registered(state.resource, state.effect.generation, kubelet=kubelet, socket=own)

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
        """Call Register and return why it failed; the caller need not wait for the end."""
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

    async def _serve(
        self, tasks: asyncio.TaskGroup, state: _ResourceState
    ) -> tuple[Endpoint, SocketIdentity]:
        """Serve for the newest effect; keep a server that has no watcher and a reachable socket."""
        path = socket_path(self._kubelet_socket.parent, state.resource)
        endpoint = state.endpoint
        if endpoint is None or endpoint.service.watchers or not endpoint.is_intact():
            await self._end(state)
            endpoint = self._open(tasks, state, path, state.effect.generation)
        endpoint.service.begin(state.effect.generation)
        if endpoint.identity is None:
            raise NotRegisteredError("not_served", f"{path} was removed as soon as it was made")
        return endpoint, endpoint.identity

    def _open(self, tasks: asyncio.TaskGroup, state: _ResourceState, path: Path, generation: int) -> Endpoint:
        service = PluginService(
            resource=state.resource,
            generation=generation,
            inbox=self._inbox,
            latest=self._latest,
            clock=self._clock,
            cdi=self._cdi,
            on_sent=self._on_list_sent,
        )
        state.endpoint = Endpoint(path, service, bounds=self._bounds)
        tasks.create_task(self._run_endpoint(state.endpoint), name=f"serve {state.resource}")
        return state.endpoint

    async def _run_endpoint(self, endpoint: Endpoint) -> None:
        try:
            await endpoint.run()
        except* Exception as errors:
            resource = endpoint.service.resource
            log.exception("Stopped serving %(resource)s", about(resource=resource))
            message = f"The server of {resource} failed: {errors.exceptions[0]}"
            self._emit_failed(resource, endpoint.service.generation, "not_served", message)

    async def _end(self, state: _ResourceState) -> None:
        endpoint, state.endpoint = state.endpoint, None
        if endpoint is not None:
            await endpoint.end(HANDOVER_GRACE_S)

    def _emit_failed(
        self, resource: ResourceName, generation: int, failure: RegistrationFailure, message: str
    ) -> None:
        self._inbox.put(RegistrationFailed(resource, generation, failure, message))

    async def unanswering(self, *, timeout_s: float) -> tuple[ResourceName, ...]:
        """Return the resources whose socket does not answer, asked the way the kubelet asks."""
        served = {state.resource: state.endpoint.path for state in self._states.values() if state.endpoint}
        async with asyncio.TaskGroup() as tasks:
            asked = {
                resource: tasks.create_task(answers(path, timeout_s=timeout_s), name=f"ask {resource}")
                for resource, path in served.items()
            }
        return tuple(resource for resource, answer in asked.items() if not answer.result())

    def _on_list_sent(self, sent: ListSent) -> None:
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

    @property
    def services(self) -> Mapping[ResourceName, PluginService]:
        """What serves each resource now."""
        return {
            state.resource: state.endpoint.service
            for state in self._states.values()
            if state.endpoint is not None
        }
