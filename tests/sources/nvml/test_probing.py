"""The probes of one GPU as a state machine: every request is answered, none too early, none twice."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.errors import NvmlCode, NvmlError
from agent.model.policy import SECOND_NS
from agent.model.sample import GpuSample
from agent.sources.nvml.probing import (
    DRIVER_CODES,
    MIN_GAP_NS,
    XID_PROBE_DELAY_NS,
    Doubts,
    Probing,
    Verdict,
    driver_failure,
)

PERIOD_NS = 10 * SECOND_NS

times = st.integers(0, 2 * PERIOD_NS)
codes = st.sampled_from([None, NvmlCode.UNKNOWN, NvmlCode.GPU_IS_LOST, NvmlCode.TIMEOUT])


def error(code: int) -> NvmlError:
    return NvmlError("nvmlDeviceGetTemperature", code, "it failed")


class OneGpu(RuleBasedStateMachine):
    """A GPU whose probes begin whenever one is due, and take any time."""

    def __init__(self) -> None:
        super().__init__()
        self.probing = Probing()
        self.now_ns = 1_000 * SECOND_NS
        self.runs = False
        self.began_ns: int | None = None
        self.asked: dict[int, int] = {1: self.now_ns}
        """When each request was made that no probe has answered."""
        self.wants_slow = False
        """Whether the slow readings were asked for since a probe read them."""
        self.xid_at_ns: int | None = None
        """When the first XID was reported since a probe began."""
        self.reports = 0
        self.finished = 0

    @rule(ns=times)
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns
        self.begin_if_due()

    @rule(urgent=st.booleans())
    def is_requested(self, *, urgent: bool) -> None:
        self.probing = self.probing.request(urgent=urgent)
        self.asked[self.probing.requested] = self.now_ns
        self.wants_slow |= urgent
        self.begin_if_due()

    @rule()
    def an_xid_is_reported(self) -> None:
        was_due_ns = self.probing.due_ns
        self.probing = self.probing.request_soon(self.now_ns)
        assert self.probing.due_ns <= was_due_ns
        self.wants_slow = True
        if self.xid_at_ns is None:
            self.xid_at_ns = self.now_ns

    def begin_if_due(self) -> None:
        """Begin a probe as the watcher does."""
        if self.runs or not self.probing.is_due(self.now_ns):
            return
        if not self.asked and self.began_ns is not None:
            assert self.now_ns - self.began_ns >= MIN_GAP_NS
        self.probing = self.probing.begin(self.now_ns)
        self.runs, self.began_ns, self.xid_at_ns = True, self.now_ns, None
        assert self.probing.reads_slow == self.wants_slow
        self.wants_slow = False
        self.read_slow = self.probing.reads_slow

    @precondition(lambda self: self.runs)
    @rule(code=codes, late=st.booleans())
    def a_probe_ends(self, *, code: int | None, late: bool) -> None:
        failure, sample = (None, GpuSample()) if code is None else (error(code), None)
        self.probing = self.probing.with_result(failure, sample).finish(late=late, period_ns=PERIOD_NS)
        assert self.began_ns is not None
        gap_ns = PERIOD_NS if self.xid_at_ns is None else MIN_GAP_NS
        assert self.probing.due_ns == self.began_ns + gap_ns
        self.runs = False
        self.finished += 1
        # What failed read nothing slow.
        self.wants_slow |= code is not None and self.read_slow
        answered = {number for number in self.asked if number <= self.probing.finished}
        assert all(self.asked.pop(number) <= self.probing.began_ns for number in answered)

    @precondition(lambda self: not self.runs)
    @rule()
    def the_outcome_is_reported(self) -> None:
        before = self.probing
        self.probing, verdict = before.reported()
        self.reports += verdict is not Verdict.NOTHING
        if verdict is Verdict.AGAIN:
            self.asked[self.probing.requested] = self.now_ns
            assert before.is_late
            assert self.probing.is_requested
        if verdict is Verdict.REPORT:
            assert not before.is_late or before.failure is not None
        assert self.probing.reported() == (self.probing, Verdict.NOTHING)
        assert not self.probing.is_doubtful

    @invariant()
    def each_request_is_still_to_be_answered(self) -> None:
        if not self.runs:
            assert self.probing.is_requested == bool(self.asked)

    @invariant()
    def the_next_probe_is_due_within_a_period_and_soon_after_an_xid(self) -> None:
        if self.began_ns is None or self.runs:
            return
        assert self.probing.due_ns <= self.began_ns + PERIOD_NS
        if self.xid_at_ns is not None:
            assert self.probing.due_ns <= max(self.began_ns + MIN_GAP_NS, self.xid_at_ns + XID_PROBE_DELAY_NS)
            assert self.probing.due_ns >= self.began_ns + MIN_GAP_NS

    @invariant()
    def a_probe_is_reported_once(self) -> None:
        assert self.reports <= self.finished


OneGpu.TestCase.settings = settings(max_examples=100)
TestOneGpu = OneGpu.TestCase

probings = st.builds(
    lambda began_ns, code: Probing(began_ns=began_ns, failure=None if code is None else error(code)),
    st.integers(0, 100),
    codes,
)


@given(st.dictionaries(st.integers(0, 7), probings, min_size=1), st.integers(0, 100), st.data())
def test_a_doubt_asks_each_other_gpu_whose_probe_is_older_than_the_first_doubt(
    gpus: dict[int, Probing], now_ns: int, data: st.DataObject
) -> None:
    first = data.draw(st.sampled_from(sorted(gpus)))
    doubts = Doubts().raised(first, now_ns)
    second = data.draw(st.sampled_from(sorted(gpus)))
    doubts = doubts.raised(second, now_ns + 50)
    gpus[8] = Probing(began_ns=now_ns)
    wanted = {gpu: each.began_ns < now_ns for gpu, each in gpus.items() if gpu not in {first, second}}
    assert doubts.witnesses(gpus) == wanted
    over = doubts.settled(first).settled(second)
    assert over.raised(first, now_ns + 60).since_ns == now_ns + 60


@given(st.lists(probings, max_size=4))
def test_the_driver_is_gone_when_every_gpu_fails_as_without_it(gpus: list[Probing]) -> None:
    seen = [each.failure.code if each.failure is not None else None for each in gpus]
    found = driver_failure(gpus)
    assert (found is not None) == (bool(seen) and all(code in DRIVER_CODES for code in seen))
    assert found is None or found is gpus[0].failure


def test_a_failed_registration_takes_back_a_probe_that_passed() -> None:
    passed, _ = Probing().begin(1).with_result(None, GpuSample()).finish(late=False, period_ns=1).reported()
    failed, verdict = passed.with_failure(error(NvmlCode.UNKNOWN)).reported()
    assert (verdict, failed.failure is not None, failed.is_blamed) == (Verdict.REPORT, True, True)


def test_an_answer_that_came_too_late_is_asked_for_again() -> None:
    late = Probing().begin(1).with_result(None, GpuSample()).finish(late=True, period_ns=1)
    again, verdict = late.reported()
    assert (verdict, again.is_requested, again.is_unreported) == (Verdict.AGAIN, True, False)
