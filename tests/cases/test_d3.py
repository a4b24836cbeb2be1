"""D3, NVIDIA/k8s-device-plugin#373: the node moved to other hardware, the kubelet asks for what was there.

Here is what Allocate answers; the diagnosis of the pod waits for the doctor (PENDING.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from agent.simulation.node import SimulatedNode
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from tests.harness import PATIENCE_S, agent_process, simulated_node, uuids, wait_allocatable

ONE_GPU = {"preset": "dgx-h100", "gpus": 1}
STALE = "GPU-00000000-0000-4000-8000-000000000099"


@contextmanager
def kubelet_of(node: SimulatedNode) -> Iterator[Any]:
    """What the kubelet calls the agent with."""
    with grpc.insecure_channel(f"unix:{node.directory.device_plugins}/nvidia-gpu.sock") as channel:
        yield rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]


def allocated(stub: Any, *ids: str) -> Any:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
    return stub.Allocate(request, timeout=PATIENCE_S)


async def test_a_device_that_went_with_the_old_hardware_is_rejected_by_name_and_the_others_are_given() -> (
    None
):
    async with simulated_node(ONE_GPU) as node, agent_process(node):
        await wait_allocatable(node.kubelet, 1)
        (present,) = uuids(node)
        with kubelet_of(node) as stub:
            for ids in ((STALE,), (present, STALE), (STALE, present)):
                with pytest.raises(grpc.RpcError) as rejected:
                    allocated(stub, *ids)
                assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                details = rejected.value.details()
                assert f"unknown device: {STALE} is not a device of nvidia.com/gpu on this node" in details
                assert "delete the pod so that it is allocated anew" in details
                assert present not in details
            [container] = allocated(stub, present).container_responses
            assert dict(container.envs) == {"NVIDIA_VISIBLE_DEVICES": present}
