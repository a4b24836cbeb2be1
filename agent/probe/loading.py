"""Loads the probe: starts the loader process, waits for it within a deadline, receives its descriptors.

Guarantees: the process inherits nothing of the agent's environment, files, limits or signals but what is
named here. No loader is tried twice; any failure is one ProbeLoadError with a code, and then no process,
nor one that it started, no descriptor and no directory is left. Where ``auto`` chose a compiler that died
before it answered, as where memory is short, the precompiled object is tried. Cancelling kills the process.
The next agent removes what an agent that was killed while it loaded the probe has left behind.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import agent
from agent.errors import ProbeLoadError
from agent.log import about
from agent.probe.adoption import adopt
from agent.probe.probe import Probe
from agent.probe.request import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    Request,
    last_useful_line,
    read_reply,
)
from agent.threads import in_daemon_thread, started_in_daemon_thread

DEADLINE_S: Final = 120.0
"""It takes a second on a quiet machine, half a minute on a slow one."""
MAX_OUTPUT_BYTES: Final = 4 << 20
"""What the loader process may write to standard error; a verifier's log can be long."""
MAX_DETAIL_BYTES: Final = 8_192
"""Bytes of it that are kept; a log line has room for twice as many."""
_GRACE_S: Final = 5.0
"""How long the process may take to exit once it has answered."""
_log = logging.getLogger(__name__)

_DID_NOT_ANSWER: Final = frozenset({"loader_killed", "loader_timeout"})
_CANCEL_WAIT_S: Final = 1.0
"""How long a cancelled load waits for the process to be gone."""
_PREFIX: Final = "gpu-agent-probe-"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CUT: Final = b"\n...\n"
_ROOT: Final = str(Path(agent.__file__).parent.parent)
# Neither site-packages nor the environment: the process imports what is named here, and bcc.
_PYTHON: Final = (sys.executable, "-ISs", "-W", "ignore", "-c")
_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_UMASK: Final = 0o077
_EXIT_POLL_S: Final = 0.005
_BOOT: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from agent.probe.loader import main; main(*sys.argv[1:])"
)


async def load(
    request: Request,
    *,
    deadline_s: float = DEADLINE_S,
    launcher: Sequence[str] = (),
    instead_of: Probe | None = None,
) -> Probe:
    """Load and attach the probe, or raise ProbeLoadError.

    A probe that an earlier agent pinned is used if it matches. ``instead_of`` is another one, whose rows the
    new one gets, and which the caller still owns. ``launcher`` is put before the loader's command line, as
    ``setpriv`` with its options would be.
    """
    request = replace(request, agent_tgid=request.agent_tgid or os.getpid())
    if not request.pins and instead_of is None:
        return await _load_new(request, deadline_s, launcher)
    adopted = await in_daemon_thread("probe-pins", lambda: adopt(request, instead_of))
    try:
        probe = adopted.probe or await _load_new(request, deadline_s, launcher)
    except BaseException:
        adopted.close()
        raise
    await in_daemon_thread("probe-pins", lambda: adopted.keep(probe, request))
    return probe


async def _load_new(request: Request, deadline_s: float, launcher: Sequence[str]) -> Probe:
    try:
        return await _load_once(request, deadline_s, launcher)
    except ProbeLoadError as error:
        if request.loader != "auto" or error.code not in _DID_NOT_ANSWER:
            raise
        first = error
    _log.warning("Compiling the probe failed: %(why)s; loading the precompiled one", about(why=str(first)))
    try:
        return await _load_once(replace(request, loader="core"), deadline_s, launcher)
    except ProbeLoadError as error:
        raise (first if error.code == "object_missing" else error) from None


async def _load_once(request: Request, deadline_s: float, launcher: Sequence[str]) -> Probe:
    run = _Run(request, deadline_s, tuple(launcher))
    try:
        loading = started_in_daemon_thread("probe-loader", run.run)
    except RuntimeError as error:
        raise ProbeLoadError(
            "loader_failed",
            f"Could not start a thread to load the probe: {error}; raise the agent's limit of tasks",
        ) from error
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        run.abandon()
        loading.add_done_callback(_close_late)
        # So that its directory is gone, too, should the agent exit now.
        await asyncio.wait([loading], timeout=_CANCEL_WAIT_S)
        raise


def _close_late(loading: "asyncio.Future[Probe]") -> None:
    """Close the probe of an abandoned load."""
    if loading.exception() is None:
        loading.result().close()


class _Run:
    """One run of the loader process; on a thread of its own, which may be abandoned."""

    def __init__(self, request: Request, deadline_s: float, launcher: tuple[str, ...]) -> None:
        self._request = request
        self._deadline_s = deadline_s
        self._launcher = launcher
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_abandoned = False

    def abandon(self) -> None:
        """Kill the process; whatever it still hands over is closed."""
        with self._lock:
            self._is_abandoned = True
            if self._process is not None and self._process.returncode is None:
                _kill(self._process)

    def run(self) -> Probe:
        """Run the process until it exits and return the probe that it loaded."""
        try:
            with _scratch() as scratch, _output() as output:
                probe = self._loaded(replace(self._request, scratch=scratch), output)
        except OSError as error:
            raise ProbeLoadError(
                "loader_failed",
                f"The probe's loader could not be started: {error}; allow the agent to start processes and "
                "to write to its directory for temporary files",
            ) from error
        with self._lock:
            if self._is_abandoned:
                probe.close()
                raise ProbeLoadError("loader_failed", "Loading the probe was given up")
        return probe

    def _loaded(self, request: Request, output: int) -> Probe:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self._start(request, theirs.fileno(), output)
            message, descriptors = self._received(ours, process)
        try:
            if not message:
                raise _died(process.returncode, _excerpt(output))
            return Probe(read_reply(message), descriptors, request)
        except ProbeLoadError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            error.detail = _excerpt(output)
            raise

    def _start(self, request: Request, channel: int, output: int) -> subprocess.Popen[bytes]:
        command = [*self._launcher, *_PYTHON, _BOOT, _ROOT, str(channel), request.to_json()]
        with self._lock:
            if self._is_abandoned:
                raise ProbeLoadError("loader_failed", "Loading the probe was given up")
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                command,
                pass_fds=(channel,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=_environment(request.scratch),
                umask=_UMASK,
                start_new_session=True,
            )
        return self._process

    def _received(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> tuple[bytes, list[int]]:
        """Return the process's answer, nothing if it exited without one; it has exited then."""
        message = b""
        descriptors: list[int] = []
        grace_s = 0.0
        try:
            if not _is_readable(channel, self._deadline_s):
                raise ProbeLoadError(
                    "loader_timeout",
                    f"The probe's loader took over {self._deadline_s:g} s; use --probe-loader core, which "
                    "takes one, or check what keeps the node busy",
                )
            grace_s = _GRACE_S
            message, descriptors, _, _ = socket.recv_fds(
                channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        finally:
            _wait_until_ended(process, grace_s)
            with self._lock:
                _kill(process)
                process.wait()
        return message, descriptors


def _environment(scratch: str) -> dict[str, str]:
    """Return the process's whole environment: nothing in it makes it load other code."""
    return {"PATH": _PATH, "LC_ALL": "C.UTF-8", "HOME": scratch, "TMPDIR": scratch}


def _is_readable(channel: socket.socket, within_s: float) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


def _wait_until_ended(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Wait for the process and leave it a zombie, so that its pid is not reused yet."""
    until_s = time.monotonic() + within_s
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, process.pid, flags) is None and time.monotonic() < until_s:
        time.sleep(_EXIT_POLL_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, which was not waited for yet, and all of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _died(code: int, output: str) -> ProbeLoadError:
    if code < 0:
        return ProbeLoadError(
            "loader_killed",
            f"The probe's loader was killed ({signal.Signals(-code).name}), which takes 150 MiB while it "
            "compiles; raise the agent's memory limit or use --probe-loader core",
        )
    return ProbeLoadError(
        "loader_failed",
        f"The probe's loader exited with {code}: {last_useful_line(output)}; "
        "its whole output is in the log at --log-level debug",
    )


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """Create a private directory, locked for as long as it is in use, and remove unused ones."""
    _remove_left_behind()
    path, lock = _locked_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_directory() -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX)
        # Until it is locked, another agent may remove it as unused.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, _DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if Path(path).is_dir():
                return path, lock
            os.close(lock)


def _remove_left_behind() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path, _DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def _output() -> Iterator[int]:
    """Create a file in memory of a fixed size: it needs no reader and cannot fill a disk."""
    descriptor = os.memfd_create("gpu-agent-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, MAX_OUTPUT_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield descriptor
    finally:
        os.close(descriptor)


def _excerpt(output: int) -> str:
    """Return the beginning and the end of what was written, at most MAX_DETAIL_BYTES."""
    written = os.pread(output, MAX_OUTPUT_BYTES, 0).strip(b"\0")
    if len(written) > MAX_DETAIL_BYTES:
        half = MAX_DETAIL_BYTES // 2 - len(_CUT)
        written = written[:half] + _CUT + written[-half:]
    return written.decode(errors="replace")
