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
from agent.model.components import GPU_PROBER, NVML_EVENTS, NVML_NODE
from agent.model.ids import ComponentId, GpuUuid
from agent.model.policy import SECOND_NS
from agent.model.structs import replace
from agent.proofs import Proofs
from agent.sources.nvml import listing
from agent.sources.nvml.device_call import call_device
from agent.sources.nvml.device_instance import with_instance
from agent.sources.nvml.events import Listener, RetiredError, register
from agent.sources.nvml.gpu_watcher import (
    DriverGoneError,
    GpuWatcher,
    Restartable,
    wait_finished,
)
from agent.sources.nvml.hotplug import BindEvents
from agent.sources.nvml.inventory import GpuGoneError, ProbeResult, control_nodes, discover_gpu, probe_gpu
from agent.sources.nvml.library import EVENT_WAIT, Nvml, Versions
from agent.sources.nvml.mig_minors import with_minors
from agent.sources.nvml.probing import MIN_GAP_NS, Doubts, driver_failure
from agent.sources.nvml.publisher import EventPublisher
from agent.sources.nvml.sampling import Sampler
from agent.sources.nvml.settings import NvmlSettings
from agent.sources.nvml.threads import Call, ThreadGroup, WorkerThread
from agent.sources.nvml.topology_samples import TopologySampler
from agent.waiting import wait_set

_log = logging.getLogger(__name__)


class SessionContext(msgspec.Struct, frozen=True):
    """What the source gives to each of its sessions."""

    inbox: Inbox[facts.Fact]
    threads: ThreadGroup
    settings: NvmlSettings
    dev_root: Path
    sys_root: Path
    proc_root: Path
    clock: Callable[[], int]
    on_node_overdue: Callable[[WorkerThread, Call], None]
    on_node_answered: Callable[[WorkerThread, Call], None]
    bind_events: BindEvents
    proofs: Proofs
    calls_devices: Callable[[], bool]
    """Whether each probe also calls the driver on the GPU's own device file."""


class Session:
    """Watches every GPU that NVML lists."""

    def __init__(self, context: SessionContext, *, versions: Versions, events_worker: WorkerThread) -> None:
        self._context = context
        self._settings = context.settings
        self._clock = context.clock
        self._node_nvml = Nvml(context.threads.first.log)
        self._watchers: list[GpuWatcher] = []
        self._node_due = asyncio.Event()
        self._reconciling = False
        self._list_changed = False
        """Whether a probe found that the list of GPUs changed; it is emitted once it is complete again."""
        self._doubts = Doubts()
        self._control_nodes: tuple[str, ...] = ()
        self._publisher = EventPublisher(context.inbox, context.settings, versions)
        self._topology_sampler = TopologySampler(
            self._watchers, self._publisher, context.settings, context.sys_root, context.clock
        )
        self.listener: Final = Listener(
            worker=events_worker,
            nvml=Nvml(events_worker.log),
            inbox=context.inbox,
            completions=context.threads.completions,
            slice_ms=self._settings.event_slice_ms,
            retry_ns=self._settings.event_retry_ns,
            clock=self._clock,
            on_renewed=self._wake_all,
            on_failed=self._request_all,
            on_xid=self.probe_soon,
            bind_events=context.bind_events,
            on_rebound=self.request,
            prove=partial(context.proofs.prove, ComponentId(NVML_EVENTS)),
        )
        self._listening = Restartable(
            NVML_EVENTS, self.listener.run, worker=events_worker, called=lambda: "The wait for XIDs"
        )

    @property
    def ready_emitted(self) -> bool:
        """Whether DriverReady was emitted."""
        return self._publisher.ready_emitted

    async def run(self) -> None:
        """Watch until the driver is gone; raises DriverGoneError then."""
        gone: DriverGoneError | None = None
        expect, settings = self._context.proofs.expect, self._settings
        expect(ComponentId(NVML_EVENTS), Terms(settings.poll_ns, settings.deadline_ns(EVENT_WAIT)))
        expect(ComponentId(NVML_NODE), Terms(settings.poll_ns, settings.node_deadline_ns))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    guard.run_forever(NVML_NODE, partial(self._watch_node, group)), name="nvml node"
                )
                group.create_task(self._listening.run(), name="nvml events")
        except* DriverGoneError as errors:
            first = errors.exceptions[0]
            gone = first if isinstance(first, DriverGoneError) else None
        finally:
            self.listener.stop()
        if gone is not None:
            raise gone

    def ignore_pending_calls(self) -> None:
        """Report no more calls that are still under way after the session is over."""
        for watcher in self._watchers:
            watcher.worker.ignore_calls()

    def request(self) -> None:
        """Count the GPUs and probe each of them now, with every reading."""
        for watcher in self._watchers:
            watcher.probing = replace(watcher.probing, is_urgent=True)
        self._request_reconcile()

    def request_gpu(self, uuid: GpuUuid) -> None:
        """Probe one GPU now."""
        for watcher in self._watchers:
            if watcher.uuid == uuid:
                watcher.request()

    def restart_gpu(self, uuid: GpuUuid) -> None:
        """Restart the prober of a GPU, on another thread if its own hangs outside of a driver call."""
        for watcher in self._watchers:
            if watcher.uuid == uuid and watcher.prober is not None:
                watcher.prober.restart()

    def restart_events(self) -> None:
        """Restart the wait for XIDs, on another thread if its own hangs outside of a driver call."""
        self._listening.restart()

    def probe_soon(self, uuid: GpuUuid) -> None:
        """Probe one GPU with every reading, at most once in MIN_GAP_NS: an XID was reported."""
        for watcher in self._watchers:
            if watcher.uuid == uuid:
                watcher.probing = watcher.probing.request_soon(self._clock())
                watcher.wake.set()

    # The node: which GPUs there are

    async def _watch_node(self, group: asyncio.TaskGroup) -> None:
        while True:
            began_ns = self._clock()
            count = await self._poll_count()
            if count is not None:
                await self._reconcile(count, group)
            self._context.proofs.prove(ComponentId(NVML_NODE))
            await wait_set(self._node_due, self._settings.poll_ns)
            self._node_due.clear()
            gap_ns = min(MIN_GAP_NS, self._settings.poll_ns)
            await asyncio.sleep(max(0, began_ns + gap_ns - self._clock()) / 1e9)

    async def _poll_count(self) -> int | None:
        try:
            count, self._control_nodes = await self._context.threads.first.call(self._read_node)
        except NvmlError as error:
            if not self._watchers:
                raise DriverGoneError(error) from None
            # If the GPUs do not answer either, their own tasks find the driver gone.
            self._publisher.warn_once("count", "Could not count the GPUs: %(detail)s", detail=str(error))
            self._request_all()
            return None
        most = self._settings.max_gpus
        if count > most:
            self._publisher.warn_once(
                "many",
                "NVML lists %(count)s GPUs, but the agent watches only the first %(watched)s",
                count=count,
                watched=most,
            )
        return min(count, most)

    def _read_node(self) -> tuple[int, tuple[str, ...]]:
        return self._node_nvml.count(), control_nodes(self._context.dev_root)

    async def _reconcile(self, count: int, group: asyncio.TaskGroup) -> None:
        """Make the watchers match the GPUs that NVML counts, and emit the list."""
        self._reconciling = True
        try:
            if count != len(self._watchers) or self._list_changed:
                # The indexes of the others change when a GPU appears or disappears.
                await self._probe_all()
                surplus = listing.surplus(self._watched(), count)
                self._drop_watchers([self._watchers[position] for position in surplus])
                self._list_changed = False
                await self._add_watchers(count, group)
        finally:
            self._reconciling = False
        self._raise_if_driver_gone()
        self._emit_gpus()

    def _watched(self) -> list[listing.Watched]:
        return [each.watched for each in self._watchers]

    async def _add_watchers(self, count: int, group: asyncio.TaskGroup) -> None:
        added: list[GpuWatcher] = []
        for index in listing.unwatched(self._watched(), count):
            try:
                added.append(await self._start_watcher(index, group))
            except SourceError as error:
                self._publisher.warn_once(
                    "thread", "Could not watch GPU %(index)s: %(detail)s", index=index, detail=str(error)
                )
                break
        await wait_finished(
            {watcher: watcher.probing.requested for watcher in added}, self._settings.first_probe_wait_ns
        )

    async def _start_watcher(self, index: int, group: asyncio.TaskGroup) -> GpuWatcher:
        used = {watcher.worker for watcher in self._watchers}
        workers = self._context.threads.workers
        worker = next((worker for worker in workers[2:] if worker not in used and not worker.busy), None)
        if worker is None:
            worker = await self._context.threads.start_worker(f"nvml-gpu-{len(workers) - 2}")
        nvml = Nvml(worker.log)
        slow_ns = self._settings.slow_polls * self._settings.poll_ns
        watcher = GpuWatcher(worker, nvml, Sampler(nvml, slow_ns=slow_ns, clock=self._clock), index)
        worker.on_overdue = partial(self._on_call_overdue, watcher)
        worker.on_answered = partial(self._on_call_answered, watcher)
        watcher.prober = Restartable(
            GPU_PROBER,
            partial(self._watch_gpu, watcher),
            worker=worker,
            called=lambda: f"The prober of GPU {index if watcher.uuid is None else watcher.uuid}",
            on_restart=watcher.request,
        )
        watcher.task = group.create_task(watcher.prober.run(), name=f"nvml gpu {index}")
        self._watchers.append(watcher)
        return watcher

    def _drop_watchers(self, watchers: list[GpuWatcher]) -> None:
        for watcher in watchers:
            self._watchers.remove(watcher)
            if watcher.worker.log.awaited is not None:
                self._on_call_answered(watcher, watcher.worker.log.awaited)
            # Calls that are stuck on a GPU that is gone are of no interest any more.
            watcher.worker.ignore_calls()
            watcher.gone = True
            watcher.notify()
            if watcher.discovered is not None:
                self._publisher.forget(watcher.discovered.gpu)
            if watcher.task is not None:
                watcher.task.cancel()

    async def _probe_all(self) -> None:
        numbers = {watcher: watcher.request() for watcher in self._watchers if not watcher.gone}
        await wait_finished(numbers, self._settings.call_deadline_ns)

    # One GPU

    async def _watch_gpu(self, watcher: GpuWatcher) -> None:
        stagger_ns = min(self._settings.poll_ns // 4, SECOND_NS // 4) * (watcher.index % 8) // 8
        while True:
            if watcher.probing.is_due(self._clock()):
                await self._probe(watcher, self._settings.poll_ns + stagger_ns)
                stagger_ns = 0
            # Emitted last: a GPU whose events cannot be registered has not passed.
            await self._register(watcher)
            await self._confirm_failure(watcher)
            self._publisher.emit_outcome(watcher)
            await self._topology_sampler.sample_if_due(watcher)
            if not watcher.probing.is_requested:
                await wait_set(watcher.wake, max(0, self._topology_sampler.next_ns(watcher) - self._clock()))
                watcher.wake.clear()

    async def _probe(self, watcher: GpuWatcher, period_ns: int) -> None:
        probing = watcher.probing = watcher.probing.begin(self._clock())
        work = partial(
            self._probe_once,
            watcher,
            calls_device=self._context.calls_devices(),
            reads_slow=probing.reads_slow,
        )
        try:
            result = await watcher.worker.call(work)
        except GpuGoneError:
            self._handle_gpu_gone(watcher)
        except NvmlError as error:
            watcher.probing = watcher.probing.with_result(error)
        else:
            self._apply_probe(watcher, result)
        if watcher.probing.failure is not None:
            watcher.registered = None
        watcher.probing = watcher.probing.finish(late=watcher.worker.late, period_ns=period_ns)
        watcher.notify()
        self._raise_if_driver_gone()
        self._emit_gpus()

    def _handle_gpu_gone(self, watcher: GpuWatcher) -> None:
        watcher.gone = True
        self._request_reconcile()

    def _request_reconcile(self) -> None:
        self._list_changed = True
        self._node_due.set()

    def _probe_once(self, watcher: GpuWatcher, *, calls_device: bool, reads_slow: bool) -> ProbeResult:
        if watcher.discovered is None:
            result = discover_gpu(watcher.nvml, watcher.index, self._context.sys_root)
        else:
            result = probe_gpu(watcher.nvml, watcher.discovered)
        result = watcher.with_readings(with_minors(result, self._context.proc_root), reads_slow=reads_slow)
        result = with_instance(result, watcher.nvml, self._context.dev_root)
        if calls_device and result.failure is None and result.discovered.gpu.minor is not None:
            call_device(watcher.nvml, self._context.dev_root, result.discovered.gpu.minor)
        return result

    def _apply_probe(self, watcher: GpuWatcher, result: ProbeResult) -> None:
        seen = result.discovered
        others = (each.watched for each in self._watchers if each is not watcher)
        found = listing.found(watcher.watched, others, seen.gpu.uuid, seen.gpu.index)
        if found is listing.Found.TWICE:
            self._handle_gpu_gone(watcher)
            return
        if found is listing.Found.MOVED:
            self._request_reconcile()
        if watcher.discovered is None and seen.numa_problem is not None:
            self._publisher.warn_numa_node(seen.gpu, seen.numa_problem)
        watcher.discovered, watcher.index = seen, seen.gpu.index
        watcher.probing = watcher.probing.with_result(result.failure, result.sample, result.memory)
        address = watcher.nvml.address_of(seen.handle)
        if address is not None and self.listener.devices.get(address) != seen.gpu.uuid:
            self.listener.devices = {**self._addresses(), address: seen.gpu.uuid}

    def _addresses(self) -> dict[int, GpuUuid]:
        """Return the addresses of present GPUs only, so that the map does not grow."""
        present = {watcher.uuid for watcher in self._watchers}
        return {address: gpu for address, gpu in self.listener.devices.items() if gpu in present}

    async def _register(self, watcher: GpuWatcher) -> None:
        events = self.listener.events
        if events is None or events is watcher.registered or not watcher.answers:
            return
        discovered = watcher.discovered
        if discovered is None or not self._publisher.is_listed(discovered.gpu.uuid):
            return
        uuid = discovered.gpu.uuid
        try:
            problem = await watcher.worker.call(partial(register, watcher.nvml, discovered.handle, events))
        except RetiredError:
            return
        except NvmlError as error:
            watcher.probing = watcher.probing.with_failure(error)
            return
        watcher.registered = events
        if problem is None:
            self.listener.was_registered()
        else:
            self._publisher.emit_events_unsupported(uuid, problem)

    async def _confirm_failure(self, watcher: GpuWatcher) -> None:
        """Probe the other GPUs before a failure that may be the driver's is attributed to this one."""
        if not watcher.probing.is_doubtful:
            return
        self._doubts = self._doubts.raised(watcher, self._clock())
        try:
            probings = {each: each.probing for each in self._watchers if not each.gone}
            numbers = {
                other: other.request() if is_asked else other.probing.begun
                for other, is_asked in self._doubts.witnesses(probings).items()
            }
            await wait_finished(numbers, self._settings.call_deadline_ns)
        finally:
            self._doubts = self._doubts.settled(watcher)
        self._raise_if_driver_gone()

    def _wake_all(self) -> None:
        for watcher in self._watchers:
            watcher.wake.set()

    def _request_all(self) -> None:
        for watcher in self._watchers:
            watcher.request()

    # Facts

    def _on_call_overdue(self, watcher: GpuWatcher, call: Call) -> None:
        watcher.notify()
        uuid = watcher.uuid
        if uuid is not None:
            self._publisher.emit_overdue(uuid, call)
            return
        _log.warning(
            "GPU %(index)s, not identified yet, did not answer %(call)s in time",
            about(index=watcher.index, call=call.name),
        )
        if all(other.uuid is None for other in self._watchers):
            self._context.on_node_overdue(watcher.worker, call)

    def _on_call_answered(self, watcher: GpuWatcher, call: Call) -> None:
        if watcher.uuid is not None:
            self._publisher.emit(facts.GpuCallAnswered(watcher.uuid))
        self._context.on_node_answered(watcher.worker, call)

    def _raise_if_driver_gone(self) -> None:
        """Raise DriverGoneError if no GPU gives an answer about the GPU itself.

        Not before every GPU was probed, and not while a thread is stuck: NVML could not be shut down,
        and the polls see what answers again in any case.
        """
        if self._reconciling or self._context.threads.stuck:
            return
        error = driver_failure(watcher.probing for watcher in self._watchers)
        if error is not None:
            self._publisher.is_over = True
            raise DriverGoneError(error)

    def _emit_gpus(self) -> None:
        """Emit the list of GPUs, if it is known and changed; before the first one, DriverReady."""
        if self._reconciling or self._list_changed:
            return
        if self._publisher.emit_gpus(self._watchers, self._control_nodes):
            self._wake_all()
