"""Sharing in the configuration file: as NVIDIA's plugin reads it, and our entries for single GPUs."""

from pathlib import Path

import pytest

from agent.config.load import load
from agent.config.settings import Settings
from agent.config.sharing_file import MAX_SELECTORS
from agent.errors import ConfigError
from agent.model.ids import ResourceName
from agent.model.sharing import Share, Sharing

GPU = ResourceName("nvidia.com/gpu")


def loaded(tmp_path: Path, text: str, **flags: str) -> Settings:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load({"config-file": str(path)} | {k.replace("_", "-"): v for k, v in flags.items()}, {})


def sharing(tmp_path: Path, text: str, **flags: str) -> Sharing:
    return loaded(tmp_path, f"sharing: {text}\n", **flags).policy.sharing


def problems(tmp_path: Path, text: str, **flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text, **flags)
    return [problem.partition("config.yaml:")[2] or problem for problem in caught.value.problems]


ONE = "resources: [{name: nvidia.com/gpu, replicas: 4}]"


def test_time_slicing_with_its_switches(tmp_path: Path) -> None:
    text = f"{{timeSlicing: {{renameByDefault: true, failRequestsGreaterThanOne: true, {ONE}}}}}"
    assert sharing(tmp_path, text) == Sharing(
        shares=(Share(GPU, 4),), rename_by_default=True, fail_requests_greater_than_one=True
    )


def test_only_mps_rejects_more_than_one_share_by_default(tmp_path: Path) -> None:
    assert not sharing(tmp_path, f"{{timeSlicing: {{{ONE}}}}}").fail_requests_greater_than_one
    mps = sharing(tmp_path, f"{{mps: {{{ONE}}}}}", mps_root="/x")
    assert (mps.strategy, mps.fail_requests_greater_than_one) == ("mps", True)
    relaxed = f"{{mps: {{failRequestsGreaterThanOne: false, {ONE}}}}}"
    assert not sharing(tmp_path, relaxed, mps_root="/x").fail_requests_greater_than_one


def test_mps_overrides_time_slicing_with_a_warning(tmp_path: Path) -> None:
    text = f"sharing:\n  timeSlicing: {{{ONE}}}\n  mps: {{resources: [{{name: gpu, replicas: 2}}]}}\n"
    settings = loaded(tmp_path, text, mps_root="/x")
    assert settings.policy.sharing.strategy == "mps"
    assert settings.policy.sharing.shares == (Share(GPU, 2),)
    assert settings.warnings[0].endswith(":2: sharing.timeSlicing is ignored, because sharing.mps counts")


def test_mps_needs_its_root_and_conflicts_with_mixed_mig(tmp_path: Path) -> None:
    text = f"sharing:\n  mps: {{{ONE}}}\n"
    assert problems(tmp_path, text, mig_strategy="mixed") == [
        "2: sharing.mps conflicts with the MIG strategy mixed (--mig-strategy)",
        "2: sharing.mps needs --mps-root, the directory of the MPS control daemon",
    ]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("{name: gpu, replicas: 1}", "[0].replicas must be at least 2, and is 1"),
        ("{name: gpu, replicas: -3}", "[0].replicas must be at least 2, and is -3"),
        (
            "{name: gpu, replicas: 70000}",
            "[0].replicas is 70000: the list of one GPU has 4328890 bytes, and the kubelet accepts 4194304",
        ),
        ("{name: gpu, replicas: four}", '[0].replicas must be a whole number, and is "four"'),
        ("{name: gpu, replicas: 2.5}", '[0].replicas must be a whole number, and is "2.5"'),
        ("{name: gpu}", "[0] needs a number of replicas"),
        ("{replicas: 2}", "[0] needs a name, such as nvidia.com/gpu"),
        ("{name: Gpu, replicas: 2}", "[0].name must be lower-case letters, digits, - and ., such as"),
        ("{name: -gpu, replicas: 2}", "[0].name must be lower-case letters"),
        ("{name: example.com/gpu, replicas: 2}", "[0].name must be lower-case letters"),
        ("{name: " + "a" * 53 + ", replicas: 2}", "[0].name must have at most 63 characters with its prefix"),
        ("gpu", "[0] must hold keys and values"),
    ],
)
def test_what_nvidias_plugin_rejects_is_rejected_with_its_path(
    tmp_path: Path, entry: str, sentence: str
) -> None:
    for way in ("timeSlicing", "mps"):
        found = problems(tmp_path, f"sharing: {{{way}: {{resources: [{entry}]}}}}\n", mps_root="/x")
        assert any(problem.startswith(f"1: sharing.{way}.resources{sentence}") for problem in found), found


@pytest.mark.parametrize("text", ["{renameByDefault: true}", "{}", "{resources: []}", "{resources: }"])
def test_sharing_without_resources_is_a_mistake_and_not_nothing(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, f"sharing: {{timeSlicing: {text}}}\n") == [
        "1: sharing.timeSlicing needs resources, such as [{name: nvidia.com/gpu, replicas: 4}]"
    ]


def test_a_name_may_be_as_long_as_it_is_advertised(tmp_path: Path) -> None:
    name = "a" * 50
    assert sharing(tmp_path, f"{{timeSlicing: {{resources: [{{name: {name}, replicas: 2}}]}}}}").shares
    text = (
        f"sharing: {{timeSlicing: {{renameByDefault: true, resources: [{{name: {name}, replicas: 2}}]}}}}\n"
    )
    assert problems(tmp_path, text) == [
        f"1: sharing.timeSlicing.resources[0].name has more than 63 characters as nvidia.com/{name}.shared"
    ]


def test_48_clients_are_the_most_for_mps_and_also_for_our_entries(tmp_path: Path) -> None:
    ours = "agent: {sharing: {resources: [{name: gpu, replicas: 49, gpus: [1]}]}}\n"
    text = f"sharing: {{mps: {{resources: [{{name: gpu, replicas: 49}}]}}}}\n{ours}"
    assert problems(tmp_path, text, mps_root="/x") == [
        "1: sharing.mps.resources[0].replicas must be at most 48 with MPS, and is 49",
        "2: agent.sharing.resources[0].replicas must be at most 48 with MPS, and is 49",
    ]
    assert loaded(tmp_path, text.replace("49", "48"), mps_root="/x").policy.sharing.shares[0].replicas == 48


def test_a_repeated_resource_has_the_larger_number_as_with_nvidias_plugin(tmp_path: Path) -> None:
    entries = "{name: gpu, replicas: 4}, {name: b, replicas: 3}, {name: nvidia.com/gpu, replicas: 1500}"
    settings = loaded(tmp_path, f"sharing: {{timeSlicing: {{resources: [{entries}]}}}}\n")
    assert settings.policy.sharing.shares == (Share(GPU, 1500), Share(ResourceName("nvidia.com/b"), 3))
    assert [warning.partition("config.yaml:")[2] for warning in settings.warnings] == [
        "1: sharing.timeSlicing.resources names nvidia.com/gpu twice; the larger number counts, 1500"
    ]


def test_keys_that_nvidias_plugin_ignores_are_warnings_if_they_would_change_something(tmp_path: Path) -> None:
    entries = (
        "{name: gpu, replicas: 2, rename: shared-gpu, devices: [0]}, {name: b, replicas: 2, devices: all}"
    )
    settings = loaded(tmp_path, f"sharing: {{timeSlicing: {{resources: [{entries}]}}}}\n")
    assert [warning.partition("config.yaml:")[2] for warning in settings.warnings] == [
        "1: sharing.timeSlicing.resources[0].rename is ignored, as NVIDIA's plugin does",
        "1: sharing.timeSlicing.resources[0].devices is ignored, as NVIDIA's plugin does",
    ]


# Ours


def test_our_entries_count_first_and_name_models_and_gpus(tmp_path: Path) -> None:
    text = f"""\
sharing: {{timeSlicing: {{{ONE}}}}}
agent:
  sharing:
    distinctCards: true
    resources:
      - {{name: gpu, replicas: 8, models: ["*A100*", Tesla T4]}}
      - {{name: gpu, replicas: 2, gpus: [0, GPU-ab12]}}
"""
    settings = loaded(tmp_path, text)
    assert settings.policy.sharing == Sharing(
        shares=(
            Share(GPU, 8, models=("*A100*", "Tesla T4")),
            Share(GPU, 2, gpus=("0", "GPU-ab12")),
            Share(GPU, 4),
        ),
        distinct_cards=True,
    )
    assert settings.warnings == ()


def test_our_entries_may_stand_alone(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "agent: {sharing: {resources: [{name: gpu, replicas: 2, gpus: [1]}]}}\n")
    assert settings.policy.sharing == Sharing(shares=(Share(GPU, 2, gpus=("1",)),))


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("{name: gpu, replicas: 2, gpus: []}", "[0].gpus names none; omit it to mean all"),
        ("{name: gpu, replicas: 2, gpus: [x]}", '[0].gpus must hold indexes or UUIDs of GPUs, and not "x"'),
        ("{name: gpu, replicas: 2, gpus: 0}", "[0].gpus must be a list"),
        ("{name: gpu, replicas: 2, models: ['']}", "[0].models must hold words of at most 128 characters"),
        ("{name: gpu, replicas: 2, model: [a]}", "[0].model is unknown (did you mean models?)"),
        ("{name: a, replicas: 2}, {name: a, replicas: 3}", " names nvidia.com/a twice"),
    ],
)
def test_mistakes_in_our_entries_are_reported(tmp_path: Path, entry: str, sentence: str) -> None:
    text = f"agent: {{sharing: {{resources: [{entry}]}}}}\n"
    assert f"1: agent.sharing.resources{sentence}" in problems(tmp_path, text)


def test_the_gpus_of_an_entry_are_bounded(tmp_path: Path) -> None:
    listed = ", ".join(str(number) for number in range(MAX_SELECTORS + 1))
    text = f"agent: {{sharing: {{resources: [{{name: gpu, replicas: 2, gpus: [{listed}]}}]}}}}\n"
    assert problems(tmp_path, text) == ["1: agent.sharing.resources[0].gpus holds more than 64 entries"]
