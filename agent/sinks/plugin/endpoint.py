"""One resource served at its own socket in the kubelet's directory."""

import asyncio
from pathlib import Path
from typing import Final

from agent import guard
from agent.model.components import LIST_AND_WATCH
from agent.sinks.plugin.grpc_bounds import Bounds
from agent.sinks.plugin.grpc_server import BoundedServer
from agent.sinks.plugin.service import PluginService
from agent.sinks.plugin.socket_file import identity_of, listen, remove


class Endpoint:
    """A service, its server and its socket file; they begin and end together."""

    def __init__(self, path: Path, service: PluginService, *, bounds: Bounds) -> None:
        """Listen at ``path``; NotRegisteredError if that is not possible."""
        listener = listen(path, backlog=bounds.backlog)
        self.path: Final = path
        self.service: Final = service
        self.identity: Final = identity_of(path)
        """Of the socket file; None if another process removed it at once."""
        self.server: Final = BoundedServer(service.methods(), listener, bounds=bounds)
        self._is_over = False

    async def run(self) -> None:
        """Serve until ``end`` was called."""
        try:
            async with asyncio.TaskGroup() as tasks:
                follower = tasks.create_task(
                    guard.for_ever(LIST_AND_WATCH, self.service.follow),
                    name=f"follow {self.service.resource}",
                )
                await self.server.run()
                follower.cancel()
        finally:
            self.close_now()

    def is_intact(self) -> bool:
        """Return whether the kubelet can still reach it: it runs, and its file is still ours."""
        return not self._is_over and self.identity is not None and identity_of(self.path) == self.identity

    async def end(self, grace_s: float) -> None:
        """End the watchers' streams, let running calls end within ``grace_s``, then close everything."""
        self._is_over = True
        remove(self.path, self.identity)
        self.service.end_watchers()
        await self.server.drain(grace_s)

    async def end_between_pods(self, grace_s: float) -> None:
        """End at a moment when the kubelet admits no pod, if there is one within half of ``grace_s``."""
        await self.service.wait_between_pods(grace_s / 2)
        await self.end(grace_s / 2)

    def close_now(self) -> None:
        """Close everything at once; also if ``run`` never began."""
        self._is_over = True
        remove(self.path, self.identity)
        self.server.close_now()
