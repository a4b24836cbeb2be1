"""Compiles bpf/gpu_probe.bpf.c with bcc; only ever imported by the loader process.

bcc and LLVM cost 130 MiB and parts of them exit their process, so they do not run in the agent.
"""

import errno
import glob
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

from agent.errors import ProbeLoadError
from agent.probe import btf, headers
from agent.probe.loaded import SOURCE, Loaded, load_error, read_output
from agent.probe.programs import MAPS, Kind, Program, Tier, of_tier
from agent.probe.request import Request, last_useful_line

_CONSTANTS: Final[dict[Kind, str]] = {
    "tracepoint": "TRACEPOINT",
    "raw_tracepoint": "RAW_TRACEPOINT",
    "kprobe": "KPROBE",
    "kretprobe": "KPROBE",
    "iterator": "TRACING",
}
"""Names of bcc's program types."""
_PAGE_BYTES: Final = 4096
_INCLUDED: Final = re.compile(r'^#include "(\w+\.h)"$', re.MULTILINE)


def load(request: Request, tier: Tier) -> Loaded:
    """Compile and load the programs of a tier, or raise ProbeLoadError."""
    if not _find_bcc(request.bcc_paths):
        raise ProbeLoadError("bcc_missing", "The module bcc was not found; install python3-bpfcc")
    found = headers.find(request.roots, request.scratch)
    flags = [*_flags(request), *_offsets(request.roots.btf)]
    # libbcc reads this: where to find headers other than those of /lib/modules/RELEASE.
    os.environ["BCC_KERNEL_SOURCE"] = found.directory
    module = _compile(_one_text(SOURCE / "gpu_probe.bpf.c"), flags)
    programs, missing = _programs(module, of_tier(tier, traces=bool(request.trace_tgid)))
    maps = {name: int(module[name].map_fd) for name in MAPS}
    return Loaded("bcc", found.release, maps, programs, missing, keep=module)


def _find_bcc(paths: tuple[str, ...]) -> bool:
    for path in (match for pattern in paths for match in sorted(glob.glob(pattern))):  # noqa: PTH207
        if Path(path, "bcc").is_dir():
            sys.path.append(path)
            break
    return importlib.util.find_spec("bcc") is not None


def _one_text(path: Path) -> str:
    """Return a source with its headers inlined: bcc rewrites calls of maps only in the main text."""
    text = path.read_text(encoding="utf-8")
    return _INCLUDED.sub(lambda found: (path.parent / found[1]).read_text(encoding="utf-8"), text)


def _flags(request: Request) -> list[str]:
    return [
        "-DGPU_PROBE_BCC",
        f"-DRING_PAGES={request.ring_bytes // _PAGE_BYTES}",
        f"-DMAX_PROCESSES={request.processes}",
        f"-DMAX_TRACED={request.traced}",
        "-w",  # of the headers; make bpf shows those of the probe
    ]


def _offsets(path: str) -> list[str]:
    """Return the offsets of kernel structs; none if the kernel has no BTF: then the headers are its own."""
    try:
        return [f"-DOFFSET_{name}={offset}" for name, offset in btf.kernel_offsets(path).items()]
    except btf.BtfError:
        if Path(path).exists():
            raise ProbeLoadError(
                "bpf_unsupported",
                f"The kernel's BTF ({path}) lacks what the probe reads; use --probe-tier procfs",
            ) from None
        return []


def _compile(text: str, flags: list[str]) -> Any:
    try:
        from bcc import BPF  # type: ignore[import-not-found]  # noqa: PLC0415 - a Debian package
    except Exception as error:
        raise ProbeLoadError(
            "bcc_missing",
            f"The module bcc cannot be imported: {error}; reinstall python3-bpfcc or use --probe-loader core",
        ) from error
    try:
        return BPF(text=text, cflags=flags)
    except Exception as error:
        output = read_output()
        if _is_permission(error, output):
            raise load_error(errno.EPERM, output) from error
        raise ProbeLoadError(
            "compile_failed",
            f"bcc could not compile the probe: {last_useful_line(output or str(error))}; "
            "use --probe-loader core",
        ) from error


def _programs(module: Any, wanted: tuple[Program, ...]) -> tuple[dict[str, int], dict[str, str]]:
    programs: dict[str, int] = {}
    missing: dict[str, str] = {}
    for program in wanted:
        try:
            function = module.load_func(program.name, getattr(module, _CONSTANTS[program.kind]))
        except Exception as error:
            output = read_output() or str(error)
            if program.vital:
                raise load_error(
                    errno.EPERM if _is_permission(error, output) else errno.EINVAL, output
                ) from error
            missing[program.name] = last_useful_line(output)
        else:
            programs[program.name] = int(function.fd)
    return programs, missing


def _is_permission(error: Exception, output: str) -> bool:
    text = f"{error} {output}"
    return (
        isinstance(error, PermissionError)
        or "Operation not permitted" in text
        or "super-user privileges" in text
    )
