"""Random sequences of processes' calls on the driver double: each usage snapshot matches the driver's books.

REGISTER_FD is among it: a process closes nvidiactl and keeps GPUs that were registered to it. In the second
test the agent is restarted in the middle, and things happen while there is none.
GPU_AGENT_SEQUENCES is the number of sequences, GPU_AGENT_FIRST_SEED their first seed.
"""

import os
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.errors import SourceError
from agent.probe.request import Doubles, Request
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import UVM_MAJOR
from agent.simulation.gpu_processes.process import SimulatedProcess
from tests.probe.test_workloads import GPUS, Machine
from tests.probe.watcher import watching

pytestmark = pytest.mark.slow

FIRST_SEED = int(os.environ.get("GPU_AGENT_FIRST_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("GPU_AGENT_SEQUENCES", "3")))
STEPS = 8
MAX_PROCESSES = 4
MAX_CONTEXTS = 3


@dataclass(eq=False)
class Actor:
    """A process, and what it may still do without a mistake of its own."""

    process: SimulatedProcess
    contexts: int = 0
    uses_cuda: bool = True
    """False: it is a copy of another, or lost a descriptor that CUDA goes on to use."""


class Play:
    """One sequence."""

    def __init__(self, machine: Machine, chance: random.Random) -> None:
        self.machine = machine
        self.chance = chance
        self.actors: list[Actor] = []
        self.played: list[str] = []

    async def step(self) -> None:
        """Let something happen."""
        choices: list[tuple[Callable[[Actor], Awaitable[None]], Actor]] = [
            (act, actor) for actor in self.actors for act in (self.ends, self.is_killed, *self.of_cuda(actor))
        ]
        if len(self.actors) < MAX_PROCESSES and (not choices or self.chance.random() < 0.4):
            self.played.append("begins")
            self.actors.append(Actor(await self.machine.process()))
            await self.creates(self.actors[-1])
            return
        act, actor = self.chance.choice(choices)
        self.played.append(f"{act.__name__} {actor.process.pid}")
        await act(actor)

    def of_cuda(self, actor: Actor) -> tuple[Callable[[Actor], Awaitable[None]], ...]:
        if not actor.uses_cuda:
            return ()
        always = (self.creates, self.creates, self.execs)
        with_contexts = (self.destroys, self.forks, self.closes_all, self.closes_range, self.gives)
        return (*always, *with_contexts, self.closes_control, self.copies) if actor.contexts else always

    async def creates(self, actor: Actor) -> None:
        count = self.chance.randint(1, MAX_CONTEXTS)
        await actor.process.create(self.chance.randrange(len(GPUS)), count)
        actor.contexts += count

    async def destroys(self, actor: Actor) -> None:
        count = self.chance.randint(1, actor.contexts)
        await actor.process.destroy(count)
        actor.contexts -= count

    async def forks(self, actor: Actor) -> None:
        child = await self.machine.fork(actor.process, "child")
        self.actors.append(Actor(child, uses_cuda=False))

    async def copies(self, actor: Actor) -> None:
        await actor.process.command("dup")

    async def closes_control(self, actor: Actor) -> None:
        """The GPUs' files that were registered to it keep it, and the contexts."""
        copy = (await actor.process.command("dup"))["descriptor"]
        await actor.process.command("close", descriptor=copy)
        actor.uses_cuda = False

    async def closes_all(self, actor: Actor) -> None:
        await actor.process.command("close")
        actor.contexts = 0

    async def closes_range(self, actor: Actor) -> None:
        await actor.process.command("close-range")
        actor.contexts = 0

    async def execs(self, actor: Actor) -> None:
        await actor.process.exec()
        actor.contexts = 0

    async def gives(self, actor: Actor) -> None:
        others = [other for other in self.actors if other is not actor]
        if not others:
            return
        await actor.process.give(self.chance.choice(others).process)
        actor.contexts = 0

    async def ends(self, actor: Actor) -> None:
        self.actors.remove(actor)
        await actor.process.exit()

    async def is_killed(self, actor: Actor) -> None:
        self.actors.remove(actor)
        await actor.process.kill()


@pytest.fixture
async def double() -> AsyncIterator[DriverDouble]:
    try:
        started = await DriverDouble.start(GPUS, version="570.148.08")
    except SourceError as error:
        pytest.skip(str(error))
    async with started:
        yield started


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[str]:
    mounted = tmp_path / "bpf"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "bpf", "-o", "mode=700", "bpf", mounted], check=False).returncode:
        pytest.skip("bpffs cannot be mounted here")
    yield str(mounted / "gpu-agent")
    subprocess.run(["umount", mounted], check=True)


def request_of(double: DriverDouble, loader: dict[str, Any], pins: str = "") -> Request:
    return Request(doubles=Doubles(filesystem=double.file_system, uvm_major=UVM_MAJOR), pins=pins, **loader)


async def _agrees(play: Play, seed: int) -> None:
    try:
        await play.machine.watcher.agrees()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, after {play.played}: {error}") from error


async def test_every_snapshot_matches_the_books(loader: dict[str, Any], double: DriverDouble) -> None:
    async with watching(double, GPUS, request_of(double, loader)) as watcher:
        for seed in SEEDS:
            async with AsyncExitStack() as stack:
                play = Play(Machine(double, watcher, stack), random.Random(seed))
                for _ in range(STEPS):
                    await play.step()
                    await _agrees(play, seed)
            assert await watcher.agrees() == {}


async def test_every_snapshot_matches_the_books_after_a_restart_in_the_middle(
    loader: dict[str, Any], double: DriverDouble, pins: str
) -> None:
    request = request_of(double, loader, pins)
    for seed in SEEDS:
        async with AsyncExitStack() as stack:
            async with watching(double, GPUS, request) as watcher:
                play = Play(Machine(double, watcher, stack), random.Random(seed))
                for _ in range(STEPS // 2):
                    await play.step()
                await _agrees(play, seed)
            # No agent runs.
            await play.step()
            await play.step()
            async with watching(double, GPUS, request) as watcher:
                assert watcher.probe.was_kept
                play.machine.watcher = watcher
                await _agrees(play, seed)
                await play.step()
                await _agrees(play, seed)
