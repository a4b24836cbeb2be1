"""S4, S5 and S14: start, stop, and what a restart of the agent costs the node."""

import asyncio
import itertools
import random
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from agent.simulation.kubelet import PodOutcome
from tests.bench import yardstick
from tests.bench.figures import (
    NS_PER_MS,
    Effort,
    Figure,
    Measurement,
    MeasurementError,
    beside_yardstick,
    median_and_tail,
    quantile,
)
from tests.bench.node import GPU, PATIENCE_S, BenchNode, MeasuredAgent, bench_node, free_port
from tests.bench.waiting import times_of


async def _start(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Start the agent on a node whose kubelet runs; from before the process is made to Register answered.

    Includes the interpreter, imports (bytecode is compiled by then), NVML's init in the simulated library,
    the first probe of each of 8 GPUs, and the kubelet dialling back. The yardstick takes turns. The first
    start of each does not count: it fills the page cache. ``with_cpu`` is the time less what the main thread
    waited for a CPU in it; ``cpu`` what all threads ran until then.
    """
    ours: list[_Start] = []
    beside: list[_Start] = []
    async with bench_node() as node:
        for _ in range(1 + effort.of(quick=4, usual=20)):
            ours.append(await _started(node, ("agent", "run")))
            beside.append(await _started(node, (yardstick.PROGRAM,)))
    for part in ("took", "with_cpu", "cpu"):
        values, others = ([getattr(each, f"{part}_ns") for each in made[1:]] for made in (ours, beside))
        name = "S4.start_to_registered" + ("" if part == "took" else f"_{part}")
        (median, _) = beside_yardstick(name, values, others, p50=1.5, p99=1.5)
        yield median


@dataclass(frozen=True, slots=True)
class _Start:
    """One start until Register was answered."""

    took_ns: int
    with_cpu_ns: int
    cpu_ns: int


async def _started(node: BenchNode, program: Sequence[str]) -> _Start:
    with node.agent(program=program) as agent:
        registration = await agent.registered()
        took_ns = registration.at_ns - agent.began_ns
        main, process = times_of(f"{agent.pid}/task/{agent.pid}"), agent.cpu_s()
        await agent.ready()
        await agent.end()
    return _Start(took_ns, took_ns - main.waited_ns, int(process * 1e9))


async def _stop(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Send SIGTERM to an agent that serves the kubelet and HTTP; until its process is gone, with status 0.

    A socket left is a file of the plugin's or control socket's name that is still there afterwards.
    """
    times_ns: list[int] = []
    left = 0
    async with bench_node() as node:
        leavable = (node.plugin_socket, node.simulated.directory.agent / "control.sock")
        for _ in range(effort.of(quick=4, usual=20)):
            with node.agent({"http-listen": f"127.0.0.1:{free_port()}"}) as agent:
                await agent.ready()
                await _wait_exists(leavable)
                times_ns.append(await agent.end())
            left += sum(path.exists() for path in leavable)
    yield Figure("S5.sigterm_to_exit.p50", quantile(times_ns, 0.5) / NS_PER_MS, "ms", 1000)
    yield Figure("S5.sigterm_to_exit.max", max(times_ns) / NS_PER_MS, "ms", 5000)
    yield Figure("S5.sockets_left", left, "files", 0)


async def _wait_exists(paths: tuple[Path, ...]) -> None:
    """Wait for files of another process, which cannot be awaited otherwise without a watch of its own."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not all(path.exists() for path in paths):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise MeasurementError(f"the agent did not make all of {', '.join(map(str, paths))}") from None


@dataclass(slots=True)
class _Pods:
    """Pods that want one GPU each, placed as a scheduler does: only while the node shows a free one.

    This scheduler sees the node without delay, so what it gets wrong is the agent's doing. Pods are
    deleted at once, so that a GPU is always free.
    """

    node: BenchNode
    per_s: float
    rng: random.Random
    placed: int = 0
    rejected: list[PodOutcome] = field(default_factory=list)

    async def run(self) -> None:
        """Place pods without end."""
        kubelet = self.node.kubelet
        for number in itertools.count():
            await asyncio.sleep(self.rng.expovariate(self.per_s))
            await kubelet.wait_for(lambda seen: seen.allocatable(GPU) > 0, PATIENCE_S)
            outcome = await kubelet.run_pod(f"pod-{number}", "bench", {"main": {GPU: 1}})
            kubelet.delete_pod(outcome.name, outcome.namespace)
            self.placed += 1
            if not outcome.running:
                self.rejected.append(outcome)


async def _restart(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Replace the agent of a node with healthy GPUs, while pods come; how long the node shows too few GPUs.

    ``restart``: the next process is started when the last one is gone, as a supervisor without a pause does.
    ``upgrade``: the next one stands by already, as in a surge update. The gap is from the first change of
    the kubelet's view below 8 to the change back to 8, so it includes the drain, for a restart also the
    start, and the registration. Pods come at random, one a second with ``--full``, else ten a second.
    """
    restarts = effort.of(quick=4, usual=40, full=1000)
    upgrades = effort.of(quick=2, usual=15, full=200)
    pods_per_s = effort.of(quick=10, usual=10, full=1)
    async with bench_node() as node:
        pods = _Pods(node, pods_per_s, random.Random(14))
        with ExitStack() as stack:
            agent = stack.enter_context(node.agent())
            await agent.ready()
            async with _meanwhile(pods):
                restart_gaps_ns = []
                for _ in range(restarts):
                    await _pause(pods.rng)
                    agent, gap_ns = await _replace(node, agent, stack)
                    restart_gaps_ns.append(gap_ns)
                upgrade_gaps_ns = []
                for _ in range(upgrades):
                    await _pause(pods.rng)
                    agent, gap_ns = await _hand_over(node, agent, stack)
                    upgrade_gaps_ns.append(gap_ns)
            await agent.end()
    for figure in median_and_tail("S14.restart_gap", restart_gaps_ns, p50_ms=300, p99_ms=300):
        yield figure
    for figure in median_and_tail("S14.upgrade_gap", upgrade_gaps_ns, p50_ms=300, p99_ms=300):
        yield figure
    yield Figure("S14.pods_placed", pods.placed, "pods", 1, at_least=True)
    yield Figure("S14.pods_rejected", len(pods.rejected), "pods", 0)


@asynccontextmanager
async def _meanwhile(pods: _Pods) -> AsyncIterator[None]:
    """Place pods beside the block; what goes wrong with them is raised here."""
    async with asyncio.TaskGroup() as tasks:
        placing = tasks.create_task(pods.run(), name="bench-pods")
        yield
        placing.cancel()


async def _pause(rng: random.Random) -> None:
    """Let pods that waited for the node be placed, so that a restart meets pods by chance alone."""
    await asyncio.sleep(rng.uniform(0.1, 0.3))


async def _replace(node: BenchNode, old: MeasuredAgent, stack: ExitStack) -> tuple[MeasuredAgent, int]:
    """Start a new agent when the old one is gone; returns it and the gap."""
    began_ns = time.monotonic_ns()
    await old.end()
    new = stack.enter_context(node.agent())
    await new.ready()
    return new, _gap_ns(node, began_ns)


async def _hand_over(node: BenchNode, old: MeasuredAgent, stack: ExitStack) -> tuple[MeasuredAgent, int]:
    """Let a new agent stand by, then end the old one; returns the new one and the gap."""
    with _NotifySocket(node.simulated.directory.path / "notify.sock") as notified:
        new = stack.enter_context(
            node.agent({"if-running": "standby"}, environment={"NOTIFY_SOCKET": str(notified.path)})
        )
        await notified.wait("STATUS=standby")
        await notified.wait("READY=1")
        began_ns = time.monotonic_ns()
        await old.end()
        await new.ready()
    return new, _gap_ns(node, began_ns)


def _gap_ns(node: BenchNode, since_ns: int) -> int:
    """Return how long the kubelet showed fewer GPUs than the node has."""
    whole = len(node.uuids)
    changes = [
        change
        for change in node.kubelet.change_history
        if change.at_ns >= since_ns and change.resource == GPU
    ]
    below = [change.at_ns for change in changes if change.allocatable < whole]
    back = [change.at_ns for change in changes if change.allocatable == whole]
    if not below or not back:
        raise MeasurementError(f"a restart changed nothing at the kubelet: {node.kubelet.describe()}")
    return back[-1] - below[0]


class _NotifySocket:
    """What a supervisor listens on (sd_notify(3)), so that a standby is known to be ready."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._received = ""

    def __enter__(self) -> Self:
        self._socket.bind(str(self.path))
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self.path.unlink()

    async def wait(self, text: str) -> None:
        """Wait until something that begins like this was notified."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while f"\n{text}" not in self._received:
                    self._received += "\n" + (await loop.sock_recv(self._socket, 4096)).decode()
        except TimeoutError:
            raise MeasurementError(f"the agent that stands by did not send {text}") from None


START: Final = Measurement("S4", "process start -> registered", _start)
STOP: Final = Measurement("S5", "SIGTERM -> exit 0, no socket left", _stop)
RESTART: Final = Measurement("S14", "allocatable gap of an agent restart or upgrade", _restart)
