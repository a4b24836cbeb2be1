"""The engine: one publication for each batch, before its effects; a Tick when the core asked for it."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from agent import engine
from agent.bus import Inbox, Latest
from agent.core.freshness import Terms
from agent.core.health.reducer import IDLE_NS, step
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import State, initial_state
from agent.engine import Engine
from agent.model.components import GPU_PROBER
from agent.model.effects import Effect, EventKind, ProbeGpus, RecordEvent, RegisterResource, RestartComponent
from agent.model.facts import (
    DriverReady,
    Fact,
    GpuProbePassed,
    GpusEnumerated,
    KubeletSocketSeen,
    TaskReported,
    XidReported,
)
from agent.model.gpu import Gpu
from agent.model.health import Health
from agent.model.ids import ComponentId, GpuUuid, SocketIdentity, SourceName
from agent.model.policy import MILLISECOND_NS, SECOND_NS, Policy
from agent.model.snapshot import Snapshot
from agent.proofs import Proofs

U0 = GpuUuid("GPU-0")
GPU = Gpu(
    uuid=U0,
    index=0,
    minor=0,
    name="simulated",
    pci="0000:3b:00.0",
    memory_bytes=2**30,
    compute_capability=(9, 0),
    numa_node=None,
)
READY = DriverReady("570", "12.570", (12, 8))
FOUND = GpusEnumerated((GPU,))
KUBELET = KubeletSocketSeen(SocketIdentity(1, 2, 3))

TERMS = Terms(period_ns=5 * SECOND_NS, deadline_ns=2 * SECOND_NS)


class Bench:
    """An engine with its inbox and its output."""

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        max_idle_ns: int = 3600 * SECOND_NS,
        capacity: int = 100,
        again: Callable[[int], Fact] | None = None,
        frozen: bool = False,
    ) -> None:
        """With ``frozen`` the test advances the time."""
        self.again = again
        self.now_ns = time.monotonic_ns()
        clock: Callable[[], int] = (lambda: self.now_ns) if frozen else time.monotonic_ns
        state = initial_state(policy or Policy(), None, now_ns=clock())
        self.inbox: Inbox[Fact] = Inbox(clock=clock, capacity=capacity)
        self.latest: Latest[Snapshot] = Latest(snapshot_of(state))
        self.performed: list[tuple[int, Effect]] = []
        """Each effect, with the version that was published when it was performed."""
        self.fed: list[int] = []
        self.registering = asyncio.Event()
        self.proofs = Proofs(clock=clock)
        self.engine = Engine(
            inbox=self.inbox,
            state=state,
            latest=self.latest,
            perform=self.perform,
            after_step=self.fed.append,
            clock=clock,
            proofs=self.proofs,
            probe_terms=TERMS,
            max_idle_ns=max_idle_ns,
        )

    def perform(self, effect: Effect) -> None:
        self.performed.append((self.latest.version, effect))
        if isinstance(effect, RegisterResource):
            self.registering.set()
        if self.again is not None:
            self.put(self.again(len(self.performed)))

    def put(self, *facts: Fact) -> None:
        for fact in facts:
            self.inbox.put(fact)

    def health(self) -> Health:
        """Return the health of the only GPU."""
        (view,) = self.latest.value.gpus
        return view.health

    def messages(self) -> list[str]:
        return [effect.event.message for _, effect in self.performed if isinstance(effect, RecordEvent)]

    async def run_until(self, reached: asyncio.Event) -> None:
        """Run the engine until an event is set."""
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.engine.run(), name="engine")
            await reached.wait()
            running.cancel()


@pytest.fixture
def frozen() -> Iterator[Bench]:
    made = Bench(frozen=True)
    yield made
    made.inbox.close()


class Keyless:
    key = None
    source = SourceName("probe")


class UnhandledFact:
    key = ("unhandled",)
    source = SourceName("test")


@pytest.fixture
def bench_of() -> Iterator[Callable[..., Bench]]:
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> Bench:
            made = Bench(**settings)
            stack.callback(made.inbox.close)
            return made

        yield make


@pytest.fixture
def bench(bench_of: Callable[..., Bench]) -> Bench:
    return bench_of()


def test_a_batch_is_published_once_and_before_its_effects(bench: Bench) -> None:
    bench.put(READY, FOUND, GpuProbePassed(U0), KUBELET)
    bench.engine.step_once()
    assert bench.latest.version == 1
    assert len(bench.performed) > 3
    assert {version for version, _ in bench.performed} == {1}
    assert bench.latest.value.resources[0].allocatable == 1
    assert isinstance(bench.performed[-1][1], RegisterResource)


def test_effects_are_in_the_order_of_the_facts(bench: Bench) -> None:
    bench.put(READY, FOUND, GpuProbePassed(U0), KUBELET)
    bench.engine.step_once()
    kinds = [effect.event.kind for _, effect in bench.performed if isinstance(effect, RecordEvent)]
    assert kinds[0] is EventKind.DRIVER
    assert kinds[-1] is EventKind.KUBELET


def test_a_batch_that_changes_nothing_is_not_published_but_feeds_the_watchdog(bench: Bench) -> None:
    bench.put(XidReported(None, 79))
    bench.engine.step_once()
    bench.engine.step_once()
    assert bench.latest.version == 0
    assert bench.messages() == ["An XID of an unknown device marks no device"]
    assert len(bench.fed) == 2
    assert bench.fed == sorted(bench.fed)


def test_losses_are_reported_before_the_facts_after_them(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(capacity=0)
    bench.put(cast("Fact", Keyless()), READY)
    bench.engine.step_once()
    assert bench.messages() == ["Facts were lost because the inbox was full", "NVML was initialised"]


def test_a_fact_that_the_core_fails_on_stops_the_batch_and_the_others_wait_for_the_next(
    bench: Bench,
) -> None:
    bench.put(READY, cast("Fact", UnhandledFact()), FOUND)
    with pytest.raises(KeyError):
        bench.engine.step_once()
    assert bench.fed == []
    assert bench.latest.version == 1
    assert bench.messages() == ["NVML was initialised"]
    bench.put(GpuProbePassed(U0))
    bench.engine.step_once()
    assert bench.latest.version == 2
    assert bench.latest.value.resources[0].allocatable == 1
    assert bench.latest.value.facts_lost == {"test": 1}
    assert len(bench.fed) == 1


@pytest.mark.parametrize("failures", [1, 9])
def test_a_hard_fact_on_which_the_core_fails_is_retried_and_then_its_gpu_is_unhealthy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    left = failures

    def failing(state: State, fact: Fact, now_ns: int) -> tuple[State, tuple[Effect, ...], int]:
        nonlocal left
        if isinstance(fact, XidReported) and left:
            left -= 1
            raise KeyError(79)
        return step(state, fact, now_ns)

    monkeypatch.setattr(engine, "step", failing)
    bench.put(READY, FOUND, GpuProbePassed(U0))
    bench.engine.step_once()
    bench.put(XidReported(gpu=U0, xid=79))
    with pytest.raises(KeyError):
        bench.engine.step_once()
    bench.engine.step_once()
    bench.put(GpuProbePassed(U0))
    bench.engine.step_once()

    snapshot = bench.latest.value
    if failures == 1:
        assert (bench.health(), snapshot.failed_facts) == (Health.UNHEALTHY, ())
        return
    assert bench.health() is Health.UNKNOWN
    assert not snapshot.ready
    assert "XidReported" in snapshot.failed_facts[0]
    assert [effect for _, effect in bench.performed if isinstance(effect, ProbeGpus)] == [ProbeGpus()]


async def test_facts_are_handled_when_they_are_put(bench: Bench) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.engine.run(), name="engine")
        await asyncio.sleep(0)
        bench.put(READY, FOUND, GpuProbePassed(U0), KUBELET)
        await bench.registering.wait()
        running.cancel()
    assert bench.latest.value.resources[0].allocatable == 1


async def test_the_core_is_stepped_when_it_asked_for_it(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(policy=Policy(first_probe_wait_ns=5 * MILLISECOND_NS))
    bench.put(READY, FOUND, KUBELET)
    began_ns = time.monotonic_ns()
    await bench.run_until(bench.registering)
    assert time.monotonic_ns() - began_ns < IDLE_NS


async def test_the_watchdog_is_fed_although_nothing_happens(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(max_idle_ns=MILLISECOND_NS)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.engine.run(), name="engine")
        while len(bench.fed) < 5:
            await asyncio.sleep(0)
        running.cancel()
    assert bench.latest.version == 0


async def test_an_engine_that_is_never_idle_yields_to_other_tasks(bench_of: Callable[..., Bench]) -> None:
    endless = SourceName("endless")
    bench: Bench = bench_of(again=lambda done: TaskReported(endless, running=done % 2 == 1))
    bench.put(TaskReported(endless, running=False))
    turns = 0
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.engine.run(), name="engine")
        while len(bench.performed) < 50:
            await asyncio.sleep(0)
            turns += 1
        running.cancel()
    assert turns >= 50


def test_a_gpu_whose_probes_stop_is_unknown_until_the_next_and_its_prober_is_restarted(
    frozen: Bench,
) -> None:
    frozen.put(READY, FOUND, GpuProbePassed(U0))
    frozen.engine.step_once()
    health = [frozen.health()]
    for _ in range(25):
        frozen.now_ns += SECOND_NS
        frozen.engine.step_once()
        health.append(frozen.health())
    assert health.index(Health.UNKNOWN) == TERMS.limit_ns // SECOND_NS
    restarted = [effect.component for _, effect in frozen.performed if isinstance(effect, RestartComponent)]
    assert restarted == [ComponentId(GPU_PROBER, U0)]

    frozen.put(GpuProbePassed(U0))
    frozen.engine.step_once()
    assert frozen.health() is Health.HEALTHY


def test_polls_that_go_on_keep_a_gpu_known(frozen: Bench) -> None:
    frozen.put(READY, FOUND)
    for _ in range(100):
        frozen.put(GpuProbePassed(U0))
        frozen.now_ns += TERMS.period_ns
        frozen.engine.step_once()
        assert frozen.health() is Health.HEALTHY
