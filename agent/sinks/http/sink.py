"""Answers over HTTP: health, preflight, and what the agent knows of the node.

Guarantees: every answer comes from the newest snapshot and opens nothing of the driver. What names
processes and pods is on the API listener and on the root-only control socket alone. Nothing over TCP
changes state: commands are accepted on the control socket alone, and each one is logged with its caller.
"""

import asyncio
import ipaddress
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec
from aiohttp import web

from agent.bus import Latest
from agent.config.values import Address
from agent.errors import AgentError, UsageError
from agent.log import about
from agent.model.snapshot import ListSent, Snapshot
from agent.sinks.http.places import Bounds
from agent.sinks.http.server import (
    BodyError,
    ControlSocket,
    Handler,
    body_of,
    listen_forever,
    may_control,
    peer_of,
    tcp_socket,
)
from agent.views import checks, documents, usage
from agent.views.events import EventRing

MAX_WAIT_S: Final = 30.0
MAX_NS: Final = 2**63 - 1
"""The longest a reader of events may wait for the next one."""
CHECKS_TIMEOUT_S: Final = 4.0
HEADERS: Final = {
    "Server": "gpu-agent",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}

_log = logging.getLogger(__name__)

COMMANDS_PATH: Final = "/control/v1/"

Answerer = Callable[[web.BaseRequest], Awaitable[web.Response]]


class AgentReport(Protocol):
    """What the agent reports about itself."""

    @property
    def is_standby(self) -> bool:
        """Whether another agent serves this node."""

    def checks(self) -> Sequence[checks.Check]:
        """Return the checks that apply now."""

    def describe(self) -> documents.Json:
        """Return the agent's own figures."""

    def sent_before(self, at_ns: int) -> Iterable[ListSent]:
        """Return of each resource the newest list that the kubelet can have had at a monotonic moment."""

    def time_of(self, at_ns: int) -> str:
        """Return the time of day of a monotonic moment."""


class Commands(Protocol):
    """Executes what operators ask for."""

    @property
    def names(self) -> Sequence[str]:
        """The commands there are."""

    async def execute(self, name: str, command: object) -> documents.Json:
        """Execute a command; raises UsageError if it is wrong, AgentError if it is not possible now."""


class HttpSink:
    """The HTTP listeners and their answers."""

    def __init__(
        self,
        *,
        latest: Latest[Snapshot],
        events: EventRing,
        agent: AgentReport,
        http_listen: Address | None,
        api_listen: Address | None,
        control_socket: str,
        may_serve_control: asyncio.Event,
        commands: Commands,
        bounds: Bounds | None = None,
    ) -> None:
        self._bounds = bounds
        self._making = asyncio.Lock()
        self._latest = latest
        self._events = events
        self._agent = agent
        self._http_listen = http_listen
        self._api_listen = api_listen
        self._control_socket = ControlSocket(control_socket) if control_socket else None
        self._may_serve_control = may_serve_control
        self._commands = commands
        self.addresses: dict[str, str] = {}
        """Where each listener is, by its name: ``http``, ``api``, ``control``."""
        self._tried: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._failing: dict[str, str] = {}
        """The checks that failed when they last ran, by name, and why they began to; the agent names them."""
        self._public: dict[str, Answerer] = {
            "livez": self._livez,
            "healthz": self._livez,
            "readyz": self._readyz,
            "preflight": self._preflight,
        }
        self._private: dict[str, Answerer] = {
            "v1/devices": self._view(documents.devices),
            "v1/conditions": self._view(documents.conditions),
            "v1/allocatable": self._view(documents.allocatable),
            "v1/lists": self._lists,
            "v1/topology": self._view(documents.topology),
            "v1/contexts": self._view(usage.contexts),
            "v1/owners": self._view(usage.ownership),
            "v1/events": self._recent_events,
            "debug/state": self._view(self._state),
        }

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for name, address, handler in self._tcp_listeners():
                    opener, tried = partial(tcp_socket, address), self._tried[name].set
                    listening = listen_forever(name, opener, handler, self._noter(name), tried, self._bounds)
                    group.create_task(listening, name=f"http-{name}")
                if self._control_socket is not None:
                    group.create_task(self._serve_control(self._control_socket), name="http-control")
        finally:
            if self._control_socket is not None:
                self._control_socket.remove()

    async def until_tried(self) -> None:
        """Wait until each listener answers, or could not be opened once (TCP alone in a standby)."""
        names = [name for name, _, _ in self._tcp_listeners()]
        if self._control_socket is not None and self._may_serve_control.is_set():
            names.append("control")
        for name in names:
            await self._tried[name].wait()

    def _tcp_listeners(self) -> list[tuple[str, Address, Handler]]:
        everything = self._public | self._private
        if self._http_listen is not None and self._http_listen == self._api_listen:
            return [("http", self._http_listen, self._router(everything, is_local=True))]
        listeners: list[tuple[str, Address, Handler]] = []
        if self._http_listen is not None:
            listeners.append(("http", self._http_listen, self._router(self._public, is_local=False)))
        if self._api_listen is not None:
            is_local = self._api_listen.is_loopback
            listeners.append(("api", self._api_listen, self._router(everything, is_local=is_local)))
        return listeners

    def _noter(self, name: str) -> Callable[[str], None]:
        def note(address: str) -> None:
            self.addresses[name] = address

        return note

    async def _serve_control(self, control: ControlSocket) -> None:
        await self._may_serve_control.wait()
        answer = self._router(self._public | self._private, is_local=False)

        async def check_peer(request: web.BaseRequest) -> web.Response:
            if not may_control(request):
                return _text(403, "Only root may ask here\n")
            if request.method == "POST":
                return await self._execute(request)
            return await answer(request)

        noter, tried = self._noter("control"), self._tried["control"].set
        await listen_forever("control", control.open, check_peer, noter, tried, self._bounds)

    def _router(self, routes: Mapping[str, Answerer], *, is_local: bool) -> Handler:
        async def answer(request: web.BaseRequest) -> web.Response:
            if request.method not in ("GET", "HEAD"):
                return _text(405, "Only GET is answered here\n", Allow="GET, HEAD")
            if is_local and not _names_this_machine(request):
                return _text(403, "Ask for this address by localhost or its number\n")
            answerer = routes.get(request.path.strip("/"))
            if answerer is None:
                answerer = routes.get(request.path.strip("/").partition("/")[0])
                if answerer not in (self._livez, self._readyz):
                    return _text(404, "Not found\n")
            return await answerer(request)

        return answer

    # Health

    async def _livez(self, request: web.BaseRequest) -> web.Response:
        return await self._health(request, [check for check in self._agent.checks() if check.is_liveness])

    async def _readyz(self, request: web.BaseRequest) -> web.Response:
        return await self._health(request, self._agent.checks())

    async def _health(self, request: web.BaseRequest, applying: Sequence[checks.Check]) -> web.Response:
        endpoint, _, name = request.path.strip("/").partition("/")
        if name:
            applying = [check for check in applying if check.name == name]
            if not applying:
                return _text(404, "Not found\n")
        query = request.rel_url.query
        async with asyncio.timeout(CHECKS_TIMEOUT_S):
            answer = await checks.answer(
                endpoint,
                applying,
                verbose="verbose" in query,
                exclude=frozenset(query.getall("exclude", [])[:64]),
            )
        self._log_changed_checks(endpoint, answer)
        return _text(200 if answer.ok else 500, answer.body)

    def _log_changed_checks(self, endpoint: str, answer: checks.Answer) -> None:
        """Log each check that began to fail and each that passes again, however often callers poll."""
        if self._failing:
            for name in self._failing.keys() - {check.name for check in self._agent.checks()}:
                del self._failing[name]
        for name, why in answer.failures:
            if name not in self._failing:
                self._failing[name] = why
                _log.warning(
                    "The check %(check)s of %(endpoint)s fails: %(detail)s",
                    about(check=name, endpoint=endpoint, detail=why),
                )
        for name in answer.passes:
            why_failed = self._failing.pop(name, None)
            if why_failed is not None:
                _log.info(
                    "The check %(check)s of %(endpoint)s passes again; it had failed: %(detail)s",
                    about(check=name, endpoint=endpoint, detail=why_failed),
                )

    async def _preflight(self, request: web.BaseRequest) -> web.Response:
        if request.query_string:
            # A caller that passes a parameter must not think that it was read.
            return _error(400, "/preflight takes no parameters; its answer has every reason already")
        if self._agent.is_standby:
            return _json(documents.preflight_of_standby(), status=503)
        snapshot = self._latest.value
        return _json(documents.preflight(snapshot), status=200 if snapshot.ready else 503)

    # Commands

    async def _execute(self, request: web.BaseRequest) -> web.Response:
        name = request.path.removeprefix(COMMANDS_PATH)
        if not request.path.startswith(COMMANDS_PATH) or name not in self._commands.names:
            return _error(404, "There is no such command")
        try:
            command = msgspec.json.decode(await body_of(request))
        except (msgspec.DecodeError, RecursionError, BodyError) as error:
            return _error(400, str(error))
        try:
            pid, uid = peer_of(request)
            document = await self._commands.execute(name, command)
        except UsageError as error:
            return _error(400, str(error))
        except AgentError as error:
            return _error(409, str(error))
        values = {key: value for key, value in command.items() if isinstance(value, str | bool)}
        _log.info(
            "Executed %(command)s for process %(by_process)s of user %(by_user)s",
            about(command=name, by_process=pid, by_user=uid, **values),
        )
        return _json(document)

    # What the agent knows

    def _view(self, make: Callable[[Snapshot, documents.TimeOf], Mapping[str, object]]) -> Answerer:
        async def answer(_request: web.BaseRequest) -> web.Response:
            # One document in a turn of the loop: with many shares each takes milliseconds.
            async with self._making:
                await asyncio.sleep(0)
                return _json(make(self._latest.value, self._agent.time_of))

        return answer

    async def _recent_events(self, request: web.BaseRequest) -> web.Response:
        since = _number(request, "since")
        wait = _number(request, "wait")
        if since is None or wait is None:
            return _text(400, "since and wait must be whole numbers\n")
        if since > self._events.last:
            since = 0  # a number of an earlier agent; this one started again at 1
        if wait and since == self._events.last:
            try:
                async with asyncio.timeout(min(wait, MAX_WAIT_S)):
                    await self._events.wait_newer(since)
            except TimeoutError:
                pass
        entries = self._events.since(since)
        document = documents.events(
            entries,
            last=self._events.last,
            missed=self._events.last - since - len(entries),
            time_of=self._agent.time_of,
        )
        return _json(document)

    async def _lists(self, request: web.BaseRequest) -> web.Response:
        at_ns = _number(request, "at")
        if at_ns is None:
            return _text(400, "at must be a whole number of nanoseconds of CLOCK_MONOTONIC\n")
        sent = self._agent.sent_before(at_ns or MAX_NS)
        return _json(documents.lists(sent, self._agent.time_of))

    def _state(self, snapshot: Snapshot, time_of: documents.TimeOf) -> documents.Json:
        agent = self._agent.describe() | {"listeners": self.addresses}
        return documents.state(snapshot, time_of) | {"agent": agent}


def _number(request: web.BaseRequest, name: str) -> int | None:
    """Return a number of the query, 0 if it is not given, None if it is none."""
    text = request.rel_url.query.get(name, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _names_this_machine(request: web.BaseRequest) -> bool:
    """Return whether the Host is this machine: a page in a browser could ask by a name of its own."""
    host = request.host.rpartition(":")[0] if not request.host.endswith("]") else request.host
    host = (host or request.host).strip("[]")
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _text(status: int, body: str, **headers: str) -> web.Response:
    return web.Response(
        status=status, text=body, content_type="text/plain", charset="utf-8", headers=HEADERS | headers
    )


def _json(document: Mapping[str, object], *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(document) + b"\n"
    return web.Response(status=status, body=body, content_type="application/json", headers=HEADERS)


def _error(status: int, sentence: str) -> web.Response:
    return _json({"apiVersion": documents.API_VERSION, "error": sentence}, status=status)
