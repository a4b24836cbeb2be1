"""Reading a YAML file strictly: every problem at once, each with file, line and path.

Guarantees: a scalar is the text that stands in the file, so ``on`` is a word and ``012`` three digits;
what a value means is decided where it is used. The work is bounded by the size of the file.
"""

from typing import Final

from agent.config.yaml_tree import Node, Notes, UnreadableError, bytes_of, join, tree_of
from agent.errors import UsageError

MAX_DEPTH: Final = 20
MAX_PLAIN_NODES: Final = 20_000
"""Nodes of a subtree that is read as plain values; a file could name one node many times."""


class Document(Notes):
    """One file's tree and the problems found in it so far."""

    def __init__(self, path: str, root: Node | None) -> None:
        super().__init__(path)
        self.root = root
        self._plain_nodes = 0

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
                key: self._plain(join(path, key), value, depth + 1) for key, value in self.pairs(path, node)
            }
        if node.id == "sequence":
            return [self._plain(path, value, depth + 1) for value in self.items(path, node)]
        return self.value(path, node)


def read(path: str, what: str) -> Document:
    """Read a file; raises UsageError in one sentence where it is no YAML at all."""
    try:
        return Document(path, tree_of(path, bytes_of(path, what), what))
    except UnreadableError as error:
        raise UsageError(str(error)) from None
