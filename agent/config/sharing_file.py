"""The sharing sections of the configuration file: NVIDIA's two ways, and our entries for single GPUs.

Guarantees: an entry that NVIDIA's plugin rejects is a problem with the path of the entry; one that it accepts
and ignores is a warning.

Source: NVIDIA/k8s-device-plugin:api/config/v1/sharing.go, replicas.go, resources.go;
cmd/mps-control-daemon/mps/daemon.go (48 clients of one MPS server).
"""

import re
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import msgspec

from agent.config.option import shown
from agent.config.yaml_tree import Node, Notes, is_null, join
from agent.core.allocation.list_size import MAX_LIST_BYTES, least_list_bytes
from agent.model.ids import ResourceName
from agent.model.sharing import SHARED_SUFFIX, Share, SharingStrategy

MIN_REPLICAS: Final = 2
MAX_MPS_REPLICAS: Final = 48
"""Clients of one MPS server; 16 on GPUs before Volta, which the core checks once it knows the GPUs."""
MAX_SHARED_RESOURCES: Final = 256
MAX_SELECTORS: Final = 64
"""Models, or GPUs, that one entry names."""
MAX_SELECTOR_LENGTH: Final = 128
MAX_NAME_LENGTH: Final = 63
"""Characters of a resource's name, with its prefix."""

RESOURCE_PREFIX: Final = "nvidia.com/"

OURS: Final = "agent.sharing.resources"

_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""RFC 1123, as Kubernetes checks it."""
_GPU: Final = re.compile(r"[0-9]{1,4}|GPU-[0-9A-Za-z-]{1,60}")

Way = Literal["timeSlicing", "mps"]

_STRATEGIES: Final[dict[Way, SharingStrategy]] = {"timeSlicing": "time-slicing", "mps": "mps"}


class _Entry(NamedTuple):
    share: Share
    path: str
    node: Node


class _Group(msgspec.Struct):
    """One of NVIDIA's two ways of sharing."""

    way: Way
    node: Node
    entries: list[_Entry] = msgspec.field(default_factory=list)
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool | None = None


class FileSharing(NamedTuple):
    """The effective sharing."""

    strategy: SharingStrategy = "time-slicing"
    shares: tuple[Share, ...] = ()
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool = False
    where: str = ""
    """File, line and key, for problems of the whole section."""


NoteUnknown = Callable[[str, str, Node, tuple[str, ...]], None]
"""Called with the path of a mapping, an unknown key in it, its value, and the known keys."""


class SharingReader:
    """Reads the sharing sections of the file, in any order."""

    def __init__(self, notes: Notes, note_unknown: NoteUnknown) -> None:
        self._notes = notes
        self._note_unknown = note_unknown
        self._groups: dict[Way, _Group] = {}
        self._ours: list[_Entry] = []

    def read_time_slicing(self, node: Node) -> None:
        """Read ``sharing.timeSlicing``."""
        self._read_group("timeSlicing", node)

    def read_mps(self, node: Node) -> None:
        """Read ``sharing.mps``."""
        self._read_group("mps", node)

    def read_ours(self, node: Node) -> None:
        """Read ``agent.sharing.resources``."""
        self._ours = self._entries(OURS, node, ("models", "gpus"))

    def result(self) -> FileSharing:
        """Return the effective sharing: MPS before time-slicing, our entries before NVIDIA's."""
        mps, time_slicing = self._groups.get("mps"), self._groups.get("timeSlicing")
        if mps and time_slicing:
            self._notes.warning(
                time_slicing.node, "sharing.timeSlicing is ignored, because sharing.mps counts"
            )
        group = mps or time_slicing
        entries = [*self._ours, *(group.entries if group else ())]
        if group is None:
            return FileSharing(shares=tuple(entry.share for entry in entries))
        for entry in entries:
            self._check_with_group(group, entry)
        is_strict = group.fail_requests_greater_than_one
        return FileSharing(
            strategy=_STRATEGIES[group.way],
            shares=tuple(entry.share for entry in entries),
            rename_by_default=group.rename_by_default,
            fail_requests_greater_than_one=group.way == "mps" if is_strict is None else is_strict,
            where=f"{self._notes.where(group.node)}: sharing.{group.way}",
        )

    def _check_with_group(self, group: _Group, entry: _Entry) -> None:
        """Note problems that an entry has only with this way of sharing."""
        share = entry.share
        if group.way == "mps" and share.replicas > MAX_MPS_REPLICAS:
            self._notes.problem(
                entry.node,
                f"{entry.path}.replicas must be at most {MAX_MPS_REPLICAS} with MPS, and is {share.replicas}",
            )
        if group.rename_by_default and len(share.resource) + len(SHARED_SUFFIX) > MAX_NAME_LENGTH:
            self._notes.problem(
                entry.node,
                f"{entry.path}.name has more than {MAX_NAME_LENGTH} characters as "
                f"{share.resource}{SHARED_SUFFIX}",
            )

    def _read_group(self, way: Way, node: Node) -> None:
        path = f"sharing.{way}"
        group = _Group(way, node)
        known = ("renameByDefault", "failRequestsGreaterThanOne", "resources")
        names_any = False
        for key, value in self._notes.pairs(path, node):
            match key:
                case "renameByDefault":
                    group.rename_by_default = self._notes.switch(join(path, key), value) or False
                case "failRequestsGreaterThanOne":
                    group.fail_requests_greater_than_one = self._notes.switch(join(path, key), value)
                case "resources":
                    names_any = not is_null(value) and (value.id != "sequence" or bool(value.value))
                    group.entries = self._entries(f"{path}.resources", value, ("rename", "devices"))
                case _:
                    self._note_unknown(path, key, value, known)
        if group.entries:
            self._groups[way] = group
        elif node.id == "mapping" and not names_any:
            self._notes.problem(
                node, f"{path} needs resources, such as [{{name: nvidia.com/gpu, replicas: 4}}]"
            )

    def _entries(self, path: str, node: Node, further: tuple[str, ...]) -> list[_Entry]:
        listed = self._notes.items(path, node, MAX_SHARED_RESOURCES)
        entries: dict[tuple[object, ...], _Entry] = {}
        for position, item in enumerate(listed):
            entry = self._entry(f"{path}[{position}]", item, further)
            if entry is None:
                continue
            share = entry.share
            first = entries.setdefault((share.resource, share.models, share.gpus), entry)
            if first is entry:
                continue
            if path == OURS:
                self._notes.problem(item, f"{path} names {share.resource} twice")
                continue
            # NVIDIA's plugin makes the replicas of both, which have the same ids up to the smaller number.
            most = max(first, entry, key=lambda each: each.share.replicas)
            entries[share.resource, share.models, share.gpus] = most
            self._notes.warning(
                item, f"{path} names {share.resource} twice; the larger number counts, {most.share.replicas}"
            )
        return list(entries.values())

    def _entry(self, path: str, node: Node, further: tuple[str, ...]) -> _Entry | None:
        found = {}
        pairs = list(self._notes.pairs(path, node))
        if node.id != "mapping" and not is_null(node):
            return None
        for key, value in pairs:
            if key in {"name", "replicas", *further}:
                found[key] = value
            else:
                self._note_unknown(path, key, value, ("name", "replicas", *further))
        name = self._name(path, node, found.get("name"))
        replicas = self._replicas(path, node, found.get("replicas"))
        models = self._selectors(f"{path}.models", found.get("models"))
        gpus = self._selectors(f"{path}.gpus", found.get("gpus"), _GPU)
        if "rename" in found or "devices" in found:
            self._warn_of_ignored(path, name, found)
        return _Entry(Share(name, replicas, models, gpus), path, node) if name and replicas else None

    def _name(self, path: str, entry: Node, node: Node | None) -> ResourceName | None:
        text = self._notes.scalar(f"{path}.name", node) if node is not None else None
        if not text:
            self._notes.problem(node or entry, f"{path} needs a name, such as nvidia.com/gpu")
            return None
        name = text if text.startswith(RESOURCE_PREFIX) else RESOURCE_PREFIX + text
        if len(name) > MAX_NAME_LENGTH:
            why = f"must have at most {MAX_NAME_LENGTH} characters with its prefix"
        elif not _SUBDOMAIN.fullmatch(name.removeprefix(RESOURCE_PREFIX)):
            why = "must be lower-case letters, digits, - and ., such as nvidia.com/gpu"
        else:
            return ResourceName(name)
        self._notes.problem(node or entry, f'{path}.name {why}, and is "{shown(text)}"')
        return None

    def _replicas(self, path: str, entry: Node, node: Node | None) -> int | None:
        text = self._notes.scalar(f"{path}.replicas", node) if node is not None else None
        where = node or entry
        if text is None:
            self._notes.problem(where, f"{path} needs a number of replicas")
        elif not re.fullmatch("-?[0-9]{1,8}", text):
            self._notes.problem(where, f'{path}.replicas must be a whole number, and is "{shown(text)}"')
        elif int(text) < MIN_REPLICAS:
            self._notes.problem(where, f"{path}.replicas must be at least {MIN_REPLICAS}, and is {text}")
        elif (list_bytes := least_list_bytes(int(text))) > MAX_LIST_BYTES:
            # The limit of this node depends on its GPUs; so many exceed that of any.
            self._notes.problem(
                where,
                f"{path}.replicas is {text}: the list of one GPU has {list_bytes} bytes, and the kubelet"
                f" accepts {MAX_LIST_BYTES}",
            )
        else:
            return int(text)
        return None

    def _selectors(
        self, path: str, node: Node | None, form: re.Pattern[str] | None = None
    ) -> tuple[str, ...]:
        if node is None:
            return ()
        words = []
        for item in self._notes.items(path, node, MAX_SELECTORS):
            word = self._notes.scalar(path, item)
            if not word or len(word) > MAX_SELECTOR_LENGTH:
                self._notes.problem(
                    item, f"{path} must hold words of at most {MAX_SELECTOR_LENGTH} characters"
                )
            elif form is not None and not form.fullmatch(word):
                self._notes.problem(
                    item, f'{path} must hold indexes or UUIDs of GPUs, and not "{shown(word)}"'
                )
            else:
                words.append(word)
        if not words and (is_null(node) or node.id == "sequence"):
            self._notes.problem(node, f"{path} names none; omit it to mean all")
        return tuple(words)

    def _warn_of_ignored(self, path: str, name: ResourceName | None, found: dict[str, Node]) -> None:
        """Warn of keys that NVIDIA's plugin accepts and ignores too, if they would change something."""
        for key, harmless in (("rename", f"{name}{SHARED_SUFFIX}"), ("devices", "all")):
            node = found.get(key)
            if node is not None and node.value != harmless:
                self._notes.warning(node, f"{path}.{key} is ignored, as NVIDIA's plugin does")


def share_text(share: Share) -> str:
    """Return an entry for people."""
    only = ", ".join((*share.models, *(f"GPU {gpu}" for gpu in share.gpus)))
    return f"{share.resource} x {share.replicas}{f' on {only}' if only else ''}"
