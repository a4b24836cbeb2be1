"""M1, NVIDIA/k8s-device-plugin#1433: a sharing option in the wrong place is silently ignored."""

import signal
from pathlib import Path

import pytest

from agent import cli
from agent.config.load import load
from tests.harness import GPU, agent_process, gpu_agent, simulated_node, wait_allocatable

MISPLACED = """\
version: v1
flags:
  renameByDefault: true
  failRequestsGreaterThanOne: true
sharing:
  timeSlicing:
    resources:
      - {name: nvidia.com/gpu, replicas: 4}
"""
RIGHT = """\
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - {name: nvidia.com/gpu, replicas: 4}
"""
SENTENCES = (
    "{}:3: flags.renameByDefault is in the wrong place; write sharing.timeSlicing.renameByDefault",
    (
        "{}:4: flags.failRequestsGreaterThanOne is in the wrong place; write"
        " sharing.timeSlicing.failRequestsGreaterThanOne"
    ),
)
TWO_GPUS = {"preset": "4x-t4", "gpus": 2}


def rejected(capsys: pytest.CaptureFixture[str], path: Path, content: str | bytes) -> list[str]:
    """The errors that `run` prints for a file."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cli.main(["run", "--config-file", str(path), "--kubelet-socket", "/nonexistent/kubelet.sock"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return [line.removeprefix("gpu-agent: ").replace(str(path), "FILE") for line in err.splitlines()]


async def test_1_switches_under_flags_are_rejected_with_the_right_place_and_nothing_is_registered() -> None:
    async with simulated_node(TWO_GPUS) as node:
        config = node.directory.path / "config.yaml"
        config.write_text(MISPLACED)
        async with agent_process(node, config_file=str(config)) as agent:
            assert await agent.ended() == 2
            assert agent.text.splitlines() == [f"gpu-agent: {each.format(config)}" for each in SENTENCES]
        assert not node.kubelet.registrations


async def test_2_in_the_right_place_they_count() -> None:
    async with simulated_node(TWO_GPUS) as node:
        config = node.directory.path / "config.yaml"
        config.write_text(RIGHT)
        async with agent_process(node, config_file=str(config)):
            await wait_allocatable(node.kubelet, 8, capacity=8, resource=f"{GPU}.shared")
            assert node.kubelet.allocatable(GPU) in (None, 0)


def test_3_a_strategy_means_the_same_alone_and_in_a_list(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    policies = []
    for strategy in ("envvar", "[envvar]", "volume-mounts", "[volume-mounts]"):
        file.write_text(f"version: v1\nflags:\n  plugin:\n    deviceListStrategy: {strategy}\n")
        policies.append(load({"config-file": str(file)}, {}).policy)
    assert policies[0] == policies[1] != policies[2] == policies[3]
    assert policies[0].injection.strategies == ("envvar",)


def test_4_one_replica_is_rejected_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "flags: {mpsRoot: /x}\nsharing:\n  mps:\n    resources:\n    - name: gpu\n      replicas: 1\n"
    assert rejected(capsys, tmp_path / "config.yaml", text) == [
        "FILE:6: sharing.mps.resources[0].replicas must be at least 2, and is 1"
    ]


async def test_5_a_live_reload_of_the_mistake_changes_nothing_and_is_reported_everywhere() -> None:
    async with simulated_node(TWO_GPUS) as node:
        config = node.directory.path / "config.yaml"
        config.write_text(RIGHT)
        async with agent_process(node, config_file=str(config)) as agent:
            await wait_allocatable(node.kubelet, 8, capacity=8, resource=f"{GPU}.shared")
            await agent.wait_answer("/readyz", lambda status, _: status == 200)
            lists = len(node.kubelet.lists)

            config.write_text(MISPLACED)
            agent.process.send_signal(signal.SIGHUP)

            line = await agent.wait_logged(
                lambda line: line["message"].startswith("Kept the old configuration: ")
            )
            expected = [each.format(config) for each in SENTENCES]
            assert line["problems"] == expected
            status, body = await agent.get("/readyz")
            assert (status, "[-]config failed" in body) == (500, True)
            assert (await agent.get("/healthz"))[0] == 200
            _, state = await agent.get("/debug/state")
            assert state["agent"]["config"]["trouble"] == "; ".join(expected)
            shown = await gpu_agent("status", f"--control-socket={node.directory.path}/agent/control.sock")
            assert all(sentence in shown.out for sentence in expected)
            assert len(node.kubelet.lists) == lists

            config.write_text(RIGHT)
            await agent.wait_logged(lambda line: line["message"].startswith("Read the configuration again: "))
            await agent.wait_answer("/readyz", lambda status, _: status == 200)
            assert len(node.kubelet.lists) == lists


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", 'FILE:1: is empty; write "version: v1", or name no configuration file'),
        (" \n\n", 'FILE:1: is empty; write "version: v1", or name no configuration file'),
        ("\ufeffversion: v1\n", "FILE:1: begins with a byte order mark; save it as UTF-8 without one"),
        ("flags:\n\tmigStrategy: none\n", "FILE:2: holds a tab where YAML allows none; indent with spaces"),
        ("flags:\n  migStrategy: none\n  migStrategy: mixed\n", "FILE:3: flags.migStrategy is given twice"),
        (b"a: b\n\x00", "FILE:2: holds a character that YAML forbids"),
        (b"\x7fELF\x02\x01\x01" + b"\xff" * 64, "FILE:1: not UTF-8 text"),
        (b"x" * (10 << 20), "The configuration file FILE is over 128 KiB"),
    ],
    ids=["empty", "blank", "byte order mark", "tab", "key twice", "NUL", "binary", "10 MiB"],
)
def test_6_what_is_no_configuration_is_rejected_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, sentence: str
) -> None:
    assert rejected(capsys, tmp_path / "config.yaml", content) == [sentence]


def test_a_link_to_nothing_is_how_nvidias_config_manager_shows_that_there_is_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").symlink_to("/dev/null")
    assert cli.main(["config", "validate", str(tmp_path / "config.yaml")]) == 0
    assert capsys.readouterr().err == ""
