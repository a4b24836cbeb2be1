"""Answers over HTTP, asked over real sockets."""

import asyncio
import json
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.bus import Latest
from agent.config.values import Address
from agent.errors import AgentError, UsageError
from agent.model.effects import Event, EventKind, RecordEvent
from agent.model.facts import NVML
from agent.model.health import Condition, ConditionKey, Evidence, Health, Reason, Recovery
from agent.model.ids import DeviceId, GpuUuid, Placement, SocketIdentity
from agent.model.sample import GpuSample
from agent.model.snapshot import DriverView, Finding, ListSent, RegistrationPhase, Snapshot, TaskView
from agent.model.structs import replace
from agent.sinks.http import server as http_server
from agent.sinks.http.places import Bounds, Kind, Room
from agent.sinks.http.sink import HttpSink
from agent.views import checks, documents
from agent.views.checks import Check, at_once
from agent.views.events import MAX_EVENTS, EventRing
from tests.sinks.snapshots import GPU, device, node, resource, snapshot, uuid

LOCAL = Address("127.0.0.1", 0)


PING = Check("ping", at_once(lambda: None), is_liveness=True)


@dataclass
class Myself:
    """What the sink asks the agent about itself."""

    is_standby: bool = False
    sent: list[ListSent] = field(default_factory=list)
    made: list[Check] = field(
        default_factory=lambda: [Check("ping", at_once(lambda: None), is_liveness=True)]
    )

    def checks(self) -> Sequence[Check]:
        return self.made

    def describe(self) -> documents.Json:
        return {"version": "9"}

    def sent_before(self, at_ns: int) -> Sequence[ListSent]:
        return [each for each in self.sent if each.began_ns <= at_ns][-1:]

    def time_of(self, at_ns: int) -> str:
        return f"t+{at_ns}"


@dataclass
class RecordedCommands:
    """Keeps the commands it was given, and raises an error if it has one."""

    names: Sequence[str] = ("hold", "resume")
    given: list[object] = field(default_factory=list)
    error: Exception | None = None

    async def execute(self, name: str, command: object) -> documents.Json:
        self.given.append((name, command))
        if self.error is not None:
            raise self.error
        return {"message": f"did {name}"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Served:
    sink: HttpSink
    latest: Latest[Snapshot]
    events: EventRing
    myself: Myself
    control: Path
    commands: RecordedCommands

    def address(self, listener: str) -> tuple[str, int]:
        host, _, port = self.sink.addresses[listener].rpartition(":")
        return host, int(port)

    async def get(self, target: str, *, listener: str = "http", **named: str) -> Answer:
        return await ask(await self.connect(listener), target, **named)

    async def connect(self, listener: str = "http", *, source: str | None = None) -> Connection:
        if listener == "control":
            return await asyncio.open_unix_connection(str(self.control))
        own = None if source is None else (source, 0)
        return await asyncio.open_connection(*self.address(listener), local_addr=own)


async def ask(
    connection: Connection,
    target: str,
    *,
    method: str = "GET",
    host: str = "localhost",
    head: str = "",
    body: str = "",
) -> Answer:
    reader, writer = connection
    start = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{head}\r\n"
    writer.write((start + body).encode())
    async with asyncio.timeout(30):
        raw = await reader.read()
    writer.close()
    top, _, text = raw.decode().partition("\r\n\r\n")
    first, *lines = top.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, text)


Serve = Callable[..., Any]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def served(
        *,
        state: Snapshot | None = None,
        myself: Myself | None = None,
        http: Address | None = LOCAL,
        api: Address | None = LOCAL,
        is_active: bool = True,
        bounds: Bounds | None = None,
    ) -> AsyncIterator[Served]:
        latest = Latest(state or node())
        active = asyncio.Event()
        control = tmp_path / "run" / "control.sock"
        made = Served(
            HttpSink(
                latest=latest,
                events=(events := EventRing()),
                agent=(me := myself or Myself()),
                http_listen=http,
                api_listen=api,
                control_socket=str(control),
                may_serve_control=active,
                commands=(commands := RecordedCommands()),
                bounds=bounds,
            ),
            latest,
            events,
            me,
            control,
            commands,
        )
        if is_active:
            active.set()
        wanted = {"control"} if is_active else set()
        wanted |= {"http"} if http else set()
        wanted |= {"api"} if api and api != http else set()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(made.sink.run(), name="http")
            async with asyncio.timeout(30):
                while set(made.sink.addresses) < wanted:
                    await asyncio.sleep(0.01)
            try:
                yield made
            finally:
                task.cancel()

    return served


# Health


def failing(name: str, *, is_liveness: bool = False) -> Check:
    return Check(name, at_once(lambda: "secret reason"), is_liveness=is_liveness)


async def test_a_live_agent_answers_ok(serve: Serve) -> None:
    async with serve() as served:
        for path in ("/livez", "/healthz", "/readyz", "/livez/", "/livez/ping"):
            answer = await served.get(path)
            assert (answer.status, answer.body) == (200, "ok")
            assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_verbose_lists_each_check(serve: Serve) -> None:
    async with serve() as served:
        assert (await served.get("/livez?verbose")).body == "[+]ping ok\nlivez check passed\n"


async def test_a_failing_check_is_named_and_its_reason_withheld(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        served.myself.made.append(failing("config"))
        answer = await served.get("/readyz")
        assert answer.status == 500
        assert answer.body == "[+]ping ok\n[-]config failed: reason withheld\nreadyz check failed\n"
        assert "secret" in caplog.text
        assert (await served.get("/livez")).status == 200
        assert (await served.get("/readyz/config")).status == 500
        assert (await served.get("/readyz/ping")).status == 200


async def test_a_check_is_logged_when_it_begins_to_fail_and_when_it_passes_again(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="agent.sinks.http.sink")
    causes = iter(["full for 1 s", "full for 2 s", "full for 2 s", None, None, "absent", "absent", "absent"])
    disk = Check("disk", at_once(lambda: next(causes)), is_liveness=True)

    async with serve() as served:
        served.myself.made.append(disk)
        for path in ("/readyz", "/livez", "/readyz/disk", "/readyz?exclude=disk", "/readyz", "/livez"):
            await served.get(path)
        for _ in range(2):
            await served.get("/livez")
        # A check that no longer applies neither fails nor passes.
        served.myself.made.remove(disk)
        await served.get("/livez")
        served.myself.made.append(disk)
        await served.get("/readyz")

    assert [
        (record.levelname, record.getMessage()) for record in caplog.records if "disk" in record.getMessage()
    ] == [
        ("WARNING", "The check disk of readyz fails: full for 1 s"),
        ("INFO", "The check disk of readyz passes again; it had failed: full for 1 s"),
        ("WARNING", "The check disk of livez fails: absent"),
        ("WARNING", "The check disk of readyz fails: absent"),
    ]
    assert next(causes, None) is None


async def test_a_check_can_be_excluded(serve: Serve) -> None:
    async with serve() as served:
        served.myself.made.append(failing("config"))
        answer = await served.get("/readyz?exclude=config&exclude=none&verbose")
        assert answer.status == 200
        assert answer.body == (
            "[+]ping ok\n[+]config excluded: ok\n"
            'warn: some health checks cannot be excluded: no matches for "none"\n'
            "readyz check passed\n"
        )


async def test_an_unknown_check_is_not_found(serve: Serve) -> None:
    async with serve() as served:
        assert (await served.get("/livez/other")).status == 404


def test_an_agent_that_does_not_step_is_not_alive() -> None:
    assert checks.event_loop(lag_ns=0, step_age_ns=10 * 10**9) is None
    assert checks.event_loop(lag_ns=0, step_age_ns=10 * 10**9 + 1) == "the last step was 10.0 s ago"
    assert checks.event_loop(lag_ns=5 * 10**9 + 1, step_age_ns=0) == "the event loop was 5.0 s late"


SEEN = replace(node(), kubelet=SocketIdentity(1, 2, 3))


@pytest.mark.parametrize(
    ("state", "now_ns", "is_well"),
    [
        (node(), 10**12, True),  # no kubelet
        (SEEN, 10 * 10**9, True),  # not yet ten seconds
        (SEEN, 10 * 10**9 + 1, False),
        (replace(SEEN, resources=(replace(SEEN.resources[0], devices=()),)), 10**12, True),
        (
            replace(SEEN, resources=(replace(SEEN.resources[0], phase=RegistrationPhase.REGISTERED),)),
            10**12,
            True,
        ),
    ],
)
def test_readiness_needs_a_registration_where_there_is_a_kubelet_and_something_to_advertise(
    state: Snapshot, now_ns: int, is_well: bool
) -> None:
    assert (checks.kubelet_registered(state, now_ns) is None) is is_well


def test_a_driver_that_is_not_up_is_not_ready() -> None:
    assert checks.driver(node()) == "NVML is not initialised yet"
    assert checks.driver(replace(node(), driver=DriverView(ready=True))) is None
    assert checks.driver(replace(node(), driver=DriverView(ready=False, message="gone"))) == "gone"


def test_a_driver_that_hangs_is_a_stalled_source() -> None:
    ready = DriverView(ready=True)
    hung = Finding(Reason.DRIVER_HUNG, "The driver does not answer")
    assert (
        checks.driver(replace(node(), driver=ready, findings=(hung,)))
        == "stalled: The driver does not answer"
    )
    unhealthy = Finding(Reason.GPU_LOST, "Gone")
    assert checks.driver(replace(node(), driver=ready, findings=(unhealthy,))) is None


def test_a_driver_that_was_let_go_of_on_request_is_no_failure() -> None:
    assert checks.driver(replace(node(), released_until_ns=5)) is None


def test_a_task_that_does_not_run_is_not_ready() -> None:
    state = replace(node(), tasks={NVML: TaskView(running=False, failures=1, message="crashed")})
    assert checks.task(state, "nvml") == "crashed"
    assert checks.task(state, "kubelet") is None


# Preflight


FOUND = Finding(Reason.GPU_LOST, "NVML does not list the GPU any more", (GpuUuid(uuid(3)),))


async def test_preflight_shows_that_a_job_can_be_sent(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.get("/preflight")
        assert (answer.status, answer.json) == (
            200,
            {"apiVersion": "gpu-agent/v1", "ready": True, "reasons": []},
        )


@pytest.mark.parametrize("query", ["verbose", "gpus=2", "=", "x"])
async def test_preflight_rejects_parameters_that_it_does_not_read(serve: Serve, query: str) -> None:
    async with serve() as served:
        answer = await served.get(f"/preflight?{query}")
        assert (answer.status, list(answer.json)) == (400, ["apiVersion", "error"])


async def test_what_is_no_get_is_answered_with_what_is_allowed(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.get("/livez", method="POST")
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


async def test_preflight_shows_why_not(serve: Serve) -> None:
    async with serve(state=replace(node(), findings=(FOUND,))) as served:
        answer = await served.get("/preflight")
        assert answer.status == 503
        assert answer.json == {
            "apiVersion": "gpu-agent/v1",
            "ready": False,
            "reasons": [
                {
                    "code": "gpu_lost",
                    "message": "NVML does not list the GPU any more",
                    "advice": "reset the GPU or reboot the node",
                    "gpus": [uuid(3)],
                }
            ],
        }


async def test_a_standby_is_alive_and_ready_but_knows_nothing_of_the_node(serve: Serve) -> None:
    async with serve(myself=Myself(is_standby=True), is_active=False) as served:
        assert (await served.get("/readyz")).status == 200
        answer = await served.get("/preflight")
        assert (answer.status, answer.json["reasons"][0]["code"]) == (503, "standby")
        assert not served.control.exists()


# What the agent knows


def one_unhealthy() -> Snapshot:
    condition = Condition(
        key=ConditionKey(NVML, Reason.XID, Placement(GpuUuid(uuid(1))), 79),
        evidence=Evidence.HARD,
        recovery=Recovery.RESET,
        flips=True,
        message="XID 79 was reported",
        since_ns=5,
        last_ns=0,
    )
    advertised = (device(0), replace(device(1, health=Health.UNHEALTHY), reasons=(condition,)))
    state = snapshot(resource(advertised))
    views = list(state.gpus)
    views[1] = replace(views[1], conditions=(condition,))
    return replace(state, gpus=tuple(views))


async def test_devices_are_listed_with_their_reasons(serve: Serve) -> None:
    async with serve(state=one_unhealthy()) as served:
        document = (await served.get("/v1/devices")).json
        well, ill = document["devices"]
        assert document["apiVersion"] == "gpu-agent/v1"
        assert (well["id"], well["health"], well["reasons"]) == (uuid(0), "healthy", [])
        assert (ill["id"], ill["health"], ill["gpu"], ill["pci"]) == (uuid(1), "unhealthy", 1, "0000:01:00.0")
        (reason,) = ill["reasons"]
        assert (reason["code"], reason["number"], reason["flips"]) == ("xid", 79, True)
        assert (reason["since"], reason["since_monotonic_ns"]) == ("t+5", 5)
        assert reason["last"] is None  # zero: of another boot
        assert reason["gi"] is None


async def test_the_holder_of_a_device_is_shown_where_it_is_known(serve: Serve) -> None:
    async with serve() as served:
        for pods, wanted in (
            (None, [(None, None), (None, None)]),
            ({}, [(False, None), (False, None)]),
            ({DeviceId(uuid(1)): "ml/train-0"}, [(False, None), (True, "ml/train-0")]),
        ):
            served.latest.publish(replace(node(2), pods=pods))
            devices = (await served.get("/v1/devices")).json["devices"]
            assert [(each["allocated"], each["pod"]) for each in devices] == wanted


async def test_commands_and_readings_are_in_the_whole_state(serve: Serve) -> None:
    made = node(1)
    view = replace(made.gpus[0], sample=GpuSample(temperature_celsius=44))
    policy = replace(made.policy, observe=True)
    asked = replace(
        made,
        gpus=(view,),
        policy=policy,
        observed_flips=2,
        holds={uuid(0): "noisy fan"},
        released_until_ns=9,
        driver_released=True,
    )
    async with serve(state=asked) as served:
        document = (await served.get("/debug/state")).json
    wanted = {
        "holds": {uuid(0): "noisy fan"},
        "released_until": "t+9",
        "released_until_monotonic_ns": 9,
        "driver_released": True,
        "observe": True,
        "observed_flips": 2,
    }
    assert document.items() >= wanted.items()
    sample = document["gpus"][0]["sample"]
    assert (sample["temperature_celsius"], sample["ecc_uncorrected"]) == (44, None)


async def test_conditions_are_listed_by_themselves(serve: Serve) -> None:
    async with serve(state=one_unhealthy()) as served:
        (condition,) = (await served.get("/v1/conditions")).json["conditions"]
        assert (condition["code"], condition["gpu_uuid"]) == ("xid", uuid(1))


async def test_allocatable_counts_as_the_kubelet_does(serve: Serve) -> None:
    async with serve(state=node(8, unhealthy=[3])) as served:
        (counted,) = (await served.get("/v1/allocatable")).json["resources"]
        assert (counted["resource"], counted["capacity"], counted["allocatable"]) == ("nvidia.com/gpu", 8, 7)


async def test_the_list_that_the_kubelet_had_at_a_moment_is_shown_with_its_own_reasons(serve: Serve) -> None:
    ill = one_unhealthy().resources[0].devices[1]
    async with serve() as served:
        for began_ns, reasons in ((5, ill.reasons), (9, ())):
            unhealthy = (replace(ill, reasons=reasons),)
            served.myself.sent.append(ListSent(GPU, 1, 8, unhealthy, 100, 1, began_ns, began_ns))
        for at_ns, codes in ((4, None), (5, ["xid"]), (8, ["xid"]), (9, []), (0, [])):
            lists = (await served.get(f"/v1/lists?at={at_ns}")).json["lists"]
            shown = [[each["code"] for each in listed["unhealthy"][0]["reasons"]] for listed in lists]
            assert shown == ([] if codes is None else [codes])
        assert (await served.get("/v1/lists?at=soon")).status == 400


async def test_the_whole_state_is_shown_with_the_agents_own_figures(serve: Serve) -> None:
    async with serve() as served:
        document = (await served.get("/debug/state")).json
        assert document["agent"]["version"] == "9"
        assert document["agent"]["listeners"]["http"].startswith("127.0.0.1:")
        assert len(document["gpus"]) == 8


def happened(events: EventRing, *messages: str) -> None:
    for message in messages:
        events.record(RecordEvent(Event(EventKind.XID, message, fields={"xid": 79}), at_ns=7))


async def test_events_are_numbered_and_can_be_asked_from_a_number_on(serve: Serve) -> None:
    async with serve() as served:
        happened(served.events, "one", "two", "three")
        document = (await served.get("/v1/events?since=1")).json
        assert [(event["number"], event["message"]) for event in document["events"]] == [
            (2, "two"),
            (3, "three"),
        ]
        assert (document["last"], document["missed"]) == (3, 0)
        assert document["events"][0]["fields"] == {"xid": 79}


async def test_only_the_newest_events_are_kept_and_the_reader_learns_what_is_missing(serve: Serve) -> None:
    async with serve() as served:
        happened(served.events, *map(str, range(MAX_EVENTS + 10)))
        document = (await served.get("/v1/events?since=3")).json
        assert len(document["events"]) == MAX_EVENTS
        assert document["missed"] == 7


async def test_a_reader_with_the_number_of_an_earlier_agent_gets_all(serve: Serve) -> None:
    async with serve() as served:
        happened(served.events, "one")
        document = (await served.get("/v1/events?since=500&wait=30")).json
        assert [event["number"] for event in document["events"]] == [1]


async def test_a_reader_can_wait_for_the_next_event(serve: Serve) -> None:
    async with serve() as served, asyncio.TaskGroup() as group:
        happened(served.events, "old")
        waiting = group.create_task(served.get("/v1/events?since=1&wait=30"), name="waiting")
        for _ in range(20):
            await asyncio.sleep(0)
        happened(served.events, "new")
        document = (await waiting).json
        assert [event["message"] for event in document["events"]] == ["new"]


@pytest.mark.parametrize("query", ["since=x", "since=-1", "wait=1e9", "since=" + "9" * 30])
async def test_a_number_that_is_none_is_rejected(serve: Serve, query: str) -> None:
    async with serve() as served:
        assert (await served.get(f"/v1/events?{query}")).status == 400


# What each listener answers


async def test_what_names_processes_is_not_on_the_public_listener(serve: Serve) -> None:
    async with serve(http=Address("127.0.0.1", 0), api=Address("127.0.0.2", 0)) as served:
        assert (await served.get("/preflight", listener="http")).status == 200
        for path in ("/v1/devices", "/v1/events", "/v1/contexts", "/v1/owners", "/debug/state"):
            assert (await served.get(path, listener="http")).status == 404
            assert (await served.get(path, listener="api")).status == 200
            assert (await served.get(path, listener="control")).status == 200


async def test_nothing_but_reading_is_possible(serve: Serve) -> None:
    async with serve() as served:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await served.get("/v1/devices", method=method)).status == 405
        head = await served.get("/livez", method="HEAD")
        assert (head.status, head.body) == (200, "")


@pytest.mark.parametrize(("host", "status"), [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:9", 200)])
async def test_this_machine_may_be_called_by_its_own_names(serve: Serve, host: str, status: int) -> None:
    async with serve() as served:
        assert (await served.get("/v1/devices", host=host)).status == status


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9470", "10.0.0.1", "localhost.evil.example"])
async def test_a_page_in_a_browser_cannot_ask_by_a_name_of_its_own(serve: Serve, host: str) -> None:
    async with serve() as served:
        assert (await served.get("/v1/devices", host=host)).status == 403


async def test_the_control_socket_is_for_root_only(serve: Serve) -> None:
    async with serve() as served:
        assert stat.S_IMODE(served.control.stat().st_mode) == 0o600
        assert (await served.get("/v1/devices", listener="control")).status == 200


async def test_the_control_socket_is_removed_at_the_end(serve: Serve) -> None:
    async with serve() as served:
        pass
    assert not served.control.exists()


async def test_a_socket_that_is_not_ours_any_more_is_left_alone(serve: Serve) -> None:
    async with serve() as served:
        served.control.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(served.control))
    assert served.control.exists()


async def test_a_dead_socket_in_the_place_of_the_control_socket_is_replaced(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "run" / "control.sock"))
    async with serve() as served:
        assert (await served.get("/livez", listener="control")).status == 200


# Bounds


async def test_a_port_in_use_is_logged_once_and_tried_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "RETRY_S", 0.01)
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        address = Address("127.0.0.1", occupied.getsockname()[1])
        async with asyncio.TaskGroup() as group:
            served = group.create_task(_serve_for_a_while(serve, address, occupied), name="served")
        assert served.result() == 200
    lines = [record for record in caplog.records if record.message.startswith("Could not listen")]
    assert len(lines) == 1
    assert lines[0].message.startswith(f"Could not listen on {address}: Address already in use; trying again")


async def _serve_for_a_while(serve: Serve, address: Address, occupied: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, occupied.close)
    async with serve(http=address, api=address) as served:
        answer: Answer = await served.get("/livez")
        return answer.status


async def ended(connection: Connection) -> bytes:
    """Return what came on a connection until the agent closed it."""
    reader, writer = connection
    async with asyncio.timeout(30):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


async def test_connections_without_a_request_keep_no_probe_out(serve: Serve) -> None:
    async with serve(bounds=Bounds(heads=3)) as served:
        first = await served.connect()
        others = [await served.connect() for _ in range(2)]
        first[1].write(b"GET /livez HTTP/1.1\r\nHost: ")
        neighbour = await served.connect(source="127.0.0.2")
        assert await ended(first) == b""
        # What comes of the greedy address costs that alone.
        others += [await served.connect() for _ in range(5)]
        assert (await served.get("/livez")).status == 200
        assert (await ask(neighbour, "/livez")).status == 200
        for _, writer in others:
            writer.close()


async def test_a_request_that_does_not_come_is_not_waited_for(serve: Serve) -> None:
    async with serve(bounds=Bounds(head_s=0.0, sweep_s=0.01)) as served:
        assert await ended(await served.connect()) == b""


async def test_a_request_may_come_in_pieces(serve: Serve) -> None:
    async with serve() as served:
        reader, writer = await served.connect()
        for piece in (b"GET /li", b"vez HTTP/1.1\r\nHost: localhost\r\n", b"\r\n"):
            writer.write(piece)
            await asyncio.sleep(0.005)
        async with asyncio.timeout(30):
            assert (await reader.read()).endswith(b"ok")
        writer.close()


def waiting(places: int, within_s: float = 45.0) -> Bounds:
    usual = Bounds()
    return replace(usual, rooms={**usual.rooms, Kind.EVENTS: Room(places, within_s)})


async def wait_for_an_event(served: Served, source: str | None = None) -> Connection:
    connection = await served.connect(source=source)
    connection[1].write(
        f"GET /v1/events?wait=30&since={served.events.last} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    )
    return connection


async def test_readers_that_wait_take_their_own_places_and_the_greediest_gives_way(serve: Serve) -> None:
    async with serve(http=LOCAL, api=LOCAL, bounds=waiting(2)) as served:
        greedy = [await wait_for_an_event(served) for _ in range(2)]
        rejected = await ended(await wait_for_an_event(served))
        assert rejected.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in rejected
        for target in ("/livez", "/preflight", "/v1/devices"):
            assert (await served.get(target)).status in (200, 503)
        neighbour = await wait_for_an_event(served, source="127.0.0.2")
        assert await ended(greedy[1]) == b""
        happened(served.events, "new")
        for connection in (greedy[0], neighbour):
            assert (await ended(connection)).startswith(b"HTTP/1.1 200 ")


async def test_a_request_has_its_place_for_the_time_of_its_kind(serve: Serve) -> None:
    async with serve(bounds=waiting(1, within_s=0.05)) as served:
        assert await ended(await wait_for_an_event(served)) == b""
        assert not (await ended(await wait_for_an_event(served))).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    "path", ["/livez/../v1/events", "//v1/events", "/livez/%2e%2e/v1/events", "/./livez"]
)
async def test_no_request_gets_the_place_of_another_kind(serve: Serve, path: str) -> None:
    async with serve() as served:
        assert (await served.get(path)).status == 400


@pytest.mark.parametrize(
    ("target", "head", "status"),
    [
        ("/livez?" + "x" * 10_000, "", 431),
        ("/livez", f"X: {'y' * 10_000}\r\n", 431),
        ("/livez", "".join(f"X{number}: y\r\n" for number in range(500)), 400),
    ],
)
async def test_giant_requests_are_rejected(serve: Serve, target: str, head: str, status: int) -> None:
    async with serve() as served:
        answer = await served.get(target, head=head)
        assert answer.status == status
        assert (await served.get("/livez")).status == 200


async def test_garbage_is_rejected_and_others_go_on(serve: Serve) -> None:
    async with serve() as served:
        reader, writer = await served.connect()
        writer.write(os.urandom(2000) + b"\r\n\r\n")
        async with asyncio.timeout(30):
            assert b" 400 " in (await reader.read(64))
        writer.close()
        assert (await served.get("/livez")).status == 200


# Commands


async def command(
    served: Served, name: str, body: str, *, listener: str = "control", head: str = ""
) -> Answer:
    head = head or f"Content-Length: {len(body.encode())}\r\n"
    return await served.get(f"/control/v1/{name}", listener=listener, method="POST", head=head, body=body)


async def test_a_command_over_the_control_socket_is_executed_and_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        with caplog.at_level(logging.INFO):
            answer = await command(served, "hold", '{"selector": "3", "why": "fan"}')
        assert (answer.status, answer.json) == (200, {"message": "did hold"})
        assert served.commands.given == [("hold", {"selector": "3", "why": "fan"})]
        (record,) = (record for record in caplog.records if record.message.startswith("Executed hold "))
        assert record.args == {
            "command": "hold",
            "by_process": os.getpid(),
            "by_user": os.geteuid(),
            "selector": "3",
            "why": "fan",
        }


@pytest.mark.parametrize("listener", ["http", "api"])
async def test_nothing_over_tcp_gives_commands(serve: Serve, listener: str) -> None:
    async with serve(api=Address("127.0.0.2", 0)) as served:
        answer = await command(served, "hold", "{}", listener=listener)
        assert answer.status == 405
        assert served.commands.given == []


async def test_an_order_is_no_question(serve: Serve) -> None:
    async with serve() as served:
        assert (await served.get("/control/v1/hold", listener="control")).status == 404
        assert (await command(served, "explode", "{}")).json["error"] == "There is no such command"
        answer = await served.get("/v1/devices", listener="control", method="POST")
        assert answer.status == 404
        assert served.commands.given == []


@pytest.mark.parametrize(
    ("error", "status"), [(UsageError("No such GPU"), 400), (AgentError("Not occupied in time"), 409)]
)
async def test_a_command_that_is_not_executed_is_answered_with_why(
    serve: Serve, error: AgentError, status: int
) -> None:
    async with serve() as served:
        served.commands.error = error
        answer = await command(served, "hold", "{}")
        assert (answer.status, answer.json["error"]) == (status, str(error))


@pytest.mark.parametrize("body", ["", "{", "\x00", "[" * 5_000, '{"a": ' * 800])
async def test_a_command_that_makes_no_sense_is_rejected(serve: Serve, body: str) -> None:
    async with serve() as served:
        assert (await command(served, "hold", body)).status == 400
        assert served.commands.given == []


@pytest.mark.parametrize(
    "head", [f"Content-Length: {http_server.MAX_BODY_BYTES + 1}\r\n", "Transfer-Encoding: chunked\r\n"]
)
async def test_an_order_too_long_or_of_unknown_length_is_not_read(serve: Serve, head: str) -> None:
    async with serve() as served:
        answer = await command(served, "hold", "", head=head)
        assert answer.status == 400
        assert "Content-Length" in answer.json["error"]


async def test_an_order_that_does_not_come_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "BODY_S", 0.05)
    async with serve() as served:
        answer = await command(served, "hold", "{", head="Content-Length: 100\r\n")
        assert (answer.status, answer.json["error"]) == (400, "The body did not come within 0.05 s")
