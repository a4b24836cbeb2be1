"""What is checked before the agent starts: paths, rights, the lock of the node."""

import os
import socket
import threading
from pathlib import Path

import pytest

from agent.config.load import load
from agent.config.settings import Settings
from agent.errors import AgentError, MissingRightsError, UsageError
from agent.runtime.bootstrap import NodeLock, boot_id_of, check_paths, check_rights


def settings(tmp_path: Path, **flags: str) -> Settings:
    defaults = {
        "state-dir": str(tmp_path / "state"),
        "control-socket": str(tmp_path / "control.sock"),
        "kubelet-socket": str(tmp_path / "kubelet.sock"),
    }
    return load(defaults | {name.replace("_", "-"): value for name, value in flags.items()}, {})


def raised_by(check: object, given: Settings) -> AgentError:
    with pytest.raises(AgentError) as caught:
        check(given)  # type: ignore[operator]
    return caught.value


# Paths


def test_a_kubelet_that_is_not_there_yet_is_no_mistake(tmp_path: Path) -> None:
    check_paths(settings(tmp_path))
    check_paths(settings(tmp_path, kubelet_socket=str(tmp_path / "no" / "such" / "kubelet.sock")))


def test_a_relative_kubelet_socket_is_a_mistake(tmp_path: Path) -> None:
    error = raised_by(check_paths, settings(tmp_path, kubelet_socket="kubelet.sock"))
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    assert str(error) == "--kubelet-socket kubelet.sock is relative; give an absolute path"


@pytest.mark.parametrize(("length", "is_right"), [(107, True), (108, False)])
def test_a_socket_path_holds_107_bytes(tmp_path: Path, length: int, is_right: bool) -> None:
    path = "/" + "x" * (length - 1)
    if is_right:
        check_paths(settings(tmp_path, kubelet_socket=path))
        return
    error = raised_by(check_paths, settings(tmp_path, kubelet_socket=path))
    assert isinstance(error, UsageError)
    assert "is 108 bytes long" in str(error)


def test_the_length_is_counted_in_bytes_not_in_characters(tmp_path: Path) -> None:
    assert isinstance(raised_by(check_paths, settings(tmp_path, kubelet_socket="/" + "ü" * 60)), UsageError)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_something_else_in_the_place_of_the_kubelets_socket_is_a_mistake(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "kubelet.sock"
    if kind == "file":
        place.touch()
    else:
        place.mkdir()
    error = raised_by(check_paths, settings(tmp_path))
    assert isinstance(error, UsageError)
    assert "is not a socket" in str(error)


def test_a_real_socket_is_right(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "kubelet.sock"))
        check_paths(settings(tmp_path))


# Rights


def test_the_state_directory_is_made_for_root_only(tmp_path: Path) -> None:
    check_rights(settings(tmp_path, state_dir=str(tmp_path / "a" / "b")))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = raised_by(check_rights, settings(tmp_path, state_dir=str(tmp_path / "file" / "state")))
    assert isinstance(error, MissingRightsError)
    assert str(error).startswith(
        f"Could not make the state directory {tmp_path}/file/state: Not a directory;"
    )


def as_unprivileged(action: object) -> str:
    """Return what an unprivileged user gets; a thread's user is its own in the kernel."""
    errors: list[str] = []

    def run() -> None:
        import ctypes  # noqa: PLC0415

        # setresuid of this thread only; glibc's function would change every thread.
        assert ctypes.CDLL(None).syscall(117, 65534, 65534, 65534) == 0
        try:
            action()  # type: ignore[operator]
        except AgentError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, name="unprivileged")
    thread.start()
    thread.join()
    return "".join(errors)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_the_right_that_is_missing_is_named(tmp_path: Path) -> None:
    place = Path("/var/tmp") / f"gpu-agent-test-{os.getpid()}"
    place.mkdir(mode=0o755)
    try:
        given = settings(place)
        assert as_unprivileged(lambda: check_rights(given)) == (
            f"Could not make the state directory {place}/state: Permission denied; "
            "run as root, or give --state-dir a directory that this user may write"
        )
        (place / "state").mkdir(mode=0o777)
        (place / "state").chmod(0o777)
        assert as_unprivileged(lambda: check_rights(given)) == (
            f"Missing the right to write in {place}, which is needed to make the plugin's sockets; "
            "run as root, or give --kubelet-socket a directory that this user may write"
        )
    finally:
        (place / "state").rmdir()
        place.rmdir()


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingRightsError, match=r"Could not open the lock .*: No such file"):
        NodeLock(str(tmp_path / "none" / "lock"))


# The lock


def test_one_holds_the_lock_and_the_other_learns_the_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    first, second = NodeLock(path), NodeLock(path)
    assert first.try_acquire()
    assert not second.try_acquire()
    assert second.holder() == f"process {os.getpid()}"
    first.release()
    assert second.try_acquire()
    second.release()


def test_a_waiting_agent_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    first, second = NodeLock(path), NodeLock(path)
    assert first.try_acquire()
    waiting = threading.Thread(target=second.acquire, name="waiting")
    waiting.start()
    first.release()
    waiting.join(30)
    assert not waiting.is_alive()
    second.release()


def test_a_lock_file_with_nonsense_names_no_process(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("rm -rf /\n")
    lock = NodeLock(str(tmp_path / "lock"))
    assert lock.holder() == "an unknown process"
    lock.release()


# The boot


def test_the_boot_id_is_the_kernels(tmp_path: Path) -> None:
    assert boot_id_of("/proc") == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_boot_id_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    assert boot_id_of(str(tmp_path)) == ""
