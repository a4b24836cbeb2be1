"""Finds the driver's device nodes, and what belongs to them for graphics.

Invariants: everything here blocks and runs in a thread. Only nodes with one of the driver's names are listed.

Sources: NVIDIA/nvidia-container-toolkit:internal/discover, internal/info/drm, internal/platform-support/dgpu;
the kernel's sysfs-bus-pci.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from agent.core.allocation.cdi import DeviceNode, Drm, Link
from agent.sinks.cdi.file_tree import TooMuchError

MAX_NODES: Final = 16_384
"""Device nodes that are listed; a node has at most 2,048 IMEX channels."""

_NODES: Final = (
    ("", re.compile(r"nvidia[0-9]+|nvidiactl|nvidia-(?:modeset|uvm|uvm-tools|fs[0-9]*)|gdrdrv")),
    ("dri/", re.compile(r"(?:card|renderD)[0-9]+")),
    ("nvidia-caps/", re.compile(r"nvidia-cap[0-9]+")),
    ("nvidia-caps-imex-channels/", re.compile(r"channel[0-9]+")),
    ("infiniband/", re.compile(r"uverbs[0-9]+|rdma_cm")),
)
_PCI: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DRM_NODE: Final = re.compile(r"(?:card|renderD)[0-9]+")


class Places(msgspec.Struct, frozen=True):
    """Where to search, and the host's names for it."""

    root: str
    """The driver root as we see it."""
    host_root: str
    """The same as the host sees it."""
    dev: str
    """What stands for /dev, as we see it."""
    host_dev: str
    sys: str = "/sys"

    def on_host(self, path: str) -> str:
        """Return the host's path of what lies below the driver root."""
        return self.host_root.rstrip("/") + path


def device_nodes(places: Places, *, with_groups: bool) -> dict[str, DeviceNode]:
    """Return the nodes that are there, by path in a container; ``with_groups``: with their groups."""
    found: dict[str, DeviceNode] = {}
    # On a simulated node they are files.
    is_strict = os.path.abspath(places.dev) == "/dev"  # noqa: PTH100 - text is all that is needed
    for folder, pattern in _NODES:
        directory = f"{places.dev}/{folder}"
        for name in _names(directory):
            if pattern.fullmatch(name) is None:
                continue
            status = _status(directory + name)
            if status is None or not _is_node(status, is_strict=is_strict):
                continue
            if len(found) >= MAX_NODES:
                raise TooMuchError(f"{places.dev} has over {MAX_NODES} device nodes")
            group = _group_needed(status) if with_groups else None
            path = f"/dev/{folder}{name}"
            found[path] = DeviceNode(path, f"{places.host_dev.rstrip('/')}/{folder}{name}", group)
    return found


def _is_node(status: os.stat_result, *, is_strict: bool) -> bool:
    return stat.S_ISCHR(status.st_mode) or (not is_strict and stat.S_ISREG(status.st_mode))


def _group_needed(status: os.stat_result) -> int | None:
    """Return the group of a node that not everyone may read and write."""
    is_open = status.st_mode & 0o006 == 0o006
    return None if is_open or not stat.S_ISCHR(status.st_mode) else status.st_gid or None


def drm_of(places: Places, pci: str, nodes: Mapping[str, DeviceNode]) -> Drm:
    """Return what the GPU at a PCI address has for graphics, of the nodes that are there."""
    if _PCI.fullmatch(pci) is None:
        return Drm()
    names = [name for name in _names(f"{places.sys}/bus/pci/devices/{pci}/drm") if _DRM_NODE.fullmatch(name)]
    paths = tuple(path for path in (f"/dev/dri/{name}" for name in names) if path in nodes)
    return Drm(paths, tuple(_drm_links(places, pci, paths)))


def _drm_links(places: Places, pci: str, paths: Sequence[str]) -> Iterator[Link]:
    for kind in ("card", "render"):
        path = f"/dri/by-path/pci-{pci}-{kind}"
        with suppress(OSError):
            target = os.readlink(places.dev + path)  # noqa: PTH115 - text is all that is needed
            if f"/dev/dri/{target.rpartition('/')[2]}" in paths:
                yield Link(f"../{target.rpartition('/')[2]}", f"/dev{path}")


def _names(directory: str) -> list[str]:
    found: list[str] = []
    with suppress(OSError), os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_NODES:
                raise TooMuchError(f"{directory} has over {MAX_NODES} entries")
            found.append(entry.name)
    return sorted(found)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - text is all that is needed
    except OSError:
        return None
