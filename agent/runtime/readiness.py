"""When systemd is told that the agent is ready, and where it ends instead because NVML does not work."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from agent.errors import AgentError, SourceError
from agent.runtime.ending import Ending
from agent.runtime.tasks import Tasks
from agent.sinks.notify import Notifier

if TYPE_CHECKING:
    from agent.sources.nvml.source import NvmlSource


class InitFailedError(AgentError):
    """NVML could not be initialised at the start, and the operator wants the process to end then."""


async def judge_start(
    nvml: "NvmlSource",
    *,
    must_work: bool,
    until_serving: Callable[[], Awaitable[object]],
    until_answering: Callable[[], Awaitable[object]],
    tasks: Tasks,
    notifier: Notifier,
    ending: Ending,
) -> None:
    """Send READY=1 when the agent serves or stands by; end it if NVML must work and does not.

    ``until_serving`` returns when the agent serves, in one that stands by at once; ``until_answering`` when
    commands and health checks are answered, or cannot be. So a command right after a start is answered.
    """
    extending = tasks.start("start extension", notifier.extend_start())
    try:
        await nvml.wait_first_outcome()
    except SourceError as error:
        if must_work:
            why = f"{error}; or wait for the driver with --fail-on-init-error=false"
            ending.ask("NVML could not be initialised", InitFailedError(why))
            return
    finally:
        extending.cancel()
    await until_serving()
    await until_answering()
    notifier.ready()
