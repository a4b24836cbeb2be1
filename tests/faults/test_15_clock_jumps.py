"""Fault 15: the clock of the wall jumps by a day, the machine sleeps for an hour.

Right: no timer, back-off or verdict changes, because nothing but what writes for people reads that clock.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent
from agent.model.facts import AllocationsListed, KubeletSocketSeen, Tick
from agent.model.health import Health
from agent.model.snapshot import RegistrationPhase
from tests.core.build import GPU, K1, U0, S, gpu, healthy_node, passed, registered_node, xid
from tests.harness import flags_of, running, simulated_node, wait_allocatable

HOUR = 3600 * S

ROOT = Path(agent.__file__).parent

READS_THE_WALL = frozenset({"time", "time_ns", "localtime", "gmtime", "ctime", "now", "utcnow", "today"})
"""Functions of time and datetime."""

OURS = frozenset({"wall_clock", "wall_time_of"})
"""Ours, in agent.log."""

WRITES_FOR_PEOPLE = {
    "log.py": "the log",
    "runtime/event_recorder.py": "the times that HTTP, evidence and orders show",
    "sinks/eventlog.py": "the event log",
    "commands/trace.py": "when a call was made",
    "commands/render.py": "times in the zone of the reader",
    "commands/events.py": "what a person asks for by the time of day",
}


def modules() -> Iterator[Path]:
    """The agent without the simulated node, which is the world."""
    return (path for path in ROOT.rglob("*.py") if "simulation" not in path.parts and "api" not in path.parts)


def readers_of_the_wall(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute):
            owner = each.value.id if isinstance(each.value, ast.Name) else ""
            if (owner in ("time", "datetime", "date") and each.attr in READS_THE_WALL) or each.attr in OURS:
                found.add(each.attr)
            if each.attr in ("CLOCK_REALTIME", "CLOCK_TAI"):
                found.add(each.attr)
        elif isinstance(each, ast.Name) and each.id in OURS:
            found.add(each.id)
        elif isinstance(each, ast.ImportFrom) and each.module == "time":
            found |= {alias.name for alias in each.names} & READS_THE_WALL
    return found


def test_only_what_writes_for_people_reads_the_clock_of_the_wall() -> None:
    readers = {str(path.relative_to(ROOT)) for path in modules() if readers_of_the_wall(path)}
    assert readers == set(WRITES_FOR_PEOPLE)


def test_the_check_finds_a_reader_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    for line in (
        "import time; time.time()",
        "from time import time_ns",
        "datetime.now(UTC)",
        "time.clock_gettime(time.CLOCK_REALTIME)",
        "log.wall_clock()",
    ):
        path.write_text(line)
        assert readers_of_the_wall(path)
    path.write_text("import time; time.monotonic_ns(); time.sleep(1)")
    assert not readers_of_the_wall(path)


JUMPING = """
import itertools
from datetime import timedelta
import agent.log
real, jumps = agent.log.wall_clock, itertools.cycle((0, 86_400, -86_400, 3_600))
agent.log.wall_clock = lambda: real() + timedelta(seconds=next(jumps))
"""


@pytest.mark.slow
async def test_an_agent_under_a_clock_that_jumps_does_the_same() -> None:
    async with simulated_node() as node:
        quick = flags_of(node, poll="50ms", recovery_clean_probes="2", recovery_quiet="100ms")
        async with running(quick, prelude=JUMPING) as agent:
            await wait_allocatable(node.kubelet, 4)
            node.nvml.push_xid(1, 94)
            await wait_allocatable(node.kubelet, 3)
            await wait_allocatable(node.kubelet, 4)
            await node.kubelet.restart()
            await wait_allocatable(node.kubelet, 4)
            assert len(node.kubelet.registrations) == 2
            assert await agent.stop() == 0


# A machine that slept: its monotonic clock may have stood still, or jump ahead at once.


def test_time_alone_cures_nothing() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(94), passed(), passed())
    node.after(HOUR, Tick())
    assert node.health() == {U0: Health.UNHEALTHY}
    node.apply(passed())
    assert node.health() == {U0: Health.HEALTHY}


def test_a_registration_that_is_watched_stays() -> None:
    node = registered_node(gpu(0))
    generation = node.standing(GPU).generation
    node.after(HOUR, Tick())
    assert node.standing(GPU).phase is RegistrationPhase.REGISTERED
    assert node.standing(GPU).generation == generation


def test_a_rejected_registration_is_tried_once_and_not_once_for_each_pause_slept_through() -> None:
    node = healthy_node(gpu(0))
    node.apply(KubeletSocketSeen(K1))
    node.fail_registration()
    generation = node.standing(GPU).generation
    node.after(HOUR, Tick())
    node.apply(Tick(), Tick())
    assert node.standing(GPU).generation == generation + 1


def test_allocations_are_unknown_until_they_are_listed_again() -> None:
    node = healthy_node(gpu(0))
    node.apply(AllocationsListed({}))
    node.after(HOUR, Tick())
    assert node.snapshot().pods is None
    node.apply(AllocationsListed({}))
    assert node.snapshot().pods == {}
