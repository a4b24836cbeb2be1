"""F1, NVIDIA/gpu-operator#386: a job asks for two shared GPUs and gets two shares of the same card."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from tests.harness import PATIENCE_S, agent_process, simulated_node, wait_allocatable

TWO_GPUS = {"preset": "dgx-h100", "gpus": 2}
FOUR_REPLICAS = """\
version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 4
"""
U0 = "GPU-00000000-0000-4000-8000-000000000000"
U1 = "GPU-00000000-0000-4000-8000-000000000001"
ALL = [f"{card}::{replica}" for card in (U0, U1) for replica in range(4)]


@asynccontextmanager
async def plugin(directory: Path, **flags: str) -> AsyncIterator[Any]:
    """What the kubelet calls the agent with, on two GPUs with four shares each."""
    file = directory / "config.yaml"
    file.write_text(FOUR_REPLICAS)
    async with simulated_node(TWO_GPUS) as node, agent_process(node, config_file=str(file), **flags):
        await wait_allocatable(node.kubelet, 8)
        with grpc.insecure_channel(f"unix:{node.directory.device_plugins}/nvidia-gpu.sock") as channel:
            yield rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]


def preferred(stub: Any, available: Sequence[str], size: int) -> list[str]:
    request = pb.PreferredAllocationRequest(
        container_requests=[
            pb.ContainerPreferredAllocationRequest(available_deviceIDs=available, allocation_size=size)
        ]
    )
    [chosen] = stub.GetPreferredAllocation(request, timeout=PATIENCE_S).container_responses
    return list(chosen.deviceIDs)


def visible(stub: Any, *ids: str) -> str:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
    [container] = stub.Allocate(request, timeout=PATIENCE_S).container_responses
    devices: str = container.envs["NVIDIA_VISIBLE_DEVICES"]
    return devices


async def test_shares_are_of_different_cards_where_that_can_be_and_each_card_is_named_once(
    tmp_path: Path,
) -> None:
    async with plugin(tmp_path) as stub:
        both = preferred(stub, ALL, 2)
        assert sorted(share.partition("::")[0] for share in both) == [U0, U1]
        one_left = preferred(stub, [f"{U0}::2", f"{U0}::3", f"{U1}::3"], 2)
        assert sorted(share.partition("::")[0] for share in one_left) == [U0, U1]
        same_card = preferred(stub, [f"{U0}::2", f"{U0}::3"], 2)
        assert sorted(same_card) == [f"{U0}::2", f"{U0}::3"]
        assert visible(stub, *same_card) == U0
        four = [share.partition("::")[0] for share in preferred(stub, ALL, 4)]
        assert (four.count(U0), four.count(U1)) == (2, 2)
        assert visible(stub, f"{U1}::0", f"{U0}::0", f"{U0}::1") == f"{U0},{U1}"


async def test_two_shares_of_one_card_are_rejected_where_the_operator_configures_it(tmp_path: Path) -> None:
    async with plugin(tmp_path, distinct_cards="true") as stub:
        with pytest.raises(grpc.RpcError) as rejected:
            visible(stub, f"{U0}::2", f"{U0}::3")
        assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rejected.value.details().startswith(f"{U0} (GPU 0) was allocated more than once")
        assert visible(stub, f"{U0}::2", f"{U1}::3") == f"{U0},{U1}"
