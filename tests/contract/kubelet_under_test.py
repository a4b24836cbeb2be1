"""What the contract suite may ask of a kubelet, emulated or real.

A real kubelet is asked over its two sockets only; what needs an API server or would disturb the node
skips the test and says so.
"""

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import quote

import grpc
import grpc.aio
import pytest

from agent.simulation.kubelet import EmulatedKubelet, PodOutcome
from agent.simulation.stubs.podresources.v1 import api_pb2 as pods_pb

TIMEOUT_S = 20.0

_numbers = itertools.count(1)


def unique_resource() -> str:
    """Return a resource name no other test uses: a kubelet remembers one for five minutes."""
    return f"contract.example.com/device-{os.getpid()}-{next(_numbers)}"


class KubeletUnderTest(Protocol):
    """A kubelet and its device-plugins directory."""

    directory: Path

    async def healthy(self, resource: str) -> set[str]:
        """Return the ids of a resource that GetAllocatableResources lists."""

    async def wait_healthy(self, resource: str, ids: set[str]) -> None:
        """Wait until exactly these ids of a resource are allocatable."""

    async def wait_capacity(self, resource: str, capacity: int) -> None:
        """Wait until the node has this capacity of a resource."""

    async def restart(self, *, kill: bool = False) -> None:
        """Restart it."""

    async def run_pod(self, resource: str, amount: int) -> PodOutcome:
        """Run a pod of one container that asks for an amount of a resource."""

    def finish_pod(self, pod: PodOutcome) -> None:
        """End a pod."""


class PodResources:
    """Asks a kubelet's pod-resources socket."""

    def __init__(self, directory: Path) -> None:
        self._target = f"unix:{quote(str(directory / 'kubelet.sock'))}"

    async def allocatable(self) -> dict[str, set[str]]:
        """Return the healthy device ids by resource."""
        answer = await self._ask(
            "GetAllocatableResources",
            pods_pb.AllocatableResourcesRequest(),
            pods_pb.AllocatableResourcesResponse,
        )
        found: dict[str, set[str]] = {}
        for each in answer.devices:
            found.setdefault(each.resource_name, set()).update(each.device_ids)
        return found

    async def listed(self) -> dict[str, set[str]]:
        """Return the device ids of every listed pod by ``namespace/name``."""
        answer = await self._ask("List", pods_pb.ListPodResourcesRequest(), pods_pb.ListPodResourcesResponse)
        return {
            f"{pod.namespace}/{pod.name}": {
                id_ for container in pod.containers for each in container.devices for id_ in each.device_ids
            }
            for pod in answer.pod_resources
        }

    async def get(self, name: str, namespace: str) -> Any:
        """Return one pod's resources."""
        request = pods_pb.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace)
        return (await self._ask("Get", request, pods_pb.GetPodResourcesResponse)).pod_resources

    async def _ask(self, method: str, request: Any, response: Any) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(self._target, options=options) as channel:
            call = channel.unary_unary(
                f"/v1.PodResourcesLister/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=response.FromString,
            )
            return await call(request, timeout=TIMEOUT_S)


class EmulatedUnderTest:
    """The emulated kubelet: everything can be asked, and waits end with the event."""

    def __init__(self, emulated: EmulatedKubelet) -> None:
        self.emulated = emulated
        self.directory = emulated.device_plugins
        self.pod_resources = PodResources(emulated.pod_resources)

    async def healthy(self, resource: str) -> set[str]:
        return (await self.pod_resources.allocatable()).get(resource, set())

    async def wait_healthy(self, resource: str, ids: set[str]) -> None:
        def met(kubelet: EmulatedKubelet) -> bool:
            return {id_ for id_, each in kubelet.devices(resource).items() if each.healthy} == ids

        await self.emulated.wait_for(met, TIMEOUT_S)
        assert await self.healthy(resource) == ids

    async def wait_capacity(self, resource: str, capacity: int) -> None:
        await self.emulated.wait_for(lambda kubelet: kubelet.capacity(resource) == capacity, TIMEOUT_S)

    async def restart(self, *, kill: bool = False) -> None:
        await self.emulated.restart(kill=kill)

    async def run_pod(self, resource: str, amount: int) -> PodOutcome:
        name = f"pod-{next(_numbers)}"
        return await self.emulated.run_pod(name, "contract", {"main": {resource: amount}})

    def finish_pod(self, pod: PodOutcome) -> None:
        self.emulated.finish_pod(pod.name, pod.namespace)


class RealUnderTest:
    """A real kubelet: seen through GetAllocatableResources, and left alone."""

    _POLL_S = 0.02

    def __init__(self, directory: Path, pod_resources: Path) -> None:
        self.directory = directory
        self.pod_resources = PodResources(pod_resources)

    async def healthy(self, resource: str) -> set[str]:
        return (await self.pod_resources.allocatable()).get(resource, set())

    async def wait_healthy(self, resource: str, ids: set[str]) -> None:
        found: set[str] = set()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while (found := await self.healthy(resource)) != ids:
                    await asyncio.sleep(self._POLL_S)  # a real kubelet tells nobody when its view changes
        except TimeoutError:
            pytest.fail(f"the kubelet has {sorted(found)} of {resource}, not {sorted(ids)}")

    async def wait_capacity(self, resource: str, capacity: int) -> None:
        """Do nothing: capacity is in the node's status, which needs an API server."""

    async def restart(self, *, kill: bool = False) -> NoReturn:
        pytest.skip("a real kubelet is not restarted by a test")

    async def run_pod(self, resource: str, amount: int) -> NoReturn:
        pytest.skip("running a pod on a real kubelet needs an API server")

    def finish_pod(self, pod: PodOutcome) -> NoReturn:
        pytest.skip("ending a pod on a real kubelet needs an API server")
