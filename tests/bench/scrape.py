"""Clients of the agent's HTTP endpoint, as many monitoring systems at once."""

import asyncio
import itertools
from types import TracebackType
from typing import Final, Self

from tests.bench.figures import MeasurementError
from tests.bench.node import PATIENCE_S

PATHS: Final = ("/readyz?verbose", "/preflight", "/v1/devices", "/v1/allocatable")
"""What is asked, in turn."""
_PAUSE_S: Final = 0.1


class Scraper:
    """One client that keeps its connection."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def get(self, path: str) -> bytes:
        """Return the body of an answer, whatever its status."""
        reader, writer = await self._connection()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.splitlines()[1:] if b": " in line)
        return await reader.readexactly(int(fields[b"content-length"]))

    async def wait_listening(self) -> None:
        """Wait until the agent accepts, which it does only some time after it has registered."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self._writer is None:
                    try:
                        await self._connection()
                    except ConnectionRefusedError:
                        await asyncio.sleep(0.02)
        except TimeoutError:
            raise MeasurementError(f"no server listens on {self._host}:{self._port}") from None

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        return self._reader, self._writer

    async def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()
            await self._writer.wait_closed()


async def scrape(address: str, count: int) -> None:
    """Ask so many times, one after another."""
    scraper = Scraper(address)
    try:
        await scraper.wait_listening()
        for path in itertools.islice(itertools.cycle(PATHS), count):
            await scraper.get(path)
    finally:
        await scraper.close()


class Scrapers:
    """Many clients that ask ten times a second each, beside the block."""

    def __init__(self, address: str, clients: int) -> None:
        self._scrapers = [Scraper(address) for _ in range(clients)]
        self._tasks: list[asyncio.Task[None]] = []
        self.answers = 0
        """Answers so far."""

    async def __aenter__(self) -> Self:
        for scraper in self._scrapers:
            await scraper.wait_listening()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._ask(scraper), name="bench-scraper") for scraper in self._scrapers
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = [task.exception() for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for scraper in self._scrapers:
            await scraper.close()
        if error is None and (failed or not self.answers):
            why = failed[0] if failed else "there was no answer"
            raise MeasurementError(f"the HTTP endpoint did not answer its clients: {why}")

    async def _ask(self, scraper: Scraper) -> None:
        for path in itertools.cycle(PATHS):
            await scraper.get(path)
            self.answers += 1
            await asyncio.sleep(_PAUSE_S)
