"""What some GPUs need of the node beside the driver: an IMEX channel, the MPS control daemon.

Invariants: what is missing marks exactly the GPUs that need it, and it is not the fault of a GPU, so it
counts for no flapping. A GPU that needs nothing has no condition, and what was missing before is forgotten
at once. A required IMEX channel that is missing marks every GPU; until the nodes were read, nothing is
known of a channel, and no condition is raised. The MPS control daemon is missing from before the first
list until it serves.

Source: NVIDIA/k8s-device-plugin:internal/imex/imex.go, whose plugin does not start without a channel that
is required.
"""

from collections.abc import Collection, Iterable
from typing import Final

from agent.core.allocation.injection import missing_channels
from agent.core.health import conditions
from agent.core.health.conditions import Conditions
from agent.core.health.inventory import AdvertisedDevices
from agent.model import facts
from agent.model.health import Reason
from agent.model.ids import GpuUuid, Placement, SourceName
from agent.model.policy import Injection
from agent.model.sharing import Sharing


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

    ``missing``: what is missing; None: nothing.
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


def with_channels(
    active: Conditions,
    gpus: Iterable[GpuUuid],
    injection: Injection,
    control_nodes: Collection[str] | None,
    *,
    now_ns: int,
) -> Conditions:
    """Return the conditions with one on every GPU while a channel that is required is missing.

    ``control_nodes`` are those that exist; None: not scanned yet.
    """
    if not injection.imex_required:
        return without_need(active, Reason.IMEX_CHANNEL_MISSING)
    if control_nodes is None:
        return active
    missing = missing_channels(injection, control_nodes)
    return with_need(
        active,
        Reason.IMEX_CHANNEL_MISSING,
        tuple(gpus),
        source=facts.NVML,
        missing=f"{', '.join(missing[:4])} does not exist and is required" if missing else None,
        now_ns=now_ns,
    )


NOT_PROBED_YET: Final = "The MPS control daemon was not probed yet"


def with_daemon(
    active: Conditions,
    advertised: AdvertisedDevices,
    sharing: Sharing,
    *,
    ready: bool | None,
    missing: str,
    now_ns: int,
) -> Conditions:
    """Return the conditions with one on the GPUs that MPS shares, for as long as the daemon is not ready.

    ``ready`` None: not probed yet; ``missing``: what is missing of it.
    """
    return with_need(
        active,
        Reason.MPS_NOT_READY,
        shared_gpus(advertised) if sharing.strategy == "mps" else (),
        source=facts.MPS,
        missing=None if ready else missing or NOT_PROBED_YET,
        now_ns=now_ns,
    )


def shared_gpus(advertised: AdvertisedDevices) -> frozenset[GpuUuid]:
    """Return the GPUs with replicas."""
    return frozenset(
        device.placement.gpu
        for devices in advertised.values()
        for device in devices
        if device.replica is not None
    )
