"""Collects garbage on the loop's thread, and on no other.

A collection begins on whichever thread allocates when it is due, and closes the sockets and files it
finds. The threads that call the driver have a table of descriptors of their own (sources.nvml_threads):
there the same numbers are other files, so ours would stay open, and one of the driver's would be closed.
"""

import asyncio
import gc
from typing import Final

PERIOD_S: Final = 1.0
FULL_EVERY: Final = 60
"""Periods from one collection of everything to the next, which takes some milliseconds."""

YOUNG, ALL = 1, 2


async def collect_for_ever() -> None:
    """Collect in place of the interpreter, which is told not to; what is there now is never garbage."""
    gc.disable()
    gc.freeze()
    periods = 0
    while True:
        await asyncio.sleep(PERIOD_S)
        periods += 1
        gc.collect(YOUNG if periods % FULL_EVERY else ALL)
