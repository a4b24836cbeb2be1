"""The rounds of the eBPF source as a state machine: nothing is missed, and nothing is made too often."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.model.policy import SECOND_NS
from agent.model.structs import replace
from agent.sources.ebpf.rounds import LOSS_LOGGED_NS, PAUSE_RATIO, EbpfSettings, Rounds

SETTINGS = EbpfSettings()
PERIOD_NS = SETTINGS.scan_ns

times = st.integers(0, SECOND_NS) | st.integers(0, 40 * SECOND_NS)


class Source(RuleBasedStateMachine):
    """A source whose rounds begin and end at any time, and which is never in a hurry."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1_000 * SECOND_NS
        self.rounds = Rounds().begin(0)
        self.asked_ns: int | None = self.now_ns
        """When a scan was first asked for that none answered."""
        self.due: list[int] = []
        """When scans are due that were asked for since."""
        self.has_news = True
        """Something happened that no snapshot shows."""
        self.counts = [0, 0, 0]
        self.lost = self.reported_lost = 0
        self.logged_ns: int | None = None

    @rule(ns=times)
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns

    @rule(scan=st.booleans(), by=st.none() | st.integers(0, SECOND_NS))
    def something_happens(self, *, scan: bool, by: int | None) -> None:
        by_ns = None if by is None else self.now_ns + by
        self.rounds = self.rounds.happened(scan=scan, scan_by_ns=by_ns)
        self.has_news = True
        if scan and self.asked_ns is None:
            self.asked_ns = self.now_ns
        if by_ns is not None:
            self.due.append(by_ns)

    @precondition(lambda self: self.rounds.needs_scan(self.now_ns, PERIOD_NS))
    @rule()
    def a_scan_begins(self) -> None:
        is_old = self.now_ns - self.rounds.scanned_ns >= PERIOD_NS
        assert is_old or self.asked_ns is not None or min(self.due) <= self.now_ns
        self.rounds = self.rounds.scan(self.now_ns)
        self.asked_ns, self.due = None, []

    @rule()
    def a_scan_is_confirmed(self) -> None:
        """What was asked for while it waited is still to be made."""
        self.rounds = self.rounds.scan(self.now_ns, again=True)

    @rule()
    def a_snapshot_is_made(self) -> None:
        assert self.rounds.is_stale == self.has_news
        self.rounds, self.has_news = self.rounds.snapshot(), False
        self.rounds = replace(self.rounds, published_ns=self.now_ns)

    @precondition(lambda self: self.rounds.needs_readings(self.now_ns, PERIOD_NS))
    @rule()
    def every_process_is_to_be_read_again(self) -> None:
        self.rounds, self.has_news = self.rounds.reread(self.now_ns), True
        assert not self.rounds.needs_readings(self.now_ns, PERIOD_NS)

    @rule(more=st.tuples(*[st.integers(-1, 3)] * 3))
    def the_kernel_counts(self, more: tuple[int, int, int]) -> None:
        seen = [max(0, count + each) for count, each in zip(self.counts, more, strict=True)]
        lost, unkept, rejected = seen
        self.rounds, found = self.rounds.follow(
            lost=lost, unkept=unkept, rejected=rejected, now_ns=self.now_ns
        )
        self.reported_lost += found.lost
        assert (found.is_full, found.is_rejected) == (unkept > self.counts[1], rejected > self.counts[2])
        self.has_news |= found.is_full or found.is_rejected
        if found.is_logged:
            assert found.lost
            assert self.logged_ns is None or self.now_ns - self.logged_ns >= LOSS_LOGGED_NS
            self.logged_ns = self.now_ns
        elif found.lost:
            assert self.logged_ns is not None
            assert self.now_ns - self.logged_ns < LOSS_LOGGED_NS
        self.counts = [max(pair) for pair in zip(self.counts, seen, strict=True)]

    @rule(lost=st.integers(0, 5))
    def another_probe_is_followed(self, lost: int) -> None:
        """Its counts are its own, and what it shows is not known before it is read."""
        self.rounds = self.rounds.begin(lost)
        assert self.rounds.must_publish(self.now_ns, SETTINGS)
        self.counts, self.reported_lost, self.has_news = [lost, 0, 0], lost, True
        self.due = []
        if self.asked_ns is None:
            self.asked_ns = self.now_ns

    @invariant()
    def each_loss_is_reported_once(self) -> None:
        assert self.reported_lost == self.counts[0]

    @invariant()
    def what_was_asked_for_is_made(self) -> None:
        is_due = self.asked_ns is not None or any(due_ns <= self.now_ns for due_ns in self.due)
        assert self.rounds.needs_scan(self.now_ns, PERIOD_NS) or not is_due


Source.TestCase.settings = settings(max_examples=100)
TestSource = Source.TestCase


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.none() | st.integers(0, 2 * 10**9))
def test_a_round_comes_after_the_gap_and_within_a_poll(took_ns: int, spent_ns: int, due: int | None) -> None:
    began_ns = 10**12
    now_ns = began_ns + spent_ns
    rounds = Rounds(scan_due_ns=None if due is None else began_ns + due)
    rest_ns = rounds.rest_ns(began_ns, took_ns, now_ns, SETTINGS)
    rested_ns = now_ns + rest_ns
    assert rested_ns >= began_ns + SETTINGS.gap_ns
    assert rested_ns >= began_ns + min(PAUSE_RATIO * took_ns, SETTINGS.poll_ns)
    assert rest_ns == 0 or rested_ns <= began_ns + SETTINGS.poll_ns
    woken_ns = rested_ns + rounds.idle_ns(began_ns, rested_ns, SETTINGS)
    until_ns = SETTINGS.poll_ns if due is None else min(SETTINGS.poll_ns, due)
    assert woken_ns == max(rested_ns, began_ns + until_ns)


def test_the_earliest_of_several_scans_counts() -> None:
    rounds = Rounds()
    for by_ns in (9, 5, None, 7):
        rounds = rounds.happened(scan_by_ns=by_ns)
    assert rounds.scan_due_ns == 5


def test_a_failed_load_is_tried_again_when_it_is_due() -> None:
    assert not Rounds().retries_load(10**15)
    assert [Rounds(reload_due_ns=5).retries_load(now_ns) for now_ns in (4, 5)] == [False, True]


def test_a_snapshot_like_the_last_one_is_published_once_in_a_period() -> None:
    assert Rounds().must_publish(0, SETTINGS)
    published = Rounds(published_ns=1)
    later = (SETTINGS.publish_ns, SETTINGS.publish_ns + 1)
    assert [published.must_publish(now_ns, SETTINGS) for now_ns in later] == [False, True]
