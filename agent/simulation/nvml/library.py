"""The built simulated libnvidia-ml.so.1: where it is, and its gpusim_* control functions through ctypes.

*Invariant*: no layout of shared memory is known here; the C side finds every field by name.
"""

import ctypes
import functools
import os
import shutil
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

SONAME = "libnvidia-ml.so.1"
STATE_VARIABLE = "GPU_AGENT_SIM_STATE"
STATE_NAME = "nvml.state"

_DIRECTORY = Path(__file__).parent
_TEXT = ctypes.c_char_p
_INT = ctypes.c_int
_UINT = ctypes.c_uint
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_I64 = ctypes.c_int64
_CONTROL = ctypes.c_void_p

_SIGNATURES: dict[str, tuple[type, list[type]]] = {
    "gpusim_create": (_CONTROL, [_TEXT]),
    "gpusim_publish": (_INT, [_CONTROL]),
    "gpusim_open": (_CONTROL, [_TEXT]),
    "gpusim_begin": (_INT, [_CONTROL, _INT]),
    "gpusim_set_number": (_INT, [_CONTROL, _TEXT, _UINT, _U64]),
    "gpusim_set_text": (_INT, [_CONTROL, _TEXT, _UINT, _TEXT]),
    "gpusim_get_number": (_INT, [_CONTROL, _INT, _TEXT, _UINT, ctypes.POINTER(_U64)]),
    "gpusim_get_text": (_INT, [_CONTROL, _INT, _TEXT, _UINT, _TEXT, ctypes.c_size_t]),
    "gpusim_count": (_UINT, [_INT, _TEXT]),
    "gpusim_force": (_INT, [_CONTROL, _TEXT, _INT, _INT]),
    "gpusim_calls": (_I64, [_CONTROL, _TEXT, _INT]),
    "gpusim_counter": (_I64, [_CONTROL, _TEXT]),
    "gpusim_activity": (_U32, [_CONTROL]),
    "gpusim_wait_activity": (_INT, [_CONTROL, _U32, _U64]),
    "gpusim_push_event": (_I64, [_CONTROL, _INT, _U64, _U64, _U32, _U32]),
    "gpusim_push_rebind": (_INT, [_CONTROL, _INT, _INT]),
    "gpusim_event_times": (_INT, [_CONTROL, _U64, ctypes.POINTER(_U64)]),
}
_PROCEDURES: dict[str, list[type]] = {
    "gpusim_close": [_CONTROL],
    "gpusim_commit": [_CONTROL],
    "gpusim_abandon": [_CONTROL],
    "gpusim_unforce_all": [_CONTROL],
}


class LibraryNotBuiltError(RuntimeError):
    """The C library was not built."""


def library_path() -> Path:
    """Find the library beside this module. Raises LibraryNotBuiltError where it was not built."""
    for suffix in EXTENSION_SUFFIXES:
        path = _DIRECTORY / f"libnvidia_ml{suffix}"
        if path.exists():
            return path
    raise LibraryNotBuiltError(
        f"the simulated NVML library is not in {_DIRECTORY}; "
        "it is built with the package gpu-agent-simulation, in a checkout by make setup"
    )


def install_library(node: Path) -> Path:
    """Put the library into a node directory, where it finds that node's state without any setting.

    A copy and no link, because the loader knows a library by its inode: two nodes in one process, or a node
    and its control, must be two libraries. Returns `<node>/lib/libnvidia-ml.so.1`.
    """
    installed = node / "lib" / SONAME
    installed.parent.mkdir(parents=True, exist_ok=True)
    draft = installed.with_name(f"{SONAME}.{os.getpid()}")
    shutil.copy2(library_path(), draft)
    draft.replace(installed)
    return installed


@functools.cache
def control_functions() -> ctypes.CDLL:
    """Load the library and declare its control functions. They set errno when they fail."""
    library = ctypes.CDLL(str(library_path()), use_errno=True)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name, arguments in _PROCEDURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    return library
