"""The result of a loader, and the errors of a failed bpf(2) call."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from agent.errors import ProbeLoadError
from agent.probe.request import last_useful_line

SOURCE: Final = Path(__file__).parent / "source"
"""bpf/ of the repository, shipped with the package."""
OBJECT: Final = Path(__file__).parent / "gpu_probe.bpf.o"
"""The precompiled object; ``make bpf`` builds it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Programs in the kernel, not attached yet."""

    loader: Literal["bcc", "core"]
    headers: str
    maps: dict[str, int]
    programs: dict[str, int]
    missing: dict[str, str]
    """Programs that the kernel did not load, and why."""
    keep: object
    """The owner of the descriptors."""


def read_output() -> str:
    """Return what libraries wrote to standard error, which is a file in the loader process."""
    try:
        return os.pread(2, os.fstat(2).st_size, 0).decode(errors="replace").strip("\0")
    except OSError:
        return ""


def load_error(code: int, output: str) -> ProbeLoadError:
    """Return the error for a bpf(2) call that failed with this errno and this verifier log."""
    if code in {errno.EPERM, errno.EACCES} and "processed " not in output:
        return ProbeLoadError(
            "bpf_not_permitted",
            "The kernel does not permit the agent to load programs although it has the capabilities; "
            "check for a seccomp profile or security module that forbids bpf(2)",
        )
    if code == errno.ENOSYS:
        return ProbeLoadError(
            "bpf_unsupported", "The kernel was built without bpf(2); use --probe-tier procfs"
        )
    if code == errno.ENOMEM:
        return ProbeLoadError(
            "bpf_no_memory",
            "The kernel has no memory for the probe's maps (24 MiB); raise the agent's memory limit",
        )
    return ProbeLoadError(
        "verifier_refused",
        f"The kernel's verifier rejected the probe: {last_useful_line(output or os.strerror(code))}; "
        "use --probe-tier procfs, and report this with the log at --log-level debug",
    )
