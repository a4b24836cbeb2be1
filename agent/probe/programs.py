"""The programs of bpf/gpu_probe.bpf.c: what each attaches to, and in which tier."""

from typing import Final, Literal, NamedTuple

Tier = Literal["driver", "syscalls"]
Kind = Literal["tracepoint", "raw_tracepoint", "kprobe", "kretprobe", "iterator"]


class Program(NamedTuple):
    """One program; its name is that of the C function."""

    name: str
    kind: Kind
    target: str
    """Tracepoint as category/name, function of the kernel, or name of the iterator."""
    tiers: tuple[Tier, ...]
    vital: bool = True
    """Whether the tier is worthless without it."""
    traces: bool = False
    """It sends every call of one process, and is loaded only for that, without the others."""
    others: tuple[str, ...] = ()
    """Functions to trace where there is no ``target``, the first that there is, with the same arguments."""


_DRIVER: Final = ("driver",)
_SYSCALLS: Final = ("syscalls",)
_BOTH: Final = ("driver", "syscalls")

_FRONTEND_IOCTL: Final = ("nvidia_frontend_unlocked_ioctl",)
"""Of drivers 515 to 535, whose files are nv-frontend's. Source: open-gpu-kernel-modules, nv-frontend.c."""
_FRONTEND_OPEN: Final = ("nvidia_frontend_open",)
_FRONTEND_CLOSE: Final = ("nvidia_frontend_close",)

PROGRAMS: Final[tuple[Program, ...]] = (
    Program("driver_ioctl", "kprobe", "nvidia_unlocked_ioctl", _DRIVER, others=_FRONTEND_IOCTL),
    Program("driver_ioctl_return", "kretprobe", "nvidia_unlocked_ioctl", _DRIVER, others=_FRONTEND_IOCTL),
    Program("uvm_ioctl", "kprobe", "uvm_unlocked_ioctl_entry", _DRIVER, vital=False),
    Program("uvm_ioctl_return", "kretprobe", "uvm_unlocked_ioctl_entry", _DRIVER, vital=False),
    Program("driver_open", "kprobe", "nvidia_open", _DRIVER, vital=False, others=_FRONTEND_OPEN),
    Program("driver_open_return", "kretprobe", "nvidia_open", _DRIVER, vital=False, others=_FRONTEND_OPEN),
    Program("driver_close", "kprobe", "nvidia_close", _DRIVER, vital=False, others=_FRONTEND_CLOSE),
    Program("enter_ioctl", "tracepoint", "syscalls/sys_enter_ioctl", _SYSCALLS),
    Program("exit_ioctl", "tracepoint", "syscalls/sys_exit_ioctl", _SYSCALLS),
    Program("exit_open", "tracepoint", "syscalls/sys_exit_open", _SYSCALLS, vital=False),
    Program("exit_openat", "tracepoint", "syscalls/sys_exit_openat", _SYSCALLS, vital=False),
    Program("exit_openat2", "tracepoint", "syscalls/sys_exit_openat2", _SYSCALLS, vital=False),
    Program("enter_close", "tracepoint", "syscalls/sys_enter_close", _SYSCALLS, vital=False),
    Program("exit_close_range", "tracepoint", "syscalls/sys_exit_close_range", _SYSCALLS, vital=False),
    Program("exit_dup2", "tracepoint", "syscalls/sys_exit_dup2", _SYSCALLS, vital=False),
    Program("exit_dup3", "tracepoint", "syscalls/sys_exit_dup3", _SYSCALLS, vital=False),
    Program("process_fork", "raw_tracepoint", "sched_process_fork", _BOTH, vital=False),
    Program("process_exec", "raw_tracepoint", "sched_process_exec", _BOTH, vital=False),
    Program("process_exit", "raw_tracepoint", "sched_process_exit", _BOTH, vital=False),
    Program("bpf_iter__task_file", "iterator", "task_file", _BOTH, vital=False),
    Program(
        "trace_driver_ioctl", "kprobe", "nvidia_unlocked_ioctl", _DRIVER, traces=True, others=_FRONTEND_IOCTL
    ),
    Program(
        "trace_driver_ioctl_return",
        "kretprobe",
        "nvidia_unlocked_ioctl",
        _DRIVER,
        traces=True,
        others=_FRONTEND_IOCTL,
    ),
    Program("trace_uvm_ioctl", "kprobe", "uvm_unlocked_ioctl_entry", _DRIVER, vital=False, traces=True),
    Program(
        "trace_uvm_ioctl_return", "kretprobe", "uvm_unlocked_ioctl_entry", _DRIVER, vital=False, traces=True
    ),
    Program("trace_enter_ioctl", "tracepoint", "syscalls/sys_enter_ioctl", _SYSCALLS, traces=True),
    Program("trace_exit_ioctl", "tracepoint", "syscalls/sys_exit_ioctl", _SYSCALLS, traces=True),
)
BY_NAME: Final = {program.name: program for program in PROGRAMS}

MAPS: Final = (
    "objects",
    "processes",
    "forgotten",
    "cgroups",
    "openings",
    "config",
    "devices",
    "checks",
    "statistics",
    "traced",
    "events",
)
"""The maps user space reads or writes."""


def of_tier(tier: Tier, *, traces: bool = False) -> tuple[Program, ...]:
    """Return the programs of a tier: those that watch every process, or those that trace one."""
    return tuple(program for program in PROGRAMS if tier in program.tiers and program.traces == traces)
