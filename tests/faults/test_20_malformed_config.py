"""Fault 20: a configuration that is wrong in whatever way, at the start and at a reload, a hundred times.

Right: exit 2 with all problems at once; a reload keeps the old configuration and reports it.
"""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import cli
from agent.config.discovery_options import DISCOVERY_OPTIONS
from agent.config.load import check_file, load
from agent.config.options import OPTIONS
from agent.errors import ConfigError
from tests.harness import agent_process, nothing_more, simulated_node, wait_allocatable

TAKES_ANY_TEXT = ("cdi-annotation-prefix", "leak-allow", "leak-namespaces", "leak-servers")

KEYS = [
    option.file_key
    for option in (*OPTIONS.values(), *DISCOVERY_OPTIONS)
    if option.file_key and option.name not in TAKES_ANY_TEXT
]

WRONG_TYPES = st.sampled_from([{"a": 1}, [{"b": 2}], [[1]]])
OUT_OF_RANGE = st.sampled_from(["\x07", "-1e9", "999999999999999999h", "no such word"])


def nested(leaves: dict[str, object]) -> dict[str, object]:
    """A document with a value at each dotted key."""
    document: dict[str, object] = {}
    for key, value in leaves.items():
        *parents, last = key.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})  # type: ignore[assignment]
        place[last] = value
    return document


def written(tmp_path: Path, document: object) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True))
    return str(path)


in_files = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@in_files
@given(st.dictionaries(st.sampled_from(KEYS), WRONG_TYPES | OUT_OF_RANGE, min_size=1, max_size=8))
def test_each_wrong_value_is_a_problem_that_names_its_key(tmp_path: Path, leaves: dict[str, object]) -> None:
    problems = check_file(written(tmp_path, nested(leaves)), strict=False).problems
    for key, value in leaves.items():
        is_skipped = key.endswith("Healthchecks") and isinstance(value, str)
        assert is_skipped or any(f": {key}" in problem for problem in problems), (key, problems)


@in_files
@given(
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True),
    st.sampled_from(["x", "Z", "_"]),
)
def test_each_misspelt_key_is_reported_as_a_problem_or_a_warning(
    tmp_path: Path, keys: list[str], suffix: str
) -> None:
    contents = check_file(written(tmp_path, nested({f"{key}{suffix}": "1" for key in keys})), strict=False)
    notes = contents.problems + contents.warnings
    for key in keys:
        assert sum(f": {key}{suffix} is unknown" in note for note in notes) == 1
    assert all(
        f": {key}{suffix}" not in note for note in contents.warnings for key in keys if key[:6] == "agent."
    )


@in_files
@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True))
def test_strict_makes_a_problem_of_each(tmp_path: Path, keys: list[str]) -> None:
    path = written(tmp_path, nested({f"{key}x": "1" for key in keys}))
    assert len(check_file(path, strict=True).problems) == len(keys)


SHARES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["gpu", "nvidia.com/gpu", "", "GPU", 3, None, ["gpu"]]),
        "replicas": st.sampled_from([-1, 0, 1, 2, 48, 49, 1024, 1025, "two", 2.5, None, {}]),
        "models": st.sampled_from([[], ["*"], "x", [None], [{}]]),
        "gpus": st.sampled_from([[], [0], ["GPU-1"], ["x"], 0]),
        "rename": st.just("x"),
        "devices": st.sampled_from(["all", [0], 2]),
    },
)
WAYS = st.fixed_dictionaries(
    {},
    optional={
        "resources": st.lists(SHARES, max_size=3) | st.none() | st.just("x"),
        "renameByDefault": st.sampled_from([True, False, "x", None, []]),
        "failRequestsGreaterThanOne": st.sampled_from([True, False, 1, None]),
    },
)


@in_files
@given(
    st.fixed_dictionaries({}, optional={"timeSlicing": WAYS | st.none(), "mps": WAYS | st.none()}),
    st.lists(SHARES, max_size=2),
)
def test_whatever_is_configured_for_sharing_it_is_valid_shares_or_sentences(
    tmp_path: Path, sharing: dict[str, object], ours: list[object]
) -> None:
    path = written(tmp_path, {"sharing": sharing, "agent": {"sharing": {"resources": ours}}})
    flags = {"config-file": path, "mps-root": "/x"}
    problems = check_file(path, strict=False).problems
    if problems:
        assert all(problem.startswith(f"{path}:") for problem in problems)
        with pytest.raises(ConfigError):
            load(flags, {})
        return
    shares = load(flags, {}).policy.sharing
    most = 48 if shares.strategy == "mps" else 1024
    assert all(
        2 <= share.replicas <= most and share.resource[:11] == "nvidia.com/" for share in shares.shares
    )


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbfversion: v1", b"\x00", b"\xff" * 100, b"x" * (10 << 20)]
)
def test_what_is_no_configuration_ends_with_2_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    assert cli.main(["run", f"--config-file={path}"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert str(path) in err


def test_a_file_that_may_not_be_read_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Root may read everything, so this is a name that leads nowhere instead.
    (tmp_path / "config.yaml").symlink_to("config.yaml")
    assert cli.main(["run", f"--config-file={tmp_path}/config.yaml"]) == 2
    assert "Could not read the configuration file" in capsys.readouterr().err


def has_text(text: str, line: dict[str, Any]) -> bool:
    return line["message"].startswith("Kept the old configuration") and text in "".join(line["problems"])


@pytest.mark.slow
async def test_a_hundred_reloads_of_mistakes_change_nothing_and_a_good_one_is_taken() -> None:
    async with simulated_node({"preset": "4x-t4", "gpus": 2}) as node:
        config = node.directory.path / "config.yaml"
        config.write_text("version: v1\n")
        async with agent_process(node, config_file=str(config)) as agent:
            await wait_allocatable(node.kubelet, 2, capacity=2)
            await agent.wait_answer("/readyz", lambda status, _: status == 200)
            lists, registrations = len(node.kubelet.lists), len(node.kubelet.registrations)

            for number in range(100):
                config.write_text(f"agent: {{callDeadline: wrong{number}}}\n")
                agent.process.send_signal(signal.SIGHUP)
                await agent.wait_logged(partial(has_text, f'and is "wrong{number}"'))
            assert (await agent.get("/readyz"))[0] == 500
            assert (await agent.get("/livez"))[0] == 200
            await nothing_more(
                node.kubelet,
                lambda kubelet: (len(kubelet.lists), len(kubelet.registrations)) != (lists, registrations),
                0.5,
            )

            config.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 3}]}}\n")
            await wait_allocatable(node.kubelet, 6, capacity=6)
            await agent.wait_answer("/readyz", lambda status, _: status == 200)


@pytest.mark.slow
async def test_signals_that_come_faster_than_they_are_answered_end_in_the_newest_configuration() -> None:
    async with simulated_node({"preset": "4x-t4", "gpus": 2}) as node:
        config = node.directory.path / "config.yaml"
        config.write_text("version: v1\n")
        async with agent_process(node, config_file=str(config)) as agent:
            await wait_allocatable(node.kubelet, 2, capacity=2)
            for number in range(100):
                replicas = 2 + number % 7
                text = {"sharing": {"timeSlicing": {"resources": [{"name": "gpu", "replicas": replicas}]}}}
                config.write_text(json.dumps(text))
                agent.process.send_signal(signal.SIGHUP)
            await wait_allocatable(node.kubelet, 2 * (2 + 99 % 7), capacity=2 * (2 + 99 % 7))
            assert agent.process.returncode is None
