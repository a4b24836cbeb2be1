"""Every reader of the event loop is registered where its failure has an owner."""

import ast
from pathlib import Path

import agent

ROOT = Path(agent.__file__).parent
OTHERS = {"guard.py", "bus.py"}
"""The guard itself, and the reader that only sets a future each time the engine waits."""


def calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_readers_are_registered_through_the_guard_alone() -> None:
    past = {
        path.name
        for path in ROOT.rglob("*.py")
        if "simulation" not in path.parts and path.name not in OTHERS
        for call in calls(ast.parse(path.read_text()))
        if call.endswith("add_reader") and call != "guard.add_reader"
    }
    assert past == set()
