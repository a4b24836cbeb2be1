"""The settings as records; agent.config.load makes them."""

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, NewType

import msgspec

from agent.config.options import OPTIONS
from agent.config.values import Address
from agent.model.policy import Policy

Origin = NewType("Origin", str)
"""Origin of a value: ``--poll``, ``GPU_AGENT_POLL``, ``/etc/x.yaml:3: agent.poll``, ``default``."""

IfRunning = Literal["standby", "fail"]
LogFormat = Literal["auto", "journal", "json", "text"]
ProbeTier = Literal["auto", "driver", "syscalls", "procfs", "off"]
ProbeLoader = Literal["auto", "bcc", "core"]

DEFAULT: Final = Origin("default")

_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class ParsedOption(NamedTuple):
    """The value of one option with its text and origin."""

    text: str
    origin: Origin
    value: object
    """The parsed text."""


class Cdi(msgspec.Struct, frozen=True):
    """How the CDI specification is made; names and semantics are those of NVIDIA's plugin."""

    spec_dir: str = "/var/run/cdi"
    hook_path: str = "/usr/bin/nvidia-ctk"
    """Path on the host, as in the specification."""
    driver_root: str = "/"
    """Path on the host, as in the specification."""
    driver_root_ctr_path: str = "/driver-root"
    """Mount point of the driver root, if the agent runs in a container that has one."""
    dev_root: str = "/"
    disabled_hooks: frozenset[str] = frozenset()
    """Names of hooks, or ``all``."""
    feature_flags: frozenset[str] = frozenset()


class FeatureDiscovery(msgspec.Struct, frozen=True):
    """How labels are made; names and semantics are those of NVIDIA's GPU feature discovery."""

    oneshot: bool = False
    no_timestamp: bool = False
    sleep_interval_ns: int | None = 60_000_000_000
    """None: labels are made once."""
    output_file: str = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
    machine_type_file: str = "/sys/class/dmi/id/product_name"
    use_node_feature_api: bool = True


class Settings(msgspec.Struct, frozen=True):
    """All settings, valid and complete."""

    policy: Policy
    cdi: Cdi
    gfd: FeatureDiscovery
    fail_on_init_error: bool
    driver_root: str
    dev_root: str
    """The directory whose ``dev/`` holds the device nodes; ``/`` on a plain host."""
    proc_root: str
    """Where /proc is; ``/proc`` on a plain host."""
    sys_root: str
    kubelet_socket: str
    """Empty: serve but do not register."""
    pod_resources_socket: str
    kubelet_cgroup_root: str
    pod_logs_dir: str
    probe_tier: ProbeTier
    probe_loader: ProbeLoader
    probe_pins: str
    probe_doubles: str | None
    nvml_library: str | None
    http_listen: Address | None
    api_listen: Address | None
    control_socket: str
    state_dir: str
    if_running: IfRunning | None
    """None: fail on a terminal, else standby."""
    kernel_log: str
    """Empty: it is not read."""
    uevents: bool
    pods_poll_ns: int
    kubelet_count_poll_ns: int
    event_log_bytes: int
    """0: none is kept on disk."""
    poll_ns: int
    init_deadline_ns: int
    init_retry_ns: int
    first_handle_deadline_ns: int
    call_deadline_ns: int
    log_format: LogFormat
    log_level: str
    config_file: str | None
    given: Mapping[str, ParsedOption] = _NOTHING
    """By option name, defaults too."""
    file_parts: Mapping[str, ParsedOption] = _NOTHING
    """By key, the settings that only the file can have."""
    warnings: tuple[str, ...] = ()
    file_fingerprint: int | None = None
    """Identifies the file's content, within this process; None: there is no file."""

    @property
    def origins(self) -> Mapping[str, Origin]:
        """The origin of each value, by option name."""
        return {name: each.origin for name, each in self.given.items()}

    @property
    def shown(self) -> Mapping[str, ParsedOption]:
        """All effective values with their origins, by name."""
        return {**{name: self.given[name] for name in OPTIONS}, **self.file_parts}

    @property
    def registers(self) -> bool:
        """Whether devices are registered with a kubelet, not only served."""
        return bool(self.kubelet_socket)

    @property
    def kubelet_socket_or_default(self) -> str:
        """The path beside which the agent creates its sockets."""
        return self.kubelet_socket or OPTIONS["kubelet-socket"].default

    @property
    def lock_path(self) -> str:
        """The file whose lock makes one agent the agent of this node."""
        return f"{self.state_dir}/lock"

    @property
    def state_path(self) -> str:
        """The path of the state file."""
        return f"{self.state_dir}/state.json"

    @property
    def event_log_path(self) -> str:
        """The path of the event log; its older files have a number after the name."""
        return f"{self.state_dir}/events.jsonl"

    @property
    def evidence_dir(self) -> str:
        """The directory of evidence bundles."""
        return f"{self.state_dir}/evidence"


def changes_that_need_a_restart(old: Settings, new: Settings) -> Iterable[str]:
    """Yield the names of options that differ and that a reload cannot put into effect."""
    for name, option in OPTIONS.items():
        if option.needs_restart and old.given[name].value != new.given[name].value:
            yield name
    if new.policy.observe and not old.policy.observe:
        # A registered resource stays so; the change from observing to acting needs no restart.
        yield "observe"


def default_node_dir(environment: Mapping[str, str] | None = None) -> str:
    """Return the default directory of the simulated node."""
    variables = os.environ if environment is None else environment
    if variables.get("GPU_AGENT_NODE_DIR"):
        return variables["GPU_AGENT_NODE_DIR"]
    if os.geteuid() == 0:
        return "/run/gpu-agent-demo"
    runtime = variables.get("XDG_RUNTIME_DIR")
    if runtime:
        return f"{runtime}/gpu-agent-demo"
    return f"/tmp/gpu-agent-demo-{os.geteuid()}"  # noqa: S108 - its owner is checked before use
