"""A YAML file as a tree whose nodes have their lines, read with bounds.

Guarantees: whatever the bytes, the result is a tree or one sentence with its line. Problems inside the tree
are noted, each with its line, and reading continues.
"""

import os
import stat
from collections.abc import Iterator
from typing import Any, Final, Protocol, cast

from agent.config.option import AND_MORE, shown

MAX_BYTES: Final = 128 * 1024
"""The parser in Python needs a few seconds for this; a real file has two kilobytes."""
MAX_DEPTH: Final = 64
"""Nesting levels of lists and mappings; a real file has six."""
MAX_LISTED: Final = 1024
"""Items read of a list."""
MAX_NOTES: Final = 50
"""Problems, and warnings, that are reported; a file with more is no configuration at all."""

CONFIGURATION: Final = "configuration file"
"""How messages call the file unless the caller names it otherwise."""

NOTHING: Final = os.devnull
"""NVIDIA's config-manager links to it if a node has no configuration."""

_BOM: Final = b"\xef\xbb\xbf"
_TAB: Final = repr("\t")
"""As in PyYAML's messages."""
_BOOL_TAG: Final = "tag:yaml.org,2002:bool"
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"
_NULL_TAG: Final = "tag:yaml.org,2002:null"
_YAML_TRUE: Final = frozenset({"true", "yes", "on"})


class Node(Protocol):
    """The used attributes of a node of PyYAML's tree; the library itself is imported only where needed."""

    id: str
    """``scalar``, ``sequence`` or ``mapping``."""
    tag: str
    value: Any
    start_mark: Any


class UnreadableError(Exception):
    """The file as a whole cannot be read; the message has the cause."""


def tree_of(path: str, raw: bytes, what: str = CONFIGURATION, *, max_depth: int = MAX_DEPTH) -> Node | None:
    """Return the root of a file's tree, None if it holds only comments; raises UnreadableError."""
    if len(raw) > MAX_BYTES:
        raise UnreadableError(f"The {what} {path} is over {MAX_BYTES // 1024} KiB")
    if raw.startswith(_BOM):
        raise UnreadableError(f"{path}:1: begins with a byte order mark; save it as UTF-8 without one")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"{path}:{line}: not UTF-8 text") from None
    if what == CONFIGURATION and not text.strip() and os.path.realpath(path) != NOTHING:
        raise UnreadableError(f'{path}:1: is empty; write "version: v1", or name no configuration file')
    return _compose(path, text, max_depth)


def bytes_of(path: str, what: str = CONFIGURATION) -> bytes:
    """Return the content of the file, at most a byte more than the limit; raises UnreadableError."""
    try:
        # Not blocking: a named pipe would otherwise hang the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) and os.path.realpath(path) != NOTHING:
                raise UnreadableError(f"The {what} {path} is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise UnreadableError(f"Could not read the {what} {path}: {reason}") from None


def _compose(path: str, text: str, max_depth: int) -> Node | None:
    import yaml  # noqa: PLC0415 - 16 ms that a node without a file need not spend

    class Loader(yaml.SafeLoader):
        """Limits the open levels, since each makes every further token more expensive."""

        def fetch_flow_collection_start(self, token: Any) -> None:
            self._check_depth()
            super().fetch_flow_collection_start(token)

        def add_indent(self, column: int) -> bool:
            self._check_depth()
            return bool(super().add_indent(column))

        def _check_depth(self) -> None:
            if self.flow_level + len(self.indents) > max_depth:
                raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())

    try:
        # The parser in Python: libyaml's binding overflows the stack on deep nesting.
        node = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = error.problem or error.context or ""
        if _TAB in problem:
            problem = "holds a tab where YAML allows none; indent with spaces"
        raise UnreadableError(f"{path}:{line}: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UnreadableError(f"{path}:{line}: holds a character that YAML forbids") from None
    except (RecursionError, ValueError):
        raise UnreadableError(f"{path}: nested too deeply") from None
    return cast("Node | None", node)


class Notes:
    """Reads nodes, and collects their problems."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def where(self, node: Node | None) -> str:
        """Return file and line; None stands for the file as a whole."""
        return self.file if node is None else f"{self.file}:{node.start_mark.line + 1}"

    def problem(self, node: Node | None, text: str) -> None:
        """Note a problem, which makes the file unusable."""
        _append_bounded(self.problems, f"{self.where(node)}: {text}")

    def warning(self, node: Node, text: str) -> None:
        """Note a warning, which the file remains usable with."""
        _append_bounded(self.warnings, f"{self.where(node)}: {text}")

    def pairs(self, path: str, node: Node) -> Iterator[tuple[str, Node]]:
        """Yield keys and values of a mapping; none of another node."""
        name = path or "the file"
        if is_null(node):
            return
        if node.id != "mapping":
            self.problem(node, f"{name} must hold keys and values")
            return
        seen: set[str] = set()
        for key, value in node.value:
            if key.id != "scalar":
                self.problem(key, f"a key of {name} must be a word")
            elif key.tag == _MERGE_TAG:
                self.problem(key, f"{name} merges keys with <<, which is not supported; write them out")
            elif key.value in seen:
                self.problem(key, f"{join(path, key.value)} is given twice")
            else:
                seen.add(key.value)
                yield key.value, value

    def items(self, path: str, node: Node, most: int = MAX_LISTED) -> list[Node]:
        """Return the items of a list; none of another node."""
        if is_null(node):
            return []
        if node.id != "sequence":
            self.problem(node, f"{path} must be a list")
            return []
        if len(node.value) > most:
            self.problem(node, f"{path} holds more than {most} entries")
        return list(node.value[:most])

    def text(self, path: str, node: Node) -> str | None:
        """Return a single value as it is written, None for null or another node."""
        if node.id != "scalar":
            self.problem(node, f"{path} must be a single value")
            return None
        return None if is_null(node) else str(node.value)

    def scalar(self, path: str, node: Node) -> str | None:
        """Return a single value as text, booleans as true or false; None as ``text`` does."""
        text = self.text(path, node)
        if text is None or node.tag != _BOOL_TAG:
            return text
        return "true" if text.lower() in _YAML_TRUE else "false"

    def switch(self, path: str, node: Node) -> bool | None:
        """Return true or false, None for null or any other value."""
        text = self.scalar(path, node)
        if text is not None and text not in {"true", "false"}:
            self.problem(node, f'{path} must be true or false, and is "{shown(text)}"')
            return None
        return None if text is None else text == "true"

    def value(self, path: str, node: Node) -> object:
        """Return a single value as YAML constructs it, None for null or an invalid one."""
        import yaml  # noqa: PLC0415 - as above

        try:
            return yaml.SafeLoader("").construct_object(cast("Any", node))
        except (ValueError, LookupError, AttributeError, yaml.YAMLError):
            # A date in month 99, a number of 5,000 digits, !!int abc, the tag of another program.
            self.problem(node, f'{path} is "{shown(str(node.value))}", which is no value of its type')
            return None


def is_null(node: Node) -> bool:
    """Return whether a node is null."""
    return node.tag == _NULL_TAG


def join(path: str, key: str) -> str:
    """Return the path of a key."""
    return f"{path}.{shown(key)}" if path else shown(key)


def _append_bounded(notes: list[str], note: str) -> None:
    if len(notes) < MAX_NOTES:
        notes.append(note)
    elif len(notes) == MAX_NOTES:
        notes.append(AND_MORE)
