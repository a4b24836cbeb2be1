"""Waits with a timeout."""

import asyncio
from collections.abc import Callable
from typing import Final

from agent.model.policy import SECOND_NS

PERIOD_NS: Final = 10 * SECOND_NS
"""Between two proofs of an idle component."""


async def wait_set(event: asyncio.Event, timeout_ns: int) -> None:
    """Return when the event is set, or after the timeout."""
    try:
        async with asyncio.timeout(timeout_ns / 1e9):
            await event.wait()
    except TimeoutError:
        return


async def sleep_proving(seconds: float, period_ns: int, prove: Callable[[], object]) -> None:
    """Sleep, and call ``prove`` every period meanwhile: a component that waits before a retry is not dead."""
    left_s = seconds
    while left_s > 0:
        prove()
        await asyncio.sleep(min(left_s, period_ns / 1e9))
        left_s -= period_ns / 1e9
