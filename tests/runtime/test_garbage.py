"""Garbage is collected on the loop's thread alone."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from agent.runtime import process
from agent.threads import in_daemon_thread


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.disable()


class Ring:
    """Garbage that only a collection finds, and that records on which thread it was found."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self.itself = self
        self._threads = threads

    def __del__(self) -> None:
        self._threads.append(threading.current_thread())


def make_garbage(threads: list[threading.Thread]) -> None:
    """Make more of it than the interpreter would ever leave lying about by itself."""
    for _ in range(5_000):
        Ring(threads)


async def test_garbage_made_on_any_thread_is_collected_on_the_loops() -> None:
    gc.enable()
    threads: list[threading.Thread] = []
    collecting = asyncio.get_running_loop().create_task(process.collect_forever(0.01))
    await asyncio.sleep(0)
    try:
        await in_daemon_thread("garbage-maker", lambda: make_garbage(threads))
        async with asyncio.timeout(20):
            while len(threads) < 5_000:
                await asyncio.sleep(0.01)
        assert set(threads) == {threading.main_thread()}
    finally:
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting


async def test_what_outlived_young_collections_is_found_by_a_full_one() -> None:
    threads: list[threading.Thread] = []
    collecting = asyncio.get_running_loop().create_task(process.collect_forever(0.01, full_every=3))
    await asyncio.sleep(0)
    try:
        old = Ring(threads)
        # Now it is in the oldest generation.
        gc.collect()
        del old
        async with asyncio.timeout(20):
            while not threads:
                await asyncio.sleep(0.01)
    finally:
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting
