"""The programs of NVIDIA's image under their own names, so that a manifest needs no change but the image.

``nvidia-device-plugin`` is ``gpu-agent run``. The others accept the arguments of NVIDIA's chart and fail with
one sentence that this version does not have their function.
"""

import signal
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from agent import __version__
from agent.cli import main as gpu_agent
from agent.errors import EXIT_USAGE

if TYPE_CHECKING:
    from agent.config.option import Option

DEVICE_PLUGIN: Final = "nvidia-device-plugin"
FEATURE_DISCOVERY: Final = "gpu-feature-discovery"
CONFIG_MANAGER: Final = "config-manager"
MPS_CONTROL_DAEMON: Final = "mps-control-daemon"

_WIDTH: Final = 78

_HELP_WORDS: Final = ("-h", "--help", "-help", "h", "help")
_VERSION_WORDS: Final = ("-v", "--version", "-version")

_OF_DISCOVERY_AND_PLUGIN: Final = (
    "mig-strategy",
    "fail-on-init-error",
    "config-file",
    "device-discovery-strategy",
    "driver-root-ctr-path",
)
_OF_KUBERNETES: Final = (
    "kubeconfig",
    "kube-api-qps",
    "kube-api-burst",
    "namespace",
    "node-name",
    "pod-name",
)
"""Source: NVIDIA/k8s-device-plugin:internal/flags."""

_OF_CONFIG_MANAGER: Final = (
    "kubeconfig",
    "node-name",
    "node-label",
    "config-file-srcdir",
    "config-file-dst",
    "default-config",
    "fallback-strategies",
    "signal",
    "process-to-signal",
)
_SWITCHES_OF_CONFIG_MANAGER: Final = ("oneshot", "send-signal")
"""Source: NVIDIA/k8s-device-plugin:cmd/config-manager/main.go."""

_OF_MPS_CONTROL_DAEMON: Final = ("config-file", "mig-strategy")
_MOUNT_SHARED_MEMORY: Final = "mount-shm"
"""Source: NVIDIA/k8s-device-plugin:cmd/mps-control-daemon/main.go, mount/mount-shm.go."""


def device_plugin() -> int:
    """Run as ``nvidia-device-plugin``: the agent, as NVIDIA's plugin is started and found."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _VERSION_WORDS:
        return _print_version(DEVICE_PLUGIN)
    if arguments and arguments[0] in _HELP_WORDS:
        return gpu_agent(["run", "--help"])
    from agent.runtime.process import appear_as  # noqa: PLC0415 - only where it is needed

    # From here on config-manager finds this process and sends SIGHUP, which would kill it until the agent
    # handles signals. No change is missed: the agent reads the file after this, and compares it later.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if not appear_as(DEVICE_PLUGIN, arguments):
        _print_error(
            DEVICE_PLUGIN,
            "this process cannot change its name, so NVIDIA's config-manager will not find it; "
            "the agent watches the configuration file nevertheless",
        )
    return gpu_agent(["run", *arguments])


def feature_discovery() -> int:
    """Run as ``gpu-feature-discovery``: check its arguments, and fail because no labels are made."""
    from agent.config.discovery_options import DISCOVERY_OPTIONS  # noqa: PLC0415 - not for the plugin
    from agent.config.options import OPTIONS  # noqa: PLC0415 - not for the plugin

    options = (
        *DISCOVERY_OPTIONS,
        *(OPTIONS[name] for name in _OF_DISCOVERY_AND_PLUGIN),
        *map(_named, _OF_KUBERNETES),
    )
    return _explain_absence(
        FEATURE_DISCOVERY,
        options,
        "GPU labels are not made by this version; keep NVIDIA's image for this container",
    )


def config_manager() -> int:
    """Run as ``config-manager``: check its arguments, and fail because no configuration is chosen."""
    options = (
        *map(_named, _OF_CONFIG_MANAGER),
        *(_named(name)._replace(is_switch=True) for name in _SWITCHES_OF_CONFIG_MANAGER),
    )
    return _explain_absence(
        CONFIG_MANAGER,
        options,
        "this version does not choose a configuration by the node's label; keep NVIDIA's image for this "
        "container, whose choice the agent applies",
    )


def mps_control_daemon() -> int:
    """Run as ``mps-control-daemon``: check its arguments, and fail because no daemon is run."""
    from agent.config.options import OPTIONS  # noqa: PLC0415 - not for the plugin

    return _explain_absence(
        MPS_CONTROL_DAEMON,
        (OPTIONS[name] for name in _OF_MPS_CONTROL_DAEMON),
        "the MPS control daemon is not part of this image, because its exit kills all processes that share "
        "GPUs through it; keep NVIDIA's image for this DaemonSet, whose daemon the agent waits for",
        commands=(_MOUNT_SHARED_MEMORY,),
    )


def _explain_absence(
    program: str, options: "Iterable[Option]", why: str, *, commands: tuple[str, ...] = ()
) -> int:
    """Check the arguments as the program would, print why it does nothing and return the exit code."""
    from agent.config.flags import parse  # noqa: PLC0415 - not for the plugin

    arguments = [word for word in sys.argv[1:] if word not in commands]
    if arguments and arguments[0] in _VERSION_WORDS:
        return _print_version(program)
    listed = list(options)
    if arguments and arguments[0] in _HELP_WORDS:
        names = " ".join((*commands, *(f"--{option.name}" for option in listed)))
        print("\n".join(textwrap.wrap(f"{program} accepts {names}; {why}", _WIDTH)))  # noqa: T201 - its result
        return 0
    _, problems = parse(arguments, listed)
    for sentence in (*problems, why):
        _print_error(program, sentence)
    return EXIT_USAGE


def _named(name: str) -> "Option":
    """Return an option with a name only."""
    from agent.config.option import Option  # noqa: PLC0415 - not for the plugin

    return Option(name, "", str, "TEXT", "", name.upper().replace("-", "_"), "", empty_means="unset")


def _print_version(program: str) -> int:
    print(f"{program} of gpu-agent {__version__}")  # noqa: T201 - its result
    return 0


def _print_error(program: str, sentence: str) -> None:
    print(f"{program}: {sentence}", file=sys.stderr)  # noqa: T201 - a sentence for people
