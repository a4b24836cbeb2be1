"""Parsers of option texts: durations, addresses, sizes, paths, lists.

Invariants: a parser raises ValueError only, with the predicate of a sentence that begins with the option's
name. Work is bounded by the length of the text.
"""

import re
import socket
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from agent.model.policy import DeviceListStrategy

MAX_XIDS: Final = 1024
"""XIDs in one list; there are some 170."""
MAX_NAMES: Final = 256
MAX_NAME: Final = 256
"""Characters of a program's name, as of a file's."""
MAX_SKIPPED_NAMED: Final = 8
"""Skipped words that a warning names."""

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
_UNITS_BYTES: Final = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE: Final = re.compile(r"([0-9]{1,12})(KiB|MiB|GiB|)")


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
    """Parse ``host:port``; the host is an IP address, so that no name lookup can block."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError('must be an address and a port, such as "127.0.0.1:9470"')
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    host = {"": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host)  # noqa: S104 - requested by ":port"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return Address(socket.inet_ntop(family, socket.inet_pton(family, host)), int(port))
    except OSError:
        raise ValueError(f'must name an IP address, and "{host}" is none') from None


T = TypeVar("T")


class Parser(msgspec.Struct, Generic[T], frozen=True):
    """A parser with a description of its values."""

    accepts: str
    parse: Callable[[str], T]

    def __call__(self, text: str) -> T:
        """Parse a text, or raise ValueError."""
        return self.parse(text)


def choice(*choices: str) -> Parser[str]:
    """Return a parser of one of several words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return Parser(f"one of {', '.join(choices)}", parse)


def duration(least: str, most: str) -> Parser[int]:
    """Return a parser of durations between two."""

    def parse(text: str) -> int:
        value = duration_from(text)
        if not duration_from(least) <= value <= duration_from(most):
            raise ValueError(f"must be between {least} and {most}")
        return value

    return Parser(f"a time between {least} and {most}", parse)


def integer(least: int, most: int) -> Parser[int]:
    """Return a parser of whole numbers between two."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number between {least} and {most}")
        return int(text)

    return Parser(f"a whole number between {least} and {most}", parse)


def path_from(text: str) -> str:
    """Parse an absolute path."""
    if text and not text.startswith("/"):
        raise ValueError("must be an absolute path")
    return any_path_from(text)


def any_path_from(text: str) -> str:
    """Parse a path, which may be relative to the working directory."""
    if "\0" in text:
        raise ValueError("must not hold a NUL character")
    return text


def root_from(text: str) -> str:
    """Parse a directory used as a prefix of other paths: no slash at its end, except for ``/`` itself."""
    return (path_from(text).rstrip("/") or "/") if text else ""


def size(least: str, most: str) -> Parser[int]:
    """Return a parser of sizes such as ``16MiB`` between two, in bytes; also of 0."""

    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError('must be a size, such as "16MiB" or "512KiB"')
        value = int(match[1]) * _UNITS_BYTES[match[2]]
        if value and not size_of(least) <= value <= size_of(most):
            raise ValueError(f"must be 0, or between {least} and {most}")
        return value

    def size_of(text: str) -> int:
        match = _SIZE.fullmatch(text)
        return int(match[1]) * _UNITS_BYTES[match[2]] if match else 0

    return Parser(f"a size between {least} and {most}, or 0", parse)


def words(*known: str) -> Parser[frozenset[str]]:
    """Return a parser of a list of known words, separated by commas."""

    def parse(text: str) -> frozenset[str]:
        given = frozenset(word.strip() for word in text.split(",") if word.strip())
        if given - set(known):
            raise ValueError(f"must be some of {', '.join(known)}")
        return given

    return Parser(f"some of {', '.join(known)}", parse)


def names(text: str) -> frozenset[str]:
    """Parse a list of names of processes, separated by commas."""
    given = frozenset(word.strip() for word in text.split(",") if word.strip())
    if len(given) > MAX_NAMES or any(len(name) > MAX_NAME or not name.isprintable() for name in given):
        raise ValueError(f"must be at most {MAX_NAMES} printable names of {MAX_NAME} characters at most")
    return given


class XidList(NamedTuple):
    """The value of DP_DISABLE_HEALTHCHECKS or DP_ENABLE_HEALTHCHECKS."""

    is_all: bool = False
    """Every XID: the list holds ``all`` or ``xids``."""
    xids: frozenset[int] = frozenset()
    skipped: tuple[str, ...] = ()
    """Words that are neither numbers nor one of these."""


def xid_list_from(text: str) -> XidList:
    """Parse a list of XIDs as NVIDIA's plugin does: in any case, trimmed, invalid words skipped.

    Source: NVIDIA/k8s-device-plugin:internal/rm/health.go.
    """
    given = [word for word in (part.strip() for part in text.lower().split(",")) if word]
    if {"all", "xids"} & set(given):
        return XidList(is_all=True)
    numbers = {word for word in given if re.fullmatch("[0-9]{1,9}", word)}
    skipped = [word[:40] for word in given if word not in numbers]
    return XidList(
        xids=frozenset(sorted(map(int, numbers))[:MAX_XIDS]),
        skipped=tuple(dict.fromkeys(skipped))[:MAX_SKIPPED_NAMED],
    )


DEVICE_LIST_STRATEGIES: Final[tuple[DeviceListStrategy, ...]] = (
    "envvar",
    "volume-mounts",
    "cdi-annotations",
    "cdi-cri",
)

CDI_FEATURE_FLAGS: Final = (
    "enable-explicit-driver-libraries",
    "disable-nvsandboxutils",
    "disable-nvsandbox-utils",
    "enable-coherent-annotations",
    "disable-multiple-csv-devices",
    "no-additional-gids-for-device-nodes",
    "disable-ipc-discoverer",
)
"""Features that the agent never uses need no disabling: nvsandboxutils, whose flag had another spelling once,
and CSV, which is Tegra's. Source: NVIDIA/nvidia-container-toolkit:pkg/nvcdi/api.go, options.go."""

CDI_HOOKS: Final = (
    "chmod",
    "create-soname-symlinks",
    "create-symlinks",
    "disable-device-node-modification",
    "enable-cuda-compat",
    "update-application-profile",
    "update-ldcache",
)
"""The agent never uses ``chmod``, which NVIDIA's own specification omits too, and ``create-soname-symlinks``.
Source: NVIDIA/nvidia-container-toolkit:pkg/nvcdi, internal/discover/hooks.go."""


def device_list_strategies_from(text: str) -> tuple[DeviceListStrategy, ...]:
    """Parse a list of device-list strategies; the result has a fixed order."""
    given = {word.strip() for word in text.split(",")} - {""}
    if not given or given - set(DEVICE_LIST_STRATEGIES):
        raise ValueError(f"must be one or more of {', '.join(DEVICE_LIST_STRATEGIES)}")
    return tuple(strategy for strategy in DEVICE_LIST_STRATEGIES if strategy in given)


def discovery_strategy_from(text: str) -> str:
    """Parse how devices are discovered."""
    if text == "tegra":
        raise ValueError("must be auto or nvml, because this agent finds GPUs by NVML and Tegra has none")
    return choice("auto", "nvml")(text)


def imex_channels_from(text: str) -> tuple[int, ...]:
    """Parse IMEX channels: nothing, ``0``, ``[]`` or ``[0]``.

    Source: NVIDIA/k8s-device-plugin:api/config/v1/imex.go, AssertChannelIDsValid.
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    if inner not in {"", "0"}:
        raise ValueError("must be empty or [0], because no other IMEX channel can be injected")
    return (0,) if inner else ()


class WordList(NamedTuple):
    """A list whose unknown words NVIDIA's container toolkit ignores."""

    words: frozenset[str] = frozenset()
    skipped: tuple[str, ...] = ()
    """Unknown words."""


def known_words(*known: str) -> Parser[WordList]:
    """Return a parser of a list of words, separated by commas; unknown ones are collected in ``skipped``."""

    def parse(text: str) -> WordList:
        given = [word for word in (part.strip() for part in text.split(",")) if word]
        skipped = [word[:80] for word in given if word not in known]
        return WordList(
            words=frozenset(word for word in given if word in known),
            skipped=tuple(dict.fromkeys(skipped))[:MAX_SKIPPED_NAMED],
        )

    return Parser(f"some of {', '.join(known)}", parse)
