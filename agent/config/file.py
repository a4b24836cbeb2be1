"""The configuration file: NVIDIA's version v1 YAML plus one top-level key ``agent`` for ours.

Guarantees: every problem is found, not only the first, and each names the file, the line and the
path of the key. A key that NVIDIA's plugin knows and this agent does not use is a warning, as is an
unknown key outside ``agent``; an unknown key under ``agent`` or a key in a wrong place is a problem.
The work is bounded: by the size of the file, and because only known keys are descended into.

Source of the format: NVIDIA/k8s-device-plugin:api/config/v1/config.go, flags.go, sharing.go.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, cast

from agent.config.option import Option
from agent.config.options import OPTIONS
from agent.model.policy import XidOverride
from agent.spelling import suggestion

MAX_BYTES: Final = 128 * 1024
"""A parser in Python reads this in a few seconds; a real file has two kilobytes."""

MAX_REPLICAS: Final = 1024
MAX_SHARED_RESOURCES: Final = 256
MAX_LISTED: Final = 1024
"""Items of a list that are read."""
MAX_XIDS: Final = 1024
MAX_NOTES: Final = 50
"""Problems, and warnings, that are told; a file with more is no configuration at all."""

RESOURCE_PREFIX: Final = "nvidia.com/"

_BOOL_TAG: Final = "tag:yaml.org,2002:bool"
_NULL_TAG: Final = "tag:yaml.org,2002:null"
_YAML_TRUE: Final = frozenset({"true", "yes", "on"})

_FOREIGN: Final = {
    "": {"resources"},
    "flags": {"gfd", "useNodeFeatureAPI"},
    "sharing": {"mps"},
    "sharing.timeSlicing": {"failRequestsGreaterThanOne", "renameByDefault"},
    "sharing.timeSlicing.resources": {"devices", "rename"},
}
"""Keys of NVIDIA's file that are known and not used, by the mapping they stand in."""


class FileValue(NamedTuple):
    """The text of an option in the file, and where it stands."""

    text: str
    where: str


@dataclass(slots=True)
class FileContents:
    """What a file says."""

    path: str
    values: dict[str, FileValue] = field(default_factory=dict)
    """By option name."""
    replicas: dict[str, int] = field(default_factory=dict)
    xids: dict[int, XidOverride] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read(path: str) -> FileContents:
    """Read a configuration file; what is wrong with it is in the answer's problems."""
    contents = FileContents(path)
    try:
        text = _text_of(path)
        root = _compose(path, text)
    except _UnreadableError as error:
        contents.problems.append(str(error))
        return contents
    if root is not None:
        _Reader(contents).read_root(root)
    return contents


class _Node(Protocol):
    """What is used of a node of PyYAML's tree; the library itself is imported only where needed."""

    id: str
    """``scalar``, ``sequence`` or ``mapping``."""
    tag: str
    value: Any
    start_mark: Any


class _UnreadableError(Exception):
    """The file as a whole cannot be read; says why."""


def _text_of(path: str) -> str:
    try:
        raw = _bytes_of(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _UnreadableError(f"Could not read the configuration file {path}: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise _UnreadableError(f"The configuration file {path} is over {MAX_BYTES // 1024} KiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _UnreadableError(f"{path}:{line}: not UTF-8 text") from None


def _bytes_of(path: str) -> bytes:
    # Not blocking: a named pipe would otherwise hang the start.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _UnreadableError(f"The configuration file {path} is not a regular file")
        raw = b""
        while len(raw) <= MAX_BYTES and (chunk := os.read(descriptor, MAX_BYTES + 1 - len(raw))):
            raw += chunk
        return raw
    finally:
        os.close(descriptor)


def _compose(path: str, text: str) -> _Node | None:
    import yaml  # noqa: PLC0415 - 16 ms that a node without a file need not spend

    try:
        # The parser in Python: libyaml's binding overflows the stack on deep nesting.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise _UnreadableError(f"{path}:{line}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _UnreadableError(f"{path}:{line}: holds a character that YAML forbids") from None
    except (RecursionError, ValueError):
        raise _UnreadableError(f"{path}: nested too deeply") from None
    return cast("_Node | None", node)


class _Reader:
    """Walks the tree of one file along the keys that are known."""

    def __init__(self, contents: FileContents) -> None:
        self._contents = contents
        self._options = {option.file_key: option for option in OPTIONS.values() if option.file_key}

    def read_root(self, root: _Node) -> None:
        for key, node in self._pairs("", root):
            match key:
                case "version":
                    self._read_version(node)
                case "sharing":
                    self._read_sharing(node)
                case "flags" | "agent" | "imex":
                    self._read_options(key, node)
                case _:
                    self._note_unknown("", key, node, ("version", "flags", "sharing", "imex", "agent"))

    def _read_version(self, node: _Node) -> None:
        version = self._scalar("version", node)
        if version not in (None, "", "v1"):
            self._problem(node, f'version must be v1, not "{version}"')

    def _read_options(self, path: str, node: _Node) -> None:
        for key, value in self._pairs(path, node):
            option = self._options.get(f"{path}.{key}")
            if option is not None:
                self._read_option(option, value)
            elif f"{path}.{key}" == "agent.xids":
                self._read_xids(value)
            elif any(known.startswith(f"{path}.{key}.") for known in self._options):
                self._read_options(f"{path}.{key}", value)
            else:
                self._note_unknown(path, key, value, self._known_keys(path))

    def _read_option(self, option: Option, node: _Node) -> None:
        if option.is_list and node.id == "sequence":
            items = [self._scalar(option.file_key, item) for item in node.value[:MAX_LISTED]]
        else:
            items = [self._scalar(option.file_key, node)]
        words = [item for item in items if item is not None]
        if not option.splits_in_file and any("," in word for word in words):
            self._problem(node, f"{option.file_key} must be a list to name several, such as [a, b]")
        elif words or node.id == "sequence":
            text = ",".join(words)
            where = f"{self._where(node)}: {option.file_key}"
            self._contents.values[option.name] = FileValue(text, where)

    def _read_xids(self, node: _Node) -> None:
        for key, value in self._pairs("agent.xids", node):
            word = self._scalar(f"agent.xids.{key}", value)
            if not (key.isascii() and key.isdigit() and len(key) <= 6):
                self._problem(value, f"{_join('agent.xids', key)} must be the number of an XID")
            elif word not in ("flip", "ignore"):
                self._problem(value, f"agent.xids.{key} must be flip or ignore")
            elif len(self._contents.xids) >= MAX_XIDS:
                self._problem(value, f"agent.xids holds more than {MAX_XIDS} entries")
            else:
                self._contents.xids[int(key)] = "flip" if word == "flip" else "ignore"

    def _read_sharing(self, node: _Node) -> None:
        for key, value in self._pairs("sharing", node):
            if key != "timeSlicing":
                self._note_unknown("sharing", key, value, ("timeSlicing",))
                continue
            for inner_key, inner in self._pairs("sharing.timeSlicing", value):
                if inner_key == "resources":
                    self._read_shared_resources(inner)
                else:
                    self._note_unknown("sharing.timeSlicing", inner_key, inner, ("resources",))

    def _read_shared_resources(self, node: _Node) -> None:
        path = "sharing.timeSlicing.resources"
        if node.tag == _NULL_TAG:
            return
        if node.id != "sequence":
            self._problem(node, f"{path} must be a list")
            return
        if len(node.value) > MAX_SHARED_RESOURCES:
            self._problem(node, f"{path} holds more than {MAX_SHARED_RESOURCES} entries")
        for item in node.value[:MAX_SHARED_RESOURCES]:
            self._read_shared_resource(path, item)

    def _read_shared_resource(self, path: str, node: _Node) -> None:
        found: dict[str, str | None] = {}
        for key, value in self._pairs(path, node):
            if key in ("name", "replicas"):
                found[key] = self._scalar(f"{path}.{key}", value)
            else:
                self._note_unknown(path, key, value, ("name", "replicas"))
        name, replicas = found.get("name"), found.get("replicas")
        if not name:
            self._problem(node, f"{path} needs a name, such as nvidia.com/gpu")
        elif not (replicas and replicas.isascii() and replicas.isdigit() and len(replicas) < 9):
            self._problem(node, f"{path} needs a whole number of replicas for {name}")
        elif not 2 <= int(replicas) <= MAX_REPLICAS:
            self._problem(node, f"replicas of {name} must be between 2 and {MAX_REPLICAS}")
        else:
            self._add_replicas(node, name if "/" in name else RESOURCE_PREFIX + name, int(replicas))

    def _add_replicas(self, node: _Node, name: str, replicas: int) -> None:
        if name in self._contents.replicas:
            self._problem(node, f"sharing.timeSlicing.resources names {name} twice")
        self._contents.replicas[name] = replicas

    def _pairs(self, path: str, node: _Node) -> Iterator[tuple[str, _Node]]:
        if node.tag == _NULL_TAG:
            return
        if node.id != "mapping":
            self._problem(node, f"{path or 'the file'} must hold keys and values")
            return
        seen: set[str] = set()
        for key, value in node.value:
            if key.id != "scalar":
                self._problem(key, f"a key of {path or 'the file'} must be a word")
            elif key.value in seen:
                self._problem(key, f"{_join(path, key.value)} is given twice")
            else:
                seen.add(key.value)
                yield key.value, value

    def _scalar(self, path: str, node: _Node) -> str | None:
        if node.id != "scalar":
            self._problem(node, f"{path} must be a single value")
            return None
        if node.tag == _NULL_TAG:
            return None
        if node.tag == _BOOL_TAG:
            return "true" if node.value.lower() in _YAML_TRUE else "false"
        return str(node.value)

    def _known_keys(self, path: str) -> tuple[str, ...]:
        stem = f"{path}."
        known = (key.removeprefix(stem).partition(".")[0] for key in self._options if key.startswith(stem))
        return tuple(dict.fromkeys((*known, "xids") if path == "agent" else known))

    def _note_unknown(self, path: str, key: str, node: _Node, known: tuple[str, ...]) -> None:
        full = _join(path, key)
        right_places = [other for other in self._options if other.rpartition(".")[2] == key]
        if key in _FOREIGN.get(path, ()):
            self._warning(node, f"{full} is not used by this agent")
        elif right_places:
            self._problem(node, f"{full} is in the wrong place; write {right_places[0]}")
        elif path.partition(".")[0] == "agent":
            self._problem(node, f"{full} is unknown{suggestion(key, known)}")
        else:
            self._warning(node, f"{full} is unknown and ignored{suggestion(key, known)}")

    def _where(self, node: _Node) -> str:
        return f"{self._contents.path}:{node.start_mark.line + 1}"

    def _problem(self, node: _Node, text: str) -> None:
        _append_bounded(self._contents.problems, f"{self._where(node)}: {text}")

    def _warning(self, node: _Node, text: str) -> None:
        _append_bounded(self._contents.warnings, f"{self._where(node)}: {text}")


def _join(path: str, key: str) -> str:
    shown = key if len(key) <= 80 else key[:77] + "..."
    return f"{path}.{shown}" if path else shown


def _append_bounded(notes: list[str], note: str) -> None:
    if len(notes) < MAX_NOTES:
        notes.append(note)
    elif len(notes) == MAX_NOTES:
        notes.append("and more")
