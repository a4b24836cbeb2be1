"""The watchers against a machine whose GPUs come, go, are renumbered and hang at any time."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.model.ids import GpuUuid
from agent.sources.nvml.listing import Found, Watched, found, surplus, unwatched

MOST = 5
ALL = [GpuUuid(f"GPU-{number}") for number in range(MOST + 2)]

places = st.integers(0, MOST)


@dataclass
class Watcher:
    """A watcher as the session has it, whose probes are answered by the machine below."""

    index: int
    uuid: GpuUuid | None = None
    is_gone: bool = False
    answers: bool = False
    is_overdue: bool = False

    @property
    def watched(self) -> Watched:
        return Watched(self.index, self.uuid, self.is_gone, self.answers, self.is_overdue)


class Machine(RuleBasedStateMachine):
    """What NVML lists, and a session that polls the count and probes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[GpuUuid] = []
        """By index."""
        self.hanging: set[GpuUuid] = set()
        self.watchers: list[Watcher] = []
        self.list_changed = False

    # The machine

    @precondition(lambda self: len(self.listed) < MOST)
    @rule(at=places, number=places)
    def appears(self, at: int, number: int) -> None:
        """A GPU that was there before may return."""
        away = [gpu for gpu in ALL if gpu not in self.listed]
        self.listed.insert(min(at, len(self.listed)), away[number % len(away)])

    @precondition(lambda self: self.listed)
    @rule(at=places)
    def disappears(self, at: int) -> None:
        gpu = self.listed.pop(at % len(self.listed))
        self.hanging.discard(gpu)

    @precondition(lambda self: self.listed)
    @rule(at=places)
    def hangs(self, at: int) -> None:
        self.hanging.add(self.listed[at % len(self.listed)])

    @rule()
    def answer_again(self) -> None:
        self.hanging.clear()

    # The session

    @precondition(lambda self: self.watchers)
    @rule(at=places)
    def probe_one(self, at: int) -> None:
        self.probe(self.watchers[at % len(self.watchers)])

    def probe(self, watcher: Watcher) -> None:
        """Probe a GPU by its address, or what has the watcher's index now."""
        if watcher.is_gone:
            return
        if watcher.uuid is None:
            gpu = self.listed[watcher.index] if watcher.index < len(self.listed) else None
        else:
            gpu = watcher.uuid if watcher.uuid in self.listed else None
        if gpu is None:
            watcher.is_gone = self.list_changed = True
            watcher.answers = watcher.is_overdue = False
            return
        if gpu in self.hanging:
            watcher.answers, watcher.is_overdue = False, True
            return
        index = self.listed.index(gpu)
        others = [each.watched for each in self.watchers if each is not watcher]
        seen = found(watcher.watched, others, gpu, index)
        if seen is Found.TWICE:
            watcher.is_gone = self.list_changed = True
            return
        self.list_changed |= seen is Found.MOVED
        watcher.uuid, watcher.index = gpu, index
        watcher.answers, watcher.is_overdue = True, False

    @rule()
    def poll(self) -> None:
        """Reconcile as the session does."""
        count = len(self.listed)
        if count == len(self.watchers) and not self.list_changed:
            return
        for watcher in self.watchers:
            self.probe(watcher)
        before = list(self.watchers)
        dropped = [before[each] for each in surplus([each.watched for each in before], count)]
        assert [each for each in dropped if each.uuid is not None and not each.is_gone] == []
        self.watchers = [each for each in before if each not in dropped]
        self.list_changed = False
        added = [Watcher(index) for index in unwatched([each.watched for each in self.watchers], count)]
        self.watchers += added
        for watcher in added:
            self.probe(watcher)
        assert len(self.watchers) <= count

    # What holds

    @invariant()
    def no_gpu_has_two_watchers(self) -> None:
        known = [each.uuid for each in self.watchers if each.uuid is not None and not each.is_gone]
        assert len(known) == len(set(known))

    @invariant()
    def no_list_is_emitted_with_an_index_twice(self) -> None:
        if not self.list_changed:
            indexes = [each.index for each in self.watchers if each.answers]
            assert len(indexes) == len(set(indexes))

    @invariant()
    def once_all_answer_each_gpu_has_one_watcher(self) -> None:
        later = Machine()
        later.listed = list(self.listed)
        later.watchers = [Watcher(*_fields(each)) for each in self.watchers]
        later.list_changed = self.list_changed
        for _ in range(4):
            for watcher in later.watchers:
                later.probe(watcher)
            later.poll()
        assert {each.uuid: each.index for each in later.watchers} == {
            gpu: index for index, gpu in enumerate(self.listed)
        }


def _fields(each: Watcher) -> tuple[int, GpuUuid | None, bool, bool, bool]:
    return each.index, each.uuid, each.is_gone, each.answers, each.is_overdue


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=40, max_examples=200)


def test_of_gpus_that_do_not_answer_the_one_that_hangs_is_dropped_last() -> None:
    """A hanging call reports nothing about the list; an error may be the answer about a GPU that is gone."""
    gpu = GpuUuid("GPU-1")
    watched = [Watched(0, gpu, is_overdue=True), Watched(1, gpu), Watched(2), Watched(3, gpu, answers=True)]
    assert [surplus(watched, count) for count in (4, 3, 2, 1, 0)] == [
        [],
        [2],
        [2, 1],
        [2, 1, 0],
        [2, 1, 0],
    ]
