"""What a standing-by agent emits to its engine when it takes over."""

from typing import Final

import pytest

from agent.model import facts
from agent.model.facts import Fact
from agent.model.health import Reason
from agent.model.ids import GpuUuid
from agent.model.policy import SECOND_NS
from agent.runtime.standby import RECENT_NS, RecentFacts

U0, U1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")
READY: Final = facts.DriverReady("570", "12", (12, 8))
GONE: Final = facts.DriverUnavailable(Reason.DRIVER_NOT_LOADED, "no driver")
LISTED: Final = facts.GpusEnumerated(())
PASSED: Final = facts.GpuProbePassed(U0)
FAILED: Final = facts.GpuCallFailed(U0, 999, "call", "unknown")
OVERDUE: Final = facts.GpuCallOverdue(U0, "call", 5)
HUNG: Final = facts.DriverCallOverdue("nvmlInit", 5)
ANSWERED: Final = facts.DriverCallAnswered("nvmlInit")
XID: Final = facts.XidReported(U0, 79)


def recalled(*seen: Fact, age_ns: int = 0) -> list[Fact]:
    recent = RecentFacts()
    for fact in seen:
        recent.note(fact, 100 * SECOND_NS)
    return list(recent.recall(100 * SECOND_NS + age_ns))


@pytest.mark.parametrize(
    ("seen", "kept"),
    [
        ([READY, LISTED, PASSED], [READY, LISTED, PASSED]),
        ([READY, LISTED, PASSED, LISTED], [READY, PASSED, LISTED]),
        ([FAILED, PASSED], [PASSED]),
        ([PASSED, FAILED], [PASSED, FAILED]),
        ([OVERDUE, PASSED], [PASSED]),
        ([OVERDUE, facts.GpuProbePassed(U1)], [OVERDUE, facts.GpuProbePassed(U1)]),
        ([GONE, READY], [READY]),
        ([READY, GONE], [READY, GONE]),
        ([HUNG, ANSWERED], [ANSWERED]),
        ([HUNG, READY], [READY]),
        ([HUNG], [HUNG]),
    ],
)
def test_only_what_is_still_true_is_emitted(seen: list[Fact], kept: list[Fact]) -> None:
    assert recalled(*seen) == kept


def test_an_xid_of_the_last_moments_is_emitted_because_the_agent_before_may_not_have_written_it_down() -> (
    None
):
    assert recalled(XID, age_ns=RECENT_NS) == [XID]


def test_an_older_xid_is_not_emitted_again() -> None:
    assert recalled(XID, age_ns=RECENT_NS + 1) == []


def test_old_states_are_emitted_however_old_they_are() -> None:
    assert recalled(READY, LISTED, age_ns=10**18) == [READY, LISTED]


def test_losses_are_not_remembered() -> None:
    assert recalled(facts.FactsLost(facts.NVML, count=3)) == []


def test_the_room_needed_is_the_number_of_keys() -> None:
    recent = RecentFacts()
    for number in range(10_000):
        recent.note(facts.XidReported(U0, number % 7), number)
    assert len(list(recent.recall(10_000))) == 7
