"""When the agent is ready, and when and why it stops."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from agent.errors import AgentError, SourceError
from agent.sinks.notify import Notifier

if TYPE_CHECKING:
    from agent.sources.nvml.source import NvmlSource


class EndedError(AgentError):
    """The agent stops itself, because only a new process can use what changed."""


class Shutdown(msgspec.Struct):
    """Whether to shut down, and why; the first request counts."""

    requested: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    error: AgentError | None = None
    why: str = ""

    def request(self, why: str, error: AgentError | None = None) -> None:
        """Request the shutdown: because of a signal, or of an error."""
        if not self.requested.is_set():
            self.why, self.error = why, error
            self.requested.set()


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
    library: Library, shutdown: Shutdown, *, is_in_container: bool, clock: Callable[[], int]
) -> None:
    """Poll until cancelled, and request the shutdown where it helps."""
    while True:
        await asyncio.sleep(PERIOD_S)
        since_ns = library.library_missing_since_ns
        if library.library_replaced:
            error = EndedError("The NVML library was replaced by a newer one, which a new process can load")
            shutdown.request("another NVML library", error)
        elif is_in_container and since_ns is not None and clock() - since_ns > NO_LIBRARY_NS:
            error = EndedError("No NVML library was found for five minutes; a new container may see one")
            shutdown.request("no NVML library", error)


def is_in_container(environment: Mapping[str, str]) -> bool:
    """Return whether this process sees the files of an image instead of the node's."""
    return "KUBERNETES_SERVICE_HOST" in environment or any(
        Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")
    )


class InitFailedError(AgentError):
    """NVML could not be initialised at the start, and the operator wants the process to end then."""


async def check_start(
    nvml: "NvmlSource",
    *,
    must_work: bool,
    until_serving: Callable[[], Awaitable[object]],
    until_answering: Callable[[], Awaitable[object]],
    start: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    notifier: Notifier,
    shutdown: Shutdown,
) -> None:
    """Send READY=1 when the agent serves or stands by; stop it if NVML must work and does not.

    ``until_serving`` returns when the agent serves, in one that stands by at once; ``until_answering`` when
    commands and health checks are answered, or cannot be. So a command right after a start is answered.
    ``start`` starts a task of this name.
    """
    extending = start("start extension", notifier.extend_start())
    try:
        await nvml.wait_first_outcome()
    except SourceError as error:
        if must_work:
            why = f"{error}; or wait for the driver with --fail-on-init-error=false"
            shutdown.request("NVML could not be initialised", InitFailedError(why))
            return
    finally:
        extending.cancel()
    await until_serving()
    await until_answering()
    notifier.ready()
