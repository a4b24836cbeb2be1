"""Counts: each is declared once, has a legal name and shows; nothing is counted past the registry."""

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent.app
import agent.runtime.config_watch
import agent.sinks.cdi.sink
import agent.sinks.eventlog
import agent.sinks.plugin.sink
import agent.sources.ebpf.source
import agent.sources.kmsg
import agent.sources.uevent
from agent.counts import COUNTS, OTHER, Count, CountBy, describe

AGENT = Path(agent.app.__file__).parent

NOT_COUNTS = {
    "agent/bus.py": {"_popped", "_keyless", "_version"},
    "agent/sinks/plugin/service.py": {"_watched", "_asking"},
    "agent/sinks/plugin/grpc_connection.py": {"_requests", "calls"},
    "agent/sinks/plugin/grpc_bounds.py": {"_held"},
    "agent/sinks/eventlog.py": {"_unreported"},
    "agent/sinks/cdi/file_tree.py": {"_calls"},
    "agent/sources/kmsg.py": {"_count"},
    "agent/sources/nvml/gpu_watcher.py": {"requested"},
    "agent/sources/nvml/source.py": {"_open_inits"},
    "agent/sources/nvml/events.py": {"_users", "_runs"},
    "agent/views/events.py": {"_last"},
    "agent/log.py": {"count", "suppressed"},
    "agent/commands/trace.py": {"_unshown", "calls"},
}
"""Attributes that are numbered or counted down, or of one message: no history anybody would ask for."""


class Counting:
    failures = Count("test_failures_total", "failures", "Failures of this test.")
    rejected = CountBy("test_rejected_total", "calls", "Calls.", label="reason", values=("full", "peer"))


@pytest.fixture(autouse=True, scope="module")
def _only_here() -> Iterator[None]:
    yield
    del COUNTS["test_failures_total"], COUNTS["test_rejected_total"]


def test_an_instance_has_its_own_number_and_the_registry_the_sum_of_all() -> None:
    before = Counting.failures.total
    one, two = Counting(), Counting()
    one.failures += 2
    two.failures += 1
    one.failures = 0
    one.failures += 1
    assert (one.failures, two.failures) == (1, 1)
    assert Counting.failures.total == before + 4


def test_a_value_that_was_not_declared_is_counted_as_other() -> None:
    counting = Counting()
    counting.rejected["full"] += 1
    for invented in ("a", "b"):
        counting.rejected[invented] += 1
    assert counting.rejected == {"full": 1, OTHER: 2}
    assert describe()["test_rejected_total"]["values"] == {"full": 1, "peer": 0, OTHER: 2}


def test_a_name_is_declared_once() -> None:
    with pytest.raises(ValueError, match="declared twice"):
        Count("test_failures_total", "failures", "Again.")


def test_threads_lose_no_count() -> None:
    before = Counting.failures.total

    def count() -> None:
        own = Counting()
        for _ in range(10_000):
            own.failures += 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counting.failures.total == before + 40_000


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_each_count_has_a_name_for_monitoring_a_unit_and_a_sentence(name: str) -> None:
    count = COUNTS[name]
    assert re.fullmatch(r"[a-z][a-z0-9_]*_total", name)
    assert re.fullmatch(r"[a-z]+", count.unit)
    assert re.fullmatch(r"[A-Z].*\.", count.help)
    if isinstance(count, CountBy):
        assert count.label not in {"type", "node"}
        assert len(count.totals) <= 16


def counted(path: Path) -> Iterator[str]:
    """Yield the attributes that a module adds to."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
            adds_one = isinstance(node.value, ast.Constant) and node.value.value == 1
            if adds_one and isinstance(target, ast.Attribute):
                yield target.attr


def declared(path: Path) -> set[str]:
    """Return the attributes that a package declares as counts."""
    names: set[str] = set()
    for module in path.parent.glob("*.py"):
        text = module.read_text(encoding="utf-8")
        names |= set(re.findall(r"^    (\w+) = (?:Count|CountBy)\(", text, re.MULTILINE))
        for left, right in re.findall(r"^    ([\w, ]+) = ([A-Z_, ]+)$", text, re.MULTILINE):
            names |= set(left.split(", ")) if len(left.split(", ")) == len(right.split(", ")) else set()
    return names


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(AGENT.rglob("*.py"))
        if path.relative_to(AGENT).parts[0] not in {"simulation", "core", "api"}
    ],
    ids=lambda path: str(path.relative_to(AGENT)),
)
def test_nothing_is_counted_past_the_registry(path: Path) -> None:
    """The core's counts are in its state, and so in the snapshot."""
    known = declared(path) | NOT_COUNTS.get(f"agent/{path.relative_to(AGENT)}", set())
    assert set(counted(path)) <= known
