"""The processes a demo starts: none of them outlives it, and the last output of each is kept.

Guarantees:

1. A child gets SIGTERM from the kernel when its parent dies, however that happens.
2. It is in a process group of its own, so Ctrl-C reaches the parent alone, which stops them in order.
3. Its output is read until it exits, so it never blocks; the log file and the memory kept are bounded.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from agent.errors import AgentError

MAX_LOG_BYTES: Final = 4 * 1024 * 1024
"""A log that has grown over this begins anew; the one before it is kept beside it."""
MAX_TAIL_BYTES: Final = 8 * 1024
TAIL_LINES: Final = 12
_CHUNK: Final = 64 * 1024

_LEASH: Final = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs between fork and the program: the setting survives execve, and needs no code in a forked process."""


def send_signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal to a child that has not exited.

    The method of the same name polls first: on a child that has just exited it takes the exit status away
    from asyncio, which then reports 255 (cpython: Lib/subprocess.py, Popen.send_signal).
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


class BoundedLog:
    """A log file of at most twice MAX_LOG_BYTES."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append; a full disk loses the log, not the demo."""
        with contextlib.suppress(OSError):
            self._file.write(data)
            if os.fstat(self._file.fileno()).st_size > MAX_LOG_BYTES:
                self._path.replace(self._path.with_suffix(".log.1"))
                self._file.close()
                self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Child:
    """A child process whose output is read by a task of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: BoundedLog | None) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._tail = bytearray()
        loop = asyncio.get_running_loop()
        self._first_line: asyncio.Future[bytes] = loop.create_future()
        self._reading = (
            loop.create_task(self._read_errors(), name=f"demo-errors-{name}"),
            loop.create_task(self._read_output(), name=f"demo-output-{name}"),
        )

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], *, environment: Mapping[str, str], log: Path | None = None
    ) -> Self:
        """Start a program; its standard error is kept, and its standard output is readable by lines."""
        try:
            kept = None if log is None else BoundedLog(log)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid())),
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(environment),
                process_group=0,
            )
        except OSError as error:
            raise AgentError(f"The {name} process could not be started: {error}") from error
        return cls(name, process, kept)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def first_line(self) -> bytes:
        """Return the first line of standard output, empty if it ends without one; the rest is dropped."""
        return await asyncio.shield(self._first_line)

    async def exited(self) -> int:
        """Wait for the exit and for all output; returns the exit status, negative for a signal."""
        code = await self._process.wait()
        await asyncio.wait(self._reading)
        return code

    def last_words(self) -> str:
        """Return the last lines of standard error."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    async def stop(self, patience_s: float, *, impatient: asyncio.Event) -> bool:
        """Ask for the exit; kill after ``patience_s`` or once ``impatient``; true if asking was enough."""
        self._signal(signal.SIGTERM)
        asked = True
        exiting = asyncio.get_running_loop().create_task(self.exited(), name=f"demo-end-{self.name}")
        waiting = asyncio.get_running_loop().create_task(impatient.wait(), name="demo-impatient")
        try:
            await asyncio.wait((exiting, waiting), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not exiting.done():
                asked = False
                self._signal(signal.SIGKILL)
            await exiting
        finally:
            for task in (exiting, waiting):
                task.cancel()
            await asyncio.gather(exiting, waiting, return_exceptions=True)
            if self._log is not None:
                self._log.close()
        return asked

    def _signal(self, number: int) -> None:
        send_signal(self._process, number)

    async def _read_output(self) -> None:
        output = self._process.stdout
        if output is not None:
            self._first_line.set_result(await output.readline())
            while await output.read(_CHUNK):
                pass

    async def _read_errors(self) -> None:
        errors = self._process.stderr
        while errors is not None and (data := await errors.read(_CHUNK)):
            self._tail += data
            del self._tail[:-MAX_TAIL_BYTES]
            if self._log is not None:
                self._log.write(data)


def environment_of_children(variables: Mapping[str, str], drop: Sequence[str]) -> dict[str, str]:
    """Return the environment without what would make the simulated node another one."""
    kept = {name: value for name, value in variables.items() if name not in drop}
    # An agent that believes systemd or the journal are at its other end would talk to them.
    for name in ("NOTIFY_SOCKET", "JOURNAL_STREAM", "WATCHDOG_USEC", "WATCHDOG_PID", "INVOCATION_ID"):
        kept.pop(name, None)
    # The children import this very package, wherever it was imported from, and nothing that lies in the
    # working directory: as root in /tmp that could be any user's program.
    kept["PYTHONSAFEPATH"] = "1"
    package = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [kept.get("PYTHONPATH")])])
    return kept
