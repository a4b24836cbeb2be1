"""The options of ``gpu-agent run``: one table that drives flags, environment, file keys and help.

Invariants: a value is text until its option's parser has seen it, wherever it came from. A parser
raises ValueError with the end of a sentence that begins with the option's name.
"""

import re
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

from agent.model.policy import Policy

ENVIRONMENT_PREFIX: Final = "GPU_AGENT_"

LOOPBACK_PORT: Final = 9470
LOOPBACK_API_PORT: Final = 9471

_UNITS_NS: Final = {
    "h": 3_600_000_000_000,
    "m": 60_000_000_000,
    "s": 1_000_000_000,
    "ms": 1_000_000,
    "us": 1_000,
    "ns": 1,
}
_DURATION: Final = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:h|ms|us|ns|m|s)){1,6}")
_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|us|ns|m|s)")
_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})


class Address(NamedTuple):
    """Where to listen; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host.startswith("127.") or self.host == "::1"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
    empty_means: str = ""
    """What an empty value does; without it an empty environment variable counts as unset."""


def bool_from(text: str) -> bool:
    """Parse a boolean as Go's flag package does, which NVIDIA's plugin uses."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("must be true or false")


def duration_from(text: str) -> int:
    """Parse a duration such as ``10s``, ``500ms`` or ``1m30s`` into nanoseconds."""
    if not _DURATION.fullmatch(text):
        raise ValueError('must be a number with a unit, such as "10s" or "500ms"')
    return round(sum(float(number) * _UNITS_NS[unit] for number, unit in _DURATION_PART.findall(text)))


def address_from(text: str) -> Address | None:
    """Parse ``host:port``; the host is an IP address, so that no name service is ever waited for."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError('must be an address and a port, such as "127.0.0.1:9470"')
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    host = {"": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host)  # noqa: S104 - asked for by ":port"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return Address(socket.inet_ntop(family, socket.inet_pton(family, host)), int(port))
    except OSError:
        raise ValueError(f'must name an IP address, and "{host}" is none') from None


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _duration(least: str, most: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = duration_from(text)
        if not duration_from(least) <= value <= duration_from(most):
            raise ValueError(f"must be between {least} and {most}")
        return value

    return parse


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number between {least} and {most}")
        return int(text)

    return parse


def _path(text: str) -> str:
    if text and not text.startswith("/"):
        raise ValueError("must be an absolute path")
    return _any_path(text)


def _any_path(text: str) -> str:
    """Parse a path that a person may give relative to where they are."""
    if "\0" in text:
        raise ValueError("must not hold a NUL character")
    return text


def _root(text: str) -> str:
    """Parse a directory that is put before other paths: no slash at its end, except for ``/`` itself."""
    return (_path(text).rstrip("/") or "/") if text else ""


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
    is_in_file: bool = True,
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
        file_key=f"agent.{_camel_case(name)}" if is_in_file else "",
        empty_means=empty_means,
    )


_POLICY: Final = Policy()

NVIDIA_OPTIONS: Final = (
    Option(
        "mig-strategy",
        "none",
        _choice("none", "single", "mixed"),
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
        _root,
        "DIR",
        "Where the driver is installed",
        "NVIDIA_DRIVER_ROOT",
        "flags.nvidiaDriverRoot",
        aliases=("nvidia-driver-root",),
    ),
    Option(
        "dev-root",
        "",
        _root,
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
        _any_path,
        "PATH",
        "Configuration file, version v1 as of NVIDIA's plugin, with our keys under agent",
        "CONFIG_FILE",
        "",
        empty_means="none",
    ),
)

OUR_OPTIONS: Final = (
    _ours("proc-root", "/proc", _root, "DIR", "Where /proc is"),
    _ours("sys-root", "/sys", _root, "DIR", "Where /sys is"),
    _ours(
        "nvml-library",
        "",
        _path,
        "PATH",
        "The NVML library to load",
        empty_means="libnvidia-ml.so.1 where the linker finds it, else under the driver root",
    ),
    _ours(
        "pod-resources-socket",
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        _path,
        "PATH",
        "The kubelet's PodResources socket",
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
        _path,
        "PATH",
        "The socket for this machine's commands, open to root only",
    ),
    _ours("state-dir", "/var/lib/gpu-agent", _path, "DIR", "Where the state file and the lock are"),
    _ours(
        "if-running",
        "",
        lambda text: _choice("standby", "fail")(text) if text else "",
        "WHAT",
        "If another agent runs on this node: standby until it ends, or fail",
        empty_means="fail on a terminal, else standby",
    ),
    _ours("poll", "10s", _duration("10ms", "10m"), "TIME", "Time between two probes of a GPU"),
    _ours("init-deadline", "120s", _duration("10ms", "10m"), "TIME", "Longest time for NVML to initialise"),
    _ours(
        "init-retry", "1s", _duration("10ms", "10m"), "TIME", "Time between two attempts to initialise NVML"
    ),
    _ours(
        "first-handle-deadline",
        "60s",
        _duration("10ms", "10m"),
        "TIME",
        "Longest time for the first NVML handle of a GPU",
    ),
    _ours(
        "call-deadline",
        "5s",
        _duration("10ms", "10m"),
        "TIME",
        "Longest time for any other NVML call on a GPU",
    ),
    _ours(
        "first-probe-wait",
        f"{_POLICY.first_probe_wait_ns // _UNITS_NS['ms']}ms",
        _duration("0s", "1m"),
        "TIME",
        "How long registration waits for the first probe of each GPU",
    ),
    _ours(
        "watch-timeout",
        f"{_POLICY.watch_timeout_ns // _UNITS_NS['s']}s",
        _duration("100ms", "10m"),
        "TIME",
        "Register anew if the kubelet has opened no ListAndWatch for so long",
    ),
    _ours(
        "recovery-clean-probes",
        f"{_POLICY.recovery_clean_probes}",
        _integer(1, 1_000),
        "N",
        "Probes that must pass in a row before a device is well again",
    ),
    _ours(
        "recovery-quiet",
        f"{_POLICY.recovery_quiet_ns // _UNITS_NS['s']}s",
        _duration("0s", "24h"),
        "TIME",
        "How long a fault must have stayed away before a device is well again",
    ),
    _ours(
        "log-format",
        "auto",
        _choice("auto", "journal", "json", "text"),
        "FORMAT",
        "auto, journal, json or text; auto is journal under systemd, text on a terminal, else json",
    ),
    _ours(
        "log-level",
        "info",
        _choice("debug", "info", "warning", "error"),
        "LEVEL",
        "Least severe lines to write: debug, info, warning or error",
    ),
)

OPTIONS: Final = {option.name: option for option in NVIDIA_OPTIONS + OUR_OPTIONS}
