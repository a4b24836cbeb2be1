"""The configuration: flag > environment > file > default, each value with where it came from.

Guarantees: all problems are reported at once, each naming the value's origin and, for a misspelt
name, the likely right one. Nothing is read that the table of options does not name. What has to be
looked at in the file system (is this path a socket?) is judged at the start, not here.
"""

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NewType, TypedDict, cast

from agent.config.options import ENVIRONMENT_PREFIX, LOOPBACK_API_PORT, OPTIONS, Option
from agent.config.values import Address, XidList
from agent.errors import ConfigError
from agent.model.health import Reason
from agent.model.ids import ResourceName
from agent.model.policy import Injection, MigStrategy, Policy, XidOverride, XidPolicy
from agent.model.sharing import Sharing

if TYPE_CHECKING:
    from agent.config.file import FileContents

Origin = NewType("Origin", str)
"""Where a value came from: ``--poll``, ``GPU_AGENT_POLL``, ``/etc/x.yaml:3: agent.poll``, ``default``."""

IfRunning = Literal["standby", "fail"]
LogFormat = Literal["auto", "journal", "json", "text"]

DEFAULT: Final = Origin("default")

MAX_SLOWDOWN_POLLS: Final = 10_000
"""Readings of which the share of slowdowns is made."""

_OTHER_VARIABLES: Final = frozenset({"GPU_AGENT_NODE_DIR"})
"""Variables with our prefix that are no option of ``run``."""


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class Settings(NamedTuple):
    """Everything that can be set, valid and complete."""

    policy: Policy
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
    pod_logs_dir: str
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
    origins: Mapping[str, Origin] = _NOTHING
    """By option name."""
    warnings: tuple[str, ...] = ()

    @property
    def registers(self) -> bool:
        """Whether devices are registered with a kubelet, or only served."""
        return bool(self.kubelet_socket)

    @property
    def kubelet_socket_or_default(self) -> str:
        """The path beside which our sockets are made."""
        return self.kubelet_socket or OPTIONS["kubelet-socket"].default

    @property
    def lock_path(self) -> str:
        """The file whose lock makes one agent the agent of this node."""
        return f"{self.state_dir}/lock"

    @property
    def state_path(self) -> str:
        """Where what must outlive the process is kept."""
        return f"{self.state_dir}/state.json"

    @property
    def event_log_path(self) -> str:
        """Where the event log is kept; older files of it have a number after the name."""
        return f"{self.state_dir}/events.jsonl"

    @property
    def evidence_dir(self) -> str:
        """Where bundles of evidence are kept."""
        return f"{self.state_dir}/evidence"


def load(flags: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
    """Return the settings that flags (by option name), environment and file make together.

    Raises ConfigError with every problem found.
    """
    resolver = _Resolver(flags, environment)
    path = resolver.text_of(OPTIONS["config-file"])
    if path:
        from agent.config.file import read  # noqa: PLC0415 - only where there is a file

        resolver.use_file(read(path))
    values = {name: resolver.value_of(option) for name, option in OPTIONS.items()}
    resolver.warn_of_unknown_variables()
    if resolver.problems:
        raise ConfigError(tuple(resolver.problems))
    return _settings(values, resolver)


class _Resolver:
    """Finds the value of each option and keeps account of origins and problems."""

    def __init__(self, flags: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._flags = flags
        self._environment = environment
        self._file: FileContents | None = None
        self.origins: dict[str, Origin] = {}
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def use_file(self, contents: "FileContents") -> None:
        """Take the file's values, and what is wrong with it, into account."""
        self._file = contents
        self.problems += contents.problems
        self.warnings += contents.warnings

    def text_of(self, option: Option) -> str:
        """Return the text that counts and note where it came from."""
        in_environment = self._environment.get(option.environment)
        in_file = self._file.values.get(option.name) if self._file is not None else None
        if option.name in self._flags:
            text, origin = self._flags[option.name], f"--{option.name}"
        elif in_environment or (in_environment == "" and option.empty_means):
            text, origin = in_environment, option.environment
        elif in_file is not None:
            text, origin = in_file.text, in_file.where
        else:
            text, origin = option.default, DEFAULT
        self.origins[option.name] = Origin(origin)
        return text

    def value_of(self, option: Option) -> object:
        """Return the parsed value, or note the problem and return None."""
        text = self.text_of(option)
        origin = self.origins[option.name]
        if not text and not option.empty_means:
            self.problems.append(f"{origin} must not be empty")
            return None
        try:
            return option.parse(text)
        except ValueError as error:
            shown = text if len(text) <= 80 else text[:77] + "..."
            self.problems.append(f'{origin} {error}, and is "{shown}"')
            return None

    @property
    def replicas(self) -> Mapping[str, int]:
        """Return the shares of each device, by resource name; only the file can say."""
        return self._file.replicas if self._file is not None else _NOTHING

    @property
    def xids(self) -> Mapping[int, XidOverride]:
        """Return what the file says of single XIDs."""
        return self._file.xids if self._file is not None else _NOTHING

    def warn_of_skipped(self, option: str, listed: XidList) -> None:
        """Tell of what makes no sense in a list of XIDs, which is skipped as NVIDIA's plugin does."""
        for word in listed.skipped:
            self.warnings.append(f'{self.origins[option]}: "{word}" is no XID and was skipped')

    def warn_of_unknown_variables(self) -> None:
        """Tell of variables with our prefix that nothing reads: most likely a misspelling."""
        known = {option.environment for option in OPTIONS.values()} | _OTHER_VARIABLES
        unknown = [name for name in self._environment if name.startswith(ENVIRONMENT_PREFIX)]
        for name in sorted(set(unknown) - known):
            from agent.spelling import suggestion  # noqa: PLC0415 - only where something is wrong

            self.warnings.append(f"{name} is no setting{suggestion(name, tuple(known))}")


def _settings(values: Mapping[str, object], resolver: _Resolver) -> Settings:
    driver_root = cast("str", values["driver-root"])
    dev_root = cast("str", values["dev-root"]) or driver_root
    http_listen = cast("Address | None", values["http-listen"])
    for name in ("disable-healthchecks", "enable-healthchecks"):
        resolver.warn_of_skipped(name, cast("XidList", values[name]))
    return Settings(
        policy=_policy(values, dev_root, resolver),
        fail_on_init_error=cast("bool", values["fail-on-init-error"]),
        driver_root=driver_root,
        dev_root=dev_root,
        proc_root=cast("str", values["proc-root"]),
        sys_root=cast("str", values["sys-root"]),
        kubelet_socket=cast("str", values["kubelet-socket"]),
        pod_resources_socket=cast("str", values["pod-resources-socket"]),
        pod_logs_dir=cast("str", values["pod-logs-dir"]),
        nvml_library=cast("str", values["nvml-library"]) or None,
        http_listen=http_listen,
        api_listen=_api_listen(cast("Address | None", values["api-listen"]), http_listen),
        control_socket=cast("str", values["control-socket"]),
        state_dir=cast("str", values["state-dir"]),
        if_running=cast("IfRunning | None", values["if-running"] or None),
        kernel_log=cast("str", values["kernel-log"]),
        uevents=cast("bool", values["uevents"]),
        pods_poll_ns=cast("int", values["pods-poll"]),
        event_log_bytes=cast("int", values["event-log-size"]),
        poll_ns=cast("int", values["poll"]),
        init_deadline_ns=cast("int", values["init-deadline"]),
        init_retry_ns=cast("int", values["init-retry"]),
        first_handle_deadline_ns=cast("int", values["first-handle-deadline"]),
        call_deadline_ns=cast("int", values["call-deadline"]),
        log_format=cast("LogFormat", values["log-format"]),
        log_level=cast("str", values["log-level"]),
        config_file=cast("str", values["config-file"]) or None,
        origins=MappingProxyType(resolver.origins),
        warnings=tuple(resolver.warnings),
    )


def _policy(values: Mapping[str, object], dev_root: str, resolver: _Resolver) -> Policy:
    window_ns, poll_ns = cast("int", values["slowdown-window"]), cast("int", values["poll"])
    return Policy(
        mig_strategy=cast("MigStrategy", values["mig-strategy"]),
        sharing=Sharing.of({ResourceName(name): count for name, count in resolver.replicas.items()}),
        injection=Injection(
            pass_device_specs=cast("bool", values["pass-device-specs"]),
            device_root=dev_root,
        ),
        **_xid_rules(
            disabled=cast("XidList", values["disable-healthchecks"]),
            enabled=cast("XidList", values["enable-healthchecks"]),
            last_word=resolver.xids,
        ),
        xid_policy=cast("XidPolicy", values["xid-policy"]),
        observe=cast("bool", values["observe"]),
        soft_flips=frozenset(Reason(word) for word in cast("frozenset[str]", values["soft-flips"])),
        soft_flip_every_ns=cast("int", values["soft-flip-every"]),
        recovery_clean_probes=cast("int", values["recovery-clean-probes"]),
        recovery_quiet_ns=cast("int", values["recovery-quiet"]),
        sticky_after=cast("int", values["flapping-faults"]),
        sticky_window_ns=cast("int", values["flapping-within"]),
        slowdown_window_polls=min(max(window_ns // poll_ns, 1), MAX_SLOWDOWN_POLLS),
        slowdown_share_percent=cast("int", values["slowdown-percent"]),
        first_probe_wait_ns=cast("int", values["first-probe-wait"]),
        watch_timeout_ns=cast("int", values["watch-timeout"]),
    )


class _XidRules(TypedDict):
    xids_off: bool
    xids_all: bool
    xid_overrides: Mapping[int, XidOverride]


def _xid_rules(*, disabled: XidList, enabled: XidList, last_word: Mapping[int, XidOverride]) -> _XidRules:
    """Return what NVIDIA's two variables mean together; what enables wins, and the file has the last word.

    NVIDIA's plugin promises so too, but checks nothing at all once everything is disabled.
    """
    rules: dict[int, XidOverride] = {}
    if not enabled.is_all:
        rules |= dict.fromkeys(disabled.xids, "ignore")
    rules |= dict.fromkeys(enabled.xids, "flip")
    return {
        "xids_off": disabled.is_all and not enabled.is_all,
        "xids_all": enabled.is_all,
        "xid_overrides": MappingProxyType(rules | dict(last_word)),
    }


def _api_listen(given: Address | None, http_listen: Address | None) -> Address | None:
    """Keep what names processes and pods on this machine unless told otherwise."""
    if given is not None:
        return given
    if http_listen is None or http_listen.is_loopback:
        return http_listen
    return Address("127.0.0.1", LOOPBACK_API_PORT)


NEEDS_RESTART: Final = tuple(
    name for name in Settings._fields if name not in ("policy", "log_level", "origins", "warnings")
)


def changes_that_need_a_restart(old: Settings, new: Settings) -> Iterable[str]:
    """Yield the fields that differ and that a reload cannot put into effect."""
    yield from (name for name in NEEDS_RESTART if getattr(old, name) != getattr(new, name))
    if new.policy.observe and not old.policy.observe:
        # What is registered stays so; to act instead of observing needs no restart.
        yield "observe"


def default_node_dir(environment: Mapping[str, str] | None = None) -> str:
    """Return where the simulated node is unless told otherwise."""
    variables = os.environ if environment is None else environment
    if variables.get("GPU_AGENT_NODE_DIR"):
        return variables["GPU_AGENT_NODE_DIR"]
    if os.geteuid() == 0:
        return "/run/gpu-agent-demo"
    runtime = variables.get("XDG_RUNTIME_DIR") or f"/tmp/gpu-agent-{os.geteuid()}"  # noqa: S108 - none is set
    return f"{runtime}/gpu-agent-demo"
