"""Reading a YAML file strictly: every problem at once, each with file, line and path.

Guarantees: a scalar is the text that stands in the file, so ``on`` is a word and ``012`` three digits;
what a value means is decided where it is used. The work is bounded by the size of the file.
"""

import os
import stat
from collections.abc import Iterator
from typing import Any, Final, Protocol, cast

import yaml

from agent.errors import UsageError

MAX_BYTES: Final = 128 * 1024
MAX_PROBLEMS: Final = 50
"""Problems that are told; a file with more is no scenario at all."""

MAX_DEPTH: Final = 20
MAX_PLAIN_NODES: Final = 20_000
"""Nodes of a subtree that is taken as it is; a file could name one node many times."""

_NULL_TAG: Final = "tag:yaml.org,2002:null"


class Node(Protocol):
    """What is used of a node of PyYAML's tree."""

    id: str
    """``scalar``, ``sequence`` or ``mapping``."""
    tag: str
    value: Any
    start_mark: Any


class Document:
    """One file's tree and the problems found in it so far."""

    def __init__(self, path: str, root: Node | None) -> None:
        self.path = path
        self.root = root
        self.problems: list[str] = []
        self._plain_nodes = 0

    def problem(self, node: Node | None, text: str) -> None:
        """Note a problem at a node, or in the file as a whole."""
        where = self.path if node is None else self.where(node)
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{where}: {text}")
        elif len(self.problems) == MAX_PROBLEMS:
            self.problems.append(f"{self.path}: and more")

    def where(self, node: Node) -> str:
        """Return file and line of a node."""
        return f"{self.path}:{node.start_mark.line + 1}"

    def pairs(self, path: str, node: Node) -> Iterator[tuple[str, Node]]:
        """Yield the keys and values of a mapping, none of an empty value."""
        if node.tag == _NULL_TAG:
            return
        if node.id != "mapping":
            self.problem(node, f"{path or 'the file'} must hold keys and values")
            return
        seen: set[str] = set()
        for key, value in node.value:
            if key.id != "scalar":
                self.problem(key, f"a key of {path or 'the file'} must be a word")
            elif key.value in seen:
                self.problem(key, f"{_join(path, key.value)} is given twice")
            else:
                seen.add(key.value)
                yield key.value, value

    def items(self, path: str, node: Node) -> Iterator[Node]:
        """Yield the entries of a list."""
        if node.tag == _NULL_TAG:
            return
        if node.id != "sequence":
            self.problem(node, f"{path} must be a list")
            return
        yield from node.value

    def text(self, path: str, node: Node) -> str | None:
        """Return a single value as it is written; None for an empty one, and for a problem noted."""
        if node.id != "scalar":
            self.problem(node, f"{path} must be a single value")
            return None
        return None if node.tag == _NULL_TAG else str(node.value)

    def plain(self, path: str, node: Node) -> object:
        """Return a whole subtree as the plain values YAML makes of it."""
        self._plain_nodes = 0
        return self._plain(path, node, 0)

    def _plain(self, path: str, node: Node, depth: int) -> object:
        self._plain_nodes += 1
        if depth > MAX_DEPTH or self._plain_nodes > MAX_PLAIN_NODES:
            if self._plain_nodes <= MAX_PLAIN_NODES + 1:
                self.problem(node, f"{path[:100]} holds too much")
            self._plain_nodes = MAX_PLAIN_NODES + 1
            return None
        if node.id == "mapping":
            return {
                key: self._plain(_join(path, key), value, depth + 1) for key, value in self.pairs(path, node)
            }
        if node.id == "sequence":
            return [self._plain(path, value, depth + 1) for value in self.items(path, node)]
        return yaml.SafeLoader("").construct_object(cast("Any", node))


def read(path: str, what: str) -> Document:
    """Read a file; raises UsageError in one sentence where it is no YAML at all."""
    raw = _bytes_of(path, what)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"The {what} {path} is not UTF-8 text (line {line})") from None
    try:
        # The parser in Python: libyaml's binding overflows the stack on deep nesting.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(
            f"The {what} {path} is not valid YAML (line {mark.line + 1 if mark else 1}): "
            f"{error.problem or error.context}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(f"The {what} {path} holds a character that YAML forbids (line {line})") from None
    except (RecursionError, ValueError):
        raise UsageError(f"The {what} {path} is nested too deeply") from None
    return Document(path, cast("Node | None", root))


def _bytes_of(path: str, what: str) -> bytes:
    try:
        # Not blocking: a named pipe would otherwise hang the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UsageError(f"The {what} {path} is not a regular file")
        with os.fdopen(descriptor, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the name holds a NUL character"
        raise UsageError(f"Could not read the {what} {path}: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"The {what} {path} is over {MAX_BYTES // 1024} KiB, too long for one")
    return raw


def _join(path: str, key: str) -> str:
    shown = key if len(key) <= 80 else key[:77] + "..."
    return f"{path}.{shown}" if path else shown
