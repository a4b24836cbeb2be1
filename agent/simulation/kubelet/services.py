"""What the kubelet serves: Registration on kubelet.sock, PodResourcesLister on the pod-resources socket."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import grpc

from agent.simulation.kubelet.devices import DeviceTable
from agent.simulation.kubelet.pods import Pod, PodTable
from agent.simulation.kubelet.registry import Registry
from agent.simulation.kubelet.wire import unary_method
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb
from agent.simulation.stubs.podresources.v1 import api_pb2 as pods_pb

REGISTRATION: Final = "v1beta1.Registration"
POD_RESOURCES: Final = "v1.PodResourcesLister"
PODS_PER_SECOND: Final = 100
PODS_BURST: Final = 10
"""Calls to PodResources that are answered; further ones are rejected."""


def registration_methods(registry: Registry, peer_pid: Callable[[str], int | None]) -> Mapping[str, Any]:
    """Return the Registration service; ``peer_pid`` finds a caller by gRPC's name of its connection."""

    async def register(request: Any, context: Any) -> Any:
        pid = peer_pid(context.peer())
        error = await registry.register(request, pid, within_s=context.time_remaining())
        if error is not None:
            await context.abort(grpc.StatusCode.UNKNOWN, error)
        return plugin_pb.Empty()

    return {"Register": unary_method(register, plugin_pb.RegisterRequest, plugin_pb.Empty)}


class _RateLimit:
    """A token bucket. Source: kubernetes pkg/kubelet/apis/podresources/constants.go, grpc/ratelimit.go."""

    def __init__(self) -> None:
        self._tokens, self._at = float(PODS_BURST), time.monotonic()

    async def __call__(self, context: Any) -> None:
        """Answer with an error where the bucket is empty."""
        now = time.monotonic()
        self._tokens = min(PODS_BURST, self._tokens + (now - self._at) * PODS_PER_SECOND)
        self._at = now
        if self._tokens < 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1


def pod_resources_methods(
    devices: DeviceTable, pods: PodTable, *, lists_finished: bool, has_allocatable: bool
) -> Mapping[str, Any]:
    """Return the PodResourcesLister service (facts: kubelet items 14 and 17)."""
    limit = _RateLimit()

    async def list_pods(request: Any, context: Any) -> Any:  # noqa: ARG001 (gRPC's signature)
        await limit(context)
        listed = [_pod(pod) for pod in pods.all() if pod.active or lists_finished]
        return pods_pb.ListPodResourcesResponse(pod_resources=listed)

    async def get_allocatable(request: Any, context: Any) -> Any:  # noqa: ARG001
        await limit(context)
        entries = [
            entry
            for resource in devices.resources
            for id_ in devices.healthy(resource)
            for entry in _devices(resource, id_, devices.devices(resource)[id_].numa_nodes)
        ]
        return pods_pb.AllocatableResourcesResponse(devices=entries)

    async def get(request: Any, context: Any) -> Any:
        await limit(context)
        pod = pods.find(request.pod_name, request.pod_namespace)
        if pod is None:
            text = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
            await context.abort(grpc.StatusCode.UNKNOWN, text)
            raise AssertionError("abort raises")
        return pods_pb.GetPodResourcesResponse(pod_resources=_pod(pod))

    methods = {
        "List": unary_method(list_pods, pods_pb.ListPodResourcesRequest, pods_pb.ListPodResourcesResponse),
        "Get": unary_method(get, pods_pb.GetPodResourcesRequest, pods_pb.GetPodResourcesResponse),
    }
    if has_allocatable:
        methods["GetAllocatableResources"] = unary_method(
            get_allocatable, pods_pb.AllocatableResourcesRequest, pods_pb.AllocatableResourcesResponse
        )
    return methods


def _pod(pod: Pod) -> pods_pb.PodResources:
    return pods_pb.PodResources(
        name=pod.name,
        namespace=pod.namespace,
        containers=[
            pods_pb.ContainerResources(
                name=container,
                devices=[
                    entry
                    for resource, grant in pod.grants.get(container, {}).items()
                    for id_ in grant.ids
                    for entry in _devices(resource, id_, grant.numa.get(id_, ()))
                ],
            )
            for container in pod.requests
        ],
    )


def _devices(resource: str, id_: str, numa_nodes: tuple[int, ...]) -> Iterable[pods_pb.ContainerDevices]:
    """Yield an entry for each device and NUMA node: the kubelet does not group them."""
    if not numa_nodes:
        yield pods_pb.ContainerDevices(resource_name=resource, device_ids=[id_])
    for node in numa_nodes:
        topology = pods_pb.TopologyInfo(nodes=[pods_pb.NUMANode(ID=node)])
        yield pods_pb.ContainerDevices(resource_name=resource, device_ids=[id_], topology=topology)
