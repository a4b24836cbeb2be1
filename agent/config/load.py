"""Makes the settings: flag > environment > file > default, each value with its origin.

Guarantees: all problems are reported at once, each naming the value's origin and, for a misspelt
name, the likely right one. Nothing is read that the table of options does not name. The start, not this
module, checks paths in the file system (is this path a socket?).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agent.config.discovery_options import DISCOVERY_OPTIONS
from agent.config.option import AND_MORE, ENVIRONMENT_PREFIX, Option, shown
from agent.config.options import OPTIONS
from agent.config.our_options import LOOPBACK_API_PORT
from agent.config.settings import DEFAULT, Origin, ParsedOption, Settings
from agent.config.values import Address, WordList, XidList
from agent.errors import ConfigError
from agent.model.policy import XidOverride
from agent.model.structs import replace

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


def _settings(values: Mapping[str, Any], resolver: _Resolver) -> Settings:
    for name, what in _SKIPPING.items():
        resolver.warn_of_skipped(name, values[name], what)
    return replace(
        msgspec.convert(_by_field(values, resolver), Settings),
        given=MappingProxyType(resolver.given),
        warnings=tuple(resolver.warnings),
        file_parts=MappingProxyType(resolver.file_parts),
        file_fingerprint=resolver.file_fingerprint,
    )


_NONE_IF_EMPTY: Final = ("probe_doubles", "nvml_library", "if_running", "config_file")
_OF_SHARING: Final = ("strategy", "shares", "rename_by_default", "fail_requests_greater_than_one")
"""Settings of sharing that only the file can have."""


def _by_field(values: Mapping[str, Any], resolver: _Resolver) -> dict[str, Any]:
    """Return the fields of Settings: the value of each option, and the derived ones."""
    fields: dict[str, Any] = {}
    for option in (*OPTIONS.values(), *DISCOVERY_OPTIONS):
        if option.fills:
            _fill(fields, option.fills, values[option.name])
    for field in _NONE_IF_EMPTY:
        fields[field] = fields[field] or None
    driver_root = values["driver-root"]
    for field in ("dev_root", "cdi.dev_root", "policy.injection.device_root"):
        _fill(fields, field, values["dev-root"] or driver_root)
    _fill(fields, "cdi.driver_root", driver_root)
    _fill(fields, "cdi.disabled_hooks", values["cdi-disable-hooks"].words)
    _fill(fields, "cdi.feature_flags", values["cdi-feature-flags"].words)
    fields["api_listen"] = _api_listen(values["api-listen"], values["http-listen"])
    polls = min(max(values["slowdown-window"] // values["poll"], 1), MAX_SLOWDOWN_POLLS)
    _fill(fields, "policy.slowdown_window_polls", polls)
    _fill(fields, "policy.leaks.is_watched", values["probe-tier"] != "off")
    fields["policy"] |= _xid_rules(
        disabled=values["disable-healthchecks"],
        enabled=values["enable-healthchecks"],
        last_word=resolver.xids,
    )
    if resolver.sharing is not None:
        for field in _OF_SHARING:
            _fill(fields, f"policy.sharing.{field}", getattr(resolver.sharing, field))
    return fields


def _fill(fields: dict[str, Any], path: str, value: object) -> None:
    *records, name = path.split(".")
    for record in records:
        fields = fields.setdefault(record, {})
    fields[name] = value


def _xid_rules(
    *, disabled: XidList, enabled: XidList, last_word: Mapping[int, XidOverride]
) -> dict[str, Any]:
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
        "xid_overrides": rules | dict(last_word),
    }


def _api_listen(given: Address | None, http_listen: Address | None) -> Address | None:
    """Return the address of the API that names processes and pods: loopback unless configured."""
    if given is not None:
        return given
    if http_listen is None or http_listen.is_loopback:
        return http_listen
    return Address("127.0.0.1", LOOPBACK_API_PORT)
