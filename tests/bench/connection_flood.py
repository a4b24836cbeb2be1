"""A client that opens connections and sends nothing; its arguments: PORT PER_S SECONDS.

Prints how many it opened. Or, without arguments, a server to compare with, which prints its port and answers
with asyncio alone, without a bound on anything.
"""

import asyncio
import collections
import contextlib
import socket
import sys
import time
from typing import Final

KEPT: Final = 600
"""Connections open at a time: more than a listener of the agent has places for."""
BURST: Final = 50
BACKLOG: Final = 4_096
ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def flood(port: int, per_s: int, seconds: float) -> int:
    """Open connections; returns how many."""
    kept: collections.deque[socket.socket] = collections.deque()
    opened = 0
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < seconds:
        for _ in range(min(BURST, int(passed_s * per_s) - opened)):
            kept.append(socket.socket())
            kept[-1].setblocking(False)
            with contextlib.suppress(OSError):
                kept[-1].connect_ex(("127.0.0.1", port))
            opened += 1
            if len(kept) > KEPT:
                kept.popleft().close()
        time.sleep(0.0005)
    return opened


class Answering(asyncio.Protocol):
    """Answers whatever is sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer and close."""
        assert isinstance(self._transport, asyncio.WriteTransport)
        self._transport.write(ANSWER)
        self._transport.close()


async def serve() -> None:
    """Answer until killed."""
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=BACKLOG)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(f"{flood(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))}\n")
    else:
        asyncio.run(serve())
