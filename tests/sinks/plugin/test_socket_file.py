"""Whose file a socket path is, and what may be done to it."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.model.ids import ResourceName
from agent.sinks.plugin.socket_file import (
    MAX_ENTRIES,
    MAX_PATH_BYTES,
    NotRegisteredError,
    clear_leftover,
    clear_leftovers,
    identity_of,
    listen,
    remove,
    socket_path,
)


def abandoned_at(path: Path) -> Path:
    """Leave a socket file whose owner is gone."""
    listen(path, backlog=1).close()
    return path


@pytest.fixture
def leftover(tmp_path: Path) -> Path:
    """A socket file whose owner is gone."""
    return abandoned_at(tmp_path / "nvidia-gpu.sock")


@pytest.fixture
def in_use(tmp_path: Path) -> Iterator[Path]:
    """A socket that another process serves."""
    path = tmp_path / "nvidia-gpu.sock"
    with listen(path, backlog=1):
        yield path


def test_a_socket_is_open_to_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-gpu.sock"
    before = os.umask(0)
    try:
        with listen(path, backlog=1):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_leftover_is_replaced(leftover: Path) -> None:
    old = identity_of(leftover)
    with listen(leftover, backlog=1):
        assert identity_of(leftover) != old


def test_sockets_of_resources_that_are_served_no_more_are_cleared(tmp_path: Path) -> None:
    for name in ("nvidia-gpu.sock", "nvidia-gpu.shared.sock", "nvidia-mig-1g.10gb.me.sock"):
        abandoned_at(tmp_path / name)
    others = ("kubelet.sock", "nvidia-fs.sock", "amd-gpu.sock")
    for name in others:
        abandoned_at(tmp_path / name)
    with listen(tmp_path / "nvidia-mig-7g.80gb.sock", backlog=1):
        assert clear_leftovers(tmp_path) == (
            "nvidia-gpu.shared.sock",
            "nvidia-gpu.sock",
            "nvidia-mig-1g.10gb.me.sock",
        )
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, "nvidia-mig-7g.80gb.sock"}


def test_what_only_has_the_name_of_a_resources_socket_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "nvidia-gpu.sock").mkdir()
    (tmp_path / "nvidia-mig-1g.5gb.sock").touch()
    assert clear_leftovers(tmp_path) == ()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_of_any_size_is_searched_in_bounded_time(tmp_path: Path) -> None:
    for number in range(MAX_ENTRIES + 2):
        abandoned_at(tmp_path / f"nvidia-mig-{number}g.5gb.sock")
    assert len(clear_leftovers(tmp_path)) == MAX_ENTRIES


def test_without_a_directory_there_is_nothing_to_clear(tmp_path: Path) -> None:
    assert clear_leftovers(tmp_path / "none") == ()


def test_there_is_nothing_to_clear_in_an_empty_place(tmp_path: Path) -> None:
    assert not clear_leftover(tmp_path / "nvidia-gpu.sock")


def test_a_socket_of_another_server_is_left_alone(in_use: Path) -> None:
    before = identity_of(in_use)
    with pytest.raises(NotRegisteredError, match=r"nvidia-gpu\.sock; stop the other") as raised:
        listen(in_use, backlog=1)
    assert raised.value.failure == "socket_in_use"
    assert identity_of(in_use) == before


def test_a_socket_whose_owner_is_too_busy_to_accept_is_left_alone(in_use: Path) -> None:
    waiting = []
    try:
        while True:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            waiting.append(client)
            if client.connect_ex(str(in_use)):
                break
        with pytest.raises(NotRegisteredError, match="Another process serves"):
            listen(in_use, backlog=1)
    finally:
        for client in waiting:
            client.close()


@pytest.mark.parametrize(
    ("kind", "words"), [("file", "a file"), ("directory", "a directory"), ("link", "a symbolic link")]
)
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / "nvidia-gpu.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        (tmp_path / "elsewhere.sock").touch()
        path.symlink_to(tmp_path / "elsewhere.sock")
    before = identity_of(path)
    with pytest.raises(NotRegisteredError, match=words) as raised:
        listen(path, backlog=1)
    assert raised.value.failure == "socket_in_use"
    assert identity_of(path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_socket_of_another_user_is_left_alone(leftover: Path) -> None:
    os.lchown(leftover, 65534, 65534)
    with pytest.raises(NotRegisteredError, match="belongs to user 65534"):
        listen(leftover, backlog=1)
    assert leftover.is_socket()


def test_only_the_file_we_made_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-gpu.sock"
    with listen(path, backlog=1):
        ours = identity_of(path)
        path.rename(tmp_path / "moved.sock")
        path.write_text("another's")
        remove(path, ours)
        assert path.read_text() == "another's"
        path.unlink()
        (tmp_path / "moved.sock").rename(path)
        remove(path, ours)
        assert not path.exists()
    remove(path, ours)
    remove(path, None)


def test_a_directory_that_does_not_exist_is_an_absent_kubelet(tmp_path: Path) -> None:
    with pytest.raises(NotRegisteredError, match="appears when the kubelet starts") as raised:
        listen(tmp_path / "none" / "nvidia-gpu.sock", backlog=1)
    assert raised.value.failure == "absent"


def test_a_parent_that_is_no_directory_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotRegisteredError, match=r"file/nvidia-gpu\.sock") as raised:
        listen(tmp_path / "file" / "nvidia-gpu.sock", backlog=1)
    assert raised.value.failure == "not_served"


def test_a_path_that_no_socket_can_have_is_rejected_with_its_length(tmp_path: Path) -> None:
    fitting = ResourceName("nvidia.com/" + "x" * 20)
    directory = tmp_path / ("d" * (MAX_PATH_BYTES - len(str(tmp_path)) - 1 - len("/nvidia-.sock") - 20))
    assert len(str(socket_path(directory, fitting))) == MAX_PATH_BYTES
    with pytest.raises(NotRegisteredError, match=f"{MAX_PATH_BYTES + 1} bytes") as raised:
        socket_path(directory, ResourceName(fitting + "x"))
    assert raised.value.failure == "not_served"


@pytest.mark.parametrize(
    "name",
    [
        "gpu",
        "nvidia.com/",
        "nvidia.com/../../etc/x",
        "nvidia.com/a/b",
        "nvidia.com/..",
        "nvidia.com/a\0b",
        "nvidia.com/gpu\n",
    ],
)
def test_a_name_that_is_no_resource_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotRegisteredError, match="not a valid resource name"):
        socket_path(tmp_path, ResourceName(name))


@pytest.mark.parametrize(
    "name", ["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared", "amd.com/x"]
)
def test_a_resource_is_served_beside_the_kubelets_socket(tmp_path: Path, name: str) -> None:
    assert socket_path(tmp_path, ResourceName(name)) == tmp_path / f"nvidia-{name.partition('/')[2]}.sock"
