"""``gpu-agent cdi``: the specifications for container runtimes, and the validation of a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.cli import main
from agent.commands.cdi import MAX_BYTES
from agent.core.allocation.cdi_schema import problems_of
from tests.harness import agent_process, gpu_agent, simulated_node, wait_allocatable

U0 = "GPU-00000000-0000-4000-8000-000000000000"
GOOD = """\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - {path: /dev/nvidia0}
"""
BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["cdi", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def validated(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | bytes) -> list[str]:
    """Return the problems of a file."""
    path = tmp_path / "spec"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, out, err = run(capsys, "validate", str(path))
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    return [line.removeprefix("gpu-agent: ").replace(str(path), "FILE") for line in err.splitlines()]


# A scenario's node


def test_the_specification_of_a_scenarios_node_is_that_of_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--scenario", "xid-79")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert problems_of(document) == ()
    assert document["kind"] == "k8s.device-plugin.nvidia.com/gpu"
    assert len(document["devices"]) == 8
    assert document["devices"][0]["name"] == U0
    nodes = document["devices"][0]["containerEdits"]["deviceNodes"]
    assert {"path": "/dev/nvidia0", "hostPath": "/dev/nvidia0"} in nodes
    assert {hook["path"] for hook in document["containerEdits"]["hooks"]} == {"/usr/bin/nvidia-ctk"}
    mounts = [mount["hostPath"] for mount in document["containerEdits"]["mounts"]]
    assert "/usr/bin/nvidia-smi" in mounts
    assert not [path for path in mounts if path.startswith("/tmp/")]


def test_flags_of_run_change_it_and_missing_files_are_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys,
        *("show", "--scenario=mig-mixed", "--device-id-strategy=index", "--driver-root=/run/nvidia/driver"),
        *("--gds-enabled", "-o", "yaml"),
    )
    assert status == 0
    assert err == ("gpu-agent: warning: the node has nothing for k8s.device-plugin.nvidia.com/gds=all\n")
    [document] = yaml.safe_load_all(out)
    assert "0:1" in [device["name"] for device in document["devices"]]
    mounts = [mount["hostPath"] for mount in document["containerEdits"]["mounts"]]
    assert all(path.startswith("/run/nvidia/driver/") for path in mounts)


def test_a_scenario_that_shares_by_mps_has_its_root_where_the_chart_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(capsys, "--scenario=mps", "--cdi-feature-flags=newer")
    assert (status, json.loads(out)["kind"]) == (0, "k8s.device-plugin.nvidia.com/gpu")
    assert err == (
        'gpu-agent: warning: --cdi-feature-flags: "newer" is no feature of a CDI specification and was'
        " skipped\n"
    )


def test_validate_accepts_what_show_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for form in ("json", "yaml"):
        path = tmp_path / f"spec.{form}"
        path.write_text(run(capsys, "--scenario=xid-79", "-o", form)[1])
        assert run(capsys, "validate", str(path)) == (
            0,
            f"{path} is valid: version 0.5.0, 8 devices of k8s.device-plugin.nvidia.com/gpu\n",
            "",
        )


# A running agent's node


async def test_what_the_running_agent_wrote_is_shown() -> None:
    async with simulated_node({"preset": "4x-t4", "gpus": 2}) as node:
        spec_dir = f"--cdi-spec-dir={node.directory.path}/cdi"
        before = await gpu_agent("cdi", spec_dir)
        assert before.status == 1
        assert before.err.startswith(f"gpu-agent: {spec_dir[15:]} has no CDI specification of the agent;")
        async with agent_process(node, device_list_strategy="cdi-cri"):
            await wait_allocatable(node.kubelet, 2)
            await node.kubelet.run_pod("job", "ns1", {"main": {"nvidia.com/gpu": 1}})
            shown = await gpu_agent("cdi", spec_dir, "-o", "yaml")
        assert (shown.status, shown.err) == (0, "")
        file = node.directory.path / "cdi" / "k8s.device-plugin.nvidia.com-gpu.json"
        assert yaml.safe_load(shown.out) == json.loads(file.read_text())
        file.write_text("{")
        broken = await gpu_agent("cdi", spec_dir)
        assert (broken.status, broken.out) == (1, "")
        assert "gpu.json:1: Expecting property name" in broken.err


# A file


def test_a_foreign_specification_is_validated_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(GOOD)
    status, out, _ = run(capsys, "validate", str(tmp_path / "nvidia.yaml"))
    assert (status, out.partition(" is ")[2]) == (0, "valid: version 0.5.0, 1 device of nvidia.com/gpu\n")


def test_an_alias_stands_for_what_it_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    edits = "containerEdits: &edits {env: [A=b]}"
    devices = f"devices: [{{name: a, {edits}}}, {{name: b, containerEdits: *edits}}]"
    (tmp_path / "a.yaml").write_text(f"cdiVersion: 0.3.0\nkind: vendor.com/net\n{devices}\n")
    status, out, _ = run(capsys, "validate", str(tmp_path / "a.yaml"))
    assert (status, out.partition(" is ")[2]) == (0, "valid: version 0.3.0, 2 devices of vendor.com/net\n")


def test_every_problem_is_reported_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = GOOD.replace("nvidia.com/gpu", "NVIDIA/gpu").replace("path: /dev", "path: dev, mode: 1, x: /dev")
    node = "devices[0].containerEdits.deviceNodes[0]"
    assert validated(capsys, tmp_path, broken) == [
        "FILE: kind: must be a kind, not 'NVIDIA/gpu'",
        f"FILE: {node}.mode: is no field of a specification, so runtimes reject the file",
        f"FILE: {node}.x: is no field of a specification, so runtimes reject the file",
        f"FILE: {node}.path: must be an absolute path, not 'dev'",
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "FILE: is empty"),
        ("# nothing\n", "FILE: the document: must be an object, not None"),
        ("[]", "FILE: the document: must be an object, not []"),
        ("{", "FILE:1: Expecting property name"),
        ('{"kind": 1,\n "kind": 2}', "FILE: kind is given twice"),
        (GOOD + "kind: nvidia.com/gpu\n", "FILE:8: kind is given twice"),
        ("\ufeff" + GOOD, "FILE:1: begins with a byte order mark"),
        ("a:\n\t- b\n", "FILE:2: holds a tab where YAML allows none; indent with spaces"),
        (b"\xff\xfe\x00", "FILE:1: not UTF-8 text"),
        (b'{"kind": "\xff"}', "FILE: not UTF-8 text"),
        ("[" * 5000, "FILE:1: nested too deeply"),
        ('{"a":' * 100_000, "FILE: nested too deeply"),
        ('{"kind": ' + "1" * 5000 + "}", "FILE: holds a number with too many digits"),
        ("\nkind: 2024-99-99\n", 'FILE:2: kind is "2024-99-99", which is no value of its type'),
        ("kind: !!int x\n", 'FILE:1: kind is "x", which is no value of its type'),
        ("kind: !!bool x\n", 'FILE:1: kind is "x", which is no value of its type'),
        ("kind: !!timestamp x\n", 'FILE:1: kind is "x", which is no value of its type'),
        ("kind: !program x\n", 'FILE:1: kind is "x", which is no value of its type'),
        (BOMB, "FILE:1: its aliases stand for over 100000 values"),
        ("a: &a {b: *a}\n", "FILE:1: its aliases stand for over 100000 values"),
        (b"{" + b" " * MAX_BYTES, "FILE: is over 4 MiB"),
        (b"#" * 200_000, "FILE: is over 128 KiB of YAML; convert it to JSON"),
    ],
)
def test_a_file_that_is_no_specification_is_rejected_with_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | bytes, sentence: str
) -> None:
    assert validated(capsys, tmp_path, content)[0].startswith(sentence)


def test_a_device_that_is_named_a_hundred_thousand_times_is_reported_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    device: dict[str, Any] = {"name": "0", "containerEdits": {"env": ["A=b"]}}
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [device] * 50_000}
    assert validated(capsys, tmp_path, json.dumps(document)) == ["FILE: devices: '0' is there twice"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["validate"], "cdi validate needs a file; see gpu-agent cdi --help"),
        (["validate", "/nonexistent"], "Could not read /nonexistent: No such file or directory"),
        (["validate", "/tmp"], "Could not read /tmp: Is a directory"),
        (["show", "x"], '"x" is not expected here; see gpu-agent cdi --help'),
    ],
)
def test_an_invalid_command_line_is_reported(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run(capsys, *arguments) == (2, "", f"gpu-agent: {sentence}\n")
