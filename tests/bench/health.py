"""S1 and S15: how soon the kubelet hears of an unhealthy GPU, and that no pod gets one."""

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from agent.simulation.kubelet import Allocation
from agent.simulation.presets import NodeSpec
from agent.simulation.roots import write_boot_id
from tests.bench import yardstick
from tests.bench.figures import Effort, Figure, Measurement, MeasurementError, beside_yardstick
from tests.bench.node import GPU, BenchNode, MeasuredAgent, bench_node, free_port
from tests.bench.scrape import Scrapers
from tests.bench.socket_watcher import SocketWatcher
from tests.bench.waiting import Bystander, Trial, agent_cpu, undisturbed_beside_yardstick

APPLICATION_XID: Final = 94
"""Flips a GPU, which recovers by itself when probes pass."""
_RESET_XID: Final = 79
"""Flips a GPU until it was reset."""

FAST_RECOVERY: Final = {
    "recovery-clean-probes": "1",
    "recovery-quiet": "20ms",
    "flapping-faults": "100",
    "flapping-within": "1s",
}
"""So that there can be hundreds of trials; the way from the XID to the kubelet is the same."""
BETWEEN_S: Final = (0.055, 0.075)
"""Longer than the window in which changes are gathered into one message."""


async def _xid_to_message(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Push an XID; from NVML's event wait returning it to the ListAndWatch message being on the socket.

    The library notes when the wait returns, just before it leaves its C code; a watcher beside the kubelet
    notes when its read of the socket returns. Included: pynvml, the thread's way into the loop, the core, the
    message, and writing it to the kubelet first. The yardstick runs on a node of its own, and takes turns.
    ``to_kubelet`` ends when the emulated kubelet's program holds the message, so it has its gRPC client in
    it. ``50_scrapers``: as many clients ask over HTTP, ten times a second each. ``undisturbed``: only trials
    in which all threads of agent and kubelet waited less than 0.1 ms for a CPU. ``cpu``: what the agent ran
    from the XID until the kubelet had the message.
    """
    trials = effort.of(quick=16, usual=200, full=500)
    address = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(xid_target(flags=FAST_RECOVERY | {"http-listen": address}))
        beside = await stack.enter_async_context(xid_target(program=(yardstick.PROGRAM,)))
        calm, beside_calm = await xids_in_turn(ours, beside, trials)
        async with Scrapers(address, 50):
            busy, _ = await xids_in_turn(ours, beside, trials)
    name = "S1.xid_to_socket"
    socket_ns, beside_ns = [each.socket_ns for each in calm], [each.socket_ns for each in beside_calm]
    seen, beside_seen = [each.seen for each in calm], [each.seen for each in beside_calm]
    for figure in beside_yardstick(name, socket_ns, beside_ns, p50=1.3, p99=1.5):
        yield figure
    for figure in undisturbed_beside_yardstick(name, seen, beside_seen, p50=1.3, p99=1.5):
        yield figure
    ran_ns, beside_ran_ns = [each.ran_ns for each in seen], [each.ran_ns for each in beside_seen]
    for figure in agent_cpu(name, ran_ns, yardstick_ns=beside_ran_ns):
        yield figure
    kubelet_ns = [each.kubelet_ns for each in calm]
    beside_kubelet_ns = [each.kubelet_ns for each in beside_calm]
    for figure in beside_yardstick("S1.xid_to_kubelet", kubelet_ns, beside_kubelet_ns, p50=1.3, p99=1.5):
        yield figure
    busy_ns = [each.socket_ns for each in busy]
    for figure in beside_yardstick(f"{name}_50_scrapers", busy_ns, beside_ns, p50=3, p99=3):
        yield figure


@dataclass(frozen=True, slots=True)
class XidTrial:
    """How long the message of one XID took."""

    socket_ns: int
    kubelet_ns: int
    seen: Trial


@dataclass(frozen=True, slots=True)
class XidTarget:
    """A device plugin on a node of its own, whose GPUs get XIDs."""

    node: BenchNode
    agent: MeasuredAgent
    watcher: SocketWatcher
    bystander: Bystander
    devices: int

    async def trial(self, gpu: int) -> XidTrial:
        """Push an XID and see how long it takes to be heard of."""
        node = self.node
        self.bystander.begin()
        lists = node.kubelet.statistics().lists
        event = node.simulated.nvml.push_xid(gpu, APPLICATION_XID)
        await node.wait(lambda kubelet: kubelet.statistics().lists > lists, "the message of an XID")
        heard = node.kubelet.lists[lists - node.kubelet.statistics().lists]
        returned_ns = node.simulated.nvml.event_times(event).returned_ns
        names, wanted = heard.unhealthy, self.devices // len(node.uuids)
        is_other = wanted == 1 and names != (node.uuids[gpu],)
        if len(names) != wanted or is_other or returned_ns is None:
            raise MeasurementError(f"the message of an XID on {node.uuids[gpu]} named {names}")
        socket_ns = await self.watcher.message_after(returned_ns) - returned_ns
        return XidTrial(socket_ns, heard.at_ns - returned_ns, self.bystander.trial(socket_ns))


@asynccontextmanager
async def xid_target(
    spec: NodeSpec | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    program: Sequence[str] = ("agent", "run"),
    devices: int | None = None,
) -> AsyncIterator[XidTarget]:
    """Run a device plugin on a node; ``devices`` is how many it advertises, if not one for each GPU."""
    async with bench_node(spec) as node:
        with node.agent(flags, program=program) as agent:
            await agent.registered()
            advertised = devices or len(node.uuids)
            await node.wait_allocatable(advertised)
            async with SocketWatcher(node.plugin_socket) as watcher:
                yield XidTarget(node, agent, watcher, Bystander(agent.pid), advertised)
            await agent.end()


async def xids_in_turn(
    ours: XidTarget, beside: XidTarget, count: int
) -> tuple[list[XidTrial], list[XidTrial]]:
    """Push so many XIDs at each of two device plugins in turn, each when the one before is over."""
    rng = random.Random(1)
    trials: tuple[list[XidTrial], list[XidTrial]] = [], []
    for number in range(count):
        for target, made in zip((ours, beside), trials, strict=True):
            await target.node.wait_allocatable(target.devices)
            await asyncio.sleep(rng.uniform(*BETWEEN_S))
            made.append(await target.trial(number % len(target.node.uuids)))
    return trials


@dataclass(slots=True)
class _PodStream:
    """Pods that come one after another without a pause, and the devices they are given.

    ``known_unhealthy`` is when the kubelet first got a device as unhealthy: from then on the agent knows.
    """

    node: BenchNode
    given: int = 0
    known_unhealthy: dict[str, int] = field(default_factory=dict)
    unhealthy_given: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Run pods without end, each as soon as the node shows a GPU."""
        kubelet = self.node.kubelet
        for number in itertools.count():
            await self.node.wait(lambda seen: seen.allocatable(GPU) > 0, "an allocatable GPU")
            outcome = await kubelet.run_pod(f"pod-{number}", "bench", {"main": {GPU: 1}})
            kubelet.delete_pod(outcome.name, outcome.namespace)
            if outcome.running:
                self._check(kubelet.allocations[-1])

    def _check(self, allocation: Allocation) -> None:
        self.given += 1
        for device in allocation.ids:
            known_ns = self.known_unhealthy.get(device)
            if known_ns is not None and allocation.at_ns >= known_ns:
                self.unhealthy_given.append(device)

    async def some_more(self, pods: int) -> None:
        """Wait until so many pods more were given a device."""
        until = self.given + pods
        await self.node.wait(lambda _kubelet: self.given >= until, f"{pods} pods")

    async def break_gpu(self, gpu: int) -> None:
        """Let a GPU fail for good, and wait until the kubelet knows."""
        uuid = self.node.uuids[gpu]
        self.node.simulated.nvml.push_xid(gpu, _RESET_XID)
        await self.node.wait(lambda kubelet: uuid in kubelet.unhealthy(GPU), "the unhealthy GPU")
        self.known_unhealthy[uuid] = time.monotonic_ns()


async def _unhealthy_devices(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Let GPUs fail while pods come without a pause, and restart what could forget it.

    Round after round on a new boot: one GPU fails, the kubelet restarts, a second fails, the agent is
    replaced, a third fails, the agent is killed and replaced; both at a random moment within a second of the
    fault. In each state a share of the pods is run. Counted are pods that an Allocate gave a device the
    kubelet knew to be unhealthy.
    """
    pods = effort.of(quick=60, usual=1000)
    share = effort.of(quick=5, usual=25)
    rng = random.Random(15)
    async with bench_node() as node:
        stream = _PodStream(node)
        for boots in itertools.count(2):
            write_boot_id(node.simulated.directory.path / "proc", boots=boots)
            stream.known_unhealthy.clear()
            with ExitStack() as stack:
                agent = stack.enter_context(node.agent())
                await agent.ready()
                async with _meanwhile(stream):
                    agent = await _round(stream, agent, stack, share=share, rng=rng)
                await agent.end()
            if stream.given >= pods:
                break
    yield Figure("S15.pods_given_a_device", stream.given, "pods", pods, at_least=True)
    yield Figure("S15.pods_given_an_unhealthy_device", len(stream.unhealthy_given), "pods", 0)


async def _round(
    stream: _PodStream, agent: MeasuredAgent, stack: ExitStack, *, share: int, rng: random.Random
) -> MeasuredAgent:
    """Go through one boot; returns the agent that runs at its end."""
    node = stream.node
    slots = rng.sample(range(len(node.uuids)), 3)
    await stream.break_gpu(slots[0])
    await stream.some_more(share)
    await node.kubelet.restart()
    await stream.some_more(share)
    for gpu, number in zip(slots[1:], (signal.SIGTERM, signal.SIGKILL), strict=True):
        await stream.break_gpu(gpu)
        await asyncio.sleep(rng.uniform(0, 1))
        await agent.end(number)
        agent = stack.enter_context(node.agent())
        await agent.registered()
        await stream.some_more(share)
    return agent


@asynccontextmanager
async def _meanwhile(stream: _PodStream) -> AsyncIterator[None]:
    """Run pods beside the block; what goes wrong with them is raised here."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stream.run(), name="bench-pods")
        yield
        running.cancel()


XID_TO_MESSAGE: Final = Measurement("S1", "XID returned by NVML -> ListAndWatch message", _xid_to_message)
UNHEALTHY_DEVICES: Final = Measurement("S15", "pods given a device known to be unhealthy", _unhealthy_devices)
