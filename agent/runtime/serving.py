"""Answers over HTTP and the control socket, from when the registration is over."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final

from agent import guard, log
from agent.bus import Inbox, Latest
from agent.config.settings import Settings
from agent.errors import SourceError
from agent.model.facts import Fact
from agent.model.snapshot import Snapshot
from agent.runtime.vitals import Vitals
from agent.threads import in_daemon_thread

if TYPE_CHECKING:
    from agent.runtime.control import Control
    from agent.runtime.report import SelfReport
    from agent.sinks.http.sink import HttpSink


ANSWER_WAIT_S: Final = 15.0
"""How long readiness waits for HTTP; the import takes 0.2 s, on a machine with other work some seconds."""


class Serving:
    """Makes the HTTP sink, with all that it answers from, and runs it."""

    def __init__(
        self,
        settings: Settings,
        vitals: Vitals,
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
        self._vitals = vitals
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
        """Serve for ever. May be run again after it ended; two at once are not allowed."""
        await self._after_registration()
        if self._sink is None:
            self._sink = self._make(*await in_daemon_thread("http-import", _import_http))
            self._is_made.set()
        # Nothing listens any more where the run before did.
        self._sink.addresses.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_itself(self._sink), name="http asks itself")
            await guard.for_ever("http listeners", self._sink.run)

    async def _ask_itself(self, sink: "HttpSink") -> None:
        """Ask each listener as a probe does; one that does not answer gives no proof."""
        while True:
            for address in tuple(sink.addresses.values()):
                await _answered(address)
            self._prove()
            await asyncio.sleep(self._period_ns / 1e9)

    async def until_answering(self, timeout_s: float = ANSWER_WAIT_S) -> None:
        """Wait until each listener answers or was refused its address, at most ``timeout_s``.

        A listener that cannot be opened never keeps the devices from the kubelet, so neither does this wait.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_made.wait()
                if self._sink is not None:
                    await self._sink.until_tried()

    def _make(
        self, http_sink: "type[HttpSink]", self_report: "type[SelfReport]", control: "type[Control]"
    ) -> "HttpSink":
        settings, records = self._settings, self._vitals.records
        report = self_report(
            self._vitals,
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
        orders = control(
            tell=self._inbox.put,
            latest=self._latest,
            make_bundle=records.make_bundle,
            time_of=records.time_of,
            why_not_kept=self._why_not_kept,
        )
        return http_sink(
            latest=self._latest,
            events=records.recent,
            agent=report,
            http_listen=settings.http_listen,
            api_listen=settings.api_listen,
            control_socket=settings.control_socket,
            may_serve_control=self._may_serve_control,
            orders=orders,
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


def _import_http() -> "tuple[type[HttpSink], type[SelfReport], type[Control]]":
    from agent.runtime.control import Control  # noqa: PLC0415
    from agent.runtime.report import SelfReport  # noqa: PLC0415

    with _no_certificates():
        from agent.sinks.http.sink import HttpSink  # noqa: PLC0415

    return HttpSink, SelfReport, Control


@contextlib.contextmanager
def _no_certificates() -> Iterator[None]:
    """Hide the machine's certificates, which aiohttp loads for its client when it is imported.

    The agent only serves with it, and they cost 2 MiB and as much CPU as a fifth of the start. Whoever makes
    a client needs a context of its own. Source: OpenSSL's SSL_CTX_set_default_verify_paths(3).
    """
    nowhere = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
    before = {name: os.environ.get(name) for name in nowhere}
    os.environ.update(nowhere)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
