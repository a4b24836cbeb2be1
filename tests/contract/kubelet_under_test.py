"""What the contract suite asks of a kubelet, emulated or real, without an API server."""

import asyncio
import base64
import itertools
import json
import os
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import grpc
import grpc.aio
import pytest

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb
from agent.simulation.stubs.podresources.v1 import api_pb2 as pods_pb
from agent.threads import in_daemon_thread

TIMEOUT_S = 20.0

_numbers = itertools.count(1)


def unique_resource() -> str:
    """Return a resource name no other test uses: a kubelet remembers one for five minutes."""
    return f"contract.example.com/device-{os.getpid()}-{next(_numbers)}"


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


@dataclass(frozen=True)
class StaticPod:
    """A pod of one container ``main``, as the kubelet without an API server shows it."""

    file: Path
    name: str
    """``namespace/name``, as PodResources lists it."""
    phase: str
    reason: str
    message: str
    devices: set[str]
    envs: dict[str, str]

    @property
    def running(self) -> bool:
        return self.phase == "Running"


class KubeletUnderTest:
    """A kubelet, emulated or real, asked in one way; what cannot be done with it skips the test."""

    _POLL_S = 0.02

    def __init__(
        self,
        directory: Path,
        pod_resources: Path,
        *,
        manifests: Path | None,
        pods_url: str,
        image: str,
        restart: str | None,
        capacity: Callable[[str], int] | None = None,
    ) -> None:
        """``capacity`` is what the node shows, where there is one: a real node needs an API server for it."""
        self.directory = directory
        self.pod_resources = PodResources(pod_resources)
        self._manifests = manifests
        self._pods_url = pods_url
        self._image = image
        self._restart = restart
        self._capacity = capacity
        self._files: list[Path] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)

    async def healthy(self, resource: str) -> set[str]:
        """Return the ids of a resource that GetAllocatableResources lists."""
        return (await self.pod_resources.allocatable()).get(resource, set())

    async def wait_healthy(self, resource: str, ids: set[str]) -> None:
        """Wait until exactly these ids of a resource are allocatable."""
        found: set[str] = set()

        async def met() -> bool:
            nonlocal found
            found = await self.healthy(resource)
            return found == ids

        await self._until(met, lambda: f"the kubelet has {sorted(found)} of {resource}, not {sorted(ids)}")

    async def wait_capacity(self, resource: str, capacity: int) -> None:
        """Wait until the node has this capacity of a resource, where that can be seen."""
        shown = self._capacity
        if shown is None:
            return

        async def met() -> bool:
            return shown(resource) == capacity

        await self._until(met, lambda: f"the node has {shown(resource)} of {resource}, not {capacity}")

    async def restart(self, *, kill: bool = False) -> None:
        """Restart it, by SIGTERM or SIGKILL; returns when the new one answers."""
        if self._restart is None:
            pytest.skip("a real kubelet is restarted by --kubelet-restart CMD alone")
        socket = self.directory / "kubelet.sock"
        before = identity(socket)
        environment = os.environ | {"KUBELET_SIGNAL": "KILL" if kill else "TERM"}
        shell = await asyncio.create_subprocess_shell(self._restart, env=environment)
        assert await shell.wait() == 0

        async def met() -> bool:
            if not socket.exists() or identity(socket) == before:
                return False
            await self.pod_resources.allocatable()
            return True

        await self._until(met, lambda: f"there is no new {socket}")

    async def run_pod(self, resource: str, amount: int) -> StaticPod:
        """Run a pod of one container that asks for an amount of a resource; returns when it was admitted."""
        if self._manifests is None:
            pytest.skip("a pod on a real kubelet needs --kubelet-manifests DIR")
        name = f"contract-{os.getpid()}-{next(_numbers)}"
        limits = {resource: str(amount)}
        container = {"name": "main", "image": self._image, "resources": {"limits": limits}}
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
        file = self._manifests / f"{name}.json"
        hidden = file.with_name(f".{file.name}")
        hidden.write_text(json.dumps(manifest))
        hidden.rename(file)
        self._files.append(file)
        shown: dict[str, Any] = {}

        async def met() -> bool:
            shown.update(await in_daemon_thread("pods-page", lambda: self._pod(name)))
            waiting = [each.get("state", {}) for each in shown.get("status", {}).get("containerStatuses", ())]
            is_stuck = any("CreateContainer" in each.get("waiting", {}).get("reason", "") for each in waiting)
            return is_stuck or shown.get("status", {}).get("phase") in ("Running", "Failed")

        await self._until(met, lambda: f"pod {name} is {shown.get('status')}")
        status, full_name = shown["status"], f"default/{shown['metadata']['name']}"
        devices = (await self.pod_resources.listed()).get(full_name, set())
        return StaticPod(
            file,
            full_name,
            status["phase"],
            status.get("reason", ""),
            status.get("message", ""),
            devices,
            self._envs(devices),
        )

    async def end_pod(self, pod: StaticPod) -> None:
        """End a pod and remove it; returns when its devices can be given out again."""
        pod.file.unlink()

        async def met() -> bool:
            return pod.name not in await self.pod_resources.listed()

        await self._until(met, lambda: f"pod {pod.name} is still listed")

    def _pod(self, name: str) -> dict[str, Any]:
        with urllib.request.urlopen(self._pods_url, timeout=TIMEOUT_S) as answer:
            items: list[dict[str, Any]] = json.load(answer)["items"]
        return next((each for each in items if each["metadata"]["name"].startswith(f"{name}-")), {})

    def _envs(self, devices: set[str]) -> dict[str, str]:
        """Return the environment that the plugin answered, which the kubelet keeps in its checkpoint."""
        document = json.loads((self.directory / "kubelet_internal_checkpoint").read_bytes())
        for entry in document["Data"]["PodDeviceEntries"] or ():
            if devices and {id_ for ids in entry["DeviceIDs"].values() for id_ in ids} == devices:
                answer = plugin_pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
                return dict(answer.envs)
        return {}

    async def _until(self, met: Callable[[], Awaitable[bool]], why_not: Callable[[], str]) -> None:
        """Ask again and again: a kubelet publishes no change of its view, and limits how often."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        if await met():
                            return
                    except grpc.aio.AioRpcError as error:
                        if error.code() not in (
                            grpc.StatusCode.RESOURCE_EXHAUSTED,
                            grpc.StatusCode.UNAVAILABLE,
                        ):
                            raise
                    await asyncio.sleep(self._POLL_S)
        except TimeoutError:
            pytest.fail(why_not())


def identity(path: Path) -> tuple[int, int]:
    """Return what distinguishes a file from its successor; a file system may hand out the inode again."""
    status = os.lstat(path)
    return status.st_ino, status.st_mtime_ns
