"""Makes the settings: flag > environment > file > default, each value with its origin.

Guarantees: all problems are reported at once, each naming the value's origin and, for a misspelt
name, the likely right one. Nothing is read that the table of options does not name. The start, not this
module, checks paths in the file system (is this path a socket?).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

from agent.config.discovery_options import DISCOVERY_OPTIONS
from agent.config.option import AND_MORE, ENVIRONMENT_PREFIX, Option, shown
from agent.config.options import OPTIONS
from agent.config.our_options import LOOPBACK_API_PORT
from agent.config.settings import (
    DEFAULT,
    Cdi,
    FeatureDiscovery,
    IfRunning,
    LogFormat,
    Origin,
    ParsedOption,
    ProbeLoader,
    ProbeTier,
    Settings,
)
from agent.config.values import Address, WordList, XidList
from agent.errors import ConfigError
from agent.model.health import Reason
from agent.model.policy import (
    DeviceIdStrategy,
    DeviceListStrategy,
    Injection,
    LeakEffect,
    LeakPolicy,
    MigStrategy,
    Policy,
    SharedAllocationPolicy,
    XidOverride,
    XidPolicy,
)
from agent.model.sharing import Sharing

if TYPE_CHECKING:
    from agent.config.file import FileContents
    from agent.config.sharing_file import FileSharing

MAX_SLOWDOWN_POLLS: Final = 10_000
"""Maximum number of readings in the window of slowdowns."""

_AFTER_ALL_LINES: Final = 2**31

_OTHER_VARIABLES: Final = frozenset({"GPU_AGENT_NODE_DIR"})
"""Variables with our prefix that are no option of ``run``."""

_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


def load(flags: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
    """Return the settings that flags (by option name), environment and file make together.

    Raises ConfigError with every problem found.
    """
    resolver = _Resolver(flags, environment)
    path, _ = resolver.text_of(OPTIONS["config-file"])
    if path:
        from agent.config.file import read  # noqa: PLC0415 - only where there is a file

        resolver.use_file(read(path, strict=resolver.value_of(OPTIONS["strict-config"]) is True))
    options = (*OPTIONS.values(), *DISCOVERY_OPTIONS)
    values = {option.name: resolver.value_of(option) for option in options}
    resolver.check_mps(values)
    resolver.warn_of_unknown_variables()
    if resolver.problems:
        raise ConfigError(tuple(resolver.problems_by_line()))
    return _settings(values, resolver)


def check_file(path: str, *, strict: bool) -> "FileContents":
    """Return the content of a file, with every problem that it has on any node.

    A missing value that a flag or a variable could set is a warning.
    """
    from agent.config.file import read  # noqa: PLC0415 - only where there is a file

    contents = read(path, strict=strict)
    resolver = _Resolver({}, {})
    resolver.use_file(contents)
    values = {option.name: resolver.value_of(option) for option in (*OPTIONS.values(), *DISCOVERY_OPTIONS)}
    if values["mps-root"] == "" and contents.sharing.strategy == "mps":
        contents.warnings.append(f"{contents.sharing.where} needs --mps-root, MPS_ROOT or flags.mpsRoot")
        values["mps-root"] = None
    resolver.check_mps(values)
    contents.problems = resolver.problems_by_line()
    return contents


class _Resolver:
    """Finds the value of each option and collects origins and problems."""

    def __init__(self, flags: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._flags = flags
        self._environment = environment
        self._file: FileContents | None = None
        self.given: dict[str, ParsedOption] = {}
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def use_file(self, contents: "FileContents") -> None:
        """Add the file's values, problems and warnings."""
        self._file = contents
        self.problems += contents.problems
        self.warnings += contents.warnings

    def problems_by_line(self) -> list[str]:
        """Return the problems of flags and variables, then those of the file by line."""
        prefix = f"{self._file.path}:" if self._file is not None else None

        def line_of(problem: str) -> int:
            if problem == AND_MORE:
                return _AFTER_ALL_LINES
            if prefix is None or not problem.startswith(prefix):
                return 0
            line = problem.removeprefix(prefix).partition(":")[0]
            return int(line) if line.isdecimal() else 0

        return sorted(self.problems, key=line_of)

    def text_of(self, option: Option) -> tuple[str, Origin]:
        """Return the effective text and its origin."""
        variable, in_environment = self._variable_of(option)
        in_file = self._file.values.get(option.name) if self._file is not None else None
        if option.name in self._flags:
            text, origin = self._flags[option.name], f"--{option.name}"
        elif in_environment is not None:
            text, origin = in_environment, variable
        elif in_file is not None:
            text, origin = in_file.text, in_file.where
        else:
            text, origin = option.default, DEFAULT
        return text, Origin(origin)

    def _variable_of(self, option: Option) -> tuple[str, str | None]:
        """Return the first variable that is set, and its text; an empty one may count as unset."""
        for name in option.variables:
            text = self._environment.get(name)
            if text or (text == "" and option.empty_means):
                return name, text
        return option.environment, None

    def value_of(self, option: Option) -> object:
        """Return the parsed value, or note the problem and return None."""
        text, origin = self.text_of(option)
        value: object = None
        if not text and not option.empty_means:
            self.problems.append(f"{origin} must not be empty")
        else:
            try:
                value = option.parse(text)
            except ValueError as error:
                self.problems.append(f'{origin} {error}, and is "{shown(text)}"')
        self.given[option.name] = ParsedOption(text, origin, value)
        return value

    @property
    def sharing(self) -> "FileSharing | None":
        """Return how devices are shared, if they are; only the file can configure it."""
        return self._file.sharing if self._file is not None and self._file.sharing.shares else None

    @property
    def file_parts(self) -> dict[str, ParsedOption]:
        """Return the settings that only the file can have, by key."""
        return self._file.parts() if self._file is not None else {}

    @property
    def file_fingerprint(self) -> int | None:
        """Return what identifies the file's content."""
        return self._file.fingerprint if self._file is not None else None

    @property
    def xids(self) -> Mapping[int, XidOverride]:
        """Return the file's rules for single XIDs."""
        return self._file.xids if self._file is not None else _NOTHING

    def warn_of_skipped(self, option: str, listed: XidList | WordList, what: str) -> None:
        """Warn of invalid words in a list, which are skipped as by NVIDIA's plugin."""
        for word in listed.skipped:
            self.warnings.append(f'{self.given[option].origin}: "{word}" is no {what} and was skipped')

    def check_mps(self, values: Mapping[str, object]) -> None:
        """Note settings that conflict with MPS, as NVIDIA's plugin does."""
        sharing = self.sharing
        if sharing is None or sharing.strategy != "mps":
            return
        if values["mig-strategy"] == "mixed":
            origin = self.given["mig-strategy"].origin
            self.problems.append(f"{sharing.where} conflicts with the MIG strategy mixed ({origin})")
        if values["mps-root"] == "":
            self.problems.append(f"{sharing.where} needs --mps-root, the directory of the MPS control daemon")

    def warn_of_unknown_variables(self) -> None:
        """Warn of variables with our prefix that no option has: most likely a misspelling."""
        known = {name for option in OPTIONS.values() for name in option.variables} | _OTHER_VARIABLES
        unknown = [name for name in self._environment if name.startswith(ENVIRONMENT_PREFIX)]
        for name in sorted(set(unknown) - known):
            from agent.spelling import suggestion  # noqa: PLC0415 - only where something is wrong

            self.warnings.append(f"{name} is no setting{suggestion(name, tuple(known))}")


_SKIPPING: Final = {
    "disable-healthchecks": "XID",
    "enable-healthchecks": "XID",
    "cdi-feature-flags": "feature of a CDI specification",
    "cdi-disable-hooks": "hook",
}
"""Options that skip unknown words, and what their words are."""


def _settings(values: Mapping[str, object], resolver: _Resolver) -> Settings:
    driver_root = cast("str", values["driver-root"])
    dev_root = cast("str", values["dev-root"]) or driver_root
    http_listen = cast("Address | None", values["http-listen"])
    for name, what in _SKIPPING.items():
        resolver.warn_of_skipped(name, cast("XidList | WordList", values[name]), what)
    return Settings(
        policy=_policy(values, dev_root, resolver),
        cdi=_cdi(values, driver_root, dev_root),
        gfd=_gfd(values),
        fail_on_init_error=cast("bool", values["fail-on-init-error"]),
        driver_root=driver_root,
        dev_root=dev_root,
        proc_root=cast("str", values["proc-root"]),
        sys_root=cast("str", values["sys-root"]),
        kubelet_socket=cast("str", values["kubelet-socket"]),
        pod_resources_socket=cast("str", values["pod-resources-socket"]),
        pod_logs_dir=cast("str", values["pod-logs-dir"]),
        kubelet_cgroup_root=cast("str", values["kubelet-cgroup-root"]),
        probe_tier=cast("ProbeTier", values["probe-tier"]),
        probe_loader=cast("ProbeLoader", values["probe-loader"]),
        probe_pins=cast("str", values["probe-pins"]),
        probe_doubles=cast("str", values["probe-doubles"]) or None,
        nvml_library=cast("str", values["nvml-library"]) or None,
        http_listen=http_listen,
        api_listen=_api_listen(cast("Address | None", values["api-listen"]), http_listen),
        control_socket=cast("str", values["control-socket"]),
        state_dir=cast("str", values["state-dir"]),
        if_running=cast("IfRunning | None", values["if-running"] or None),
        kernel_log=cast("str", values["kernel-log"]),
        uevents=cast("bool", values["uevents"]),
        pods_poll_ns=cast("int", values["pods-poll"]),
        kubelet_count_poll_ns=cast("int", values["kubelet-count-poll"]),
        event_log_bytes=cast("int", values["event-log-size"]),
        poll_ns=cast("int", values["poll"]),
        init_deadline_ns=cast("int", values["init-deadline"]),
        init_retry_ns=cast("int", values["init-retry"]),
        first_handle_deadline_ns=cast("int", values["first-handle-deadline"]),
        call_deadline_ns=cast("int", values["call-deadline"]),
        log_format=cast("LogFormat", values["log-format"]),
        log_level=cast("str", values["log-level"]),
        config_file=cast("str", values["config-file"]) or None,
        given=MappingProxyType(resolver.given),
        warnings=tuple(resolver.warnings),
        file_parts=MappingProxyType(resolver.file_parts),
        file_fingerprint=resolver.file_fingerprint,
    )


def _policy(values: Mapping[str, object], dev_root: str, resolver: _Resolver) -> Policy:
    window_ns, poll_ns = cast("int", values["slowdown-window"]), cast("int", values["poll"])
    return Policy(
        mig_strategy=cast("MigStrategy", values["mig-strategy"]),
        sharing=_sharing(resolver.sharing, distinct_cards=cast("bool", values["distinct-cards"])),
        injection=_injection(values, dev_root),
        shared_allocation=cast("SharedAllocationPolicy", values["shared-devices-allocation-policy"]),
        pre_start_check=cast("bool", values["pre-start-check"]),
        **_xid_rules(
            disabled=cast("XidList", values["disable-healthchecks"]),
            enabled=cast("XidList", values["enable-healthchecks"]),
            last_word=resolver.xids,
        ),
        xid_policy=cast("XidPolicy", values["xid-policy"]),
        observe=cast("bool", values["observe"]),
        soft_flips=frozenset(Reason(word) for word in cast("frozenset[str]", values["soft-flips"])),
        soft_flip_every_ns=cast("int", values["soft-flip-every"]),
        leaks=_leaks(values),
        recovery_clean_probes=cast("int", values["recovery-clean-probes"]),
        recovery_quiet_ns=cast("int", values["recovery-quiet"]),
        sticky_after=cast("int", values["flapping-faults"]),
        sticky_window_ns=cast("int", values["flapping-within"]),
        slowdown_window_polls=min(max(window_ns // poll_ns, 1), MAX_SLOWDOWN_POLLS),
        slowdown_share_percent=cast("int", values["slowdown-percent"]),
        first_probe_wait_ns=cast("int", values["first-probe-wait"]),
        watch_timeout_ns=cast("int", values["watch-timeout"]),
    )


def _leaks(values: Mapping[str, object]) -> LeakPolicy:
    def number(name: str) -> int:
        return cast("int", values[f"leak-{name}"])

    return LeakPolicy(
        is_watched=values["probe-tier"] != "off",
        effect=cast("LeakEffect", values["leak-policy"]),
        allowed=cast("frozenset[str]", values["leak-allow"]),
        servers=cast("frozenset[str]", values["leak-servers"]),
        namespaces=cast("frozenset[str]", values["leak-namespaces"]),
        orphaned_client_ns=number("orphaned-client"),
        pod_gone_ns=number("pod-gone"),
        stuck_exit_ns=number("stuck-exit"),
        foreign_process_ns=number("foreign-process"),
        memory_held_ns=number("memory-held"),
        memory_held_bytes=number("memory-size"),
        memory_held_percent=number("memory-percent"),
        idle_ns=number("idle"),
        contexts_many=number("many-contexts"),
        growth_window_ns=number("growth-window"),
        growth_warm_up_ns=number("growth-warm-up"),
        growth_min_live=number("growth-min-live"),
        growth_min_new=number("growth-min-new"),
        growth_freed_percent=number("growth-freed-percent"),
        growth_critical_live=number("growth-critical-live"),
        growth_fds=number("growth-fds"),
    )


def _sharing(of_file: "FileSharing | None", *, distinct_cards: bool) -> Sharing:
    if of_file is None:
        return Sharing(distinct_cards=distinct_cards)
    return Sharing(
        strategy=of_file.strategy,
        shares=of_file.shares,
        rename_by_default=of_file.rename_by_default,
        fail_requests_greater_than_one=of_file.fail_requests_greater_than_one,
        distinct_cards=distinct_cards,
    )


def _injection(values: Mapping[str, object], dev_root: str) -> Injection:
    return Injection(
        strategies=cast("tuple[DeviceListStrategy, ...]", values["device-list-strategy"]),
        ids=cast("DeviceIdStrategy", values["device-id-strategy"]),
        pass_device_specs=cast("bool", values["pass-device-specs"]),
        device_root=dev_root,
        cdi_annotation_prefix=cast("str", values["cdi-annotation-prefix"]),
        gdrcopy=cast("bool", values["gdrcopy-enabled"]),
        gds=cast("bool", values["gds-enabled"]),
        mofed=cast("bool", values["mofed-enabled"]),
        imex_channels=cast("tuple[int, ...]", values["imex-channel-ids"]),
        imex_required=cast("bool", values["imex-required"]),
        mps_root=cast("str", values["mps-root"]),
    )


def _cdi(values: Mapping[str, object], driver_root: str, dev_root: str) -> Cdi:
    return Cdi(
        spec_dir=cast("str", values["cdi-spec-dir"]),
        hook_path=cast("str", values["nvidia-cdi-hook-path"]),
        driver_root=driver_root,
        driver_root_ctr_path=cast("str", values["driver-root-ctr-path"]),
        dev_root=dev_root,
        disabled_hooks=cast("WordList", values["cdi-disable-hooks"]).words,
        feature_flags=cast("WordList", values["cdi-feature-flags"]).words,
    )


def _gfd(values: Mapping[str, object]) -> FeatureDiscovery:
    return FeatureDiscovery(
        oneshot=cast("bool", values["oneshot"]),
        no_timestamp=cast("bool", values["no-timestamp"]),
        sleep_interval_ns=cast("int | None", values["sleep-interval"]),
        output_file=cast("str", values["output-file"]),
        machine_type_file=cast("str", values["machine-type-file"]),
        use_node_feature_api=cast("bool", values["use-node-feature-api"]),
    )


class _XidRules(TypedDict):
    xids_off: bool
    xids_all: bool
    xid_overrides: Mapping[int, XidOverride]


def _xid_rules(*, disabled: XidList, enabled: XidList, last_word: Mapping[int, XidOverride]) -> _XidRules:
    """Combine NVIDIA's two variables; enabling wins over disabling, and the file over both.

    NVIDIA's plugin documents the same, but checks nothing at all once everything is disabled.
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
    """Return the address of the API that names processes and pods: loopback unless configured."""
    if given is not None:
        return given
    if http_listen is None or http_listen.is_loopback:
        return http_listen
    return Address("127.0.0.1", LOOPBACK_API_PORT)
