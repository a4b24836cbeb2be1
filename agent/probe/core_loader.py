"""Loads the precompiled object through libbpf.so.1, by ctypes; only ever imported by the loader process.

libbpf relocates the offsets of kernel structs to the running kernel (CO-RE), so neither headers nor a
compiler are needed. Source: libbpf.h of libbpf 1.0, whose calls are kept by every 1.x.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.errors import ProbeLoadError
from agent.probe.loaded import OBJECT, Loaded, load_error, read_output
from agent.probe.programs import MAPS, Tier, of_tier
from agent.probe.request import Request

_P: Final = ctypes.c_void_p
_PROTOTYPES: Final = {
    "bpf_object__open_file": (_P, (ctypes.c_char_p, _P)),
    "bpf_object__load": (ctypes.c_int, (_P,)),
    "bpf_object__close": (None, (_P,)),
    "bpf_object__next_program": (_P, (_P, _P)),
    "bpf_program__name": (ctypes.c_char_p, (_P,)),
    "bpf_program__fd": (ctypes.c_int, (_P,)),
    "bpf_program__set_autoload": (ctypes.c_int, (_P, ctypes.c_bool)),
    "bpf_object__find_map_by_name": (_P, (_P, ctypes.c_char_p)),
    "bpf_map__fd": (ctypes.c_int, (_P,)),
    "bpf_map__set_max_entries": (ctypes.c_int, (_P, ctypes.c_uint32)),
}


def load(request: Request, tier: Tier) -> Loaded:
    """Load the programs of a tier, or raise ProbeLoadError."""
    path = Path(request.object_path) if request.object_path else OBJECT
    if not path.exists():
        raise ProbeLoadError(
            "object_missing",
            f"There is no precompiled probe at {path}: the package was built without clang; "
            "install a wheel that make wheel built, or python3-bpfcc for --probe-loader bcc",
        )
    if not Path(request.roots.btf).exists():
        raise ProbeLoadError(
            "bpf_unsupported",
            "The kernel does not describe its structs (BTF), which a precompiled probe needs; "
            "install its headers and use --probe-loader bcc",
        )
    library = _library()
    wanted = of_tier(tier, traces=bool(request.trace_tgid))
    try:
        loaded = _load(library, path, request, {program.name for program in wanted})
        missing: dict[str, str] = {}
    except ProbeLoadError as error:
        # libbpf loads all programs or none: retry with the vital ones alone.
        vital = {program.name for program in wanted if program.vital}
        try:
            loaded = _load(library, path, request, vital)
        except ProbeLoadError:
            raise error from None
        missing = {program.name: str(error) for program in wanted if not program.vital}
    maps, programs = loaded
    return Loaded("core", "", maps, programs, missing, keep=library)


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise ProbeLoadError(
            "libbpf_missing", f"libbpf.so.1 cannot be loaded ({error}); install libbpf1"
        ) from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _load(
    library: ctypes.CDLL, path: Path, request: Request, wanted: set[str]
) -> tuple[dict[str, int], dict[str, int]]:
    opened = library.bpf_object__open_file(os.fsencode(path), None)
    if not opened:
        raise ProbeLoadError(
            "object_missing",
            f"libbpf cannot read {path}: {os.strerror(ctypes.get_errno())}; build it with make bpf",
        )
    chosen: dict[str, int] = {}
    for program, name in _programs(library, opened):
        if name in wanted:
            chosen[name] = program
        else:
            library.bpf_program__set_autoload(program, False)  # noqa: FBT003 - a C function
    _size(library, opened, b"events", request.ring_bytes)
    _size(library, opened, b"processes", request.processes)
    _size(library, opened, b"traced", request.traced)
    code = library.bpf_object__load(opened)
    if code:
        library.bpf_object__close(opened)
        raise load_error(-code, read_output())
    maps = {
        name: library.bpf_map__fd(library.bpf_object__find_map_by_name(opened, name.encode()))
        for name in MAPS
    }
    return maps, {name: library.bpf_program__fd(program) for name, program in chosen.items()}


def _programs(library: ctypes.CDLL, opened: int) -> Iterator[tuple[int, str]]:
    program = library.bpf_object__next_program(opened, None)
    while program:
        yield program, library.bpf_program__name(program).decode()
        program = library.bpf_object__next_program(opened, program)


def _size(library: ctypes.CDLL, opened: int, name: bytes, entries: int) -> None:
    library.bpf_map__set_max_entries(library.bpf_object__find_map_by_name(opened, name), entries)
