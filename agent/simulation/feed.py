"""What happens on the simulated node, as a list of JSON objects that several readers follow.

Guarantees: a reader that comes late gets everything from the start, as far as MAX_LINES reach. One that
lags more than MAX_LINES behind is cut off with an error instead of missing some.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from agent.errors import AgentError

Line = Mapping[str, Any]

MAX_LINES: Final = 4_096
"""Lines remembered, and lines a reader may lag behind."""
MAX_READERS: Final = 16


class Feed:
    """The lines of one node; ``close`` ends every reader once it has read all."""

    def __init__(self) -> None:
        self._lines: deque[Line] = deque(maxlen=MAX_LINES)
        self._count = 0
        self._closed = False
        self._waiting: set[asyncio.Event] = set()

    def put(self, line: Line) -> None:
        """Add a line; nothing happens after ``close``."""
        if self._closed:
            return
        self._lines.append(line)
        self._count += 1
        self._wake()

    def close(self) -> None:
        """Take no further line."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    async def follow(self) -> AsyncGenerator[Line, None]:
        """Yield every line from the first one remembered; ends with ``close``."""
        if len(self._waiting) >= MAX_READERS:
            raise AgentError(f"{MAX_READERS} readers follow the simulated node already; stop one first")
        event = asyncio.Event()
        self._waiting.add(event)
        position = self._count - len(self._lines)
        try:
            while True:
                while position < self._count:
                    behind = self._count - position
                    if behind > len(self._lines):
                        raise AgentError(f"A reader of the simulated node fell over {MAX_LINES} lines behind")
                    yield self._lines[-behind]
                    position += 1
                if self._closed:
                    return
                event.clear()
                await event.wait()
        finally:
            self._waiting.discard(event)
