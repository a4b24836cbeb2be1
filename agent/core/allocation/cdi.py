"""CDI specifications of this node's devices, from the snapshot's GPUs and the driver's files.

Guarantees:

1. A device is in a specification only if all that it needs was found and it can be named: every written name
   can be resolved, and one bad device excludes no other.
2. The result depends on nothing but the arguments, down to the order in every list, so an unchanged
   specification is not written again.
3. The version is the oldest one that has every field in use.

Sources: NVIDIA/k8s-device-plugin:internal/cdi; NVIDIA/nvidia-container-toolkit:pkg/nvcdi,
internal/discover, internal/edits; cncf-tags/container-device-interface:SPEC.md.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from agent.core.allocation.cdi_schema import name_problem, oldest_version
from agent.core.allocation.injection import CDI_VENDOR, IMEX_NODE
from agent.core.allocation.nodes import capability_nodes, node_of, unknown_message, unknown_nodes
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import Placement
from agent.model.policy import DeviceIdStrategy, Injection, MigStrategy

Document = dict[str, Any]

GPU: Final = "gpu"
IMEX: Final = "imex-channel"
CLASSES: Final = (GPU, "gds", "mofed", "gdrcopy", IMEX)

CONTROL_NODES: Final = ("/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl")

READ_ONLY: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET: Final = ("nosuid", "nodev", "rbind", "rprivate", "noexec")

VOID: Final = "NVIDIA_VISIBLE_DEVICES=void"
"""Keeps the NVIDIA runtime, where it is the container's, from giving the container all GPUs of the node."""

_CREATE_SYMLINKS: Final = "create-symlinks"
_COHERENT: Final = "gpu.nvidia.com/coherent"


class DeviceNode(NamedTuple):
    """An existing device node."""

    path: str
    """In a container."""
    host_path: str
    group: int | None = None
    """The group that may open it on the host; None: every user may."""


class Mount(NamedTuple):
    """A file or directory that containers get."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = READ_ONLY


class Link(NamedTuple):
    """A symbolic link that containers get."""

    target: str
    path: str


class Drm(NamedTuple):
    """A GPU's files for graphics."""

    nodes: tuple[str, ...] = ()
    """Paths of device nodes."""
    links: tuple[Link, ...] = ()
    """By which programs find them by PCI address."""


class DriverFiles(msgspec.Struct, frozen=True):
    """The driver's files on this node, with the paths of the host and of containers."""

    version: str
    nodes: Mapping[str, DeviceNode]
    """By path in a container."""
    mounts: tuple[Mount, ...] = ()
    links: tuple[Link, ...] = ()
    library_dirs: tuple[str, ...] = ()
    """Directories of the driver's own libraries, in a container."""
    linker_dirs: tuple[str, ...] = ()
    """Directories of all libraries among the mounts, for the dynamic linker's cache."""
    storage_mounts: tuple[Mount, ...] = ()
    """Files of GPUDirect Storage beside its nodes."""
    drm: Mapping[str, Drm] = msgspec.field(default_factory=dict)
    """By PCI address."""


class Hooks(NamedTuple):
    """The program that prepares a container, and its disabled hooks."""

    path: str | None
    """On the host; None: there is none."""
    disabled: frozenset[str] = frozenset()
    """Names of hooks, or ``all``."""

    def make(self, name: str, *arguments: str) -> list[Document]:
        """Return the hook of a name, as a list of one or none."""
        if self.path is None or self.disabled & {name, "all"}:
            return []
        program = self.path.rpartition("/")[2]
        # One program has the hooks as its commands, the other below a subcommand.
        words = [program, "hook"] if program == "nvidia-ctk" else [program]
        return [
            {
                "hookName": "createContainer",
                "path": self.path,
                "args": [*words, name, *arguments],
                "env": ["NVIDIA_CTK_DEBUG=false"],
            }
        ]

    def link(self, links: Iterable[Link]) -> list[Document]:
        """Return the hook that makes symbolic links."""
        arguments = [text for link in links for text in ("--link", f"{link.target}::{link.path}")]
        return self.make(_CREATE_SYMLINKS, *arguments) if arguments else []


def specifications(
    gpus: Iterable[Gpu],
    *,
    injection: Injection,
    mig_strategy: MigStrategy,
    files: DriverFiles,
    hooks: Hooks,
    annotate_coherent: bool = False,
) -> dict[str, Document]:
    """Return the specification of each class that has a device.

    Of two GPUs with one index the first counts, so those that NVML lists now come first.
    ``annotate_coherent``: annotate each whole GPU with whether its memory is coherent with the CPU's.
    """
    of_gpus = _gpu_devices(gpus, injection.ids, mig_strategy, files, hooks)
    devices = {
        GPU: [_annotated(gpu, mig, device) if annotate_coherent else device for gpu, mig, device in of_gpus],
        "gds": _all_of(_matching(files, "/dev/nvidia-fs"), files.storage_mounts) if injection.gds else [],
        "mofed": _all_of(_matching(files, "/dev/infiniband/")) if injection.mofed else [],
        "gdrcopy": _all_of(_matching(files, "/dev/gdrdrv")) if injection.gdrcopy else [],
        IMEX: list(_channel_devices(injection.imex_channels, files)),
    }
    common: Mapping[str, Document] = {GPU: _driver_edits(files, hooks), IMEX: {}}
    return {
        kind: _document(kind, listed, common.get(kind, {"env": [VOID]}))
        for kind, listed in devices.items()
        if listed
    }


def qualified_names(document: Document) -> frozenset[str]:
    """Return the names by which the devices of a specification are asked for."""
    return frozenset(f"{document['kind']}={device['name']}" for device in document["devices"])


def _document(kind: str, devices: Sequence[Document], common: Document) -> Document:
    document: Document = {"kind": f"{CDI_VENDOR}/{kind}", "devices": devices}
    if common:
        document["containerEdits"] = common
    return {"cdiVersion": oldest_version(document), **document}


def _gpu_devices(
    gpus: Iterable[Gpu],
    ids: DeviceIdStrategy,
    mig_strategy: MigStrategy,
    files: DriverFiles,
    hooks: Hooks,
) -> Iterator[tuple[Gpu, MigDevice | None, Document]]:
    named: set[str] = set()
    for gpu, mig in _parts(gpus, mig_strategy):
        name = _name(gpu, mig, ids)
        if name not in named and not _obstacle(gpu, mig, ids, files):
            named.add(name)
            yield gpu, mig, {"name": name, "containerEdits": _device_edits(gpu, mig, files, hooks)}


def _annotated(gpu: Gpu, mig: MigDevice | None, device: Document) -> Document:
    """Return the device with annotations that its reader may select by; MIG devices have none."""
    if mig is not None or gpu.coherent is None:
        return device
    return {"name": device["name"], "annotations": {_COHERENT: str(gpu.coherent).lower()}, **device}


def left_out(
    gpus: Iterable[Gpu], *, ids: DeviceIdStrategy, mig_strategy: MigStrategy, files: DriverFiles
) -> tuple[str, ...]:
    """Return a message for each device of these GPUs that is in no specification, with why."""
    lacking = ((gpu, mig, _obstacle(gpu, mig, ids, files)) for gpu, mig in _given(gpus, mig_strategy))
    return tuple(f"{(mig or gpu).uuid}: {why}" for gpu, mig, why in lacking if why)


def unnameable(
    gpus: Iterable[Gpu], *, ids: DeviceIdStrategy, mig_strategy: MigStrategy
) -> dict[Placement, str]:
    """Return the devices without a CDI name, each with why and the next step."""
    return {
        gpu.placement if mig is None else Placement(gpu.uuid, mig.gi, mig.ci): problem
        for gpu, mig in _given(gpus, mig_strategy)
        if (problem := _name_problem(gpu, mig, ids))
    }


def _name_problem(gpu: Gpu, mig: MigDevice | None, ids: DeviceIdStrategy) -> str:
    problem = name_problem(_name(gpu, mig, ids))
    return f"{problem}; name devices by index (--device-id-strategy)" if problem else ""


def _parts(gpus: Iterable[Gpu], mig_strategy: MigStrategy) -> Iterator[tuple[Gpu, MigDevice | None]]:
    """Yield the GPUs (None) and MIG devices that a specification may have."""
    for gpu in gpus:
        if mig_strategy == "none" or not gpu.mig_enabled:
            yield gpu, None
        for mig in gpu.mig_devices:
            yield gpu, mig


def _given(gpus: Iterable[Gpu], mig_strategy: MigStrategy) -> Iterator[tuple[Gpu, MigDevice | None]]:
    """Yield the same without those that no container gets."""
    return ((gpu, mig) for gpu, mig in _parts(gpus, mig_strategy) if mig is None or mig_strategy != "none")


def _name(gpu: Gpu, mig: MigDevice | None, ids: DeviceIdStrategy) -> str:
    if ids == "uuid":
        return gpu.uuid if mig is None else mig.uuid
    return str(gpu.index) if mig is None else f"{gpu.index}:{mig.index}"


def _device_edits(gpu: Gpu, mig: MigDevice | None, files: DriverFiles, hooks: Hooks) -> Document:
    """Return the container edits of a device with all its files."""
    drm = _drm(gpu, mig, files)
    return _edits(
        nodes=[files.nodes[path] for path in (*_paths(gpu, mig), *drm.nodes)], hooks=hooks.link(drm.links)
    )


def _obstacle(gpu: Gpu, mig: MigDevice | None, ids: DeviceIdStrategy, files: DriverFiles) -> str:
    """Return why a device cannot be in a specification; empty: it can."""
    if problem := _name_problem(gpu, mig, ids):
        return problem
    if unknown := unknown_nodes(gpu, mig):
        return unknown_message(unknown)
    wanted = (*_paths(gpu, mig), *_drm(gpu, mig, files).nodes)
    missing = [path for path in wanted if path not in files.nodes]
    return f"{', '.join(missing)} does not exist" if missing else ""


def _drm(gpu: Gpu, mig: MigDevice | None, files: DriverFiles) -> Drm:
    # Only MIG devices with graphics can use the files for it.
    has_graphics = mig is None or "gfx" in mig.profile.split("+")[1:]
    return files.drm.get(gpu.pci, Drm()) if has_graphics else Drm()


def _paths(gpu: Gpu, mig: MigDevice | None) -> Iterator[str]:
    """Yield the nodes without which a device cannot be used, where all of them are known."""
    yield from node_of(gpu)
    if mig is not None:
        yield from capability_nodes(mig)


def _driver_edits(files: DriverFiles, hooks: Hooks) -> Document:
    """Return the container edits of every GPU."""
    folders = [text for directory in files.linker_dirs for text in ("--folder", directory)]
    return _edits(
        env=(f"NVIDIA_CTK_LIBCUDA_DIR={':'.join(files.library_dirs)}", VOID),
        nodes=[files.nodes[path] for path in CONTROL_NODES if path in files.nodes],
        mounts=files.mounts,
        hooks=[
            *hooks.link(files.links),
            *hooks.make("enable-cuda-compat", f"--host-driver-version={files.version}"),
            *(hooks.make("update-ldcache", *folders) if folders else ()),
            *hooks.make("disable-device-node-modification"),
            *hooks.make("update-application-profile"),
        ],
    )


def _matching(files: DriverFiles, prefix: str) -> list[DeviceNode]:
    return [node for path, node in sorted(files.nodes.items()) if path.startswith(prefix)]


def _all_of(nodes: Sequence[DeviceNode], mounts: Sequence[Mount] = ()) -> list[Document]:
    """Return the only device of a class, if any of its files exists."""
    if not nodes:
        return []
    return [{"name": "all", "containerEdits": _edits(nodes=nodes, mounts=mounts)}]


def _channel_devices(channels: Iterable[int], files: DriverFiles) -> Iterator[Document]:
    for channel in dict.fromkeys(channels):
        node = files.nodes.get(f"{IMEX_NODE}{channel}")
        if node is not None:
            yield {"name": str(channel), "containerEdits": _edits(nodes=[node])}


def _edits(
    *,
    env: Sequence[str] = (),
    nodes: Sequence[DeviceNode] = (),
    mounts: Sequence[Mount] = (),
    hooks: Sequence[Document] = (),
) -> Document:
    edits: Document = {
        "env": list(env),
        "deviceNodes": [{"path": node.path, "hostPath": node.host_path} for node in nodes],
        "mounts": [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                "options": list(mount.options),
            }
            for mount in sorted(mounts, key=lambda mount: mount.container_path)
        ],
        "hooks": list(hooks),
        # A process that is not root needs the group of a node that not every user may open.
        "additionalGids": sorted({node.group for node in nodes if node.group}),
    }
    return {key: value for key, value in edits.items() if value}
