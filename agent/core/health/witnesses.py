"""Two witnesses for what the kernel log says: whether something else confirms or denies it.

Invariants: a line alone takes no GPU out that NVML answers for at the probe that follows. NVML's event of the
same XID, a failing or overdue call, the recovery action, a reading of what the XID is about and the PCI
configuration space confirm. Clean probes deny, where the driver offers the recovery action or the fault is
one with which no GPU answers; otherwise the line stays shown until the GPU was reset. A line from before the
agent listened is not contradicted by NVML's silence, and no user can write the driver's numbered form: it
stands unless the recovery action says that nothing is to be done. So does one in that form from while NVML's
events were not heard (core.freshness).
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


class Suspect(msgspec.Struct, frozen=True):
    """What a line says, until something else confirms or denies it."""

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
    """What became of a suspect."""

    CONFIRMED = auto()
    DENIED = auto()
    OPEN = auto()


def verdict_on(
    suspect: Suspect,
    conditions: Mapping[ConditionKey, Condition],
    sample: GpuSample | None,
    *,
    is_probed: bool,
    deaf_since_ns: int | None = None,
) -> Verdict:
    """Return what the conditions and readings of its GPU make of a suspect.

    ``deaf_since_ns`` is since when NVML's events are not heard, while they are not.
    """
    if any(_is_witness(suspect, condition) for condition in conditions.values()):
        return Verdict.CONFIRMED
    said = suspect.condition
    is_reading = said.reason is Reason.RECOVERY_ACTION
    is_unheard = deaf_since_ns is not None and not suspect.in_words and said.last_ns >= deaf_since_ns
    if (suspect.is_live and not is_unheard and not is_reading) or not (is_probed or sample is not None):
        return Verdict.OPEN
    if said.recovery is Recovery.BY_HAND or not offers_action(sample):
        return Verdict.CONFIRMED
    return Verdict.DENIED


def offers_action(sample: GpuSample | None) -> bool:
    """Return whether the driver says itself what is to be done with a GPU."""
    return sample is not None and sample.recovery_action not in {None, RECOVER_IMEX_DOMAIN}


def _is_witness(suspect: Suspect, condition: Condition) -> bool:
    said = suspect.condition
    if condition.placement.gpu != said.placement.gpu or condition.key.source == KERNEL_LOG:
        return False
    if condition.reason is Reason.XID:
        is_same = condition.key.code == said.key.code and condition.placement.overlaps(said.placement)
        return is_same and condition.flips and said.reason is Reason.XID
    if said.recovery is Recovery.SELF_CLEARING:
        return False
    return (condition.flips and REASON_SPECS[condition.reason].confirms_log_line) or (
        condition.lasts and condition.reason in suspect.readings
    )
