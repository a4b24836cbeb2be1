"""What this kernel and this process permit: tiers, capabilities, the driver's device numbers.

Invariants: every root is a parameter, so that a test can simulate another machine. Nothing here changes
anything.
"""

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import ProbeLoadError
from agent.probe.attach import kprobes, tracefs
from agent.probe.programs import PROGRAMS, Tier

OLDEST: Final = (5, 8)
"""The first kernel with ring buffers, iterators and CAP_BPF."""
INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the machine's own pid namespace. Source: linux/proc_ns.h, PROC_PID_INIT_INO."""
NVIDIA_MAJOR: Final = 195
"""Of /dev/nvidiactl and /dev/nvidiaN. Source: open-gpu-kernel-modules, nv-chardev-numbers.h."""

_OWN_STATUS: Final = Path("/proc/self/status")
_OWN_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_CAP_SYS_ADMIN: Final = 21
_CAPABILITIES: Final = {"CAP_PERFMON": 38, "CAP_BPF": 39}
_CAP_SYS_RESOURCE: Final = 24
_OF_DRIVER: Final = {
    program.target: (program.target, *program.others)
    for program in PROGRAMS
    if program.kind in {"kprobe", "kretprobe"}
}
_VITAL: Final = frozenset(
    program.target for program in PROGRAMS if program.kind in {"kprobe", "kretprobe"} and program.vital
)
_MODULES: Final = frozenset({"nvidia", "nvidia_uvm"})
_RENAMED: Final = re.compile(r"\.(?:isra|constprop)\.\d+")
"""The suffix that a compiler adds to the name of a function's copy."""


@dataclass(frozen=True, slots=True)
class Roots:
    """Directories to read. A simulated node has a /proc of its own, but runs on this machine's kernel."""

    node_proc: str = "/proc"
    """For the driver's devices and version."""
    proc: str = "/proc"
    """For the kernel's own data."""
    sys: str = "/sys"
    modules: str = "/lib/modules"
    sources: str = "/usr/src"

    @property
    def btf(self) -> str:
        """The running kernel's BTF."""
        return f"{self.sys}/kernel/btf/vmlinux"


class Majors(NamedTuple):
    """Device numbers of the driver; 0: unknown."""

    nvidia: int = 0
    uvm: int = 0
    caps: int = 0


def release(roots: Roots) -> str:
    """Return the release of the running kernel."""
    try:
        return Path(roots.proc, "sys/kernel/osrelease").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return platform.release()


def version_of(kernel_release: str) -> tuple[int, int]:
    """Return major and minor version of a kernel release; (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", kernel_release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def majors(roots: Roots) -> Majors:
    """Return the present device numbers in /proc/devices."""
    found: dict[str, int] = {}
    for line in _text(Path(roots.node_proc, "devices")).partition("Block devices")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            found.setdefault(name.strip(), int(number))
    nvidia = next((found[name] for name in ("nvidia", "nvidia-frontend") if name in found), 0)
    return Majors(nvidia, found.get("nvidia-uvm", 0), found.get("nvidia-caps", 0))


def filesystem_of_doubles(directory: str | None) -> int | None:
    """Return st_dev of the file system whose files stand for devices; None: there is none."""
    if directory is None:
        return None
    try:
        device = Path(directory, "nvidiactl").stat().st_dev
        # A plain file in an ordinary directory stands for no device.
        return None if device == Path(directory).stat().st_dev else device
    except OSError:
        return None


def driver_branch(roots: Roots) -> int:
    """Return the branch of the driver that is loaded, such as 570; 0 where that is not known."""
    found = re.search(r"\b(\d{3,4})\.\d+(\.\d+)?\b", _text(Path(roots.node_proc, "driver/nvidia/version")))
    return int(found[1]) if found else 0


def alloc_status(branch: int, size: int) -> int | None:
    """Return where a driver's RM_ALLOC of so many bytes has its status; None: no branch has such a call.

    As ``allocated`` in bpf/objects.h. A branch that is not known, 0, is taken for a new one.
    """
    before_525, before_535 = 0 < branch < 525, 0 < branch < 535
    return {32: 24 if before_535 else 28, 40: 32 if before_525 else 36, 48: 40}.get(size)


def missing_capabilities(roots: Roots) -> tuple[str, ...]:
    """Return the capabilities the probe needs and this process does not have."""
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", _text(_OWN_STATUS), re.MULTILINE)
    held = int(found[1], 16) if found else 0
    missing = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if held >> _CAP_SYS_ADMIN & 1:
        missing = []
    if version_of(release(roots)) < (5, 11) and not held >> _CAP_SYS_RESOURCE & 1:
        missing.append("CAP_SYS_RESOURCE")
    return tuple(missing)


def check(roots: Roots) -> None:
    """Raise ProbeLoadError with the first reason why no program can be loaded at all."""
    running, machine = release(roots), platform.machine()
    if machine != "x86_64":
        raise ProbeLoadError(
            "bpf_unsupported",
            f"The probe runs only on x86_64, and this is {machine}, so contexts are unknown; "
            "use --probe-tier procfs to read holders from /proc without this message",
        )
    if version_of(running) < OLDEST:
        raise ProbeLoadError(
            "bpf_unsupported",
            f"Kernel {running} cannot run the probe, which needs Linux 5.8 or later; "
            "update it or use --probe-tier procfs",
        )
    if "[confidentiality]" in _text(Path(roots.sys, "kernel/security/lockdown")):
        raise ProbeLoadError(
            "kernel_lockdown",
            "The kernel is locked down (confidentiality), so nothing may read its memory; "
            "boot with lockdown=integrity to use the probe",
        )
    if missing := missing_capabilities(roots):
        raise ProbeLoadError(
            "missing_capability",
            f"The agent lacks {' and '.join(missing)}, which the probe needs; "
            "grant what is missing in the unit file or the pod's securityContext",
        )
    if _is_nested():
        raise ProbeLoadError(
            "pid_namespace",
            "The agent is in a PID namespace of its own, whose pids are not the kernel's; set hostPID: true",
        )


def choose_tier(wanted: str, roots: Roots, *, doubles: bool) -> Tier:
    """Return the tier to use; raises ProbeLoadError if the requested one is not possible.

    Tier driver, which costs less, needs kprobes and the driver's symbols. It waits for an unloaded driver.
    """
    if wanted == "syscalls":
        return "syscalls"
    why = why_not_driver(roots)
    if wanted == "driver":
        if why:
            raise ProbeLoadError("tier_unavailable", f"Tier driver is not possible: {why}; use tier syscalls")
        return "driver"
    if why or doubles:
        return "syscalls"
    return "driver"


def why_not_driver(roots: Roots) -> str | None:
    """Return why tier driver is not possible; None: it is, or there is no driver yet."""
    if kprobes(roots.sys) is None:
        return "the kernel has no kprobes"
    if majors(roots).nvidia == 0:
        return None
    absent = _VITAL - entry_points(roots).keys()
    if absent:
        names = sorted(" or ".join(_OF_DRIVER[name]) for name in absent)
        return f"the driver has no {', '.join(names)}"
    return None


def entry_points(roots: Roots) -> dict[str, str]:
    """Return the function to trace for each target of a program, where the driver has one; takes 0.1 s.

    It is the target, one of the program's alternatives, or one of these with a compiler's suffix.
    """
    wanted = {name for names in _OF_DRIVER.values() for name in names}
    found: dict[str, str] = {}
    try:
        with Path(roots.proc, "kallsyms").open(encoding="ascii", errors="replace") as lines:
            for symbol in _of_modules(lines):
                name = _RENAMED.sub("", symbol)
                if name in wanted and found.get(name) != name:
                    found[name] = symbol
    except OSError:
        return {}
    known = (
        (target, [found[name] for name in names if name in found]) for target, names in _OF_DRIVER.items()
    )
    return {target: symbols[0] for target, symbols in known if symbols}


def _of_modules(lines: Iterable[str]) -> Iterable[str]:
    """Yield the symbols of the driver's modules."""
    for line in lines:
        # Only modules' symbols have a fourth column.
        if line.endswith("]\n"):
            _, _, name, module = line.split(None, 3)
            if module.strip().strip("[]") in _MODULES:
                yield name


def check_tracefs(roots: Roots) -> None:
    """Raise ProbeLoadError if tracepoints cannot be found."""
    if tracefs(roots.sys) is None:
        raise ProbeLoadError(
            "tracefs_missing",
            f"The trace file system is not mounted at {roots.sys}/kernel/tracing; "
            "mount it (mount -t tracefs nodev /sys/kernel/tracing) or give the container the host's",
        )


def _is_nested() -> bool:
    try:
        return _OWN_PID_NAMESPACE.stat().st_ino != INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
