"""One NVML session: from a successful init until the driver stops answering for every GPU.

Invariants: each GPU has its own thread and its own task, so that one that hangs delays no other. A GPU
is identified by its PCI address; its index is only used to discover new ones. A GPU that does not answer
stays listed as it was last read while NVML still counts it. Facts about a GPU follow the GpusEnumerated that
names it.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from agent import guard
from agent.bus import Inbox
from agent.core.freshness import Terms
from agent.errors import NvmlError, SourceError
from agent.log import about
from agent.model import facts
from agent.model.ids import GpuUuid, Part
from agent.model.parts import GPU_PROBER, NVML_EVENTS, NVML_NODE
from agent.model.policy import SECOND_NS
from agent.proofs import Proofs
from agent.sources.nvml.device_call import call_device
from agent.sources.nvml.device_instance import with_instance
from agent.sources.nvml.events import Listener, RetiredError, register
from agent.sources.nvml.gpu_watcher import DriverGoneError, Slot, driver_failure, ended, wait_served
from agent.sources.nvml.hotplug import BindEvents
from agent.sources.nvml.inventory import GpuGoneError, Look, control_nodes, look_again, look_at_index
from agent.sources.nvml.library import EVENT_WAIT, Nvml, Versions
from agent.sources.nvml.mig_minors import with_minors
from agent.sources.nvml.publisher import Telling
from agent.sources.nvml.sampling import Sampler
from agent.sources.nvml.settings import NvmlSettings
from agent.sources.nvml.threads import Call, Lane, ThreadGroup
from agent.sources.nvml.topology_samples import Surveys
from agent.waiting import wait_set

MIN_GAP_NS: Final = SECOND_NS
"""Between two probes of a GPU that XIDs request."""

RESTART_PAUSE_S: Final = 0.5

XID_LOOK_DELAY_NS: Final = 10_000_000
"""From an XID to the probe of its GPU."""

_log = logging.getLogger(__name__)


class Surroundings(msgspec.Struct, frozen=True):
    """What the source gives to each of its sessions."""

    inbox: Inbox[facts.Fact]
    threads: ThreadGroup
    settings: NvmlSettings
    dev_root: Path
    sys_root: Path
    proc_root: Path
    clock: Callable[[], int]
    on_node_overdue: Callable[[Lane, Call], None]
    on_node_answered: Callable[[Lane, Call], None]
    bind_events: BindEvents
    proofs: Proofs
    calls_devices: Callable[[], bool]
    """Whether each probe also calls the driver on the GPU's own device file."""


class Session:
    """Watches every GPU that NVML lists."""

    def __init__(self, around: Surroundings, *, versions: Versions, events_lane: Lane) -> None:
        self._around = around
        self._settings = around.settings
        self._clock = around.clock
        self._node_nvml = Nvml(around.threads.first.log)
        self._slots: list[Slot] = []
        self._node_due = asyncio.Event()
        self._settling = False
        self._unsettled = False
        """Whether a probe found that the list of GPUs changed; it is emitted once it is complete again."""
        self._doubted: set[Slot] = set()
        self._doubt_ns = 0
        """Since when some GPU fails as it would if the driver were gone."""
        self._control_nodes: tuple[str, ...] = ()
        self._telling = Telling(around.inbox, around.settings, versions)
        self._surveys = Surveys(self._slots, self._telling, around.settings, around.sys_root, around.clock)
        self.listener: Final = Listener(
            lane=events_lane,
            nvml=Nvml(events_lane.log),
            inbox=around.inbox,
            completions=around.threads.completions,
            slice_ms=self._settings.event_slice_ms,
            retry_ns=self._settings.event_retry_ns,
            clock=self._clock,
            on_renewed=self._wake_all,
            on_failed=self._request_all,
            on_xid=self.probe_soon,
            bind_events=around.bind_events,
            on_rebound=self.request,
            prove=partial(around.proofs.prove, Part(NVML_EVENTS)),
        )

    @property
    def announced(self) -> bool:
        """Whether DriverReady was emitted."""
        return self._telling.announced

    async def run(self) -> None:
        """Watch until the driver is gone; raises DriverGoneError then."""
        gone: DriverGoneError | None = None
        expect, settings = self._around.proofs.expect, self._settings
        expect(Part(NVML_EVENTS), Terms(settings.poll_ns, settings.deadline_ns(EVENT_WAIT)))
        expect(Part(NVML_NODE), Terms(settings.poll_ns, settings.node_deadline_ns))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    guard.for_ever(NVML_NODE, partial(self._watch_node, group)), name="nvml node"
                )
                group.create_task(guard.for_ever(NVML_EVENTS, self.listener.run), name="nvml events")
        except* DriverGoneError as errors:
            first = errors.exceptions[0]
            gone = first if isinstance(first, DriverGoneError) else None
        finally:
            self.listener.stop()
        if gone is not None:
            raise gone

    def forsake(self) -> None:
        """Report no more calls that are still under way after the session is over."""
        for slot in self._slots:
            slot.lane.ignore_calls()

    def request(self) -> None:
        """Count the GPUs and probe each of them now, with every reading."""
        for slot in self._slots:
            slot.urgent = True
        self._unsettle()

    def request_gpu(self, uuid: GpuUuid) -> None:
        """Probe one GPU now."""
        for slot in self._slots:
            if slot.uuid == uuid:
                slot.request()

    def restart_gpu(self, uuid: GpuUuid) -> None:
        """Restart the prober of a GPU, on another thread if its own hangs outside of a driver call."""
        for slot in self._slots:
            if slot.uuid == uuid and slot.probing is not None:
                slot.probing.cancel()

    def probe_soon(self, uuid: GpuUuid) -> None:
        """Probe one GPU with every reading, at most once in MIN_GAP_NS: an XID was reported."""
        for slot in self._slots:
            if slot.uuid == uuid:
                slot.wanted_soon = slot.urgent = True
                # Not at once: the kubelet must learn of the XID before anything else is done about it.
                soon_ns = max(slot.began_ns + MIN_GAP_NS, self._clock() + XID_LOOK_DELAY_NS)
                slot.due_ns = min(slot.due_ns, soon_ns)
                slot.wake.set()

    # The node: which GPUs there are

    async def _watch_node(self, group: asyncio.TaskGroup) -> None:
        while True:
            began_ns = self._clock()
            count = await self._count()
            if count is not None:
                await self._settle(count, group)
            self._around.proofs.prove(Part(NVML_NODE))
            await wait_set(self._node_due, self._settings.poll_ns)
            self._node_due.clear()
            gap_ns = min(MIN_GAP_NS, self._settings.poll_ns)
            await asyncio.sleep(max(0, began_ns + gap_ns - self._clock()) / 1e9)

    async def _count(self) -> int | None:
        try:
            count, self._control_nodes = await self._around.threads.first.call(self._ask_node)
        except NvmlError as error:
            if not self._slots:
                raise DriverGoneError(error) from None
            # If the GPUs do not answer either, their own tasks find the driver gone.
            self._telling.warn("count", "Could not count the GPUs: %(detail)s", detail=str(error))
            self._request_all()
            return None
        most = self._settings.max_gpus
        if count > most:
            self._telling.warn(
                "many",
                "NVML lists %(count)s GPUs, but the agent watches only the first %(watched)s",
                count=count,
                watched=most,
            )
        return min(count, most)

    def _ask_node(self) -> tuple[int, tuple[str, ...]]:
        return self._node_nvml.count(), control_nodes(self._around.dev_root)

    async def _settle(self, count: int, group: asyncio.TaskGroup) -> None:
        """Make the watchers match the GPUs that NVML counts, and emit the list."""
        self._settling = True
        try:
            if count != len(self._slots) or self._unsettled:
                # The indexes of the others change when a GPU appears or disappears.
                await self._look_at_all()
                self._drop([slot for slot in self._slots if slot.gone])
                self._drop(self._surplus(len(self._slots) - count))
                self._unsettled = False
                await self._add(count, group)
        finally:
            self._settling = False
        self._raise_if_driver_gone()
        self._announce()

    def _surplus(self, number: int) -> list[Slot]:
        """Return the watchers whose GPUs NVML lists no more: chosen from those that do not answer."""
        if number <= 0:
            return []
        mute = [slot for slot in self._slots if not slot.answers]
        return sorted(mute, key=lambda slot: (slot.sighting is not None, slot.lane.overdue))[:number]

    async def _add(self, count: int, group: asyncio.TaskGroup) -> None:
        taken = {slot.index for slot in self._slots}
        free = [index for index in range(count) if index not in taken]
        added: list[Slot] = []
        for index in free[: max(0, count - len(self._slots))]:
            try:
                added.append(await self._open(index, group))
            except SourceError as error:
                self._telling.warn(
                    "lane", "Could not watch GPU %(index)s: %(detail)s", index=index, detail=str(error)
                )
                break
        await wait_served({slot: slot.requested for slot in added}, self._settings.first_look_wait_ns)

    async def _open(self, index: int, group: asyncio.TaskGroup) -> Slot:
        used = {slot.lane for slot in self._slots}
        lanes = self._around.threads.lanes
        lane = next((lane for lane in lanes[2:] if lane not in used and not lane.busy), None)
        if lane is None:
            lane = await self._around.threads.start_lane(f"nvml-gpu-{len(lanes) - 2}")
        nvml = Nvml(lane.log)
        slow_ns = self._settings.slow_polls * self._settings.poll_ns
        slot = Slot(lane, nvml, Sampler(nvml, slow_ns=slow_ns, clock=self._clock), index)
        lane.on_overdue = partial(self._overdue, slot)
        lane.on_answered = partial(self._answered, slot)
        slot.task = group.create_task(self._keep_slot(slot), name=f"nvml gpu {index}")
        self._slots.append(slot)
        return slot

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._slots.remove(slot)
            if slot.lane.log.awaited is not None:
                self._answered(slot, slot.lane.log.awaited)
            # Calls that are stuck on a GPU that is gone are of no interest any more.
            slot.lane.ignore_calls()
            slot.gone = True
            slot.notify()
            if slot.sighting is not None:
                self._telling.forget(slot.sighting.gpu)
            if slot.task is not None:
                slot.task.cancel()

    async def _look_at_all(self) -> None:
        numbers = {slot: slot.request() for slot in self._slots if not slot.gone}
        await wait_served(numbers, self._settings.call_deadline_ns)

    # One GPU

    async def _keep_slot(self, slot: Slot) -> None:
        """Run the prober of a GPU and restart it after a failure, which affects no other GPU."""
        while True:
            slot.probing = asyncio.get_running_loop().create_task(
                guard.for_ever(GPU_PROBER, partial(self._watch_slot, slot)),
                name=f"nvml gpu {slot.index} prober",
            )
            try:
                await asyncio.wait({slot.probing})
            finally:
                await ended(slot.probing)
            error = None if slot.probing.cancelled() else slot.probing.exception()
            if isinstance(error, DriverGoneError):
                raise error
            _log.error(
                "The prober of GPU %s stopped (%s); restarting it",
                slot.index if slot.uuid is None else slot.uuid,
                "stale" if error is None else repr(error),
                exc_info=error,
            )
            slot.lane.abandon()
            slot.request()
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _watch_slot(self, slot: Slot) -> None:
        stagger_ns = min(self._settings.poll_ns // 4, SECOND_NS // 4) * (slot.index % 8) // 8
        while True:
            if slot.served < slot.requested or self._clock() >= slot.due_ns:
                await self._look(slot)
                pause_ns = MIN_GAP_NS if slot.wanted_soon else self._settings.poll_ns + stagger_ns
                slot.due_ns = slot.began_ns + pause_ns
                stagger_ns = 0
            # Emitted last: a GPU whose events cannot be registered has not passed.
            await self._register(slot)
            await self._confirm(slot)
            self._telling.outcome(slot)
            await self._surveys.make(slot)
            if slot.served >= slot.requested:
                await wait_set(slot.wake, max(0, self._surveys.next_ns(slot) - self._clock()))
                slot.wake.clear()

    async def _look(self, slot: Slot) -> None:
        slot.began_ns = self._clock()
        slot.wanted_soon = False
        slot.sample = slot.memory = None
        number = slot.begun = slot.requested
        try:
            calls_device = self._around.calls_devices()
            look = await slot.lane.call(partial(self._look_once, slot, calls_device=calls_device))
        except GpuGoneError:
            self._lost_sight(slot)
        except NvmlError as error:
            slot.failure = error
        else:
            self._saw(slot, look)
        if slot.failure is not None:
            slot.registered = None
        slot.late = slot.lane.late
        slot.untold = True
        slot.served = number
        slot.notify()
        self._raise_if_driver_gone()
        self._announce()

    def _lost_sight(self, slot: Slot) -> None:
        slot.gone = True
        self._unsettle()

    def _unsettle(self) -> None:
        self._unsettled = True
        self._node_due.set()

    def _look_once(self, slot: Slot, *, calls_device: bool) -> Look:
        if slot.sighting is None:
            look = look_at_index(slot.nvml, slot.index, self._around.sys_root)
        else:
            look = look_again(slot.nvml, slot.sighting)
        look = slot.sampled(with_minors(look, self._around.proc_root))
        look = with_instance(look, slot.nvml, self._around.dev_root)
        if calls_device and look.failure is None and look.sighting.gpu.minor is not None:
            call_device(slot.nvml, self._around.dev_root, look.sighting.gpu.minor)
        return look

    def _saw(self, slot: Slot, look: Look) -> None:
        seen = look.sighting
        if slot.sighting is None:
            if any(other.uuid == seen.gpu.uuid and not other.gone for other in self._slots):
                # The indexes changed during the probe; the next round finds the right one.
                self._lost_sight(slot)
                return
            if seen.numa_problem is not None:
                self._telling.bad_numa_node(seen.gpu, seen.numa_problem)
        elif seen.gpu.index != slot.index:
            self._unsettle()
        slot.sighting, slot.failure, slot.index = seen, look.failure, seen.gpu.index
        slot.sample, slot.memory = look.sample, look.memory
        address = slot.nvml.address_of(seen.handle)
        if address is not None and self.listener.devices.get(address) != seen.gpu.uuid:
            self.listener.devices = {**self._addresses(), address: seen.gpu.uuid}

    def _addresses(self) -> dict[int, GpuUuid]:
        """Return the addresses of present GPUs only, so that the map does not grow."""
        present = {slot.uuid for slot in self._slots}
        return {address: gpu for address, gpu in self.listener.devices.items() if gpu in present}

    async def _register(self, slot: Slot) -> None:
        events = self.listener.events
        if events is None or events is slot.registered or not slot.answers:
            return
        sighting = slot.sighting
        if sighting is None or not self._telling.is_listed(sighting.gpu.uuid):
            return
        uuid = sighting.gpu.uuid
        try:
            refusal = await slot.lane.call(partial(register, slot.nvml, sighting.handle, events))
        except RetiredError:
            return
        except NvmlError as error:
            slot.failure = error
            slot.untold = True
            return
        slot.registered = events
        if refusal is None:
            self.listener.was_registered()
        else:
            self._telling.no_events(uuid, refusal)

    async def _confirm(self, slot: Slot) -> None:
        """Probe the other GPUs before a failure that may be the driver's is attributed to this one."""
        if not slot.is_doubtful:
            return
        if not self._doubted:
            self._doubt_ns = slot.began_ns
        self._doubted.add(slot)
        try:
            numbers = {
                other: other.request() if other.began_ns < self._doubt_ns else other.begun
                for other in self._slots
                if other is not slot and not other.gone
            }
            await wait_served(numbers, self._settings.call_deadline_ns)
        finally:
            self._doubted.discard(slot)
        self._raise_if_driver_gone()

    def _wake_all(self) -> None:
        for slot in self._slots:
            slot.wake.set()

    def _request_all(self) -> None:
        for slot in self._slots:
            slot.request()

    # Facts

    def _overdue(self, slot: Slot, call: Call) -> None:
        slot.notify()
        uuid = slot.uuid
        if uuid is not None:
            self._telling.overdue(uuid, call)
            return
        _log.warning(
            "GPU %(index)s, not identified yet, did not answer %(call)s in time",
            about(index=slot.index, call=call.name),
        )
        if all(other.uuid is None for other in self._slots):
            self._around.on_node_overdue(slot.lane, call)

    def _answered(self, slot: Slot, call: Call) -> None:
        if slot.uuid is not None:
            self._telling.put(facts.GpuCallAnswered(slot.uuid))
        self._around.on_node_answered(slot.lane, call)

    def _raise_if_driver_gone(self) -> None:
        """Raise DriverGoneError if no GPU gives an answer about the GPU itself.

        Not before every GPU was probed, and not while a thread is stuck: NVML could not be shut down,
        and the polls see what answers again in any case.
        """
        if self._settling or self._around.threads.stuck:
            return
        error = driver_failure(self._slots)
        if error is not None:
            self._telling.is_over = True
            raise DriverGoneError(error)

    def _announce(self) -> None:
        """Emit the list of GPUs, if it is known and changed; before the first one, DriverReady."""
        if self._settling or self._unsettled:
            return
        if self._telling.announce(self._slots, self._control_nodes):
            self._wake_all()
