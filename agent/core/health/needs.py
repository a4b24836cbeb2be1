"""What some GPUs need of the node beside the driver: without it none of their devices can be used.

Invariants: what is missing marks exactly the GPUs that need it. Who needs nothing has no condition, and
forgets at once what was missing before.
"""

from collections.abc import Collection

from agent.core.health import conditions
from agent.core.health.conditions import Conditions
from agent.model.health import Reason
from agent.model.ids import GpuUuid, Placement, SourceName


def with_need(
    active: Conditions,
    reason: Reason,
    gpus: Collection[GpuUuid],
    *,
    source: SourceName,
    missing: str | None,
    now_ns: int,
) -> Conditions:
    """Return the conditions with one on ``gpus``, which are all that need it, for as long as it is missing.

    ``missing`` says what is missing; None: nothing is.
    """
    active = without_need(active, reason, but=gpus)
    for gpu in sorted(gpus):
        if missing is None:
            active = conditions.eased(active, reason, gpu)
            continue
        active = conditions.raised(
            active,
            source=source,
            reason=reason,
            placement=Placement(gpu),
            message=missing,
            lasts=True,
            now_ns=now_ns,
        )
    return active


def without_need(active: Conditions, reason: Reason, *, but: Collection[GpuUuid] = ()) -> Conditions:
    """Return the conditions without those of a reason, except on some GPUs."""
    kept = {
        key: condition
        for key, condition in active.items()
        if key.reason is not reason or key.placement.gpu in but
    }
    return active if len(kept) == len(active) else kept
