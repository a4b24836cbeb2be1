import os
from pathlib import Path

import pytest

from agent.errors import ConfigError, UsageError
from agent.simulation import scenario
from agent.simulation.expectation import Expectation

GOOD = """\
node: 4x-t4
agent: {poll: 1s}
steps:
  - do: {reveal: 1}
  - expect: {resource: nvidia.com/gpu, capacity: 1}
  - at: 1500ms
    do:
      - {xid: 79, gpu: 3}
      - {kubelet: drop_stream, how: connection}
      - release
until: {capacity: 4, allocatable: 3, registrations: 2}
timeout: 40s
"""


def problems_of(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        scenario.load(str(path))
    return [problem.removeprefix(f"{tmp_path}/") for problem in caught.value.problems]


@pytest.mark.parametrize("name", scenario.shipped_names())
def test_every_shipped_scenario_is_valid_and_ends_by_itself(name: str) -> None:
    loaded = scenario.load(name)

    assert loaded.name == name
    assert loaded.until != Expectation("nvidia.com/gpu")
    assert loaded.timeout_ns <= 60_000_000_000


def test_the_scenarios_that_are_promised_are_shipped() -> None:
    assert set(scenario.shipped_names()) >= {
        "xid-79",
        "kubelet-restart",
        "stream-dropped",
        "socket-deleted",
        "late-gpus",
        "driver-late",
        "recover",
        "nvml-hang",
        "nvml-hang-driver",
        "gpu-lost",
        "driver-reload",
        "flapping",
        "hold",
        "kill-restart",
        "mig-mixed",
        "mig-reconfigure",
        "time-slicing",
        "mps",
    }


def test_a_scenario_can_give_the_agent_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("node: 4x-t4\nconfig: {version: v1, flags: {migStrategy: mixed}}\nuntil: {capacity: 4}\n")

    loaded = scenario.load(str(path))

    assert loaded.config == "version: v1\nflags:\n  migStrategy: mixed\n"
    assert loaded.agent_flags(tmp_path) == {"config-file": f"{tmp_path}/agent.yaml"}


def test_a_scenario_without_a_configuration_gives_the_agent_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)

    assert scenario.load(str(path)).agent_flags(tmp_path) == {"poll": "1s"}


def test_a_configuration_that_is_no_mapping_is_a_problem(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "node: 4x-t4\nconfig: [1]\nuntil: {capacity: 4}\n") == [
        "s.yaml:2: config must hold keys and values, as a configuration file does"
    ]


def test_a_file_has_what_happens_when_and_what_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)

    loaded = scenario.load(str(path))

    assert loaded.name == "mine"
    assert len(loaded.node.gpus) == 4
    assert dict(loaded.agent) == {"poll": "1s"}
    assert [step.at_ns for step in loaded.steps] == [0, 0, 1_500_000_000]
    assert [str(each) for each in loaded.steps[2].do] == [
        "xid xid=79 gpu=3",
        "kubelet drop-stream how=connection",
        "release",
    ]
    assert loaded.until == Expectation("nvidia.com/gpu", 4, 3, 2)
    assert loaded.timeout_ns == 40_000_000_000


def test_only_the_leading_steps_without_a_time_or_an_expectation_come_before_the_agent(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)

    assert [str(step.do[0]) for step in scenario.load(str(path)).setup] == ["reveal gpus=1"]


def test_a_step_may_wait_after_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("node: 4x-t4\nsteps:\n  - {after: 2s, do: release}\nuntil: {allocatable: 4}\n")

    loaded = scenario.load(str(path))

    assert [step.after_ns for step in loaded.steps] == [2_000_000_000]
    assert loaded.setup == ()


def test_it_is_known_how_often_a_scenario_kills_the_agent(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "node: 4x-t4\nsteps:\n  - {do: {agent: kill}}\n  - {do: [{agent: resume}, {agent: kill}]}\n"
        "until: {allocatable: 4}\n"
    )

    assert scenario.load(str(path)).kills == 2
    assert scenario.load("xid-79").kills == 0


def test_an_expectation_may_be_of_what_the_agent_reports(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "node: 4x-t4\nsteps:\n"
        "  - expect: {probe: running}\n"
        "  - expect: {condition: context_leak, kind: pod_gone, gpu: 3}\n"
        "  - expect: {condition: foreign_process, active: false}\n"
        "until: {allocatable: 4}\n"
    )

    loaded = scenario.load(str(path))

    assert [str(step.expect) for step in loaded.steps] == [
        "the agent's probe in the kernel",
        "context_leak (pod_gone) on GPU 3 reported by the agent",
        "no foreign_process reported by the agent",
    ]


def test_what_is_expected_of_the_agent_wrongly_is_reported(tmp_path: Path) -> None:
    found = problems_of(
        tmp_path,
        "node: 4x-t4\nsteps:\n"
        "  - expect: {probe: runs}\n"
        "  - expect: {condition: context_leek}\n"
        "  - expect: {condition: context_leak, kind: pod_lost, active: perhaps}\n"
        "  - expect: {allocatable: 4, gpu: 3}\n"
        "until: {allocatable: 4}\n",
    )

    assert [line.partition(" must be ")[0] for line in found] == [
        "s.yaml:3: steps[0].expect.probe",
        "s.yaml:4: steps[1].expect.condition",
        "s.yaml:5: steps[2].expect.kind",
        "s.yaml:5: steps[2].expect.active",
        "s.yaml:6: steps[3].expect has kind, gpu or active without a condition; write condition too",
    ]
    assert found[0].endswith('must be running, not "runs"')
    assert found[3].endswith('must be true or false, not "perhaps"')
    assert found[1].endswith('not "context_leek" (did you mean context_leak?)')


def test_a_node_may_change_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("node: {preset: 8x-a100, gpus: 2}\nuntil: {allocatable: 2}\n")

    loaded = scenario.load(str(path))

    assert len(loaded.node.gpus) == 2
    assert loaded.label == "8x-a100 (changed)"


def test_every_problem_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    found = problems_of(
        tmp_path,
        "nodes: x\n"
        "node: dgx-h1000\n"
        "agent: {pol: 1s, poll: soon, kubelet-socket: /x}\n"
        "steps:\n"
        "  - {at: later, do: {xidd: 79}}\n"
        "  - {at: 3s, do: {xid: many, gpu: 1}}\n"
        "  - {at: 2s, do: {hang: gpu}}\n"
        "  - {at: 4s}\n"
        "  - do: {xid: 79, release: }\n"
        "until: {alocatable: 7}\n"
        "timeout: 40\n",
    )

    assert len(found) >= 12
    text = "\n".join(found)
    for expected in (
        "s.yaml:1: nodes is unknown (did you mean node?)",
        "s.yaml:2: node: preset: there is no 'dgx-h1000'",
        "s.yaml:3: agent.pol is no option of run (did you mean poll?)",
        's.yaml:3: agent.poll must be a number with a unit, such as "10s" or "500ms", not "soon"',
        "s.yaml:3: agent.kubelet-socket is set by the simulated node itself",
        's.yaml:5: steps[0].at must be a number with a unit, such as "10s" or "500ms", not "later"',
        "s.yaml:5: steps[0].do: xidd is no action (did you mean xid?); known: xid, ",
        's.yaml:6: steps[1].do: xid must be a whole number between 1 and 65535, not "many"',
        "s.yaml:7: steps[2].do: hang needs either gpu or the scope driver",
        "s.yaml:7: steps[2].at is before the step above it",
        "s.yaml:8: steps[3] needs do or expect",
        "s.yaml:9: steps[4].do: one action at a time, not xid and release; write a list",
        "s.yaml:10: until.alocatable is unknown (did you mean allocatable?)",
        "s.yaml:10: until needs capacity, allocatable, registrations, condition or probe",
        "s.yaml:11: timeout must be a number with a unit",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\xfe\x00binary", ":1: not UTF-8 text"),
        (b"node:\n\tgpus: 3\n", ":2: holds a tab where YAML allows none; indent with spaces"),
        (b"node: a\x00b\n", ":1: holds a character that YAML forbids"),
        (b"node: " + b"[" * 1_000, "nested too deeply"),
        (b"#" * 200_000, "over 128 KiB"),
    ],
    ids=["binary", "tab", "nul", "deep", "long"],
)
def test_what_is_no_yaml_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(content)

    with pytest.raises(UsageError) as caught:
        scenario.load(str(path))

    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_given_twice_is_a_problem(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "node: 4x-t4\nnode: dgx-h100\nuntil: {allocatable: 4}\n")

    assert found == ["s.yaml:2: node is given twice"]


def test_an_empty_file_is_an_error_that_names_what_it_needs(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "# nothing\n") == [
        "s.yaml: the file is empty; it needs node, agent, config, steps, until, timeout"
    ]


@pytest.mark.parametrize(
    "text", ["- a\n", "just words\n", "1\n", "? [a, b]\n: 1\n"], ids=["list", "text", "number", "odd key"]
)
def test_a_file_of_another_shape_is_a_problem_and_no_crash(tmp_path: Path, text: str) -> None:
    assert any("must" in problem for problem in problems_of(tmp_path, text))


def test_the_number_of_reported_problems_is_bounded(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "".join(f"key{n}: 1\n" for n in range(500)))

    assert len(found) == 51
    assert found[-1] == "and more"


def test_a_node_that_names_itself_many_times_is_rejected(tmp_path: Path) -> None:
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdef", "bcdefg", strict=True)
    )

    found = problems_of(tmp_path, bomb + "node: {preset: 4x-t4, gpu: {x: *g}}\nuntil: {allocatable: 1}\n")

    assert any("holds too much" in problem for problem in found)


@pytest.mark.parametrize("make", ["directory", "missing", "pipe"])
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, make: str) -> None:
    path = tmp_path / "s.yaml"
    if make == "directory":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)

    with pytest.raises(UsageError, match=r"scenario .*s\.yaml") as caught:
        scenario.load(str(path))

    assert "\n" not in str(caught.value)


def test_an_unknown_name_suggests_the_right_one_and_lists_them_all() -> None:
    with pytest.raises(UsageError) as caught:
        scenario.load("xid79")

    assert "There is no scenario xid79 (did you mean xid-79?)" in str(caught.value)
    assert ", ".join(scenario.shipped_names()) in str(caught.value)
