"""Fault 2, sink part: whatever took our socket's place stays, and is named; ours is made anew."""

import os
import shutil
import socket
from pathlib import Path

import pytest

from agent.model.facts import Registered, RegistrationFailed
from agent.sinks.plugin.socket_file import identity_of, listen
from tests.sinks.raw_http2 import PATIENCE_S
from tests.sinks.registrar import registrar
from tests.sinks.servers import Sink, sink


async def wait_outcome(served: Sink, generation: int) -> Registered | RegistrationFailed:
    served.register(generation)
    fact = await served.wait_fact(Registered, RegistrationFailed)
    assert isinstance(fact, Registered | RegistrationFailed)
    assert fact.generation == generation
    return fact


async def test_a_deleted_socket_is_made_anew_and_registered(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        first = await wait_outcome(served, 1)
        served.socket.unlink()
        second = await wait_outcome(served, 2)
        assert isinstance(first, Registered)
        assert isinstance(second, Registered)
        assert second.socket == identity_of(served.socket) != first.socket
        # The kubelet reached the new one while it was registered.
        assert len(kubelet.options) == 2


@pytest.mark.parametrize("kind", ["file", "directory", "link", "served"])
async def test_what_took_the_sockets_place_stays_and_is_named_until_it_is_gone(
    tmp_path: Path, kind: str
) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        await wait_outcome(served, 1)
        served.socket.unlink()
        other: socket.socket | None = None
        match kind:
            case "file":
                served.socket.write_text("precious")
            case "directory":
                served.socket.mkdir()
            case "link":
                served.socket.symlink_to(tmp_path / "kubelet.sock")
            case _:
                other = listen(served.socket, backlog=1)
        before = identity_of(served.socket)
        failed = await wait_outcome(served, 2)
        assert isinstance(failed, RegistrationFailed)
        assert failed.failure == "socket_in_use"
        assert str(served.socket) in failed.message
        assert identity_of(served.socket) == before
        assert len(kubelet.requests) == 1
        if other is not None:
            other.close()
        elif kind == "directory":
            served.socket.rmdir()
        else:
            served.socket.unlink()
        assert isinstance(await wait_outcome(served, 3), Registered)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_a_socket_of_another_owner_is_not_removed(tmp_path: Path) -> None:
    async with registrar(tmp_path), sink(tmp_path) as served:
        listen(served.socket, backlog=1).close()
        os.chown(served.socket, 65534, 65534)
        failed = await wait_outcome(served, 1)
        assert isinstance(failed, RegistrationFailed)
        assert (failed.failure, "65534" in failed.message) == ("socket_in_use", True)
        assert served.socket.is_socket()


async def test_a_drain_does_not_remove_what_took_the_sockets_place(tmp_path: Path) -> None:
    async with registrar(tmp_path), sink(tmp_path) as served:
        await wait_outcome(served, 1)
        served.socket.unlink()
        served.socket.write_text("precious")
        await served.plugin.drain(PATIENCE_S)
        assert served.socket.read_text() == "precious"


async def test_a_directory_deleted_and_made_anew_is_served_again(tmp_path: Path) -> None:
    directory = tmp_path / "device-plugins"
    directory.mkdir()
    async with sink(directory) as served:
        async with registrar(directory):
            assert isinstance(await wait_outcome(served, 1), Registered)
        shutil.rmtree(directory)
        failed = await wait_outcome(served, 2)
        assert isinstance(failed, RegistrationFailed)
        assert failed.failure == "absent"
        directory.mkdir()
        async with registrar(directory):
            assert isinstance(await wait_outcome(served, 3), Registered)
