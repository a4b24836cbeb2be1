"""The options of NVIDIA's plugin: its names, its defaults, and the settings that result."""

from pathlib import Path

import pytest

from agent.config import flags
from agent.config.load import load
from agent.config.nvidia_options import NVIDIA_OPTIONS
from agent.config.options import OPTIONS
from agent.config.settings import Cdi, FeatureDiscovery, Settings
from agent.errors import ConfigError
from agent.model.policy import Injection

TABLE = """\
mig-strategy                                                 MIG_STRATEGY                                none                  migStrategy
fail-on-init-error                                           FAIL_ON_INIT_ERROR                          true                  failOnInitError
driver-root,nvidia-driver-root                               NVIDIA_DRIVER_ROOT                          /                     nvidiaDriverRoot
dev-root,nvidia-dev-root                                     NVIDIA_DEV_ROOT                             -                     nvidiaDevRoot
pass-device-specs                                            PASS_DEVICE_SPECS                           false                 plugin.passDeviceSpecs
device-list-strategy                                         DEVICE_LIST_STRATEGY                        envvar                plugin.deviceListStrategy
device-id-strategy                                           DEVICE_ID_STRATEGY                          uuid                  plugin.deviceIDStrategy
gdrcopy-enabled                                              GDRCOPY_ENABLED                             false                 gdrcopyEnabled
gds-enabled                                                  GDS_ENABLED                                 false                 gdsEnabled
mofed-enabled                                                MOFED_ENABLED                               false                 mofedEnabled
kubelet-socket                       KUBELET_SOCKET   /var/lib/kubelet/device-plugins/kubelet.sock       -
config-file                                                  CONFIG_FILE                                 -                     -
cdi-annotation-prefix                                        CDI_ANNOTATION_PREFIX                       cdi.k8s.io/           plugin.cdiAnnotationPrefix
nvidia-cdi-hook-path,nvidia-ctk-path                         NVIDIA_CDI_HOOK_PATH,NVIDIA_CTK_PATH        /usr/bin/nvidia-ctk   plugin.nvidiaCTKPath
driver-root-ctr-path,container-driver-root                   DRIVER_ROOT_CTR_PATH,CONTAINER_DRIVER_ROOT  /driver-root          plugin.containerDriverRoot
mps-root                                                     MPS_ROOT                                    -                     mpsRoot
shared-devices-allocation-policy                             SHARED_DEVICES_ALLOCATION_POLICY            distributed           plugin.sharedDevicesAllocationPolicy
device-discovery-strategy                                    DEVICE_DISCOVERY_STRATEGY                   auto                  deviceDiscoveryStrategy
imex-channel-ids                                             IMEX_CHANNEL_IDS                            -                     imex.channelIDs
imex-required                                                IMEX_REQUIRED                               false                 imex.required
cdi-feature-flags                                            CDI_FEATURE_FLAGS                           -                     -
cdi-disable-hooks                                            CDI_DISABLE_HOOKS                           -                     -
"""  # noqa: E501 - a table
"""Flag and aliases, variables, default, key. Source: NVIDIA/k8s-device-plugin v0.20.0."""

ROWS = [line.split() for line in TABLE.splitlines()]


def parsed(*arguments: str, **environment: str) -> Settings:
    values, problems = flags.parse(arguments, OPTIONS.values())
    assert problems == []
    return load(values, environment)


def in_file(tmp_path: Path, text: str, **environment: str) -> Settings:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load({"config-file": str(path)}, environment)


def problem_of(*arguments: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(*arguments, **environment)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_names_and_defaults_are_those_of_nvidias_plugin(row: list[str]) -> None:
    names, variables, default, key = ("" if cell == "-" else cell for cell in row)
    name, *aliases = names.split(",")
    option = OPTIONS[name]
    assert option.aliases == tuple(aliases)
    assert option.variables == tuple(variables.split(","))
    assert option.default == default
    stem = "" if key.startswith("imex.") else "flags."
    assert option.file_key == (f"{stem}{key}" if key else "")


def test_every_option_of_nvidias_table_is_nvidias() -> None:
    ours_in_their_table = {"disable-healthchecks", "enable-healthchecks"}  # variables only, there
    assert {option.name for option in NVIDIA_OPTIONS} - ours_in_their_table == {
        row[0].split(",")[0] for row in ROWS
    }


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.aliases])
def test_every_further_name_sets_the_same(name: str) -> None:
    option = OPTIONS[name]
    for alias in option.aliases:
        assert parsed(f"--{alias}=/x").given[option.name].value == "/x"
    for variable in option.variables:
        assert parsed(**{variable: "/x"}).given[option.name].value == "/x"


def test_the_first_of_two_variables_counts() -> None:
    settings = parsed(NVIDIA_CTK_PATH="/old", NVIDIA_CDI_HOOK_PATH="/new")
    assert settings.cdi.hook_path == "/new"
    assert settings.origins["nvidia-cdi-hook-path"] == "NVIDIA_CDI_HOOK_PATH"


def test_the_options_result_in_an_injection_and_a_cdi_record() -> None:
    settings = parsed(
        "--device-list-strategy=cdi-cri,envvar",
        "--device-id-strategy=index",
        "--pass-device-specs",
        "--gdrcopy-enabled",
        "--gds-enabled",
        "--mofed-enabled",
        "--cdi-annotation-prefix=x/",
        "--nvidia-ctk-path=/opt/ctk",
        "--driver-root=/run/nvidia/driver",
        "--dev-root=/",
        "--container-driver-root=/host/",
        "--mps-root=/run/nvidia/mps",
        "--imex-channel-ids=0",
        "--imex-required",
        "--cdi-feature-flags=disable-nvsandboxutils",
        "--cdi-disable-hooks=all",
        "--cdi-spec-dir=/etc/cdi",
        "--shared-devices-allocation-policy=packed",
        "--pre-start-check",
        "--distinct-cards",
    )
    assert settings.policy.injection == Injection(
        strategies=("envvar", "cdi-cri"),
        ids="index",
        pass_device_specs=True,
        device_root="/",
        cdi_annotation_prefix="x/",
        gdrcopy=True,
        gds=True,
        mofed=True,
        imex_channels=(0,),
        imex_required=True,
        mps_root="/run/nvidia/mps",
    )
    assert settings.cdi == Cdi(
        spec_dir="/etc/cdi",
        hook_path="/opt/ctk",
        driver_root="/run/nvidia/driver",
        driver_root_ctr_path="/host",
        dev_root="/",
        disabled_hooks=frozenset({"all"}),
        feature_flags=frozenset({"disable-nvsandboxutils"}),
    )
    assert settings.policy.shared_allocation == "packed"
    assert settings.policy.pre_start_check
    assert settings.policy.sharing.distinct_cards


def test_without_anything_the_records_are_the_products_defaults() -> None:
    settings = parsed()
    assert (settings.cdi, settings.gfd) == (Cdi(), FeatureDiscovery())


# Device-list strategies


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--device-list-strategy=envvar", "--device-list-strategy=volume-mounts"], {}),
        (["--device-list-strategy", "volume-mounts,envvar"], {}),
        ([], {"DEVICE_LIST_STRATEGY": " volume-mounts , envvar,"}),
        (["--device-list-strategy=envvar,volume-mounts,envvar"], {"DEVICE_LIST_STRATEGY": "cdi-cri"}),
    ],
)
def test_strategies_are_repeated_or_listed(arguments: list[str], environment: dict[str, str]) -> None:
    settings = parsed(*arguments, **environment)
    assert settings.policy.injection.strategies == ("envvar", "volume-mounts")


@pytest.mark.parametrize("text", ["envvar", "[envvar]", "\n    - envvar"])
def test_a_word_and_a_list_of_it_mean_the_same_in_the_file(tmp_path: Path, text: str) -> None:
    settings = in_file(tmp_path, f"flags:\n  plugin:\n    deviceListStrategy: {text}\n")
    assert settings.policy.injection.strategies == ("envvar",)


@pytest.mark.parametrize("text", ["envvar,cdi-cri", "[envvar, 'cdi-cri,volume-mounts']"])
def test_commas_do_not_separate_in_the_file_as_they_do_elsewhere(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml:3: .*must be a list to name several"):
        in_file(tmp_path, f"flags:\n  plugin:\n    deviceListStrategy: {text}\n")


def test_an_unknown_strategy_is_rejected_and_so_is_none() -> None:
    assert problem_of("--device-list-strategy=env").startswith(
        "--device-list-strategy must be one or more of envvar, volume-mounts, cdi-annotations, cdi-cri"
    )
    assert problem_of("--device-list-strategy=") == "--device-list-strategy must not be empty"
    assert 'and is ","' in problem_of("--device-list-strategy=,")


# Others


@pytest.mark.parametrize(
    ("text", "channels"), [("0", (0,)), ("[0]", (0,)), ("", ()), ("[]", ()), (" [ 0 ] ", (0,))]
)
def test_imex_channels_are_written_as_nvidias_users_do(
    tmp_path: Path, text: str, channels: tuple[int, ...]
) -> None:
    assert parsed(IMEX_CHANNEL_IDS=text).policy.injection.imex_channels == channels
    if text.startswith("["):
        settings = in_file(tmp_path, f"imex: {{channelIDs: {text}, required: true}}\n")
        assert settings.policy.injection.imex_channels == channels
        assert settings.policy.injection.imex_required


@pytest.mark.parametrize("text", ["1", "[0,1]", "0,0", "[0", "x"])
def test_other_imex_channels_are_rejected(text: str) -> None:
    assert problem_of(f"--imex-channel-ids={text}").startswith(
        "--imex-channel-ids must be empty or [0], because no other IMEX channel can be injected"
    )


def test_tegra_is_rejected_with_its_reason() -> None:
    parsed("--device-discovery-strategy=nvml")
    assert problem_of(DEVICE_DISCOVERY_STRATEGY="tegra") == (
        "DEVICE_DISCOVERY_STRATEGY must be auto or nvml, because this agent finds GPUs by NVML and Tegra"
        ' has none, and is "tegra"'
    )


def test_words_of_a_newer_toolkit_are_skipped_with_a_warning() -> None:
    settings = parsed(
        CDI_FEATURE_FLAGS="new-thing,disable-ipc-discoverer", CDI_DISABLE_HOOKS="update-ldcache,x"
    )
    assert settings.cdi.feature_flags == {"disable-ipc-discoverer"}
    assert settings.cdi.disabled_hooks == {"update-ldcache"}
    assert settings.warnings == (
        'CDI_FEATURE_FLAGS: "new-thing" is no feature of a CDI specification and was skipped',
        'CDI_DISABLE_HOOKS: "x" is no hook and was skipped',
    )


def test_keys_of_feature_discovery_are_checked_and_kept(tmp_path: Path) -> None:
    text = """\
flags:
  useNodeFeatureAPI: false
  gfd: {oneshot: true, noTimestamp: true, sleepInterval: infinite, outputFile: /x, machineTypeFile: /y}
"""
    settings = in_file(tmp_path, text)
    assert settings.gfd == FeatureDiscovery(
        oneshot=True,
        no_timestamp=True,
        sleep_interval_ns=None,
        output_file="/x",
        machine_type_file="/y",
        use_node_feature_api=False,
    )
    assert settings.warnings == ()
    assert in_file(tmp_path, "flags: {gfd: {sleepInterval: 30s}}").gfd.sleep_interval_ns == 30_000_000_000
    assert in_file(tmp_path, "flags: {gfd: {sleepInterval: 60000000000}}").gfd.sleep_interval_ns == 6 * 10**10
    with pytest.raises(ConfigError, match=r":1: flags\.gfd\.oneshot must be true or false"):
        in_file(tmp_path, "flags: {gfd: {oneshot: maybe}}")


def test_every_option_that_needs_no_restart_is_part_of_the_policy_or_of_the_log() -> None:
    other = {
        "mig-strategy": "mixed", "device-list-strategy": "cdi-cri", "device-id-strategy": "index",
        "cdi-annotation-prefix": "x/", "mps-root": "/x", "shared-devices-allocation-policy": "packed",
        "imex-channel-ids": "0", "disable-healthchecks": "48", "enable-healthchecks": "13",
        "xid-policy": "catalog", "soft-flips": "thermal", "log-level": "error",
        "leak-policy": "unhealthy-when-free",
    }  # fmt: skip
    for option in OPTIONS.values():
        if option.needs_restart or not option.file_key:
            continue
        unit = option.default.lstrip("0123456789")
        a_number = f"7{unit}" if unit != option.default else "7"
        text = other.get(option.name) or ("true" if option.is_switch else a_number)
        changed = load({option.name: text}, {})
        assert changed.policy != load({}, {}).policy or changed.log_level == "error", option.name
