"""One scan of what the kernel shows of GPUs under /sys, /proc and /dev.

Invariants: everything here blocks, if only for microseconds, and runs in a thread. What cannot be read
is unknown (None), never empty. It reads only attributes of a device that the kernel keeps in memory,
with one exception: where the driver excludes GPUs, its own file on a GPU is read once for each
time that GPU is bound, because only that file contains the UUID; it may wait for the driver's lock.

Sources: kernel Documentation/ABI/testing/sysfs-bus-pci; NVIDIA/open-gpu-kernel-modules:nv-procfs.c and
nv.c (ExcludedGpus, GpuBlacklist), nvidia-uvm/uvm.c (uvm_open).
"""

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from agent.core.allocation.nodes import UVM_NODE

MAX_GPUS: Final = 1_024
"""NVIDIA functions that are read, in the order of their addresses."""

DRIVER: Final = "nvidia"
CONTROL_NODE: Final = "/dev/nvidiactl"

_VENDOR: Final = "0x10de"
_CLASSES: Final = ("0x0300", "0x0302")
"""VGA and 3D controllers; an NVSwitch or an audio function is neither."""
_NO_ANSWER: Final = b"\xff\xff"
"""The value that the bus returns where no device answers."""
_INCONCLUSIVE: Final = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.EAGAIN,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
    }
)
"""Errors not from the driver, or not permanent: 515 returns EAGAIN while the machine is suspended."""
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM})
"""Errors of the agent, not of the device."""
_MAX_BYTES: Final = 16_384
_EXCLUDED_PARAMETER: Final = re.compile(r'^(?:ExcludedGpus|GpuBlacklist): *"([^"\n]{1,4096})"', re.MULTILINE)
_EXCLUDED_UUID: Final = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{1,64})", re.MULTILINE)
_EXCLUDED_FLAG: Final = re.compile(r"^(?:GPU Excluded|Blacklisted):\s*Yes", re.MULTILINE)

Binding = tuple[int, int]
"""Inodes of a device and of its link to the driver: the kernel assigns new ones whenever it creates them."""


class Roots(msgspec.Struct, frozen=True):
    """The directories to scan, which stand for /sys, /proc and /dev."""

    sys: Path
    proc: Path
    dev: Path
    strict_nodes: bool
    """Whether a node has to be a character device; on a simulated node it is a file."""


class SysfsScan(msgspec.Struct, frozen=True):
    """The result of one scan; None: could not be read."""

    gpus: tuple[str, ...] | None
    """PCI addresses of the GPUs that are bound to NVIDIA's driver and not excluded."""
    bindings: Mapping[str, Binding]
    """Of each GPU that is bound to it, including excluded ones."""
    module_visible: bool
    module: int | None
    """Inode of the module's directory; None: not loaded, if ``module_visible``."""
    missing: tuple[str, ...] | None
    exclusions: "Exclusions"
    configs: Mapping[str, bool] = msgspec.field(default_factory=dict)
    """By requested function: whether its configuration space answers; absent if unknown."""
    uvm: str | None = None
    """Why opening /dev/nvidia-uvm fails, empty if it succeeds; None: not requested, or unknown."""


class Exclusions(msgspec.Struct, frozen=True):
    """Which GPUs the driver excludes, as far as its files were read already."""

    parameter: str = ""
    verdicts: Mapping[tuple[str, Binding], bool | None] = msgspec.field(default_factory=dict)
    """None: its file could not be read yet."""


def scan_sysfs(
    roots: Roots,
    wanted_nodes: Iterable[str] | None,
    known: Exclusions,
    *,
    configs: Iterable[str] = (),
    uvm: bool = False,
) -> SysfsScan:
    """Scan once; ``wanted_nodes`` are those that should exist beside the driver's, None: not checked.

    ``configs`` are the functions whose configuration space is read, which may wake a device up; ``uvm``:
    whether /dev/nvidia-uvm is opened.
    """
    bound, exclusions, gpus = None, known, None
    with suppress(OSError):
        found = _bound_gpus(roots.sys)
        exclusions = _exclusions(roots.proc, found, known)
        bound = found
    if bound is not None:
        gpus = tuple(pci for pci, binding in bound.items() if not exclusions.verdicts.get((pci, binding)))
    modules = roots.sys / "module"
    module = _inode(modules / DRIVER)
    return SysfsScan(
        gpus=gpus,
        bindings=bound or {},
        module_visible=modules.is_dir(),
        module=module,
        missing=None if wanted_nodes is None else _missing_nodes(roots, wanted_nodes),
        exclusions=exclusions,
        configs={pci: answers for pci in configs if (answers := _config_answers(roots.sys, pci)) is not None},
        uvm=_uvm_error(roots) if uvm else None,
    )


def _config_answers(sys_root: Path, pci: str) -> bool | None:
    """Return whether the vendor id of a function is valid; None: it could not be read."""
    device = sys_root / "bus/pci/devices" / pci
    try:
        with (device / "config").open("rb", buffering=0) as config:
            vendor = config.read(2)
    except FileNotFoundError:
        return None if device.exists() or not device.parent.is_dir() else False
    except OSError:
        return None
    return None if len(vendor) < len(_NO_ANSWER) else vendor != _NO_ANSWER


def _uvm_error(roots: Roots) -> str | None:
    """Open and close the unified memory driver, which rejects each open after a fatal error."""
    try:
        descriptor = os.open(roots.dev / UVM_NODE.removeprefix("/dev/"), os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return None if error.errno in _INCONCLUSIVE else (error.strerror or str(error))
    os.close(descriptor)
    return ""


def driver_of(sys_root: Path, pci: str) -> str | None:
    """Return the driver that a PCI function is bound to; None: no driver, or no such function."""
    try:
        return os.path.basename(os.readlink(sys_root / "bus/pci/devices" / pci / "driver"))  # noqa: PTH115, PTH119
    except OSError:
        return None


def _bound_gpus(sys_root: Path) -> dict[str, Binding]:
    """Return the GPUs that are bound to NVIDIA's driver, in the order of their addresses.

    Raises OSError where one of them could not be read: that one is not absent.
    """
    devices = sys_root / "bus/pci/devices"
    names = sorted(os.listdir(devices))  # noqa: PTH208 - names are all that is needed
    bound: dict[str, Binding] = {}
    for name in names:
        device = devices / name
        if len(bound) < MAX_GPUS and _is_gpu(device) and driver_of(sys_root, name) == DRIVER:
            binding = (_inode(device), _inode(device / "driver", follow=False))
            if binding[0] is not None and binding[1] is not None:
                bound[name] = (binding[0], binding[1])
    return bound


def _is_gpu(device: Path) -> bool:
    if _read(device / "vendor").strip() != _VENDOR or not _read(device / "class").startswith(_CLASSES):
        return False
    # A virtual function of a GPU that virtual machines share is no GPU of this node.
    return not os.path.lexists(device / "physfn")


def _exclusions(proc_root: Path, bound: Mapping[str, Binding], known: Exclusions) -> Exclusions:
    """Return which of the bound GPUs are excluded, reading the driver's file only of unknown ones."""
    driver = proc_root / "driver" / DRIVER
    parameter = ",".join(_EXCLUDED_PARAMETER.findall(_read(driver / "params")))
    if not parameter:
        return Exclusions()
    verdicts = {each: known.verdicts.get(each) for each in bound.items() if known.parameter == parameter}
    for pci, binding in bound.items():
        if verdicts.get((pci, binding)) is None:
            information = _read(driver / "gpus" / pci / "information")
            verdicts[pci, binding] = _is_excluded(information, parameter) if information else None
    return Exclusions(parameter, verdicts)


def _is_excluded(information: str, parameter: str) -> bool:
    uuid = _EXCLUDED_UUID.search(information)
    named = uuid is not None and uuid[1].lower() in parameter.lower()
    return named or _EXCLUDED_FLAG.search(information) is not None


def _missing_nodes(roots: Roots, nodes: Iterable[str]) -> tuple[str, ...] | None:
    if not roots.dev.is_dir():
        return None
    wanted = sorted(nodes)
    if not wanted:
        return ()
    wanted.append(CONTROL_NODE)
    if (roots.sys / "module" / "nvidia_uvm").is_dir():
        wanted.append(UVM_NODE)
    return tuple(path for path in wanted if not _is_node(roots, path))


def _is_node(roots: Roots, path: str) -> bool:
    """Return whether a node exists; one that cannot be read is not missing."""
    try:
        seen = (roots.dev / path.removeprefix("/dev/")).stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return stat.S_ISCHR(seen.st_mode) or (not roots.strict_nodes and stat.S_ISREG(seen.st_mode))


def _inode(path: Path, *, follow: bool = True) -> int | None:
    try:
        return path.stat(follow_symlinks=follow).st_ino
    except OSError:
        return None


def _read(path: Path) -> str:
    """Return a small file's text; empty where there is none, as when the device was just removed.

    Raises OSError where the agent lacks rights, descriptors or memory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _OURS:
            raise
        return ""
    try:
        return os.read(descriptor, _MAX_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
