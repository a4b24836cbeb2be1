"""The configuration file: NVIDIA's version v1 YAML plus one top-level key ``agent`` for ours.

Guarantees: every problem is found, not only the first, and each names the file, the line and the
path of the key. A key that NVIDIA's plugin accepts and ignores is a warning, as is an unknown key outside
``agent``; an unknown key under ``agent`` or a key in a wrong place is a problem.
The work is bounded by the size of the file, and because the reader descends into known keys only.

Source of the format: NVIDIA/k8s-device-plugin:api/config/v1/config.go, flags.go, sharing.go.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from agent.config.discovery_options import DISCOVERY_OPTIONS
from agent.config.option import Option, shown
from agent.config.options import OPTIONS
from agent.config.settings import Origin, ParsedOption
from agent.config.sharing_file import OURS, FileSharing, SharingReader, share_text
from agent.config.yaml_tree import Node, Notes, UnreadableError, bytes_of, join, tree_of
from agent.model.policy import XidOverride
from agent.spelling import suggestion

MAX_XIDS: Final = 1024
MAX_NAMED: Final = 8
"""Keys of a foreign file that the problem names."""

_OFTEN_MISPLACED: Final = {
    "renameByDefault": "sharing.timeSlicing.renameByDefault",
    "failRequestsGreaterThanOne": "sharing.timeSlicing.failRequestsGreaterThanOne",
    "timeSlicing": "sharing.timeSlicing",
    "mps": "sharing.mps",
    "plugin": "flags.plugin",
    "gfd": "flags.gfd",
    "xids": "agent.xids",
}
"""Keys that are valid in one place only and are no options, by their last word."""


_OTHER_TOOLS: Final = {
    "mig-configs": "NVIDIA's MIG manager",
    "nvidia-container-cli": "the NVIDIA container toolkit",
    "cdiVersion": "a container runtime (gpu-agent cdi validate checks it)",
    "sources": "node feature discovery",
    "scrape_configs": "Prometheus",
}
"""Keys of the files of other tools, which share ConfigMaps and directories with ours, and the tool."""


class FileValue(NamedTuple):
    """The text of an option in the file, and its position."""

    text: str
    where: str


class FileContents(msgspec.Struct):
    """The parsed content of a file."""

    path: str
    fingerprint: int = 0
    """Identifies the content of the file, within this process."""
    values: dict[str, FileValue] = msgspec.field(default_factory=dict)
    """By option name."""
    sharing: FileSharing = msgspec.field(default_factory=FileSharing)
    xids: dict[int, XidOverride] = msgspec.field(default_factory=dict)
    problems: list[str] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)

    def parts(self) -> dict[str, ParsedOption]:
        """Return the settings that are no options, by key, with a text for people and their origin."""
        found: dict[str, ParsedOption] = {}
        if self.sharing.shares:
            shares = ", ".join(share_text(share) for share in self.sharing.shares)
            origin = Origin(self.sharing.where or f"{self.path}: {OURS}")
            found["sharing"] = ParsedOption(f"{self.sharing.strategy}: {shares}", origin, self.sharing)
        if self.xids:
            rules = ", ".join(f"{xid}: {word}" for xid, word in self.xids.items())
            found["agent.xids"] = ParsedOption(rules, Origin(f"{self.path}: agent.xids"), self.xids)
        return found


def read(path: str, *, strict: bool = False) -> FileContents:
    """Read a configuration file; ``problems`` of the result holds its errors.

    ``strict`` turns unknown keys that NVIDIA's plugin ignores into problems.
    """
    try:
        raw = bytes_of(path)
        root = tree_of(path, raw)
    except UnreadableError as error:
        return FileContents(path, problems=[str(error)])
    reader = _Reader(path, strict=strict)
    if root is not None and not reader.rejects(root):
        reader.read("", root)
    return reader.contents(hash(raw))


class _Reader:
    """Walks the tree of one file along the known keys."""

    def __init__(self, path: str, *, strict: bool) -> None:
        self._notes = Notes(path)
        self._strict = strict
        self._options = {
            option.file_key: option for option in (*OPTIONS.values(), *DISCOVERY_OPTIONS) if option.file_key
        }
        self._values: dict[str, FileValue] = {}
        self._xids: dict[int, XidOverride] = {}
        self._sharing = SharingReader(self._notes, self._note_unknown)
        self._parts: dict[str, Callable[[Node], None]] = {
            "version": self._read_version,
            "resources": self._read_resources,
            "sharing.timeSlicing": self._sharing.read_time_slicing,
            "sharing.mps": self._sharing.read_mps,
            OURS: self._sharing.read_ours,
            "agent.xids": self._read_xids,
        }

    def contents(self, fingerprint: int) -> FileContents:
        """Return the result."""
        sharing = self._sharing.result()
        notes = self._notes
        return FileContents(
            notes.file, fingerprint, self._values, sharing, self._xids, notes.problems, notes.warnings
        )

    def rejects(self, root: Node) -> bool:
        """Note a file that is no configuration at all: it would set nothing and raise no problem."""
        if root.id != "mapping":
            return False
        keys = {key.value: value for key, value in root.value if key.id == "scalar"}
        if "apiVersion" in keys and "kind" in keys:
            self._notes.problem(root, _of_kubernetes(keys))
            return True
        tool = next((_OTHER_TOOLS[key] for key in keys if key in _OTHER_TOOLS), "")
        known = self._known_keys("")
        if not keys or (not tool and any(self._is_ours(key, known) for key in keys)):
            return False
        whose = f"one for {tool}" if tool else f"none of the agent's; its keys are {_some(keys)}"
        self._notes.problem(root, f"the file is {whose}; a configuration has {', '.join(known)}")
        return True

    def _is_ours(self, key: str, known: tuple[str, ...]) -> bool:
        """Return whether a top-level key, perhaps misspelt or misplaced, is one of this agent."""
        return key in known or bool(self._right_place(key) or suggestion(key, known))

    def read(self, path: str, node: Node) -> None:
        """Read a mapping of options and sections, at any depth."""
        for key, value in self._notes.pairs(path, node):
            full = f"{path}.{key}" if path else key
            if full in self._options:
                self._read_option(self._options[full], value)
            elif full in self._parts:
                self._parts[full](value)
            elif any(known.startswith(f"{full}.") for known in (*self._options, *self._parts)):
                self.read(full, value)
            else:
                self._note_unknown(path, key, value, self._known_keys(path))

    def _read_version(self, node: Node) -> None:
        version = self._notes.scalar("version", node)
        if version not in (None, "", "v1"):
            self._notes.problem(node, f'version must be v1, not "{version}"')

    def _read_option(self, option: Option, node: Node) -> None:
        is_listed = option.is_list and node.id == "sequence"
        items = self._notes.items(option.file_key, node) if is_listed else [node]
        if option.is_list and node.id == "mapping":
            self._notes.problem(node, f"{option.file_key} must be a single value or a list")
            return
        texts = [self._notes.scalar(option.file_key, item) for item in items]
        words = [text for text in texts if text is not None]
        if not option.splits_in_file and any("," in word for word in words):
            self._notes.problem(node, f"{option.file_key} must be a list to name several, such as [a, b]")
        elif words or is_listed:
            where = f"{self._notes.where(node)}: {option.file_key}"
            self._values[option.name] = FileValue(",".join(words), where)

    def _read_resources(self, node: Node) -> None:
        """Read names of resources, which NVIDIA's plugin accepts and ignores."""
        has_any = False
        for key, value in self._notes.pairs("resources", node):
            if key in {"gpus", "mig"}:
                has_any |= bool(self._notes.items(f"resources.{key}", value))
            else:
                self._note_unknown("resources", key, value, ("gpus", "mig"))
        if has_any:
            self._notes.warning(node, "resources is ignored, as NVIDIA's plugin does: names cannot be chosen")

    def _read_xids(self, node: Node) -> None:
        for key, value in self._notes.pairs("agent.xids", node):
            word = self._notes.scalar(f"agent.xids.{key}", value)
            if not (key.isascii() and key.isdigit() and len(key) <= 6):
                self._notes.problem(value, f"{join('agent.xids', key)} must be the number of an XID")
            elif word not in ("flip", "ignore"):
                self._notes.problem(value, f"agent.xids.{key} must be flip or ignore")
            elif len(self._xids) >= MAX_XIDS:
                self._notes.problem(value, f"agent.xids holds more than {MAX_XIDS} entries")
            else:
                self._xids[int(key)] = "flip" if word == "flip" else "ignore"

    def _known_keys(self, path: str) -> tuple[str, ...]:
        stem = f"{path}." if path else ""
        known = (key for key in (*self._options, *self._parts) if key.startswith(stem))
        return tuple(dict.fromkeys(key.removeprefix(stem).partition(".")[0] for key in known))

    def _note_unknown(self, path: str, key: str, node: Node, known: tuple[str, ...]) -> None:
        full = join(path, key)
        right_place = self._right_place(key)
        if right_place:
            self._notes.problem(node, f"{full} is in the wrong place; write {right_place}")
        elif self._strict or path.partition(".")[0] == "agent":
            self._notes.problem(node, f"{full} is unknown{suggestion(key, known)}")
        else:
            self._notes.warning(node, f"{full} is unknown and ignored{suggestion(key, known)}")

    def _right_place(self, key: str) -> str:
        """Return the right place of a known key, empty for an unknown one."""
        places = (other for other in self._options if other.rpartition(".")[2] == key)
        return _OFTEN_MISPLACED.get(key) or next(places, "")


def _of_kubernetes(keys: Mapping[str, Node]) -> str:
    """Return the problem of a Kubernetes object, with the way to the file that it holds."""
    kind = shown(str(keys["kind"].value))
    data = keys.get("data")
    if kind != "ConfigMap" or data is None or data.id != "mapping":
        return f"the file is a Kubernetes {kind}, not a configuration; name the file that a ConfigMap holds"
    names = [key.value for key, _ in data.value if key.id == "scalar"]
    return (
        f"the file is a whole ConfigMap; write the text under data ({_some(names)}) to a file of its own, or"
        " mount the ConfigMap and name the file in the mount"
    )


def _some(names: Iterable[str]) -> str:
    listed = [shown(name) for name in names]
    return ", ".join((*listed[:MAX_NAMED], *(["..."] if len(listed) > MAX_NAMED else [])))
