"""What a loader hands on, and the words for a kernel that refuses."""

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
    """Programs the kernel would not load, and why."""
    keep: object
    """Whatever owns the descriptors."""


def said() -> str:
    """Return what libraries wrote to standard error, which is a file in the loader process."""
    try:
        return os.pread(2, os.fstat(2).st_size, 0).decode(errors="replace").strip("\0")
    except OSError:
        return ""


def refused(code: int, told: str) -> ProbeLoadError:
    """Return the error for a bpf(2) call that failed with this errno; the verifier's log tells it apart."""
    if code in {errno.EPERM, errno.EACCES} and "processed " not in told:
        return ProbeLoadError(
            "bpf_not_permitted",
            "The kernel does not let the agent load programs although it has the capabilities; "
            "look for a seccomp profile or security module that forbids bpf(2)",
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
        f"The kernel's verifier refused the probe: {last_useful_line(told or os.strerror(code))}; "
        "use --probe-tier procfs, and report this with the log at --log-level debug",
    )
