"""The reference of the configuration: the table of options, and the keys of the file that are no options."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from agent.config.leak_options import LEAK_OPTIONS
from agent.config.nvidia_options import NVIDIA_OPTIONS
from agent.config.option import Option
from agent.config.our_options import OUR_OPTIONS, if_running_from
from agent.config.sharing_file import MAX_MPS_REPLICAS, MIN_REPLICAS, OURS
from agent.config.values import (
    DEVICE_LIST_STRATEGIES,
    Parser,
    address_from,
    any_path_from,
    bool_from,
    device_list_strategies_from,
    discovery_strategy_from,
    imex_channels_from,
    names,
    path_from,
    root_from,
    xid_list_from,
)


class Entry(NamedTuple):
    """One setting of the reference."""

    name: str
    """The flag without dashes, or the key of the file if there is no flag."""
    help: str
    accepts: str
    default: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    file_key: str
    needs_restart: bool
    is_nvidias: bool
    """Whether NVIDIA's plugin has it too."""

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        flags = (flag.lstrip("-") for flag in self.flags)
        return tuple(dict.fromkeys((self.name, *flags, *self.variables, self.file_key)))


_ACCEPTED: Final[dict[Callable[[str], object], str]] = {
    address_from: "an IP address and a port, such as 127.0.0.1:9470",
    any_path_from: "a path",
    bool_from: "true or false",
    device_list_strategies_from: f"one or more of {', '.join(DEVICE_LIST_STRATEGIES)}",
    discovery_strategy_from: "one of auto, nvml",
    if_running_from: "one of standby, fail",
    imex_channels_from: "[0], or [] for none",
    path_from: "an absolute path",
    root_from: "an absolute path",
    names: "names",
    str: "any text",
    xid_list_from: "numbers of XIDs, or all",
}


def entries() -> Iterator[Entry]:
    """Yield every setting."""
    for options, is_nvidias in ((NVIDIA_OPTIONS, True), (OUR_OPTIONS, False), (LEAK_OPTIONS, False)):
        for option in options:
            yield _entry(option, is_nvidias=is_nvidias)
    yield from _FILE_KEYS


def _entry(option: Option, *, is_nvidias: bool) -> Entry:
    parse = option.parse
    return Entry(
        name=option.name,
        help=option.help,
        accepts=parse.accepts if isinstance(parse, Parser) else _ACCEPTED[parse],
        default=option.default or option.empty_means,
        flags=tuple(f"--{name}" for name in (option.name, *option.aliases)),
        variables=option.variables,
        file_key=option.file_key,
        needs_restart=option.needs_restart,
        is_nvidias=is_nvidias,
    )


def _in_file(key: str, text: str, accepts: str, default: str) -> Entry:
    return Entry(
        name=key,
        help=text,
        accepts=accepts,
        default=default,
        flags=(),
        variables=(),
        file_key=key,
        needs_restart=False,
        is_nvidias=not key.startswith("agent."),
    )


_REPLICAS: Final = f"{MIN_REPLICAS} replicas or more, while the list fits the kubelet's limit (4 MiB)"

_FILE_KEYS: Final = (
    _in_file("version", "Version of the file's format", "v1", "v1"),
    _in_file("resources", "Names of resources; ignored, as NVIDIA's plugin does", "gpus and mig", "none"),
    _in_file(
        "sharing.timeSlicing.resources",
        "Resources whose devices are shared by time-slicing",
        f"a list of {{name, replicas}}, {_REPLICAS}",
        "none",
    ),
    _in_file(
        "sharing.timeSlicing.renameByDefault",
        "Advertise shared devices as <resource>.shared",
        "true or false",
        "false",
    ),
    _in_file(
        "sharing.timeSlicing.failRequestsGreaterThanOne",
        "Reject a container with more than one share",
        "true or false",
        "false",
    ),
    _in_file(
        "sharing.mps.resources",
        "Resources whose devices are shared by MPS; counts before time-slicing",
        f"a list of {{name, replicas}}, {MIN_REPLICAS} to {MAX_MPS_REPLICAS} replicas",
        "none",
    ),
    _in_file(
        "sharing.mps.renameByDefault",
        "Advertise shared devices as <resource>.shared",
        "true or false",
        "false",
    ),
    _in_file(
        "sharing.mps.failRequestsGreaterThanOne",
        "Reject a container with more than one share",
        "true or false",
        "true",
    ),
    _in_file(
        OURS,
        "Further numbers of replicas, on single GPU models or GPUs; count before those of sharing",
        "a list of {name, replicas, models: [names, * for anything], gpus: [indexes or UUIDs]}, "
        f"{_REPLICAS}",
        "none",
    ),
    _in_file(
        "agent.xids",
        "Rules for single XIDs, which override every other setting",
        "{number: flip or ignore}",
        "none",
    ),
)
