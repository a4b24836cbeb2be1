"""Plugins that the emulated kubelet's tests put before it."""

import socket
from pathlib import Path

import grpc.aio
import pytest

from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.contract.reference_plugin import ReferencePlugin, device

GPU = "nvidia.com/gpu"


def plugin_for(kubelet: EmulatedKubelet, resource: str = GPU, **options: bool) -> ReferencePlugin:
    """Return a plugin of four devices, which does not serve yet."""
    endpoint = f"{resource.replace('/', '-')}.sock"
    return ReferencePlugin(kubelet.device_plugins, resource, four(), endpoint=endpoint, **options)


def four(*unhealthy: str) -> list[pb.Device]:
    """Return the devices a to d, two on each NUMA node."""
    return [device(id_, healthy=id_ not in unhealthy, numa=index // 2) for index, id_ in enumerate("abcd")]


async def rejection(plugin: ReferencePlugin) -> str:
    """Return the text the plugin's registration is rejected with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await plugin.register()
    return raised.value.details() or ""


def rejects(path: Path) -> bool:
    """Return whether a connection is rejected, though the file is there."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        return False
