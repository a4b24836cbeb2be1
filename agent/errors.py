"""The errors of the agent; foreign exceptions are translated into these once, at the boundary.

Every message is a sentence that names the object, the cause and, where there is one, the next step. A bug is
an assertion and exits the process instead.
"""

from enum import IntEnum
from typing import Final

EXIT_FAILED: Final = 1
"""Failed, or not ready."""
EXIT_USAGE: Final = 2
"""Usage, bad configuration, or an unknown answer."""


class AgentError(Exception):
    """An expected failure that the agent can explain."""

    exit_code = EXIT_FAILED


class UsageError(AgentError):
    """The command line, a path or a scenario is wrong; nothing was started."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """The configuration is wrong; holds every problem, not just the first."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class MissingRightsError(AgentError):
    """The process lacks a right that it needs."""


class AlreadyRunningError(AgentError):
    """Another agent holds this node's lock."""


class SourceError(AgentError):
    """A source failed; the supervisor retries it."""


class NvmlCode(IntEnum):
    """NVML return codes that mean something to the agent. Source: nvml.h, nvmlReturn_t."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


MISSING_RIGHT: Final = (
    "give the agent access to /dev/nvidiactl and /dev/nvidia*: run it as root, in a container as privileged"
)
"""The next step where NVML answers NO_PERMISSION."""


class NvmlError(SourceError):
    """An NVML call returned an error code."""

    def __init__(self, call: str, code: int, text: str) -> None:
        right = f"; {MISSING_RIGHT}" if code == NvmlCode.NO_PERMISSION else ""
        super().__init__(f"NVML call {call} failed: {text} (code {code}){right}")
        self.call = call
        self.code = code
        self.text = text


class NvmlOverdueError(SourceError):
    """An NVML call did not answer within its deadline."""

    def __init__(self, call: str, deadline_ns: int) -> None:
        super().__init__(f"NVML call {call} did not answer within {deadline_ns / 1e9:g} s")
        self.call = call
        self.deadline_ns = deadline_ns


class ProbeLoadError(AgentError):
    """The eBPF probe could not be loaded; the agent continues without it."""

    def __init__(self, code: str, summary: str, *, detail: str = "") -> None:
        super().__init__(summary)
        self.code = code
        """The cause, as in the probe's status: ``kernel_headers_missing``, ``missing_capability``, …"""
        self.detail = detail
        """Output of the compiler or the kernel's verifier, bounded; for the log at debug level."""


class KubeletError(AgentError):
    """The kubelet could not be reached, or answered an error."""


class AgentUnreachableError(AgentError):
    """A client command could not reach the running agent."""

    exit_code = EXIT_USAGE
