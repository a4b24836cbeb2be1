"""Attaches loaded programs, each on its own: one that cannot be attached is named with its reason.

A program stays attached as long as the descriptor that stands for it is open, in whichever process.
"""

import errno
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from agent.probe import returns, syscalls
from agent.probe.programs import Program

_REASONS: Final = {
    errno.ENOENT: "the kernel has no {target}",
    errno.EINVAL: "the kernel cannot trace {target}",
    errno.EPERM: "not permitted",
    errno.EACCES: "not permitted",
}


_OF_FUNCTIONS: Final = frozenset({"kprobe", "kretprobe"})
_AS_NAMED: Final[Mapping[str, str]] = MappingProxyType({})


class Attachment(NamedTuple):
    """The outcome of attaching."""

    attached: dict[str, int]
    """Descriptor of each program that is attached."""
    missing: dict[str, str]
    """Why the others are not."""
    entry_points: dict[str, str]
    """The driver's function that each is attached to, of those that are."""


class Kprobes(NamedTuple):
    """How to attach to functions of the kernel."""

    pmu: int
    return_bit: int


def attach(
    programs: Iterable[Program],
    loaded: Mapping[str, int],
    *,
    sys_root: str,
    functions: Mapping[str, str] = _AS_NAMED,
) -> Attachment:
    """Attach the programs that are loaded; ``functions`` maps targets to the functions to trace instead."""
    attached: dict[str, int] = {}
    missing: dict[str, str] = {}
    entry_points: dict[str, str] = {}
    remove_events(sys_root)
    for program in programs:
        descriptor = loaded.get(program.name)
        if descriptor is None:
            missing[program.name] = "was not loaded"
            continue
        target = functions.get(program.target, program.target)
        try:
            attached[program.name] = attach_one(
                program._replace(target=target), descriptor, sys_root=sys_root
            )
        except OSError as error:
            text = _REASONS.get(error.errno or 0, error.strerror or str(error))
            missing[program.name] = text.format(target=target)
        else:
            if program.kind in _OF_FUNCTIONS:
                entry_points[program.name] = target
    return Attachment(attached, missing, entry_points)


def attach_one(program: Program, descriptor: int, *, sys_root: str) -> int:
    """Attach a program and return the descriptor that stands for it; raises OSError."""
    if program.kind == "tracepoint":
        return syscalls.tracepoint(_tracepoint_id(program.target, sys_root), descriptor)
    if program.kind == "raw_tracepoint":
        return syscalls.raw_tracepoint(program.target, descriptor)
    if program.kind == "iterator":
        return syscalls.iterator_link(descriptor)
    probes = kprobes(sys_root)
    if probes is None:
        raise FileNotFoundError(errno.ENOENT, "the kernel has no kprobes")
    mounted = tracefs(sys_root)
    if program.kind == "kretprobe" and mounted is not None:
        # Without the right to define events, a perf event follows fewer calls at once.
        with suppress(OSError):
            return syscalls.tracepoint(returns.define(program.target, mounted), descriptor)
    return syscalls.kprobe(
        probes.pmu,
        program.target,
        descriptor,
        at_return=program.kind == "kretprobe",
        return_bit=probes.return_bit,
    )


def remove_events(sys_root: str) -> None:
    """Remove trace events of programs that are not attached any more, if possible."""
    mounted = tracefs(sys_root)
    if mounted is not None:
        returns.remove_left_behind(mounted)


def kprobes(sys_root: str) -> Kprobes | None:
    """Return how to attach to functions; None on a kernel without kprobes."""
    folder = Path(sys_root, "bus/event_source/devices/kprobe")
    try:
        pmu = int((folder / "type").read_text())
        bit = int((folder / "format/retprobe").read_text().strip().removeprefix("config:"))
    except (OSError, ValueError):
        return None
    return Kprobes(pmu, bit)


def tracefs(sys_root: str) -> str | None:
    """Return where the trace file system is mounted; None if it is not, or may not be read."""
    for folder in ("kernel/tracing", "kernel/debug/tracing"):
        path = os.path.join(sys_root, folder)  # noqa: PTH118 - a string is wanted
        if os.path.isdir(os.path.join(path, "events")):  # noqa: PTH112, PTH118
            return path
    return None


def _tracepoint_id(target: str, sys_root: str) -> int:
    mounted = tracefs(sys_root)
    if mounted is None:
        raise FileNotFoundError(errno.ENOENT, "the trace file system is not mounted")
    return int(Path(mounted, "events", target, "id").read_text())
