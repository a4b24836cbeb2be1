"""A process that uses simulated GPUs, seen from outside: its commands, and its exit.

Guarantees: ``close`` stops the process, and so does the exit of its parent, however that comes
about; nothing is freed by it then, as when a program is killed. Commands are executed one after the other.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agent.errors import AgentError
from agent.simulation.children import environment_of_children
from agent.simulation.driver_double.nodes import Gpu

ANSWERS_WITHIN_S: Final = 60.0
"""A command may create a hundred contexts, on a busy machine."""
ENDS_WITHIN_S: Final = 5.0
_MAX_MESSAGE_BYTES: Final = 1 << 16
_COMMAND: Final = (sys.executable, "-S", "-m", "agent.simulation.gpu_processes")


class SimulatedProcess:
    """A running process; see ``start`` and the guarantees above."""

    def __init__(
        self, comm: str, pid: int, control: socket.socket, child: asyncio.subprocess.Process | None = None
    ) -> None:
        """Take over a process that runs; raises AgentError where it does not.

        ``child``: it is this process's own, which has to collect its status; a fork of another is not.
        """
        self.comm = comm
        self.pid = pid
        self.has_exited = asyncio.Event()
        """Set when the process has exited, its files included."""
        self._child = child
        self._control = control
        self._turn = asyncio.Lock()
        self._where: dict[str, Any] = {}
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            control.close()
            raise AgentError(f"Process {comm} exited as soon as it was started") from error
        asyncio.get_running_loop().add_reader(self._pidfd, self._handle_exit)

    @classmethod
    async def start(
        cls, comm: str, *, folder: Path, version: str, gpus: Sequence[Gpu], cgroup: Path | None = None
    ) -> Self:
        """Start a process that is called ``comm`` and finds the driver's nodes in a folder.

        It enters the cgroup before it opens anything. Raises AgentError where it cannot be started.
        """
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.setblocking(False)  # noqa: FBT003 - positional only
        with far:
            process = await asyncio.create_subprocess_exec(
                *_COMMAND,
                comm,
                stdin=far.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                env=environment_of_children(os.environ, drop=()),
                process_group=0,
            )
        made = cls(comm, process.pid, near, process)
        made._where = {"folder": str(folder), "version": version, "gpus": [gpu._asdict() for gpu in gpus]}
        try:
            await made.command("set-up", cgroup=None if cgroup is None else str(cgroup), **made._where)
        except BaseException:
            await made.close()
            raise
        return made

    # Its commands

    async def create(self, minor: int, contexts: int = 1) -> None:
        """Create contexts on a GPU."""
        await self.command("create", minor=minor, contexts=contexts)

    async def destroy(self, contexts: int | None = 1, *, minor: int | None = None) -> int:
        """Destroy the newest contexts or (None) every one, of a GPU or of all; returns how many."""
        return int((await self.command("destroy", contexts=contexts, minor=minor))["destroyed"])

    async def fork(self, comm: str) -> "SimulatedProcess":
        """Have it fork; the child has all its files, and executes commands of its own."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.setblocking(False)  # noqa: FBT003 - positional only
        with far:
            answer = await self._command({"do": "fork", "comm": comm}, [far.fileno()])
        child = SimulatedProcess(comm, answer["pid"], near)
        child._where = self._where
        # Its own first message, so it is called as it should be.
        await child._answer("fork")
        return child

    async def give(self, to: "SimulatedProcess") -> None:
        """Have it hand all its files of the driver to another process, and close them."""
        giving, taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with giving, taking:
            # Both are waited for, so that no answer is read as the one to a later command.
            outcomes = await asyncio.gather(self._give(giving), to.receive(taking), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _give(self, sock: socket.socket) -> None:
        try:
            await self._command({"do": "send"}, [sock.fileno()])
        finally:
            # The other process receives until the last copy of this end is closed.
            sock.close()

    async def receive(self, sock: socket.socket) -> None:
        """Make it receive files from a socket until its other end is closed."""
        await self._command({"do": "receive"}, [sock.fileno()])

    async def exec(self) -> None:
        """Have it become another program: files that close on exec are gone, nvidiactl is not."""
        await self.command("exec", comm=self.comm)
        await self.command("set-up", cgroup=None, **self._where)

    async def exit(self) -> None:
        """Make it exit with nothing freed, and wait for that."""
        await self._last_command("exit")

    async def stop(self) -> None:
        """Make it destroy everything and exit, and wait for that."""
        await self._last_command("stop")

    async def kill(self) -> None:
        """Kill it, and wait for its exit."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        await self.exited()

    async def exited(self) -> None:
        """Wait until it has exited, and collect its status if it is a child."""
        await self.has_exited.wait()
        if self._child is not None:
            await self._child.wait()

    async def command(self, do: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer; see the program. Raises AgentError where it could not be."""
        return await self._command({"do": do, **parameters})

    async def close(self) -> None:
        """Close its socket, so that it exits with nothing freed; one that is held in the kernel remains."""
        with contextlib.suppress(OSError):
            # What waits for an answer fails, too.
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                await self.exited()
        except TimeoutError:
            if self.has_exited.is_set():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._control.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Inside

    def _handle_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.has_exited.set()
        self._close_socket()

    def _close_socket(self) -> None:
        """Close the socket of a process that has exited, once no caller waits for an answer."""
        if self.has_exited.is_set() and not self._turn.locked():
            self._control.close()

    async def _last_command(self, do: str) -> None:
        with contextlib.suppress(AgentError):
            await self.command(do)
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            await self.exited()

    async def _command(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            async with self._turn, asyncio.timeout(ANSWERS_WITHIN_S):
                try:
                    socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
                except OSError as error:
                    raise AgentError(f"Process {self.comm} ({self.pid}) has exited") from error
                return await self._answer(str(message["do"]))
        finally:
            self._close_socket()

    async def _answer(self, do: str) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            data = await loop.sock_recv(self._control, _MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            raise AgentError(f"Process {self.comm} ({self.pid}) exited before it could {do}")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise AgentError(f"Process {self.comm} ({self.pid}) could not {do}: {answer['error']}")
        return answer
