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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

from agent import log
from agent.bus import Inbox, Latest
from agent.config.settings import Settings
from agent.core.list_size import lists_too_long
from agent.core.state import initial_state
from agent.core.view import snapshot_of
from agent.engine import MAX_IDLE_NS, Engine
from agent.errors import AlreadyRunningError, SourceError
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
from agent.model.ids import NO_KUBELET
from agent.model.snapshot import Durable, Snapshot
from agent.runtime.assembly import Assembly
from agent.runtime.driver_watch import is_in_container, watch_library
from agent.runtime.ending import EndedError, Ending, InitFailedError
from agent.runtime.garbage import collect_for_ever
from agent.runtime.imports import import_plugin, import_state_file, let_registration_go_first
from agent.runtime.parts_off import PartOff, parts_off, with_usable_state_dir
from agent.runtime.policy import PolicyInEffect
from agent.runtime.records import Records
from agent.runtime.reload import Reload
from agent.runtime.serving import Serving
from agent.runtime.signals import Signals
from agent.runtime.standby import watched_until
from agent.runtime.startup import NodeLock, boot_id_of, check_paths, check_rights
from agent.runtime.supervision import Pulse, Supervisor
from agent.runtime.tasks import Tasks, no_trouble
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
    measure_lag,
)
from agent.sinks.notify import Notifier
from agent.threads import in_daemon_thread
from agent.views import checks

if TYPE_CHECKING:
    from agent.sinks.eventlog import EventLog
    from agent.sinks.evidence import EvidenceSink
    from agent.sinks.statefile import StateFile
    from agent.sources.nvml import NvmlSource

DRAIN_GRACE_S: Final = 2.0
FLUSH_S: Final = 1.0
LOG_FLUSH_S: Final = 0.3
PROBE_SIGN_NS: Final = 60_000_000_000
"""A compiler may take a minute on a busy node."""

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
        self._policy = PolicyInEffect(settings)
        self._mps_root: str | None = None
        """Where the MPS control daemon is watched; None: nowhere."""

        self._ending = Ending()
        self._inbox: Inbox[Fact] = Inbox(clock=clock)
        nothing = initial_state(self._policy.now, None, now_ns=clock())
        self._latest: Latest[Snapshot] = Latest(snapshot_of(nothing))
        after_registration = partial(let_registration_go_first, self._latest)
        self._after_registration = after_registration
        self._assembly = Assembly(
            settings, self._inbox, self._latest, clock, is_in_container=is_in_container(environment)
        )
        self._records = Records(
            settings,
            latest=self._latest,
            kernel_log=self._assembly.recent_kernel_log,
            boot_id=boot_id,
            clock=clock,
            after_registration=after_registration,
        )
        self._notifier = Notifier(environment)
        self._serving = asyncio.Event()
        """Set once this agent is the agent of the node."""
        self._vitals = Vitals(self._records, began_ns=clock(), stepped_ns=clock(), off=off)
        self._tasks = Tasks(
            ending=self._ending,
            supervisor=Supervisor(tell=self._inbox.put, clock=clock),
            vitals=self._vitals,
            after_registration=after_registration,
        )
        self._http = Serving(
            settings,
            self._vitals,
            inbox=self._inbox,
            latest=self._latest,
            lines=lines,
            boot_id=boot_id,
            clock=clock,
            may_serve_control=self._serving,
            after_registration=after_registration,
        )
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

    async def run(self) -> int:
        """Live until told to end; returns 0, or raises the AgentError that made it end."""
        self._signals.install(asyncio.get_running_loop())
        nvml = self._assembly.make_nvml(released=_is_released(self._restored))
        try:
            async with self._tasks.group:
                self._start_what_needs_no_lock(nvml)
                self._tasks.start("life", self._live())
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
        start, keep_part = self._tasks.start, self._tasks.keep_part
        keep_part(NVML, "source", nvml.run, lambda: checks.driver(self._latest.value))
        start("start judge", self._judge_start(nvml))
        watch = watch_library(
            nvml, self._ending, is_in_container=self._assembly.is_in_container, clock=self._clock
        )
        start("driver watch", watch)
        start("reload", self._reload.run())
        if self._settings.config_file is not None:
            self._tasks.keep(CONFIG_WATCH, partial(self._watch_config, self._settings.config_file))
        start("loop lag", measure_lag(self._vitals, clock=self._clock))
        start("garbage", self._collect_garbage())
        keep_part(HTTP, "sink", self._http.run)

    async def _live(self) -> None:
        """Become the agent of the node, at once or when the one before has ended, and serve."""
        await in_daemon_thread("plugin-import", import_plugin)
        seen: Iterable[Fact] = ()
        if not self._lock.is_held:
            seen = await self._stand_by()
            self._restored = await in_daemon_thread(
                "state-reader", lambda: _load_state(self._settings, self._boot_id)
            )
            if _is_released(self._restored) and self._assembly.nvml is not None:
                self._assembly.nvml.release()
        for fact in seen:
            self._inbox.put(fact)
        self._start_serving()

    def _start_serving(self) -> None:
        """Start what only the agent of the node has."""
        engine, cdi = self._engine(), self._assembly.make_cdi()
        device_plugin = self._vitals.device_plugin = self._assembly.make_device_plugin()
        self._vitals.parts.append(Part(DEVICE_PLUGIN, "sink", no_trouble))
        self._tasks.keep_critical(DEVICE_PLUGIN, device_plugin.run)
        self._tasks.keep_critical(ENGINE, engine.run)
        keep_part, records = self._tasks.keep_part, self._records
        keep_part(CDI, "sink", cdi.run, lambda: cdi.trouble)
        self._watch_kubelet()
        self._watch_mps_if_needed()
        keep_part(STATE_FILE, "sink", self._write_state, lambda: _trouble(self._vitals.state_file))
        if self._settings.event_log_bytes:
            keep_part(EVENT_LOG, "sink", records.run_event_log, lambda: _trouble(records.event_log))
        keep_part(EVIDENCE, "sink", records.run_evidence, lambda: _trouble(records.evidence))
        self._start_other_sources()
        self._tasks.start("status line", self._notifier.run(self._latest))
        self._vitals.is_standby = False
        self._serving.set()

    def _start_other_sources(self) -> None:
        """Start what the kubelet does not wait for; each is imported and made after the registration."""
        settings, assembly, keep_source = self._settings, self._assembly, self._tasks.keep_source
        if settings.kernel_log:
            keep_source(KERNEL_LOG, assembly.make_kernel_log)
        keep_source(SYSFS, assembly.make_sysfs, Pulse(assembly.sysfs_sign_ns, settings.poll_ns))
        if settings.uevents:
            keep_source(UEVENTS, assembly.make_uevents)
        if settings.pod_resources_socket:
            keep_source(PODS, assembly.make_pods, Pulse(assembly.pods_sign_ns, settings.pods_poll_ns))
        if settings.probe_tier != "off":
            keep_source(PROBE, assembly.make_ebpf, Pulse(assembly.ebpf_sign_ns, PROBE_SIGN_NS))

    def _engine(self) -> Engine:
        now_ns = self._clock()
        state = initial_state(self._policy.now, self._restored, now_ns=now_ns)
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
        self._tasks.keep_part(KUBELET, "source", self._assembly.make_kubelet().run)

    def _watch_mps_if_needed(self) -> None:
        """Watch the MPS control daemon from when it is needed on; it costs a look when something changes."""
        policy = self._policy.now
        root = policy.injection.mps_root
        if policy.sharing.strategy != "mps" or root == self._mps_root:
            return
        self._mps_root = root
        source = self._assembly.make_mps(root)
        if MPS in self._tasks:
            self._tasks.replace(MPS, source.run)
        else:
            self._tasks.keep_part(MPS, "source", source.run)

    async def _write_state(self) -> None:
        if self._vitals.state_file is None:
            state_file = await in_daemon_thread("statefile-import", import_state_file)
            self._vitals.state_file = state_file(
                self._settings.state_path, self._latest, boot_id=self._boot_id
            )
        await self._vitals.state_file.run()

    # Its life

    async def _judge_start(self, nvml: "NvmlSource") -> None:
        """Tell systemd when the agent serves or stands by; end it if NVML must work and does not."""
        extending = self._tasks.start("start extension", self._notifier.extend_start())
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

    async def _stand_by(self) -> Iterable[Fact]:
        holder = self._lock.holder()
        _log.info("Standing by while another agent serves this node", extra=log.fields(holder=holder))
        self._notifier.status(f"standby, {holder} serves this node")
        freed = self._tasks.start("lock wait", in_daemon_thread("lock-waiter", self._lock.acquire))
        seen = await watched_until(freed, self._inbox, after_look=self._after_step, clock=self._clock)
        if not self._lock.is_held:
            raise SourceError("The lock of the node could not be waited for")
        _log.info("Took over this node", extra=log.fields(before=holder))
        return seen

    async def _watch_config(self, path: str) -> None:
        await self._after_registration()
        await self._reload.watch(path)

    async def _collect_garbage(self) -> None:
        await self._after_registration()
        await collect_for_ever()

    def _judge(self, settings: Settings) -> tuple[str, ...]:
        """Return what of other settings cannot be on this node; for a thread, since it may take a while."""
        return lists_too_long([view.gpu for view in self._latest.value.gpus], settings.policy)

    def _apply(self, settings: Settings) -> None:
        """Put the settings of a reload into effect, as far as that needs no restart."""
        self._inbox.put(PolicyChanged(self._policy.follow(settings)))
        if self._serving.is_set():
            self._watch_mps_if_needed()

    async def _stop(self, nvml: "NvmlSource") -> None:
        """End everything in the order the peers expect."""
        self._vitals.is_stopping = True
        self._signals.limit_stopping()
        self._notifier.stopping()
        _log.info("Stopping", extra=log.fields(why=self._ending.why))
        await self._tasks.cancel(KUBELET, "life", "start judge", "driver watch", CONFIG_WATCH, "reload")
        await self._tasks.cancel(KERNEL_LOG, SYSFS, UEVENTS, PODS, MPS, PROBE)
        self._assembly.close_ebpf()
        letting_go = self._tasks.group.create_task(self._end_nvml(nvml), name="nvml end")
        if self._vitals.device_plugin is not None:
            await self._vitals.device_plugin.drain(DRAIN_GRACE_S)
        await self._tasks.cancel(DEVICE_PLUGIN, ENGINE, CDI, STATE_FILE, EVENT_LOG, EVIDENCE)
        is_written, _ = await asyncio.gather(self._flush_state(), self._records.flush(FLUSH_S))
        await self._tasks.cancel(HTTP)
        if is_written and self._lock.is_held:
            # The next agent need not wait for the driver to let go of this one.
            self._lock.release()
        has_ended = await letting_go
        await self._tasks.cancel_all()
        # Last, because whoever still runs may put a fact into it; a thread that hangs will when it can.
        if has_ended:
            self._inbox.close()

    async def _flush_state(self) -> bool:
        return self._vitals.state_file is None or await self._vitals.state_file.flush(FLUSH_S)

    async def _end_nvml(self, nvml: "NvmlSource") -> bool:
        """Let go of the driver; returns whether no thread is left in it."""
        await self._tasks.cancel(NVML)
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
