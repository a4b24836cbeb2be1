"""A container's environment, mounts and nodes for its devices, by NVIDIA's device list strategies.

Invariants: the answer comes from the snapshot alone; no text of the request gets into it. Devices are
listed in the order (GPU, GPU instance, compute instance), each once, so the answer does not depend on
the order of the request, which the kubelet shuffles.

Source: NVIDIA/k8s-device-plugin:internal/plugin/server.go, mps.go; internal/cdi/cdi.go.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from agent.core.allocation.nodes import capability_nodes, node_of
from agent.model.gpu import Gpu
from agent.model.policy import DeviceIdStrategy, DeviceListStrategy, Injection, Policy
from agent.model.snapshot import Device, Resource, Snapshot

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
LIST_DIRECTORY: Final = "/var/run/nvidia-container-devices"
"""The NVIDIA runtime reads a container's devices from the names of files mounted here."""
NOTHING_PATH: Final = "/dev/null"
"""The source of those mounts: only their names count."""
CDI_VENDOR: Final = "k8s.device-plugin.nvidia.com"
ANNOTATION_OWNER: Final = "nvidia-device-plugin"
MPS_ROOT: Final = "/mps"
"""A container's path of the host's ``Injection.mps_root``."""
IMEX_NODE: Final = "/dev/nvidia-caps-imex-channels/channel"

_CDI_STRATEGIES: Final[frozenset[DeviceListStrategy]] = frozenset({"cdi-annotations", "cdi-cri"})


class DeviceNode(msgspec.Struct, frozen=True):
    """A device node for the container."""

    container_path: str
    host_path: str
    permissions: str = "rw"


class Mount(msgspec.Struct, frozen=True):
    """A file or directory of the host to be mounted into the container."""

    container_path: str
    host_path: str
    read_only: bool = False


class ContainerAnswer(msgspec.Struct, frozen=True):
    """The answer for one container."""

    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
    """CDI names for the container runtime."""


def uses_cdi(injection: Injection) -> bool:
    """Return whether answers hold CDI names, which some spec file has to resolve."""
    return not _CDI_STRATEGIES.isdisjoint(injection.strategies)


def gives_capabilities(policy: Policy, *, sees_new_nodes: bool) -> bool:
    """Return whether no container can use a MIG device whose nodes are not visible.

    Without CDI and device specs the NVIDIA runtime makes the nodes when a container starts. Device specs
    name what the node has, where we may not see it; a CDI specification is made of what we see.
    """
    injection = policy.injection
    is_given = uses_cdi(injection) or (injection.pass_device_specs and sees_new_nodes)
    return is_given and policy.mig_strategy != "none"


def names_nodes(injection: Injection) -> bool:
    """Return whether answers have device nodes by path, so that a node without a known path is an error."""
    return uses_cdi(injection) or injection.pass_device_specs


def is_cdi_only(injection: Injection) -> bool:
    """Return whether the container's runtime gets the devices by CDI alone."""
    return _CDI_STRATEGIES.issuperset(injection.strategies)


def cdi_name(kind: str, device: str) -> str:
    """Return a device's fully qualified CDI name: ``k8s.device-plugin.nvidia.com/gpu=GPU-…``."""
    return f"{CDI_VENDOR}/{kind}={device}"


def cdi_names(answer: ContainerAnswer) -> tuple[str, ...]:
    """Return the CDI names in an answer, in its field and its annotations."""
    annotated = (name for names in answer.annotations.values() for name in names.split(","))
    return tuple(dict.fromkeys((*answer.cdi_devices, *annotated)))


def extra_cdi_names(injection: Injection) -> tuple[str, ...]:
    """Return the CDI names of the devices beside GPUs that a container gets where the node has them."""
    wanted = (("gdrcopy", injection.gdrcopy), ("gds", injection.gds), ("mofed", injection.mofed))
    return tuple(cdi_name(kind, "all") for kind, is_wanted in wanted if is_wanted)


def name_in_container(device: Device, strategy: DeviceIdStrategy) -> str:
    """Return a device's name in a container: its UUID, or NVML's indexes as ``i`` or ``i:j``."""
    if strategy == "uuid":
        return device.uuid
    return str(device.index) if device.mig_index is None else f"{device.index}:{device.mig_index}"


def imex_channels(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the configured IMEX channels that the node has."""
    wanted = snapshot.policy.injection.imex_channels
    return tuple(channel for channel in wanted if f"{IMEX_NODE}{channel}" in snapshot.control_nodes)


def container_answer(
    snapshot: Snapshot,
    resource: Resource,
    devices: Sequence[Device],
    *,
    annotation_id: str,
    absent: Collection[str] = (),
) -> ContainerAnswer:
    """Return a container's answer for ``devices``, which are in the order of the answer.

    ``annotation_id`` makes the key of the CDI annotation unique, as NVIDIA's random UUID does;
    ``absent`` are the extra CDI names that this node has nothing for.
    """
    injection = snapshot.policy.injection
    names = tuple(dict.fromkeys(name_in_container(device, injection.ids) for device in devices))
    channels = imex_channels(snapshot)
    qualified = _all_cdi_names(injection, names, channels, absent)
    envs, mounts = _mps(injection, resource)
    nodes: tuple[DeviceNode, ...] = ()
    if not is_cdi_only(injection):
        envs |= _envs(injection, names, channels)
        mounts += _listing_mounts(injection, names, channels)
        nodes = _device_nodes(snapshot, devices, channels)
    return ContainerAnswer(
        envs=envs,
        mounts=mounts,
        device_nodes=nodes,
        annotations=_annotations(injection, qualified, annotation_id),
        cdi_devices=qualified if "cdi-cri" in injection.strategies else (),
    )


def _all_cdi_names(
    injection: Injection, names: Iterable[str], channels: Iterable[int], absent: Collection[str]
) -> tuple[str, ...]:
    return (
        *(cdi_name("gpu", name) for name in names),
        *(cdi_name("imex-channel", str(channel)) for channel in channels),
        *(name for name in extra_cdi_names(injection) if name not in absent),
    )


def _annotations(injection: Injection, qualified: Sequence[str], annotation_id: str) -> Mapping[str, str]:
    if not qualified or "cdi-annotations" not in injection.strategies:
        return {}
    return {f"{injection.cdi_annotation_prefix}{ANNOTATION_OWNER}_{annotation_id}": ",".join(qualified)}


def _mps(injection: Injection, resource: Resource) -> tuple[dict[str, str], tuple[Mount, ...]]:
    """Return the pipes of the resource's MPS daemon, and the memory that all daemons of the node share.

    With every strategy: a container without them would not find the daemon.
    """
    if resource.sharing != "mps":
        return {}, ()
    host, pipe = injection.mps_root.rstrip("/"), f"{resource.name}/pipe"
    shared_memory = Mount("/dev/shm", f"{host}/shm")  # noqa: S108 - the path in the container
    return (
        {"CUDA_MPS_PIPE_DIRECTORY": f"{MPS_ROOT}/{pipe}"},
        (Mount(f"{MPS_ROOT}/{pipe}", f"{host}/{pipe}"), shared_memory),
    )


def _envs(injection: Injection, names: Iterable[str], channels: Sequence[int]) -> dict[str, str]:
    wanted = (
        ("NVIDIA_GDRCOPY", injection.gdrcopy),
        ("NVIDIA_GDS", injection.gds),
        ("NVIDIA_MOFED", injection.mofed),
    )
    envs = {name: "enabled" for name, is_wanted in wanted if is_wanted}
    if "envvar" in injection.strategies:
        envs[VISIBLE_DEVICES] = ",".join(names)
        if channels:
            envs["NVIDIA_IMEX_CHANNELS"] = ",".join(map(str, channels))
    if "volume-mounts" in injection.strategies:
        envs[VISIBLE_DEVICES] = LIST_DIRECTORY
    return envs


def _listing_mounts(injection: Injection, names: Iterable[str], channels: Iterable[int]) -> tuple[Mount, ...]:
    """Return a mount for each device: with the strategy volume-mounts the mounts' names are the list."""
    if "volume-mounts" not in injection.strategies:
        return ()
    entries = (*names, *(f"imex/{channel}" for channel in channels))
    return tuple(Mount(f"{LIST_DIRECTORY}/{entry}", NOTHING_PATH) for entry in entries)


def _device_nodes(
    snapshot: Snapshot, devices: Iterable[Device], channels: Iterable[int]
) -> tuple[DeviceNode, ...]:
    if not snapshot.policy.injection.pass_device_specs:
        return ()
    gpus = {view.gpu.uuid: view.gpu for view in snapshot.gpus}
    paths = [node for node in snapshot.control_nodes if not node.startswith(IMEX_NODE)]
    for device in devices:
        gpu = gpus.get(device.placement.gpu)
        if gpu is not None:
            paths += _nodes_of(gpu, device)
    paths += (f"{IMEX_NODE}{channel}" for channel in channels)
    root = snapshot.policy.injection.device_root.rstrip("/")
    return tuple(DeviceNode(container_path=path, host_path=root + path) for path in dict.fromkeys(paths))


def _nodes_of(gpu: Gpu, device: Device) -> Iterable[str]:
    """Yield the nodes of a device: its GPU's, and for MIG the capabilities of its instances."""
    yield from node_of(gpu)
    for mig in gpu.mig_devices:
        if mig.uuid == device.uuid:
            yield from capability_nodes(mig)


def missing_channels(injection: Injection, control_nodes: Collection[str]) -> tuple[str, ...]:
    """Return the device nodes of channels that every container is to get and that do not exist."""
    wanted = injection.imex_channels if injection.imex_required else ()
    nodes = (f"{IMEX_NODE}{channel}" for channel in wanted)
    return tuple(node for node in nodes if node not in control_nodes)
