"""Waits that end in time."""

import asyncio


async def wait_set(event: asyncio.Event, timeout_ns: int) -> None:
    """Return when the event is set, or after the timeout."""
    try:
        async with asyncio.timeout(timeout_ns / 1e9):
            await event.wait()
    except TimeoutError:
        return
