"""The part of a kubelet that dies and restarts: its socket files and the servers behind them.

Invariants (facts: kubelet item 4):

1. At its start every socket in the device-plugin folder is deleted before kubelet.sock is created.
2. A kubelet that stops leaves its socket files; they refuse connections until the next one starts.
"""

import contextlib
import itertools
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from agent.simulation.kubelet.front import SocketFront
from agent.simulation.kubelet.wire import start_server

SOCKET_NAME: Final = "kubelet.sock"

_numbers = itertools.count(1)


class KubeletProcess:
    """One life of the kubelet, from creating its sockets to leaving them."""

    def __init__(self, device_plugins: Path, pod_resources: Path) -> None:
        name = f"gpu-agent-kubelet-{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
        self._device_plugins = device_plugins
        self._pod_resources = pod_resources
        self._names = (f"{name}-registration", f"{name}-pods")
        self._registration = SocketFront(device_plugins / SOCKET_NAME, self._names[0])
        self._pods = SocketFront(pod_resources / SOCKET_NAME, self._names[1])
        self._servers: list[Any] = []

    def peer_pid(self, name: str) -> int | None:
        """Return the process that called Register, by gRPC's name of the connection."""
        return self._registration.peer_pid(name)

    async def start(
        self,
        services: tuple[tuple[str, Mapping[str, Any]], ...],
        *,
        before_listening: Callable[[], Awaitable[None]],
    ) -> None:
        """Clean the folder and serve; ``services`` are those of registration and of pod resources.

        kubelet.sock exists and refuses connections until ``before_listening`` returns.
        """
        for directory in (self._device_plugins, self._pod_resources):
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        for name, (service, methods) in zip(self._names, services, strict=True):
            self._servers.append(await start_server(name, service, methods))
        delete_sockets(self._device_plugins)
        with contextlib.suppress(FileNotFoundError):
            (self._pod_resources / SOCKET_NAME).unlink()
        self._pods.bind()
        await self._pods.listen()
        self._registration.bind()
        await before_listening()
        await self._registration.listen()

    def close(self, *, kill: bool) -> None:
        """Accept no further connection; a killed kubelet's open ones break at once."""
        for front in (self._registration, self._pods):
            front.close()
            if kill:
                front.abort()

    async def finish(self) -> None:
        """Stop serving what is still connected; the socket files stay, see ``unlink``."""
        self.close(kill=False)
        for server in self._servers:
            await server.stop(None)
        for front in (self._registration, self._pods):
            front.abort()
            await front.drained()

    def unlink(self) -> None:
        """Remove the socket files that are still this kubelet's."""
        self._registration.unlink()
        self._pods.unlink()


def delete_sockets(directory: Path, *, keep: str | None = None, only: str | None = None) -> list[str]:
    """Delete the sockets in a folder and return their names."""
    deleted = []
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    for entry in entries:
        if entry.name == keep or (only is not None and entry.name != only):
            continue
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(entry.stat().st_mode):
                entry.unlink()
                deleted.append(entry.name)
    return deleted
