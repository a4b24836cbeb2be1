"""Clients of the agent's HTTP endpoint, as many monitoring systems at once."""

import asyncio
import contextlib
import itertools
from types import TracebackType
from typing import Final, Self

from tests.bench.figures import MeasurementError
from tests.bench.node import PATIENCE_S

PATHS: Final = ("/readyz?verbose", "/preflight", "/v1/devices", "/v1/allocatable")
"""What is asked, in turn."""
_PAUSE_S: Final = 0.1


class Scraper:
    """One client; the agent closes the connection after each answer."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")

    async def get(self, path: str) -> bytes:
        """Return the body of an answer, whatever its status."""
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        if not head:
            raise MeasurementError(f"GET {path} was not answered")
        return body

    async def wait_listening(self) -> None:
        """Wait until the agent accepts, which it does only some time after it has registered."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(ConnectionRefusedError):
                        await self.get(PATHS[0])
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise MeasurementError(f"no server listens on {self._host}:{self._port}") from None


async def scrape(address: str, count: int) -> None:
    """Ask so many times, one after another."""
    scraper = Scraper(address)
    await scraper.wait_listening()
    for path in itertools.islice(itertools.cycle(PATHS), count):
        await scraper.get(path)


class Scrapers:
    """Many clients that ask ten times a second each, beside the block."""

    def __init__(self, address: str, clients: int) -> None:
        self._scrapers = [Scraper(address) for _ in range(clients)]
        self._tasks: list[asyncio.Task[None]] = []
        self.answers = 0
        """Answers so far."""

    async def __aenter__(self) -> Self:
        await self._scrapers[0].wait_listening()
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
        if error is None and (failed or not self.answers):
            why = failed[0] if failed else "there was no answer"
            raise MeasurementError(f"the HTTP endpoint did not answer its clients: {why}")

    async def _ask(self, scraper: Scraper) -> None:
        for path in itertools.cycle(PATHS):
            await scraper.get(path)
            self.answers += 1
            await asyncio.sleep(_PAUSE_S)
