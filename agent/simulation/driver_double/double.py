"""The driver double as the rest of the simulation uses it: a process with a control socket.

Guarantees: ``close`` stops the process, and so does the exit of its parent, however that comes about;
then every call on the nodes fails and no caller stays held. One question is asked at a time, in order.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agent.errors import AgentError, SourceError
from agent.simulation.children import environment_of_children, send_signal
from agent.simulation.driver_double.nodes import Gpu, inodes

MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""The books of every object that there may be."""
ANSWERS_WITHIN_S: Final = 30.0
ENDS_WITHIN_S: Final = 5.0
COMMAND: Final = (sys.executable, "-m", "agent.simulation.driver_double")


@dataclass(frozen=True, slots=True)
class Context:
    """A context that lives, as the driver knows it."""

    client: int
    handle: int
    pid: int
    """The process that allocated its client."""
    minor: int | None
    """Of the GPU it is on."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client that lives, as the driver knows it."""

    client: int
    pid: int
    file: int
    """Number of the open file in the double, not in the kernel."""
    objects: int


@dataclass(frozen=True, slots=True)
class Books:
    """What the driver granted so far, and what of it lives."""

    contexts: tuple[Context, ...]
    clients: tuple[Client, ...]
    counts: Mapping[str, int]
    """See ``resources.Counts``."""
    opened: Mapping[str, int]
    """Opens of each node."""
    released: Mapping[str, int]
    """Open files of each node that ended."""
    processes: Mapping[int, Mapping[str, int]]
    """``calls``, ``opens``, ``allocs``, ``frees``, ``contexts_allocated`` of each process."""
    spaces: tuple[tuple[str, int, int], ...]
    """UUID in hexadecimal, client and VA space of what is registered with unified memory."""

    def live(self, pid: int) -> int:
        """How many contexts of a process's clients live."""
        return sum(context.pid == pid for context in self.contexts)


class DriverDouble:
    """A running double; see ``start`` and the guarantees above."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()
        self.names: tuple[str, ...] = ()
        """Of the nodes, those of MIG devices apart."""
        self.folder = Path()
        """Where every process with root's rights finds the nodes."""
        self.file_system = 0
        """The kernel's dev_t of the file system; inode numbers on it are device numbers."""

    @classmethod
    async def start(cls, gpus: Sequence[Gpu], *, version: str, capabilities: Sequence[int] = ()) -> Self:
        """Start a double of a driver's version with these GPUs; raises SourceError where that cannot be.

        ``capabilities`` are the minors of the nodes that MIG devices may have.
        """
        near, far = socket.socketpair()
        with far:
            near.setblocking(False)  # noqa: FBT003 - positional only
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=far.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                # It exits with its socket, and not before its client.
                process_group=0,
                env=environment_of_children(os.environ, drop=()),
            )
        made = cls(process, *await asyncio.open_unix_connection(sock=near, limit=MAX_ANSWER_BYTES))
        try:
            described = [gpu._asdict() for gpu in gpus]
            where = await made._ask(
                {"version": version, "gpus": described, "capabilities": list(capabilities)}
            )
        except BaseException:
            await made.close()
            raise
        made.folder = Path(where["folder"])
        made.names = tuple(inodes(gpus))
        made.file_system = where["device"]
        return made

    @property
    def pid(self) -> int:
        """The double's own process."""
        return self._process.pid

    def node(self, name: str) -> Path:
        """Return where a node is, such as nvidiactl."""
        return self.folder / name

    def replace(self, name: str, dev_root: Path) -> None:
        """Put a node into a folder that stands for /dev, in the place of what is there."""
        (dev_root / name).unlink(missing_ok=True)
        (dev_root / name).symlink_to(self.node(name))

    async def books(self) -> Books:
        """Return what the driver knows, after every call and every release that it has handled."""
        answer = await self._ask({"do": "books"})
        return Books(
            contexts=tuple(Context(**each) for each in answer["contexts"]),
            clients=tuple(Client(**each) for each in answer["clients"]),
            counts=answer["counts"],
            opened=answer["opened"],
            released=answer["released"],
            processes={int(pid): counts for pid, counts in answer["processes"].items()},
            spaces=tuple((each["uuid"], each["client"], each["space"]) for each in answer["spaces"]),
        )

    async def hold(self, name: str) -> None:
        """Answer no open, read or ioctl of a node from now on: callers are held in the kernel."""
        await self._ask({"do": "hold", "name": name})

    async def slow(self, name: str, latency_ns: int) -> None:
        """Answer opens, reads and ioctls of a node only after this time from now on."""
        await self._ask({"do": "slow", "name": name, "latency_ns": latency_ns})

    async def release(self, name: str) -> None:
        """Answer a node's calls at once again, also what waits."""
        await self._ask({"do": "release", "name": name})

    async def release_all(self) -> None:
        """Answer every node's calls at once again."""
        await self._ask({"do": "release-all"})

    async def held(self) -> int:
        """Return how many calls wait."""
        return int((await self._ask({"do": "held"}))["held"])

    async def close(self) -> None:
        """End it."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                await self._process.wait()
        except TimeoutError:
            send_signal(self._process, signal.SIGKILL)
            await self._process.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        async with self._turn, asyncio.timeout(ANSWERS_WITHIN_S):
            self._writer.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
            try:
                await self._writer.drain()
                line = await self._reader.readline()
            except OSError as error:
                raise AgentError(f"The driver double exited: {error.strerror}") from error
        if not line:
            raise AgentError("The driver double exited before it answered")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SourceError(str(answer["error"]))
        return answer
