"""The MPS control daemon: without it no device that MPS shares can be used.

Invariants: its absence marks exactly the GPUs that MPS shares, from before the first list on until it is
seen to serve. It is nobody's fault on a GPU, so it counts for no flapping.
"""

from typing import Final

from agent.core.health.conditions import Conditions
from agent.core.health.inventory import Offers
from agent.core.health.needs import with_need
from agent.model import facts
from agent.model.health import Reason
from agent.model.ids import GpuUuid
from agent.model.sharing import Sharing

NOT_LOOKED: Final = "The MPS control daemon was not looked for yet"


def with_daemon(
    active: Conditions, offers: Offers, sharing: Sharing, *, ready: bool | None, missing: str, now_ns: int
) -> Conditions:
    """Return the conditions with one on the GPUs that MPS shares, for as long as the daemon is not ready.

    ``ready`` None: nobody looked yet; ``missing``: what is missing of it.
    """
    return with_need(
        active,
        Reason.MPS_NOT_READY,
        shared_gpus(offers) if sharing.strategy == "mps" else (),
        source=facts.MPS,
        missing=None if ready else missing or NOT_LOOKED,
        now_ns=now_ns,
    )


def shared_gpus(offers: Offers) -> frozenset[GpuUuid]:
    """Return the GPUs of which replicas are offered."""
    return frozenset(
        offer.placement.gpu for offered in offers.values() for offer in offered if offer.replica is not None
    )
