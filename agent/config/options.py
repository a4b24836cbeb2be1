"""The options of ``gpu-agent run``: one table that drives flags, environment, file keys and help.

Invariants: a value is text until its option's parser has seen it, wherever it came from.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from agent.config.values import (
    address_from,
    any_path_from,
    bool_from,
    choice,
    duration,
    integer,
    path_from,
    root_from,
    size,
    words,
    xid_list_from,
)
from agent.core.reasons import MEANINGS
from agent.core.samples import RULES
from agent.model.health import Evidence
from agent.model.policy import MILLISECOND_NS, SECOND_NS, Policy

ENVIRONMENT_PREFIX: Final = "GPU_AGENT_"

LOOPBACK_PORT: Final = 9470
LOOPBACK_API_PORT: Final = 9471

SOFT_REASONS: Final = tuple(reason.value for reason in RULES if MEANINGS[reason].evidence is Evidence.SOFT)
"""What readings only suggest, so that it flips a device where the operator says so."""


class Option(NamedTuple):
    """One setting and every name it goes by."""

    name: str
    """The flag without its dashes."""
    default: str
    parse: Callable[[str], object]
    metavar: str
    help: str
    environment: str
    file_key: str
    """Path in the configuration file; empty where it cannot be set there."""
    aliases: tuple[str, ...] = ()
    is_switch: bool = False
    """Whether the flag may stand without a value, which then means true."""
    is_list: bool = False
    """Whether the file may give a list; elsewhere commas separate."""
    empty_means: str = ""
    """What an empty value does; without it an empty environment variable counts as unset."""


def _camel_case(name: str) -> str:
    first, *rest = name.split("-")
    return first + "".join(word.capitalize() for word in rest)


def _ours(
    name: str,
    default: str,
    parse: Callable[[str], object],
    metavar: str,
    text: str,
    *,
    file_key: str | None = None,
    is_switch: bool = False,
    is_list: bool = False,
    empty_means: str = "",
) -> Option:
    """Describe an option that NVIDIA's plugin does not have; its names follow from the flag's."""
    return Option(
        name=name,
        default=default,
        parse=parse,
        metavar=metavar,
        help=text,
        environment=ENVIRONMENT_PREFIX + name.upper().replace("-", "_"),
        file_key=f"agent.{_camel_case(name)}" if file_key is None else file_key,
        is_switch=is_switch,
        is_list=is_list,
        empty_means=empty_means,
    )


_POLICY: Final = Policy()

NVIDIA_OPTIONS: Final = (
    Option(
        "mig-strategy",
        "none",
        choice("none", "single", "mixed"),
        "STRATEGY",
        "How MIG devices are offered: none, single or mixed",
        "MIG_STRATEGY",
        "flags.migStrategy",
    ),
    Option(
        "fail-on-init-error",
        "true",
        bool_from,
        "BOOL",
        "End with an error if NVML cannot be initialised at the start; false waits for the driver",
        "FAIL_ON_INIT_ERROR",
        "flags.failOnInitError",
        is_switch=True,
    ),
    Option(
        "driver-root",
        "/",
        root_from,
        "DIR",
        "Where the driver is installed",
        "NVIDIA_DRIVER_ROOT",
        "flags.nvidiaDriverRoot",
        aliases=("nvidia-driver-root",),
    ),
    Option(
        "dev-root",
        "",
        root_from,
        "DIR",
        "The directory whose dev/ holds the device nodes",
        "NVIDIA_DEV_ROOT",
        "flags.nvidiaDevRoot",
        aliases=("nvidia-dev-root",),
        empty_means="the driver root",
    ),
    Option(
        "pass-device-specs",
        "false",
        bool_from,
        "BOOL",
        "Answer Allocate with the device nodes too, for a kubelet with the static CPU policy",
        "PASS_DEVICE_SPECS",
        "flags.plugin.passDeviceSpecs",
        is_switch=True,
    ),
    Option(
        "disable-healthchecks",
        "",
        xid_list_from,
        "XIDS",
        "XIDs that flip no device, or all; what the GPU says of itself otherwise still does",
        "DP_DISABLE_HEALTHCHECKS",
        "agent.disableHealthchecks",
        is_list=True,
        empty_means="none",
    ),
    Option(
        "enable-healthchecks",
        "",
        xid_list_from,
        "XIDS",
        "XIDs that flip a device although they are ignored or disabled, or all",
        "DP_ENABLE_HEALTHCHECKS",
        "agent.enableHealthchecks",
        is_list=True,
        empty_means="none",
    ),
    Option(
        "kubelet-socket",
        "/var/lib/kubelet/device-plugins/kubelet.sock",
        str,  # judged at the start, where a wrong one has an exit code of its own
        "PATH",
        "The kubelet's registration socket; our own sockets are made beside it",
        "KUBELET_SOCKET",
        "",
        empty_means="serve but do not register",
    ),
    Option(
        "config-file",
        "",
        any_path_from,
        "PATH",
        "Configuration file, version v1 as of NVIDIA's plugin, with our keys under agent",
        "CONFIG_FILE",
        "",
        empty_means="none",
    ),
)

OUR_OPTIONS: Final = (
    _ours("proc-root", "/proc", root_from, "DIR", "Where /proc is"),
    _ours("sys-root", "/sys", root_from, "DIR", "Where /sys is"),
    _ours(
        "nvml-library",
        "",
        path_from,
        "PATH",
        "The NVML library to load",
        empty_means="libnvidia-ml.so.1 where the linker finds it, else under the driver root",
    ),
    _ours(
        "pod-resources-socket",
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        path_from,
        "PATH",
        "The kubelet's PodResources socket",
        empty_means="it is not known which pod holds which device",
    ),
    _ours(
        "pod-logs-dir",
        "/var/log/pods",
        path_from,
        "DIR",
        "Where the kubelet keeps the logs of pods; the names in it tell the UID of each pod",
    ),
    _ours(
        "pods-poll",
        "10s",
        duration("100ms", "30s"),
        "TIME",
        "Time between two lists of pods; what is older than 30s is unknown",
    ),
    _ours(
        "kernel-log",
        "/dev/kmsg",
        path_from,
        "PATH",
        "The kernel log, where XIDs are read that NVML does not tell",
        empty_means="it is not read",
    ),
    _ours(
        "uevents",
        "true",
        bool_from,
        "BOOL",
        "Hear from the kernel at once of GPUs that come and go; costs 10 MiB",
        is_switch=True,
    ),
    _ours(
        "http-listen",
        f"127.0.0.1:{LOOPBACK_PORT}",
        address_from,
        "ADDR",
        "Where health and preflight are served",
        empty_means="nowhere",
    ),
    _ours(
        "api-listen",
        "",
        address_from,
        "ADDR",
        "Where what names processes and pods is served",
        empty_means=f"with --http-listen if that is loopback, else 127.0.0.1:{LOOPBACK_API_PORT}",
    ),
    _ours(
        "control-socket",
        "/run/gpu-agent/control.sock",
        path_from,
        "PATH",
        "The socket for this machine's commands, open to root only",
    ),
    _ours(
        "state-dir",
        "/var/lib/gpu-agent",
        path_from,
        "DIR",
        "Where state file, lock, event log and evidence are",
    ),
    _ours(
        "event-log-size",
        "16MiB",
        size("64KiB", "4GiB"),
        "SIZE",
        "Room of the event log on disk, all of its files together; 0 keeps none",
    ),
    _ours(
        "observe",
        "false",
        bool_from,
        "BOOL",
        "Register nothing: watch, and tell what would have been done",
        is_switch=True,
    ),
    _ours(
        "if-running",
        "",
        lambda text: choice("standby", "fail")(text) if text else "",
        "WHAT",
        "If another agent runs on this node: standby until it ends, or fail",
        empty_means="fail on a terminal, else standby",
    ),
    _ours("poll", "10s", duration("10ms", "10m"), "TIME", "Time between two looks at a GPU, or at the bus"),
    _ours("init-deadline", "120s", duration("10ms", "10m"), "TIME", "Longest time for NVML to initialise"),
    _ours(
        "init-retry", "1s", duration("10ms", "10m"), "TIME", "Time between two attempts to initialise NVML"
    ),
    _ours(
        "first-handle-deadline",
        "60s",
        duration("10ms", "10m"),
        "TIME",
        "Longest time for the first NVML handle of a GPU",
    ),
    _ours(
        "call-deadline",
        "5s",
        duration("10ms", "10m"),
        "TIME",
        "Longest time for any other NVML call on a GPU",
    ),
    _ours(
        "first-probe-wait",
        f"{_POLICY.first_probe_wait_ns // MILLISECOND_NS}ms",
        duration("0s", "1m"),
        "TIME",
        "How long registration waits for the first probe of each GPU",
    ),
    _ours(
        "watch-timeout",
        f"{_POLICY.watch_timeout_ns // SECOND_NS}s",
        duration("100ms", "10m"),
        "TIME",
        "Register anew if the kubelet has opened no ListAndWatch for so long",
    ),
    _ours(
        "recovery-clean-probes",
        f"{_POLICY.recovery_clean_probes}",
        integer(1, 1_000),
        "N",
        "Probes that must pass in a row before a device is well again",
    ),
    _ours(
        "recovery-quiet",
        f"{_POLICY.recovery_quiet_ns // SECOND_NS}s",
        duration("0s", "24h"),
        "TIME",
        "How long a fault must have stayed away before a device is well again",
    ),
    _ours(
        "xid-policy",
        _POLICY.xid_policy,
        choice("compat", "catalog"),
        "POLICY",
        "Which XIDs flip a device: compat, as NVIDIA's plugin, or catalog, as NVIDIA's XID catalog",
    ),
    _ours(
        "flapping-faults",
        f"{_POLICY.sticky_after}",
        integer(2, 100),
        "N",
        "So many faults that went away by themselves keep a GPU out until a reboot or recover",
        file_key="agent.flapping.faults",
    ),
    _ours(
        "flapping-within",
        f"{_POLICY.sticky_window_ns // (60 * SECOND_NS)}m",
        duration("1s", "24h"),
        "TIME",
        "The time in which they count",
        file_key="agent.flapping.within",
    ),
    _ours(
        "soft-flips",
        "",
        words(*SOFT_REASONS),
        "REASONS",
        f"What is only inferred and flips a free GPU all the same: {', '.join(SOFT_REASONS)}",
        is_list=True,
        empty_means="none",
    ),
    _ours(
        "soft-flip-every",
        f"{_POLICY.soft_flip_every_ns // (3600 * SECOND_NS)}h",
        duration("1s", "240h"),
        "TIME",
        "At most one GPU of the node is flipped so in this time",
    ),
    _ours(
        "slowdown-window",
        "10m",
        duration("1s", "24h"),
        "TIME",
        "The time in which clocks held down by hardware are a thermal finding",
        file_key="agent.slowdown.window",
    ),
    _ours(
        "slowdown-percent",
        f"{_POLICY.slowdown_share_percent}",
        integer(1, 100),
        "N",
        "In this share of it",
        file_key="agent.slowdown.percent",
    ),
    _ours(
        "log-format",
        "auto",
        choice("auto", "journal", "json", "text"),
        "FORMAT",
        "auto, journal, json or text; auto is journal under systemd, text on a terminal, else json",
    ),
    _ours(
        "log-level",
        "info",
        choice("debug", "info", "warning", "error"),
        "LEVEL",
        "Least severe lines to write: debug, info, warning or error",
    ),
)

OPTIONS: Final = {option.name: option for option in NVIDIA_OPTIONS + OUR_OPTIONS}
