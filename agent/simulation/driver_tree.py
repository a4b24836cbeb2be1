"""The double of a driver's installation: libraries, programs, settings, firmware and sockets under one root.

*Invariants*
- Files are empty but for the linker's cache and the symbolic links; nothing of it is ever run or loaded.
- Where things are is as on a Debian host with NVIDIA's own packages.

Sources: NVIDIA's driver README, "Installed Components"; glibc:sysdeps/generic/dl-cache.h.
"""

import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LIBRARY_DIR: Final = "usr/lib/x86_64-linux-gnu"
HOOK: Final = "usr/bin/nvidia-ctk"

_LIBRARIES: Final = (
    *("libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so", "libnvidia-nvvm.so"),
    *("libnvidia-opencl.so", "libnvidia-allocator.so", "libnvidia-encode.so", "libnvcuvid.so"),
    *("libGLX_nvidia.so", "libEGL_nvidia.so", "libnvidia-opticalflow.so", "libnvidia-gpucomp.so"),
)
"""Each has a link of its ABI version."""
_PROGRAMS: Final = (
    *("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control"),
    *("nvidia-cuda-mps-server", "nvidia-ctk"),
)
_SETTINGS: Final = (
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "etc/vulkan/icd.d/nvidia_icd.json",
    "etc/OpenCL/vendors/nvidia.icd",
)
_FIRMWARE: Final = ("gsp_ga10x.bin", "gsp_tu10x.bin")

_MAGIC: Final = b"glibc-ld.so.cache1.1"
_HEADER: Final = struct.Struct("<20sII B3xI12x")
_ENTRY: Final = struct.Struct("<iIIIQ")
_X86_64: Final = 0x0303
"""Flags of a library for glibc 2 on x86-64."""


def write_driver_tree(version: str, root: Path) -> None:
    """Write the installation of a driver's version below a root."""
    libraries = root / LIBRARY_DIR
    libraries.mkdir(parents=True, exist_ok=True)
    for name in _LIBRARIES:
        (libraries / f"{name}.{version}").touch()
        _link(libraries / f"{name}.1", f"{name}.{version}")
    _link(libraries / "libcuda.so", "libcuda.so.1")
    (libraries / "vdpau").mkdir(exist_ok=True)
    (libraries / "vdpau" / f"libvdpau_nvidia.so.{version}").touch()
    # Since the merge of /usr.
    _link(root / "lib", "usr/lib")
    for name in _PROGRAMS:
        _write(root / "usr/bin" / name, mode=0o755)
    for path in _SETTINGS:
        _write(root / path)
    for name in _FIRMWARE:
        _write(root / "usr/lib/firmware/nvidia" / version / name)
    _write_socket(root / "run/nvidia-persistenced/socket")
    named = {f"{name}.1": f"/lib/x86_64-linux-gnu/{name}.1" for name in _LIBRARIES}
    (root / "etc/ld.so.cache").write_bytes(linker_cache(named))


def linker_cache(paths: Mapping[str, str], *, flags: int = _X86_64) -> bytes:
    """Return the dynamic linker's cache of libraries, each a name and its path."""
    strings = b""
    entries = b""
    begin = _HEADER.size + len(paths) * _ENTRY.size
    for name, path in sorted(paths.items(), reverse=True):
        name_at = begin + len(strings)
        strings += name.encode() + b"\0"
        path_at = begin + len(strings)
        strings += path.encode() + b"\0"
        entries += _ENTRY.pack(flags, name_at, path_at, 0, 0)
    return _HEADER.pack(_MAGIC, len(paths), len(strings), 2, 0) + entries + strings


def _write(path: Path, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(mode)


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _write_socket(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mknod(path, stat.S_IFSOCK | 0o666)
