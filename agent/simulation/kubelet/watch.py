"""Publishing changes: change streams and waits, woken by events, never by a poll.

Guarantees:

1. A stream yields every change from the moment it was opened, in order. One that lags more than
   MAX_CHANGES behind fails with an error instead of skipping.
2. A wait evaluates every state: its predicate runs at each change, not only at the last.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Self

from agent.errors import AgentError
from agent.simulation.kubelet.records import MAX_CHANGES, MAX_SUBSCRIBERS, AllocatableChange


class ChangeStream(AsyncIterator[AllocatableChange]):
    """An asynchronous iterator over changes; it ends when the kubelet stops."""

    def __init__(self, backlog: Iterable[AllocatableChange] = ()) -> None:
        self._waiting = deque(backlog)
        self._wake = asyncio.Event()
        self._closed = False
        self._fell_behind = False

    @property
    def closed(self) -> bool:
        """Whether no further change will come."""
        return self._closed

    def put(self, change: AllocatableChange) -> None:
        """Add a change; nothing happens to a closed stream."""
        if self._closed:
            return
        if len(self._waiting) >= MAX_CHANGES:
            self._fell_behind = True
        else:
            self._waiting.append(change)
        self._wake.set()

    def close(self) -> None:
        """End the stream; what was not read yet is dropped."""
        self._closed = True
        self._waiting.clear()
        self._wake.set()

    def finish(self) -> None:
        """End the stream once what waits was read."""
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AllocatableChange:
        while not self._waiting:
            if self._fell_behind:
                raise AgentError(
                    f"A reader of allocatable changes fell more than {MAX_CHANGES} behind; read it faster"
                )
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.popleft()


class Watchers:
    """The open streams and waits of one kubelet."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[ChangeStream] = weakref.WeakSet()
        self._waits: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def open(self, backlog: Iterable[AllocatableChange] = ()) -> ChangeStream:
        """Open a stream that starts with ``backlog``; a stream without a reference is closed by itself."""
        if sum(not stream.closed for stream in self._streams) >= MAX_SUBSCRIBERS:
            raise AgentError(f"{MAX_SUBSCRIBERS} readers follow the kubelet already; close one first")
        stream = ChangeStream(backlog)
        self._streams.add(stream)
        return stream

    def changed(self, change: AllocatableChange) -> None:
        """Hand a change to every stream."""
        for stream in tuple(self._streams):
            stream.put(change)

    def evaluate(self) -> None:
        """Run the predicate of each wait, because something changed."""
        for future, predicate in tuple(self._waits.items()):
            if future.done():
                continue
            try:
                met = predicate()
            except Exception as error:  # noqa: BLE001 (a broken predicate is its caller's, so it is raised there)
                future.set_exception(error)
            else:
                if met:
                    future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End every wait with an error, because what it waits for cannot come any more."""
        for future in self._waits:
            if not future.done():
                future.set_exception(error)

    async def wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the predicate holds; return False after ``timeout_s`` seconds."""
        if predicate():
            return True
        future = asyncio.get_running_loop().create_future()
        self._waits[future] = predicate
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            del self._waits[future]
        return True

    def finish(self) -> None:
        """End every stream once what it holds is read, and every wait at once."""
        self.fail(AgentError("The simulated kubelet has stopped, so the awaited change cannot happen"))
        for stream in tuple(self._streams):
            stream.finish()
