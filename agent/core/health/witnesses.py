"""Two witnesses for a line of the kernel log: whether something else confirms or denies it.

Invariants: a line alone makes no GPU unhealthy that the next probe of NVML answers for. NVML's event of the
same XID, a failing or overdue call, the recovery action, a reading of what the XID is about and the PCI
configuration space confirm. Clean probes deny, where the driver answers with the recovery action or the
fault is one with which no GPU answers; otherwise the line stays shown until the GPU was reset. A line from
before the agent listened is not contradicted by NVML's silence, and no user can write the driver's numbered
form: it stands unless the recovery action is None. So does one in that form from while NVML's events were
not heard (core.freshness).
"""

from collections.abc import Mapping
from enum import Enum, auto

import msgspec

from agent.core.health.samples import RECOVER_IMEX_DOMAIN
from agent.core.reasons import REASON_SPECS
from agent.core.xids import RECOVERY_ACTION_CHANGED
from agent.model.facts import KERNEL_LOG
from agent.model.health import Condition, ConditionKey, Reason, Recovery
from agent.model.sample import GpuSample


class UnconfirmedFault(msgspec.Struct, frozen=True):
    """A fault of the kernel log, until a second witness confirms or denies it."""

    condition: Condition
    """What is raised once it is confirmed."""
    readings: frozenset[Reason]
    """Readings that confirm it, beside what confirms any."""
    is_live: bool
    """The agent listened to NVML when the line was written, as far as was known then."""
    in_words: bool = False
    """It is not in the driver's numbered form."""

    @property
    def shown_as(self) -> ConditionKey:
        """The key of the condition that shows it meanwhile."""
        return shown_key(self.condition.key)


def shown_key(key: ConditionKey) -> ConditionKey:
    """Return the key of the condition that shows what a key is of until it is confirmed."""
    is_reading = key.reason is Reason.RECOVERY_ACTION
    code = RECOVERY_ACTION_CHANGED if is_reading else key.code
    return key._replace(reason=Reason.UNCONFIRMED, code=code)


class Verdict(Enum):
    """What became of a unconfirmed."""

    CONFIRMED = auto()
    DENIED = auto()
    OPEN = auto()


def verdict_on(
    unconfirmed: UnconfirmedFault,
    conditions: Mapping[ConditionKey, Condition],
    sample: GpuSample | None,
    *,
    is_probed: bool,
    deaf_since_ns: int | None = None,
) -> Verdict:
    """Return what the conditions and readings of its GPU make of a unconfirmed.

    ``deaf_since_ns`` is since when NVML's events are not heard, while they are not.
    """
    if any(_is_witness(unconfirmed, condition) for condition in conditions.values()):
        return Verdict.CONFIRMED
    reported = unconfirmed.condition
    is_reading = reported.reason is Reason.RECOVERY_ACTION
    is_unheard = deaf_since_ns is not None and not unconfirmed.in_words and reported.last_ns >= deaf_since_ns
    if (unconfirmed.is_live and not is_unheard and not is_reading) or not (is_probed or sample is not None):
        return Verdict.OPEN
    if reported.recovery is Recovery.BY_HAND or not reads_action(sample):
        return Verdict.CONFIRMED
    # The newest reading may be older than the line; the next one confirms it, or clean probes clear it.
    return Verdict.OPEN if unconfirmed.is_live and not is_reading else Verdict.DENIED


def reads_action(sample: GpuSample | None) -> bool:
    """Return whether the driver answers with a recovery action of the GPU."""
    return sample is not None and sample.recovery_action not in {None, RECOVER_IMEX_DOMAIN}


def _is_witness(unconfirmed: UnconfirmedFault, condition: Condition) -> bool:
    reported = unconfirmed.condition
    if condition.placement.gpu != reported.placement.gpu or condition.key.source == KERNEL_LOG:
        return False
    if condition.reason is Reason.XID:
        is_same = condition.key.code == reported.key.code and condition.placement.overlaps(reported.placement)
        return is_same and condition.flips and reported.reason is Reason.XID
    if reported.recovery is Recovery.SELF_CLEARING:
        return False
    return (condition.flips and REASON_SPECS[condition.reason].confirms_log_line) or (
        condition.lasts and condition.reason in unconfirmed.readings
    )
