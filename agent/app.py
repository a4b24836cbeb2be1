"""The composition root: builds every source, sink, task and queue, and stops them in order.

Guarantees: ``Agent.run`` returns an exit code, always by the same shutdown: not ready, no new
registration, calls under way are answered, streams end cleanly, the state is written, our sockets
are removed. What is heavy to import comes after what the kubelet waits for.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

from agent import log
from agent.bus import Inbox, Latest
from agent.config.settings import Settings
from agent.core.freshness import Terms
from agent.core.health.inventory import oversized
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.engine import MAX_IDLE_NS, Engine
from agent.errors import SourceError
from agent.guard import NO_SEAM, Seam, handle_escaped
from agent.model.components import (
    CDI,
    CONFIG_WATCH,
    ENGINE,
    EVENT_LOG,
    EVIDENCE,
    GPU_PROBER,
    HTTP,
    LIST_AND_WATCH,
    LOOP,
    NVML_EVENTS,
    NVML_NODE,
    STATE_FILE,
)
from agent.model.effects import (
    Effect,
    ExitProcess,
    KeepEvidence,
    ProbeGpu,
    ProbeGpus,
    ProbeUvm,
    RecordEvent,
    RegisterResource,
    ReleaseDriver,
    RestartComponent,
    ResumeDriver,
)
from agent.model.facts import (
    DEVICE_PLUGIN,
    KERNEL_LOG,
    KUBELET,
    KUBELET_COUNT,
    MPS,
    NVML,
    PODS,
    PROBE,
    SYSFS,
    UEVENTS,
    Fact,
    KubeletSocketSeen,
    PolicyChanged,
)
from agent.model.ids import NO_KUBELET, ComponentId, GpuUuid, ResourceName
from agent.model.snapshot import Snapshot
from agent.proofs import Proofs
from agent.runtime.assembly import Assembly
from agent.runtime.bootstrap import Bootstrap, bootstrap
from agent.runtime.event_recorder import EventRecorder
from agent.runtime.http_service import HttpService
from agent.runtime.imports import import_plugin, wait_for_registration
from agent.runtime.lifecycle import EndedError, Shutdown, check_start, watch_library
from agent.runtime.policy import MpsWatch, PolicyInEffect
from agent.runtime.process import Signals, collect_forever
from agent.runtime.reload import Reload
from agent.runtime.standby import collect_facts_until
from agent.runtime.state_store import StateStore
from agent.runtime.status import Component, RuntimeStatus, measure_lag
from agent.runtime.tasks import Supervisor, Tasks, no_trouble
from agent.sinks.notify import Notifier
from agent.threads import in_daemon_thread
from agent.views import checks

if TYPE_CHECKING:
    from agent.sinks.eventlog import EventLog
    from agent.sinks.evidence import EvidenceSink
    from agent.sources.nvml.source import NvmlSource

DRAIN_GRACE_S: Final = 2.0
FLUSH_S: Final = 1.0
LOG_FLUSH_S: Final = 0.3
POLICY_WITHIN_S: Final = 5.0
"""How long a reload waits until the new policy is in effect in the core."""
PROBE_LOAD: Final = 36
"""Deadlines of a call that a compiler may take on a busy node: three minutes by default."""
PROBE_ROUND: Final = 12
"""The same of a scan of a node with very many processes: a minute by default."""
LOOP_TERMS: Final = Terms(MAX_IDLE_NS, MAX_IDLE_NS)
"""The engine steps once in MAX_IDLE_NS at least."""
WRITE_DEADLINE_NS: Final = 10_000_000_000
"""How long the disk may take for a write."""

_log = logging.getLogger(__name__)


def run(
    settings: Settings,
    *,
    reread: Callable[[], Settings],
    environment: Mapping[str, str],
    seam: Seam | None = None,
) -> int:
    """Run the agent of this node until it is stopped; return the exit code.

    ``reread`` returns the settings as they are now, for a reload. Raises AgentError, one sentence,
    where the agent cannot start or has to end.
    """
    os.umask(0o077)
    lines = log.set_up(settings.log_format, settings.log_level)
    try:
        agent = Agent(
            bootstrap(settings, environment),
            lines=lines,
            reread=reread,
            environment=environment,
            seam=seam or NO_SEAM,
        )
        return asyncio.run(agent.run())
    finally:
        lines.flush(LOG_FLUSH_S)


def _trouble(sink: "EventLog | EvidenceSink | None") -> str | None:
    return None if sink is None else sink.trouble


class Agent:
    """One agent process: everything it is made of, and its life from start to end."""

    def __init__(
        self,
        prepared: Bootstrap,
        *,
        lines: log.Log,
        reread: Callable[[], Settings],
        environment: Mapping[str, str],
        clock: Callable[[], int] = time.monotonic_ns,
        seam: Seam = NO_SEAM,
    ) -> None:
        settings, boot_id = prepared.settings, prepared.boot_id
        self._settings = settings
        self._lock = prepared.lock
        self._clock = clock
        self._policy = PolicyInEffect(settings)
        self._shutdown = Shutdown()
        self._inbox: Inbox[Fact] = Inbox(clock=clock)
        self._proofs = Proofs(clock=clock)
        nothing = initial_state(self._policy.now, None, now_ns=clock())
        self._latest: Latest[Snapshot] = Latest(snapshot_of(nothing))
        after_registration = partial(wait_for_registration, self._latest)
        self._after_registration = after_registration
        self._assembly = Assembly(
            settings,
            self._inbox,
            self._latest,
            clock,
            proofs=self._proofs,
            is_in_container=prepared.is_in_container,
        )
        self._recorder = EventRecorder(
            settings,
            latest=self._latest,
            kernel_log=self._assembly.recent_kernel_log,
            boot_id=boot_id,
            clock=clock,
            after_registration=after_registration,
            proofs=self._proofs,
        )
        self._state = StateStore(
            settings.state_path,
            self._latest,
            boot_id=boot_id,
            period_ns=settings.poll_ns,
            prove=partial(self._proofs.prove, ComponentId(STATE_FILE)),
            emit=self._inbox.put,
        )
        if self._lock.is_held:
            self._state.read()
        self._notifier = Notifier(environment)
        self._active = asyncio.Event()
        """Set once this agent is the agent of the node."""
        self._status = RuntimeStatus(
            self._recorder,
            self._state,
            began_ns=clock(),
            stepped_ns=clock(),
            off=prepared.off,
            expected=self._proofs.expected,
        )
        self._tasks = Tasks(
            shutdown=self._shutdown,
            supervisor=Supervisor(emit=self._inbox.put, clock=clock, seam=seam),
            status=self._status,
            after_registration=after_registration,
            proofs=self._proofs,
        )
        self._mps = MpsWatch(self._assembly, self._tasks)
        self._http = HttpService(
            settings,
            self._status,
            inbox=self._inbox,
            latest=self._latest,
            lines=lines,
            boot_id=boot_id,
            clock=clock,
            may_serve_control=self._active,
            after_registration=after_registration,
            why_not_kept=self._state.why_not_kept,
            period_ns=self._assembly.recheck_ns,
            prove=partial(self._proofs.prove, ComponentId(HTTP)),
        )
        self._reload = Reload(
            settings,
            reread=reread,
            validate=self._validate,
            apply=self._apply,
            prove_watch=partial(self._proofs.prove, ComponentId(CONFIG_WATCH)),
            recheck_ns=self._assembly.recheck_ns,
            status=self._status,
            notifier=self._notifier,
        )
        self._signals = Signals(
            stop=lambda name: self._shutdown.request(f"{name} was received"),
            reload=self._reload.ask,
            before_exit=lambda: lines.flush(LOG_FLUSH_S),
        )

    async def run(self) -> int:
        """Run until asked to shut down; return 0, or raise the AgentError that made it stop."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(handle_escaped)
        self._signals.install(loop)
        nvml = self._assembly.make_nvml(released=self._state.was_released)
        try:
            async with self._tasks.group:
                self._start_without_lock(nvml)
                self._tasks.start("life", self._become_active())
                await self._shutdown.requested.wait()
                await self._stop(nvml)
        finally:
            self._signals.restore()
            self._notifier.close()
        if self._shutdown.error is not None:
            raise self._shutdown.error
        return 0

    # What there is

    def _start_without_lock(self, nvml: "NvmlSource") -> None:
        """Start what also an agent that stands by has."""
        start_forever, keep_component = self._tasks.start_forever, self._tasks.keep_component
        self._proofs.expect(ComponentId(NVML_NODE), nvml.start_terms)
        keep_component(NVML, "source", nvml.run, lambda: checks.driver(self._latest.value))
        check = check_start(
            nvml,
            must_work=self._settings.fail_on_init_error,
            until_serving=self._until_serving,
            until_answering=self._http.until_answering,
            start=self._tasks.start,
            notifier=self._notifier,
            shutdown=self._shutdown,
        )
        self._tasks.start("start check", check)
        watch = watch_library(
            nvml, self._shutdown, is_in_container=self._assembly.is_in_container, clock=self._clock
        )
        start_forever("driver watch", watch)
        start_forever("reload", self._reload.run())
        if self._settings.config_file is not None:
            watch_config = partial(self._watch_config, self._settings.config_file)
            self._tasks.keep(CONFIG_WATCH, watch_config, Terms(self._assembly.recheck_ns, WRITE_DEADLINE_NS))
        self._proofs.expect(ComponentId(LOOP), LOOP_TERMS)
        lag = measure_lag(self._status, self._proofs, self._tasks.restart, clock=self._clock)
        start_forever("loop lag", lag)
        start_forever("garbage", self._collect_garbage())
        http_terms = Terms(self._assembly.recheck_ns, WRITE_DEADLINE_NS)
        keep_component(HTTP, "sink", self._http.run, terms=http_terms)

    async def _become_active(self) -> None:
        """Become the agent of the node, at once or when the one before has ended, and serve."""
        await in_daemon_thread("plugin-import", import_plugin)
        seen: Iterable[Fact] = ()
        if not self._lock.is_held:
            seen = await self._stand_by()
            await in_daemon_thread("state-reader", self._state.read)
            if self._state.was_released and self._assembly.nvml is not None:
                self._assembly.nvml.release()
        for fact in seen:
            self._inbox.put(fact)
        self._start_serving()

    def _start_serving(self) -> None:
        """Start what only the agent of the node has."""
        engine, cdi = self._engine(), self._assembly.make_cdi()
        device_plugin = self._status.device_plugin = self._assembly.make_device_plugin()
        self._status.components.append(Component(DEVICE_PLUGIN, "sink", no_trouble))
        self._tasks.keep_critical(DEVICE_PLUGIN, device_plugin.run)
        self._proofs.expect(ComponentId(ENGINE), LOOP_TERMS)
        self._tasks.keep_critical(ENGINE, engine.run)
        keep_component, recorder = self._tasks.keep_component, self._recorder
        write_terms = Terms(self._settings.poll_ns, WRITE_DEADLINE_NS)
        keep_component(
            CDI, "sink", cdi.run, lambda: cdi.trouble, Terms(self._assembly.recheck_ns, WRITE_DEADLINE_NS)
        )
        self._watch_kubelet()
        self._mps.follow(self._policy.now)
        keep_component(STATE_FILE, "sink", self._state.run, lambda: self._state.trouble, write_terms)
        if self._settings.event_log_bytes:
            keep_component(EVENT_LOG, "sink", recorder.run_event_log, recorder.event_log_trouble, write_terms)
        keep_component(
            EVIDENCE, "sink", recorder.run_evidence, lambda: _trouble(recorder.evidence), write_terms
        )
        self._start_other_sources()
        self._tasks.start_forever("status line", self._notifier.run(self._latest))
        self._status.is_standby = False
        self._active.set()

    def _start_other_sources(self) -> None:
        """Start what the kubelet does not wait for; each is imported and made after the registration."""
        settings, assembly, keep_source = self._settings, self._assembly, self._tasks.keep_source
        if settings.kernel_log:
            keep_source(
                KERNEL_LOG, assembly.make_kernel_log, Terms(settings.poll_ns, settings.call_deadline_ns)
            )
        keep_source(SYSFS, assembly.make_sysfs, Terms(settings.poll_ns, settings.call_deadline_ns))
        if settings.uevents:
            keep_source(UEVENTS, assembly.make_uevents)
        if settings.pod_resources_socket:
            keep_source(PODS, assembly.make_pods, Terms(settings.pods_poll_ns, 2 * settings.call_deadline_ns))
            if settings.registers:
                trouble = partial(self._evaluate, checks.kubelet_counted)
                terms = Terms(settings.kubelet_count_poll_ns, settings.call_deadline_ns)
                keep_source(KUBELET_COUNT, assembly.make_kubelet_count, terms, trouble)
        if settings.probe_tier != "off":
            deadline_ns = settings.call_deadline_ns
            terms = Terms(settings.poll_ns, PROBE_ROUND * deadline_ns)
            keep_source(PROBE, assembly.make_ebpf, terms, start_ns=PROBE_LOAD * deadline_ns)

    def _engine(self) -> Engine:
        now_ns = self._clock()
        state = initial_state(self._policy.now, self._state.restored, now_ns=now_ns)
        self._latest.publish(snapshot_of(state))
        watchdog_ns = self._notifier.watchdog_ns
        return Engine(
            inbox=self._inbox,
            state=state,
            latest=self._latest,
            perform=self._perform,
            after_step=self._after_step,
            clock=self._clock,
            proofs=self._proofs,
            probe_terms=Terms(self._settings.poll_ns, self._settings.call_deadline_ns),
            max_idle_ns=min(MAX_IDLE_NS, watchdog_ns // 4) if watchdog_ns else MAX_IDLE_NS,
        )

    def _watch_kubelet(self) -> None:
        if not self._settings.registers:
            self._inbox.put(KubeletSocketSeen(NO_KUBELET))
            return
        run = self._assembly.make_kubelet().run
        self._tasks.keep_component(
            KUBELET, "source", run, terms=Terms(self._assembly.recheck_ns, self._settings.call_deadline_ns)
        )

    # Its life

    async def _until_serving(self) -> None:
        if self._lock.is_held:
            await self._active.wait()

    async def _stand_by(self) -> Iterable[Fact]:
        holder = self._lock.holder()
        _log.info("Standing by while another agent serves this node: %(holder)s", log.about(holder=holder))
        self._notifier.status(f"standby, {holder} serves this node")
        freed = self._tasks.start("lock wait", in_daemon_thread("lock-waiter", self._lock.acquire))
        seen = await collect_facts_until(freed, self._inbox, after_poll=self._after_step, clock=self._clock)
        if not self._lock.is_held:
            raise SourceError("The lock of the node could not be waited for")
        _log.info("Took over this node from %(before)s", log.about(before=holder))
        return seen

    async def _watch_config(self, path: str) -> None:
        await self._after_registration()
        await self._reload.watch(path)

    async def _collect_garbage(self) -> None:
        await self._after_registration()
        await collect_forever()

    def _validate(self, settings: Settings) -> tuple[str, ...]:
        """Return why other settings do not fit this node; for a thread, since it may block for a while."""
        gpus = [view.gpu for view in self._latest.value.gpus]
        return tuple(each.message for each in oversized(gpus, settings.policy))

    async def _apply(self, settings: Settings) -> None:
        """Put the settings of a reload into effect, as far as that needs no restart."""
        policy = self._policy.follow(settings)
        self._inbox.put(PolicyChanged(policy))
        if self._active.is_set():
            self._mps.follow(policy)
            # In standby no fact is applied yet.
            await self._latest.wait_for(lambda snapshot: snapshot.policy == policy, POLICY_WITHIN_S)

    async def _stop(self, nvml: "NvmlSource") -> None:
        """Shut everything down in the order the peers expect."""
        self._status.is_stopping = True
        self._signals.limit_stopping()
        self._notifier.stopping()
        _log.info("Stopping: %(why)s", log.about(why=self._shutdown.why))
        await self._tasks.cancel(KUBELET, "life", "start check", "driver watch", CONFIG_WATCH, "reload")
        await self._tasks.cancel(KERNEL_LOG, SYSFS, UEVENTS, PODS, KUBELET_COUNT, MPS, PROBE)
        self._assembly.close_ebpf()
        closing_nvml = self._tasks.group.create_task(self._close_nvml(nvml), name="nvml end")
        if self._status.device_plugin is not None:
            await self._status.device_plugin.drain(DRAIN_GRACE_S)
        await self._tasks.cancel(DEVICE_PLUGIN, ENGINE, CDI, STATE_FILE, EVENT_LOG, EVIDENCE)
        is_written, _ = await asyncio.gather(self._state.flush(FLUSH_S), self._recorder.flush(FLUSH_S))
        await self._tasks.cancel(HTTP)
        if is_written and self._lock.is_held:
            # The next agent need not wait for this one to release the driver.
            self._lock.release()
        has_ended = await closing_nvml
        await self._tasks.cancel_all()
        # Last, because a thread that still runs may put a fact into it; one that hangs will when it can.
        if has_ended:
            self._inbox.close()

    async def _close_nvml(self, nvml: "NvmlSource") -> bool:
        """Close the driver; return whether no thread is left in it."""
        await self._tasks.cancel(NVML)
        has_ended = await nvml.close()
        if not has_ended:
            _log.warning("Left while a call hangs in the driver")
        return has_ended

    # The owners of effects

    def _perform(self, effect: Effect) -> None:
        """Hand an effect to its owner."""
        match effect:
            case RecordEvent():
                self._recorder.record(effect)
            case KeepEvidence():
                self._recorder.keep(effect)
            case RestartComponent():
                self._restart(effect.component)
            case RegisterResource():
                if self._status.device_plugin is not None and not self._status.is_stopping:
                    self._status.device_plugin.register(effect)
            case ProbeGpu() | ProbeGpus() | ProbeUvm() | ReleaseDriver() | ResumeDriver():
                self._assembly.perform(effect)
            case ExitProcess():
                error = EndedError(effect.message)
                error.exit_code = effect.exit_code
                self._shutdown.request(effect.message, error)
            case _:
                assert_never(effect)

    def _restart(self, component: ComponentId) -> None:
        if component.name == GPU_PROBER and self._assembly.nvml is not None:
            self._assembly.nvml.restart_gpu(GpuUuid(component.of))
        elif component.name == NVML_EVENTS and self._assembly.nvml is not None:
            self._assembly.nvml.restart_events()
        elif component.name == LIST_AND_WATCH and self._recovers_by_registration(ResourceName(component.of)):
            return
        else:
            self._tasks.restart(component)

    def _recovers_by_registration(self, resource: ResourceName) -> bool:
        """Return whether the registration that the core requests with the restart is the restart."""
        plugin = self._status.device_plugin
        return plugin is not None and plugin.recovers_by_registration(resource)

    def _evaluate(self, check: Callable[[Snapshot], str | None]) -> str | None:
        return check(self._latest.value)

    def _after_step(self, now_ns: int) -> None:
        self._status.stepped_ns = now_ns
        self._notifier.feed(now_ns)
