"""Fault 26: each part of the agent that can end, raise or hang does so, and then a GPU breaks."""

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from agent.core.freshness import STALE_PERIODS, VOUCHERS, Terms
from agent.model.components import GPU_PROBER
from agent.model.ids import SourceName
from agent.probe.loaded import OBJECT
from agent.simulation.node import SimulatedNode
from tests.conftest import SHARE
from tests.faults.injected import CASES, Cover, Needs, Row, plays, rows, table
from tests.harness import (
    GPU,
    SLACK_NS,
    AgentProcess,
    accepted,
    agent_process,
    codes,
    gpu_agent,
    simulated_node,
    uuids,
    wait_allocatable,
    why_no_driver_double,
)

TARGET = 1
ROW_S = 120.0
"""Longer than any step of a row takes on a loaded machine: a source is loaded anew after a minute."""
SIDE_BY_SIDE = 2
"""Workers of the tests that play rows: each plays four agents at once."""
ASK_S = 0.2
"""How often each agent is asked."""

FLAGS = {"call-deadline": "1s", "probe-tier": "procfs", "pods-poll": "200ms", "kubelet-count-poll": "1s"}
MORE_FLAGS: Final[Mapping[Needs, Mapping[str, str]]] = {
    "nothing": {},
    "cdi": {"device-list-strategy": "cdi-annotations"},
    "mps": {},
    "processes": {"probe-tier": "syscalls", "probe-loader": "core"},
}
MPS = "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"


class Checks:
    """The checks of /readyz that fail, asked again and again."""

    def __init__(self, agent: AgentProcess) -> None:
        self._agent = agent
        self.failing: frozenset[str] | None = None
        """None: nothing answers."""
        self.failed: frozenset[str] = frozenset()
        """Those that failed at some time."""

    async def ask(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                async with asyncio.timeout(ROW_S):
                    status, body = await self._agent.get("/readyz?verbose")
                lines = str(body).splitlines()
                failing = frozenset(line[3:].partition(" ")[0] for line in lines if line.startswith("[-]"))
                # A loaded agent may answer that it was too slow.
                self.failing = failing if status in {200, 500} else None
                self.failed |= failing
            except (OSError, IndexError):
                self.failing = None
            await asyncio.sleep(ASK_S)

    def named(self, check: str) -> bool:
        """Return whether a check named so failed."""
        return any(each.endswith(check) for each in self.failed)


async def until(condition: Callable[[], bool], why: str) -> None:
    """Poll until a condition holds."""
    try:
        async with asyncio.timeout(ROW_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"Not within {ROW_S:g} s: {why}") from None


@contextlib.asynccontextmanager
async def broken_agent(node: SimulatedNode, row: Row) -> AsyncIterator[tuple[AgentProcess, Path]]:
    """Run the agent with its seam; yields the directory of the injection too."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        config = Path(name, "config.yaml")
        config.write_text("version: v1\n" + (MPS if row.case.needs == "mps" else ""))
        launcher = (sys.executable, "-m", "tests.faults.injected_agent", name)
        flags = {"config-file": str(config), **FLAGS, **MORE_FLAGS[row.case.needs]}
        if row.part.startswith("start"):
            Path(name, "fault").write_text(f"{key_of(row.part)}|{row.how}")
        async with agent_process(node, launcher=launcher, **flags) as agent:
            yield agent, Path(name)


@contextlib.asynccontextmanager
async def node_for(needs: Needs) -> AsyncIterator[SimulatedNode]:
    """Run a node that has what a part needs."""
    async with simulated_node("4x-t4", driver="required" if needs == "processes" else "none") as node:
        if needs == "mps":
            await node.do("mps-daemon", {"command": "start"})
        yield node


async def use_gpu(node: SimulatedNode) -> None:
    """Let a process use the GPU that does not break, and exit."""
    name = f"client-{time.monotonic_ns()}"
    await node.do("process", {"command": "start", "name": name, "gpu": "0"})
    await asyncio.sleep(ASK_S)
    await node.do("process", {"command": "kill", "name": name})


def is_unhealthy(node: SimulatedNode, target: int) -> bool:
    """Whether the kubelet gives the broken GPU to no pod."""
    healthy = node.kubelet.devices(GPU).keys() - set(node.kubelet.unhealthy(GPU))
    return not any(device.startswith(uuids(node)[target]) for device in healthy)


async def break_gpu(node: SimulatedNode, row: Row, target: int) -> None:
    match row.case.fault:
        case "gpu lost":
            node.nvml.set_return(None, 15, gpu=target)
        case "xid":
            # As the driver does, which reports each XID twice; NVML answers all the same.
            node.nvml.push_xid(target, 95)
            await node.do("kernel-xid", {"xid": "95", "gpu": str(target)})
        case "kernel xid":
            await node.do("kernel-xid", {"xid": "79", "gpu": str(target)})
            node.nvml.set_return(None, 15, gpu=target)


def key_of(part: str) -> str:
    """Return the part as the seam names it."""
    return part.replace("start|", "thread|")


async def play(played: Sequence[Row], worst: dict[str, float]) -> None:
    """Run an agent, and for each row break a part of it and then a GPU, and check what the agent reports."""
    first = played[0]
    async with node_for(first.case.needs) as node, broken_agent(node, first) as (agent, injection):
        checks = Checks(agent)
        asking = asyncio.get_running_loop().create_task(checks.ask(), name="test-checks")
        try:
            for number, row in enumerate(played, 1):
                try:
                    await _play_row(row, number, node, agent, injection, checks, worst)
                except BaseException as error:
                    error.add_note(f"row: {row}")
                    raise
        finally:
            asking.cancel()
            await asyncio.wait({asking})
        if not asking.cancelled():
            asking.result()


async def _play_row(
    row: Row,
    target: int,
    node: SimulatedNode,
    agent: AgentProcess,
    injection: Path,
    checks: Checks,
    worst: dict[str, float],
) -> None:
    fault = injection / "fault"
    each = 2 if row.case.needs == "mps" else 1
    logged = 0 if row.part.startswith("start") else len(agent.log)
    if row.how in row.case.unlisted:
        await until(lambda: is_named(agent, row, logged), "the log names the part")
        fault.unlink()
    await wait_allocatable(node.kubelet, (5 - target) * each)
    if not row.part.startswith("start"):
        await until(lambda: checks.failing == frozenset(), "/readyz is 200 before")
        checks.failed = frozenset()
        for each_file in (fault, injection / "injected"):
            each_file.unlink(missing_ok=True)
        fault.write_text(f"{key_of(row.part)}|{row.how}")
    if row.owner.startswith("nvml-events") and not row.part.startswith("thread|nvml-event-wait"):
        # It waits until an event comes. NVML keeps no XID while no event set waits for any.
        asked = node.nvml.calls("nvmlDeviceRegisterEvents") + (0 if row.lasts else 4)
        node.nvml.set_return("nvmlEventSetWait_v2", 999)
        await injected(injection)
        waits = node.nvml.calls("nvmlEventSetWait_v2")
        if row.part == "task|nvml-events" and not row.lasts:
            await until(lambda: node.nvml.calls("nvmlEventSetWait_v2") > waits, "a wait fails")
        if row.part != "task|nvml-events" or row.how != "hangs":
            # Else the thread, which did not hang, would go on with the wait that it was in.
            node.nvml.clear_return("nvmlEventSetWait_v2")
        await until(lambda: node.nvml.calls("nvmlDeviceRegisterEvents") >= asked, "the GPUs are heard")
        if not row.lasts:
            # A wait that fails loses its set, and with it the XIDs until there is another one.
            waits = node.nvml.calls("nvmlEventSetWait_v2")
            await until(lambda: node.nvml.calls("nvmlEventSetWait_v2") > waits, "a wait begins")
    if row.case.kubelet_restarts:
        await node.kubelet.restart()
    if row.part.startswith("task"):
        await injected(injection)
    if row.how == "hangs" and row.case.is_over_at_restart:
        fault.unlink()
    began_ns, late_ns = time.monotonic_ns(), late_in(injection)
    await break_gpu(node, row, target)
    await node.kubelet.wait_for(lambda _: is_unhealthy(node, target), ROW_S)
    took_ns = time.monotonic_ns() - began_ns
    note_time(row, injection, took_ns, late_in(injection) - late_ns, worst)
    if row.outcome == "process ends":
        assert await agent.ended() != 0
        return
    if row.cover is not None:
        await lose(row.cover, node)
    await until_named(row, node, agent, checks, logged)
    if row.how == "hangs":
        node.nvml.clear_return("nvmlEventSetWait_v2")
        fault.unlink(missing_ok=True)
    await wait_allocatable(node.kubelet, (4 - target) * each if row.outcome == "one unhealthy" else 0)
    await check_answers(row, node, agent, checks)


async def until_named(
    row: Row, node: SimulatedNode, agent: AgentProcess, checks: Checks, logged: int
) -> None:
    """Return once /readyz and the lines of the log after so many have named the broken part."""
    xids = itertools.cycle((43, 13, 31, 45))
    async with asyncio.timeout(ROW_S):
        while not (
            (row.cover or is_named(agent, row, logged)) and (not row.check or checks.named(row.check))
        ):
            # Something to hear, to write and to read, for what only has to do then. An XID that repeats
            # is an event once a minute, and what programs cause has a writer of its own.
            node.nvml.push_xid(0, next(xids))
            if row.part.endswith("eventlog-writer"):
                await node.kubelet.restart()
            if row.case.needs == "processes":
                await use_gpu(node)
            with contextlib.suppress(OSError):
                await ask_slowly(node)
            await asyncio.sleep(ASK_S)


async def check_answers(row: Row, node: SimulatedNode, agent: AgentProcess, checks: Checks) -> None:
    """Check what /readyz, /preflight and ``gpu-agent status`` answer in the end."""
    if row.case.is_mute and row.how == "raises always":
        return
    preflight = await agent.wait_answer("/preflight", lambda _, body: bool(row.codes & codes(body)))
    assert preflight["ready"] is False
    if row.how != "raises always" and not row.case.stays:
        await until(lambda: checks.failing == frozenset(), "/readyz is 200 again")
    if not row.asks_status:
        return
    socket = node.directory.agent_flags()["control-socket"]
    shown = await gpu_agent("status", "-o", "json", "--control-socket", socket)
    assert shown.status == 0, shown.err
    document = json.loads(shown.out)
    assert document["ready"] is False
    assert row.codes & codes(document)


def note_time(row: Row, injection: Path, took_ns: int, late_ns: int, worst: dict[str, float]) -> None:
    """Check the time that a count took against the limit of the row that governs it.

    The limit is three periods, the deadline, and one probe. The time by which the agent's loop was late is
    that of a loaded machine, so it is taken off; and a poll counts that is up to a period late.
    """
    terms = terms_of(injection)
    governor, probe = terms[row.governor], terms[GPU_PROBER]
    limit_ns = governor.limit_ns + probe.least_period_ns + probe.deadline_ns
    own_ns = max(0, took_ns - late_ns)
    worst[row.part] = max(worst.get(row.part, 0), own_ns / limit_ns)
    slack_ns = STALE_PERIODS * governor.least_period_ns + SLACK_NS
    assert own_ns <= limit_ns + slack_ns, (str(row), took_ns, late_ns, governor)


def late_in(injection: Path) -> int:
    """Return by how much the agent's loop was late so far."""
    return int((injection / "late").read_bytes() or 0)


def terms_of(injection: Path) -> dict[SourceName, Terms]:
    """Return how often each part of the running agent has to give proofs."""
    lines = (line.split() for line in (injection / "terms").read_text().splitlines())
    return {SourceName(name): Terms(int(period), int(deadline)) for name, period, deadline in lines}


async def lose(cover: Cover, node: SimulatedNode) -> None:
    """Let happen what the hanging part alone would see at once, and wait until it is noticed."""
    specs = node.directory.cdi
    match cover.loss:
        case "spec file":
            await node.do("cdi", {"what": "delete"})
            await until(lambda: any(specs.glob("*.json")), "the spec file is there again")
        case "control node":
            node_file = node.directory.path / "dev" / "nvidia-modeset"
            assert any("nvidia-modeset" in file.read_text() for file in specs.glob("*.json"))
            node_file.unlink()
            await until(
                lambda: not any("nvidia-modeset" in file.read_text() for file in specs.glob("*.json")),
                "the spec file is without the node",
            )
        case "plugin socket":
            before = accepted(node.kubelet)
            next(node.directory.device_plugins.glob("nvidia*.sock")).unlink()
            await until(lambda: accepted(node.kubelet) > before, "it registers anew")
        case "device node":
            (node.directory.path / "dev" / "nvidia2").rename(node.directory.path / "nvidia2")
            await node.kubelet.wait_for(lambda _: uuids(node)[2] in node.kubelet.unhealthy(GPU), ROW_S)
            (node.directory.path / "nvidia2").rename(node.directory.path / "dev" / "nvidia2")


async def ask_slowly(node: SimulatedNode) -> None:
    """Connect to the control socket, and send the request when the connection was accepted."""
    _, writer = await asyncio.open_unix_connection(node.directory.agent_flags()["control-socket"])
    await asyncio.sleep(0.1)
    writer.write(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
    writer.close()


async def injected(injection: Path) -> None:
    """Return once the part broke."""
    await until((injection / "injected").exists, "the part broke")


def is_named(agent: AgentProcess, row: Row, logged: int) -> bool:
    """Whether a line of the log after so many names which part is broken."""
    reported = (line for line in agent.log[logged:] if line["level"] in {"warning", "error"})
    # Not by the answers to this test's own questions.
    texts = [str(line).replace("-", " ") for line in reported if line["logger"] != "agent.sinks.http.sink"]
    names = {name.replace("-", " ") for name in (row.owner, row.case.check or row.owner)}
    return any(name in text for text in texts for name in names)


def why_not(part: str) -> str | None:
    """Return why a part cannot be broken here."""
    if CASES[part].needs != "processes":
        return None
    if why := why_no_driver_double():
        return why
    return None if OBJECT.exists() else "the precompiled probe was not built"


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.xdist_group(f"injected-{number % SIDE_BY_SIDE}"))
        for number, part in enumerate(CASES)
    ],
)
async def test_a_broken_part_hides_no_broken_gpu_and_is_named(
    part: str, record_property: Callable[[str, object], None]
) -> None:
    why = why_not(part)
    if why is not None:
        pytest.skip(why)
    worst: dict[str, float] = {}
    async with asyncio.TaskGroup() as group:
        for played in plays(part):
            group.create_task(play(played, worst), name=str(played[0]))
    record_property(SHARE, f"{max(worst.values()):.2f}")


def test_the_table_in_the_documentation_is_that_of_the_suite() -> None:
    assert (Path(__file__).parent / "INJECTED.md").read_text() == table()


@pytest.mark.slow
@pytest.mark.parametrize("needs", MORE_FLAGS)
async def test_each_part_that_the_agent_has_is_in_the_table(needs: Needs) -> None:
    """A new task, thread, callback or write without a case fails here; the names are the agent's own."""
    part = next(part for part, case in CASES.items() if case.needs == needs)
    row = next(rows(part))._replace(part="none")
    each = 2 if needs == "mps" else 1
    async with node_for(needs) as node, broken_agent(node, row) as (agent, injection):
        await wait_allocatable(node.kubelet, 4 * each)
        await agent.wait_answer("/readyz", lambda status, _: status == 200)
        if needs == "processes":
            await use_gpu(node)
        node.nvml.push_xid(TARGET, 79)
        await wait_allocatable(node.kubelet, 3 * each)
        await agent.wait_answer("/preflight", lambda status, _: status == 503)
        known = {key_of(part) for part in CASES}
        assert set((injection / "parts").read_text().split("\n")) - known == {""}


def test_each_part_that_vouches_for_something_is_in_the_table() -> None:
    tasks = {part.partition("|")[2] for part in CASES if part.startswith("task")}
    # The loop's own measurement ends the process when it fails.
    assert {str(each.task) for each in VOUCHERS.values()} - tasks == {"loop"}
