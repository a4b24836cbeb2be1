"""Receives XIDs: one event set, one thread that waits on it in slices, and its replacement after a failure.

Invariants: an XID goes from the waiting thread straight into the inbox. A wait that fails marks no
GPU and never spins: the set is created again, at most once in ``retry_ns``, from the GPUs that answer
their next probe, so a lost one does not silence the others. It emits since when no XID is heard.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from agent import guard
from agent.bus import Inbox
from agent.errors import NvmlCode, NvmlError
from agent.log import about
from agent.model.facts import Fact, XidEventsHeard, XidReported
from agent.model.ids import GpuUuid
from agent.model.policy import MILLISECOND_NS
from agent.sources.nvml.hotplug import BindEvents
from agent.sources.nvml.library import (
    HEALTH_EVENTS,
    XID_EVENT,
    EventSet,
    Handle,
    Nvml,
    NvmlEvent,
    not_supported,
)
from agent.sources.nvml.threads import Completions, ThreadEndedError, WorkerThread
from agent.waiting import wait_set

MAX_DRAINED: Final = 1_024
"""Events read from a set before it is freed."""

_log = logging.getLogger(__name__)


class SharedEventSet:
    """An event set that threads use at the same time; freed by the last one, once it is retired.

    NVML does not survive a set that is freed while another thread registers a GPU with it.
    """

    def __init__(self, events: EventSet) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False

    @contextmanager
    def in_use(self, nvml: Nvml) -> Iterator[EventSet]:
        """Keep the set from being freed; raises RetiredError if it is too late."""
        self._enter()
        try:
            yield self._events
        finally:
            if self._leave():
                self._free(nvml)

    def retire(self, nvml: Nvml) -> None:
        """Allow no further use of the set, and free it after the last user."""
        with self._lock:
            is_last = not self._retired and self._users == 0
            self._retired = True
        if is_last:
            self._free(nvml)

    def _enter(self) -> None:
        with self._lock:
            if self._retired:
                raise RetiredError
            self._users += 1

    def _leave(self) -> bool:
        """Return whether the set is to be freed now."""
        with self._lock:
            self._users -= 1
            return self._retired and self._users == 0

    def _free(self, nvml: Nvml) -> None:
        # A driver that is gone cannot free anything, and has nothing left to free.
        with suppress(NvmlError):
            nvml.free_event_set(self._events)


class RetiredError(Exception):
    """The event set is not the one to use any more."""


class Listener:
    """Owns the event set of one session; GPUs register themselves with ``register``."""

    def __init__(
        self,
        *,
        worker: WorkerThread,
        nvml: Nvml,
        inbox: Inbox[Fact],
        completions: Completions,
        slice_ms: int,
        retry_ns: int,
        clock: Callable[[], int],
        on_renewed: Callable[[], None],
        on_failed: Callable[[], None],
        on_xid: Callable[[GpuUuid], None],
        bind_events: BindEvents,
        on_rebound: Callable[[], None],
        prove: Callable[[], None],
    ) -> None:
        """``on_renewed``: there is a set to register with; ``on_failed``: probe every GPU at once.

        ``on_rebound``: NVML reported that a GPU was bound or unbound, which is polled between two waits.
        ``prove`` is called, on any thread, after each wait that returned.
        """
        self._worker = worker
        self._nvml = nvml
        self._inbox = inbox
        self._completions = completions
        self._slice_ms = slice_ms
        self._retry_ns = retry_ns
        self._clock = clock
        self._on_renewed = on_renewed
        self._on_failed = on_failed
        self._on_xid = on_xid
        self._bind_events = bind_events
        self._on_rebound = on_rebound
        self._prove = prove
        self._wait = nvml.wait_event
        self._registered = asyncio.Event()
        self._stopping = False
        self._runs = 0
        self._heard_ns = clock()
        """When a wait returned last."""
        self._is_deaf = False
        self._last_problem: str | None = None
        self.events: SharedEventSet | None = None
        """The set GPUs are to register with now."""
        self.devices: dict[int, GpuUuid] = {}
        """GPUs by the address of their handle. Replaced, never changed: another thread reads it."""

    async def run(self) -> None:
        """Listen until cancelled."""
        self._runs += 1
        while True:
            began_ns = self._clock()
            try:
                if self.events is None:
                    self.events = SharedEventSet(await self._worker.call(self._create))
                    self._registered.clear()
                    self._on_renewed()
                await self._wait_registered()
                # Bound here: the seam belongs to the task that runs now.
                self._wait = guard.owner().seam("thread", "nvml-event-wait", self._nvml.wait_event)
                await self._worker.call(partial(self._listen, self.events, self._runs))
            except NvmlError as error:
                self._log_problem(error)
                self._put_heard(is_deaf=True)
                await self.free(is_broken=True)
                self._on_failed()
            except Exception as error:  # noqa: BLE001 - whatever it is, it costs no XID
                # The set is intact, and holds every XID that arrives meanwhile.
                _log.exception("Thread nvml-events failed to wait for XIDs (%r); retrying", error)
            await asyncio.sleep(max(0, began_ns + self._retry_ns - self._clock()) / 1e9)

    async def _wait_registered(self) -> None:
        """Wait until some GPU sends its events to the set; where none can, there is nothing to wait for."""
        while not self._registered.is_set():
            self._prove()
            await wait_set(self._registered, self._slice_ms * MILLISECOND_NS)

    def _create(self) -> EventSet:
        self._bind_events.open(self._nvml)
        return self._nvml.create_event_set()

    def _log_problem(self, error: NvmlError) -> None:
        problem = f"{error.call} {error.code}"
        if problem != self._last_problem:
            self._last_problem = problem
            _log.warning("Could not wait for events of the GPUs: %(detail)s", about(detail=str(error)))

    async def free(self, *, is_broken: bool = False) -> None:
        """Free the set, once the thread does not wait on it.

        The events queued in it are emitted first, unless the set ``is_broken``.
        """
        events, self.events = self.events, None
        # Without its thread the set stays, which the shutdown of NVML frees; the GPUs' probers go on.
        with suppress(ThreadEndedError):
            if events is not None and not is_broken:
                await self._worker.call(partial(self._drain, events))
            if events is not None:
                await self._worker.call(partial(events.retire, self._nvml))

    def _drain(self, shared: SharedEventSet) -> None:
        """Emit the XIDs queued in a set; the thread that waited on it may have hung."""
        with suppress(NvmlError, RetiredError), shared.in_use(self._nvml) as events:
            for _ in range(MAX_DRAINED):
                self._handle_event(self._nvml.wait_event(events, 0))

    def stop(self) -> None:
        """Have the thread stop its wait within one slice."""
        self._stopping = True

    def was_registered(self) -> None:
        """Start to wait, now that at least one GPU sends its events to the set."""
        self._registered.set()

    def _put_heard(self, *, is_deaf: bool) -> None:
        if self._is_deaf or is_deaf:
            self._inbox.put(XidEventsHeard(lost_since_ns=self._heard_ns, is_heard=not is_deaf))
        self._is_deaf = is_deaf

    def _listen(self, shared: SharedEventSet, run: int) -> None:
        slice_ns = self._slice_ms * MILLISECOND_NS
        rebinds_due_ns = self._clock()
        with shared.in_use(self._nvml) as events:
            # A restart leaves the thread in its wait, and the next run takes the set over.
            while not self._stopping and run == self._runs:
                if self._clock() >= rebinds_due_ns:
                    rebinds_due_ns = self._clock() + slice_ns
                    self._emit_rebinds()
                try:
                    self._handle_event(self._wait(events, self._slice_ms))
                except NvmlError as error:
                    if error.code != NvmlCode.TIMEOUT:
                        raise
                self._put_heard(is_deaf=False)
                self._heard_ns = self._clock()
                self._prove()

    def _handle_event(self, event: NvmlEvent) -> None:
        if not event.type & XID_EVENT:
            return
        gpu = self._gpu_of(event)
        self._inbox.put(XidReported(gpu=gpu, xid=event.data, gi=event.gi, ci=event.ci))
        if gpu is not None:
            self._completions.post(("xid", gpu), partial(self._on_xid, gpu))

    def _emit_rebinds(self) -> None:
        rebinds = self._bind_events.read_rebinds(self._nvml)
        for rebind in rebinds:
            self._inbox.put(rebind)
        if rebinds:
            self._completions.post("rebound", self._on_rebound)

    def _gpu_of(self, event: NvmlEvent) -> GpuUuid | None:
        if event.device is None:
            return None
        gpu = self.devices.get(event.device)
        if gpu is not None:
            return gpu
        try:
            return GpuUuid(self._nvml.uuid_at(event.device))
        except NvmlError:
            return None


def register(nvml: Nvml, handle: Handle, shared: SharedEventSet) -> str | None:
    """Register a GPU's events with a set; returns why it has none to send.

    Blocks. Raises NvmlError, or RetiredError if there is a newer set to register with.
    """
    try:
        types = nvml.supported_events(handle) & HEALTH_EVENTS
        if not types & XID_EVENT:
            return "The GPU sends no XID events"
        with shared.in_use(nvml) as events:
            nvml.register_events(handle, types, events)
    except NvmlError as error:
        # A GPU that sends no events may be healthy all the same.
        if not_supported(error):
            return str(error)
        raise
    return None
