"""The control socket of the simulated node: JSON lines, open to its owner only.

A client sends one line: ``{"do": "xid", "with": {"xid": "79", "gpu": "3"}}`` and gets one back,
``{"ok": true, "message": "…"}`` or ``{"ok": false, "problems": ["…"], "exit": 2}``; or it sends
``{"watch": true}`` and gets the node's feed until either side ends.

Guarantees: requests, lines and connections are bounded; what a client sends never stops the node.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from agent.errors import EXIT_FAILED, EXIT_USAGE, AgentError, ConfigError, UsageError
from agent.simulation.directory import control_socket
from agent.simulation.feed import Feed
from agent.simulation.stop_signals import first_of

MAX_REQUEST_BYTES: Final = 64 * 1024
MAX_LINE_BYTES: Final = 4 * 1024 * 1024
"""A line of the feed: a node's devices with all their replicas."""
MAX_CONNECTIONS: Final = 32
REQUEST_TIMEOUT_S: Final = 5.0
"""How long a client may need for its line."""
ANSWER_TIMEOUT_S: Final = 600.0
"""How long a client waits: a kubelet may be asked to stay away for minutes."""

Do = Callable[[str, Mapping[str, str]], Awaitable[str]]
"""Applies the action of a name with its parameters; returns what was done, raises AgentError."""


class NotRunningError(UsageError):
    """No simulated node runs in the directory."""


class ControlServer:
    """Serves one node's control socket while the context lasts."""

    def __init__(self, path: Path, do: Do, feed: Feed) -> None:
        self._path = path
        self._do = do
        self._feed = feed
        self._server: asyncio.Server | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        self._watchers = 0
        self._unwatched = asyncio.Event()

    async def __aenter__(self) -> Self:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)  # noqa: FBT003 - positional only
            sock.bind(os.fspath(self._path))
            self._path.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=MAX_REQUEST_BYTES)
        except BaseException:
            sock.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for session in self._sessions:
            session.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = asyncio.current_task()
        if session is None or len(self._sessions) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._sessions.add(session)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            pass  # the client went away, sent no line in time, or the node stops
        finally:
            self._sessions.discard(session)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            line = await reader.readline()
        if not line:
            return
        request = _request(line)
        if request is not None and request.get("watch") is True:
            await self._send_feed(reader, writer)
        else:
            writer.write(_encode(await self._outcome(request)))
            await writer.drain()

    async def _outcome(self, request: Mapping[str, Any] | None) -> dict[str, Any]:
        name, given = (request or {}).get("do"), (request or {}).get("with", {})
        if not isinstance(name, str) or not _is_texts(given):
            problem = 'a request is {"do": ACTION, "with": {PARAMETER: TEXT}} or {"watch": true}'
            return {"ok": False, "problems": [problem], "exit": EXIT_USAGE}
        try:
            return {"ok": True, "message": await self._do(name, given)}
        except ConfigError as error:
            return {"ok": False, "problems": list(error.problems), "exit": EXIT_USAGE}
        except AgentError as error:
            return {"ok": False, "problems": [str(error)], "exit": error.exit_code}

    async def _send_feed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._watchers += 1
        try:
            # A watcher sends nothing more: its end of file ends the watch, also when it has read all.
            await first_of(gone=reader.read(1), sending=self._send_lines_and_stay(writer))
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._unwatched.set()

    async def wait_unwatched(self) -> None:
        """Wait until no watcher is left."""
        while self._watchers:
            self._unwatched.clear()
            await self._unwatched.wait()

    async def _send_lines_and_stay(self, writer: asyncio.StreamWriter) -> None:
        await self._send_lines(writer)
        writer.write_eof()
        await asyncio.Event().wait()

    async def _send_lines(self, writer: asyncio.StreamWriter) -> None:
        try:
            async with contextlib.aclosing(self._feed.follow()) as lines:
                async for line in lines:
                    writer.write(_encode(line))
                    await writer.drain()
        except AgentError as error:
            writer.write(_encode({"kind": "error", "text": str(error)}))
        except OSError:
            pass


def _request(line: bytes) -> Mapping[str, Any] | None:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _is_texts(given: object) -> bool:
    return isinstance(given, dict) and all(isinstance(value, str) for value in given.values())


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def not_running(node_dir: Path) -> NotRunningError:
    """Return the error that explains how to start a node."""
    return NotRunningError(
        f"No simulated node runs in {node_dir}; start one with gpu-agent demo, "
        "or name its directory with --node-dir"
    )


def ask(node_dir: Path, name: str, given: Mapping[str, str]) -> str:
    """Have the node in a directory do something; returns what was done.

    Raises NotRunningError, AgentError with the node's message.
    """
    request = _encode({"do": name, "with": dict(given)})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_TIMEOUT_S)
        try:
            sock.connect(os.fspath(control_socket(node_dir)))
            sock.sendall(request)
            with sock.makefile("rb") as file:
                line = file.readline(MAX_LINE_BYTES)
        except PermissionError as error:
            raise UsageError(
                f"The simulated node in {node_dir} belongs to another user; run this command as that user"
            ) from error
        except (FileNotFoundError, NotADirectoryError, ConnectionError) as error:
            raise not_running(node_dir) from error
        except (OSError, ValueError) as error:
            raise AgentError(f"The simulated node in {node_dir} did not answer: {error}") from error
    return _message(node_dir, line)


def _message(node_dir: Path, line: bytes) -> str:
    answer = _request(line)
    if answer is None:
        raise AgentError(f"The simulated node in {node_dir} exited before it answered")
    if answer.get("ok"):
        return str(answer.get("message", ""))
    problems = tuple(str(problem) for problem in answer.get("problems", ()))
    if answer.get("exit", EXIT_FAILED) == EXIT_USAGE:
        raise ConfigError(problems)
    raise AgentError("; ".join(problems))


async def watch(node_dir: Path) -> AsyncGenerator[Mapping[str, Any], None]:
    """Follow the node in a directory from its start; raises NotRunningError, AgentError."""
    try:
        reader, writer = await asyncio.open_unix_connection(
            os.fspath(control_socket(node_dir)), limit=MAX_LINE_BYTES
        )
    except OSError as error:
        raise not_running(node_dir) from error
    try:
        writer.write(_encode({"watch": True}))
        await writer.drain()
        while line := await reader.readline():
            parsed = _request(line)
            if parsed is not None:
                yield parsed
    except (OSError, ValueError) as error:
        raise AgentError(f"The simulated node in {node_dir} can no longer be followed: {error}") from error
    finally:
        writer.close()
