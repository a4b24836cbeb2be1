"""Pods on the emulated node and which devices they have: pure, without clock or I/O.

Invariants (facts: kubelet items 6, 14, 16, 17):

1. An active (pending or running) pod keeps its devices, whatever becomes of their health.
2. A finished pod keeps the names of its devices until it is deleted, though they may be allocated again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from agent.errors import AgentError, UsageError
from agent.simulation.kubelet.devices import DeviceTable
from agent.simulation.kubelet.records import (
    MAX_PODS,
    ContainerOutcome,
    DeviceSpecView,
    MountView,
    PodOutcome,
    PodPhase,
)
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb

Requests = Mapping[str, Mapping[str, int]]
"""Container name to resource name to amount."""


@dataclass(slots=True)
class Grant:
    """Devices of one resource that one container got; the answer is the plugin's."""

    ids: tuple[str, ...]
    numa: dict[str, tuple[int, ...]]
    answer: plugin_pb.ContainerAllocateResponse


@dataclass(slots=True)
class Pod:
    """A pod of the node; ``grants`` is container to resource to what it got."""

    uid: str
    name: str
    namespace: str
    requests: dict[str, dict[str, int]]
    phase: PodPhase = "Pending"
    reason: str = ""
    message: str = ""
    grants: dict[str, dict[str, Grant]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    @property
    def active(self) -> bool:
        """Whether it holds its devices."""
        return self.phase in ("Pending", "Running")

    def outcome(self, devices: DeviceTable) -> PodOutcome:
        """Return the pod as its status and its containers show it."""
        containers = {name: _container(self.grants.get(name, {}), devices) for name in self.requests}
        return PodOutcome(
            self.name, self.namespace, self.phase, self.reason, self.message, MappingProxyType(containers)
        )


class PodTable:
    """Every pod the node knows, by namespace and name."""

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}
        self._count = 0

    def add(self, name: str, namespace: str, requests: Requests) -> Pod:
        """Add a pending pod; raises UsageError for a name in use, AgentError over MAX_PODS."""
        key = f"{namespace}/{name}"
        if key in self._pods:
            raise UsageError(f"Pod {key} exists already; delete it first or choose another name")
        if len(self._pods) >= MAX_PODS:
            raise AgentError(f"The simulated node has {MAX_PODS} pods already; delete finished ones")
        self._count += 1
        uid = f"00000000-0000-4000-9000-{self._count:012d}"
        pod = Pod(uid, name, namespace, {container: dict(wanted) for container, wanted in requests.items()})
        self._pods[key] = pod
        return pod

    def get(self, name: str, namespace: str) -> Pod:
        """Return a pod; raises UsageError where there is none."""
        pod = self._pods.get(f"{namespace}/{name}")
        if pod is None:
            raise UsageError(f"There is no pod {namespace}/{name} on the simulated node")
        return pod

    def find(self, name: str, namespace: str) -> Pod | None:
        """Return a pod, or None."""
        return self._pods.get(f"{namespace}/{name}")

    def remove(self, name: str, namespace: str) -> None:
        """Drop a pod from the node; raises UsageError where there is none."""
        del self._pods[self.get(name, namespace).key]

    def all(self) -> Iterable[Pod]:
        """Return every pod, oldest first."""
        return tuple(self._pods.values())

    def holders(self, resource: str) -> dict[str, str]:
        """Return which active pod has which device of a resource: id to ``namespace/name``."""
        return {
            id_: pod.key
            for pod in self._pods.values()
            if pod.active
            for grants in pod.grants.values()
            if resource in grants
            for id_ in grants[resource].ids
        }


def _container(grants: Mapping[str, Grant], known: DeviceTable) -> ContainerOutcome:
    answers = [grant.answer for grant in grants.values()]
    envs: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for answer in answers:
        envs.update(answer.envs)
        annotations.update(answer.annotations)
    return ContainerOutcome(
        devices=MappingProxyType({resource: grant.ids for resource, grant in grants.items()}),
        health=MappingProxyType(
            {
                resource: {id_: known.health(resource, id_) for id_ in grant.ids}
                for resource, grant in grants.items()
            }
        ),
        envs=MappingProxyType(envs),
        annotations=MappingProxyType(annotations),
        mounts=tuple(
            MountView(mount.container_path, mount.host_path, mount.read_only)
            for answer in answers
            for mount in answer.mounts
        ),
        device_specs=tuple(
            DeviceSpecView(spec.container_path, spec.host_path, spec.permissions)
            for answer in answers
            for spec in answer.devices
        ),
        cdi_devices=tuple(device.name for answer in answers for device in answer.cdi_devices),
    )
