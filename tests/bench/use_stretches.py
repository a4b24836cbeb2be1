"""How long the use of GPUs keeps the loop at one stretch, with a thousand processes.

Each process has ten contexts and twelve files of the driver open. Figures are CPU time of the thread: the
longest of its kind in a run, and of some runs the shortest, so that other work on the machine counts little.
"""

import gc
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Final, TypeVar

from agent.core.leaks import findings as leaks
from agent.core.leaks.rules import EvaluationInput
from agent.core.usage.client_tree import CONTEXT_SHARE, DEVICE, NO_INSTANCE
from agent.core.usage.gpu_map import CONTROL, NVIDIA_MAJOR, GpuMap
from agent.core.usage.processes import by_process
from agent.core.usage.rows import live_rows
from agent.core.usage.tracker import Tracker
from agent.model.ids import GpuUuid, Placement
from agent.model.policy import LeakPolicy
from agent.model.rm import HeldFile, RmEvent, RmEventKind, RmObject
from agent.model.structs import replace
from agent.model.usage import PodRef, Pods, PodSeen, PodUid, ProcessKey, ProcessStatus, Usage
from agent.probe.ring import Ring
from agent.sources.ebpf.source import READINGS_AT_ONCE, REFRESHED_AT_ONCE
from tests.bench.figures import Effort, Figure, Measurement

_PROCESSES: Final = 1_000
_CONTEXTS: Final = 10
_FILES: Final = 12
_PODS: Final = 100
_STRETCH_MS: Final = 5.0
_START_NS: Final = 10**12
_MINUTE_NS: Final = 60 * 10**9
_GPUS: Final = GpuMap(
    {minor: GpuUuid(f"GPU-{minor + 1:08x}-0000-4000-8000-000000000000") for minor in range(8)}
)
_GROUP: Final = 0xA06C

T = TypeVar("T")


class _Machine:
    """All events and readings of a probe."""

    def __init__(self) -> None:
        self.now_ns = _START_NS
        self.events: list[RmEvent] = []
        self.held: list[HeldFile] = []
        self.statuses: list[ProcessStatus] = []
        for number in range(_PROCESSES):
            self._process(1_000 + number, number % len(_GPUS.by_minor))

    def _process(self, pid: int, minor: int) -> None:
        files = [pid << 16 | place << 8 for place in range(_FILES)]
        devices = [CONTROL, *[NVIDIA_MAJOR << 20 | minor] * (_FILES - 1)]
        for file, device in zip(files, devices, strict=True):
            self._add_event(pid, RmEventKind.OPEN, file, device)
            self.held.append(HeldFile(pid, pid, file, device, 1, 7))
        client = 0xC1D00000 + pid
        self._alloc(pid, files[0], client, client, 0x41, 0)
        self._alloc(pid, files[0], client, 1, DEVICE, client, minor)
        for place in range(_CONTEXTS):
            self._alloc(pid, files[0], client, 2 + 2 * place, _GROUP, 1)
            self._alloc(pid, files[0], client, 3 + 2 * place, CONTEXT_SHARE.rm_class, 2 + 2 * place)
        pod = PodRef(PodUid(f"pod-{pid % _PODS}"), None, None)
        self.statuses.append(ProcessStatus(ProcessKey(pid, pid), "python3", "S", "/", pod))

    def _alloc(
        self,
        pid: int,
        file: int,
        client: int,
        handle: int,
        rm_class: int,
        parent: int,
        detail: int = NO_INSTANCE,
    ) -> None:
        self._add_event(pid, RmEventKind.ALLOC, file, CONTROL, rm_class, client, parent, handle, detail)

    def _add_event(self, pid: int, kind: RmEventKind, file: int, device: int, *what: int) -> None:
        self.now_ns += 1_000
        object_of = what or (0,) * 5
        self.events.append(RmEvent(self.now_ns, 7, file, pid, pid, device, 3, kind, *object_of))

    def rows(self) -> list[RmObject]:
        """The kernel's table."""
        return [
            RmObject(
                each.client, each.handle, each.at_ns, 7, each.file, each.tgid, each.rm_class, each.parent,
                each.detail, each.tgid,
            )
            for each in self.events
            if each.kind is RmEventKind.ALLOC
        ]  # fmt: skip

    def pods(self) -> Pods:
        """The pods that live."""
        return {PodUid(f"pod-{number}"): PodSeen("ns", f"pod-{number}") for number in range(_PODS)}


class _Run:
    """The longest stretches of one run, in milliseconds."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def timed(self, name: str, work: Callable[[], T]) -> T:
        """Do something at one stretch."""
        began_ns = time.thread_time_ns()
        result = work()
        took_ms = (time.thread_time_ns() - began_ns) / 1e6
        self.longest[name] = max(took_ms, self.longest.get(name, 0.0))
        return result

    def steps(self, name: str, steps: Iterator[None]) -> None:
        """Do something step by step."""
        end = object()
        while self.timed(name, lambda: next(steps, end)) is not end:
            pass


def _one_run(machine: _Machine) -> dict[str, float]:
    run, tracker = _Run(), Tracker(_GPUS)
    held, now_ns = by_process(machine.held), machine.now_ns
    tracker.apply_scan([], _START_NS)
    for at in range(0, len(machine.events), Ring.BATCH):
        run.timed("events", lambda at=at: tracker.handle_events(machine.events[at : at + Ring.BATCH]))  # type: ignore[misc]
    run.steps("first_scan", tracker.apply_scan_steps(held, now_ns + 1))
    for at in range(0, len(machine.statuses), READINGS_AT_ONCE):
        some = machine.statuses[at : at + READINGS_AT_ONCE]
        run.timed("statuses", lambda some=some: tracker.update_statuses(some, now_ns))  # type: ignore[misc]
    while run.timed("records", lambda: tracker.refresh(REFRESHED_AT_ONCE)):
        pass
    run.timed("first_snapshot", lambda: tracker.usage_snapshot(now_ns))
    run.steps("scan", tracker.apply_scan_steps(held, now_ns + 2))
    tracker.handle_process_gone(ProcessKey(1_000, 1_000), now_ns)
    usage = run.timed("snapshot", lambda: tracker.usage_snapshot(now_ns))
    _findings(run, machine, usage)
    rows = live_rows(machine.rows(), {}, tracker.older_files)
    run.steps("rebuild", tracker.rebuild_steps(rows, now_ns + 3))
    return run.longest


def _findings(run: _Run, machine: _Machine, usage: Usage) -> None:
    pods = machine.pods()
    given = {
        Placement(gpu): ((None, tuple(pod.full_name for pod in pods.values())),)
        for gpu in _GPUS.by_minor.values()
    }
    inputs = EvaluationInput(
        now_ns=machine.now_ns + 4 * _MINUTE_NS,
        policy=LeakPolicy(),
        usage=usage,
        gpus=frozenset(_GPUS.by_minor.values()),
        allocated=given,  # type: ignore[arg-type]
        pods=pods,
    )
    found = leaks.step(leaks.inherited((), machine.now_ns), inputs)
    run.timed("findings", lambda: leaks.step(found, replace(inputs, now_ns=inputs.now_ns + 10**9)))


async def _stretches(effort: Effort) -> AsyncGenerator[Figure, None]:
    machine = _Machine()
    # The agent collects by itself, between stretches.
    gc.disable()
    try:
        runs = [_one_run(machine) for _ in range(effort.of(quick=1, usual=5))]
    finally:
        gc.enable()
    for name in runs[0]:
        yield Figure(f"USE.stretch_{name}", min(run[name] for run in runs), "ms", _STRETCH_MS)


STRETCHES: Final = Measurement("USE", "the loop at one stretch with 1,000 processes on GPUs", _stretches)
