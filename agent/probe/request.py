"""The request to the loader process and its reply: one message each way."""

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from agent.errors import ProbeLoadError
from agent.probe import kernel
from agent.probe.kernel import Roots
from agent.probe.layout import CONTEXT_CLASS, ProbeConfig
from agent.probe.programs import Tier

LoaderChoice = Literal["auto", "bcc", "core"]
TierChoice = Literal["auto", "driver", "syscalls"]

MAX_MESSAGE_BYTES: Final = 65_536
MAX_DESCRIPTORS: Final = 128
"""Linux passes at most 253 in one message."""
MAX_SUMMARY_CHARACTERS: Final = 400
MAX_LINE_CHARACTERS: Final = 200

RING_BYTES: Final = 1 << 20
PROCESSES: Final = 65_536
TRACED_CALLS: Final = 1_024
BCC_PATHS: Final = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib/python3.*/site-packages",
    "/usr/local/lib/python3.*/dist-packages",
)
"""Where distributions put the module bcc; it is pure Python over libbcc and runs on any."""


@dataclass(frozen=True, slots=True)
class Doubles:
    """Device doubles that count as the driver's; for tests and the simulated node."""

    nvidia_major: int = 0
    """Instead of the one in /proc/devices: with 1, a node of ``mknod c 1 3`` counts as a GPU."""
    uvm_major: int = 0
    filesystem: int = 0
    """st_dev of a file system whose files stand for devices, by inode number as dev_t."""
    any_return: bool = False
    """An ioctl that failed counts as one that worked."""


@dataclass(frozen=True, slots=True)
class Request:
    """How to load the probe."""

    loader: LoaderChoice = "auto"
    tier: TierChoice = "auto"
    roots: Roots = field(default_factory=Roots)
    doubles: Doubles | None = None
    context_class: int = CONTEXT_CLASS
    answer_within_ns: int = 5_000_000_000
    """A readiness check that takes longer does not set ready."""
    ring_bytes: int = RING_BYTES
    """A power of two and a multiple of the page size."""
    processes: int = PROCESSES
    """Rows of the table of processes; the least recently used is evicted."""
    bcc_paths: tuple[str, ...] = BCC_PATHS
    object_path: str | None = None
    """A precompiled object instead of the one that is shipped."""
    agent_tgid: int = 0
    trace_tgid: int = 0
    """A process whose every call is traced; then nothing else is sent."""
    pins: str = ""
    """A directory of bpffs in which the probe is pinned for the next agent; empty: it is not pinned."""
    scratch: str = ""
    """A private directory of the loader process, removed after it."""

    @property
    def traced(self) -> int:
        """Calls of the traced process that may be under way at once."""
        return TRACED_CALLS if self.trace_tgid else 1

    def config(self) -> ProbeConfig:
        """Return the settings of the programs for the node as it is now."""
        found, doubles = kernel.majors(self.roots), self.doubles
        return ProbeConfig(
            nvidia_major=(doubles and doubles.nvidia_major) or found.nvidia or kernel.NVIDIA_MAJOR,
            uvm_major=(doubles and doubles.uvm_major) or found.uvm,
            caps_major=found.caps,
            context_class=self.context_class,
            driver_branch=kernel.driver_branch(self.roots),
            agent_tgid=self.agent_tgid,
            test_filesystem=doubles.filesystem if doubles else 0,
            any_return=int(doubles.any_return) if doubles else 0,
            answer_within_ns=self.answer_within_ns,
            trace_tgid=self.trace_tgid,
        )

    def to_json(self) -> str:
        """Return the request as the loader process reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Return the request that ``to_json`` wrote."""
        values: dict[str, Any] = json.loads(text)
        doubles = values.pop("doubles")
        return cls(
            roots=Roots(**values.pop("roots")),
            doubles=None if doubles is None else Doubles(**doubles),
            bcc_paths=tuple(values.pop("bcc_paths")),
            **values,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The loaded probe; its descriptors are sent beside it: maps, programs, attached, in this order."""

    loader: Literal["bcc", "core"]
    tier: Tier
    headers: str
    """Release of the headers that were compiled with; empty for a precompiled object."""
    maps: tuple[str, ...]
    programs: tuple[str, ...]
    attached: tuple[str, ...]
    missing: dict[str, str]
    """Programs that are not attached, and why."""
    load_ms: int
    attach_ms: int
    entry_points: dict[str, str] = field(default_factory=dict)
    """The driver's function that each program of those is attached to."""
    why_not_driver: str = ""
    """Why tier driver, which costs less, was not chosen."""

    def to_bytes(self) -> bytes:
        """Return the reply as a message."""
        return json.dumps(asdict(self)).encode()


def failure_message(error: ProbeLoadError) -> bytes:
    """Return the message with the reason why nothing was loaded."""
    return json.dumps({"code": error.code, "summary": str(error)[:MAX_SUMMARY_CHARACTERS]}).encode()


def read_reply(message: bytes) -> Reply:
    """Return the reply, or raise the ProbeLoadError that it contains."""
    try:
        values: dict[str, Any] = json.loads(message)
    except ValueError as error:
        raise ProbeLoadError(
            "loader_failed", f"The probe's loader sent an invalid answer: {error}; reinstall the agent"
        ) from error
    if "code" in values:
        raise ProbeLoadError(values["code"], values["summary"])
    for name in ("maps", "programs", "attached"):
        values[name] = tuple(values[name])
    return Reply(**values)


def last_useful_line(output: str) -> str:
    """Return the line of a compiler's or verifier's output that contains the error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return "no reason was given"
    omitted = f" ({len(lines) - 1} line(s) omitted)" if len(lines) > 1 else ""
    return _error_line(lines)[:MAX_LINE_CHARACTERS] + omitted


def _error_line(lines: list[str]) -> str:
    """Return a compiler's first error, or the verifier's last line before its counters."""
    for line, following in pairwise(lines):
        if following.startswith("processed "):
            return line
    return next((line for line in lines if "error:" in line), lines[-1])
