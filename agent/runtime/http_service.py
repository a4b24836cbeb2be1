"""The HTTP service and the control socket, and what health checks report of the agent itself.

Both are served from when the registration is over. Invariants: whatever a check has to wait for is requested
once at a time and shared, so a storm of probes costs one call.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from agent import __version__, counts, guard, log
from agent.bus import Inbox, Latest
from agent.config.settings import Settings
from agent.core.freshness import stale_message
from agent.errors import SourceError
from agent.model.components import ENGINE
from agent.model.facts import Fact
from agent.model.ids import SourceName
from agent.model.snapshot import ListSent, Snapshot
from agent.runtime.imports import import_http
from agent.runtime.status import Component, RuntimeStatus
from agent.threads import in_daemon_thread
from agent.views import checks
from agent.views.checks import Check, at_once

if TYPE_CHECKING:
    from agent.runtime.control import Control
    from agent.sinks.http.sink import HttpSink
    from agent.views.documents import Json

DIAL_TIMEOUT_S: Final = 2.0
DIAL_CACHE_NS: Final = 1_000_000_000


class SelfReport:
    """Answers what HTTP asks of the agent."""

    def __init__(
        self,
        status: RuntimeStatus,
        *,
        boot_id: str,
        latest: Latest[Snapshot],
        inbox: Inbox[Fact],
        lines: log.Log,
        clock: Callable[[], int],
        probe_options: Mapping[str, object] | None = None,
    ) -> None:
        """``probe_options``: how the probe is loaded, for ``gpu-agent trace``, which loads another."""
        self._status = status
        self._probe_options = dict(probe_options or {})
        self._boot_id = boot_id
        self._latest = latest
        self._inbox = inbox
        self._lines = lines
        self._clock = clock
        self._dialled = Shared(self._dial, clock=clock)

    @property
    def is_standby(self) -> bool:
        """Whether another agent serves this node."""
        return self._status.is_standby

    def sent_before(self, at_ns: int) -> Iterable[ListSent]:
        """Return of each resource the newest list that the kubelet can have had at a monotonic moment."""
        plugin = self._status.device_plugin
        return () if plugin is None else plugin.sent_before(at_ns)

    def time_of(self, at_ns: int) -> str:
        """Return the time of day of a monotonic moment."""
        return self._status.recorder.time_of(at_ns)

    def checks(self) -> Sequence[Check]:
        """Return the health checks that apply now."""
        return (*self._liveness(), *self._readiness(), *self._sources_and_sinks())

    def _liveness(self) -> Iterator[Check]:
        yield Check("ping", at_once(lambda: None), is_liveness=True)
        yield Check("event-loop", at_once(self._check_loop), is_liveness=True)
        if self._status.device_plugin is not None and self._status.device_plugin.services:
            yield Check("grpc-socket", self._dialled.result, is_liveness=True)

    def _readiness(self) -> Iterator[Check]:
        yield Check("log", at_once(self._check_log))
        yield Check("config", at_once(lambda: self._status.reload_trouble))
        if self._status.is_stopping:
            yield Check("shutdown", at_once(lambda: "the agent is stopping"))
        elif self._status.is_standby:
            yield Check("standby", at_once(lambda: None))
        else:
            yield Check("engine", at_once(self._check_engine))
            yield Check(
                "kubelet-registered",
                at_once(lambda: checks.kubelet_registered(self._latest.value, self._clock())),
            )

    def _sources_and_sinks(self) -> Iterator[Check]:
        if self._status.is_standby:
            return
        for component in self._status.components:
            yield Check(component.check, at_once(partial(self._check_component, component)))
        for name in self._other_components():
            yield Check(f"part-{name}", at_once(partial(self._check_freshness, name)))

    def _other_components(self) -> Sequence[SourceName]:
        """Return the names that have to give proofs and are no source or sink."""
        expected = {each.name for each in self._status.expected()}
        return sorted(expected - {component.name for component in self._status.components})

    def _check_component(self, component: Component) -> str | None:
        return (
            checks.task(self._latest.value, component.name)
            or component.trouble()
            or self._check_freshness(component.name)
        )

    def _check_freshness(self, name: SourceName) -> str | None:
        stale = sorted(each for each in self._latest.value.stale if each.name == name)
        return "; ".join(stale_message(each) for each in stale) or None

    def _component_troubles(self) -> dict[str, str | None]:
        troubles = {each.check: self._check_component(each) for each in self._status.components}
        return troubles | {f"part-{name}": self._check_freshness(name) for name in self._other_components()}

    def _check_loop(self) -> str | None:
        return checks.event_loop(
            lag_ns=self._status.lag_ns, step_age_ns=self._clock() - self._status.stepped_ns
        )

    def _check_engine(self) -> str | None:
        snapshot = self._latest.value
        task = checks.task(snapshot, ENGINE)
        return task or (
            f"a fact could not be applied: {snapshot.failed_facts[0]}" if snapshot.failed_facts else None
        )

    def _check_log(self) -> str | None:
        blocked_s = self._lines.statistics().blocked_s
        return f"blocked for {blocked_s:.0f} s" if blocked_s > checks.MAX_LOG_BLOCKED_S else None

    async def _dial(self) -> str | None:
        if self._status.device_plugin is None:
            return None
        mute = await self._status.device_plugin.unanswering(timeout_s=DIAL_TIMEOUT_S)
        return f"{', '.join(mute)} did not answer on its own socket" if mute else None

    def describe(self) -> "Json":
        """Return the agent's own figures."""
        inbox, lines, status = self._inbox.statistics(), self._lines.statistics(), self._status
        evidence = status.recorder.evidence
        logs = [
            each for each in (status.recorder.event_log, status.recorder.other_events) if each is not None
        ]
        return {
            "version": __version__,
            "pid": os.getpid(),
            "boot": self._boot_id,
            "phase": status.phase,
            "uptime_s": (self._clock() - status.began_ns) // 1_000_000_000,
            "parts": self._component_troubles(),
            "facts": {"put": inbox.put, "merged": inbox.merged, "lost": inbox.lost, "waiting": inbox.waiting},
            "off": [each._asdict() for each in status.off],
            "config": {
                "trouble": status.reload_trouble,
                "awaiting_restart": list(status.awaiting_restart),
            },
            "probe_options": self._probe_options,
            "counts": counts.describe(),
            "log_lines": {"written": lines.written, "dropped": lines.dropped},
            "state_file_failures": status.state.failures,
            "event_log": None
            if not logs
            else {
                "path": logs[0].path,
                "written": sum(each.written for each in logs),
                "lost": sum(each.lost for each in logs),
                "failures": sum(each.failures for each in logs),
            },
            "evidence": None
            if evidence is None
            else {"path": evidence.path, "lost": evidence.lost, "failures": evidence.failures},
        }


class Shared:
    """One answer for all callers within a second."""

    def __init__(self, ask: checks.Run, *, clock: Callable[[], int]) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = asyncio.Lock()
        self._answer: str | None = None
        self._until_ns: int | None = None

    async def result(self) -> str | None:
        """Return the answer, asking anew if the last one is old."""
        async with self._lock:
            if self._until_ns is None or self._clock() >= self._until_ns:
                self._answer = await self._ask()
                self._until_ns = self._clock() + DIAL_CACHE_NS
            return self._answer


ANSWER_WAIT_S: Final = 15.0
"""How long readiness waits for HTTP; the import takes 0.2 s, on a machine with other work some seconds."""


class HttpService:
    """Makes the HTTP sink, with all that it answers from, and runs it."""

    def __init__(
        self,
        settings: Settings,
        status: RuntimeStatus,
        *,
        inbox: Inbox[Fact],
        latest: Latest[Snapshot],
        lines: log.Log,
        boot_id: str,
        clock: Callable[[], int],
        may_serve_control: asyncio.Event,
        after_registration: Callable[[], Awaitable[None]],
        why_not_kept: Callable[[], Awaitable[str | None]],
        period_ns: int,
        prove: Callable[[], object],
    ) -> None:
        """``may_serve_control`` is set once this agent is the agent of the node.

        ``why_not_kept`` writes the newest state, and returns why a restart would not know it. ``prove`` is
        called every ``period_ns`` in which each listener answered.
        """
        self._settings = settings
        self._status = status
        self._inbox = inbox
        self._latest = latest
        self._lines = lines
        self._boot_id = boot_id
        self._clock = clock
        self._may_serve_control = may_serve_control
        self._after_registration = after_registration
        self._why_not_kept = why_not_kept
        self._period_ns = period_ns
        self._prove = prove
        self._sink: HttpSink | None = None
        self._is_made = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled. May be run again after it ended; two at once are not allowed."""
        await self._after_registration()
        if self._sink is None:
            self._sink = self._make(*await in_daemon_thread("http-import", import_http))
            self._is_made.set()
        # Nothing listens any more where the run before did.
        self._sink.addresses.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe_itself(self._sink), name="http asks itself")
            await guard.run_forever("http listeners", self._sink.run)

    async def _probe_itself(self, sink: "HttpSink") -> None:
        """Ask each listener as a probe does; one that does not answer gives no proof."""
        while True:
            for address in tuple(sink.addresses.values()):
                await _answered(address)
            self._prove()
            await asyncio.sleep(self._period_ns / 1e9)

    async def until_answering(self, timeout_s: float = ANSWER_WAIT_S) -> None:
        """Wait until each listener answers or could not get its address, at most ``timeout_s``.

        A listener that cannot be opened never keeps the devices from the kubelet, so neither does this wait.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_made.wait()
                if self._sink is not None:
                    await self._sink.until_tried()

    def _make(self, http_sink: "type[HttpSink]", control: "type[Control]") -> "HttpSink":
        settings, recorder = self._settings, self._status.recorder
        report = SelfReport(
            self._status,
            boot_id=self._boot_id,
            latest=self._latest,
            inbox=self._inbox,
            lines=self._lines,
            clock=self._clock,
            probe_options={
                "tier": settings.probe_tier,
                "loader": settings.probe_loader,
                "doubles": settings.probe_doubles,
                "proc_root": settings.proc_root,
            },
        )
        commands = control(
            emit=self._inbox.put,
            latest=self._latest,
            make_bundle=recorder.make_bundle,
            time_of=recorder.time_of,
            why_not_kept=self._why_not_kept,
        )
        return http_sink(
            latest=self._latest,
            events=recorder.recent,
            agent=report,
            http_listen=settings.http_listen,
            api_listen=settings.api_listen,
            control_socket=settings.control_socket,
            may_serve_control=self._may_serve_control,
            commands=commands,
        )


async def _answered(address: str) -> None:
    """Return when a listener answered; raises SourceError where nothing listens."""
    try:
        if address.startswith("/"):
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:
        raise SourceError(f"The agent's own listener at {address} cannot be reached: {error}") from None
    try:
        writer.write(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
        await reader.read()
    finally:
        writer.close()
