"""``gpu-agent allocate``: a dry run in readable form."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.cli import main
from tests.harness import agent_process, gpu_agent, simulated_node, wait_allocatable

U0 = "GPU-00000000-0000-4000-8000-000000000000"
U1 = "GPU-00000000-0000-4000-8000-000000000001"
U3 = "GPU-00000000-0000-4000-8000-000000000003"

SLICED = """\
node:
  preset: 8x-a100
  gpus:
    - mig: {enabled: true, devices: [{profile: 3g.40gb}, {profile: 1g.10gb}]}
    - {}
agent: {mig-strategy: mixed}
until: {resource: nvidia.com/gpu, capacity: 1}
"""
FOUR_REPLICAS = """\
version: v1
flags: {plugin: {deviceListStrategy: [volume-mounts]}}
sharing:
  timeSlicing:
    resources: [{name: nvidia.com/gpu, replicas: 4}]
"""
MPS = """\
version: v1
flags: {mpsRoot: /run/nvidia/mps}
sharing:
  mps:
    resources: [{name: nvidia.com/gpu, replicas: 2}]
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status = main(["allocate", *arguments])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return json.loads(captured.out)


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["allocate", *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    return status, captured.err


def test_a_scenario_shares_as_its_own_configuration_does(capsys: pytest.CaptureFixture[str]) -> None:
    [sliced] = printed(capsys, "--scenario=time-slicing", "0::3", "0::1")["containerResponses"]
    assert sliced == {"envs": {"NVIDIA_VISIBLE_DEVICES": U0}}
    [shared] = printed(capsys, "--scenario=mps", "1::0")["containerResponses"]
    assert shared["envs"]["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"


def test_the_answer_for_a_scenarios_node_is_printed_without_starting_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, "--scenario", "xid-79", "--strategy", "envvar,cdi-cri", "3", U0) == {
        "containerResponses": [
            {
                "envs": {"NVIDIA_VISIBLE_DEVICES": f"{U0},{U3}"},
                "cdiDevices": [
                    {"name": f"k8s.device-plugin.nvidia.com/gpu={U0}"},
                    {"name": f"k8s.device-plugin.nvidia.com/gpu={U3}"},
                ],
            }
        ]
    }


def test_strategies_can_be_given_one_by_one_and_by_the_agents_own_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (
        "--scenario=xid-79",
        "--strategy=envvar",
        "--device-list-strategy=volume-mounts",
        "--device-id-strategy=index",
        "--pass-device-specs",
        "2",
    )
    [container] = printed(capsys, *arguments)["containerResponses"]
    assert container["envs"] == {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}
    assert container["mounts"] == [
        {"containerPath": "/var/run/nvidia-container-devices/2", "hostPath": "/dev/null"}
    ]
    assert {"containerPath": "/dev/nvidia2", "hostPath": "/dev/nvidia2", "permissions": "rw"} in container[
        "devices"
    ]


def test_a_scenario_of_ones_own_has_its_own_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = tmp_path / "sliced.yaml"
    scenario.write_text(SLICED)
    arguments = ("--scenario", str(scenario), "--id-strategy", "index", "0:1")
    assert printed(capsys, *arguments) == {
        "containerResponses": [{"envs": {"NVIDIA_VISIBLE_DEVICES": "0:1"}}]
    }


def test_a_configuration_file_sets_how_devices_are_shared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(FOUR_REPLICAS)
    arguments = ("--scenario=xid-79", f"--config-file={file}", "--id-strategy=index", "1::3", "1", "0")
    [container] = printed(capsys, *arguments)["containerResponses"]
    assert [mount["containerPath"] for mount in container["mounts"]] == [
        "/var/run/nvidia-container-devices/0",
        "/var/run/nvidia-container-devices/1",
    ]


def test_mps_is_assumed_to_serve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(MPS)
    [container] = printed(capsys, "--scenario=xid-79", f"--config-file={file}", "0")["containerResponses"]
    assert container["envs"]["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"


def test_an_unknown_device_is_reported_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    status, sentence = failed(capsys, "--scenario=xid-79", "0", "GPU-gone")
    assert status == 2
    assert sentence.startswith(
        "gpu-agent: GPU-gone is not a device of nvidia.com/gpu on this node, which has 0, 1, 2, 3, ...;"
    )
    assert sentence.endswith(" gpu-agent devices lists their ids\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--scenario=xid-79", "--strategy=nix", "0"), "--device-list-strategy must be"),
        (("--scenario=xid-79", "--id-strategy=nix", "0"), "--device-id-strategy must be"),
        (("--scenario=no-such-one", "0"), "There is no scenario no-such-one"),
        (("--scenario=xid-79",), "ID"),
        (("--scenario=xid-79", "--config-file=/no/such/file", "0"), "/no/such/file"),
    ],
)
def test_an_invalid_request_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    status, sentence = failed(capsys, *arguments)
    assert status == 2
    assert words in sentence


async def test_a_running_agent_shows_what_its_kubelet_would_get(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("version: v1\nflags: {plugin: {deviceIDStrategy: index, deviceListStrategy: cdi-cri}}\n")
    async with simulated_node() as node, agent_process(node, pass_device_specs="true") as agent:
        await wait_allocatable(node.kubelet, 4)
        await agent.wait_answer("/v1/devices", lambda status, _body: status == 200)
        pod = await node.kubelet.run_pod("job", "ns1", {"main": {"nvidia.com/gpu": 4}})
        where = f"--control-socket={node.directory.agent_flags()['control-socket']}"
        plain = await gpu_agent("allocate", where, "-o=yaml", *"3210")
        other = await gpu_agent("allocate", where, "-o=yaml", "--id-strategy=index", "3")
        of_file = await gpu_agent("allocate", where, "-o=yaml", f"--config-file={file}", "1")
        unknown = await gpu_agent("allocate", where, "-o=yaml", "9")
    [container] = yaml.safe_load(plain.out)["containerResponses"]
    got = pod.containers["main"]
    assert container["envs"] == dict(got.envs)
    assert [each["hostPath"] for each in container["devices"]] == [
        each.host_path for each in got.device_specs
    ]
    [by_index] = yaml.safe_load(other.out)["containerResponses"]
    assert by_index["envs"] == {"NVIDIA_VISIBLE_DEVICES": "3"}
    assert yaml.safe_load(of_file.out) == {
        "containerResponses": [{"cdiDevices": [{"name": "k8s.device-plugin.nvidia.com/gpu=1"}]}]
    }
    assert unknown.status == 2
    assert "9 is not a device of nvidia.com/gpu on this node" in unknown.err
