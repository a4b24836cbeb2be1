"""The kubelet source over a real directory, real sockets and real inotify."""

import asyncio
import logging
import os
import resource
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent.bus import Latest
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.model.facts import KubeletSocketSeen, OwnSocketLost, WatchedDirectoryDeleted
from agent.model.ids import ResourceName, SocketIdentity, socket_name
from agent.model.policy import Policy
from agent.model.snapshot import RegistrationPhase, Resource, Snapshot
from agent.model.structs import replace
from agent.sources.kubelet import KubeletSettings, KubeletSource, identity_of
from tests.sources.recorder import Recorder, until

MS = 1_000_000
GPU = ResourceName("nvidia.com/gpu")

BY_EVENTS = KubeletSettings(
    recheck_ns=3_600_000 * MS, poll_ns=3_600_000 * MS, watch_retry_ns=0, deletion_grace_ns=50 * MS
)
"""Only events trigger polls."""
BY_POLLING = replace(BY_EVENTS, recheck_ns=20 * MS, poll_ns=20 * MS, watch_retry_ns=20 * MS)


def make_socket(path: Path) -> SocketIdentity:
    """Create a socket file, under another name first so that it appears complete, as another file."""
    draft = path.with_name(".draft")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(draft))
    draft.rename(path)
    return identity_of(path.lstat())


def empty_snapshot() -> Snapshot:
    return snapshot_of(initial_state(Policy(), None, now_ns=0))


def registered(identity: SocketIdentity, generation: int = 1, name: ResourceName = GPU) -> Resource:
    return Resource(
        name=name,
        devices=(),
        phase=RegistrationPhase.REGISTERED,
        generation=generation,
        message="",
        since_ns=0,
        socket=identity,
    )


class Watched:
    """A directory under watch."""

    def __init__(self, directory: Path, recorder: Recorder) -> None:
        self.directory = directory
        self.socket = directory / "kubelet.sock"
        self.own = directory / socket_name(GPU)
        self.latest = Latest(empty_snapshot())
        self.recorder = recorder

    def publish(self, *resources: Resource) -> None:
        self.latest.publish(replace(self.latest.value, resources=resources))

    async def seen(self, identity: SocketIdentity | None) -> None:
        """Wait until the newest fact on the kubelet's socket is this one."""

        def is_newest() -> bool:
            emitted = self.recorder.of(KubeletSocketSeen)
            return bool(emitted) and emitted[-1].identity == identity

        await self.recorder.until(is_newest)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "device-plugins"
    made.mkdir()
    return made


Watch = Callable[..., Awaitable[Watched]]


@pytest.fixture
async def watch(directory: Path, recorder: Recorder) -> AsyncIterator[Watch]:
    tasks: list[asyncio.Task[None]] = []

    async def start(settings: KubeletSettings = BY_EVENTS) -> Watched:
        watched = Watched(directory, recorder)
        source = KubeletSource(
            inbox=recorder.inbox,
            latest=watched.latest,
            kubelet_socket=watched.socket,
            clock=time.monotonic_ns,
            settings=settings,
        )
        tasks.append(asyncio.get_running_loop().create_task(source.run(), name="kubelet"))
        await recorder.first(KubeletSocketSeen)
        return watched

    yield start
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


# The kubelet's socket


async def test_a_missing_socket_is_emitted_as_absent_once(watch: Watch) -> None:
    watched = await watch(BY_POLLING)
    await asyncio.sleep(0.1)
    assert watched.recorder.of(KubeletSocketSeen) == [KubeletSocketSeen(identity=None)]


async def test_a_socket_that_exists_at_the_start_is_emitted(watch: Watch, directory: Path) -> None:
    identity = make_socket(directory / "kubelet.sock")
    watched = await watch()
    assert watched.recorder.of(KubeletSocketSeen) == [KubeletSocketSeen(identity=identity)]


async def test_a_new_socket_is_emitted(watch: Watch) -> None:
    watched = await watch()
    identity = make_socket(watched.socket)
    await watched.seen(identity)


async def test_a_bound_socket_is_emitted_with_its_final_identity(watch: Watch) -> None:
    watched = await watch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(watched.socket))
        watched.socket.chmod(0o600)
        listener.listen()
        await watched.seen(identity_of(watched.socket.lstat()))


async def test_a_second_event_for_the_same_file_emits_nothing(watch: Watch) -> None:
    watched = await watch()
    identity = make_socket(watched.socket)
    await watched.seen(identity)
    away = watched.directory / ".away"
    watched.socket.rename(away)
    away.rename(watched.socket)
    other = make_socket(watched.directory / "other.sock")
    watched.publish(registered(other, name=ResourceName("nvidia.com/absent")))
    await watched.recorder.first(OwnSocketLost)
    assert watched.recorder.of(KubeletSocketSeen)[1:] == [KubeletSocketSeen(identity=identity)]


async def test_another_socket_at_the_same_path_is_emitted(watch: Watch) -> None:
    watched = await watch()
    first = make_socket(watched.socket)
    await watched.seen(first)
    second = make_socket(watched.socket)
    await watched.seen(second)
    assert first != second


async def test_a_deleted_socket_is_emitted_as_absent(watch: Watch) -> None:
    watched = await watch()
    await watched.seen(make_socket(watched.socket))
    watched.socket.unlink()
    await watched.seen(None)


async def test_a_renamed_socket_is_emitted_as_absent(watch: Watch) -> None:
    watched = await watch()
    await watched.seen(make_socket(watched.socket))
    watched.socket.rename(watched.directory / "moved.sock")
    await watched.seen(None)


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
async def test_what_is_no_socket_is_absent_with_one_warning(
    watch: Watch, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched = await watch(BY_POLLING)
    await watched.seen(make_socket(watched.socket))
    watched.socket.unlink()
    match kind:
        case "file":
            watched.socket.write_text("")
        case "directory":
            watched.socket.mkdir()
        case _:
            watched.socket.symlink_to(watched.directory / "elsewhere.sock")
    await watched.seen(None)
    await until(lambda: bool(warnings(caplog)))
    await asyncio.sleep(0.1)
    assert warnings(caplog) == [f"The kubelet's socket path is not a socket: {watched.socket}"]


# Our own sockets


async def test_a_deleted_own_socket_is_emitted_with_its_generation(watch: Watch) -> None:
    watched = await watch()
    watched.publish(registered(make_socket(watched.own), generation=3))
    watched.own.unlink()
    assert await watched.recorder.first(OwnSocketLost) == OwnSocketLost(resource=GPU, generation=3)


async def test_a_replaced_own_socket_is_emitted(watch: Watch) -> None:
    watched = await watch()
    watched.publish(registered(make_socket(watched.own)))
    make_socket(watched.own)
    assert await watched.recorder.first(OwnSocketLost) == OwnSocketLost(resource=GPU, generation=1)


async def test_an_own_socket_deleted_before_its_registration_was_published_is_emitted(watch: Watch) -> None:
    watched = await watch()
    identity = make_socket(watched.own)
    watched.own.unlink()
    make_socket(watched.socket)
    await watched.recorder.first(KubeletSocketSeen, lambda fact: fact.identity is not None)
    watched.publish(registered(identity))
    assert await watched.recorder.first(OwnSocketLost) == OwnSocketLost(resource=GPU, generation=1)


async def test_a_lost_socket_is_emitted_once_in_a_generation(watch: Watch) -> None:
    watched = await watch(BY_POLLING)
    identity = make_socket(watched.own)
    watched.publish(registered(identity))
    watched.own.unlink()
    await watched.recorder.first(OwnSocketLost)
    await asyncio.sleep(0.1)
    assert len(watched.recorder.of(OwnSocketLost)) == 1
    watched.publish(registered(identity, generation=2))
    await watched.recorder.first(OwnSocketLost, lambda fact: fact.generation == 2)


async def test_a_present_own_socket_is_not_emitted(watch: Watch) -> None:
    watched = await watch(BY_POLLING)
    identity = make_socket(watched.own)
    watched.publish(registered(identity))
    watched.own.chmod(0o600)
    await asyncio.sleep(0.1)
    assert watched.recorder.of(OwnSocketLost) == []


async def test_the_sockets_of_several_resources_are_distinguished(watch: Watch) -> None:
    watched = await watch()
    mig = ResourceName("nvidia.com/mig-1g.5gb")
    watched.publish(
        registered(make_socket(watched.own)),
        registered(make_socket(watched.directory / "nvidia-mig-1g.5gb.sock"), name=mig),
    )
    (watched.directory / "nvidia-mig-1g.5gb.sock").unlink()
    assert await watched.recorder.first(OwnSocketLost) == OwnSocketLost(resource=mig, generation=1)


# The directory


async def test_a_missing_directory_is_waited_for(
    watch: Watch, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    directory.rmdir()
    watched = await watch(replace(BY_EVENTS, poll_ns=20 * MS))
    await asyncio.sleep(0.1)
    (line,) = caplog.messages
    assert line.startswith("Waiting for the kubelet's directory: ")
    directory.mkdir()
    await watched.seen(make_socket(watched.socket))
    assert watched.recorder.of(WatchedDirectoryDeleted) == []


async def test_a_recreated_directory_is_watched_again(watch: Watch) -> None:
    watched = await watch(replace(BY_EVENTS, poll_ns=20 * MS, deletion_grace_ns=3_600_000 * MS))
    await watched.seen(make_socket(watched.socket))
    watched.socket.unlink()
    watched.directory.rmdir()
    await watched.seen(None)
    watched.directory.mkdir()
    await watched.seen(make_socket(watched.socket))
    assert watched.recorder.of(WatchedDirectoryDeleted) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
async def test_a_recreated_directory_that_is_not_writable_is_emitted_as_deleted(
    watch: Watch, directory: Path
) -> None:
    # As in the unit's namespace, where only the directory at the start is writable.
    fresh, link = directory.with_name("fresh"), directory.with_name("link")
    fresh.mkdir()
    link.symlink_to(fresh)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", fresh], check=True)
    try:
        watched = await watch(BY_POLLING)
        await watched.seen(make_socket(watched.socket))
        directory.rename(directory.with_name("old"))
        link.rename(directory)
        assert (await watched.recorder.first(WatchedDirectoryDeleted)).path == str(directory)
    finally:
        subprocess.run(["umount", "-l", fresh], check=True)


async def test_a_replaced_directory_is_watched(watch: Watch) -> None:
    watched = await watch()
    await watched.seen(make_socket(watched.socket))
    fresh = watched.directory.with_name("fresh")
    fresh.mkdir()
    identity = make_socket(fresh / "kubelet.sock")
    watched.directory.rename(watched.directory.with_name("old"))
    fresh.rename(watched.directory)
    await watched.seen(identity)
    await watched.seen(make_socket(watched.socket))


async def test_a_deleted_directory_is_emitted_once(watch: Watch) -> None:
    watched = await watch(replace(BY_EVENTS, poll_ns=20 * MS))
    watched.directory.rmdir()
    emitted = await watched.recorder.first(WatchedDirectoryDeleted)
    assert emitted == WatchedDirectoryDeleted(path=str(watched.directory))
    await asyncio.sleep(0.1)
    assert len(watched.recorder.of(WatchedDirectoryDeleted)) == 1


async def test_a_deleted_directory_that_a_mount_keeps_alive_is_emitted_at_once(
    directory: Path, recorder: Recorder
) -> None:
    # Like a bind mount, the link in /proc leads to a directory that was deleted.
    kept = os.open(directory, os.O_PATH)
    source = KubeletSource(
        inbox=recorder.inbox,
        latest=Latest(empty_snapshot()),
        kubelet_socket=Path(f"/proc/self/fd/{kept}/kubelet.sock"),
        clock=time.monotonic_ns,
        settings=replace(BY_POLLING, deletion_grace_ns=3_600_000 * MS),
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(source.run())
        await recorder.first(KubeletSocketSeen)
        directory.rmdir()
        directory.mkdir()
        assert (await recorder.first(WatchedDirectoryDeleted)).path == f"/proc/self/fd/{kept}"
        task.cancel()
    os.close(kept)


# The limits of inotify


@pytest.fixture
def no_descriptors_left() -> Iterator[Callable[[], None]]:
    """Return a function that opens every free descriptor; they are closed at the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []

    def open_all() -> None:
        probe = os.open(os.devnull, os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 1, before[1]))
        opened.append(probe)
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))

    yield open_all
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for descriptor in opened:
        os.close(descriptor)


async def test_without_inotify_the_directory_is_polled(
    watch: Watch, no_descriptors_left: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    no_descriptors_left()
    watched = await watch(BY_POLLING)
    listeners[0].bind(str(watched.socket))
    await watched.seen(identity_of(watched.socket.lstat()))
    watched.socket.unlink()
    listeners[1].bind(str(watched.socket))
    await watched.seen(identity_of(watched.socket.lstat()))
    for listener in listeners:
        listener.close()
    assert len(warnings(caplog)) == 1
    assert "fs.inotify.max_user_instances" in warnings(caplog)[0]


async def test_inotify_is_used_again_once_its_limits_allow(
    watch: Watch, no_descriptors_left: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    no_descriptors_left()
    await watch(replace(BY_POLLING, recheck_ns=3_600_000 * MS))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await until(lambda: "is watched again" in caplog.text)


# Event storms


async def test_a_socket_created_amid_a_storm_of_events_is_emitted(watch: Watch) -> None:
    watched = await watch()
    for number in range(2_000):
        (watched.directory / f"{number % 7}").touch()
        (watched.directory / f"{number % 7}").unlink()
    identity = make_socket(watched.socket)
    await watched.seen(identity)
