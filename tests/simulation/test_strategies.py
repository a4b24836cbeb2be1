"""What a pod gets of an agent as users run it, by each device list strategy."""

import re

import pytest

from agent.simulation.kubelet.records import ContainerOutcome, MountView
from tests.harness import GPU, agent_process, simulated_node, wait_allocatable

U0 = "GPU-00000000-0000-4000-8000-000000000000"
U1 = "GPU-00000000-0000-4000-8000-000000000001"
BY_UUID = (f"k8s.device-plugin.nvidia.com/gpu={U0}", f"k8s.device-plugin.nvidia.com/gpu={U1}")
BY_INDEX = ("k8s.device-plugin.nvidia.com/gpu=0", "k8s.device-plugin.nvidia.com/gpu=1")
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$")


def mounts(*names: str) -> tuple[MountView, ...]:
    return tuple(
        MountView(f"/var/run/nvidia-container-devices/{name}", "/dev/null", read_only=False) for name in names
    )


def masked(got: ContainerOutcome) -> dict[str, str]:
    return {UUID4.sub("<uuid4>", key): value for key, value in got.annotations.items()}


@pytest.mark.parametrize(
    ("strategies", "ids", "expected"),
    [
        ("envvar", "uuid", ContainerOutcome(envs={"NVIDIA_VISIBLE_DEVICES": f"{U0},{U1}"})),
        ("envvar", "index", ContainerOutcome(envs={"NVIDIA_VISIBLE_DEVICES": "0,1"})),
        (
            "volume-mounts",
            "uuid",
            ContainerOutcome(
                envs={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}, mounts=mounts(U0, U1)
            ),
        ),
        (
            "cdi-annotations",
            "uuid",
            ContainerOutcome(
                annotations={"cdi.k8s.io/nvidia-device-plugin_<uuid4>": ",".join(BY_UUID)},
            ),
        ),
        ("cdi-cri", "uuid", ContainerOutcome(cdi_devices=BY_UUID)),
        (
            "cdi-cri,cdi-annotations,volume-mounts,envvar",
            "index",
            ContainerOutcome(
                envs={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
                mounts=mounts("0", "1"),
                annotations={"cdi.k8s.io/nvidia-device-plugin_<uuid4>": ",".join(BY_INDEX)},
                cdi_devices=BY_INDEX,
            ),
        ),
    ],
)
async def test_a_pod_gets_its_gpus_the_way_the_operator_chose(
    strategies: str, ids: str, expected: ContainerOutcome
) -> None:
    node_of_two = {"preset": "4x-t4", "gpus": 2}
    flags = {"device_list_strategy": strategies, "device_id_strategy": ids}
    async with simulated_node(node_of_two) as node, agent_process(node, **flags):
        await wait_allocatable(node.kubelet, 2)
        pod = await node.kubelet.run_pod("job", "ns1", {"main": {GPU: 2}})
    assert pod.running, pod.message
    got = pod.containers["main"]
    assert got.devices == {GPU: (U0, U1)}
    assert got.envs == expected.envs
    assert got.mounts == expected.mounts
    assert masked(got) == expected.annotations
    assert got.cdi_devices == expected.cdi_devices
    assert got.device_specs == ()
