"""The composition root: builds every source, sink, task and queue, and ends them in order.

Guarantees: ``Agent.run`` returns an exit code, always by the same way out: not ready, no new
registration, calls under way are answered, streams end cleanly, the state is written, our sockets
are removed. What is heavy to import comes after what the kubelet waits for.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, assert_never

from agent import log
from agent.bus import Inbox, Latest
from agent.config.settings import Settings
from agent.core.list_size import lists_too_long
from agent.core.state import initial_state
from agent.core.view import snapshot_of
from agent.engine import MAX_IDLE_NS, Engine
from agent.errors import AgentError, AlreadyRunningError, SourceError
from agent.model.effects import (
    Effect,
    EndProcess,
    KeepEvidence,
    RecordEvent,
    RegisterResource,
    ReleaseDriver,
    ResumeDriver,
)
from agent.model.facts import (
    DEVICE_PLUGIN,
    KERNEL_LOG,
    KUBELET,
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
from agent.model.ids import NO_KUBELET, SourceName
from agent.model.policy import Policy
from agent.model.snapshot import Durable, RegistrationPhase, Snapshot
from agent.runtime.assembly import Assembly, Source
from agent.runtime.driver_watch import is_in_container, watch_library
from agent.runtime.ending import EndedError, Ending
from agent.runtime.garbage import collect_for_ever
from agent.runtime.imports import import_http, import_plugin, import_state_file
from agent.runtime.parts_off import PartOff, parts_off, with_usable_state_dir
from agent.runtime.records import Records
from agent.runtime.reload import Reload
from agent.runtime.signals import Signals
from agent.runtime.standby import InitFailedError, Memory
from agent.runtime.startup import NodeLock, boot_id_of, check_paths, check_rights
from agent.runtime.supervision import Pulse, Run, Supervisor
from agent.runtime.vitals import (
    CDI,
    CONFIG_WATCH,
    ENGINE,
    EVENT_LOG,
    EVIDENCE,
    HTTP,
    STATE_FILE,
    Part,
    Vitals,
)
from agent.sinks.notify import Notifier
from agent.threads import in_daemon_thread
from agent.views import checks

if TYPE_CHECKING:
    from agent.sinks.eventlog import EventLog
    from agent.sinks.evidence import EvidenceSink
    from agent.sinks.http import HttpSink
    from agent.sinks.statefile import StateFile
    from agent.sources.nvml import NvmlSource

NEVER_NS: Final = 10**18
"""Thirty years: nobody opens ListAndWatch where nothing was registered."""

DRAIN_GRACE_S: Final = 2.0
FLUSH_S: Final = 1.0
LOG_FLUSH_S: Final = 0.3
HTTP_WAIT_S: Final = 1.0
"""How long HTTP, which is heavy to import, lets the registration go first."""
PROBE_SIGN_NS: Final = 60_000_000_000
"""A compiler may take a minute on a busy node."""
STANDBY_POLL_S: Final = 1.0
GARBAGE: Final = "garbage"
LAG_PERIOD_S: Final = 0.5

_log = logging.getLogger(__name__)


def run(settings: Settings, *, reread: Callable[[], Settings], environment: Mapping[str, str]) -> int:
    """Be the agent of this node until told to stop; returns the exit code.

    ``reread`` returns the settings as they are now, for a reload. Raises AgentError, one sentence,
    where the agent cannot start or has to end.
    """
    os.umask(0o077)
    lines = log.set_up(settings.log_format, settings.log_level)
    try:
        for warning in settings.warnings:
            _log.warning("A setting was ignored", extra=log.fields(detail=warning))
        check_paths(settings)
        in_container = is_in_container(environment)
        settings = with_usable_state_dir(settings, is_in_container=in_container)
        check_rights(settings)
        off = parts_off(settings, is_in_container=in_container)
        if off:
            _log.warning("Some parts are off", extra=log.fields(parts=[str(part) for part in off]))
        lock = NodeLock(settings.lock_path)
        is_first = lock.try_acquire()
        if not is_first and (settings.if_running or _default_if_running()) == "fail":
            raise AlreadyRunningError(
                f"Another agent ({lock.holder()}) runs on this node and holds {settings.lock_path}; "
                "stop it, or wait for its end with --if-running=standby"
            )
        boot_id = boot_id_of(settings.proc_root)
        restored = _load_state(settings, boot_id) if is_first else None
        agent = Agent(
            settings,
            lock,
            restored,
            boot_id=boot_id,
            lines=lines,
            reread=reread,
            environment=environment,
            off=off,
        )
        return asyncio.run(agent.run())
    finally:
        lines.flush(LOG_FLUSH_S)


def _default_if_running() -> str:
    return "fail" if sys.stderr.isatty() else "standby"


def _load_state(settings: Settings, boot_id: str) -> Durable | None:
    """Return what the agent before us left; blocks."""
    if not Path(settings.state_path).exists():
        return None
    from agent.sinks.statefile import load  # noqa: PLC0415 - only where there is a file

    return load(settings.state_path, boot_id=boot_id)


def _is_released(restored: Durable | None) -> bool:
    return restored is not None and restored.released_until_ns is not None


def _no_trouble() -> None:
    return None


def _trouble(sink: "StateFile | EventLog | EvidenceSink | None") -> str | None:
    return None if sink is None else sink.trouble


class Agent:
    """One agent process: everything it is made of, and its life from start to end."""

    def __init__(
        self,
        settings: Settings,
        lock: NodeLock,
        restored: Durable | None,
        *,
        boot_id: str,
        lines: log.Log,
        reread: Callable[[], Settings],
        environment: Mapping[str, str],
        off: tuple[PartOff, ...] = (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``lock`` is the node's: where another agent holds it, this one stands by."""
        self._settings = settings
        self._lock = lock
        self._restored = restored
        self._boot_id = boot_id
        self._lines = lines
        self._environment = environment
        self._clock = clock
        self._jitter_seed = int.from_bytes(os.urandom(4))
        self._policy = self._policy_of(settings)
        self._mps_root: str | None = None
        """Where the MPS control daemon is watched; None: nowhere."""

        self._ending = Ending()
        self._inbox: Inbox[Fact] = Inbox(clock=clock)
        self._latest: Latest[Snapshot] = Latest(self._snapshot_of_nothing())
        self._assembly = Assembly(
            settings, self._inbox, self._latest, clock, is_in_container=is_in_container(environment)
        )
        self._records = Records(
            settings,
            latest=self._latest,
            kernel_log=self._assembly.recent_kernel_log,
            boot_id=boot_id,
            clock=clock,
            after_registration=self._let_registration_go_first,
        )
        self._notifier = Notifier(environment)
        self._supervisor = Supervisor(tell=self._inbox.put, clock=clock)
        self._serving = asyncio.Event()
        """Set once this agent is the agent of the node."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._http: HttpSink | None = None
        self._vitals = Vitals(self._records, began_ns=clock(), stepped_ns=clock(), off=off)
        self._reload = Reload(
            settings,
            reread=reread,
            judge=self._judge,
            apply=self._apply,
            vitals=self._vitals,
            notifier=self._notifier,
        )
        self._signals = Signals(
            stop=lambda name: self._ending.ask(f"{name} was received"),
            reload=self._reload.ask,
            before_exit=lambda: lines.flush(LOG_FLUSH_S),
        )

    def _policy_of(self, settings: Settings) -> Policy:
        """Return the operator's policy, with what the core needs and an operator has no say in."""
        policy = replace(settings.policy, jitter_seed=self._jitter_seed)
        return policy if settings.registers else replace(policy, watch_timeout_ns=NEVER_NS)

    def _snapshot_of_nothing(self) -> Snapshot:
        return snapshot_of(initial_state(self._policy, None, now_ns=self._clock()))

    async def run(self) -> int:
        """Live until told to end; returns 0, or raises the AgentError that made it end."""
        self._signals.install(asyncio.get_running_loop())
        nvml = self._assembly.make_nvml(released=_is_released(self._restored))
        try:
            async with self._group:
                self._start_what_needs_no_lock(nvml)
                self._start("life", self._live())
                await self._ending.asked.wait()
                await self._stop(nvml)
        finally:
            self._signals.restore()
            self._notifier.close()
        if self._ending.error is not None:
            raise self._ending.error
        return 0

    # What there is

    def _start_what_needs_no_lock(self, nvml: "NvmlSource") -> None:
        """Start what also an agent that stands by has."""
        self._keep_part(NVML, "source", nvml.run, lambda: checks.driver(self._latest.value))
        self._start("start judge", self._judge_start(nvml))
        self._start(
            "driver watch",
            watch_library(
                nvml,
                self._ending,
                is_in_container=self._assembly.is_in_container,
                clock=self._clock,
            ),
        )
        self._start("reload", self._reload.run())
        if self._settings.config_file is not None:
            run = partial(self._watch_config, self._settings.config_file)
            self._start(CONFIG_WATCH, self._supervisor.keep(CONFIG_WATCH, run))
        self._start("loop lag", self._measure_lag())
        self._keep_part(HTTP, "sink", self._serve_http)

    async def _live(self) -> None:
        """Become the agent of the node, at once or when the one before has ended, and serve."""
        await in_daemon_thread("plugin-import", import_plugin)
        memory = Memory()
        if not self._lock.is_held:
            await self._stand_by(memory)
            self._restored = await in_daemon_thread(
                "state-reader", lambda: _load_state(self._settings, self._boot_id)
            )
            if _is_released(self._restored) and self._assembly.nvml is not None:
                self._assembly.nvml.release()
        for fact in memory.recall(self._clock()):
            self._inbox.put(fact)
        self._start_serving()

    def _start_serving(self) -> None:
        """Start what only the agent of the node has."""
        engine = self._engine()
        cdi = self._assembly.make_cdi()
        device_plugin = self._vitals.device_plugin = self._assembly.make_device_plugin()
        self._vitals.parts.append(Part(DEVICE_PLUGIN, "sink", _no_trouble))
        self._keep_critical(DEVICE_PLUGIN, device_plugin.run)
        self._keep_critical(ENGINE, engine.run)
        self._keep_part(CDI, "sink", cdi.run, lambda: cdi.trouble)
        self._watch_kubelet()
        self._watch_mps_if_needed()
        self._keep_part(STATE_FILE, "sink", self._write_state, lambda: _trouble(self._vitals.state_file))
        if self._settings.event_log_bytes:
            run = self._records.run_event_log
            self._keep_part(EVENT_LOG, "sink", run, lambda: _trouble(self._records.event_log))
        run = self._records.run_evidence
        self._keep_part(EVIDENCE, "sink", run, lambda: _trouble(self._records.evidence))
        self._start_other_sources()
        self._start("status line", self._notifier.run(self._latest))
        self._vitals.is_standby = False
        self._serving.set()

    def _start_other_sources(self) -> None:
        """Start what the kubelet does not wait for; each is imported and made after the registration."""
        settings, assembly = self._settings, self._assembly
        if settings.kernel_log:
            self._keep_source(KERNEL_LOG, assembly.make_kernel_log)
        self._keep_source(SYSFS, assembly.make_sysfs, Pulse(assembly.sysfs_sign_ns, settings.poll_ns))
        if settings.uevents:
            self._keep_source(UEVENTS, assembly.make_uevents)
        if settings.pod_resources_socket:
            self._keep_source(PODS, assembly.make_pods, Pulse(assembly.pods_sign_ns, settings.pods_poll_ns))
        if settings.probe_tier != "off":
            self._keep_source(PROBE, assembly.make_ebpf, Pulse(assembly.ebpf_sign_ns, PROBE_SIGN_NS))

    def _engine(self) -> Engine:
        now_ns = self._clock()
        state = initial_state(self._policy, self._restored, now_ns=now_ns)
        self._latest.publish(snapshot_of(state))
        watchdog_ns = self._notifier.watchdog_ns
        return Engine(
            inbox=self._inbox,
            state=state,
            latest=self._latest,
            perform=self._perform,
            after_step=self._after_step,
            clock=self._clock,
            max_idle_ns=min(MAX_IDLE_NS, watchdog_ns // 4) if watchdog_ns else MAX_IDLE_NS,
        )

    def _watch_kubelet(self) -> None:
        if not self._settings.registers:
            self._inbox.put(KubeletSocketSeen(NO_KUBELET))
            return
        self._keep_part(KUBELET, "source", self._assembly.make_kubelet().run)

    def _watch_mps_if_needed(self) -> None:
        """Watch the MPS control daemon from when it is needed on; it costs a look when something changes."""
        root = self._policy.injection.mps_root
        if self._policy.sharing.strategy != "mps" or root == self._mps_root:
            return
        self._mps_root = root
        source = self._assembly.make_mps(root)
        if MPS in self._tasks:
            self._tasks[MPS].cancel()
            self._start(MPS, self._supervisor.keep(MPS, source.run))
        else:
            self._keep_part(MPS, "source", source.run)

    async def _write_state(self) -> None:
        if self._vitals.state_file is None:
            state_file = await in_daemon_thread("statefile-import", import_state_file)
            self._vitals.state_file = state_file(
                self._settings.state_path, self._latest, boot_id=self._boot_id
            )
        await self._vitals.state_file.run()

    async def _serve_http(self) -> None:
        await self._let_registration_go_first()
        if GARBAGE not in self._tasks:
            self._start(GARBAGE, collect_for_ever())
        if self._http is None:
            http_sink, self_report, control = await in_daemon_thread("http-import", import_http)
            report = self_report(
                self._vitals,
                boot_id=self._boot_id,
                latest=self._latest,
                inbox=self._inbox,
                lines=self._lines,
                clock=self._clock,
                probe_options={
                    "tier": self._settings.probe_tier,
                    "loader": self._settings.probe_loader,
                    "doubles": self._settings.probe_doubles,
                    "proc_root": self._settings.proc_root,
                },
            )
            self._http = http_sink(
                latest=self._latest,
                events=self._records.recent,
                agent=report,
                http_listen=self._settings.http_listen,
                api_listen=self._settings.api_listen,
                control_socket=self._settings.control_socket,
                may_serve_control=self._serving,
                orders=control(
                    tell=self._inbox.put,
                    latest=self._latest,
                    make_bundle=self._records.make_bundle,
                    time_of=self._records.time_of,
                ),
            )
        await self._http.run()

    async def _let_registration_go_first(self) -> None:
        version = self._latest.version
        try:
            async with asyncio.timeout(HTTP_WAIT_S):
                while not _is_registered(self._latest.value):
                    version = await self._latest.wait_newer(version)
        except TimeoutError:
            return

    # Its life

    async def _judge_start(self, nvml: "NvmlSource") -> None:
        """Tell systemd when the agent serves or stands by; end it if NVML must work and does not."""
        extending = self._start("start extension", self._notifier.extend_start())
        try:
            await nvml.wait_first_outcome()
        except SourceError as error:
            if self._settings.fail_on_init_error:
                why = f"{error}; or wait for the driver with --fail-on-init-error=false"
                self._ending.ask("NVML could not be initialised", InitFailedError(why))
                return
        finally:
            extending.cancel()
        if self._lock.is_held:
            await self._serving.wait()
        self._notifier.ready()

    async def _stand_by(self, memory: Memory) -> None:
        holder = self._lock.holder()
        _log.info("Standing by while another agent serves this node", extra=log.fields(holder=holder))
        self._notifier.status(f"standby, {holder} serves this node")
        freed = self._start("lock wait", in_daemon_thread("lock-waiter", self._lock.acquire))
        while not freed.done():
            await asyncio.wait({freed}, timeout=STANDBY_POLL_S)
            now_ns = self._clock()
            for item in self._inbox.take_nowait()[0]:
                memory.note(item.fact, now_ns)
            self._after_step(now_ns)
        if not self._lock.is_held:
            raise SourceError("The lock of the node could not be waited for")
        _log.info("Took over this node", extra=log.fields(before=holder))

    async def _watch_config(self, path: str) -> None:
        await self._let_registration_go_first()
        await self._reload.watch(path)

    def _judge(self, settings: Settings) -> tuple[str, ...]:
        """Return what of other settings cannot be on this node; for a thread, since it may take a while."""
        return lists_too_long([view.gpu for view in self._latest.value.gpus], settings.policy)

    def _apply(self, settings: Settings) -> None:
        """Put the settings of a reload into effect, as far as that needs no restart."""
        policy = self._policy_of(settings)
        self._policy = replace(
            policy,
            # What is registered stays registered, so to begin to observe needs a restart.
            observe=policy.observe and self._policy.observe,
            # So does another root: sources look where they looked.
            injection=replace(policy.injection, device_root=self._policy.injection.device_root),
        )
        self._inbox.put(PolicyChanged(self._policy))
        if self._serving.is_set():
            self._watch_mps_if_needed()

    async def _measure_lag(self) -> None:
        while True:
            before_ns = self._clock()
            await asyncio.sleep(LAG_PERIOD_S)
            self._vitals.lag_ns = self._clock() - before_ns - round(LAG_PERIOD_S * 1e9)

    async def _stop(self, nvml: "NvmlSource") -> None:
        """End everything in the order the peers expect."""
        self._vitals.is_stopping = True
        self._signals.limit_stopping()
        self._notifier.stopping()
        _log.info("Stopping", extra=log.fields(why=self._ending.why))
        await self._cancel(KUBELET, "life", "start judge", "driver watch", CONFIG_WATCH, "reload")
        await self._cancel(KERNEL_LOG, SYSFS, UEVENTS, PODS, MPS, PROBE)
        self._assembly.close_ebpf()
        letting_go = self._group.create_task(self._end_nvml(nvml), name="nvml end")
        if self._vitals.device_plugin is not None:
            await self._vitals.device_plugin.drain(DRAIN_GRACE_S)
        await self._cancel(DEVICE_PLUGIN, ENGINE, CDI, STATE_FILE, EVENT_LOG, EVIDENCE)
        is_written, _ = await asyncio.gather(self._flush_state(), self._records.flush(FLUSH_S))
        await self._cancel(HTTP)
        if is_written and self._lock.is_held:
            # The next agent need not wait for the driver to let go of this one.
            self._lock.release()
        has_ended = await letting_go
        await self._cancel(*self._tasks)
        # Last, because whoever still runs may put a fact into it; a thread that hangs will when it can.
        if has_ended:
            self._inbox.close()

    async def _flush_state(self) -> bool:
        return self._vitals.state_file is None or await self._vitals.state_file.flush(FLUSH_S)

    async def _end_nvml(self, nvml: "NvmlSource") -> bool:
        """Let go of the driver; returns whether no thread is left in it."""
        await self._cancel(NVML)
        has_ended = await nvml.close()
        if not has_ended:
            _log.warning("Left while a call hangs in the driver")
        return has_ended

    # Who owns what

    def _perform(self, effect: Effect) -> None:
        """Hand an effect to its owner."""
        match effect:
            case RecordEvent():
                self._records.record(effect)
            case KeepEvidence():
                self._records.keep(effect)
            case RegisterResource():
                if self._vitals.device_plugin is not None and not self._vitals.is_stopping:
                    self._vitals.device_plugin.register(effect)
            case ReleaseDriver():
                if self._assembly.nvml is not None:
                    self._assembly.nvml.release()
            case ResumeDriver():
                if self._assembly.nvml is not None:
                    self._assembly.nvml.resume()
            case EndProcess():
                error = EndedError(effect.message)
                error.exit_code = effect.exit_code
                self._ending.ask(effect.message, error)
            case _:
                assert_never(effect)

    def _after_step(self, now_ns: int) -> None:
        self._vitals.stepped_ns = now_ns
        self._notifier.feed(now_ns)

    def _keep_part(
        self,
        name: SourceName,
        kind: Literal["source", "sink"],
        run: Run,
        trouble: Callable[[], str | None] = _no_trouble,
        pulse: Pulse | None = None,
    ) -> None:
        """Keep a source or sink running, and show in health checks how it is."""
        self._vitals.parts.append(Part(name, kind, trouble))
        self._start(name, self._supervisor.keep(name, run, pulse))

    def _keep_source(self, name: SourceName, make: Callable[[], Source], pulse: Pulse | None = None) -> None:
        """Keep a source running that is made, by a thread, when the registration is over."""
        made: list[Source] = []

        async def run() -> None:
            if not made:
                await self._let_registration_go_first()
                made.append(await in_daemon_thread(f"{name}-import", make))
            await made[0].run()

        self._keep_part(name, "source", run, pulse=pulse)

    def _keep_critical(self, name: SourceName, run: Run) -> None:
        self._start(name, self._supervisor.keep_critical(name, run))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(self._ending_with(name, work), name=name)
        self._tasks[name] = task
        return task

    async def _ending_with(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do some work; a bug in it ends the agent in the same order as a signal does."""
        try:
            await work
        except AgentError as error:
            self._ending.ask(f"{name} failed", error)
        except Exception as bug:  # noqa: BLE001 - whatever it is, the end is orderly
            _log.exception("A task of the agent itself failed", extra=log.fields(task=name))
            self._ending.ask(f"{name} failed", EndedError(f"The task {name} failed: {bug!r}; see the log"))

    async def _cancel(self, *names: str) -> None:
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_registered(snapshot: Snapshot) -> bool:
    return any(resource.phase is RegistrationPhase.REGISTERED for resource in snapshot.resources)
