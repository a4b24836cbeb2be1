"""What systemd is sent, over real datagram sockets."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.bus import Latest
from agent.model.health import Health
from agent.model.policy import SECOND_NS
from agent.model.snapshot import DriverView, RegistrationPhase, Snapshot
from agent.model.structs import replace
from agent.sinks.notify import Notifier, status_line
from tests.sinks.snapshots import devices, node, resource, snapshot


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.setblocking(False)
        yield bound


MakeNotifier = Callable[..., Notifier]


@pytest.fixture
def notifier(manager: socket.socket) -> Iterator[MakeNotifier]:
    made: list[Notifier] = []

    def make(**environment: str) -> Notifier:
        made.append(Notifier({"NOTIFY_SOCKET": manager.getsockname()} | environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


def received(manager: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(manager.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_states_are_sent_as_systemd_reads_them(manager: socket.socket, notifier: MakeNotifier) -> None:
    sender = notifier()
    sender.ready()
    sender.reloading()
    sender.stopping()
    ready, reloading, stopping = received(manager)
    assert (ready, stopping) == ("READY=1", "STOPPING=1")
    assert reloading.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert reloading.rpartition("=")[2].isdigit()


def test_an_abstract_socket_is_found_by_its_at_sign(notifier: MakeNotifier) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        name = f"gpu-agent-test-{os.getpid()}"
        bound.bind(f"\0{name}")
        notifier(NOTIFY_SOCKET=f"@{name}").ready()
        assert bound.recv(64) == b"READY=1"


def test_without_a_manager_nothing_is_sent_and_nothing_fails(notifier: MakeNotifier) -> None:
    sender = notifier(NOTIFY_SOCKET="")
    sender.ready()
    sender.feed(0)
    assert sender.watchdog_ns is None


def test_a_manager_that_is_gone_is_ignored(tmp_path: Path, notifier: MakeNotifier) -> None:
    notifier(NOTIFY_SOCKET=str(tmp_path / "gone")).ready()


def test_a_manager_that_does_not_read_never_blocks_the_agent(
    manager: socket.socket, notifier: MakeNotifier
) -> None:
    sender = notifier()
    for number in range(5_000):
        sender.status(f"state {number}")
    assert 0 < len(received(manager)) < 5_000


def test_the_watchdog_is_fed_well_before_half_of_its_time_is_over(
    manager: socket.socket, notifier: MakeNotifier
) -> None:
    sender = notifier(WATCHDOG_USEC="8000000")
    for second in range(20):
        sender.feed(second * SECOND_NS)
    assert received(manager) == ["WATCHDOG=1"] * 10


def test_the_watchdog_of_another_process_is_not_ours(notifier: MakeNotifier) -> None:
    assert notifier(WATCHDOG_USEC="1000", WATCHDOG_PID="1").watchdog_ns is None
    assert notifier(WATCHDOG_USEC="1000", WATCHDOG_PID=str(os.getpid())).watchdog_ns == 1_000_000
    assert notifier(WATCHDOG_USEC="0").watchdog_ns is None
    assert notifier(WATCHDOG_USEC="soon").watchdog_ns is None


async def test_more_time_to_start_is_asked_for_until_the_driver_answers(
    manager: socket.socket, notifier: MakeNotifier
) -> None:
    sender = notifier()
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(sender.extend_start(0.001), name="extension")
        assert await loop.sock_recv(manager, 64) == b"EXTEND_TIMEOUT_USEC=30000000"
        assert await loop.sock_recv(manager, 64) == b"EXTEND_TIMEOUT_USEC=30000000"
        task.cancel()


async def test_the_status_line_follows_the_node_and_is_sent_once(
    manager: socket.socket, notifier: MakeNotifier
) -> None:
    latest = Latest(node())
    sender = notifier()
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(sender.run(latest), name="status line")
        first = await loop.sock_recv(manager, 256)
        latest.publish(replace(node(), at_ns=1))
        latest.publish(healthy(registered=True))
        second = await loop.sock_recv(manager, 256)
        task.cancel()
    assert (first, second) == (
        b"STATUS=8 GPUs, waiting for the driver",
        b"STATUS=8 GPUs, registered",
    )


def healthy(*, registered: bool) -> Snapshot:
    phase = RegistrationPhase.REGISTERED if registered else RegistrationPhase.BACKING_OFF
    advertised = replace(resource(devices(8)), phase=phase)
    return replace(snapshot(advertised), driver=DriverView(ready=True))


def test_the_status_line_counts_what_is_not_well() -> None:
    state = healthy(registered=False)
    views = list(state.gpus)
    views[0] = replace(views[0], health=Health.UNHEALTHY)
    views[1] = replace(views[1], health=Health.UNKNOWN)
    state = replace(state, gpus=tuple(views))
    assert status_line(state) == "8 GPUs, 1 unhealthy, 1 unknown, not registered"
    assert status_line(replace(state, gpus=state.gpus[2:3], resources=())) == "1 GPU"
