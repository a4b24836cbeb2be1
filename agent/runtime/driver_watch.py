"""Ends the process where only a new one can load the driver's library."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from agent.runtime.ending import EndedError, Ending

PERIOD_S: Final = 2.0
NO_LIBRARY_NS: Final = 300_000_000_000
"""A container sees no library that is installed after its start: then only a new one helps."""


class Library(Protocol):
    """What the NVML source knows of its library."""

    @property
    def library_replaced(self) -> bool:
        """Whether the one on disk is another than the loaded one, which does not fit the driver."""

    @property
    def library_missing_since_ns(self) -> int | None:
        """Since when none was found; None while one is loaded."""


async def watch_library(
    library: Library, ending: Ending, *, is_in_container: bool, clock: Callable[[], int]
) -> None:
    """Look for ever, and ask for the end where it helps."""
    while True:
        await asyncio.sleep(PERIOD_S)
        since_ns = library.library_missing_since_ns
        if library.library_replaced:
            error = EndedError("The NVML library was replaced by a newer one, which a new process can load")
            ending.ask("another NVML library", error)
        elif is_in_container and since_ns is not None and clock() - since_ns > NO_LIBRARY_NS:
            error = EndedError("No NVML library was found for five minutes; a new container may see one")
            ending.ask("no NVML library", error)


def is_in_container(environment: Mapping[str, str]) -> bool:
    """Tell whether this process sees the files of an image instead of the node's."""
    return "KUBERNETES_SERVICE_HOST" in environment or any(
        Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")
    )
