"""The origins of values; every mistake is reported at once, with its position."""

import os
import string
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent.config import file as config_file
from agent.config import load as config
from agent.config import yaml_tree
from agent.config.discovery_options import DISCOVERY_OPTIONS
from agent.config.options import OPTIONS
from agent.config.our_options import LOOPBACK_API_PORT
from agent.config.settings import Settings, changes_that_need_a_restart, default_node_dir
from agent.config.values import MAX_SKIPPED_NAMED, MAX_XIDS, Address, duration_from, xid_list_from
from agent.core import xids
from agent.errors import ConfigError
from agent.model.health import Reason
from agent.model.ids import ResourceName
from agent.model.policy import Policy
from agent.model.sharing import Sharing

NOT_EMPTY = {
    "if-running": "fail",
    "api-listen": "127.0.0.1:1",
    "soft-flips": "thermal",
    "imex-channel-ids": "0",
}
"""Values for options that are empty by default and accept more than a path."""


def load(**flags: str) -> Settings:
    return config.load({name.replace("_", "-"): value for name, value in flags.items()}, {})


def flag_problems(flags: dict[str, str]) -> tuple[str, ...]:
    """Return the problems of these flags; only a ConfigError may be raised."""
    try:
        config.load(flags, {})
    except ConfigError as error:
        return error.problems
    return ()


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def problems(tmp_path: Path, text: str | bytes) -> tuple[str, ...]:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(config_file=path)
    return tuple(problem.replace(path, "FILE") for problem in caught.value.problems)


def warnings(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = write(tmp_path, text)
    return tuple(warning.replace(path, "FILE") for warning in load(config_file=path).warnings)


# Precedence


def test_without_anything_the_defaults_count() -> None:
    settings_ = config.load({}, {})
    assert settings_.fail_on_init_error is True
    assert settings_.kubelet_socket == "/var/lib/kubelet/device-plugins/kubelet.sock"
    assert settings_.http_listen == Address("127.0.0.1", 9470)
    assert settings_.poll_ns == 10_000_000_000
    assert settings_.policy.recovery_clean_probes == 3
    assert set(settings_.origins.values()) == {"default"}


def test_a_flag_counts_before_a_variable_and_a_variable_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "flags: {migStrategy: single}\nagent: {poll: 3s, callDeadline: 4s}\n")
    settings_ = config.load(
        {"config-file": path, "poll": "1s"}, {"GPU_AGENT_POLL": "2s", "GPU_AGENT_CALL_DEADLINE": "2s"}
    )
    assert settings_.poll_ns == 1_000_000_000
    assert settings_.call_deadline_ns == 2_000_000_000
    assert settings_.policy.mig_strategy == "single"


def test_each_value_has_its_origin(tmp_path: Path) -> None:
    path = write(tmp_path, "version: v1\nagent:\n  callDeadline: 4s\n")
    settings_ = config.load({"config-file": path, "poll": "1s"}, {"MIG_STRATEGY": "mixed"})
    assert settings_.origins["poll"] == "--poll"
    assert settings_.origins["mig-strategy"] == "MIG_STRATEGY"
    assert settings_.origins["call-deadline"] == f"{path}:3: agent.callDeadline"
    assert settings_.origins["http-listen"] == "default"


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.file_key])
def test_every_option_of_the_file_can_be_set_there(tmp_path: Path, name: str) -> None:
    option = OPTIONS[name]
    text = option.default or NOT_EMPTY.get(name, "/x")
    keys = option.file_key.split(".")
    yaml = "".join("  " * depth + f"{key}:\n" for depth, key in enumerate(keys))[:-1] + f" {text}\n"
    settings_ = load(config_file=write(tmp_path, yaml))
    assert settings_.origins[name].endswith(option.file_key)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_can_be_set_by_its_variable(name: str, tmp_path: Path) -> None:
    option = OPTIONS[name]
    default = option.default or NOT_EMPTY.get(name, "/x")
    text = write(tmp_path, "version: v1") if name == "config-file" else default
    settings_ = config.load({}, {option.environment: text})
    assert settings_.origins[name] == option.environment


def test_names_of_options_and_keys_are_unique() -> None:
    environment = [option.environment for option in OPTIONS.values()]
    keys = [option.file_key for option in OPTIONS.values() if option.file_key]
    assert len(set(environment)) == len(environment)
    assert len(set(keys)) == len(keys)


def test_defaults_of_the_core_and_of_the_options_agree() -> None:
    assert load().policy == Policy()


def test_an_empty_variable_counts_as_unset_where_empty_means_nothing() -> None:
    assert config.load({}, {"MIG_STRATEGY": ""}).origins["mig-strategy"] == "default"


def test_an_empty_kubelet_socket_means_to_serve_without_registering() -> None:
    settings_ = config.load({}, {"KUBELET_SOCKET": ""})
    assert not settings_.registers
    assert settings_.kubelet_socket_or_default == "/var/lib/kubelet/device-plugins/kubelet.sock"


# Derived values


def test_the_dev_root_follows_the_driver_root_unless_given() -> None:
    assert load(driver_root="/run/nvidia/driver").dev_root == "/run/nvidia/driver"
    assert load(driver_root="/run/nvidia/driver", dev_root="/").policy.injection.device_root == "/"


def test_the_api_is_served_with_http_where_that_is_loopback() -> None:
    assert load(http_listen="127.0.0.1:80").api_listen == Address("127.0.0.1", 80)


def test_the_api_stays_on_this_machine_where_http_does_not() -> None:
    assert load(http_listen=":9470").api_listen == Address("127.0.0.1", LOOPBACK_API_PORT)


def test_the_simulated_node_is_below_run_for_root_and_below_the_runtime_directory_for_others() -> None:
    assert default_node_dir({"GPU_AGENT_NODE_DIR": "/x"}) == "/x"
    assert default_node_dir({"XDG_RUNTIME_DIR": "/run/user/7"}).endswith("gpu-agent-demo")


def test_without_a_directory_of_its_user_the_simulated_node_is_right_below_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_node_dir({}) == "/tmp/gpu-agent-demo-1000"
    assert default_node_dir({"XDG_RUNTIME_DIR": "/run/user/7"}) == "/run/user/7/gpu-agent-demo"


# Values


@pytest.mark.parametrize(
    ("text", "value_ns"),
    [("10s", 10**10), ("500ms", 5 * 10**8), ("1m30s", 90 * 10**9), ("0.5s", 5 * 10**8), ("2h", 72 * 10**11)],
)
def test_durations_are_read_as_go_writes_them(text: str, value_ns: int) -> None:
    assert duration_from(text) == value_ns


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "10sec", "1e3s", "٣s"])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="unit"):
        duration_from(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:1", Address("127.0.0.1", 1)),
        (":9470", Address("0.0.0.0", 9470)),
        ("[::1]:80", Address("::1", 80)),
        ("localhost:0", Address("127.0.0.1", 0)),
        ("", None),
    ],
)
def test_addresses_are_numbers_so_that_no_name_lookup_blocks(text: str, address: Address | None) -> None:
    assert load(http_listen=text).http_listen == address


@pytest.mark.parametrize(
    "text", ["example.org:80", "127.0.0.1", "127.0.0.1:99999", "1.2.3:4", ":x", "::1:80x"]
)
def test_an_invalid_address_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--http-listen must"):
        load(http_listen=text)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("mig_strategy", "both", '--mig-strategy must be one of none, single, mixed, and is "both"'),
        ("fail_on_init_error", "yes", '--fail-on-init-error must be true or false, and is "yes"'),
        ("poll", "1ns", '--poll must be between 10ms and 10m, and is "1ns"'),
        ("recovery_clean_probes", "0", "--recovery-clean-probes must be a whole number between 1 and 1000"),
        ("recovery_clean_probes", "9" * 99, "--recovery-clean-probes must be a whole number"),
        ("state_dir", "here", '--state-dir must be an absolute path, and is "here"'),
        ("state_dir", "", "--state-dir must not be empty"),
        ("log_level", "loud", "--log-level must be one of"),
    ],
)
def test_a_wrong_value_is_reported_with_the_valid_ones(name: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{name: value})
    assert caught.value.problems[0].startswith(sentence)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "agent: {pol: 1s, callDeadline: soon}\nsharing: 3\n")
    with pytest.raises(ConfigError) as caught:
        config.load({"config-file": path, "mig-strategy": "x"}, {"FAIL_ON_INIT_ERROR": "y"})
    assert len(caught.value.problems) == 5


def test_a_misspelt_variable_is_a_warning_with_the_right_one() -> None:
    assert config.load({}, {"GPU_AGENT_HTTP_LISTN": "x"}).warnings == (
        "GPU_AGENT_HTTP_LISTN is no setting (did you mean GPU_AGENT_HTTP_LISTEN?)",
    )


# The file


def test_nvidias_sample_file_is_accepted_as_it_is(tmp_path: Path) -> None:
    text = """\
version: v1
flags:
  migStrategy: "mixed"
  failOnInitError: false
  nvidiaDriverRoot: "/run/nvidia/driver"
  gdsEnabled: false
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: ["envvar"]
    deviceIDStrategy: "uuid"
  gfd:
    oneshot: false
resources:
  gpus:
  - pattern: "*"
    name: gpu
sharing:
  timeSlicing:
    renameByDefault: false
    resources:
    - name: gpu
      replicas: 4
    - name: nvidia.com/mig-1g.5gb
      replicas: 2
"""
    settings_ = load(config_file=write(tmp_path, text))
    assert settings_.policy.mig_strategy == "mixed"
    assert settings_.policy.injection.pass_device_specs
    assert not settings_.fail_on_init_error
    shares = {ResourceName("nvidia.com/gpu"): 4, ResourceName("nvidia.com/mig-1g.5gb"): 2}
    assert settings_.policy.sharing == Sharing.of(shares)
    assert [warning.split(": ", 1)[1] for warning in settings_.warnings] == [
        "resources is ignored, as NVIDIA's plugin does: names cannot be chosen",
    ]


@pytest.mark.parametrize(
    "text",
    ["---\n", "# only a comment\n", "version: v1\n", "version:\n", "agent:\n", "resources: {gpus: []}"],
)
def test_a_file_that_sets_nothing_changes_nothing(tmp_path: Path, text: str) -> None:
    settings_ = load(config_file=write(tmp_path, text))
    assert settings_.policy == load().policy
    assert settings_.warnings == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("agent:\n  pol: 1s\n", "FILE:2: agent.pol is unknown (did you mean poll?)"),
        ("agent: {http_listen: x}", "FILE:1: agent.http_listen is unknown (did you mean httpListen?)"),
        ("agent: {zzz: 1}", "FILE:1: agent.zzz is unknown"),
        ("migStrategy: none", "FILE:1: migStrategy is in the wrong place; write flags.migStrategy"),
        ("flags: {poll: 1s}", "FILE:1: flags.poll is in the wrong place; write agent.poll"),
        (
            "agent: {passDeviceSpecs: true}",
            "FILE:1: agent.passDeviceSpecs is in the wrong place; write flags.plugin.passDeviceSpecs",
        ),
        ("version: v2", 'FILE:1: version must be v1, not "v2"'),
        ("agent: {poll: [1]}", "FILE:1: agent.poll must be a single value"),
        ("agent: [1]", "FILE:1: agent must hold keys and values"),
        ("- 1", "FILE:1: the file must hold keys and values"),
        ("just words", "FILE:1: the file must hold keys and values"),
        ("agent: {poll: 1s}\nagent: {poll: 2s}", "FILE:2: agent is given twice"),
        ("agent:\n  poll: 1s\n  poll: 2s\n", "FILE:3: agent.poll is given twice"),
        ("? [a]\n: b\n", "FILE:1: a key of the file must be a word"),
        (
            "agent: {poll: 5}",
            'FILE:1: agent.poll must be a number with a unit, such as "10s" or "500ms", and is "5"',
        ),
        ("sharing: {timeSlicing: {resources: 3}}", "FILE:1: sharing.timeSlicing.resources must be a list"),
        (
            "sharing: {timeSlicing: {resources: [{replicas: 2}]}}",
            "FILE:1: sharing.timeSlicing.resources[0] needs a name, such as nvidia.com/gpu",
        ),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu}]}}",
            "FILE:1: sharing.timeSlicing.resources[0] needs a number of replicas",
        ),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}",
            "FILE:1: sharing.timeSlicing.resources[0].replicas must be at least 2, and is 1",
        ),
        ("a: b: c", "FILE:1: mapping values are not allowed here"),
        ("agent:\n\tpoll: 1s\n", "FILE:2: holds a tab where YAML allows none; indent with spaces"),
        ("a: [1", "FILE:1: expected ',' or ']', but got '<stream end>'"),
        (b"\x00\x01\x02", "FILE:1: holds a character that YAML forbids"),
        (b"agent:\n  x: \xff\xfe\n", "FILE:2: not UTF-8 text"),
        ("a: &x 1\nb: *y\n", "FILE:2: found undefined alias 'y'"),
        ("[" * 5000, "FILE:1: nested too deeply"),
        ("- " * 5000, "FILE:1: nested too deeply"),
        ("\n".join(" " * depth + "a:" for depth in range(480)), "FILE:66: nested too deeply"),
        ("a: b\n" * 200_000, "The configuration file FILE is over 128 KiB"),
        ("a: 1\n---\nb: 2\n", "FILE:2: but found another document"),
    ],
)
def test_a_mistake_in_the_file_is_reported_with_its_line_and_path(
    tmp_path: Path, text: str | bytes, sentence: str
) -> None:
    assert sentence in problems(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "flags: {migStrateg: none}",
            "FILE:1: flags.migStrateg is unknown and ignored (did you mean migStrategy?)",
        ),
        ("version: v1\nsomething: {else: 1}", "FILE:2: something is unknown and ignored"),
    ],
)
def test_an_unknown_key_outside_of_ours_is_a_warning(tmp_path: Path, text: str, sentence: str) -> None:
    assert warnings(tmp_path, text) == (sentence,)


CONFIG_MAP = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: nvidia-plugin-configs}
data:
  any: |-
    version: v1
"""
KEYS = "a configuration has flags, imex, agent, version, resources, sharing"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            CONFIG_MAP,
            "the file is a whole ConfigMap; write the text under data (any) to a file of its own, or mount",
        ),
        (
            "kind: DaemonSet\napiVersion: apps/v1\nspec: {}\n",
            "FILE:1: the file is a Kubernetes DaemonSet, not a configuration; name the file that a",
        ),
        (
            "version: v1\nmig-configs: {all-disabled: []}\n",
            f"FILE:1: the file is one for NVIDIA's MIG manager; {KEYS}",
        ),
        (
            '{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": []}',
            f"FILE:1: the file is one for a container runtime (gpu-agent cdi validate checks it); {KEYS}",
        ),
        (
            "image: {}\nnodeSelector: {}\n",
            f"FILE:1: the file is none of the agent's; its keys are image, nodeSelector; {KEYS}",
        ),
        ("".join(f"k{n}: 1\n" for n in range(9)), "its keys are k0, k1, k2, k3, k4, k5, k6, k7, ...; a"),
        ("disabled_plugins = []\nversion = 2\n", "FILE:1: the file must hold keys and values"),
    ],
)
def test_a_file_that_is_no_configuration_is_rejected_with_its_kind(
    tmp_path: Path, text: str, sentence: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert sentence in problem


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Could not read the configuration file .*: No such file"):
        load(config_file=str(tmp_path / "none.yaml"))


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(config_file=str(tmp_path))


def test_a_named_pipe_does_not_hang_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(config_file=str(tmp_path / "pipe"))


def test_a_mistake_is_reported_once_and_down_the_file_after_flags_and_variables(tmp_path: Path) -> None:
    text = """\
flags:
  migStrategy: x
  plugin: {deviceListStrategy: {a: b}}
sharing:
  timeSlicing:
    resources:
      - nvidia.com/gpu
agent:
  sharing: {resources: [{name: nvidia.com/gpu, replicas: 2, gpus: 3}]}
  poll: y
"""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config.load({"config-file": path, "call-deadline": "z"}, {"DEVICE_ID_STRATEGY": "w"})
    assert [problem.replace(path, "FILE") for problem in caught.value.problems] == [
        'DEVICE_ID_STRATEGY must be one of uuid, index, and is "w"',
        '--call-deadline must be a number with a unit, such as "10s" or "500ms", and is "z"',
        'FILE:2: flags.migStrategy must be one of none, single, mixed, and is "x"',
        "FILE:3: flags.plugin.deviceListStrategy must be a single value or a list",
        "FILE:7: sharing.timeSlicing.resources[0] must hold keys and values",
        "FILE:9: agent.sharing.resources[0].gpus must be a list",
        'FILE:10: agent.poll must be a number with a unit, such as "10s" or "500ms", and is "y"',
    ]


def test_the_number_of_reported_problems_is_bounded(tmp_path: Path) -> None:
    text = "agent:\n" + "".join(f"  wrong{number}: 1\n" for number in range(1000))
    found = problems(tmp_path, text)
    assert len(found) == yaml_tree.MAX_NOTES + 1
    assert found[-1] == "and more"


def test_the_number_of_shared_resources_is_bounded(tmp_path: Path) -> None:
    entries = "".join(f"    - {{name: r{number}, replicas: 2}}\n" for number in range(300))
    found = problems(tmp_path, f"sharing:\n  timeSlicing:\n    resources:\n{entries}")
    assert found == ("FILE:4: sharing.timeSlicing.resources holds more than 256 entries",)


def test_aliases_cannot_make_a_small_file_large_work(tmp_path: Path) -> None:
    lines = ["version: v1", "a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    assert len(warnings(tmp_path, "\n".join(lines) + "\n")) == 40


words = st.text(string.ascii_letters + string.digits + "-_. ", max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["version", "flags", "agent", "sharing", "resources", "poll", "migStrategy"]) | words


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(keys, values, max_size=4))
@example({"flags": {"plugin": {"passDeviceSpecs": {}}}})
def test_any_file_yields_settings_or_sentences(tmp_path: Path, document: dict[str, object]) -> None:
    path = write(tmp_path, yaml.safe_dump(document))
    assert all(problem.startswith(path) for problem in flag_problems({"config-file": path}))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_yield_settings_or_sentences(tmp_path: Path, raw: bytes) -> None:
    path = write(tmp_path, raw)
    assert all(path in problem for problem in flag_problems({"config-file": path}))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)), words, max_size=5))
def test_any_flags_yield_settings_or_sentences(flags: dict[str, str]) -> None:
    flags.pop("config-file", None)
    assert all(problem.startswith("--") for problem in flag_problems(flags))


# Reload


def test_what_a_reload_cannot_change_is_named() -> None:
    old, new = load(), load(http_listen=":1", mig_strategy="mixed", log_level="debug")
    changed = set(changes_that_need_a_restart(old, new))
    assert changed == {"http-listen"}


# XIDs


def flips(
    environment: dict[str, str] | None = None, text: str = "", tmp_path: Path | None = None
) -> set[int]:
    """The XIDs of these few that flip a device."""
    flags = {"config-file": write(tmp_path, text)} if tmp_path else {}
    policy = config.load(flags, environment or {}).policy
    return {xid for xid in (13, 31, 48, 79, 94) if xids.flips(xid, policy)}


@pytest.mark.parametrize(
    ("disabled", "enabled", "flipping"),
    [
        ("", "", {48, 79, 94}),
        ("all", "", set()),
        ("xids", "", set()),
        ("48, XIDS ,79", "", set()),
        ("48", "", {79, 94}),
        (" 48 ,94,,", "", {79}),
        ("bad,48,-1,0x4f,79.0", "", {79, 94}),
        ("", "13", {13, 48, 79, 94}),
        ("", "ALL", {13, 31, 48, 79, 94}),
        # NVIDIA's plugin checks nothing at all here, against its own promise.
        ("all", "48", {48}),
        ("all", "all", {13, 31, 48, 79, 94}),
        ("48,13", "48,13", {13, 48, 79, 94}),
        ("48", "all", {13, 31, 48, 79, 94}),
    ],
)
def test_the_variables_of_nvidias_plugin_work_as_they_do_there(
    disabled: str, enabled: str, flipping: set[int]
) -> None:
    assert flips({"DP_DISABLE_HEALTHCHECKS": disabled, "DP_ENABLE_HEALTHCHECKS": enabled}) == flipping


def test_invalid_words_in_them_are_skipped_with_a_warning() -> None:
    settings_ = config.load({}, {"DP_DISABLE_HEALTHCHECKS": "bad,48,-1", "DP_ENABLE_HEALTHCHECKS": "x" * 99})
    assert settings_.warnings == (
        'DP_DISABLE_HEALTHCHECKS: "bad" is no XID and was skipped',
        'DP_DISABLE_HEALTHCHECKS: "-1" is no XID and was skipped',
        f'DP_ENABLE_HEALTHCHECKS: "{"x" * 40}" is no XID and was skipped',
    )


def test_a_list_of_xids_is_bounded_and_so_is_the_warning() -> None:
    listed = xid_list_from(",".join([*(str(number) for number in range(9_000)), *("abcdefghijkl")]))
    assert (len(listed.xids), len(listed.skipped)) == (MAX_XIDS, MAX_SKIPPED_NAMED)


def test_the_file_can_list_them_too(tmp_path: Path) -> None:
    text = "agent: {disableHealthchecks: [48, xids], enableHealthchecks: [79, 94]}\n"
    assert flips({}, text, tmp_path) == {79, 94}


def test_the_file_overrides_both_for_single_xids(tmp_path: Path) -> None:
    text = "agent: {xids: {94: ignore, 31: flip, 13: ignore}}\n"
    assert flips({"DP_ENABLE_HEALTHCHECKS": "all"}, text, tmp_path) == {31, 48, 79}
    assert flips({"DP_DISABLE_HEALTHCHECKS": "all"}, text, tmp_path) == {31}
    assert flips({}, text, tmp_path) == {31, 48, 79}


def test_the_catalog_can_be_followed_instead(tmp_path: Path) -> None:
    assert flips({"GPU_AGENT_XID_POLICY": "catalog"}) == {48, 79}
    assert flips({}, "agent: {xidPolicy: catalog, xids: {94: flip}}\n", tmp_path) == {48, 79, 94}


def test_problems_of_single_xids_are_reported(tmp_path: Path) -> None:
    text = "agent:\n  xids:\n    79: off\n    x: flip\n    48: [flip]\n    -1: flip\n    1234567: flip\n"
    assert problems(tmp_path, text) == (
        "FILE:3: agent.xids.79 must be flip or ignore",
        "FILE:4: agent.xids.x must be the number of an XID",
        "FILE:5: agent.xids.48 must be a single value",
        "FILE:5: agent.xids.48 must be flip or ignore",
        "FILE:6: agent.xids.-1 must be the number of an XID",
        "FILE:7: agent.xids.1234567 must be the number of an XID",
    )
    many = "".join(f"    {number}: flip\n" for number in range(config_file.MAX_XIDS + 1))
    assert problems(tmp_path, f"agent:\n  xids:\n{many}")[0].endswith(
        "agent.xids holds more than 1024 entries"
    )


# Nested keys of the file


def test_keys_that_belong_together_stand_together(tmp_path: Path) -> None:
    text = """\
agent:
  flapping: {faults: 5, within: 1h}
  slowdown: {window: 5m, percent: 80}
  softFlips: [thermal, nvlink_down]
  softFlipEvery: 2h
  observe: yes
"""
    policy = load(config_file=write(tmp_path, text)).policy
    assert (policy.sticky_after, policy.sticky_window_ns) == (5, 3_600_000_000_000)
    assert (policy.slowdown_window_polls, policy.slowdown_share_percent) == (30, 80)
    assert policy.soft_flips == {Reason.THERMAL, Reason.NVLINK_DOWN}
    assert (policy.soft_flip_every_ns, policy.observe) == (7_200_000_000_000, True)


def test_the_slowdown_window_is_a_time_whatever_the_poll(tmp_path: Path) -> None:
    assert load(poll="1s").policy.slowdown_window_polls == 600
    assert load(poll="10m", slowdown_window="1s").policy.slowdown_window_polls == 1
    assert load(poll="10ms", slowdown_window="24h").policy.slowdown_window_polls == config.MAX_SLOWDOWN_POLLS


def test_a_misspelt_nested_key_is_reported_with_the_right_one(tmp_path: Path) -> None:
    assert problems(tmp_path, "agent: {flapping: {fault: 5}, flaping: {}, xid: {}}\n") == (
        "FILE:1: agent.flapping.fault is unknown (did you mean faults?)",
        "FILE:1: agent.flaping is unknown (did you mean flapping?)",
        "FILE:1: agent.xid is unknown (did you mean xids?)",
    )


def test_a_hard_reason_is_no_soft_one(tmp_path: Path) -> None:
    assert flag_problems({"soft-flips": "thermal,gpu_lost"}) == (
        '--soft-flips must be some of nvlink_down, thermal, and is "thermal,gpu_lost"',
    )


@pytest.mark.parametrize("value", ["1", "64", "16 MiB", "5GiB", "-1MiB", "16mib"])
def test_a_size_has_a_unit_and_bounds(value: str) -> None:
    assert flag_problems({"event-log-size": value})


def test_sizes_are_of_bytes() -> None:
    assert load().event_log_bytes == 16 * 2**20
    assert load(event_log_size="512KiB").event_log_bytes == 512 * 2**10
    assert load(event_log_size="0").event_log_bytes == 0


def test_sources_can_be_turned_off() -> None:
    settings_ = load(kernel_log="", uevents="false", pod_resources_socket="")
    assert (settings_.kernel_log, settings_.uevents, settings_.pod_resources_socket) == ("", False, "")


def test_starting_to_observe_needs_a_restart_and_stopping_does_not() -> None:
    acting, observing = load(), load(observe="true")
    assert list(changes_that_need_a_restart(acting, observing)) == ["observe"]
    assert list(changes_that_need_a_restart(observing, acting)) == []


# How options and settings belong together


DERIVED = {
    *("given", "warnings", "file_parts", "file_fingerprint"),
    *("cdi.dev_root", "cdi.disabled_hooks", "cdi.driver_root", "cdi.feature_flags"),
    *("policy.injection.device_root", "policy.jitter_seed", "policy.leaks.is_watched"),
    *("policy.sharing.fail_requests_greater_than_one", "policy.sharing.rename_by_default"),
    *("policy.sharing.shares", "policy.sharing.strategy"),
    *("policy.slowdown_window_polls", "policy.xid_overrides", "policy.xids_all", "policy.xids_off"),
}
"""Fields that no option fills alone."""


def fields_of(record: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    for name, value in msgspec.structs.asdict(record).items():
        if isinstance(value, msgspec.Struct):
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_each_field_of_the_settings_is_filled_by_one_option_or_derived() -> None:
    filled = [option.fills for option in (*OPTIONS.values(), *DISCOVERY_OPTIONS) if option.fills]
    assert sorted([*filled, *DERIVED]) == sorted(fields_of(load()))
