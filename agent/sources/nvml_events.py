"""Hears XIDs: one event set, one thread that waits on it in slices, and its repair when it breaks.

Invariants: an XID goes from the waiting thread straight into the inbox. A wait that fails marks no
GPU and never spins: the set is built anew, at most once in ``retry_ns``, from the GPUs that answer
their next probe, so a lost one does not silence the others.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from agent.bus import Inbox
from agent.errors import NvmlCode, NvmlError
from agent.log import fields
from agent.model.facts import Fact, XidReported
from agent.model.ids import GpuUuid
from agent.sources.nvml_library import HEALTH_EVENTS, XID_EVENT, EventSet, Handle, Nvml, NvmlEvent
from agent.sources.nvml_threads import Completions, Lane

_log = logging.getLogger(__name__)


class Listener:
    """Owns the event set of one session; GPUs register themselves with ``register``."""

    def __init__(
        self,
        *,
        lane: Lane,
        nvml: Nvml,
        inbox: Inbox[Fact],
        completions: Completions,
        slice_ms: int,
        retry_ns: int,
        clock: Callable[[], int],
        on_renewed: Callable[[], None],
        on_failed: Callable[[], None],
        on_xid: Callable[[GpuUuid], None],
    ) -> None:
        """``on_renewed``: there is a set to register with; ``on_failed``: look at every GPU at once."""
        self._lane = lane
        self._nvml = nvml
        self._inbox = inbox
        self._completions = completions
        self._slice_ms = slice_ms
        self._retry_ns = retry_ns
        self._clock = clock
        self._on_renewed = on_renewed
        self._on_failed = on_failed
        self._on_xid = on_xid
        self._registered = asyncio.Event()
        self._stopping = False
        self._last_problem: str | None = None
        self.events: EventSet | None = None
        """The set GPUs are to register with now."""
        self.devices: dict[int, GpuUuid] = {}
        """Whose handle is at an address. Replaced, never changed: another thread reads it."""

    async def run(self) -> None:
        """Listen for ever."""
        while True:
            began_ns = self._clock()
            try:
                self.events = await self._lane.call(self._nvml.create_event_set)
                self._registered.clear()
                self._on_renewed()
                await self._registered.wait()
                await self._lane.call(partial(self._listen, self.events))
            except NvmlError as error:
                self._report(error)
            await self.free()
            self._on_failed()
            await asyncio.sleep(max(0, began_ns + self._retry_ns - self._clock()) / 1e9)

    def _report(self, error: NvmlError) -> None:
        problem = f"{error.call} {error.code}"
        if problem != self._last_problem:
            self._last_problem = problem
            _log.warning("Could not hear GPU events", extra=fields(detail=str(error)))

    async def free(self) -> None:
        """Release the set; waits until nobody waits on it."""
        events, self.events = self.events, None
        if events is None:
            return
        try:
            await self._lane.call(partial(self._nvml.free_event_set, events))
        except NvmlError as error:
            self._report(error)

    def stop(self) -> None:
        """Let the thread end its wait within one slice."""
        self._stopping = True

    def was_registered(self) -> None:
        """Begin to wait, now that at least one GPU sends its events to the set."""
        self._registered.set()

    def _listen(self, events: EventSet) -> None:
        while not self._stopping:
            try:
                event = self._nvml.wait_event(events, self._slice_ms)
            except NvmlError as error:
                if error.code == NvmlCode.TIMEOUT:
                    continue
                raise
            if event.type & XID_EVENT:
                self._put_xid(event)

    def _put_xid(self, event: NvmlEvent) -> None:
        gpu = self._gpu_of(event)
        self._inbox.put(XidReported(gpu=gpu, xid=event.data, gi=event.gi, ci=event.ci))
        if gpu is not None:
            self._completions.post(("xid", gpu), partial(self._on_xid, gpu))

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


def register(nvml: Nvml, handle: Handle, events: EventSet) -> str | None:
    """Let a GPU's events come to a set; returns why it has none to send. Blocks, raises NvmlError."""
    try:
        types = nvml.supported_events(handle) & HEALTH_EVENTS
        if not types & XID_EVENT:
            return "The GPU sends no XID events"
        nvml.register_events(handle, types, events)
    except NvmlError as error:
        if error.code == NvmlCode.NOT_SUPPORTED:
            return str(error)
        raise
    return None


DRIVER_CODES: Final = frozenset(
    {
        NvmlCode.UNINITIALIZED,
        NvmlCode.DRIVER_NOT_LOADED,
        NvmlCode.LIB_RM_VERSION_MISMATCH,
        NvmlCode.UNKNOWN,
    }
)
"""If every GPU answers one of these, it is the driver that is gone, not the GPUs."""
