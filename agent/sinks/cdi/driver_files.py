"""Finds what containers need of the driver: libraries, programs, firmware, settings, sockets.

Invariants: everything here blocks and runs in a thread. What is found lies below the roots of the search
(see ``FileTree``), and is returned with the host's paths, which differ from ours in a container. Nothing that
the agent needs comes from here, so a driver that is installed strangely costs no more than its CDI names.

Sources: NVIDIA/nvidia-container-toolkit:pkg/nvcdi, internal/discover, internal/lookup, pkg/lookup.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent.core.allocation.cdi import SOCKET, DriverFiles, Link, Mount
from agent.sinks.cdi import ld_cache
from agent.sinks.cdi.device_nodes import Places, device_nodes, drm_of
from agent.sinks.cdi.file_tree import FileTree, TooMuchError

MAX_MOUNTS: Final = 2_048

_VERSION: Final = re.compile(r"[0-9]+(?:\.[0-9A-Za-z]+){1,4}")

_MULTIARCH: Final = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_LIBRARY_DIRS: Final = (
    "/",
    *("/usr/lib64", *(f"/usr/lib/{arch}{sub}" for sub in ("", "/nvidia/current") for arch in _MULTIARCH)),
    *("/lib64", *(f"/lib/{arch}{sub}" for sub in ("", "/nvidia/current") for arch in _MULTIARCH)),
)
_MARKER_LIBRARIES: Final = ("libcuda.so", "libnvidia-ml.so")
"""Where these are is where the driver is."""
_OTHER_LIBRARIES: Final = (
    "libnvidia-egl-gbm.so.*.*",
    "libnvidia-egl-wayland.so.*.*",
    "libnvidia-egl-wayland2.so.*.*",
    "libnvidia-egl-xcb.so.*.*",
    "libnvidia-egl-xlib.so.*.*",
    "libnvidia-nvvm70.so.*",
)
"""Libraries of the driver with a version of their own."""
_EXPLICIT_LIBRARIES: Final = (
    *("libEGL.so", "libGL.so", "libGLESv1_CM.so", "libGLESv2.so", "libGLX.so", "libGLdispatch.so"),
    *("libOpenCL.so", "libOpenGL.so", "libnvidia-api.so"),
    *("libnvidia-egl-xcb.so", "libnvidia-egl-xlib.so"),
)
"""What every vendor's driver may bring; only on demand."""

_PROGRAM_DIRS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_PROGRAMS: Final = (
    *("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control"),
    *("nvidia-cuda-mps-server", "nvidia-imex", "nvidia-imex-ctl", "nvidia-xconfig"),
)

_SETTING_DIRS: Final = ("/etc", "/usr/local/share", "/usr/share")
_SHARED_SETTINGS: Final = (
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "nvidia/nvoptix.bin",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
)
"""Containers find these below /usr/share, wherever the host has them."""
_MACHINE_SETTINGS: Final = (
    "OpenCL/vendors/nvidia.icd",
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_icd.{machine}.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
)
"""Containers find these below /etc."""

_X_MODULES: Final = (
    "modules/drivers",
    "modules/extensions",
    "modules/updates/drivers",
    "modules/updates/extensions",
)
_X_DIRS: Final = ("/usr/lib/xorg", "/usr/lib64/xorg", "/usr/X11R6/lib", "/usr/X11R6/lib64")

_SOCKETS: Final = (
    ("/run/nvidia-persistenced/socket", "/var/run/nvidia-persistenced/socket"),
    ("/run/nvidia-fabricmanager/socket", "/var/run/nvidia-fabricmanager/socket"),
)
_MPS_PIPES: Final = ("/tmp", "nvidia-mps")  # noqa: S108 - where NVIDIA's daemon has them


class NotFoundError(Exception):
    """The driver is not where it is expected; the message names what is missing and where."""


def find(
    places: Places, version: str, pci: Iterable[str], flags: frozenset[str] = frozenset()
) -> DriverFiles:
    """Return what there is of the driver of a version; ``pci`` are the addresses of the GPUs.

    Raises NotFoundError if its libraries are not there, TooMuchError beyond the bounds.
    """
    if _VERSION.fullmatch(version) is None or len(version) > 64:
        raise NotFoundError(f"the driver calls its version {version[:64]!r}, which no file name holds")
    nodes = device_nodes(places, with_groups="no-additional-gids-for-device-nodes" not in flags)
    search = _Search(places, version)
    search.add_libraries(explicit="enable-explicit-driver-libraries" in flags)
    search.add_files()
    if "disable-ipc-discoverer" not in flags:
        search.add_sockets()
    return DriverFiles(
        version=version,
        nodes=nodes,
        mounts=tuple(search.mounts.values()),
        links=tuple(search.links()),
        library_dirs=search.library_dirs,
        linker_dirs=search.linker_dirs(),
        storage_mounts=tuple(search.storage_mounts()),
        drm={each: drm_of(places, each, nodes) for each in pci},
    )


class _Search:
    """Collects mounts by their path in a container; what is found first counts."""

    def __init__(self, places: Places, version: str) -> None:
        self._places = places
        self._version = version
        self._tree = FileTree(places.root)
        self.mounts: dict[str, Mount] = {}
        self.library_dirs: tuple[str, ...] = ()
        self._libraries: set[str] = set()
        self._searched: tuple[str, ...] = ()

    def add_libraries(self, *, explicit: bool) -> None:
        """Add the driver's libraries; raises NotFoundError where there are none."""
        everywhere = self._searched = self._existing((*_LIBRARY_DIRS, *self._cached_dirs()))
        own = f"lib*.so.{self._version}"
        self.library_dirs = tuple(each for each in everywhere if any(self._tree.matching(each, own)))
        markers = tuple(f"{name}.{self._version}" for name in _MARKER_LIBRARIES)
        if not any(any(self._tree.matching(each, *markers)) for each in self.library_dirs):
            raise NotFoundError(
                f"there is no {markers[0]} below {self._places.root}, in the usual directories or where the"
                " linker's cache has them"
            )
        for directory in self.library_dirs:
            self._add_matching(directory, f"*.so.{self._version}")
            self._add_matching(f"{directory}/vdpau", f"*.so.{self._version}")
        for directory in everywhere:
            self._add_matching(directory, *_OTHER_LIBRARIES)
        if explicit:
            for directory in self.library_dirs:
                self._add_matching(directory, *_EXPLICIT_LIBRARIES)
        self._add_x_modules()

    def _cached_dirs(self) -> Iterator[str]:
        """Yield the directories where the linker finds the driver's libraries."""
        cache = self._tree.read("/etc/ld.so.cache", ld_cache.MAX_BYTES)
        for name, path in ld_cache.libraries(cache or b""):
            if name.startswith(_MARKER_LIBRARIES):
                resolved = self._tree.resolve(path)
                yield from (os.path.dirname(each) for each in (resolved, path) if each)  # noqa: PTH120

    def _existing(self, directories: Iterable[str]) -> tuple[str, ...]:
        resolved = (self._tree.resolve(each) for each in directories)
        return tuple(dict.fromkeys(each for each in resolved if each and self._tree.is_directory(each)))

    def _add_matching(self, directory: str, *patterns: str) -> None:
        for path in self._tree.matching(directory, *patterns):
            resolved = self._tree.resolve(path)
            if resolved is not None and self._tree.is_file(resolved):
                self._mount(resolved, resolved)
                self._libraries.add(resolved)

    def _add_x_modules(self) -> None:
        """Add what the X server loads: at their own paths, since its settings name them."""
        places = [f"{each}/nvidia/xorg" for each in self.library_dirs]
        places += [f"{each}/xorg/{sub}" for each in self.library_dirs for sub in _X_MODULES]
        places += [f"{each}/{sub}" for each in _X_DIRS for sub in _X_MODULES]
        for name in ("nvidia_drv.so", f"libglxserver_nvidia.so.{self._version}"):
            self._add_first(f"{each}/{name}" for each in places)

    def add_files(self) -> None:
        """Add programs, settings and firmware."""
        for name in _PROGRAMS:
            self._add_first((f"{each}/{name}" for each in _PROGRAM_DIRS), executable=True)
        for name in _SHARED_SETTINGS:
            self._add_first((f"{each}/{name}" for each in _SETTING_DIRS), f"/usr/share/{name}")
        for pattern in _MACHINE_SETTINGS:
            name = pattern.format(machine=os.uname().machine)
            # Some installations have them at the driver root itself.
            self._add_first((f"{each}/{name}" for each in (*_SETTING_DIRS, "")), f"/etc/{name}")
        for directory in self._firmware_dirs():
            folder = f"{directory.rstrip('/')}/nvidia/{self._version}"
            for path in self._tree.matching(folder, "gsp*.bin"):
                self._add_first((f"{folder}/{path.rpartition('/')[2]}",))

    def _firmware_dirs(self) -> Iterator[str]:
        custom = _first_line(Path(self._places.sys, "module/firmware_class/parameters/path"))
        if custom.startswith("/"):
            yield custom
        release = os.uname().release
        yield from (f"/lib/firmware/updates/{release}", "/lib/firmware/updates")
        yield from (f"/lib/firmware/{release}", "/lib/firmware")

    def add_sockets(self) -> None:
        """Add the sockets of NVIDIA's daemons that run now."""
        for candidates in _SOCKETS:
            for path in candidates:
                resolved = self._tree.resolve(path)
                if resolved is not None and self._tree.is_socket_or_directory(resolved):
                    self._mount(resolved, path, SOCKET)
                    break
        self._add_mps_pipes()

    def _add_mps_pipes(self) -> None:
        """Add the pipes of root's MPS daemon.

        Anybody may make something of that name: a link to what no container should see, or pipes to a daemon
        of their own.
        """
        folder, name = _MPS_PIPES
        resolved = self._tree.resolve(folder)
        if resolved is not None and self._tree.is_trusted_directory(f"{resolved}/{name}"):
            self._mount(f"{resolved}/{name}", f"{folder}/{name}", SOCKET)

    def storage_mounts(self) -> Iterator[Mount]:
        """Yield what GPUDirect Storage reads."""
        udev = self._tree.resolve("/run/udev")
        if udev is not None and self._tree.is_directory(udev):
            yield Mount(self._places.on_host(udev), "/run/udev")
        found = self._tree.first(("/etc/cufile.json",))
        if found is not None:
            yield Mount(self._places.on_host(found[1]), found[0])

    def linker_dirs(self) -> tuple[str, ...]:
        """Return the directories of the libraries that were found."""
        named = [path for path in self._libraries if path.rpartition("/")[2].startswith("lib")]
        return tuple(sorted({os.path.dirname(path) for path in named}))  # noqa: PTH120

    def links(self) -> Iterator[Link]:
        """Yield the symbolic links that lead to the libraries: the host's, and those that programs expect."""
        found: dict[str, Link] = {}
        for link in (*self._links_of_host(), *self._expected_links()):
            if link.path not in self.mounts:
                found.setdefault(link.path, link)
        yield from (found[path] for path in sorted(found))

    def _links_of_host(self) -> Iterator[Link]:
        own = {os.path.dirname(path) for path in self._libraries}  # noqa: PTH120
        stems = {path.rpartition("/")[2].partition(".so")[0] for path in self._libraries}
        for directory in sorted(own.union(self._searched)):
            for name in self._tree.names(directory or "/"):
                stem, is_library, _ = name.partition(".so")
                if is_library and stem in stems:
                    yield from self._link_of_host(directory.rstrip("/"), name)

    def _link_of_host(self, directory: str, name: str) -> Iterator[Link]:
        path = f"{directory}/{name}"
        target = self._tree.link_target(path)
        resolved = None if target is None else self._tree.resolve(path)
        if target is None or resolved not in self._libraries:
            return
        if "/" in target:
            # Its path needs a directory that containers do not have.
            target = resolved if os.path.dirname(resolved) != directory else resolved.rpartition("/")[2]  # noqa: PTH120
        yield Link(target, path)

    def _expected_links(self) -> Iterator[Link]:
        """Yield links that the driver's installer makes for programs that load libraries by name."""
        expected = (
            ("libcuda.so", "libcuda.so.1", "libcuda.so"),
            ("libGLX_nvidia.so", f"libGLX_nvidia.so.{self._version}", "libGLX_indirect.so.0"),
            ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"),
            ("libnvidia-allocator.so", "../libnvidia-allocator.so.1", "gbm/nvidia-drm_gbm.so"),
            (
                "libnvidia-vulkan-producer.so",
                f"libnvidia-vulkan-producer.so.{self._version}",
                "libnvidia-vulkan-producer.so",
            ),
            ("libglxserver_nvidia.so", f"libglxserver_nvidia.so.{self._version}", "libglxserver_nvidia.so"),
        )
        for library, target, link in expected:
            for path in sorted(self.mounts):
                directory, _, name = path.rpartition("/")
                if name == f"{library}.{self._version}":
                    yield Link(target, f"{directory}/{link}")

    def _add_first(
        self, paths: Iterable[str], container_path: str | None = None, *, executable: bool = False
    ) -> None:
        for path in paths:
            resolved = self._tree.resolve(path)
            if resolved is not None and self._tree.is_file(resolved, executable=executable):
                self._mount(resolved, container_path or path)
                return

    def _mount(self, path: str, container_path: str, options: tuple[str, ...] | None = None) -> None:
        if len(self.mounts) >= MAX_MOUNTS:
            raise TooMuchError(f"the driver below {self._places.root} has over {MAX_MOUNTS} files")
        host_path = self._places.on_host(path)
        mount = (
            Mount(host_path, container_path) if options is None else Mount(host_path, container_path, options)
        )
        self.mounts.setdefault(container_path, mount)


def _first_line(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.readline(4096).decode("ascii", "replace").strip()
    return ""
